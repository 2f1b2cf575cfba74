"""`RemoteJob`: ranges of objects on their way to memory, in few requests, many at a time."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pyckpt import _C
from pyckpt.errors import CorruptCheckpoint
from pyckpt.locks import fork_safe_lock
from pyckpt.remote.address import telling

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["GAP_BYTES", "GET_BYTES", "RemoteJob"]

GET_BYTES = 64 << 20
"""A request asks for so much at most."""
GAP_BYTES = 1 << 20
"""Ranges that are no further apart are read by one request: a request costs more than the bytes."""
_BOX_BYTES = 8 << 20
"""A box with gaps goes through memory of its own, so much at a time."""
_CHUNK_BYTES = 1 << 20
_THREADS = 8
_ATTEMPTS = 4
_PATIENCE_SECONDS = 0.5


@dataclass(slots=True)
class _Range:
    """A run of bytes of an object, and the memory that they go to.

    Attributes:
        number: what the caller knows it by. The parts of a box have one number.
        memory: bytes, of one dimension, without gaps; None for memory of its own, which there is
            only while they arrive.
        place: called with memory of its own when all have arrived.
    """

    number: int
    file: int
    begin: int
    end: int
    memory: torch.Tensor | None
    place: Callable[[torch.Tensor], None] | None = None
    missing: int = 0


@dataclass(slots=True)
class _Get:
    """One request, and the parts of ranges that it brings, in their order in the object."""

    file: int
    begin: int
    end: int
    ranges: list[_Range]
    placed: int = 0
    """How many of the ranges, from the first on, need nothing more of this request."""


@dataclass
class RemoteStatistics:
    """Counts and times, by the names that ``_C.ReadJob`` has for them."""

    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0
    checksum_seconds: float = 0.0
    copy_seconds: float = 0.0
    slot_waits: int = 0
    direct: bool = False
    fallback_reason: str = ""
    requests: int = 0


class RemoteJob:
    """What ``_C.ReadJob`` is for files: the caller adds ranges, and ``run`` reads them.

    Ranges that lie near each other share a request. Requests run in several threads, and what
    arrives is copied to its place at once, so a job needs little memory besides.

    Args:
        store: of obstore.
        url: its address, for messages.
        checksum: whether to compute the checksums of what is read.
    """

    def __init__(self, store: ObjectStore, url: str, *, checksum: bool) -> None:
        self._store = store
        self._url = url
        self._checksum = checksum
        self._names: list[str] = []
        self._ranges: list[_Range] = []
        # Of each number: where in the object a part begins, its CRC-32, and its bytes.
        self._parts: list[list[tuple[int, int, int]]] = []
        self._statistics = RemoteStatistics()
        self._lock = fork_safe_lock()
        self._failed = False

    def add_object(self, name: str) -> int:
        """Name an object; returns its number."""
        self._names.append(name)
        return len(self._names) - 1

    def add_buffer(self, file: int, offset: int, buffer: bytearray) -> int:
        """Fill a buffer from ``offset`` bytes on. Returns the number of the range."""
        number = self._numbered()
        if buffer:
            self._add(number, file, offset, torch.frombuffer(buffer, dtype=torch.uint8))
        return number

    def add_tensor(
        self,
        file: int,
        offset: int,
        tensor: torch.Tensor,
        file_stride: Sequence[int] | None = None,
    ) -> int | None:
        """Fill a tensor, as ``_C.ReadJob.add_tensor`` does."""
        if not _is_plain(tensor):
            return None
        stride = _dense(tensor.shape) if file_stride is None else file_stride
        has_gaps = tensor.numel() > 0 and not _is_dense(tensor.shape, stride)
        number = self._numbered()
        if tensor.is_contiguous() and not has_gaps:
            self._add(number, file, offset, tensor.view(-1).view(torch.uint8))
        else:
            self._add_box(number, file, offset, tensor, stride)
        return -1 if has_gaps else number

    def add_tensors(
        self, files: Sequence[int], offsets: Sequence[int], tensors: Sequence[torch.Tensor]
    ) -> list[int | None]:
        """``add_tensor`` for each of several, which have no gaps in their objects."""
        added = zip(files, offsets, tensors, strict=True)
        return [self.add_tensor(file, offset, tensor) for file, offset, tensor in added]

    def _numbered(self) -> int:
        self._parts.append([])
        return len(self._parts) - 1

    def _add(self, number: int, file: int, offset: int, memory: torch.Tensor) -> None:
        if memory.numel():
            self._ranges.append(_Range(number, file, offset, offset + memory.numel(), memory))

    def _add_box(
        self, number: int, file: int, offset: int, target: torch.Tensor, stride: Sequence[int]
    ) -> None:
        """Read a box, whose elements have gaps between them in the object or in memory, through
        memory of its own: in parts that are not too large, with their gaps."""
        if target.numel() == 0:
            return
        extent = sum((n - 1) * s for n, s in zip(target.shape, stride, strict=True)) + 1
        size = extent * target.itemsize
        if size > _BOX_BYTES and target.numel() > 1:
            # Along the dimension with the widest steps: parts of what has no gaps have none.
            wide = max(
                (d for d in range(target.dim()) if target.shape[d] > 1), key=stride.__getitem__
            )
            count = target.shape[wide]
            for begin, end in ((0, count // 2), (count // 2, count)):
                at = offset + begin * stride[wide] * target.itemsize
                part = target.narrow(wide, begin, end - begin)
                self._add_box(number, file, at, part, stride)
            return

        def place(memory: torch.Tensor) -> None:
            target.copy_(memory.view(target.dtype).as_strided(target.shape, stride))

        self._ranges.append(_Range(number, file, offset, offset + size, None, place))

    def run(self) -> list[int]:
        """Read everything. Returns the CRC-32 of each range (0 where the job does not checksum).

        Raises:
            OSError: the store failed, also when asked again; FileNotFoundError: an object is gone.
            CorruptCheckpoint: an object is shorter than a range.
        """
        begin = time.perf_counter()
        gets = _plan(self._ranges)
        self._statistics.bytes_needed += sum(one.end - one.begin for one in self._ranges)
        try:
            if len(gets) <= 1:
                for get in gets:
                    self._fetch(get)
            else:
                threads = ThreadPoolExecutor(
                    min(_THREADS, len(gets)), thread_name_prefix="pyckpt-get"
                )
                with threads:
                    for done in [threads.submit(self._fetch, get) for get in gets]:
                        done.result()
        finally:
            self._statistics.seconds += time.perf_counter() - begin
        self._ranges = []
        return [_combined(parts) for parts in self._parts]

    def statistics(self) -> Any:
        return self._statistics

    def _fetch(self, get: _Get) -> None:
        """Read what one request brings; after an error, ask for the rest of it again."""
        at = get.begin
        name = self._names[get.file]
        for attempt in range(_ATTEMPTS):
            if self._failed:
                return  # another request has: the job is lost
            try:
                with telling(f"{self._url}/{name}"):
                    for chunk in self._chunks(name, at, get.end):
                        self._place(get, at, chunk)
                        at += len(chunk)
                if at < get.end:
                    raise CorruptCheckpoint(
                        f"{self._url}/{name} ends at {at}, and {get.end} bytes were saved",
                        path=f"{self._url}/{name}",
                        expected=get.end,
                        found=at,
                    )
                return
            except (FileNotFoundError, PermissionError, CorruptCheckpoint):
                self._failed = True
                raise
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    self._failed = True
                    raise
                time.sleep(_PATIENCE_SECONDS * 2**attempt)
            except BaseException:
                self._failed = True
                raise

    def _chunks(self, name: str, begin: int, end: int) -> Any:
        import obstore

        start = time.perf_counter()
        if begin == end:
            return
        with self._lock:
            self._statistics.requests += 1
        found = obstore.get(self._store, name, options={"range": (begin, end)})
        for chunk in found.stream(min_chunk_size=_CHUNK_BYTES):
            with self._lock:
                self._statistics.bytes_read += len(chunk)
                self._statistics.read_seconds += time.perf_counter() - start
            yield chunk
            start = time.perf_counter()

    def _place(self, get: _Get, at: int, chunk: bytes) -> None:
        """Copy what has arrived to where it belongs."""
        end = at + len(chunk)
        start = time.perf_counter()
        arrived = memoryview(chunk)
        for index in range(get.placed, len(get.ranges)):
            one = get.ranges[index]
            if one.begin >= end:
                break
            first, last = max(at, one.begin), min(end, one.end)
            if first < last:
                self._fill(one, first - one.begin, chunk, first - at, last - first)
                if self._checksum:
                    crc32 = _C.crc32(arrived[first - at : last - at])
                    with self._lock:
                        self._parts[one.number].append((first, crc32, last - first))
            if one.end <= end and index == get.placed:
                get.placed += 1
        with self._lock:
            self._statistics.copy_seconds += time.perf_counter() - start

    def _fill(self, one: _Range, at: int, chunk: bytes, begin: int, count: int) -> None:
        """Copy bytes of a chunk, from ``begin`` on, to where they belong in a range."""
        if one.place is None:
            assert one.memory is not None
            _copy(chunk, begin, one.memory[at : at + count])
            return
        with self._lock:
            if one.memory is None:
                one.missing = one.end - one.begin
                one.memory = torch.empty(one.missing, dtype=torch.uint8, device="cpu")
            memory = one.memory
        _copy(chunk, begin, memory[at : at + count])
        with self._lock:
            one.missing -= count
            if one.missing:
                return
            one.memory = None
        one.place(memory)


def _combined(parts: Sequence[tuple[int, int, int]]) -> int:
    """The CRC-32 of bytes from those of their parts."""
    crc32 = 0
    for _, part, length in sorted(parts):
        crc32 = _C.crc32_shift(crc32, length) ^ part
    return crc32


def _plan(ranges: Sequence[_Range]) -> list[_Get]:
    """The requests for some ranges: none over ``GET_BYTES``, and none for gaps alone."""
    gets: list[_Get] = []
    for one in sorted(ranges, key=lambda one: (one.file, one.begin)):
        begin = one.begin
        while begin < one.end:
            last = gets[-1] if gets else None
            if (
                last is not None
                and last.file == one.file
                and begin >= last.begin  # not so where ranges overlap
                and begin - last.end <= GAP_BYTES
                and begin - last.begin < GET_BYTES
            ):
                last.ranges.append(one)
                covered = max(last.end, min(one.end, last.begin + GET_BYTES))
            else:
                covered = min(one.end, begin + GET_BYTES)
                last = _Get(one.file, begin, covered, [one])
                gets.append(last)
            last.end = begin = covered
            if covered >= one.end:
                break
    return gets


def _copy(chunk: bytes, begin: int, memory: torch.Tensor) -> None:
    """Fill a tensor with bytes of a chunk, from ``begin`` on, without the GIL."""
    count = memory.numel()
    if memory.device.type == "cpu":
        address = ctypes.cast(ctypes.c_char_p(chunk), ctypes.c_void_p).value
        assert address is not None
        ctypes.memmove(memory.data_ptr(), address + begin, count)
    else:
        part = bytearray(memoryview(chunk)[begin : begin + count])
        memory.copy_(torch.frombuffer(part, dtype=torch.uint8))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements are in its memory, for a copy to fill."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _dense(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of row-major order without gaps."""
    stride = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        stride[d - 1] = stride[d] * shape[d]
    return stride


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides are those of row-major order without gaps."""
    return all(n == 1 or s == d for n, s, d in zip(shape, stride, _dense(shape), strict=True))
