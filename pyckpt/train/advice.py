"""How often to save, by the cost of a save and the cost of a failure.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
(2006), equation 37.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyckpt.printable import seconds_text

__all__ = ["Advice", "advise", "daly_interval"]


def daly_interval(cost: float, mtbf: float) -> float:
    """The time between saves that loses the least time, in seconds; Daly's higher-order estimate.

    Args:
        cost: time that one save costs the training, in seconds.
        mtbf: the mean time between failures of the whole job, in seconds.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass(frozen=True)
class Advice:
    """How often to save. ``str(advice)`` is a summary in one line."""

    mtbf_hours: float
    """The mean time between failures of the whole job."""
    interval_seconds: float
    """Time from save to save."""
    interval_steps: int
    """Steps from save to save."""
    overhead: float
    """The share of time, from 0 to 1, that saves and the repetition of undone steps cost."""
    save_seconds: float
    """The cost of a save to the training: the time that it blocks, and by which it slows steps."""
    limited: bool
    """Whether a shorter interval would lose less time, but saves take too long to commit."""

    def __str__(self) -> str:
        bound = ", which is as often as saves get done" if self.limited else ""
        return (
            f"with a failure every {self.mtbf_hours:g} h, save every {self.interval_steps} steps "
            f"({seconds_text(self.interval_seconds)}){bound}: "
            f"{self.overhead:.2%} of the time is lost"
        )


def advise(
    *,
    mtbf_hours: float,
    save_seconds: float,
    commit_seconds: float,
    step_seconds: float,
    restart_seconds: float = 0.0,
) -> Advice:
    """Return the interval that loses the least time.

    Args:
        mtbf_hours: the mean time between failures of the whole job.
        save_seconds: time that one save costs the training.
        commit_seconds: from the call to the commit. A failure before the commit also undoes the
            steps since the call, and the next save cannot begin before the commit.
        step_seconds: time of one step without a save.
        restart_seconds: from a failure until training goes on.

    Raises:
        ValueError: ``mtbf_hours`` or ``step_seconds`` is not positive.
    """
    if not mtbf_hours > 0:
        raise ValueError(f"{mtbf_hours = } must be positive.")
    if not step_seconds > 0:
        raise ValueError(f"{step_seconds = } must be positive.")
    mtbf = 3600 * mtbf_hours
    best = daly_interval(save_seconds, mtbf)
    steps = max(1, round(best / step_seconds), math.ceil(commit_seconds / step_seconds))
    interval = steps * step_seconds
    # A failure undoes half an interval on average, and the steps since the call of a save that is
    # not committed yet.
    undone = interval / 2 + commit_seconds + restart_seconds
    return Advice(
        mtbf_hours=mtbf_hours,
        interval_seconds=interval,
        interval_steps=steps,
        overhead=min(1.0, save_seconds / interval + undone / mtbf),
        save_seconds=save_seconds,
        limited=commit_seconds > max(best, step_seconds),
    )
