"""What a save or a load did, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyckpt import _C

__all__ = ["ReadStatistics", "WriteStatistics"]


@dataclass(frozen=True)
class WriteStatistics:
    """What a rank's save did, or what it did so far.

    The seconds of copying, checksumming and writing are summed over the engine's threads, so that
    together they may exceed ``seconds``, the time that passed.
    """

    items: int = 0
    """Tensors and objects given to the engine."""
    bytes: int = 0
    """Bytes of the rank's file that have their place in it; its size, once the save is over."""
    bytes_written: int = 0
    """Bytes that are on their way to, or on, the disk."""
    seconds: float = 0.0
    """From opening the file to its being durable, or to now."""
    copy_seconds: float = 0.0
    """Copying, with the checksums of what is copied: one pass makes both."""
    checksum_seconds: float = 0.0
    """Checksums of what is not copied: of memory written from where it is, or copied by a GPU."""
    write_seconds: float = 0.0
    sync_seconds: float = 0.0
    """Waiting for the disk to have everything (fsync), at the end."""
    slot_waits: int = 0
    """How often a thread found no free slot in the engine's ring: another save held them."""
    direct: bool = False
    """Whether the file was written past the page cache."""
    fallback_reason: str = ""
    """Why it was not, if ``direct`` did not ask for that; else empty."""

    @property
    def gigabytes_per_second(self) -> float:
        """``bytes_written`` / ``seconds`` / 1e9."""
        return self.bytes_written / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        return (
            f"{self.items} items, {self.bytes / 1e9:.3f} GB in {self.seconds:.3f} s "
            f"({self.gigabytes_per_second:.2f} GB/s, {how})"
        )

    @classmethod
    def of(cls, native: _C.WriteStatistics) -> WriteStatistics:
        return cls(
            items=native.items,
            bytes=native.bytes_added,
            bytes_written=min(native.bytes_written, native.bytes_added),
            seconds=native.seconds,
            copy_seconds=native.copy_seconds,
            checksum_seconds=native.checksum_seconds,
            write_seconds=native.write_seconds,
            sync_seconds=native.sync_seconds,
            slot_waits=native.slot_waits,
            direct=native.direct,
            fallback_reason=native.fallback_reason,
        )


@dataclass(frozen=True)
class ReadStatistics:
    """What a rank's load did, or what it did so far.

    The seconds of reading, checksumming and copying are summed over the engine's threads, so that
    together they may exceed ``seconds``, the time that passed.
    """

    bytes: int
    """Bytes read from disk."""
    bytes_needed: int
    """Bytes that were asked for; the rest lay between them."""
    seconds: float
    """From the first request to the last byte's being at its destination, or to now."""
    read_seconds: float
    checksum_seconds: float
    """Checksums of what is not copied: of what was read straight to where it belongs, or goes to a
    GPU."""
    copy_seconds: float
    """Copying, with the checksums of what is copied."""
    slot_waits: int
    """How often a thread found no free slot in the engine's ring: another job held them."""
    direct: bool
    """Whether all files were read past the page cache."""
    fallback_reason: str
    """Why they were not, if ``direct`` did not ask for that; else empty."""

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
    def of(cls, jobs: Sequence[_C.ReadJob]) -> ReadStatistics:
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
