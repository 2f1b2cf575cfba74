"""DirectReader: reads DCP checkpoints with the engine, ours and stock's."""

from __future__ import annotations

import errno
import io
import math
import os
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pyckpt import _C
from pyckpt.dcp import objects
from pyckpt.dcp.leaves import is_plain_type
from pyckpt.dcp.parts import Seen, refuse_mixture
from pyckpt.dcp.whole import is_special
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import CheckpointReplaced, CorruptCheckpoint, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.files import check_regular
from pyckpt.format.item import (
    HEAD_BYTES,
    TAIL_BYTES,
    Locator,
    Payload,
    has_its_checksums,
    is_dense,
)
from pyckpt.format.metadata import StorageInfo
from pyckpt.statistics import ReadStatistics

__all__ = ["DirectReader"]

# Tensors that cannot be read straight into their destination, and objects, go through memory of
# their own; this much of it at a time.
_TEMPORARY_BYTES = 32 << 20
# Files open at a time; a process is commonly allowed 1,024.
_FILES_MAX = 256


class DirectReader(StorageReader):
    """A ``StorageReader`` that reads at the speed of the disk, and checks what it reads.

    Reads what ``DirectWriter`` wrote and what stock ``FileSystemWriter`` wrote, equally fast::

        dcp.load(state_dict, storage_reader=pyckpt.DirectReader("checkpoints/step-100"))

    Only the bytes that a rank needs are read, whatever the shards in the file; none twice. The
    metadata is read without running what it contains. (Whether objects are, is up to the planner:
    stock's runs them; use ``pyckpt.load`` or ``pyckpt.LoadPlanner`` where the file is not trusted.)

    Args:
        path: directory of the checkpoint.
        verify: ``"items"`` checks each item that is read whole against its CRC-32; items read in
            part cannot be, and are listed in ``unverified``. ``"none"`` checks nothing.
        direct: as for ``DirectWriter``.
        engine: the memory and threads to use; by default those that everyone shares.
        _extension_registry: as for stock's ``FileSystemReader``, whose name for it this is: the
            extensions of DCP that files may be transformed with (compressed, say); by default
            those that DCP brings.

    Raises:
        ValueError: an argument is none of those above.

    Loading raises, wrapped by DCP in ``CheckpointException`` (``pyckpt.load`` unwraps it):
    ``CorruptCheckpoint`` for bytes that are not those that were saved, and for files that are
    shorter or longer than the metadata says, before anything is loaded; ``OSError``;
    ``UnsafeCheckpoint``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Literal["items", "none"] = "items",
        direct: Literal["auto", "require", "off"] = "auto",
        engine: Engine | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        if verify not in ("items", "none"):
            raise ValueError(f"{verify = } must be 'items' or 'none'.")
        if direct not in ("auto", "require", "off"):
            raise ValueError(f"{direct = } must be 'auto', 'require' or 'off'.")
        self.path = Path(path)
        self.verify = verify
        self.direct = direct
        self._engine = engine
        self.extension_registry = _extension_registry
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._is_own = False  # whether that is of this rank alone
        self._load: _Load | None = None

    @property
    def checkpoint_id(self) -> Path:
        """Directory of the checkpoint."""
        return self.path

    @property
    def load_id(self) -> str:
        """What DCP calls this load by; another after each ``reset``."""
        return self._load_id

    @property
    def statistics(self) -> ReadStatistics:
        """Of this rank's part of the load that runs, or ran last. May be read from any thread."""
        return ReadStatistics.of([] if self._load is None else self._load.jobs)

    @property
    def unverified(self) -> list[str]:
        """Keys of what the last load read without being able to check it, sorted."""
        return [] if self._load is None else sorted(self._load.unverified)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory that can be read."""
        return "://" not in os.fspath(checkpoint_id) and Path(checkpoint_id).is_dir()

    # The calls of a load, in their order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._metadata = self._load = None
        self._is_own = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = commit.metadata_name(kwargs.get("rank"))
        try:
            metadata = metadata_format.read(self.path / name)
        except FileNotFoundError:
            if self.path.is_dir() and commit.lost_metadata(os.listdir(self.path)):
                raise FileNotFoundError(
                    errno.ENOENT, commit.LOST_METADATA, str(self.path / name)
                ) from None
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        self._is_own = kwargs.get("rank") is not None
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._metadata is not None
        if self._is_own:
            return plan  # each rank saved for itself, and so they have no save in common
        return replace(plan, storage_data=Seen(os.fspath(self.path), _save_id(self._metadata)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        refuse_mixture([plan.storage_data for plan in plans])
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        engine = default_engine() if self._engine is None else self._engine
        self._load = load = _Load(self, self._metadata, engine, planner)
        try:
            load.run(plan.items)
        except FileNotFoundError as error:
            self._refuse_replaced(error)
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _refuse_replaced(self, error: FileNotFoundError) -> None:
        """Raise where a save has swept out what was read from, as is its right."""
        try:
            now = metadata_format.read(self.path / commit.metadata_name())
        except (OSError, PyckptError):
            return
        assert self._metadata is not None
        if _save_id(now) != _save_id(self._metadata):
            raise CheckpointReplaced(
                f"{self.path} was saved over while it was loaded; load it again"
            ) from error


@dataclass(slots=True)
class _Check:
    """What to verify of an item once its parts are read."""

    key: str
    info: StorageInfo
    payload: Payload
    tiles: list[tuple[int, int, int]]  # begin, end, checksum


def _save_id(metadata: Metadata) -> str | None:
    """Which save a checkpoint is of; None where it does not say."""
    return None if metadata.storage_meta is None else metadata.storage_meta.save_id


class _Temporary(NamedTuple):
    """A tensor to be copied, converted, to where it belongs."""

    source: torch.Tensor
    target: torch.Tensor


class _Whole(NamedTuple):
    """A saved tensor to be read into one of its size."""

    check: _Check
    payload: Payload
    offsets: Sequence[int]
    target: torch.Tensor
    tensor: torch.Tensor  # the same memory, its dimensions in the order of the file
    file: int
    at: int  # in the file, in bytes


class _Claims:
    """Which keys are read into which parts of a storage."""

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


class _Load:
    """One rank's load."""

    def __init__(
        self, reader: DirectReader, metadata: Metadata, engine: Engine, planner: LoadPlanner
    ) -> None:
        self.reader = reader
        self.metadata = metadata
        self.engine = engine
        self.planner = planner
        self.jobs: list[_C.ReadJob] = []
        self.unverified: set[str] = set()
        self.checks: dict[tuple[str, int], _Check] = {}
        self.locator = Locator()
        self.chunk_sizes: dict[str, dict[tuple[int, ...], torch.Size]] = {}
        # Of the job that is being put together.
        self.job: _C.ReadJob | None = None
        self.files: dict[str, int] = {}
        self.pending: list[tuple[_Check, int, int, int]] = []  # begin, end, range
        self.wholes: list[_Whole] = []  # given to it together
        self.claims: dict[int, _Claims] = {}  # of the storage at that address
        self.temporaries: list[_Temporary] = []
        self.temporary_bytes = 0

    def run(self, items: Sequence[ReadItem]) -> None:
        storage: dict[Any, StorageInfo] = self.metadata.storage_data
        # In the order of the files, so that few need to be open at a time.
        reads = [(item, storage[item.storage_index]) for item in items]
        reads.sort(key=lambda read: (read[1].relative_path, read[1].offset))
        self.check_files({info.relative_path for _, info in reads})
        tensors, objects, transformed = [], [], []
        for item, info in reads:
            if info.transform_descriptors:
                transformed.append(item)
            elif item.type == LoadItemType.BYTE_IO:
                objects.append((item, info))
            else:
                tensors.append((item, info))
        payloads = self.locate(tensors)
        opaque = []
        done: list[tuple[ReadItem, torch.Tensor]] = []
        for (item, info), payload in zip(tensors, payloads, strict=True):
            if payload is None:
                opaque.append((item, info))
                continue
            target = self.planner.resolve_tensor(item).detach()
            _check_size(item, target)
            self.add(item, info, payload, target)
            done.append((item, target))
        self.flush()
        self.verify()
        for item, target in done:
            self.planner.commit_tensor(item, target)
        self.read_whole(opaque, self.load_opaque)
        self.read_whole(objects, self.load_object)
        if transformed:
            self.read_with_stock(transformed)

    # --- before anything is read ---

    def check_files(self, names: set[str]) -> None:
        """Raise unless all files have the size that the metadata tells."""
        expected = metadata_format.data_files(self.metadata)
        for name in sorted(names):
            path = self.reader.path / name
            status = path.stat()
            check_regular(status, path)
            found = status.st_size
            if found != expected[name]:
                raise CorruptCheckpoint(
                    f"{path} has {found} bytes, and {expected[name]} were saved",
                    path=str(path),
                    expected=expected[name],
                    found=found,
                )

    def locate(self, tensors: Sequence[tuple[ReadItem, StorageInfo]]) -> list[Payload | None]:
        """Where the raw bytes of each item are; None where it is no plain tensor."""
        payloads = [self.recorded(item, info) for item, info in tensors]
        foreign = [i for i, payload in enumerate(payloads) if payload is _UNRECORDED]
        for start in range(0, len(foreign), _ENDS_AT_A_TIME):
            batch = foreign[start : start + _ENDS_AT_A_TIME]
            infos = [tensors[i][1] for i in batch]
            for i, payload in zip(batch, self.read_ends(infos), strict=True):
                item, info = tensors[i]
                if payload is not None and payload.shape != tuple(self.chunk_size(item)):
                    what = f"a tensor of size {payload.shape} is stored there"
                    raise _damaged(item, info, self.reader.path, what)
                payloads[i] = payload
        return payloads

    def recorded(self, item: ReadItem, info: StorageInfo) -> Payload | None:
        """What the metadata tells of an item's payload, where we wrote it."""
        extra = info.__dict__
        payload_offset = extra.get("payload_offset")
        if payload_offset is None:
            return _UNRECORDED
        if payload_offset == 0:
            return None
        tensor = self.metadata.state_dict_metadata[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        shape = self.chunk_size(item)
        stride = extra.get("payload_stride")
        length = extra["payload_length"]
        dtype = tensor.properties.dtype
        if length != dtype.itemsize * math.prod(shape) or payload_offset + length > info.length:
            raise _damaged(item, info, self.reader.path, "its length and its shape do not agree")
        if stride is not None and not is_dense(shape, stride):
            raise _damaged(item, info, self.reader.path, "its strides and its shape do not agree")
        return Payload(
            payload_offset, length, dtype, shape, stride or _row_major(shape), extra["crc32"]
        )

    def chunk_size(self, item: ReadItem) -> torch.Size:
        """The size of the saved chunk that an item is a part of."""
        index = item.storage_index
        tensor = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)
        if index.index is not None and index.index < len(tensor.chunks):
            chunk = tensor.chunks[index.index]
            if chunk.offsets == index.offset:
                return chunk.sizes
        sizes = self.chunk_sizes.get(index.fqn)
        if sizes is None:
            sizes = {tuple(chunk.offsets): chunk.sizes for chunk in tensor.chunks}
            self.chunk_sizes[index.fqn] = sizes
        return sizes[tuple(index.offset or ())]

    def read_ends(self, infos: Sequence[StorageInfo]) -> list[Payload | None]:
        """Locate the payloads of items that we did not write, from their first and last bytes."""
        buffers = []
        for info in infos:
            job, file = self.open(info.relative_path)
            head = bytearray(min(HEAD_BYTES, info.length))
            tail = bytearray(min(TAIL_BYTES, info.length))
            job.add_buffer(file, info.offset, head)
            job.add_buffer(file, info.offset + info.length - len(tail), tail)
            buffers.append((head, tail))
        self.flush()
        return [
            self.locator.locate(bytes(head), bytes(tail), info.length)
            for info, (head, tail) in zip(infos, buffers, strict=True)
        ]

    # --- tensors ---

    def add(
        self, item: ReadItem, info: StorageInfo, payload: Payload, target: torch.Tensor
    ) -> None:
        """Read the box that an item asks for into a tensor of its size."""
        place = (info.relative_path, info.offset)
        check = self.checks.get(place)
        if check is None:
            check = self.checks[place] = _Check(item.storage_index.fqn, info, payload, [])
        if not self.claim(item.dest_index.fqn, target):
            self.flush()  # two keys of one memory (tied weights): the later one is to stay
            self.claim(item.dest_index.fqn, target)
        # Elements that share their memory (expand) are for copy_ to refuse.
        alike = target.dtype == payload.dtype and 0 not in target.stride()
        if alike and target.shape == payload.shape:  # most tensors
            self.add_whole(check, item.storage_offsets, target, payload)
        elif not alike or not self.add_box(check, item.storage_offsets, target, payload):
            self.add_copied(check, item.storage_offsets, target, payload)

    def add_whole(
        self, check: _Check, offsets: Sequence[int], target: torch.Tensor, payload: Payload
    ) -> None:
        tensor = target
        if payload.stride != _row_major(payload.shape):
            tensor = target.permute(_file_order(payload))
        _, file = self.open(check.info.relative_path)
        at = check.info.offset + payload.offset
        self.wholes.append(_Whole(check, payload, offsets, target, tensor, file, at))

    def give_wholes(self) -> None:
        """Give the job what was noted for it, in one call."""
        if not self.wholes:
            return
        wholes, self.wholes = self.wholes, []
        assert self.job is not None
        numbers = self.job.add_tensors(
            [whole.file for whole in wholes],
            [whole.at for whole in wholes],
            [whole.tensor for whole in wholes],
        )
        refused = []
        for whole, number in zip(wholes, numbers, strict=True):
            if number is None:
                refused.append(whole)
            elif number >= 0:
                self.pending.append((whole.check, 0, whole.payload.length, number))
        for whole in refused:
            self.add_copied(whole.check, whole.offsets, whole.target, whole.payload)

    def add_copied(
        self, check: _Check, offsets: Sequence[int], target: torch.Tensor, payload: Payload
    ) -> None:
        """Read a box into memory of its own, to be copied to its target after that."""
        for at, part in _rows(offsets, target, payload.dtype.itemsize):
            source = torch.empty(part.shape, dtype=payload.dtype, device=_near(target))
            # Flush first: what is read must not wait for its copy longer than it has to.
            if self.temporary_bytes + source.nbytes > _TEMPORARY_BYTES:
                self.flush()
            if not self.add_box(check, at, source, payload):
                # A box with gaps in the file cannot be scattered in the memory of a GPU.
                source = source.cpu()
                if not self.add_box(check, at, source, payload):
                    raise TypeError(f"{check.key}: a tensor of {payload.dtype} cannot be read")
            self.temporaries.append(_Temporary(source, part))
            self.temporary_bytes += source.nbytes

    def claim(self, key: str, target: torch.Tensor) -> bool:
        """Note what memory a key is read into; False where another key is, in this job."""
        if type(target) is not torch.Tensor or target.numel() == 0:
            return True
        begin = target.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(target.shape, target.stride(), strict=True)) + 1
        claims = self.claims.setdefault(target.untyped_storage().data_ptr(), _Claims())
        return claims.add(begin, begin + extent * target.itemsize, key)

    def add_box(
        self, check: _Check, offsets: Sequence[int], target: torch.Tensor, payload: Payload
    ) -> bool:
        shape, stride = payload.shape, payload.stride
        if stride != _row_major(shape):
            order = _file_order(payload)
            shape = tuple(shape[d] for d in order)
            stride = tuple(stride[d] for d in order)
            offsets = [offsets[d] for d in order]
            target = target.permute(order)
        job, file = self.open(check.info.relative_path)
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
            self.pending.append((check, begin, end, number))
        return True

    def verify(self) -> None:
        """Raise unless what was read whole has the checksum that it should have."""
        if self.reader.verify == "none":
            self.unverified.update(check.key for check in self.checks.values())
            return
        damaged = []
        for check in self.checks.values():
            crc32 = _checksum(check)
            if crc32 is None or check.payload.crc32 is None:
                self.unverified.add(check.key)
            elif crc32 != check.payload.crc32:
                damaged.append((check, crc32))
        self.checks.clear()
        if damaged:
            check, found = damaged[0]
            raise _mismatch(
                check.key,
                self.reader.path / check.info.relative_path,
                check.info.offset + check.payload.offset,
                check.payload.crc32,
                found,
                others=len(damaged) - 1,
            )

    # --- jobs ---

    def open(self, name: str) -> tuple[_C.ReadJob, int]:
        if self.job is None or (name not in self.files and len(self.files) == _FILES_MAX):
            self.flush()
            self.job = _C.ReadJob(
                self.engine.native,
                direct=self.reader.direct,
                checksum=self.reader.verify == "items",
            )
            self.jobs.append(self.job)
        file = self.files.get(name)
        if file is None:
            file = self.files[name] = self.job.add_file(os.fsencode(self.reader.path / name))
        return self.job, file

    def flush(self) -> list[int]:
        """Read what was asked for; return the checksums of its ranges."""
        self.give_wholes()
        if self.job is None:
            return []
        checksums = self.job.run()
        for check, begin, end, number in self.pending:
            check.tiles.append((begin, end, checksums[number]))
        for temporary in self.temporaries:
            temporary.target.copy_(temporary.source)
        self.job = None
        self.files = {}
        self.pending = []
        self.claims = {}
        self.temporaries = []
        self.temporary_bytes = 0
        return checksums

    # --- what is not a plain tensor ---

    def read_whole(self, reads: Sequence[tuple[ReadItem, StorageInfo]], load: Any) -> None:
        """Read items as bytes, check them, and hand them to ``load``; a few at a time."""
        batch: list[tuple[ReadItem, StorageInfo, bytearray]] = []
        size = 0
        for i, (item, info) in enumerate(reads):
            if info.length > _TEMPORARY_BYTES:
                self.check_ends(item, info)
            buffer = bytearray(info.length)
            batch.append((item, info, buffer))
            size += info.length
            if size < _TEMPORARY_BYTES and i + 1 < len(reads):
                continue
            # One job a batch, as long as its files are few.
            for _, info, buffer in batch:
                job, file = self.open(info.relative_path)
                job.add_buffer(file, info.offset, buffer)
            self.flush()
            for item, info, buffer in batch:
                self.check_bytes(item, info, buffer)
                load(item, io.BytesIO(buffer))
            batch, size = [], 0

    def check_ends(self, item: ReadItem, info: StorageInfo) -> None:
        """Raise unless an item is an archive, before there is memory for all of it: a file with
        holes may be of any size."""
        head, tail = bytearray(4), bytearray(_ARCHIVE_END_MAX)
        job, file = self.open(info.relative_path)
        job.add_buffer(file, info.offset, head)
        job.add_buffer(file, info.offset + info.length - len(tail), tail)
        self.flush()
        if head != b"PK\3\4" or b"PK\5\6" not in tail:
            raise _damaged(item, info, self.reader.path, "not a saved object")

    def check_bytes(self, item: ReadItem, info: StorageInfo, data: bytearray) -> None:
        key = item.storage_index.fqn
        expected = info.__dict__.get("crc32")
        if self.reader.verify == "none":
            self.unverified.add(key)
            return
        if expected is None:
            # Another writer's. Not for objects: there may be thousands, and each takes a while.
            sound = None
            if item.type == LoadItemType.TENSOR:
                sound = has_its_checksums(data)
            if sound is None:
                self.unverified.add(key)
            elif not sound:
                raise _damaged(item, info, self.reader.path, "its checksums do not match")
            return
        found = _C.crc32(data)
        if found != expected:
            path = self.reader.path / info.relative_path
            raise _mismatch(key, path, info.offset, expected, found)

    def load_opaque(self, item: ReadItem, data: io.BytesIO) -> None:
        """Load a tensor that is more than its memory, as stock does."""
        key = item.storage_index.fqn
        try:
            tensor = objects.load(data, key, device=torch.device("cpu"))
        except CorruptCheckpoint as error:
            info = self.metadata.storage_data[item.storage_index]
            raise _damaged(item, info, self.reader.path, "not a readable tensor") from error
        if not isinstance(tensor, torch.Tensor) or tensor.shape != self.chunk_size(item):
            info = self.metadata.storage_data[item.storage_index]
            raise _damaged(item, info, self.reader.path, "not a tensor of its size")
        if is_special(tensor) or not is_plain_type(tensor):
            take = getattr(self.planner, "take", None)
            if take is not None and take(item, tensor):
                return
        tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = self.planner.resolve_tensor(item)
        _check_size(item, target)
        # Not detached: what is copied to a detached sparse tensor does not arrive in the other.
        with torch.no_grad():
            target.copy_(tensor)
        self.planner.commit_tensor(item, target)

    def load_object(self, item: ReadItem, data: io.BytesIO) -> None:
        self.planner.load_bytes(item, data)

    def read_with_stock(self, items: list[ReadItem]) -> None:
        """Read items that an extension transformed (compressed, say), the way DCP does."""
        stock = FileSystemReader(
            self.reader.path, _extension_registry=self.reader.extension_registry
        )
        stock.set_up_storage_reader(self.metadata, is_coordinator=False)
        stock.read_data(LoadPlan(items), self.planner).wait()
        self.unverified.update(item.storage_index.fqn for item in items)


