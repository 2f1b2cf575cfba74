"""Compares all bytes of a checkpoint with its checksums, at the speed of the disk.

The first damage does not end it: all of what is damaged is reported.

What is frozen has a hash, too, which is compared if xxhash is installed.

What stock PyTorch wrote has no checksums in the metadata. But each of its items is an archive with
checksums, which are compared.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt import _C
from pyckpt.dcp.filling import row_major
from pyckpt.dcp.hashing import RunningHash
from pyckpt.dcp.reading import save_id_of
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import CheckpointReplaced, CorruptCheckpoint, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.columns import storage_info
from pyckpt.format.envelope import Layout, envelope_of
from pyckpt.format.files import check_regular, open_regular
from pyckpt.format.item import (
    HEAD_BYTES,
    TAIL_BYTES,
    Locator,
    Payload,
    has_its_checksums,
    is_readable,
)
from pyckpt.tools import verify_reads
from pyckpt.tools.contents import metadata_of, part_of
from pyckpt.tools.values import Part, values
from pyckpt.tools.verify_reads import Item, Range, Reader
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.envelopes import EnvelopeItem, holds_the_tensor
from pyckpt.train.store.pieces import Direct, verify_archive
from pyckpt.train.store.transient import is_shortage

__all__ = ["Damage", "Progress", "Verified", "verify"]

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""


class Damage(NamedTuple):
    """Something that is not as it was saved."""

    key: str | None
    """The value that is damaged; None where a file as a whole is."""
    file: str
    """In the checkpoint's directory."""
    offset: int | None
    """Of the item in the file, in bytes; None where the file as a whole is damaged."""
    what: str


@dataclass
class Verified:
    """What was found in a checkpoint."""

    path: Path
    damages: list[Damage] = field(default_factory=list)
    items: int = 0
    """Parts of values whose bytes were compared with a checksum."""
    hashed: int = 0
    """Those of them that were frozen, and whose hash was compared, too: none without xxhash."""
    bytes: int = 0
    """Of the items that were read."""
    unchecked: list[str] = field(default_factory=list)
    """Keys of values that have no checksums, or that an extension of DCP has transformed: of these
    it is only known that their bytes are there."""
    metadata_checked: bool = False
    """Whether the metadata has a checksum, which matches. Stock PyTorch's has none."""
    files: int = 0
    """How many data files the checkpoint has."""
    elsewhere: tuple[str, ...] = ()
    """Those of them that other nodes have, where each node has a directory of its own. They were
    not looked for."""
    by_stock: bool = False
    """Whether the checksums are those of stock PyTorch's archives."""

    @property
    def good(self) -> bool:
        return not self.damages


def verify(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    direct: Direct = "auto",
    engine: Engine | None = None,
    progress: Progress = lambda done, total: None,
) -> Verified:
    """Read all of a checkpoint, and compare its checksums. Damage of the data raises nothing. Where
    each node has a directory of its own, only the files of this node are looked at.

    Args:
        path: its directory.
        rank: whose checkpoint, where each rank saved its own (``use_collectives=False``).
        direct: whether reading bypasses the page cache, as for `DirectReader`.
        engine: the memory and threads to use; by default those that everyone shares.
        progress: called from this thread as bytes are read.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CorruptCheckpoint, UnsafeCheckpoint: its metadata is damaged, or asks for code.
        CheckpointReplaced: it was saved over meanwhile; verify it again.
        OSError: this process cannot read it, or has no memory or descriptors left.
    """
    directory = Path(path)
    metadata = metadata_of(directory, rank)
    name = directory / commit.metadata_name(rank)
    # Keeps it from being pruned meanwhile.
    with reading(directory) if rank is None else nullcontext():
        work = _Work(directory, metadata, direct, engine or default_engine(), progress)
        found = work.run()
    found.metadata_checked = metadata_format.is_sealed(name)
    if found.damages and _was_replaced(name, metadata):
        raise CheckpointReplaced(f"{path} was saved over while it was verified; verify it again")
    return found


def _was_replaced(name: Path, metadata: Metadata) -> bool:
    try:
        now = metadata_format.read(name)
    except (OSError, PyckptError):
        return False
    return save_id_of(now) != save_id_of(metadata)


