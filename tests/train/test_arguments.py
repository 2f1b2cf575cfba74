"""Wrong arguments are refused where they are passed, and do no harm to what comes after."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from _training import Run, resumed

import pyckpt
from pyckpt import Checkpointer
from pyckpt.errors import SaveError


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda c: c.step(state(), 1), TypeError, "step must be a whole number, not .* dict"),
        (lambda c: c.step(2.5, state()), TypeError, "whole number"),
        (lambda c: c.step("2", state()), TypeError, "whole number"),
        (lambda c: c.step(True, state()), TypeError, "whole number"),
        (lambda c: c.step(-2, state()), ValueError, "0 or more"),
        (lambda c: c.step(2, torch.ones(1)), TypeError, "state must be a dict"),
        (lambda c: c.step(2, {1: torch.ones(1)}), TypeError, "must be strings"),
        (lambda c: c.step(2, state(), metrics=0.5), TypeError, "metrics must be a dict"),
        (lambda c: c.step(2, state(), metrics={"loss": "low"}), TypeError, "'loss' must be a numb"),
        (lambda c: c.step(2, state(), metrics={1: 1.0}), TypeError, "must be strings"),
        (
            lambda c: c.save(2, state(), metrics={"l": torch.ones(2)}),
            TypeError,
            "'l' must be one n",
        ),
        (lambda c: c.save(2, state(), metrics={"l": numpy.ones((0, 3))}), TypeError, "'l' must be"),
        (lambda c: c.save(-1, state()), ValueError, "0 or more"),
        (lambda c: c.save(1.0, state()), TypeError, "whole number"),
        (lambda c: c.save(state(), 1), TypeError, "whole number"),
        (lambda c: c.restore(state(), step=1.5), TypeError, "whole number"),
        (lambda c: c.restore(state(), step=-1), ValueError, "0 or more"),
        (lambda c: c.restore([1]), TypeError, "state must be a dict"),
        (lambda c: c.restore(state(), mising="keep"), TypeError, "mising"),
        (lambda c: c.restore(state(), missing="ignore"), ValueError, "^missing = 'ignore' must"),
        (lambda c: c.restore(state(), unexpected="keep"), ValueError, "^unexpected = 'keep' must"),
        (lambda c: c.restore(state(), mismatched=1), ValueError, "^mismatched = 1 must"),
        (lambda c: c.restore(state(), rename="x"), TypeError, "rename must be a function of"),
        (lambda c: c.restore(state(), keep="x"), TypeError, r"\('x',\)"),
        (lambda c: c.restore(state(), keep=["y"]), ValueError, "'y' is neither"),
        (lambda c: c.restore(state(), keep=["x.y"]), ValueError, "'x.y' is neither"),
        (lambda c: c.protect("1"), TypeError, "whole number"),
        (lambda c: c.export("there", step=1.0), TypeError, "whole number"),
    ],
)
def test_a_wrong_call_does_nothing(
    call: Any, kind: type[Exception], match: str, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, every_steps=2) as checkpointer:
        with pytest.raises(kind, match=match):
            call(checkpointer)
        assert os.listdir(tmp_path) == []
        assert checkpointer.step(1, state()) is None
        handle = checkpointer.step(2, state())
        assert handle is not None
        assert handle.wait() == tmp_path / "step-00000002"


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"every_steps": 2.5}, TypeError, "every_steps"),
        ({"every_steps": True}, TypeError, "every_steps"),
        ({"every_minutes": "5"}, TypeError, "^every_minutes = '5' must"),
        ({"every_minutes": float("nan")}, ValueError, "^every_minutes = nan must"),
        ({"save_when": 100}, TypeError, "^save_when = 100 must"),
        ({"keep_last": 1.0}, TypeError, "keep_last"),
        ({"keep_every": "10"}, TypeError, "keep_every"),
        ({"keep_best": "loss"}, TypeError, "^keep_best = 'loss' must"),
        ({"keep_best": ("loss", "min")}, TypeError, "keep_best"),
        ({"keep_best": ("loss", 1.5, "min")}, TypeError, "keep_best"),
        ({"on_signals": "SIGNOTHING"}, ValueError, "no signal 'SIGNOTHING'"),
        ({"on_signals": "S"}, ValueError, "no signal 'S'"),
        ({"on_signals": [999]}, ValueError, "no signal 999"),
        ({"on_signals": ["SIGUSR1", "SIGKILL"]}, ValueError, "on_signals: SIGKILL"),
        ({"on_signals": signal.SIGSTOP}, ValueError, "on_signals: SIGSTOP"),
        ({"timeout": "60"}, TypeError, "timeout must be a number of seconds"),
        ({"timeout": True}, TypeError, "timeout must be a number of seconds"),
        ({"timeout": float("inf")}, ValueError, "timeout = inf must be a time that ends"),
        ({"timeout": float("nan")}, ValueError, "timeout = nan must be a time that ends"),
        ({"timeout": 0}, ValueError, "timeout = 0:00:00 must be more"),
    ],
)
def test_wrong_options(
    options: dict[str, Any], kind: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=match):
        Checkpointer(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mirror_keep_last": 2}, "mirror_keep_last"),
        ({"mirror_every": 2, "mirror_max_mbps": 5.0}, "mirror_every, mirror_max_mbps"),
        ({}, None),
    ],
)
def test_what_needs_a_mirror_says_so(
    options: dict[str, Any], names: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Checkpointer(tmp_path, **options).close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ([f"without mirror=, nothing comes of {names}"] if names else [])


@pytest.mark.parametrize(
    "number", [1, 2.5, torch.tensor(2), torch.ones(1, 1), numpy.ones(1), numpy.float32(3)]
)
def test_whatever_is_one_number_is_a_metric(number: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(), metrics={"loss": number}).wait()
        (found,) = checkpointer.checkpoints()
    assert found.metrics == {"loss": float(torch.as_tensor(number))}


def test_a_metric_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state(), metrics={"loss": torch.tensor(1j)})
        with pytest.raises(SaveError, match="the metric 'loss' cannot be read as a number"):
            handle.wait()
        with pytest.raises(SaveError):
            checkpointer.wait()


@pytest.mark.parametrize("signals", ["SIGUSR2", signal.SIGUSR2, ["SIGUSR2"]])
def test_a_string_is_one_signal(signals: Any, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with Checkpointer(tmp_path, on_signals=signals):
        changed = [n for n in before if signal.getsignal(n) != before[n]]
        assert changed == [signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR2) == before[signal.SIGUSR2]


@pytest.mark.parametrize(
    "number", [2, numpy.int64(2), torch.tensor(2)], ids=["int", "numpy", "tensor"]
)
def test_whatever_is_a_whole_number_is_a_step(number: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every_steps=2) as checkpointer:
        handle = checkpointer.step(number, Run().to(2).state)
        assert handle is not None
        assert type(handle.step) is int
    assert resumed(tmp_path)[0] == 2


@pytest.mark.parametrize(
    "directory",
    ["s3://bucket/run", "gs://b/run", Path("s3://bucket/run"), "file:///tmp/run", "hf://x", ""],
)
def test_what_is_no_directory(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is a URL|is empty"):
        Checkpointer(directory)
    assert os.listdir(tmp_path) == []


class _OfBytes:
    def __fspath__(self) -> bytes:
        return b"x"


CALLS: dict[str, Any] = {
    "path": [
        lambda path: pyckpt.save({"a": 1}, path),
        pyckpt.DirectReader,
        lambda path: pyckpt.load({"a": 1}, path),
        lambda path: pyckpt.load_model(torch.nn.Linear(1, 1), path),
        lambda path: pyckpt.to_torch(path, "there"),
        lambda path: pyckpt.export(".", path),
    ],
    "checkpoint": [lambda path: pyckpt.export(path, "there")],
    "file": [lambda path: pyckpt.to_torch(".", path)],
    "directory": [Checkpointer],
    "mirror": [lambda path: Checkpointer(".", mirror=path)],
}


@pytest.mark.parametrize("path", [b"/tmp/x", 5, _OfBytes()], ids=["bytes", "int", "of bytes"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_path(name: str, path: Any) -> None:
    for call in CALLS[name]:
        with pytest.raises(TypeError, match=f"^{name} must be a str or an os.PathLike of a str"):
            call(path)
    with pytest.raises(TypeError, match=r"^path must be a str"):
        pyckpt.DirectWriter(path)
    with pytest.raises(TypeError, match=r"^directory must be a str"):
        Checkpointer(None)  # type: ignore[arg-type]


def test_what_is_no_engine(tmp_path: Path) -> None:
    for make in (
        lambda: Checkpointer(tmp_path / "run", engine=5),  # type: ignore[arg-type]
        lambda: pyckpt.DirectWriter(tmp_path, engine=5),  # type: ignore[arg-type]
        lambda: pyckpt.DirectReader(tmp_path, engine=5),  # type: ignore[arg-type]
        lambda: pyckpt.PinnedStager(engine=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"^engine must be a pyckpt\.Engine, .* not 5"):
            make()
    assert os.listdir(tmp_path) == []


def test_home_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with Checkpointer("~/run") as checkpointer:
        assert checkpointer.directory == tmp_path / "run"
    with pytest.raises(ValueError, match="no such home directory"):
        Checkpointer("~nobody-of-that-name/run")
    monkeypatch.chdir(tmp_path)
    with Checkpointer("./~nobody-of-that-name") as checkpointer:
        assert checkpointer.directory == tmp_path / "~nobody-of-that-name"
