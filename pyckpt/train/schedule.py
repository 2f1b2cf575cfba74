"""Decides at which steps to save, on the training thread, and equally on all ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pyckpt.train.handle import SaveHandle
from pyckpt.train.policy import Policy
from pyckpt.train.saver import Saver
from pyckpt.train.statistics import Stopwatch
from pyckpt.train.sync.agreement import Agreement
from pyckpt.train.sync.ranks import Ranks
from pyckpt.train.sync.requests import Requests

__all__ = ["Schedule"]

_logger = logging.getLogger("pyckpt")


class Schedule:
    """Starts the saves that are due. For one thread, which trains.

    Args:
        policy: which steps are due.
        when_busy: what to do if a save is due while another is under way; see ``Checkpointer``.
        overwrite: whether a save replaces a checkpoint of its step, unless the call has its own.
        save_last: whether `save_unsaved` saves the last step in any case.
        best_by: the metric by which the best checkpoints are kept, if any.
        saver, requests, agreement, ranks, stopwatch: of the Checkpointer.
        on_skip: called with the step of a save that is left out, and that of the one under way.
        on_begin: called with the step of the first save, before it starts, unless `go_back` was
            called before: training may have begun from nothing, beside checkpoints of an earlier
            run.

    Attributes:
        stop_requested: whether training is asked to stop, and the state was saved for it.
        skipped: how many saves were left out.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        when_busy: Literal["skip", "wait"],
        overwrite: bool,
        save_last: bool,
        best_by: str | None,
        saver: Saver,
        requests: Requests,
        agreement: Agreement,
        ranks: Ranks,
        stopwatch: Stopwatch,
        on_skip: Callable[[int, int], None],
        on_begin: Callable[[int], None],
    ) -> None:
        self._policy = policy
        self._when_busy = when_busy
        self._overwrite = overwrite
        self._save_last = save_last
        self._best_by = best_by
        self._saver = saver
        self._requests = requests
        self._agreement = agreement
        self._ranks = ranks
        self._stopwatch = stopwatch
        self._on_skip = on_skip
        self._on_begin = on_begin
        self._has_begun = False  # whether it is known where training begins
        self._step: int | None = None  # the step of the last call of `step`
        self._saved: SaveHandle | None = None  # the last save since the last restore
        self._calls = 0  # how often `step` was called
        self._owed = False  # whether the last save that was due was left out
        # If so, or with ``save_last``, the arguments of the last call of `step`, which no save has.
        self._last: tuple[int, Mapping[str, Any], Mapping[str, float]] | None = None
        self.stop_requested = False
        self.skipped = 0

    def step(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> SaveHandle | None:
        """See ``Checkpointer.step``."""
        if self._step is not None and step <= self._step:
            raise ValueError(f"{step = } must be larger than the one before it, {self._step}.")
        self._stopwatch.enter(self._saver.busy)
        handle = None
        try:
            # Counted by calls, since steps get smaller when an older one is restored.
            self._calls += 1
            facts = self._agreement.at(self._calls)
            stopping = facts.stops > 0 and not self.stop_requested
            if stopping:
                self.stop_requested = True
            else:
                # If the ranks can no longer agree, each raises the failures that it knows.
                self._saver.raise_failure(None if self._ranks.lost else facts.failed)
            self._step = step
            has_save = self._saved is not None and self._saved.step == step
            if self._owed or (self._save_last and not has_save):
                self._last = (step, state, metrics)
            requested = facts.requests > self._requests.served
            due = self._policy.due_at(step)
            if not (stopping or requested or due):
                return None
            self._ranks.check()
            failed = facts.failed == self._saver.started
            if self._saved is not None and self._saved.step == step and not failed:
                return self._saved  # `save` was called for this step
            busy = facts.saved < self._saver.started
            if busy and not stopping and self._when_busy == "skip":
                if due:  # a request stays, and is served by a later call
                    self._tell_skipped(step)
                    self._owed, self._last = True, (step, state, metrics)
                return None
            self._requests.served = facts.requests
            handle = self._start(step, state, metrics)
            return handle
        finally:
            blocked = None if handle is None else handle.statistics.blocked_seconds
            self._stopwatch.leave(self._saver.busy, blocked)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        final: bool,
        overwrite: bool | None,
    ) -> SaveHandle:
        """See ``Checkpointer.save``."""
        begun = time.perf_counter()
        try:
            self._saver.wait()
            self._saver.raise_failure()
            self._ranks.check()
            handle = self._start(step, state, metrics, final=final, overwrite=overwrite)
            self._stopwatch.blocked(handle.statistics.blocked_seconds)
            if final:
                self._saver.wait()
                self._saver.raise_failure()
        finally:
            self._stopwatch.waited(time.perf_counter() - begun)
            self._stopwatch.pause()
        return handle

    def go_back(self, step: int) -> None:
        """The state of a step was restored."""
        self._has_begun = True
        if self._step is not None:
            self._step = min(self._step, step)
        self._saved = None  # its state was replaced
        self._owed, self._last = False, None

    def save_unsaved(self) -> None:
        """Training ends: save the state of the last `step`, if a save before it was left out, or if
        the last one is saved in any case."""
        if self._last is not None and self._ranks.lost is None:
            self._start(*self._last)

    def _start(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        final: bool = False,
        overwrite: bool | None = None,
    ) -> SaveHandle:
        best_by = self._best_by
        if best_by is not None and best_by not in metrics and self._ranks.rank == 0:
            _logger.warning("step %d has no metric %r, and is not among the best", step, best_by)
        if not self._has_begun:
            self._has_begun = True
            self._on_begin(step)
        self._requests.saving()
        self._owed, self._last = False, None
        self._saved = self._saver.start(
            step,
            state,
            metrics,
            final=final,
            overwrite=self._overwrite if overwrite is None else overwrite,
        )
        return self._saved

    def _tell_skipped(self, step: int) -> None:
        assert self._saver.handle is not None
        self.skipped += 1
        self._on_skip(step, self._saver.handle.step)
