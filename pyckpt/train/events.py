"""What a `Checkpointer` tells its ``on_event``: an object of one of these classes for each event.

The classes are frozen dataclasses. Seconds of a save count from the call that started it. All of an
event is of the rank that tells it, unless a field says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyckpt import statistics as _statistics

__all__ = [
    "Event",
    "Pruned",
    "Restored",
    "SaveCommitted",
    "SaveFailed",
    "SaveSkipped",
    "SaveStaged",
    "SaveStarted",
    "SaveWritten",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all events have."""

    step: int
    path: Path
    """Directory of the checkpoint."""
    rank: int
    time: float
    """When it happened, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class SaveStarted(Event):
    """A call has started a save."""

    queue_depth: int
    """How many saves are under way, with this one."""


@dataclass(frozen=True, kw_only=True)
class SaveSkipped(Event):
    """A save was due and left out, since the one before it was still under way."""

    queue_depth: int


@dataclass(frozen=True, kw_only=True)
class SaveStaged(Event):
    """The state is copied, and may change."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveWritten(Event):
    """The data of this rank is on disk. The checkpoint is not valid yet."""

    seconds: float
    bytes: int
    """That this rank wrote; 0 if it had nothing to write."""
    statistics: _statistics.WriteStatistics | None
    """Counts and times of writing; None if this rank had nothing to write."""


@dataclass(frozen=True, kw_only=True)
class SaveCommitted(Event):
    """The checkpoint is valid and durable, on all ranks."""

    seconds: float
    blocked_seconds: float
    """How long the call took that started the save. NaN if it has not returned yet."""
    bytes: int
    """That this rank wrote."""
    checkpoint_bytes: int | None
    """Of the whole checkpoint; known on rank 0, and None elsewhere."""
    lost_seconds: float
    """What all saves of this Checkpointer have cost training so far: see
    ``CheckpointerStatistics``."""
    memory_bytes: int
    """That the engine holds for copies of the state."""
    queue_depth: int
    """How many saves are under way, without this one."""

    @property
    def gigabytes_per_second(self) -> float:
        """Of the whole checkpoint if that is known, else of this rank: bytes / seconds / 1e9."""
        size = self.bytes if self.checkpoint_bytes is None else self.checkpoint_bytes
        return size / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class SaveFailed(Event):
    """A save failed, on all ranks. The checkpoint that was there before stays."""

    seconds: float
    error: BaseException
    """The one that the next call of the Checkpointer raises."""
    queue_depth: int


@dataclass(frozen=True, kw_only=True)
class Restored(Event):
    """A checkpoint was restored."""

    place: Path | str
    """Where it was read: ``path``, or a directory or URL in the mirror."""
    seconds: float
    """Of the whole call, with looking for the checkpoint."""
    bytes: int
    """That this rank read."""


@dataclass(frozen=True, kw_only=True)
class Pruned(Event):
    """A checkpoint was removed. Told by rank 0."""


OnEvent = Callable[[Event], object]
