"""Reads the items of a checkpoint to verify: each file once, in its order, in batches.

Some batches are read at a time, so that the disk is never idle while Python looks at what was read.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from pyckpt import _C
from pyckpt.engine import Engine
from pyckpt.tools.values import Part
from pyckpt.train.store.pieces import Direct
from pyckpt.train.store.transient import is_shortage

__all__ = ["AROUND_MAX", "WHOLE_MAX", "Item", "Range", "Read", "Reader"]

WHOLE_MAX = 256 << 10
"""Items of at most so many bytes are read as a whole, with what is around the values."""
AROUND_MAX = 64 << 10
"""More bytes than an archive has before the values of its only tensor, or behind them."""
_BATCH_BYTES = 16 << 20
_SMALL = 64 << 10
_FILES_MAX = 64
_AT_A_TIME = 3


class Item(NamedTuple):
    """A part of a value, and where its values are in it."""

    key: str
    part: Part
    dtype: torch.dtype | None
    begin: int
    length: int
    crc32: int | None


class Range(NamedTuple):
    """Bytes of an item that are read at once."""

    item: Item
    begin: int
    """From the item's first byte."""
    length: int
    place: int
    """Where it goes in the batch's memory."""
    role: Literal["whole", "prefix", "payload", "suffix"]


Read = tuple[Range, int, memoryview, "OSError | None"]


class Reader:
    """Reads items of the files of a directory, in their order."""

    def __init__(self, directory: Path, direct: Direct, engine: Engine) -> None:
        self._directory = directory
        self._direct: Direct = direct
        self._engine = engine

    def read(self, items: Iterable[Item]) -> Generator[list[Read], None, None]:
        """What was read of each batch, as it was asked for. Its memory is used again for the next.

        Raises:
            OSError: this process has no memory or descriptors left. Other errors of reading are
                those of a range.
        """
        batches = self._batches(items)
        memory = [memoryview(mmap.mmap(-1, _BATCH_BYTES)) for _ in range(_AT_A_TIME + 1)]
        under_way: deque[tuple[Future[list[Read]], memoryview]] = deque()
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="pyckpt-verify") as threads:
            try:
                while True:
                    while memory and (batch := next(batches, None)) is not None:
                        place = memory.pop()
                        under_way.append((threads.submit(self._read, batch, place), place))
                    if not under_way:
                        break
                    future, place = under_way.popleft()
                    yield future.result()
                    memory.append(place)
            finally:
                for future, _ in under_way:
                    future.cancel()

    def _batches(self, items: Iterable[Item]) -> Iterator[list[Range]]:
        batch: list[Range] = []
        files: set[str] = set()
        at = 0
        for item in items:
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
                    batch.append(Range(item, begin, size, place, role))
                    files.add(item.part.file)
                    at = place + size
                    begin, length = begin + size, length - size
                    if not length:
                        break
        if batch:
            yield batch

    def _read(self, batch: list[Range], memory: memoryview) -> list[Read]:
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
        reads: list[Read] = []
        for one, place in zip(batch, places, strict=True):
            try:
                (checksum,) = self._job([one], [place])
                reads.append((one, checksum, place, None))
            except OSError as error:
                if is_shortage(error):
                    raise
                reads.append((one, 0, place, error))
        return reads

    def _job(self, batch: Sequence[Range], places: Sequence[memoryview]) -> list[int]:
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


def _ranges(
    item: Item,
) -> Iterator[tuple[int, int, Literal["whole", "prefix", "payload", "suffix"]]]:
    """The bytes of an item to read, each run with its role."""
    part = item.part
    end = item.begin + item.length
    if part.length <= WHOLE_MAX:
        yield 0, part.length, "whole"
        return
    if 0 < item.begin <= AROUND_MAX and part.crc32 is not None:
        yield 0, item.begin, "prefix"
    yield item.begin, item.length, "payload"
    if 0 < part.length - end <= AROUND_MAX and part.crc32 is not None:
        yield end, part.length - end, "suffix"


def _place(at: int, offset: int, length: int) -> int:
    """Where bytes go in a batch's memory, of which ``at`` are taken. Larger ones lie in their page
    as they do in the file, so that the disk can write them there."""
    if length <= _SMALL:
        return at
    place = at - at % _C.page_bytes + offset % _C.page_bytes
    return place if place >= at else place + _C.page_bytes
