"""One rank's load: what of which file goes where, read, checked and handed to the planner."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.dcp import objects
from pyckpt.dcp.checking import Verification, damaged
from pyckpt.dcp.filling import FILES_MAX, TEMPORARY_BYTES, FileReads, row_major
from pyckpt.dcp.folder import Folder, Job, LocalFolder, read_metadata
from pyckpt.dcp.leaves import is_plain_type, tell_autograd, values_of
from pyckpt.dcp.read_items import StayingItems, read_object
from pyckpt.dcp.renaming import as_saved
from pyckpt.dcp.whole import is_special
from pyckpt.errors import CheckpointReplaced, CorruptCheckpoint, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.columns import chunks_of
from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator, Payload, is_dense
from pyckpt.format.metadata import StorageInfo
from pyckpt.format.plain import envelope_of
from pyckpt.private import ExtensionRegistry, narrow_tensor_by_index

__all__ = ["Load", "save_id_of"]

_ENDS_AT_A_TIME = 4096
_REMOTE_BYTES = 256 << 20  # of items, read as bytes together: several requests at a time
_ARCHIVE_END_MAX = 22 + (1 << 16)  # of an archive's last record, which may end in a comment
# What `Load.recorded` returns for an item that another writer wrote.
_UNRECORDED = Payload(-1, 0, torch.uint8, (), (), None)


class Load:
    """One rank's load.

    Args:
        folder: of the checkpoint.
        metadata: of it.
        planner: it says where items go, and takes the objects.
        verify: as for `DirectReader`.
        extension_registry: DCP's extensions that items may be transformed with.
    """

    def __init__(
        self,
        folder: Folder,
        metadata: Metadata,
        planner: LoadPlanner,
        *,
        verify: Literal["items", "none"],
        extension_registry: ExtensionRegistry | None,
    ) -> None:
        self._folder = folder
        self._metadata = metadata
        self._planner = planner
        self._extension_registry = extension_registry
        self._checks = Verification(folder, enabled=verify == "items")
        self._files = FileReads(folder, checksum=verify == "items")
        self._locator = Locator()
        self._saved: dict[str, TensorStorageMetadata] = {}
        self._chunk_sizes: dict[str, dict[tuple[int, ...], torch.Size]] = {}
        self._items: Sequence[ReadItem] = ()  # all of the load
        self._targets: list[tuple[ReadItem, torch.Tensor]] = []  # which the engine writes to

    @cached_property
    def expected_bytes(self) -> int:
        """Bytes of the tensors that are to be loaded. They are added up at the first call, so that
        a load does not wait for it if nobody asks. Any thread may, once ``run`` was called."""
        items = self._items
        plain = items.plain if isinstance(items, StayingItems) else None
        described = self._metadata.state_dict_metadata
        return (0 if plain is None else plain.tensor_bytes) + sum(
            math.prod(item.lengths) * saved.properties.dtype.itemsize
            for item in items
            if isinstance(saved := described[item.storage_index.fqn], TensorStorageMetadata)
        )

    @property
    def jobs(self) -> list[Job]:
        """The engine's jobs so far."""
        return self._files.jobs

    @property
    def unverified(self) -> set[str]:
        """Keys of what was read, and could not be checked."""
        return self._checks.unverified

    def run(self, items: Sequence[ReadItem]) -> None:
        """Load the items of a plan.

        Raises:
            CheckpointReplaced: a file is gone, since the checkpoint was saved over meanwhile.
            CorruptCheckpoint, OSError, UnsafeCheckpoint: as `DirectReader`.
        """
        self._items = items
        try:
            self._run(items)
        except FileNotFoundError as error:
            self._refuse_replaced(error)
            raise
        finally:
            self._tell_autograd()

    def _run(self, items: Sequence[ReadItem]) -> None:
        storage: dict[Any, StorageInfo] = self._metadata.storage_data
        # In the order of the files, so that few need to be open at a time.
        reads = [(item, storage[item.storage_index]) for item in items]
        reads.sort(key=lambda read: (read[1].relative_path, read[1].offset))
        names = {info.relative_path for _, info in reads}
        plain = items.plain if isinstance(items, StayingItems) else None
        if plain is None:
            self._check_files(names)
        else:
            self._check_files(names.union(plain.files()))
            self._read_plain(plain)
        tensors, objects, transformed = [], [], []
        for item, info in reads:
            if info.transform_descriptors:
                transformed.append(item)
            elif item.type == LoadItemType.BYTE_IO:
                objects.append((item, info))
            else:
                tensors.append((item, info))
        payloads = self._locate(tensors)
        opaque = []
        for (item, info), payload in zip(tensors, payloads, strict=True):
            if payload is None:
                opaque.append((item, info))
                continue
            target = self._planner.resolve_tensor(item).detach()
            _check_size(item, target)
            self._targets.append((item, target))
            self._files.add_tensor(item, self._checks.of(item, info, payload), target)
        self._files.flush()
        self._checks.check_tensors()
        for item, target in self._targets:
            self._planner.commit_tensor(item, target)
        self._read_whole(opaque, self._load_opaque)
        if plain is not None:
            self._put_plain(plain)
        self._read_whole(objects, self._load_object)
        if transformed:
            self._read_with_stock(transformed)

    def _read_plain(self, plain: _C.PlainReads) -> None:
        """Read what needs no Python for each item, and check it."""
        files = plain.files()
        for begin in range(0, len(files), FILES_MAX):
            end = min(begin + FILES_MAX, len(files))
            job = self._files.job_of(files[begin:end])
            plain.give(job, begin, end)
            checksums = job.run()
            if self._checks.enabled:
                self._checks.check_plain(plain.check(checksums))
        if not self._checks.enabled:
            self._checks.unverified.update(plain.names())

    def _put_plain(self, plain: _C.PlainReads) -> None:
        planner: Any = self._planner  # pyckpt's, which alone makes such reads
        names, values, others = plain.objects(envelope_of)
        planner.put_plain(names, values)
        for name, item in others:
            planner.load_bytes(read_object(name), io.BytesIO(item))

    def _tell_autograd(self) -> None:
        tell_autograd(target for _, target in self._targets)
        # A DTensor counts its changes itself, beside its local tensor, which is the target.
        keys = {item.dest_index.fqn for item, _ in self._targets}
        wholes = [one for one in values_of(self._planner, keys) if isinstance(one, DTensor)]
        plain = self._items.plain if isinstance(self._items, StayingItems) else None
        read = [] if plain is None else values_of(self._planner, plain.names())
        tell_autograd([*wholes, *read])

    def _refuse_replaced(self, error: FileNotFoundError) -> None:
        """Raise where a save has swept out what was read from, as is its right."""
        try:
            now = read_metadata(self._folder, commit.metadata_name())
        except (OSError, PyckptError):
            return
        if save_id_of(now) != save_id_of(self._metadata):
            raise CheckpointReplaced(
                f"{self._folder} was saved over while it was loaded; load it again"
            ) from error

    # --- before anything is read ---

    def _check_files(self, names: set[str]) -> None:
        """Raise unless all files have the size that the metadata tells."""
        expected = metadata_format.data_files(as_saved(self._metadata))
        for name in sorted(names):
            found = self._folder.size(name)
            if found != expected[name]:
                raise CorruptCheckpoint(
                    f"{self._folder.path(name)} has {found} bytes, and {expected[name]} were saved",
                    path=self._folder.path(name),
                    expected=expected[name],
                    found=found,
                )

    def _locate(self, tensors: Sequence[tuple[ReadItem, StorageInfo]]) -> list[Payload | None]:
        """Where the raw bytes of each item are; None where it is no plain tensor."""
        payloads = [self._recorded(item, info) for item, info in tensors]
        if self._folder.is_remote:
            # To look at both ends of an item takes two requests: read most items as a whole.
            payloads = [
                None if payload is _UNRECORDED and self._wants_most(item) else payload
                for (item, _), payload in zip(tensors, payloads, strict=True)
            ]
        foreign = [i for i, payload in enumerate(payloads) if payload is _UNRECORDED]
        for start in range(0, len(foreign), _ENDS_AT_A_TIME):
            batch = foreign[start : start + _ENDS_AT_A_TIME]
            infos = [tensors[i][1] for i in batch]
            for i, payload in zip(batch, self._read_ends(infos), strict=True):
                item, info = tensors[i]
                if payload is not None:
                    self._check_stored(item, info, payload)
                payloads[i] = payload
        return payloads

    def _check_stored(self, item: ReadItem, info: StorageInfo, found: Payload) -> None:
        what = ""
        if found.shape != tuple(self._chunk_size(item)):
            what = f"a tensor of size {found.shape}"
        # Its imaginary parts would be lost.
        elif found.dtype.is_complex and not self._is_complex(item):
            what = f"a tensor of {found.dtype}"
        if what:
            raise damaged(item, info, self._folder, f"{what} is stored there")

    def _is_complex(self, item: ReadItem) -> bool:
        return self._tensor(item.storage_index.fqn).properties.dtype.is_complex

    def _recorded(self, item: ReadItem, info: StorageInfo) -> Payload | None:
        """What the metadata tells of an item's payload, where we wrote it."""
        extra = info.__dict__
        payload_offset = extra.get("payload_offset")
        if payload_offset is None:
            return _UNRECORDED
        if payload_offset == 0:
            return None
        shape = self._chunk_size(item)
        stride = extra.get("payload_stride")
        length = extra["payload_length"]
        dtype = self._tensor(item.storage_index.fqn).properties.dtype
        if length != dtype.itemsize * math.prod(shape) or payload_offset + length > info.length:
            raise damaged(item, info, self._folder, "its length and its shape do not agree")
        if stride is not None and not is_dense(shape, stride):
            raise damaged(item, info, self._folder, "its strides and its shape do not agree")
        return Payload(
            payload_offset, length, dtype, shape, stride or row_major(shape), extra["crc32"]
        )

    def _chunk_size(self, item: ReadItem) -> torch.Size:
        """The size of the saved chunk that an item is a part of."""
        index = item.storage_index
        tensor = self._tensor(index.fqn)
        table = chunks_of(tensor)
        if table is not None:
            columns, key = table
            hint = -1 if index.index is None else index.index
            number = columns.find_chunk(key, index.offset or (), hint)
            return torch.Size(columns.chunk(key, number)[1])
        if index.index is not None and index.index < len(tensor.chunks):
            chunk = tensor.chunks[index.index]
            if chunk.offsets == index.offset:
                return chunk.sizes
        sizes = self._chunk_sizes.get(index.fqn)
        if sizes is None:
            sizes = {tuple(chunk.offsets): chunk.sizes for chunk in tensor.chunks}
            self._chunk_sizes[index.fqn] = sizes
        return sizes[tuple(index.offset or ())]

    def _tensor(self, key: str) -> TensorStorageMetadata:
        # Looked up once: what is not a dict may make what it gives.
        tensor = self._saved.get(key)
        if tensor is None:
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata)
            tensor = self._saved[key] = saved
        return tensor

    def _wants_most(self, item: ReadItem) -> bool:
        return 2 * math.prod(item.lengths) >= math.prod(self._chunk_size(item))

    def _read_ends(self, infos: Sequence[StorageInfo]) -> list[Payload | None]:
        """Locate the payloads of items that we did not write, from their first and last bytes."""
        buffers = []
        for info in infos:
            head = bytearray(min(HEAD_BYTES, info.length))
            tail = bytearray(min(TAIL_BYTES, info.length))
            self._files.add_bytes(info.relative_path, info.offset, head)
            self._files.add_bytes(info.relative_path, info.offset + info.length - len(tail), tail)
            buffers.append((head, tail))
        self._files.flush()
        return [
            self._locator.locate(bytes(head), bytes(tail), info.length)
            for info, (head, tail) in zip(infos, buffers, strict=True)
        ]

    # --- what is not a plain tensor ---

    def _read_whole(
        self,
        reads: Sequence[tuple[ReadItem, StorageInfo]],
        load: Callable[[ReadItem, io.BytesIO], None],
    ) -> None:
        """Read items as bytes, check them, and hand them to ``load``; a few at a time."""
        batch: list[tuple[ReadItem, StorageInfo, bytearray]] = []
        size = 0
        most = _REMOTE_BYTES if self._folder.is_remote else TEMPORARY_BYTES
        for i, (item, info) in enumerate(reads):
            if info.length > most:
                self._check_ends(item, info)
            buffer = bytearray(info.length)
            batch.append((item, info, buffer))
            size += info.length
            if size < most and i + 1 < len(reads):
                continue
            # One job a batch, as long as its files are few.
            for _, info, buffer in batch:
                self._files.add_bytes(info.relative_path, info.offset, buffer)
            self._files.flush()
            for item, info, buffer in batch:
                self._checks.check_bytes(item, info, buffer)
                load(item, io.BytesIO(buffer))
            batch, size = [], 0

    def _check_ends(self, item: ReadItem, info: StorageInfo) -> None:
        """Raise unless an item is an archive, before there is memory for all of it: a file with
        holes may be of any size."""
        head, tail = bytearray(4), bytearray(_ARCHIVE_END_MAX)
        self._files.add_bytes(info.relative_path, info.offset, head)
        self._files.add_bytes(info.relative_path, info.offset + info.length - len(tail), tail)
        self._files.flush()
        if head != b"PK\3\4" or b"PK\5\6" not in tail:
            raise damaged(item, info, self._folder, "not a saved object")

    def _load_opaque(self, item: ReadItem, data: io.BytesIO) -> None:
        """Load a tensor that is more than its memory, as stock does."""
        key = item.storage_index.fqn
        try:
            tensor = objects.load(data, key, device=torch.device("cpu"))
        except CorruptCheckpoint as error:
            info = self._metadata.storage_data[item.storage_index]
            raise damaged(item, info, self._folder, "not a readable tensor") from error
        if not isinstance(tensor, torch.Tensor) or tensor.shape != self._chunk_size(item):
            info = self._metadata.storage_data[item.storage_index]
            raise damaged(item, info, self._folder, "not a tensor of its size")
        if tensor.is_complex() and not self._is_complex(item):
            info = self._metadata.storage_data[item.storage_index]
            raise damaged(item, info, self._folder, "not a tensor of its dtype")
        if is_special(tensor) or not is_plain_type(tensor):
            take = getattr(self._planner, "take", None)
            if take is not None and take(item, tensor):
                return
        tensor = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
        target = self._planner.resolve_tensor(item)
        _check_size(item, target)
        # Not detached: what is copied to a detached sparse tensor does not arrive in the other.
        with torch.no_grad():
            target.copy_(tensor)
        self._planner.commit_tensor(item, target)

    def _load_object(self, item: ReadItem, data: io.BytesIO) -> None:
        self._planner.load_bytes(item, data)

    def _read_with_stock(self, items: list[ReadItem]) -> None:
        """Read items that an extension transformed (compressed, say), the way DCP does."""
        if not isinstance(self._folder, LocalFolder):
            raise NotImplementedError(
                f"{self._folder} has items that an extension transformed (compressed, say); copy "
                "it to a file system to load it"
            )
        stock = FileSystemReader(
            self._folder.directory, _extension_registry=self._extension_registry
        )
        stock.set_up_storage_reader(self._metadata, is_coordinator=False)
        stock.read_data(LoadPlan(items), self._planner).wait()
        self._checks.unverified.update(item.storage_index.fqn for item in items)


def save_id_of(metadata: Metadata) -> str | None:
    """Which save a checkpoint is of; None where it does not say."""
    return None if metadata.storage_meta is None else metadata.storage_meta.save_id


def _check_size(item: ReadItem, target: torch.Tensor) -> None:
    if target.size() != item.lengths:
        raise ValueError(
            f"{item.storage_index.fqn}: {tuple(item.lengths)} of it are to be loaded into a tensor "
            f"of size {tuple(target.size())}"
        )
