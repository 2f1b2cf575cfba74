"""Compares all bytes of a checkpoint with its checksums, at the speed of the disk.

The engine reads each file once, in its order, in batches. Some are read at a time, so that
the disk is never idle while Python looks at what was read. The first damage does not end it: all of
what is damaged is reported.

What is frozen has a hash, too, which is compared if xxhash is installed.

What stock PyTorch wrote has no checksums in the metadata. But each of its items is an archive with
checksums, which are compared.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

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
from pyckpt.tools.contents import metadata_of
from pyckpt.tools.values import Part, values
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.envelopes import EnvelopeItem, holds_the_tensor
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.pieces import Direct, verify_archive
from pyckpt.train.store.transient import is_shortage

__all__ = ["Damage", "Progress", "Verified", "below", "verify"]

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""

_BATCH_BYTES = 16 << 20
_WHOLE_MAX = 256 << 10
"""Items of at most so many bytes are read as a whole, with what is around the values."""
_SMALL = 64 << 10
_AROUND_MAX = 64 << 10
"""More bytes than an archive has before the values of its only tensor, or behind them."""
_FILES_MAX = 64
_AT_A_TIME = 3
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


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
    """Read all of a checkpoint, and compare its checksums. Damage of the data raises nothing.

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


class _Item(NamedTuple):
    """A part of a value, and where its values are in it."""

    key: str
    part: Part
    dtype: torch.dtype | None
    begin: int
    length: int
    crc32: int | None


class _Range(NamedTuple):
    """Bytes of an item that are read at once."""

    item: _Item
    begin: int
    """From the item's first byte."""
    length: int
    place: int
    """Where it goes in the batch's memory."""
    role: Literal["whole", "prefix", "payload", "suffix"]


_Read = tuple[_Range, int, memoryview, "OSError | None"]


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
        self._direct: Direct = direct
        self._engine = engine
        self._progress = progress
        self._found = Verified(directory)
        self._sizes = metadata_format.data_files(metadata)
        self._metadata = metadata
        self._locator = Locator()
        # Of the pieces of the payload that is being read.
        self._sum = 0
        self._hash: RunningHash | None = None
        self._damaged: set[tuple[str, int]] = set()
        self._wrong_envelopes: list[_Item] = []
        self._right_envelopes = 0
        self._total = self._done = 0

    def run(self) -> Verified:
        items = self._items()
        self._total = sum(part.length for _, part, _ in items)
        self._progress(0, self._total)
        batches = self._batches(items)
        memory = [memoryview(mmap.mmap(-1, _BATCH_BYTES)) for _ in range(_AT_A_TIME + 1)]
        under_way: deque[tuple[Future[list[_Read]], memoryview]] = deque()
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="pyckpt-verify") as threads:
            try:
                while True:
                    while memory and (batch := next(batches, None)) is not None:
                        place = memory.pop()
                        under_way.append((threads.submit(self._read, batch, place), place))
                    if not under_way:
                        break
                    future, place = under_way.popleft()
                    for read in future.result():
                        self._take(*read)
                    self._progress(self._done, self._total)
                    memory.append(place)
            finally:
                for future, _ in under_way:
                    future.cancel()
        self._judge_envelopes()
        self._found.bytes = self._done
        self._found.damages.sort(key=lambda one: (one.file, one.offset or 0, one.key or ""))
        self._found.unchecked = sorted(set(self._found.unchecked))
        return self._found

    # --- what is to be read ---

    def _items(self) -> list[tuple[str, Part, torch.dtype | None]]:
        """The parts that can be read, in the order of the files."""
        ends = {name: self._end_of(name, size) for name, size in self._sizes.items()}
        items = []
        for key, dtype, _, parts in values(self._metadata, with_note=True):
            for part in parts:
                end = ends[part.file]
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

    def _batches(
        self, items: Sequence[tuple[str, Part, torch.dtype | None]]
    ) -> Iterator[list[_Range]]:
        batch: list[_Range] = []
        files: set[str] = set()
        at = 0
        for item in self._located(items):
            for begin, length, role in _ranges(item):
                while True:
                    place = _place(at, item.part.offset + begin, length)
                    room = _BATCH_BYTES - place
                    is_full = len(files) == _FILES_MAX and item.part.file not in files
                    if is_full or room <= 0 or (room < length and role != "payload"):
                        yield batch
                        batch, files, at = [], set(), 0
                        continue
                    size = min(room, length)
                    batch.append(_Range(item, begin, size, place, role))
                    files.add(item.part.file)
                    at = place + size
                    begin, length = begin + size, length - size
                    if not length:
                        break
        if batch:
            yield batch

    def _located(self, items: Sequence[tuple[str, Part, torch.dtype | None]]) -> Iterator[_Item]:
        """The items whose checksums are known, or will be once they are read."""
        for key, part, dtype in items:
            if part.transformed:
                self._leave(key, part)
            elif part.crc32 is not None:
                assert part.payload_offset is not None
                assert part.payload_length is not None
                begin, length = part.payload_offset, part.payload_length
                around = max(begin, part.length - begin - length)
                if around > _AROUND_MAX and part.length > _WHOLE_MAX:
                    # They might not fit into the memory of a batch.
                    self._damage(key, part, f"{around} bytes around its values are no archive's")
                yield _Item(key, part, dtype, begin, length, part.crc32)
            elif part.length <= _WHOLE_MAX:
                yield _Item(key, part, dtype, 0, part.length, None)
            else:
                payload = None if dtype is None else self._payload_of(part)
                if payload is None or not payload.crc32:
                    self._compare_archive(key, part)
                elif payload.shape != part.sizes:
                    self._damage(key, part, f"a tensor of size {payload.shape} is stored there")
                    self._done += part.length
                else:
                    yield _Item(key, part, dtype, payload.offset, payload.length, payload.crc32)

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

    # --- reading, in threads ---

    def _read(self, batch: list[_Range], memory: memoryview) -> list[_Read]:
        """Read a batch; if that fails, each of its ranges alone."""
        places = [memory[one.place : one.place + one.length] for one in batch]
        try:
            checksums = self._job(batch, places)
            return [
                (one, checksum, place, None)
                for one, checksum, place in zip(batch, checksums, places, strict=True)
            ]
        except OSError as error:
            if is_shortage(error):
                raise
        reads: list[_Read] = []
        for one, place in zip(batch, places, strict=True):
            try:
                (checksum,) = self._job([one], [place])
                reads.append((one, checksum, place, None))
            except OSError as error:
                if is_shortage(error):
                    raise
                reads.append((one, 0, place, error))
        return reads

    def _job(self, batch: Sequence[_Range], places: Sequence[memoryview]) -> list[int]:
        job = _C.ReadJob(self._engine.native, direct=self._direct)
        files: dict[str, int] = {}
        numbers = []
        for one, place in zip(batch, places, strict=True):
            part = one.item.part
            file = files.get(part.file)
            if file is None:
                file = files[part.file] = job.add_file(os.fsencode(self._directory / part.file))
            numbers.append(
                job.add_buffer(file, part.offset + one.begin, place) if one.length else None
            )
        checksums = job.run()
        return [0 if number is None else checksums[number] for number in numbers]

    # --- what was read ---

    def _take(self, one: _Range, checksum: int, data: memoryview, error: OSError | None) -> None:
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

    def _take_whole(self, item: _Item, checksum: int, data: memoryview) -> None:
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

    def _take_archive(self, item: _Item, data: memoryview) -> None:
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

    def _compare(self, item: _Item, found: int, running: RunningHash | None = None) -> None:
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

    def _compare_around(self, item: _Item, role: str, data: memoryview) -> None:
        layout = _layout_of(item)
        assert item.crc32 is not None
        if layout is None:
            is_right = False
        elif role == "prefix":
            is_right = data == layout.envelope.prefix
        else:
            is_right = data == layout.envelope.suffix(item.crc32)
        self._count_envelope(item, is_right)

    def _count_envelope(self, item: _Item, is_right: bool) -> None:
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

    def _holds_its_tensor(self, item: _Item) -> bool:
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