class _Work:
    """One verification."""

    def __init__(
        self,
        directory: Path,
        metadata: Metadata,
        direct: Direct,
        engine: Engine,
        progress: Progress,
    ) -> None:
        self._directory = directory
        self._reader = Reader(directory, direct, engine)
        self._progress = progress
        self._found = Verified(directory)
        self._sizes = metadata_format.data_files(metadata)
        self._metadata = metadata
        self._locator = Locator()
        # Of the pieces of the payload that is being read.
        self._sum = 0
        self._hash: RunningHash | None = None
        self._damaged: set[tuple[str, int]] = set()
        self._wrong_envelopes: list[Item] = []
        self._right_envelopes = 0
        self._total = self._done = 0

    def run(self) -> Verified:
        self._found.files = len(self._sizes)
        self._found.elsewhere = self._on_other_nodes()
        items = self._items()
        self._total = sum(part.length for _, part, _ in items)
        self._progress(0, self._total)
        with closing(self._reader.read(self._located(items))) as batches:
            for batch in batches:
                for read in batch:
                    self._take(*read)
                self._progress(self._done, self._total)
        self._judge_envelopes()
        self._found.bytes = self._done
        self._found.damages.sort(key=lambda one: (one.file, one.offset or 0, one.key or ""))
        self._found.unchecked = sorted(set(self._found.unchecked))
        return self._found

    # --- what is to be read ---

    def _on_other_nodes(self) -> tuple[str, ...]:
        try:
            part = part_of(self._directory, self._metadata)
        except CorruptCheckpoint as error:
            name = os.path.basename(error.path) if error.path else ""
            self._found.damages.append(Damage(None, name, None, str(error)))
            return ()
        return () if part is None else part.on_other_nodes(self._directory, self._sizes)

    def _items(self) -> list[tuple[str, Part, torch.dtype | None]]:
        """The parts that can be read, in the order of the files."""
        here = {n: size for n, size in self._sizes.items() if n not in self._found.elsewhere}
        ends = {name: self._end_of(name, size) for name, size in here.items()}
        items = []
        for key, dtype, _, parts in values(self._metadata, with_note=True):
            for part in parts:
                end = ends.get(part.file)
                if end is None or part.offset + part.length <= end:
                    if end is not None:
                        items.append((key, part, dtype))
                else:
                    self._damage(key, part, "it lies beyond the end of its file")
        items.sort(key=lambda item: (item[1].file, item[1].offset))
        return items

    def _end_of(self, name: str, expected: int) -> int | None:
        """How much of a file there is; None where it cannot be read."""
        path = self._directory / name
        try:
            status = path.stat()
            check_regular(status, path)
        except FileNotFoundError:
            what = "it is missing"
        except CorruptCheckpoint:
            what = "it is no regular file"
        except OSError as error:
            if is_shortage(error) or error.errno in (errno.EACCES, errno.EPERM):
                raise
            what = error.strerror or str(error)
        else:
            if status.st_size == expected:
                return expected
            self._found.damages.append(
                Damage(
                    None, name, None, f"it has {status.st_size} bytes, and {expected} were saved"
                )
            )
            return status.st_size
        self._found.damages.append(Damage(None, name, None, what))
        return None

    def _located(self, items: Sequence[tuple[str, Part, torch.dtype | None]]) -> Iterator[Item]:
        """The items whose checksums are known, or will be once they are read."""
        for key, part, dtype in items:
            if part.transformed:
                self._leave(key, part)
            elif part.crc32 is not None:
                assert part.payload_offset is not None
                assert part.payload_length is not None
                begin, length = part.payload_offset, part.payload_length
                around = max(begin, part.length - begin - length)
                if around > verify_reads.AROUND_MAX and part.length > verify_reads.WHOLE_MAX:
                    # They might not fit into the memory of a batch.
                    self._damage(key, part, f"{around} bytes around its values are no archive's")
                yield Item(key, part, dtype, begin, length, part.crc32)
            elif part.length <= verify_reads.WHOLE_MAX:
                yield Item(key, part, dtype, 0, part.length, None)
            else:
                payload = None if dtype is None else self._payload_of(part)
                if payload is None or not payload.crc32:
                    self._compare_archive(key, part)
                elif payload.shape != part.sizes:
                    self._damage(key, part, f"a tensor of size {payload.shape} is stored there")
                    self._done += part.length
                else:
                    yield Item(key, part, dtype, payload.offset, payload.length, payload.crc32)

    def _payload_of(self, part: Part) -> Payload | None:
        """Where stock's archive has the tensor."""
        with open_regular(self._directory / part.file) as file:
            head = os.pread(file.fileno(), HEAD_BYTES, part.offset)
            tail = os.pread(file.fileno(), TAIL_BYTES, part.offset + part.length - TAIL_BYTES)
        return self._locator.locate(head, tail, part.length)

    def _compare_archive(self, key: str, part: Part) -> None:
        """Compare the checksums in stock's archive, which is large and no plain tensor."""
        info = metadata_format.StorageInfo(part.file, part.offset, part.length)
        try:
            if verify_archive(key, self._directory, info):
                self._count(part)
            else:
                self._found.unchecked.append(key)
        except CorruptCheckpoint:
            self._damage(key, part, "its checksums do not match")
        self._done += part.length

    # --- what was read ---

    def _take(self, one: Range, checksum: int, data: memoryview, error: OSError | None) -> None:
        item = one.item
        self._done += one.length
        if error is not None:
            self._damage(item.key, item.part, error.strerror or str(error))
        elif one.role == "whole":
            self._take_whole(item, checksum, data)
        elif one.role == "payload":
            if one.begin == item.begin:
                self._sum, self._hash = 0, _hash_for(item)
            self._sum = _C.crc32_shift(self._sum, one.length) ^ checksum
            if self._hash is not None:
                self._hash.add_bytes(data)
            if one.begin + one.length == item.begin + item.length:
                self._compare(item, self._sum, self._hash)
        elif item.part.crc32 is not None:
            self._compare_around(item, one.role, data)

    def _take_whole(self, item: Item, checksum: int, data: memoryview) -> None:
        part = item.part
        if part.crc32 is None:
            self._take_archive(item, data)
            return
        values = data[item.begin : item.begin + item.length]
        if item.begin or item.length != part.length:
            checksum = _C.crc32(values)
        running = _hash_for(item)
        if running is not None:
            running.add_bytes(values)
        self._compare(item, checksum, running)
        if item.begin:
            layout = _layout_of(item)
            begin, end = item.begin, item.begin + item.length
            self._count_envelope(
                item,
                layout is not None
                and data[:begin] == layout.envelope.prefix
                and data[end:] == layout.envelope.suffix(part.crc32),
            )

    def _take_archive(self, item: Item, data: memoryview) -> None:
        part = item.part
        content = bytes(data)
        payload = None
        if item.dtype is not None:
            head, tail = content[:HEAD_BYTES], content[-TAIL_BYTES:]
            payload = self._locator.locate(head, tail, part.length)
        if payload is not None and payload.crc32:
            if payload.shape != part.sizes:
                self._damage(item.key, part, f"a tensor of size {payload.shape} is stored there")
                return
            end = payload.offset + payload.length
            found = _C.crc32(content[payload.offset : end])
            if found != payload.crc32:
                self._compare(item._replace(crc32=payload.crc32), found)
                return
        else:
            sound = has_its_checksums(content)
            if sound is None:
                self._found.unchecked.append(item.key)
                return
            if not sound:
                self._damage(item.key, part, "its checksums do not match")
                return
        if not is_readable(content):
            self._damage(item.key, part, "torch cannot read its archive")
        else:
            self._count(part)

    def _compare(self, item: Item, found: int, running: RunningHash | None = None) -> None:
        if found != item.crc32:
            what = f"CRC-32 expected {item.crc32:#010x}, found {found:#010x}"
            self._damage(item.key, item.part, what)
            return
        if running is not None:
            digest = running.hexdigest()
            if digest != item.part.xxh3:
                what = f"XXH3-128 expected {item.part.xxh3}, found {digest}"
                self._damage(item.key, item.part, what)
                return
            self._found.hashed += 1
        self._count(item.part)

    # --- what is around the values ---

    def _compare_around(self, item: Item, role: str, data: memoryview) -> None:
        layout = _layout_of(item)
        assert item.crc32 is not None
        if layout is None:
            is_right = False
        elif role == "prefix":
            is_right = data == layout.envelope.prefix
        else:
            is_right = data == layout.envelope.suffix(item.crc32)
        self._count_envelope(item, is_right)

    def _count_envelope(self, item: Item, is_right: bool) -> None:
        if is_right:
            self._right_envelopes += 1
        elif not self._wrong_envelopes or self._wrong_envelopes[-1] is not item:
            self._wrong_envelopes.append(item)

    def _judge_envelopes(self) -> None:
        """Report the bytes around tensors that are not as this version of torch writes them. If
        none is, another version wrote them: then each must be an archive that holds its tensor."""
        for item in self._wrong_envelopes:
            if not self._right_envelopes and self._holds_its_tensor(item):
                continue
            what = "the bytes around the tensor are not those that were written; pyckpt reads it, "
            self._damage(item.key, item.part, what + "and other programs may not")

    def _holds_its_tensor(self, item: Item) -> bool:
        part = item.part
        assert item.dtype is not None
        assert item.crc32 is not None
        info = storage_info(
            part.file,
            part.offset,
            part.length,
            crc32=item.crc32,
            payload_offset=item.begin,
            payload_length=item.length,
            payload_stride=part.stride,
        )
        wanted = EnvelopeItem(item.key, info, item.dtype, part.sizes)
        try:
            with open_regular(self._directory / part.file) as file:
                return holds_the_tensor(wanted, file)
        except (OSError, CorruptCheckpoint):
            return False

    # --- the report ---

    def _count(self, part: Part) -> None:
        self._found.items += 1
        self._found.by_stock |= part.crc32 is None

    def _leave(self, key: str, part: Part) -> None:
        self._found.unchecked.append(key)
        self._done += part.length

    def _damage(self, key: str, part: Part, what: str) -> None:
        place = (part.file, part.offset)
        if place not in self._damaged:  # the first finding says most
            self._damaged.add(place)
            self._found.damages.append(Damage(key, part.file, part.offset, what))


def _hash_for(item: Item) -> RunningHash | None:
    """What hashes an item's values; None if they have no hash, or xxhash is not installed."""
    if item.part.xxh3 is None:
        return None
    try:
        return RunningHash()
    except ImportError:
        return None


def _layout_of(item: Item) -> Layout | None:
    if item.dtype is None or not item.begin:
        return None
    sizes = item.part.sizes
    return envelope_of(item.dtype, sizes, item.part.stride or row_major(sizes))
