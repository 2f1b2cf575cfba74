"""`pyckpt.progress` in a terminal, which is the other end of a pty."""

from __future__ import annotations

import os
import pty
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _heard import Gate

import pyckpt
from pyckpt import activity, bars
from pyckpt.activity import Activity, Amount


class Terminal:
    """What a program writes to standard error, as a terminal gets it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.file = os.fdopen(slave, "w")
        self.text = ""

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it standard error. In the test itself: pytest sets it anew after the fixtures."""
        monkeypatch.setattr(sys, "stderr", self.file)

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + 60
        while (found := re.search(pattern, self.text)) is None:
            ready, _, _ = select.select([self._master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern} is not in {self.text[-2000:]!r}"
            text = os.read(self._master, 1 << 16).decode()
            self.text += re.sub(r"\x1b\[[\d;]*m", "", text)  # without colours
        return found

    def rest(self) -> str:
        """What has been written, and was not waited for."""
        while select.select([self._master], [], [], 0)[0]:
            self.text += os.read(self._master, 1 << 16).decode()
        return self.text

    def close(self) -> None:
        self.file.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    yield terminal
    terminal.close()


def displays(*, end_within: float = 0) -> list[str]:
    """Those that are shown. A display ends after the save that it shows, in another thread."""
    found = [t for t in threading.enumerate() if type(t).__module__ == "rich.live"]
    for thread in found:
        thread.join(end_within)
    return [thread.name for thread in found if thread.is_alive()]


def test_a_save_has_a_bar_while_it_is_under_way(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.attach(monkeypatch)
    gate = Gate(monkeypatch)
    state = {"w": torch.ones(1 << 18)}
    with pyckpt.progress(), pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert displays() == []
        handle = checkpointer.save(20, state)
        try:
            terminal.wait_for(r"saving step 20 .*100% +1\.05 MB of 1\.05 MB .*[kM]B/s +\d+ s")
            assert len(displays()) == 1
        finally:
            gate.open.set()
        handle.wait()
        assert displays(end_within=60) == []
        checkpointer.save(30, state).wait()
    assert activity._watch.displays == ()


def test_a_load_and_an_export_have_bars(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.attach(monkeypatch)
    pyckpt.save({"model": {"w": torch.ones(1 << 18)}}, tmp_path / "a")
    run = pyckpt.dcp.reading.Load.run  # type: ignore[attr-defined]

    def seen(*arguments: Any) -> None:
        run(*arguments)
        terminal.wait_for(r"loading …[^\n]*/a .*100% +1\.05 MB of 1\.05 MB")

    with pyckpt.progress():
        with monkeypatch.context() as patch:
            patch.setattr("pyckpt.dcp.reading.Load.run", seen)
            pyckpt.load({"model": {"w": torch.zeros(1 << 18)}}, tmp_path / "a")
        from pyckpt.train.store import export

        put = export.put_in_place

        def put_seen(*arguments: Any, **options: Any) -> None:
            terminal.wait_for(r"exporting …[^\n]*/a .*100% +1\.05 MB of 1\.05 MB")
            put(*arguments, **options)

        monkeypatch.setattr(export, "put_in_place", put_seen)
        pyckpt.export(tmp_path / "a", tmp_path / "out")


def test_other_ranks_show_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal.attach(monkeypatch)
    with pyckpt.progress():
        other = Activity("saving", speaks=False, measure=lambda: Amount(1, 2))
        activity.begin(other)
        assert displays() == []
        activity.end(other)
    assert terminal.rest() == ""


def test_without_a_terminal_there_is_no_display(capfd: pytest.CaptureFixture[str]) -> None:
    with pyckpt.progress():
        assert activity._watch.displays == ()


def test_without_rich_there_is_no_display(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.attach(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pyckpt.progress():
        assert activity._watch.displays == ()


def test_what_is_under_way_already_is_shown_and_names_are_escaped(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.attach(monkeypatch)
    one = Activity("saving \x1b[31mred [bold]x", measure=lambda: Amount(0, 0))
    activity.begin(one)
    try:
        with pyckpt.progress():
            terminal.wait_for(r"saving \\x1b\[31mred \[bold\]x")
            with pyckpt.progress(console=bars._display(None)._console):  # type: ignore[union-attr]
                pass  # a display beside another does no harm
    finally:
        activity.end(one)
