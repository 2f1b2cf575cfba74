"""Ctrl-C during a save: what it leaves goes with the next save, whichever line it comes at."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt.dcp.writer import DirectWriter
from pyckpt.errors import SaveError

STATE = {"w": torch.ones(4000), "n": 3}
SOURCE = Path(pyckpt.__file__).parent
TRACED = tuple(f"{SOURCE / room}{os.sep}" for room in ("dcp", "format", "train"))


def save(directory: Path) -> None:
    pyckpt.save(STATE, directory, overwrite=True, sync_files=False)


def save_with_stock(directory: Path) -> None:
    writer = DirectWriter(directory, sync_files=False)
    dcp.save(STATE, storage_writer=writer, no_dist=True)


class _Interrupt:
    """Raises KeyboardInterrupt at one of the lines of Python that this thread runs in pyckpt."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.where = ""

    def call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(TRACED) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.left -= event == "line"
        if self.left == 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self.line


def interrupted(save: Callable[[Path], None], directory: Path, line: int) -> str:
    """Save, and be interrupted at a line. Returns which it was, or nothing if there are fewer."""
    interrupt = _Interrupt(line)
    traced = sys.gettrace()
    sys.settrace(interrupt.call)
    try:
        save(directory)
    except (KeyboardInterrupt, CheckpointException, SaveError):
        # DCP wraps some, and Python 3.11 replaces some that a trace raises at the end of a `with`.
        pass
    finally:
        sys.settrace(traced)
    return interrupt.where


# A finalizer may be where the interrupt comes. Python then ignores it, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", [97])
@pytest.mark.parametrize("save", [save, save_with_stock])
def test_at_any_line(save: Callable[[Path], None], every: int, tmp_path: Path) -> None:
    save(tmp_path)  # which imports, and makes what every save uses
    line = 1
    while where := interrupted(save, tmp_path, line):
        if save is save_with_stock:
            gc.collect()  # DCP's errors are in cycles, and hold the writer
        save(tmp_path)
        assert len(os.listdir(tmp_path)) == 2, where
        line += every
    assert line > 300
    assert torch.equal(pyckpt.load(tmp_path)["w"], STATE["w"])


@pytest.mark.parametrize("fenced", [False, True], ids=["claimed", "fenced"])
def test_before_the_commit_while_the_program_keeps_the_interrupt(
    fenced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As notebooks do, and with it all that the save has made."""
    monkeypatch.setattr(DirectWriter, "_is_fenced", fenced)
    save(tmp_path)
    kept = []
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(DirectWriter, "finish", _interrupt)
            with pytest.raises(KeyboardInterrupt) as interrupt:
                save(tmp_path)
        kept.append(interrupt)
    assert len(os.listdir(tmp_path)) == 3  # the next save removes what the last one left
    save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_writer_that_is_gone_keeps_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DirectWriter, "finish", _interrupt)
        writer = DirectWriter(tmp_path)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            dcp.save(STATE, storage_writer=writer, no_dist=True)
    gc.collect()  # the interrupt
    save(tmp_path)
    assert len(os.listdir(tmp_path)) == 3  # that save may still be under way
    del writer
    save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
