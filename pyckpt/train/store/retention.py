"""Which checkpoints are kept, as a function of the existing ones and of the settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pyckpt.train.arguments import whole
from pyckpt.train.store.catalog import CheckpointInfo

__all__ = ["Best", "Retention", "stays_unread", "surplus"]

_logger = logging.getLogger("pyckpt")

Best = tuple[str, int, Literal["min", "max"]]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep. The newest valid one, final ones and protected ones always stay.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a number is out of range, or the mode none of the two.
    """

    keep_last: int | None = None
    """How many of the newest to keep. None keeps all, whatever the other two are. 0 keeps none once
    a newer or final one exists."""
    keep_every: int | None = None
    """Keep also checkpoints whose step is a multiple of this."""
    keep_best: Best | None = None
    """``(metric, n, mode)``: keep also the n with the smallest ("min") or largest ("max") value."""

    def __post_init__(self) -> None:
        if self.keep_last is not None:
            whole("keep_last", self.keep_last, least=0)
        if self.keep_every is not None:
            whole("keep_every", self.keep_every, least=1)
        if self.keep_best is not None:
            best = self.keep_best
            if not isinstance(best, tuple | list) or len(best) != 3 or not isinstance(best[0], str):
                raise TypeError(
                    f"keep_best = {self.keep_best!r} must be (metric, n, 'min' or 'max')."
                )
            whole("the n of keep_best", best[1], least=1)
            if best[2] not in ("min", "max"):
                raise ValueError(f"keep_best = {self.keep_best!r} must end with 'min' or 'max'.")

    def tell_of_contradiction(self) -> None:
        """Log if a setting has no effect because of another."""
        if self.keep_last is None and (self.keep_every, self.keep_best) != (None, None):
            _logger.warning(
                "keep_last=None keeps all checkpoints, whatever keep_every and keep_best say; pass "
                "keep_last=1 to keep the newest and theirs"
            )


def surplus(
    checkpoints: Sequence[CheckpointInfo],
    retention: Retention,
    *,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps that need not be kept, oldest first.

    Args:
        checkpoints: the valid ones, in any order, each step once.
        retention: which ones to keep.
        protected: other steps to keep.
    """
    if retention.keep_last is None or not checkpoints:
        return []
    keep = {checkpoint.step for checkpoint in checkpoints if checkpoint.final}
    # Final ones do not count among the newest, which are kept to resume from.
    newest = sorted((c.step for c in checkpoints if not c.final), reverse=True)
    keep.update(newest[: retention.keep_last])
    keep.add(max(checkpoint.step for checkpoint in checkpoints))
    keep.update(protected)
    if retention.keep_every is not None:
        keep.update(step for step in newest if step % retention.keep_every == 0)
    if retention.keep_best is not None:
        keep.update(_best(checkpoints, retention.keep_best))
    return [step for step in reversed(newest) if step not in keep]


def _best(checkpoints: Sequence[CheckpointInfo], best: Best) -> list[int]:
    metric, count, mode = best
    # Of equal ones the newer. Checkpoints without a number are not among the best.
    ranked = sorted(
        (checkpoint.metrics[metric] * (1 if mode == "min" else -1), -checkpoint.step)
        for checkpoint in checkpoints
        if not math.isnan(checkpoint.metrics.get(metric, math.nan))
    )
    return [-step for _, step in ranked[:count]]


def stays_unread(step: int, newer: Sequence[CheckpointInfo], retention: Retention) -> bool:
    """Whether a checkpoint is kept whatever its metadata says, so that the metadata need not be
    read. There may be thousands of checkpoints."""
    if retention.keep_last is None:
        return bool(newer)
    if retention.keep_every is None or retention.keep_best is not None:
        return False
    enough = sum(not checkpoint.final for checkpoint in newer) >= max(1, retention.keep_last)
    return enough and step % retention.keep_every == 0
