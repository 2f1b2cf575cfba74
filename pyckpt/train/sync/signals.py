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

    At a second signal, the previous handler is restored and the signal is delivered again, so that
    by default the process ends at once. The same signal within a second of the first is the same
    request: schedulers signal a launcher and its workers, and the launcher passes its own on.

    Forked processes inherit the handler, but no code there reads the record. So in them the first
    signal is delivered to the previous handler at once.

    Args:
        names: signals such as "SIGTERM" or ``signal.SIGTERM``, or one.
        clock: returns seconds; for tests.

    Raises:
        ValueError: there is no such signal; or there are signals, and this is not the main thread,
            the only one that can handle them.
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
        self._previous: dict[signal.Signals, Any] = {}
        for number in dict.fromkeys(numbers):
            self._previous[number] = signal.signal(number, self._handle)

    @property
    def received(self) -> bool:
        """Whether a signal came."""
        return self._first is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            now = self._clock()
            if self._first is None:
                self._first = now
            if now - self._first < _SAME_SIGNAL_SECONDS:
                return
        self.close()
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restore the previous handlers. Idempotent."""
        while self._previous:
            number, previous = self._previous.popitem()
            # A handler that other code has installed since stays.
            if signal.getsignal(number) == self._handle:
                # None is a handler that C code installed, which Python cannot put back.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _signal(name: str | int) -> signal.Signals:
    try:
        return signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
    except (KeyError, ValueError):
        raise ValueError(
            f"on_signals: there is no signal {name!r}; one is called 'SIGTERM', say"
        ) from None
