"""The numbers of a Checkpointer in TensorBoard and Prometheus, read back with their own readers."""

from __future__ import annotations

import builtins
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pyckpt import events, exporters


def some_events(rank: int = 0) -> list[events.Event]:
    base: dict[str, Any] = {"path": Path("runs/a/step-00000010"), "rank": rank, "time": 1000.0}
    return [
        events.SaveStarted(step=10, queue_depth=1, **base),
        events.SaveSkipped(step=11, queue_depth=1, **base),
        events.SaveStaged(step=10, seconds=0.25, **base),
        events.SaveWritten(step=10, seconds=0.5, bytes=10**9, statistics=None, **base),
        events.SaveCommitted(
            step=10,
            seconds=2.0,
            blocked_seconds=math.nan,
            bytes=10**9,
            checkpoint_bytes=4 * 10**9 if rank == 0 else None,
            lost_seconds=0.125,
            memory_bytes=2**21,
            queue_depth=0,
            **base,
        ),
        events.SaveFailed(step=20, seconds=1.0, error=OSError("full"), queue_depth=0, **base),
        events.Restored(step=10, place=base["path"], seconds=4.0, bytes=10**9, **base),
        events.Pruned(step=5, **base),
    ]


class Scalars:
    """Records what is added to a SummaryWriter."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.added.append((tag, scalar_value, global_step))


EXPECTED = [
    ("queue_depth", 1, 10),
    ("queue_depth", 1, 11),
    ("skipped", 1, 11),
    ("staged_seconds", 0.25, 10),
    ("written_seconds", 0.5, 10),
    ("queue_depth", 0, 10),
    ("committed_seconds", 2.0, 10),
    ("bytes", 10**9, 10),
    ("checkpoint_bytes", 4 * 10**9, 10),
    ("gigabytes_per_second", 2.0, 10),
    ("lost_seconds", 0.125, 10),
    ("memory_bytes", 2**21, 10),
    ("queue_depth", 0, 20),
    ("failed", 1, 20),
    ("restore_seconds", 4.0, 10),
    ("restore_bytes", 10**9, 10),
]


def test_tensorboard_gets_each_number_at_its_step() -> None:
    writer = Scalars()
    exporter = exporters.TensorBoard(writer, prefix="ckpt/")
    for event in some_events():
        exporter(event)
    assert writer.added == [(f"ckpt/{tag}", value, step) for tag, value, step in EXPECTED]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_shows_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:  # type: ignore[no-untyped-call]
        exporter = exporters.TensorBoard(writer)
        for event in some_events():
            exporter(event)
    shown = EventAccumulator(os.fspath(tmp_path)).Reload()
    (speed,) = shown.Scalars("pyckpt/gigabytes_per_second")
    assert (speed.value, speed.step) == (2.0, 10)


def test_tensorboard_needs_a_writer() -> None:
    with pytest.raises(TypeError, match=r"needs a torch\.utils\.tensorboard\.SummaryWriter"):
        exporters.TensorBoard("runs/a")  # type: ignore[arg-type]


PROMETHEUS = {
    "pyckpt_queue_depth": 0,
    "pyckpt_staged_seconds": 0.25,
    "pyckpt_written_seconds": 0.5,
    "pyckpt_committed_seconds": 2.0,
    "pyckpt_bytes": 1e9,
    "pyckpt_checkpoint_bytes": 4e9,
    "pyckpt_bytes_per_second": 2e9,
    "pyckpt_lost_seconds": 0.125,
    "pyckpt_memory_bytes": 2.0**21,
    "pyckpt_restore_seconds": 4.0,
    "pyckpt_restore_bytes": 1e9,
    "pyckpt_restored_step": 10,
    "pyckpt_committed_step": 10,
    "pyckpt_committed_timestamp_seconds": 1000.0,
    "pyckpt_saves_started_total": 1,
    "pyckpt_saves_committed_total": 1,
    "pyckpt_saves_failed_total": 1,
    "pyckpt_saves_skipped_total": 1,
    "pyckpt_restored_total": 1,
    "pyckpt_pruned_total": 1,
}


def test_the_text_file_is_replaced_after_each_event(tmp_path: Path) -> None:
    path = tmp_path / "pyckpt-1.prom"
    exporter = exporters.PrometheusFile(tmp_path / "pyckpt-{rank}.prom", {"job": 'a "b"\\'})
    seen = set()
    for event in some_events(rank=1):
        exporter(event)
        assert [found.name for found in tmp_path.iterdir()] == [path.name]
        seen.add(path.stat().st_ino)
    assert len(seen) > 1
    text = path.read_text()
    assert text == exporter.text()
    labels = r'{rank="1",job="a \"b\"\\"}'
    numbers = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.partition(labels)
            numbers[name] = float(value)
    expected = {**PROMETHEUS, "pyckpt_bytes_per_second": 0.5e9}
    del expected["pyckpt_checkpoint_bytes"]  # known to rank 0
    assert numbers == expected
    for name in numbers:
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# TYPE {name} {kind}\n" in text


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    exporter = exporters.PrometheusFile(tmp_path / "a.prom")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(PermissionError):
            exporter(some_events()[0])
    assert list(tmp_path.iterdir()) == []
    exporter(some_events()[0])
    assert "pyckpt_saves_started_total" in (tmp_path / "a.prom").read_text()


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.prom")
    with pytest.raises(FileExistsError, match="no regular file"):
        exporters.PrometheusFile(tmp_path / "a.prom")(some_events()[0])
    assert (tmp_path / "a.prom").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_the_collector_would_pass_over_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must end with \.prom"):
        exporters.PrometheusFile("metrics.txt")


@pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="needs prometheus_client"
)
def test_prometheus_reads_both(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    registry = CollectorRegistry(auto_describe=True)
    shown = exporters.Prometheus(registry, {"job": "a"})
    written = exporters.PrometheusFile(tmp_path / "a.prom", {"job": "a"})
    assert not generate_latest(registry), "before the first event it is not known of which rank"
    for event in some_events():
        shown(event)
        written(event)
    for text in (generate_latest(registry).decode(), (tmp_path / "a.prom").read_text()):
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        assert {s.name: s.value for s in samples} == PROMETHEUS
        assert all(s.labels == {"rank": "0", "job": "a"} for s in samples)
    with pytest.raises(ValueError, match="Duplicated"):
        exporters.Prometheus(registry)


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "prometheus_client":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "prometheus_client", raising=False)
    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install prometheus-client.*PrometheusFile needs"):
        exporters.Prometheus()
