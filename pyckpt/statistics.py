"""Statistics of a save or a load on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyckpt import _C

__all__ = ["ReadStatistics", "WriteStatistics"]


@dataclass(frozen=True)
class WriteStatistics:
    """Counts and times of a rank's save, of all of it or so far.

    The seconds of copying, checksumming and writing are summed over the engine's threads. Together
    they may exceed ``seconds``, the wall-clock time.
    """

    items: int = 0
    """Tensors and objects given to the engine."""
    bytes: int = 0
    """Bytes of the rank's files that are laid out; their sizes, once the save is over."""
    bytes_written: int = 0
    """Bytes of the files that have been written, or are being written."""
    seconds: float = 0.0
    """From the opening of the file until it is durable, or until now."""
    copy_seconds: float = 0.0
    """Copying and checksumming in one pass."""
    checksum_seconds: float = 0.0
    """Checksumming bytes that are written in place, or that a GPU copied."""
    write_seconds: float = 0.0
    sync_seconds: float = 0.0
    """Waiting for fsync, at the end."""
    slot_waits: int = 0
    """How often a thread found no free slot in the engine's ring, since other saves held them."""
    direct: bool = False
    """Whether the file was written past the page cache."""
    fallback_reason: str = ""
    """Why it was not, unless ``direct`` asked for the page cache; else empty."""
    bytes_linked: int = 0
    """Bytes of frozen parts that were not written, since a file of an earlier checkpoint has
    them."""

    @property
    def gigabytes_per_second(self) -> float:
        """``bytes_written`` / ``seconds`` / 1e9."""
        return self.bytes_written / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        linked = f", {self.bytes_linked / 1e9:.3f} GB linked" if self.bytes_linked else ""
        return (
            f"{self.items} items, {self.bytes / 1e9:.3f} GB in {self.seconds:.3f} s "
            f"({self.gigabytes_per_second:.2f} GB/s, {how}){linked}"
        )

    @classmethod
    def of(cls, *jobs: _C.WriteStatistics, bytes_linked: int = 0) -> WriteStatistics:
        """The sum over files that were written one after another."""
        return cls(
            items=sum(one.items for one in jobs),
            bytes=sum(one.bytes_added for one in jobs),
            bytes_written=sum(min(one.bytes_written, one.bytes_added) for one in jobs),
            seconds=sum(one.seconds for one in jobs),
            copy_seconds=sum(one.copy_seconds for one in jobs),
            checksum_seconds=sum(one.checksum_seconds for one in jobs),
            write_seconds=sum(one.write_seconds for one in jobs),
            sync_seconds=sum(one.sync_seconds for one in jobs),
            slot_waits=sum(one.slot_waits for one in jobs),
            direct=all(one.direct for one in jobs),
            fallback_reason=next((one.fallback_reason for one in jobs if one.fallback_reason), ""),
            bytes_linked=bytes_linked,
        )


@dataclass(frozen=True)
class ReadStatistics:
    """Counts and times of a rank's load, of all of it or so far.

    The seconds of reading, checksumming and copying are summed over the engine's threads. Together
    they may exceed ``seconds``, the wall-clock time.
    """

    bytes: int
    """Bytes read from disk."""
    bytes_needed: int
    """Bytes that the load asked for. The other bytes lay between them."""
    seconds: float
    """From the first request until the last byte is at its destination, or until now."""
    read_seconds: float
    checksum_seconds: float
    """Checksumming bytes that were read straight to their destination, or that go to a GPU."""
    copy_seconds: float
    """Copying and checksumming in one pass."""
    slot_waits: int
    """How often a thread found no free slot in the engine's ring, since other jobs held them."""
    direct: bool
    """Whether all files were read past the page cache."""
    fallback_reason: str
    """Why they were not, unless ``direct`` asked for the page cache; else empty."""

    @property
    def gigabytes_per_second(self) -> float:
        """``bytes`` / ``seconds`` / 1e9."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        return (
            f"{self.bytes / 1e9:.3f} GB in {self.seconds:.3f} s "
            f"({self.gigabytes_per_second:.2f} GB/s, {how})"
        )

    @classmethod
    def of(cls, jobs: Sequence[Any]) -> ReadStatistics:
        """The sum over jobs that ran one after another."""
        parts = [job.statistics() for job in jobs]
        return cls(
            bytes=sum(part.bytes_read for part in parts),
            bytes_needed=sum(part.bytes_needed for part in parts),
            seconds=sum(part.seconds for part in parts),
            read_seconds=sum(part.read_seconds for part in parts),
            checksum_seconds=sum(part.checksum_seconds for part in parts),
            copy_seconds=sum(part.copy_seconds for part in parts),
            slot_waits=sum(part.slot_waits for part in parts),
            direct=bool(parts) and all(part.direct for part in parts),
            fallback_reason=next((p.fallback_reason for p in parts if p.fallback_reason), ""),
        )
