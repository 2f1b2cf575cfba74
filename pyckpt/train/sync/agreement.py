"""How ranks that run at slightly different times act at the same step.

A save is collective, so all ranks must start it at the same step. But a signal reaches one rank,
clocks differ, and one rank sees the end of the previous save a step earlier than another. Asking
each other at every step would stop training. So a thread of each rank communicates, in rounds over
a gloo group of its own:

1. All ranks reduce their counts (``Facts``), taking the largest of each number. In most rounds no
   count has changed, and the round ends here.
2. If a count has changed, each rank names a step that it has not reached, and does not pass that
   step before the round is over. No rank has reached the largest of these steps. **From that step
   on**, the new facts are in force on all ranks.

So ``at(step)`` returns the same on all ranks, without communication. It waits in one case only: the
rank reaches the step that it named before the round is over. To make that rare, the rank measures
the time of rounds and steps, and names a step far enough ahead.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from pyckpt.locks import fork_safe_lock
from pyckpt.speaking import for_all

__all__ = ["Agreement", "Facts", "GroupAgreement", "Leaving", "LocalAgreement"]

_logger = logging.getLogger("pyckpt")

_PERIOD_SECONDS = 0.1
_EXIT_SECONDS = 5.0
# With more, one slow round would make signals act late for long. With less, training would wait for
# the next slow round.
_AHEAD_SECONDS = 1.0
_SHORTEST_STEP_SECONDS = 1e-6
_NEVER = -(1 << 62)  # before any step


class Facts(NamedTuple):
    """Counts that only grow. The ranks agree on the largest that any rank has, and for ``saved`` on
    the smallest."""

    stops: int = 0
    """Requests to stop."""
    requests: int = 0
    """Requests to save that do not come from the number of a step."""
    saved: int = 0
    """Saves that have ended or failed."""
    failed: int = 0
    """The number of the last save that failed: 1 for the first save."""


class Leaving(Exception):
    """A rank is gone, and this one was leaving anyway: it need not know which."""


class Agreement(ABC):
    """The facts that all ranks act on."""

    @abstractmethod
    def at(self, step: int) -> Facts:
        """The facts in force at a step. Call it once for each step, on the training thread; steps
        must grow, and be the same on all ranks."""

    @abstractmethod
    def close(self, *, wait: bool) -> None:
        """End taking part. With ``wait``, return when all ranks have closed."""


class LocalAgreement(Agreement):
    """A process that is alone agrees with itself at once."""

    def __init__(self, facts: Callable[[], Facts]) -> None:
        self._facts = facts

    def at(self, step: int) -> Facts:
        return self._facts()

    def close(self, *, wait: bool) -> None:
        pass


class GroupAgreement(Agreement):
    """The ranks of a gloo group that nobody else uses.

    Args:
        facts: returns the facts of this rank; called from a thread.
        group: the group, which ends with this object, or when the ranks cannot agree any more.
            Nothing else may refer to it. Every rank must make its GroupAgreement.
        on_lost: called with the error, from a thread, when a rank is gone and the ranks can no
            longer agree. From then on, requests to stop act on the rank that they reach. The error
            is a ``Leaving`` if this one has closed.
    """

    def __init__(
        self,
        facts: Callable[[], Facts],
        group: dist.ProcessGroup,
        *,
        on_lost: Callable[[BaseException], object] = bool,
    ) -> None:
        self._facts = facts
        self._group: dist.ProcessGroup | None = group
        self._on_lost = on_lost
        # Guarded by the condition's lock.
        self._condition = threading.Condition(fork_safe_lock())
        self._step = _NEVER
        self._promised: int | None = None
        self._in_force = Facts()
        self._coming: list[tuple[int, Facts]] = []  # and the step that each begins at
        self._over = False
        self._step_seconds = 0.0
        self._stepped = 0.0
        # These need no lock.
        self._closing = threading.Event()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyckpt-agree", daemon=True)
        # A daemon thread inside of gloo must not outlive the interpreter.
        atexit.register(self._leave)
        self._thread.start()

    def at(self, step: int) -> Facts:
        now = time.monotonic()
        with self._condition:
            if self._stepped:
                # A mean of times, not of rates: a program that queues steps for a GPU takes almost
                # no time for some steps, and the time of several for the next.
                took = (now - self._stepped) / max(1, step - self._step)
                took = max(took, _SHORTEST_STEP_SECONDS)
                before = self._step_seconds
                self._step_seconds = 0.8 * before + 0.2 * took if before else took
            self._step, self._stepped = step, now
            while self._promised is not None and step >= self._promised:
                self._condition.wait()
            while self._coming and self._coming[0][0] <= step:
                self._in_force = self._coming.pop(0)[1]
            facts = self._in_force
            alone = self._over and not self._closing.is_set()
        return facts._replace(stops=max(facts.stops, self._facts().stops)) if alone else facts

    def close(self, *, wait: bool) -> None:
        self._closing.set()
        if wait:
            self._thread.join()
            self._leave_group()

    def _leave_group(self) -> None:
        """Destroy the group. It closes its connections when nothing refers to it any more."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(Exception):  # the program may have destroyed it
                dist.destroy_process_group(group)

    def _leave(self) -> None:
        self._closing.set()
        self._left.set()
        self._thread.join(_EXIT_SECONDS)

    def _run(self) -> None:
        lost: RuntimeError | None = None
        try:
            lost = self._agree()
        finally:
            if lost is not None:
                # So that ranks that wait for this one find out at once, too.
                self._leave_group()
            with self._condition:
                self._promised = None
                self._over = True
                self._condition.notify_all()
            # It would keep this object, and what the facts come from. The group is not destroyed
            # here: torch may name a new one by how many there are, which has to be equal on ranks.
            atexit.unregister(self._leave)
        if lost is not None:
            self._on_lost(Leaving(str(lost)) if self._closing.is_set() else lost)

    def _agree(self) -> RuntimeError | None:
        """Take part in rounds until all ranks have closed, or one is gone, which is returned."""
        known = Facts()
        seconds = 0.0
        try:
            while not self._left.is_set():
                start = time.monotonic()
                stops, requests, saved, failed = self._facts()
                open_ranks, *numbers = self._largest(
                    0 if self._closing.is_set() else 1, stops, requests, -saved, failed
                )
                facts = Facts(numbers[0], numbers[1], -numbers[2], numbers[3])
                if facts != known:
                    known = facts
                    (step,) = self._largest(self._promise(seconds))
                    self._announce(step, facts)
                    # How long both halves take, and a bit more.
                    seconds = max(2 * (time.monotonic() - start), 0.9 * seconds)
                    seconds = min(seconds, _AHEAD_SECONDS)
                if not open_ranks:
                    return None
                self._left.wait(_PERIOD_SECONDS)
        except RuntimeError as error:
            # A rank is gone, and training will find out too. Facts in force stay so.
            _logger.log(for_all(logging.WARNING), "ranks cannot agree on saves any more: %s", error)
            traceback.clear_frames(error.__traceback__)  # which refer to the group
            return error
        return None

    def _largest(self, *numbers: int) -> list[int]:
        tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(number) for number in tensor.tolist()]

    def _promise(self, seconds: float) -> int:
        with self._condition:
            if self._step == _NEVER:
                self._promised = _NEVER
            else:
                ahead = seconds / self._step_seconds if self._step_seconds else 0.0
                self._promised = self._step + 1 + int(ahead)
            return self._promised

    def _announce(self, step: int, facts: Facts) -> None:
        with self._condition:
            self._promised = None
            self._coming.append((step, facts))
            self._condition.notify_all()