def _ranges(
    item: _Item,
) -> Iterator[tuple[int, int, Literal["whole", "prefix", "payload", "suffix"]]]:
    """The bytes of an item to read, each run with its role."""
    part = item.part
    end = item.begin + item.length
    if part.length <= _WHOLE_MAX:
        yield 0, part.length, "whole"
        return
    if 0 < item.begin <= _AROUND_MAX and part.crc32 is not None:
        yield 0, item.begin, "prefix"
    yield item.begin, item.length, "payload"
    if 0 < part.length - end <= _AROUND_MAX and part.crc32 is not None:
        yield end, part.length - end, "suffix"


def _hash_for(item: _Item) -> RunningHash | None:
    """What hashes an item's values; None if they have no hash, or xxhash is not installed."""
    if item.part.xxh3 is None:
        return None
    try:
        return RunningHash()
    except ImportError:
        return None


def _place(at: int, offset: int, length: int) -> int:
    """Where bytes go in a batch's memory, of which ``at`` are taken. Larger ones lie in their page
    as they do in the file, so that the disk can write them there."""
    if length <= _SMALL:
        return at
    place = at - at % _C.page_bytes + offset % _C.page_bytes
    return place if place >= at else place + _C.page_bytes


def _layout_of(item: _Item) -> Layout | None:
    if item.dtype is None or not item.begin:
        return None
    sizes = item.part.sizes
    return envelope_of(item.dtype, sizes, item.part.stride or row_major(sizes))


def below(directory: str | os.PathLike[str]) -> list[tuple[Path, int | None]]:
    """The checkpoints to verify for a path: itself, if it is one, or else the directories in it
    that are, whatever their names; each with a rank where every rank saved its own. Remains of
    saves and removals that were interrupted are none. A directory that this process may not list is
    one, since it may hold a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        OSError: the directory cannot be read.
    """
    root = Path(directory)
    found = _checkpoints(root, os.listdir(root))
    if found:
        return found
    with os.scandir(root) as entries:
        folders = sorted(entry.name for entry in entries if entry.is_dir() and entry.name != FOLDER)
    for name in folders:
        try:
            names = os.listdir(root / name)
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except PermissionError:
            found.append((root / name, None))  # whose verification says so
            continue
        found += _checkpoints(root / name, names)
    if not found:
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint here", str(root))
    return found


def _checkpoints(directory: Path, names: Sequence[str]) -> list[tuple[Path, int | None]]:
    if commit.metadata_name() in names or commit.lost_metadata(names):
        return [(directory, None)]
    ranks = [int(match[1]) for name in names if (match := _RANK_METADATA.fullmatch(name))]
    return [(directory, rank) for rank in sorted(ranks)]
