"""A checkpoint on its way to the mirror, and what was brought there so far."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from pyckpt.train.store.pruner import Protection

__all__ = ["MirrorStatistics", "PromotionJob"]


@dataclass(frozen=True)
class MirrorStatistics:
    """What this rank has brought to the mirror so far."""

    promoted: int = 0
    """Checkpoints that are there: on rank 0 the committed ones, on others those of which this rank
    has brought its file there."""
    dropped: int = 0
    """Checkpoints that were given up, since newer ones waited or their files were gone."""
    failures: int = 0
    """Attempts that failed."""
    queued: tuple[int, ...] = ()
    """Steps that are not there yet, oldest first."""
    bytes: int = 0
    """Bytes of this rank's files that were copied, failed attempts included."""
    seconds: float = 0.0
    """From the local commits of the promoted checkpoints to their commits in the mirror, summed."""
    last_step: int | None = None
    """The newest step that was promoted."""
    last_error: str = ""
    """The last error; empty once an attempt has succeeded."""


@dataclass
class PromotionJob:
    """A checkpoint on its way."""

    step: int
    path: Path
    file: Path | None
    """This rank's data file, if it wrote one."""
    protection: Protection
    final: bool
    branch: int
    """How often training had gone back before it was saved."""
    metadata: bytes | None
    """Of the checkpoint, on ranks that need it, and empty on others; None until it was read."""
    since: float = field(default_factory=time.monotonic)
    overwrite: bool = True
    """Whether a checkpoint there of the same step may be replaced."""
    is_clear: bool = False
    """Whether it is known that none is there, if it may not."""
    frozen: tuple[Path, ...] = ()
    """Its files of frozen parts, which an earlier checkpoint there may have, too."""
