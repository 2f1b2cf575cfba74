"""The payloads of a checkpoint, read in pieces of bounded size, and checked on the way."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt import _C
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.files import check_regular, open_regular
from pyckpt.format.metadata import StorageInfo
from pyckpt.remote.folder import RemoteFolder

__all__ = [
    "PIECE_BYTES",
    "Direct",
    "Stored",
    "Window",
    "read_pieces",
    "stored",
    "verify",
    "verify_archive",
]

PIECE_BYTES = 16 << 20
Direct: TypeAlias = Literal["auto", "require", "off"]
# One piece is being read, one waits, one is in use, and one is spare.
_BUFFERS = 4
_ALIGNMENT = 64  # so that a piece can be viewed as any dtype


class Stored(NamedTuple):
    """Bytes in a file, and their expected checksum."""

    key: str
    path: Path | str
    """Of the file; a URL in an object store."""
    offset: int
    length: int
    crc32: int


def stored(key: str, directory: Path | str, info: StorageInfo) -> Stored | None:
    """The payload of an item, by pyckpt's metadata; None for an item of another writer."""
    extra = info.__dict__
    if "crc32" not in extra:
        return None
    return Stored(
        key,
        _joined(directory, info.relative_path),
        info.offset + extra["payload_offset"],
        extra["payload_length"],
        extra["crc32"],
    )


def _joined(directory: Path | str, name: str) -> Path | str:
    return f"{directory}/{name}" if isinstance(directory, str) else directory / name


def read_pieces(
    payloads: Sequence[Stored], *, direct: Direct = "auto", engine: Engine | None = None
) -> Iterator[tuple[Stored, torch.Tensor]]:
    """Read payloads one after another, in pieces of ``PIECE_BYTES``; the last piece of a payload
    may be shorter.

    Yields each piece, a tensor of bytes, with its payload. The memory of a piece is used again for
    the third one after it.

    Raises:
        CorruptCheckpoint: a payload does not have its checksum, which is known after its last
            piece; or its file is too short.
        OSError: a file cannot be read.
    """
    buffers = [torch.empty(0, dtype=torch.uint8, device="cpu")] * _BUFFERS
    turn = crc32 = 0
    for batch in _batches(payloads):
        job, add_file = _job(batch[0][0].path, direct, engine)
        files: dict[Path | str, int] = {}
        if not buffers[turn].numel():
            buffers[turn] = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        views = []
        place = 0
        for _, _, length in batch:
            views.append(buffers[turn][place : place + length])
            place += _aligned(length)
        turn = (turn + 1) % _BUFFERS
        for (payload, at, length), view in zip(batch, views, strict=True):
            if payload.path not in files:
                _check_length(payload)
                files[payload.path] = add_file(payload.path)
            if length:
                job.add_tensor(files[payload.path], payload.offset + at, view)
        checksums = iter(job.run())
        for (payload, at, length), view in zip(batch, views, strict=True):
            found = next(checksums) if length else 0
            if at:
                found ^= _C.crc32_shift(crc32, length)  # the earlier pieces
            crc32 = found
            if at + length == payload.length and crc32 != payload.crc32:
                raise CorruptCheckpoint(
                    f"{payload.key} in {payload.path} at {payload.offset}: CRC-32 expected "
                    f"{payload.crc32:#010x}, found {crc32:#010x}",
                    path=str(payload.path),
                    key=payload.key,
                    offset=payload.offset,
                    expected=payload.crc32,
                    found=crc32,
                )
            yield payload, view


def _job(
    path: Path | str, direct: Direct, engine: Engine | None
) -> tuple[Any, Callable[[Any], int]]:
    """A job that reads files beside ``path``, and what adds a file to it."""
    if isinstance(path, str):
        remote = RemoteFolder(path.rpartition("/")[0]).job(checksum=True)
        return remote, lambda path: remote.add_object(path.rpartition("/")[2])
    job = _C.ReadJob((engine or default_engine()).native, direct=direct)
    return job, lambda path: job.add_file(os.fsencode(path))


