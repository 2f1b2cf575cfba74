"""Numbers of a `Checkpointer` for TensorBoard and Prometheus: callables for its ``on_event``. ::

    writer = torch.utils.tensorboard.SummaryWriter("runs/a/tensorboard")
    board = pyckpt.exporters.TensorBoard(writer)
    with pyckpt.Checkpointer("runs/a", on_event=board) as checkpointer:
        ...

Each rank has a Checkpointer, and each has its own numbers. To see those of rank 0 alone, pass
``on_event`` on rank 0 alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pyckpt import locks
from pyckpt.format import files
from pyckpt.train.events import (
    Event,
    Pruned,
    Restored,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    SaveWritten,
)

__all__ = ["Prometheus", "PrometheusFile", "TensorBoard"]


class _Scalars(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


class TensorBoard:
    """Adds the numbers of each save and restore as scalars, at its step.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or another object with its
            ``add_scalar``. It stays open; close it after the Checkpointer.
        prefix: what the tags begin with.

    Raises:
        TypeError: the writer has no ``add_scalar``.
    """

    def __init__(self, writer: _Scalars, prefix: str = "pyckpt/") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                f"TensorBoard needs a torch.utils.tensorboard.SummaryWriter (pip install "
                f"tensorboard), not a {type(writer).__name__}"
            )
        self._writer = writer
        self._prefix = prefix
        self._counts = {SaveFailed: 0, SaveSkipped: 0}

    def __call__(self, event: Event) -> None:
        for tag, value in _scalars(event):
            if not math.isnan(value):
                self._writer.add_scalar(f"{self._prefix}{tag}", value, event.step)
        kind = type(event)
        if kind in self._counts:
            self._counts[kind] += 1
            tag = "failed" if kind is SaveFailed else "skipped"
            self._writer.add_scalar(f"{self._prefix}{tag}", self._counts[kind], event.step)


def _scalars(event: Event) -> Iterator[tuple[str, float]]:
    """The numbers of an event, by names without units' abbreviations."""
    if isinstance(event, SaveStarted | SaveSkipped | SaveCommitted | SaveFailed):
        yield "queue_depth", event.queue_depth
    if isinstance(event, SaveStaged):
        yield "staged_seconds", event.seconds
    elif isinstance(event, SaveWritten):
        yield "written_seconds", event.seconds
    elif isinstance(event, SaveCommitted):
        yield "committed_seconds", event.seconds
        yield "blocked_seconds", event.blocked_seconds
        yield "bytes", event.bytes
        if event.checkpoint_bytes is not None:
            yield "checkpoint_bytes", event.checkpoint_bytes
        yield "gigabytes_per_second", event.gigabytes_per_second
        yield "lost_seconds", event.lost_seconds
        yield "memory_bytes", event.memory_bytes
    elif isinstance(event, Restored):
        yield "restore_seconds", event.seconds
        yield "restore_bytes", event.bytes


class _Sample(NamedTuple):
    """A number, as Prometheus has it."""

    name: str
    kind: str
    """"gauge" or "counter"."""
    help: str
    value: float


# The gauges that are named otherwise than in TensorBoard, or are not there: Prometheus' base units.
_HELP = {
    "queue_depth": "Saves that are under way.",
    "staged_seconds": "From the call of the last save until its state was copied.",
    "written_seconds": "From the call of the last save until the data of this rank was on disk.",
    "committed_seconds": "From the call of the last save until it was committed.",
    "blocked_seconds": "How long the call of the last save took.",
    "bytes": "That this rank wrote in the last save.",
    "checkpoint_bytes": "Of the last checkpoint, of all ranks.",
    "bytes_per_second": "Of the last save: bytes of the checkpoint over committed_seconds.",
    "lost_seconds": "What all saves have cost training so far.",
    "memory_bytes": "That the engine holds for copies of the state.",
    "restore_seconds": "How long the last restore took.",
    "restore_bytes": "That this rank read in the last restore.",
    "restored_step": "Step of the last restore.",
    "committed_step": "Step of the last save that was committed.",
    "committed_timestamp_seconds": "When the last save was committed, in seconds since 1970.",
}
_COUNTS = {
    SaveStarted: ("started", "Saves that were started."),
    SaveCommitted: ("committed", "Saves that were committed."),
    SaveFailed: ("failed", "Saves that failed."),
    SaveSkipped: ("skipped", "Saves that were left out since another one was under way."),
    Restored: ("restored", "Restores."),
    Pruned: ("pruned", "Checkpoints that were removed."),
}


