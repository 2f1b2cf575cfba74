"""The cost of saving to a training run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from pyckpt.train.advice import Advice, advise
from pyckpt.train.tiers.jobs import MirrorStatistics

__all__ = ["CheckpointerStatistics", "Stopwatch"]

_SAMPLES = 512
_DAY_HOURS = 24.0


@dataclass(frozen=True)
class CheckpointerStatistics:
    """Counts and times of a Checkpointer on this rank so far. Times in seconds are medians, unless
    stated otherwise."""

    saves: int = 0
    """Saves that were started."""
    failed: int = 0
    skipped: int = 0
    """Saves that were left out, because another one was under way when they were due."""
    pruned: int = 0
    """Checkpoints that were removed (counted on rank 0)."""
    blocked_seconds: float = 0.0
    """How long a call that starts a save takes."""
    slowed_seconds: float = 0.0
    """By how much a save slows the steps that run beside it: a mean, summed over these steps."""
    commit_seconds: float = 0.0
    """From the call to the commit."""
    step_seconds: float = 0.0
    """From one call of ``step`` to the next, while nothing is saved."""
    restore_seconds: float = 0.0
    """Duration of the last ``restore``."""
    mirror: MirrorStatistics | None = None
    """What this rank has brought to the mirror; None without one."""
    lost_seconds: float = 0.0
    """What all saves together have cost training: the calls that started them or waited for them,
    and by how much the steps beside them were slower than the median of the others. A sum."""

    def advice(self, mtbf_hours: float) -> Advice | None:
        """How often to save. None before a save and a step were measured.

        Args:
            mtbf_hours: the mean time between failures of the whole job.

        Raises:
            ValueError: ``mtbf_hours`` is not positive.
        """
        if not mtbf_hours > 0:
            raise ValueError(f"{mtbf_hours = } must be positive.")
        if not self.commit_seconds or not self.step_seconds:
            return None
        return advise(
            mtbf_hours=mtbf_hours,
            save_seconds=self.blocked_seconds + self.slowed_seconds,
            commit_seconds=self.commit_seconds,
            step_seconds=self.step_seconds,
            restart_seconds=self.restore_seconds,
        )

    def __str__(self) -> str:
        text = (
            f"{self.saves} saves ({self.failed} failed, {self.skipped} skipped), "
            f"{self.pruned} pruned; a save blocks {1e3 * self.blocked_seconds:.1f} ms, slows steps "
            f"by {1e3 * self.slowed_seconds:.1f} ms, commits after {self.commit_seconds:.3f} s; "
            f"a step takes {1e3 * self.step_seconds:.1f} ms"
        )
        advice = self.advice(_DAY_HOURS)
        return text if advice is None else f"{text}; {advice}"


class Stopwatch:
    """Measures steps that run beside a save, and steps that run alone. For one thread, except
    ``committed``."""

    def __init__(self) -> None:
        self._left: float | None = None
        self._alone: deque[float] = deque(maxlen=_SAMPLES)
        self._beside: deque[float] = deque(maxlen=_SAMPLES)
        self._beside_count = 0
        self._beside_seconds = 0.0
        self._waited_seconds = 0.0
        self._entered = 0.0
        self._beside_saves = 0
        self._was_saving = False
        self._blocked: deque[float] = deque(maxlen=_SAMPLES)
        self._commits: deque[float] = deque(maxlen=_SAMPLES)

    def enter(self, saving: bool) -> None:
        """A call of the training loop begins: a step is over."""
        self._entered = time.perf_counter()
        if self._left is not None:
            seconds = time.perf_counter() - self._left
            if saving or self._was_saving:
                self._beside.append(seconds)
                self._beside_count += 1
                self._beside_seconds += seconds
            else:
                self._alone.append(seconds)

    def leave(self, saving: bool, blocked: float | None) -> None:
        """The call returns. ``blocked`` is its time for starting a save; None if it did not."""
        if blocked is not None:
            self._blocked.append(blocked)
            self.waited(time.perf_counter() - self._entered)
            self._beside_saves += 1
        self._was_saving = saving
        self._left = time.perf_counter()

    def blocked(self, seconds: float) -> None:
        """A call outside of ``enter`` and ``leave`` has started a save, in so many seconds."""
        self._blocked.append(seconds)

    def waited(self, seconds: float) -> None:
        """Training has waited for a save."""
        self._waited_seconds += seconds

    def pause(self) -> None:
        """Do not count the time until the next call as a step."""
        self._left = None

    def committed(self, seconds: float) -> None:
        self._commits.append(seconds)

    @property
    def lost_seconds(self) -> float:
        """See ``CheckpointerStatistics``. Any thread may read it."""
        alone = self._alone.copy()  # the training thread may be appending to it
        slowed = 0.0
        if alone:
            slowed = self._beside_seconds - self._beside_count * statistics.median(alone)
        return self._waited_seconds + max(0.0, slowed)

    def statistics(self, **counts: Any) -> CheckpointerStatistics:
        # The thread that saves, and that of training, may be appending to these.
        alone, beside = self._alone.copy(), self._beside.copy()
        blocked, commits = self._blocked.copy(), self._commits.copy()
        step = statistics.median(alone) if alone else 0.0
        slowed = 0.0
        if alone and beside and self._beside_saves:
            extra = statistics.fmean(beside) - step
            slowed = max(0.0, extra * self._beside_count / self._beside_saves)
        return CheckpointerStatistics(
            blocked_seconds=statistics.median(blocked) if blocked else 0.0,
            slowed_seconds=slowed,
            commit_seconds=statistics.median(commits) if commits else 0.0,
            step_seconds=step,
            lost_seconds=self.lost_seconds,
            **counts,
        )