def _batches(payloads: Sequence[Stored]) -> Iterator[list[tuple[Stored, int, int]]]:
    """Payloads, offsets in them and lengths; as many as fit into one piece at a time."""
    batch: list[tuple[Stored, int, int]] = []
    room = PIECE_BYTES
    for payload in payloads:
        at = 0
        while True:
            length = min(payload.length - at, PIECE_BYTES)
            if length > room:
                yield batch
                batch, room = [], PIECE_BYTES
            batch.append((payload, at, length))
            room -= _aligned(length)
            at += length
            if at == payload.length:
                break
    if batch:
        yield batch


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _check_length(payload: Stored) -> None:
    if isinstance(payload.path, str):
        return  # the store tells, when it is read
    status = payload.path.stat()
    check_regular(status, payload.path)
    found = status.st_size
    if found < payload.offset + payload.length:
        raise CorruptCheckpoint(
            f"{payload.path} has {found} bytes, and {payload.key} lies beyond them",
            path=str(payload.path),
            key=payload.key,
            expected=payload.offset + payload.length,
            found=found,
        )


def verify(
    directory: Path | str,
    metadata: Metadata,
    *,
    keys: Collection[str] | None = None,
    share: tuple[int, int] = (0, 1),
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> set[str]:
    """Read a checkpoint, or its items under some keys, and compare all checksums.

    A checkpoint in an object store is given by its URL. An item that stock wrote is a zip archive,
    with the checksums in it.

    Args:
        keys: those to read, default all.
        share: ``(i, n)``: read the i-th of n shares of it, counted from 0.

    Returns:
        Keys of items that have no checksums.

    Raises:
        CorruptCheckpoint: a checksum does not match; names the first.
        OSError: a file cannot be read.
    """
    items = [
        (index.fqn, info)
        for index, info in (metadata.storage_data or {}).items()
        if keys is None or index.fqn in keys
    ]
    items.sort(key=lambda item: (item[1].relative_path, item[1].offset))
    ours: list[Stored] = []
    others: list[tuple[str, StorageInfo]] = []
    for key, info in _share(items, *share):
        payload = stored(key, directory, info)
        if payload is None:
            others.append((key, info))
        else:
            ours.append(payload)
    for _ in read_pieces(ours, direct=direct, engine=engine):
        pass
    return {key for key, info in others if not verify_archive(key, directory, info)}


def _share(
    items: Sequence[tuple[str, StorageInfo]], number: int, of: int
) -> Iterator[tuple[str, StorageInfo]]:
    """The ``number``-th of ``of`` runs of items, which have about equally many bytes."""
    total = sum(info.length for _, info in items)
    at = 0
    for key, info in items:
        middle = 2 * at + info.length
        if min(of - 1, middle * of // max(1, 2 * total)) == number:
            yield key, info
        at += info.length


def verify_archive(key: str, directory: Path | str, info: StorageInfo) -> bool:
    """Compare the checksums in an item that stock wrote. Returns whether it has some.

    Raises:
        CorruptCheckpoint: one does not match.
        OSError: the file cannot be read.
    """
    path = _joined(directory, info.relative_path)
    with _opened(path) as file:
        window = Window(file, info.offset, info.length)
        if window.read(4) != b"PK\3\4":
            return False
        try:
            with zipfile.ZipFile(window) as archive:  # type: ignore[arg-type]
                # All zero: written with torch.serialization.set_crc32_options(False).
                written = any(record.CRC for record in archive.infolist())
                damaged = archive.testzip() if written else None
        except OSError:
            raise
        except Exception as error:  # a damaged archive fails in any way that zipfile can
            damaged = str(error)
    if damaged is not None:
        raise CorruptCheckpoint(
            f"{key} in {path} at {info.offset}: its checksums do not match ({damaged})",
            path=str(path),
            key=key,
            offset=info.offset,
        )
    return written


def _opened(path: Path | str) -> Any:
    """A file, to read and to seek in."""
    if not isinstance(path, str):
        return open_regular(path)
    folder, _, name = path.rpartition("/")
    return RemoteFolder(folder).open(name)


class Window(RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = (0, self._at, self._length)[whence] + offset
        if at < 0:
            raise ValueError("a place before the first byte")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = bytes(self._file.read(left if size < 0 else min(size, left)) or b"")
        self._at += len(data)
        return data