_ENDS_AT_A_TIME = 4096
_ARCHIVE_END_MAX = 22 + (1 << 16)  # of an archive's last record, which may end in a comment
# What `recorded` returns for an item that another writer wrote.
_UNRECORDED = Payload(-1, 0, torch.uint8, (), (), None)


@lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
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
    if target.dim() == 0 or target.numel() * item_size <= _TEMPORARY_BYTES:
        yield offsets, target
        return
    row_bytes = max(1, target.numel() // target.shape[0] * item_size)
    step = max(1, _TEMPORARY_BYTES // row_bytes)
    for row in range(0, target.shape[0], step):
        part = target[row : row + step]
        yield (offsets[0] + row, *offsets[1:]), part


def _checksum(check: _Check) -> int | None:
    """The checksum of a payload from those of its tiles; None where they do not cover it."""
    if len(check.tiles) == 1 and check.tiles[0][:2] == (0, check.payload.length):
        return check.tiles[0][2]
    crc32 = at = 0
    for begin, end, checksum in sorted(check.tiles):
        if begin > at:
            return None
        if begin == at:
            crc32 = _C.crc32_shift(crc32, end - begin) ^ checksum
            at = end
        elif end > at:
            return None  # tiles that overlap in part: nothing can be said of the whole
    return crc32 if at == check.payload.length and check.tiles else None


def _check_size(item: ReadItem, target: torch.Tensor) -> None:
    if target.size() != item.lengths:
        raise ValueError(
            f"{item.storage_index.fqn}: {tuple(item.lengths)} of it are to be loaded into a tensor "
            f"of size {tuple(target.size())}"
        )


def _damaged(item: ReadItem, info: StorageInfo, path: Path, what: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"{item.storage_index.fqn} in {path / info.relative_path} at {info.offset}: {what}",
        key=item.storage_index.fqn,
        path=str(path / info.relative_path),
        offset=info.offset,
    )


def _mismatch(
    key: str, path: Path, offset: int, expected: int | None, found: int, others: int = 0
) -> CorruptCheckpoint:
    more = f" ({others} more items are damaged)" if others else ""
    return CorruptCheckpoint(
        f"{key} in {path} at {offset}: CRC-32 expected {expected:#010x}, found {found:#010x}{more}",
        key=key,
        path=str(path),
        offset=offset,
        expected=expected,
        found=found,
    )
