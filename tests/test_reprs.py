"""Objects in one line that a person can read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from _training import Run

import pyckpt

SPEED = r"\d+ items, [\d.]+ GB in [\d.]+ s \([\d.]+ GB/s, (direct|buffered)\)"


def test_what_saves_and_loads(tmp_path: Path) -> None:
    run = Run().to(1)
    path = tmp_path / "step-00000001"
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer of {tmp_path}: 0 saves, idle>"
        handle = checkpointer.save(1, run.state)
        checkpointer.wait()
        assert repr(checkpointer) == f"<Checkpointer of {tmp_path}: 1 saves, idle>"
        matches(handle, r"<SaveHandle of step 1: committed in [\d.e-]+ s>")
        matches(checkpointer._saver._current, rf"<ReportingWriter of {path}: {SPEED}>")
        checkpointer.restore(run.state)
        matches(checkpointer.load_report, r"<LoadReport: loaded \d+ keys, .* s \([\d.]+ GB/s\)>")
    assert repr(checkpointer) == f"<Checkpointer of {tmp_path}: 1 saves, closed>"
    reader = pyckpt.DirectReader(path)
    assert repr(reader) == f"<DirectReader of {path}: nothing read yet>"
    pyckpt.load({"model": run.model.state_dict()}, reader=reader)
    matches(reader, rf"<DirectReader of {path}: [\d.]+ GB in .*>")
    writer = pyckpt.DirectWriter()
    assert repr(writer) == "<DirectWriter of a path that is not known yet: nothing written yet>"


def test_a_failed_save_says_why(tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"pyckpt.checkpoint": 1})
        with pytest.raises(pyckpt.errors.SaveError):
            checkpointer.wait()
        matches(handle, r"<SaveHandle of step 1: failed: SaveError: .* is taken.*>")
        matches(checkpointer, r"<Checkpointer of .*: 1 saves \(1 failed\), idle>")


def test_the_rest() -> None:
    run = Run().to(1)
    with pyckpt.Engine(max_pinned_bytes=64 << 20, io_threads=2) as engine:
        matches(
            engine, r"<Engine: 2 threads, slots of 2.1 MB, 0 bytes held for copies, of .* MB .*>"
        )
        stager = pyckpt.PinnedStager(optimizers=[run.optimizer], engine=engine)
        assert repr(stager) == "<PinnedStager for AdamW: 0 under way, when_busy='wait'>"
    matches(engine, r"<Engine: .*, closed>")
    places = pyckpt.optim.placement(run.optimizer)
    assert repr(places) == "<Placements of 4 parameters: 12 on host float32>"
    offloader = pyckpt.optim.Offloader(run.optimizer)
    assert repr(offloader) == "<Offloader of AdamW: state in place, 0 bytes on the host>"
    run.optimizer.state[next(run.model.parameters())]["exp_avg"] = torch.zeros(16, 8).bfloat16()
    (misplaced,) = pyckpt.optim.check(run.optimizer)
    matches(misplaced, r"<Misplaced exp_avg of .*: .*, belongs on host float32>")


def test_the_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", pyckpt.__version__)
    assert "__version__" in dir(pyckpt)


def matches(value: Any, pattern: str) -> None:
    text = repr(value)
    assert re.fullmatch(pattern, text), text
    assert "\n" not in text