class _Numbers:
    """The last number of each kind, and counts. Any thread may look."""

    def __init__(self) -> None:
        self._lock = locks.fork_safe_lock()
        self._gauges: dict[str, float] = {}
        self._counts: dict[type[Event], int] = dict.fromkeys(_COUNTS, 0)
        self.rank = 0
        self.is_told = False

    def take(self, event: Event) -> None:
        with self._lock:
            self.rank, self.is_told = event.rank, True
            if type(event) in self._counts:
                self._counts[type(event)] += 1
            found = dict(_scalars(event))
            if "gigabytes_per_second" in found:
                found["bytes_per_second"] = found.pop("gigabytes_per_second") * 1e9
            if isinstance(event, SaveCommitted):
                found["committed_step"] = event.step
                found["committed_timestamp_seconds"] = event.time
            elif isinstance(event, Restored):
                found["restored_step"] = event.step
            self._gauges |= {name: one for name, one in found.items() if not math.isnan(one)}

    def samples(self) -> list[_Sample]:
        with self._lock:
            gauges = [
                _Sample(f"pyckpt_{name}", "gauge", text, self._gauges[name])
                for name, text in _HELP.items()
                if name in self._gauges
            ]
            return gauges + [
                _Sample(f"pyckpt_saves_{name}_total", "counter", text, self._counts[kind])
                if kind not in (Restored, Pruned)
                else _Sample(f"pyckpt_{name}_total", "counter", text, self._counts[kind])
                for kind, (name, text) in _COUNTS.items()
            ]


class Prometheus:
    """Shows the numbers to a Prometheus server, through the package ``prometheus_client``. ::

        prometheus_client.start_http_server(9400)
        pyckpt.Checkpointer("runs/a", on_event=pyckpt.exporters.Prometheus())

    Each has the label ``rank``.

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; by default the package's own.
        labels: more labels, by name.

    Raises:
        ImportError: the package is not installed.
        ValueError: the registry has such numbers already: make one Prometheus for a process.
    """

    def __init__(self, registry: Any = None, labels: Mapping[str, str] | None = None) -> None:
        try:
            from prometheus_client import REGISTRY
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        except ImportError as error:
            raise ImportError(
                "pyckpt.exporters.Prometheus needs prometheus_client: pip install "
                "prometheus-client. pyckpt.exporters.PrometheusFile needs no package"
            ) from error
        self._families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        self._labels = dict(labels or {})
        self._numbers = _Numbers()
        (REGISTRY if registry is None else registry).register(self)

    def __call__(self, event: Event) -> None:
        self._numbers.take(event)

    def describe(self) -> Iterator[Any]:
        """For ``prometheus_client``: the names, by which it sees that two exporters share them."""
        for sample in self._numbers.samples():
            yield self._families[sample.kind](sample.name, sample.help)

    def collect(self) -> Iterator[Any]:
        """For ``prometheus_client``: the numbers now; none before the first event, which tells of
        which rank they are."""
        if not self._numbers.is_told:
            return
        labels = {"rank": str(self._numbers.rank), **self._labels}
        for sample in self._numbers.samples():
            family = self._families[sample.kind](sample.name, sample.help, labels=list(labels))
            family.add_metric(list(labels.values()), sample.value)
            yield family


class PrometheusFile:
    """Writes the numbers into a file in Prometheus' text format, for the textfile collector of
    ``node_exporter``. Needs no package.

    The file is replaced in one piece after each event. If that fails, the log says so, and the next
    event tries again.

    Args:
        path: the file, whose name ends with ``.prom``. ``{rank}`` in it becomes the number of the
            rank: ranks of one machine need files of their own.
        labels: labels besides ``rank``, by name.

    Raises:
        ValueError: the name ends otherwise, and the collector would not read the file.
    """

    def __init__(
        self, path: str | os.PathLike[str], labels: Mapping[str, str] | None = None
    ) -> None:
        self._path = os.fspath(path)
        if not self._path.endswith(".prom"):
            raise ValueError(f"{self._path!r} must end with .prom, or node_exporter passes it over")
        self._labels = dict(labels or {})
        self._numbers = _Numbers()

    def __call__(self, event: Event) -> None:
        self._numbers.take(event)
        path = Path(self._path.replace("{rank}", str(event.rank)))
        files.refuse_to_replace(path)
        # The collector passes over other names.
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(self.text(), encoding="utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def text(self) -> str:
        """The numbers now, in the text format."""
        labels = {"rank": str(self._numbers.rank), **self._labels}
        shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        lines = []
        for sample in self._numbers.samples():
            lines.append(f"# HELP {sample.name} {sample.help}")
            lines.append(f"# TYPE {sample.name} {sample.kind}")
            lines.append(f"{sample.name}{{{shown}}} {sample.value!r}")
        return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
