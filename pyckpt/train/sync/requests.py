"""Requests to this rank to save or to stop, by calls, by signals and by its clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from pyckpt.locks import fork_safe_lock
from pyckpt.train.sync.agreement import Facts
from pyckpt.train.sync.signals import StopSignals

__all__ = ["Requests"]


class Requests:
    """Counts requests to save and to stop, until the ranks agree on them. Any thread may use it.

    Args:
        signals: signals that ask for a stop.
        is_due: whether a save is due so many seconds after the last one. Only one rank has it,
            since the clocks of ranks differ; None on the others.
    """

    def __init__(self, signals: StopSignals, is_due: Callable[[float], bool] | None) -> None:
        self._signals = signals
        self._is_due = is_due
        # Reentrant: a signal handler may run while its own thread holds the lock.
        self.lock = fork_safe_lock()
        self.saved_at = time.monotonic()
        """When the last save began."""
        self.served = 0
        """The number of requests for which a save was started. Set by the training thread."""
        self._saves = 0
        self._stops = 0

    def ask_save(self) -> None:
        with self.lock:
            self._ask()

    def _ask(self) -> None:
        # The ranks agree on the largest of their counts. To be new, this count must be larger than
        # the number of requests served for any rank.
        self._saves = max(self._saves, self.served) + 1

    def ask_stop(self) -> None:
        with self.lock:
            self._stops = 1

    def saving(self) -> None:
        """A save begins now."""
        with self.lock:
            self.saved_at = time.monotonic()

    def facts(self, saved: int, failed: int) -> Facts:
        """The facts of this rank, with the given counts of its saves; see `Facts`."""
        with self.lock:
            since = time.monotonic() - self.saved_at
            if self._is_due is not None and self._saves <= self.served and self._is_due(since):
                self._ask()
            return Facts(
                stops=int(self._stops or self._signals.received),
                requests=self._saves,
                saved=saved,
                failed=failed,
            )
