"""Saved tensors on their way from files into memory, a job of the engine at a time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from pyckpt.dcp.checking import Check
from pyckpt.dcp.folder import Folder, Job
from pyckpt.format.item import Payload

__all__ = ["FILES_MAX", "TEMPORARY_BYTES", "FileReads", "row_major"]

TEMPORARY_BYTES = 32 << 20
"""Tensors that cannot be read straight into their destination, and objects, go through memory of
their own; this much of it at a time."""
FILES_MAX = 256
"""Files open at a time; a process is commonly allowed 1,024."""
_BLOCK_BITS = 24
"""Destinations are noted in blocks of so much memory (16 MiB): to insert one into a list of all
would take long where they are many."""


class _Temporary(NamedTuple):
    """A tensor to be copied, converted, to where it belongs."""

    source: torch.Tensor
    target: torch.Tensor


class _Whole(NamedTuple):
    """A saved tensor to be read into one of its size."""

    check: Check
    offsets: Sequence[int]
    target: torch.Tensor
    tensor: torch.Tensor
    """The memory of the target, with its dimensions in the order of the file."""
    file: int
    at: int
    """Where the payload begins in the file, in bytes."""


class _Claims:
    """Which keys are read into which parts of a block of memory."""

    def __init__(self) -> None:
        # Intervals that do not overlap, in their order.
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.keys: list[str] = []

    def add(self, begin: int, end: int, key: str) -> bool:
        """Add an interval of addresses; False, and nothing, where it overlaps another key's."""
        first = bisect_right(self.ends, begin)
        last = bisect_left(self.begins, end)
        if any(other != key for other in self.keys[first:last]):
            return False
        # Pieces of one tensor may interleave (columns): their intervals become one.
        if first < last:
            begin = min(begin, self.begins[first])
            end = max(end, self.ends[last - 1])
        self.begins[first:last] = [begin]
        self.ends[first:last] = [end]
        self.keys[first:last] = [key]
        return True


