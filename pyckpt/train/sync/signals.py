"""Signals that ask a job to stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

__all__ = ["StopSignals"]

_SAME_SIGNAL_SECONDS = 1.0


class StopSignals:
    """Records signals, and does nothing else: a handler that saved would save a state in the middle
    of a step.

    At a second signal, the previous handler is restored and handles it, so that by default the
    process ends at once. The same signal within a second of the first is the same request:
    schedulers signal a launcher and its workers, and the launcher passes its own on.

    Forked processes inherit the handler, but no code there reads the record. So in them the
    previous handler handles the first signal. It also does so after ``close``: other code may have
    kept the handler of this object, and may call it or install it again.

    Args:
        names: signals such as "SIGTERM" or ``signal.SIGTERM``, or one.
        clock: returns seconds; for tests.

    Raises:
        ValueError: there is no such signal, or no program can handle it; or there are signals, and
            this is not the main thread, the only one that can handle them.
    """

    def __init__(
        self,
        names: str | signal.Signals | Sequence[str | signal.Signals],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        numbers = [_signal(one) for one in ([names] if isinstance(names, str | int) else names)]
        if numbers and threading.current_thread() is not threading.main_thread():
            raise ValueError("on_signals needs the main thread, which alone can handle signals")
        self._clock = clock
        self._pid = os.getpid()
        self._first: float | None = None
        self._previous: dict[signal.Signals, Any] = {}  # kept for good
        self._installed: list[signal.Signals] = []
        for number in dict.fromkeys(numbers):
            self._previous[number] = signal.getsignal(number)
            self._installed.append(number)
            signal.signal(number, self._handle)

    @property
    def received(self) -> bool:
        """Whether a signal came."""
        return self._first is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._installed and os.getpid() == self._pid:
            now = self._clock()
            if self._first is None:
                self._first = now
            if now - self._first < _SAME_SIGNAL_SECONDS:
                return
        self.close()
        previous = self._before(signal.Signals(number))
        # Called, not by way of a new signal, which would come back to this handler if other code
        # has installed one that calls it.
        if callable(previous):
            previous(number, frame)
        elif previous != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restore the previous handlers. Idempotent."""
        while self._installed:
            number = self._installed.pop()
            # A handler that other code has installed since stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, self._before(number))

    def _before(self, number: signal.Signals) -> Any:
        """The handler to put back. An object that was made before this one may have been closed
        before it, too; then it is the handler that was there before both."""
        previous = self._previous[number]
        while (
            isinstance(other := getattr(previous, "__self__", None), StopSignals)
            and number not in other._installed
        ):
            previous = other._previous[number]
        # None is a handler that C code installed, which Python cannot put back.
        return signal.SIG_DFL if previous is None else previous


def _signal(name: str | int) -> signal.Signals:
    try:
        number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise ValueError(
            f"on_signals: there is no signal {name!r}; one is called 'SIGTERM', say"
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"on_signals: {number.name} ends or stops a process without asking it")
    return number
