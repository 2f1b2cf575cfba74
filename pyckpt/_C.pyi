"""The native engine. Private: use ``pyckpt.Engine`` and what stands on it."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor
from typing_extensions import Buffer

torch_version: str
cuda: bool

def crc32(buffer: Buffer, crc: int = 0) -> int:
    """CRC-32 (that of zip) of ``buffer`` appended to bytes whose checksum is ``crc``."""

def crc32_shift(crc: int, size: int) -> int:
    """What bytes of checksum ``crc`` contribute to a checksum when ``size`` bytes follow them:
    ``crc32(a + b) == crc32_shift(crc32(a), len(b)) ^ crc32(b)``."""

class Envelope:
    """The bytes before and after a tensor's raw bytes; see ``pyckpt.format.envelope``."""

    prefix: bytes
    payload_size: int
    def __init__(
        self,
        *,
        prefix: bytes,
        suffix: bytes,
        payload_size: int,
        crc_positions: Sequence[int],
        id_position: int = 0,
        id_size: int = 0,
        id_hash_position: int = 0,
        id_crc_positions: Sequence[int] = ...,
        crcs_before: Sequence[int] = ...,
        crcs_after: Sequence[int] = ...,
    ) -> None: ...
    def suffix(self, crc: int) -> bytes:
        """The suffix for a payload of checksum ``crc``."""

class WriteStatistics:
    """What a job did so far. Seconds of the four kinds are summed over threads."""

    items: int
    bytes_added: int
    bytes_written: int
    seconds: float
    copy_seconds: float
    checksum_seconds: float
    write_seconds: float
    sync_seconds: float
    slot_waits: int
    direct: bool
    fallback_reason: str

class WriteJob:
    """One file on its way to disk. For one thread at a time, but for ``statistics``.

    The first error, wherever it happens, is raised from every later call. A job that is dropped
    before ``finish`` returned removes its file.
    """

    def add_tensor(self, tensor: Tensor, envelope: Envelope) -> bool:
        """Append a tensor. Its memory must not change until ``finish``. Returns False, and does
        nothing, where the tensor is not plain memory."""

    def add_bytes(self, buffer: Buffer) -> None:
        """Append an item that is these bytes."""

    def finish(self) -> list[tuple[int, int, int, int, int]]:
        """Wait until the file is complete (and durable, with ``sync``). Returns for each item its
        offset, length, CRC-32 of the payload, offset of the payload within the item, and length of
        the payload; all in bytes."""

    def abandon(self) -> None:
        """Stop and remove the file. Idempotent; does nothing after ``finish``."""

    def statistics(self) -> WriteStatistics: ...

class ReadStatistics:
    """What a job did so far. Seconds of the three kinds are summed over threads."""

    ranges: int
    bytes_needed: int
    bytes_read: int
    seconds: float
    copy_seconds: float
    checksum_seconds: float
    read_seconds: float
    slot_waits: int
    direct: bool
    fallback_reason: str

class ReadJob:
    """Ranges of files on their way to memory. For one thread at a time, but for ``statistics``.

    Ranges are numbered in the order they were added."""

    def add_file(self, path: str | bytes) -> int:
        """Open a file; returns its number."""

    def add_tensor(
        self, file: int, offset: int, tensor: Tensor, file_stride: Sequence[int] | None = None
    ) -> int | None:
        """Fill a tensor from ``offset`` bytes on. Its elements stand in the file with the strides
        ``file_stride`` (in elements; row-major order without gaps by default). Returns the number
        of the range; -1 where several were needed, for a box with wide gaps; None, and does
        nothing, where the tensor cannot be filled: it is no plain memory, or on a GPU and not laid
        out as in the file."""

    def add_buffer(self, file: int, offset: int, buffer: Buffer) -> int:
        """Fill a buffer. Returns the number of the range."""

    def run(self) -> list[int]:
        """Read everything. Returns the CRC-32 of each range, gaps included (0 where the job does
        not checksum)."""

    def statistics(self) -> ReadStatistics: ...

class Engine:
    def __init__(self, *, slot_bytes: int, slots: int, io_threads: int) -> None: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def write(
        self,
        path: str | bytes,
        *,
        direct: Literal["auto", "require", "off"] = "auto",
        sync: bool = True,
        preallocate: int = 0,
    ) -> WriteJob:
        """Start to write a new file. ``preallocate`` is the size expected, in bytes."""

    def read(
        self, *, direct: Literal["auto", "require", "off"] = "auto", checksum: bool = True
    ) -> ReadJob:
        """Start to gather what to read."""
