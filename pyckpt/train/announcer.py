"""Tells people and programs what a Checkpointer does: the log, and ``on_event``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pyckpt.activity import Activity, Late
from pyckpt.dcp.report import LoadReport
from pyckpt.engine import Engine, held_bytes
from pyckpt.errors import NotDurable
from pyckpt.locks import fork_safe_lock
from pyckpt.printable import rate_text, seconds_text, size_text
from pyckpt.train.events import (
    Event,
    OnEvent,
    Pruned,
    Restored,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveStarted,
    SaveWritten,
)
from pyckpt.train.handle import SaveHandle
from pyckpt.train.store.catalog import CheckpointInfo
from pyckpt.train.sync.ranks import Ranks

__all__ = ["Announcer", "callbacks_of"]

_logger = logging.getLogger("pyckpt")

E = TypeVar("E", bound=Event)


def callbacks_of(on_event: OnEvent | Sequence[OnEvent] | None) -> tuple[OnEvent, ...]:
    """The callbacks that are meant by one, several or none.

    Raises:
        TypeError: one of them cannot be called.
    """
    if on_event is None:
        return ()
    given = tuple(on_event) if isinstance(on_event, Sequence) else (on_event,)
    for one in given:
        if not callable(one):
            raise TypeError(f"on_event must be callable, and {one!r} is not.")
    return given


class Announcer:
    """Logs on the first rank, and calls the callbacks on each. Any thread may use it.

    Args:
        ranks: the ranks that act together.
        callbacks: each is called with each event, one event at a time, in a thread of their own. An
            error that one raises is logged, and nothing else.
        engine: whose memory events tell.
        names_steps: whether the log calls a save by its step; if not, by its path.
        lost_seconds: returns what saves have cost training so far.
    """

    def __init__(
        self,
        ranks: Ranks,
        callbacks: Sequence[OnEvent] = (),
        *,
        engine: Engine | None = None,
        names_steps: bool = False,
        lost_seconds: Callable[[], float] = float,
    ) -> None:
        self._ranks = ranks
        self._callbacks = tuple(callbacks)
        self._engine = engine
        self._names_steps = names_steps
        self._lost_seconds = lost_seconds
        self._calling = fork_safe_lock()  # held while a callback runs
        self._thread = _new_thread()
        self._pid = os.getpid()
        self._closed = False

    # --- saves ------------------------------------------------------------------------------------

    def activity_of(self, handle: SaveHandle) -> Activity:
        """The activity that a save is, for the heartbeat and for bars."""
        return Activity(
            f"saving {self._name(handle)}",
            speaks=self._ranks.rank == 0,
            measure=lambda: handle._amount,
            late=self.late,
        )

    def saving(self, handle: SaveHandle) -> None:
        """A save starts."""
        self._log("saving %s", self._name(handle))
        self._tell(SaveStarted, handle, queue_depth=1)

    def reached(self, handle: SaveHandle, what: str, seconds: float) -> None:
        """A save has reached "staged", "written" or "committed"."""
        write = handle.statistics.write
        size = 0 if write is None else write.bytes_written
        if what == "staged":
            self._tell(SaveStaged, handle, seconds=seconds)
        elif what == "written":
            self._tell(SaveWritten, handle, seconds=seconds, bytes=size, statistics=write)
        else:
            whole = handle.checkpoint_bytes
            self._log(
                "committed %s in %s%s",
                self._name(handle),
                seconds_text(seconds),
                _in_brackets("" if whole is None else rate_text(whole, seconds)),
            )
            self._tell(
                SaveCommitted,
                handle,
                seconds=seconds,
                blocked_seconds=handle.statistics.blocked_seconds,
                bytes=size,
                checkpoint_bytes=whole,
                lost_seconds=self._lost_seconds(),
                memory_bytes=held_bytes(self._engine),
                queue_depth=0,
            )

    def failed(self, handle: SaveHandle, error: BaseException) -> None:
        if self._ranks.rank == 0:
            what = "saving %s failed after %s; the checkpoint before it stays: %s"
            if isinstance(error, NotDurable):
                what = "%s was committed after %s, but not made durable: %s"
            _say(
                logging.ERROR,
                what,
                self._name(handle),
                seconds_text(handle.seconds),
                error,
            )
        self._tell(SaveFailed, handle, seconds=handle.seconds, error=error, queue_depth=0)

    def skipped(self, step: int, path: Path, busy_with: int) -> None:
        """A save was left out, since that of another step is under way."""
        if self._ranks.rank == 0:
            _say(
                logging.WARNING,
                "step %d is not saved: the save of step %d is still under way; save less often, or "
                "pass when_busy='wait'",
                step,
                busy_with,
            )
        self._put(SaveSkipped, step, path, queue_depth=1)

    # --- the rest ---------------------------------------------------------------------------------

    def restored(self, found: CheckpointInfo, seconds: float, report: LoadReport | None) -> None:
        size = 0 if report is None else report.bytes
        what = f"{size_text(size)}, {rate_text(size, seconds)}" if size and seconds > 0 else ""
        name = f"step {found.step} from {found.place}" if self._names_steps else str(found.place)
        self._log("restored %s in %s%s", name, seconds_text(seconds), _in_brackets(what))
        self._put(Restored, found.step, found.path, place=found.place, seconds=seconds, bytes=size)

    def pruned(self, step: int, path: Path) -> None:
        self._log("removed step %d (%s)", step, path)
        self._put(Pruned, step, path)

    def late(self) -> Late:
        """The ranks that this one waits for, unless another rank is to name them."""
        return Late(*self._ranks.late())

    def close(self) -> None:
        """Wait until the callbacks have had all events. What happens later is only logged."""
        self._closed = True
        if self._pid == os.getpid():
            self._thread.shutdown()

    def _name(self, handle: SaveHandle) -> str:
        return f"step {handle.step}" if self._names_steps else str(handle.path)

    def _log(self, text: str, *args: object) -> None:
        if self._ranks.rank == 0:
            _say(logging.INFO, text, *args)

    # --- callbacks --------------------------------------------------------------------------------

    def _tell(self, kind: type[E], handle: SaveHandle, **fields: Any) -> None:
        self._put(kind, handle.step, handle.path, **fields)

    def _put(self, kind: type[E], step: int, path: Path, **fields: Any) -> None:
        if not self._callbacks or self._closed:
            return
        event = kind(step=step, path=path, rank=self._ranks.rank, time=time.time(), **fields)
        if self._pid != os.getpid():  # a forked process does not have its parent's thread
            self._pid, self._thread = os.getpid(), _new_thread()
        try:
            self._thread.submit(self._call, event)
        except RuntimeError:  # the interpreter is ending, or there can be no more threads
            # It has taken the event nonetheless, for a thread that it may get later.
            self._thread = _new_thread()
            self._call(event)

    def _call(self, event: Event) -> None:
        with self._calling:
            for callback in self._callbacks:
                try:
                    callback(event)
                except BaseException:
                    _logger.exception(
                        "on_event failed; the checkpoints are not concerned. It was told of %s",
                        event,
                    )


def _new_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="pyckpt-events")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""


def _say(level: int, text: str, *args: object) -> None:
    """Log. A program's handler that raises fails no save."""
    with suppress(Exception):
        _logger.log(level, text, *args)
