"""What this process is doing: the saves, loads and exports that are under way.

A thread logs those that take long, every ``HEARTBEAT_SECONDS``. There is at most one such thread in
a process. It starts with the first activity, and sleeps while there is none. `pyckpt.progress`
shows the same activities as bars.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from pyckpt.locks import fork_safe_lock
from pyckpt.printable import rate_text, size_text

__all__ = ["Activity", "Amount", "Display", "activity", "begin", "end", "hide", "inside", "show"]

_logger = logging.getLogger("pyckpt")

HEARTBEAT_SECONDS = 30.0


class Amount(NamedTuple):
    """How far an activity is, in bytes."""

    done: int
    total: int
    """0 if it is not known."""


class Late(NamedTuple):
    """Ranks that an activity waits for."""

    who: str
    """Empty if it waits for none."""
    seconds: float
    """How long it has waited."""


def _nothing_yet() -> Amount:
    return Amount(0, 0)


def _nobody() -> Late:
    return Late("", 0.0)


class Activity:
    """A save, a load or an export, from its call to its end.

    Attributes:
        name: "saving step 20", say.
        speaks: whether this process reports it: it is the first rank.
        measure: returns how far it is. Any thread may call it.
        late: returns the ranks that it waits for, and that this process should name. Any thread may
            call it.
    """

    def __init__(
        self,
        name: str,
        *,
        speaks: bool = True,
        measure: Callable[[], Amount] = _nothing_yet,
        late: Callable[[], Late] = _nobody,
    ) -> None:
        self.name = name
        self.speaks = speaks
        self.measure = measure
        self.late = late
        self.started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.started

    def heartbeat(self) -> str:
        """What to log while it is under way; empty if another rank does."""
        late = self.late()
        if late.who:
            return f"{self.name}: waiting {late.seconds:.0f} s for {late.who}"
        if not self.speaks:
            return ""
        seconds = self.seconds
        done, total = self.measure()
        if not done:
            return f"{self.name}: under way for {seconds:.0f} s"
        of = f" of {size_text(total)} ({min(1.0, done / total):.0%})" if total else ""
        return (
            f"{self.name}: {size_text(done)}{of} after {seconds:.0f} s ({rate_text(done, seconds)})"
        )


class Display(Protocol):
    """Shows what is under way. Its methods are called by the threads in which activities begin and
    end, one at a time."""

    def began(self, activity: Activity) -> None: ...
    def ended(self, activity: Activity) -> None: ...


class _Watch:
    """The activities of this process, and the thread that logs those that take long."""

    def __init__(self) -> None:
        self._condition = threading.Condition(fork_safe_lock())
        self._due: dict[Activity, float] = {}  # when each is logged next
        self._thread: threading.Thread | None = None
        self._sleeps = False  # until it is woken
        # Apart from the condition's lock: a display may take long, and begin an activity.
        self._showing = fork_safe_lock()
        self.displays: tuple[Display, ...] = ()

    def begin(self, activity: Activity) -> None:
        with self._condition:
            self._due[activity] = time.monotonic() + HEARTBEAT_SECONDS
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pyckpt-watch", daemon=True)
                with suppress(RuntimeError):  # no thread can be started: nothing is logged
                    thread.start()
                    self._thread = thread
            elif self._sleeps:
                # Otherwise it wakes by itself before this activity is due.
                self._sleeps = False
                self._condition.notify()
        with self._showing:
            for display in self.displays:
                display.began(activity)

    def end(self, activity: Activity) -> None:
        with self._condition:
            known = self._due.pop(activity, None) is not None
        if known:
            with self._showing:
                for display in self.displays:
                    display.ended(activity)

    def show(self, display: Display) -> None:
        with self._showing:
            self.displays = (*self.displays, display)
            with self._condition:
                under_way = list(self._due)
            for activity in under_way:
                display.began(activity)

    def hide(self, display: Display) -> None:
        with self._showing:
            self.displays = tuple(one for one in self.displays if one is not display)

    def _run(self) -> None:
        while True:
            for activity in self._take_due():
                try:
                    text = activity.heartbeat()
                except Exception as error:
                    text = ""
                    _logger.debug("%s: cannot tell how far it is: %r", activity.name, error)
                if text:
                    _logger.info("%s", text)

    def _take_due(self) -> list[Activity]:
        """Wait until activities are due; return them."""
        with self._condition:
            while True:
                now = time.monotonic()
                due = [activity for activity, at in self._due.items() if at <= now]
                if due:
                    for activity in due:
                        self._due[activity] = now + HEARTBEAT_SECONDS
                    return due
                self._sleeps = not self._due
                self._condition.wait(
                    None if self._sleeps else max(0.0, min(self._due.values()) - now)
                )


_watch = _Watch()
_inside = threading.local()


def begin(activity: Activity) -> None:
    """An activity begins, until its `end`, in any thread."""
    _watch.begin(activity)


def end(activity: Activity) -> None:
    """An activity is over. Idempotent."""
    _watch.end(activity)


def show(display: Display) -> None:
    """Tell a display of all activities, those that are under way included, until `hide`."""
    _watch.show(display)


def hide(display: Display) -> None:
    _watch.hide(display)


def inside() -> bool:
    """Whether the calling thread is in the block of an `activity`."""
    return getattr(_inside, "activity", None) is not None


@contextmanager
def activity(
    name: str,
    *,
    speaks: bool = True,
    measure: Callable[[], Amount] | None = None,
    late: Callable[[], Late] = _nobody,
) -> Iterator[Activity]:
    """An activity of the calling thread, as a block. Inside of another one it is a part of that,
    which goes by the inner one's measure from then on."""
    outer: Activity | None = getattr(_inside, "activity", None)
    if outer is not None:
        if measure is not None:
            outer.measure = measure
        yield outer
        return
    here = Activity(name, speaks=speaks, measure=measure or _nothing_yet, late=late)
    _inside.activity = here
    begin(here)
    try:
        yield here
    finally:
        _inside.activity = None
        end(here)


def _after_fork() -> None:
    # The activities, and the thread, are the parent's.
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
