"""`pyckpt.progress`: bars in the terminal for the saves, loads and exports that are under way."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyckpt import activity
from pyckpt.activity import Activity
from pyckpt.printable import printable, rate_text, size_text

__all__ = ["progress"]

_logger = logging.getLogger("pyckpt")

_PER_SECOND = 8
_NAME_MAX = 44  # characters


@contextmanager
def progress(*, console: Any = None) -> Iterator[None]:
    """Show a bar in the terminal for each save, load and export of this process, inside the
    block. ::

        with pyckpt.progress(), pyckpt.Checkpointer("runs/a", every_steps=100) as checkpointer:
            ...

    A bar is there while its save is under way, also if training goes on meanwhile, and disappears
    then. Between saves no thread runs for it. The bars go to standard error.

    The block does nothing on ranks other than 0, if standard error is no terminal, and if the
    package ``rich`` is not installed (``pip install rich``). So it may stay in a program that runs
    in a terminal and under a scheduler.

    Args:
        console: the ``rich.console.Console`` to show them on. Pass the program's own, if it has
            one: two displays write over each other.
    """
    display = _display(console)
    if display is None:
        yield
        return
    activity.show(display)
    try:
        yield
    finally:
        activity.hide(display)
        display.close()


def _display(console: Any) -> _Bars | None:
    if console is None and not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError as error:
        _logger.debug("no bars are shown: %s", error)
        return None
    shown = Console(stderr=True, highlight=False) if console is None else console
    return _Bars(shown) if shown.is_terminal else None


class _Bars:
    """Shows activities while there are some. Its methods are called one at a time."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._live: Any = None
        self._pid = os.getpid()
        self._shown: tuple[Activity, ...] = ()  # replaced as a whole: a thread of rich draws them

    def began(self, activity: Activity) -> None:
        if not activity.speaks or self._pid != os.getpid():
            return
        self._shown = (*self._shown, activity)
        if self._live is None:
            from rich.live import Live

            live = Live(
                get_renderable=self._table,
                console=self._console,
                refresh_per_second=_PER_SECOND,
                transient=True,
            )
            try:
                live.start()
            except Exception as error:  # the program shows something else there
                _logger.debug("no bars are shown: %s", error)
            else:
                self._live = live

    def ended(self, activity: Activity) -> None:
        self._shown = tuple(one for one in self._shown if one is not activity)
        if not self._shown:
            self.close()

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None and self._pid == os.getpid():
            try:
                live.stop()
            except Exception as error:  # the terminal is gone, say
                _logger.debug("the bars were not ended: %s", error)

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        for _ in range(6):
            table.add_column(no_wrap=True)
        for one in self._shown:
            seconds = one.seconds
            done, total = one.measure()
            share = f"{min(1.0, done / total):4.0%}" if total else ""
            amount = f"{size_text(done)} of {size_text(total)}" if total else ""
            table.add_row(
                Text(_shortened(printable(one.name))),
                ProgressBar(
                    total=total or None, completed=min(done, total), pulse=not total, width=30
                ),
                share,
                amount,
                rate_text(done, seconds) if done else "",
                f"{seconds:.0f} s",
            )
        return table


def _shortened(name: str) -> str:
    """A name that fits beside its bar. Of a path the end is shown."""
    if len(name) <= _NAME_MAX:
        return name
    doing, _, path = name.partition(" ")
    return f"{doing} …{path[len(doing) + 2 - _NAME_MAX :]}"