class FileReads:
    """Reads of the files of a checkpoint. What is asked for is read by `flush`.

    Args:
        folder: of the checkpoint.
        checksum: whether to compute the checksums of what is read.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        checksum: bool,
    ) -> None:
        self.jobs: list[Job] = []
        """All that were made, for their statistics."""
        self._folder: Any = folder
        self._checksum = checksum
        # Of the job that is being put together.
        self._job: Job | None = None
        self._files: dict[str, int] = {}
        self._pending: list[tuple[Check, int, int, int]] = []  # begin, end, range
        self._wholes: list[_Whole] = []  # which the job gets together
        self._claims: dict[tuple[int, int], _Claims] = {}  # by device and block
        self._temporaries: list[_Temporary] = []
        self._temporary_bytes = 0

    def add_bytes(self, name: str, offset: int, buffer: bytearray) -> None:
        """Read bytes of a file, from ``offset`` on, until the buffer is full."""
        job, file = self._open(name)
        job.add_buffer(file, offset, buffer)

    def add_tensor(self, item: ReadItem, check: Check, target: torch.Tensor) -> None:
        """Read the box that an item asks for, of the tensor that ``check`` is of, into a tensor of
        its size."""
        payload = check.payload
        if not self._claim(item.dest_index.fqn, target):
            self.flush()  # two keys of one memory (tied weights): the later one is to stay
            self._claim(item.dest_index.fqn, target)
        # Elements that share their memory (expand) are for copy_ to refuse.
        alike = target.dtype == payload.dtype and 0 not in target.stride()
        if alike and target.shape == payload.shape:  # most tensors
            self._add_whole(check, item.storage_offsets, target)
        elif not alike or not self._add_box(check, item.storage_offsets, target):
            self._add_copied(check, item.storage_offsets, target)
        if not self._claims:  # a flush on the way forgot them
            self._claim(item.dest_index.fqn, target)

    def _add_whole(self, check: Check, offsets: Sequence[int], target: torch.Tensor) -> None:
        payload, tensor = check.payload, target
        if payload.stride != row_major(payload.shape):
            tensor = target.permute(_file_order(payload))
        _, file = self._open(check.info.relative_path)
        at = check.info.offset + payload.offset
        self._wholes.append(_Whole(check, offsets, target, tensor, file, at))

    def _give_wholes(self) -> None:
        """Give the job the tensors that were noted for it, in one call."""
        if not self._wholes:
            return
        wholes, self._wholes = self._wholes, []
        assert self._job is not None
        numbers = self._job.add_tensors(
            [whole.file for whole in wholes],
            [whole.at for whole in wholes],
            [whole.tensor for whole in wholes],
        )
        refused = []
        for whole, number in zip(wholes, numbers, strict=True):
            if number is None:
                refused.append(whole)
            elif number >= 0:
                self._pending.append((whole.check, 0, whole.check.payload.length, number))
        for whole in refused:
            self._add_copied(whole.check, whole.offsets, whole.target)

    def _add_copied(self, check: Check, offsets: Sequence[int], target: torch.Tensor) -> None:
        """Read a box into memory of its own, from which it is copied to its target."""
        dtype = check.payload.dtype
        for at, part in _rows(offsets, target, dtype.itemsize):
            source = torch.empty(part.shape, dtype=dtype, device=_near(target))
            # Flush first: what is read must not wait for its copy longer than it has to.
            if self._temporary_bytes + source.nbytes > TEMPORARY_BYTES:
                self.flush()
            if not self._add_box(check, at, source):
                # A box with gaps in the file cannot be scattered in the memory of a GPU.
                source = source.cpu()
                if not self._add_box(check, at, source):
                    raise TypeError(f"{check.key}: a tensor of {dtype} cannot be read")
            self._temporaries.append(_Temporary(source, part))
            self._temporary_bytes += source.nbytes

    def flush(self) -> None:
        """Read what was asked for, and have the checks know the checksums."""
        self._give_wholes()
        if self._job is None:
            return
        checksums = self._job.run()
        for check, begin, end, number in self._pending:
            check.tiles.append((begin, end, checksums[number]))
        for temporary in self._temporaries:
            temporary.target.copy_(temporary.source)
        self._job = None
        self._files = {}
        self._pending = []
        self._claims = {}
        self._temporaries = []
        self._temporary_bytes = 0

    def _claim(self, key: str, target: torch.Tensor) -> bool:
        """Note what memory a key is read into; False where another key is, in this job."""
        if type(target) is not torch.Tensor or target.numel() == 0:
            return True
        target.untyped_storage().data_ptr()  # raises for a tensor that has no memory
        begin = target.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) + 1
        end = begin + extent * target.itemsize
        device = target.get_device()
        # By address: tensors that a program made of memory of its own (numpy, a mapped file) may
        # overlap though torch takes their storages for different ones.
        for block in range(begin >> _BLOCK_BITS, ((end - 1) >> _BLOCK_BITS) + 1):
            claims = self._claims.get((device, block))
            if claims is None:
                claims = self._claims[device, block] = _Claims()
            first = max(begin, block << _BLOCK_BITS)
            if not claims.add(first, min(end, (block + 1) << _BLOCK_BITS), key):
                return False
        return True

    def _add_box(self, check: Check, offsets: Sequence[int], target: torch.Tensor) -> bool:
        payload = check.payload
        shape, stride = payload.shape, payload.stride
        if stride != row_major(shape):
            order = _file_order(payload)
            shape = tuple(shape[d] for d in order)
            stride = tuple(stride[d] for d in order)
            offsets = [offsets[d] for d in order]
            target = target.permute(order)
        job, file = self._open(check.info.relative_path)
        at = check.info.offset + payload.offset
        if target.shape == shape:
            number = job.add_tensor(file, at, target)
            begin, end = 0, payload.length
        else:
            item_size = payload.dtype.itemsize
            begin = sum(o * s for o, s in zip(offsets, stride, strict=True)) * item_size
            end = begin + target.numel() * item_size
            number = job.add_tensor(file, at + begin, target, stride)
        if number is None:
            return False
        if number >= 0 and target.shape[1:] == shape[1:]:
            self._pending.append((check, begin, end, number))
        return True

    def job_of(self, names: Sequence[str]) -> Any:
        """Make a job over some of the files, in this order, for the caller to fill and run."""
        job = self._folder.job(checksum=self._checksum)
        self.jobs.append(job)
        for name in names:
            self._folder.add(job, name)
        return job

    def _open(self, name: str) -> tuple[Job, int]:
        if self._job is None or (name not in self._files and len(self._files) == FILES_MAX):
            self.flush()
            self._job = self.job_of([])
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = self._folder.add(self._job, name)
        return self._job, file


@lru_cache(maxsize=4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * max(shape[d], 1)
    return tuple(strides)


def _file_order(payload: Payload) -> list[int]:
    """The dimensions in the order in which they lie in the file."""
    shape, stride = payload.shape, payload.stride
    return sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d] != 1))


def _near(target: torch.Tensor) -> torch.device:
    """Where to put a tensor that is to be copied to ``target``."""
    return target.device if target.is_cuda else torch.device("cpu")


def _rows(
    offsets: Sequence[int], target: torch.Tensor, item_size: int
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """A box in parts of rows, each small enough for temporary memory where rows are."""
    if target.dim() == 0 or target.numel() * item_size <= TEMPORARY_BYTES:
        yield offsets, target
        return
    row_bytes = max(1, target.numel() // target.shape[0] * item_size)
    step = max(1, TEMPORARY_BYTES // row_bytes)
    for row in range(0, target.shape[0], step):
        part = target[row : row + step]
        yield (offsets[0] + row, *offsets[1:]), part
