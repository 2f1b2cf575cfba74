"""How often to save: what it costs against what a failure costs.

J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22
(2006), equation 37.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Advice", "advise", "daly_interval"]


def daly_interval(cost: float, mtbf: float) -> float:
    """The time between saves that loses least, by Daly's higher-order estimate.

    Args:
        cost: what one save costs the training, in seconds.
        mtbf: the mean time between failures of the whole job, in seconds.
    """
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@dataclass(frozen=True)
class Advice:
    """How often to save. ``str(advice)`` says it in a line."""

    mtbf_hours: float
    """The mean time between failures of the whole job that this is for."""
    interval_seconds: float
    """Time from save to save."""
    interval_steps: int
    """The same in steps."""
    overhead: float
    """The share of time that is lost to saving, and to doing again what failures undid."""
    save_seconds: float
    """What a save costs the training: the time that it blocks, and that it slows the steps by."""
    limited: bool
    """Whether saving more often would lose less, and a save takes too long to commit for that."""

    def __str__(self) -> str:
        bound = ", which is as often as saves get done" if self.limited else ""
        return (
            f"with a failure every {self.mtbf_hours:g} h, save every {self.interval_steps} steps "
            f"({self.interval_seconds:.3g} s){bound}: {self.overhead:.2%} of the time is lost"
        )


def advise(
    *,
    mtbf_hours: float,
    save_seconds: float,
    commit_seconds: float,
    step_seconds: float,
    restart_seconds: float = 0.0,
) -> Advice:
    """The interval that loses least.

    Args:
        mtbf_hours: the mean time between failures of the whole job.
        save_seconds: what one save costs the training.
        commit_seconds: from the call to the commit. What is done meanwhile is lost with a failure
            as well, and the next save cannot begin.
        step_seconds: time of one step without a save.
        restart_seconds: from a failure to training again.

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
    # A failure undoes half an interval on average, and what the save in flight had not committed.
    undone = interval / 2 + commit_seconds + restart_seconds
    return Advice(
        mtbf_hours=mtbf_hours,
        interval_seconds=interval,
        interval_steps=steps,
        overhead=min(1.0, save_seconds / interval + undone / mtbf),
        save_seconds=save_seconds,
        limited=commit_seconds > max(best, step_seconds),
    )
