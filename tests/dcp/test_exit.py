"""What becomes of asynchronous saves when the program ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

# The save goes on only once the main thread has come to its end.
SCRIPT = """
import sys, threading, warnings
import torch, torch.distributed.checkpoint as dcp
import pyckpt
from pyckpt.engine import abandoned

warnings.simplefilter("ignore")
path, at_exit, waits_for = sys.argv[1:]
pyckpt.configure(at_exit=at_exit)


ending = threading.Event()
threading._register_atexit(ending.set)  # called before those that were registered before


class Writer(pyckpt.DirectWriter):
    def prepare_local_plan(self, plan):
        ending.wait()
        while waits_for == "abandoned" and not abandoned():
            pass
        return super().prepare_local_plan(plan)


state = {"model": {"w": torch.arange(1000.0)}}
future = dcp.async_save(state, storage_writer=Writer(path))
"""


def run(path: Path, at_exit: str, waits_for: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), at_exit, waits_for],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.slow
def test_finished(tmp_path: Path) -> None:
    """Python waits for the thread that saves, and the engine is there until it is through."""
    said = run(tmp_path / "new", "finish", "main thread")
    assert "lost" not in said
    state = {"model": {"w": torch.zeros(1000)}}
    dcp.load(state, checkpoint_id=tmp_path / "new")
    assert torch.equal(state["model"]["w"], torch.arange(1000.0))


@pytest.mark.slow
def test_abandoned(tmp_path: Path) -> None:
    """Given up, said so, and what was there before stays."""
    before = {"model": {"w": torch.ones(1000)}}
    dcp.save(before, checkpoint_id=tmp_path / "there")
    said = run(tmp_path / "there", "abandon", "abandoned")
    assert "there: this save was lost: the program ended before it" in said
    state = {"model": {"w": torch.zeros(1000)}}
    dcp.load(state, checkpoint_id=tmp_path / "there")
    assert torch.equal(state["model"]["w"], torch.ones(1000))
