"""The names of a checkpoint's files, and the order of steps that makes a save all or nothing.

A directory holds data files, one a rank and save, and a metadata file that names those that count.
Data files get names that no earlier save used, so nothing that counts is ever written to. Renaming
the new metadata over the old is the commit: before it the directory is the old checkpoint, after it
the new one. Data files that no metadata names are the remains of saves that failed, or were
replaced; the next commit sweeps them out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyckpt.errors import PyckptError
from pyckpt.format import metadata as metadata_format

__all__ = [
    "commit_metadata",
    "data_file_name",
    "is_part",
    "make_directory",
    "metadata_name",
    "new_save_id",
    "remove_remains",
    "remove_unnamed",
    "sync_directory",
    "sync_opened_directory",
]

_logger = logging.getLogger("pyckpt")

_DATA_FILE = re.compile(r"__(?P<rank>\d+)_[^/]+\.distcp")
_METADATA_FILE = re.compile(r"(__\d+)?\.metadata")
# What becomes a metadata file by a rename; the first versions had one name for all saves.
_TEMPORARY = re.compile(r"(__(?P<rank>\d+))?\.metadata(\.[0-9a-f]{32})?\.tmp")


def new_save_id() -> str:
    """A name that no save has had."""
    return uuid.uuid4().hex


def data_file_name(rank: int, save_id: str) -> str:
    """The file that a rank writes in one save. Stock numbers these; any name will do for it."""
    return f"__{rank}_{save_id}.distcp"


def metadata_name(rank: int | None = None) -> str:
    """The file that commits a save; of a rank, where each commits for itself
    (``use_collectives=False``)."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give the errors of calls that take a descriptor the path that they lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: the directory cannot be opened, or its disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_opened_directory(descriptor, path)
    finally:
        os.close(descriptor)


def sync_opened_directory(descriptor: int, path: Path) -> None:
    """The same, of a directory that is open; ``path`` is for the error."""
    try:
        with _naming(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; there is nothing more to do on them.
        if error.errno != errno.EINVAL:
            raise


def make_directory(path: Path, *, sync: bool) -> None:
    """Make a directory and those above it, durably with ``sync``. One that exists is fine.

    Raises:
        NotADirectoryError: there is a file of that name.
        OSError: a directory cannot be made.
    """
    if path.is_dir():
        return
    make_directory(path.parent, sync=sync)
    try:
        path.mkdir(exist_ok=True)  # another rank may have been faster
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    if sync:
        sync_directory(path.parent)


def commit_metadata(
    directory: Path,
    name: str,
    data: bytes,
    *,
    sync: bool,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Put ``data`` at ``name`` as a whole: what stood there is replaced at once, or stays.

    Args:
        before_rename: called when all but the rename is done; what it raises prevents that.

    Raises:
        OSError: it could not be written; what stood there still does.
    """
    path = directory / name
    # A name that nobody can have taken, and a file that was not there: a link of that name, in a
    # directory that others can write to, would have us write wherever it points.
    temporary = directory / f"{name}.{uuid.uuid4().hex}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with _naming(temporary), open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        before_rename()
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one that matters
            temporary.unlink()
        raise
    if sync:
        sync_directory(directory)


def remove_unnamed(
    directory: Path, named: set[str], *, committed: str, rank: int | None = None
) -> None:
    """Remove the data files, of one rank or of all, that no metadata in the directory names.

    Call it right after a commit: ``committed`` is the metadata's name, and ``named`` what that
    metadata names. A file that cannot be removed is logged and stays: it takes room, but it cannot
    be mistaken for a part of the checkpoint.
    """
    try:
        names = os.listdir(directory)
        unnamed = {name for name in names if _is_data_file(name, rank)} - named
        _remove(directory, unnamed, {*filter(_METADATA_FILE.fullmatch, names)} - {committed})
        _unlink(directory, {name for name in names if _is_temporary(name, rank)})
    except (OSError, PyckptError) as error:
        _logger.warning("%s: files of earlier saves were not looked for: %s", directory, error)


def remove_remains(directory: Path, keep: set[str], *, rank: int | None = None) -> None:
    """Remove the data files, of one rank or of all, that saves which failed have left.

    Call it before a save writes, so that remains on a full disk do not keep the next save from
    having its room. Looks closer, at what the metadata names, only where there is more than a
    checkpoint has: two files of one rank, or any without metadata.
    """
    try:
        names = os.listdir(directory)
        data = {name for name in names if _is_data_file(name, rank)} - keep
        metadata = {*filter(_METADATA_FILE.fullmatch, names)}
        ranks = [name.split("_")[2] for name in data]
        if not metadata or len(ranks) != len(set(ranks)):
            _remove(directory, data, metadata)
        _unlink(directory, {name for name in names if _is_temporary(name, rank)})
    except (OSError, PyckptError) as error:
        _logger.warning("%s: files of earlier saves were not looked for: %s", directory, error)


def _remove(directory: Path, names: set[str], metadata: set[str]) -> None:
    """Remove those of the data files that none of the metadata files names."""
    if names:
        for name in metadata:
            names -= metadata_format.data_files(metadata_format.read(directory / name)).keys()
    _unlink(directory, names)


def _unlink(directory: Path, names: set[str]) -> None:
    for name in names:
        try:
            os.unlink(directory / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("%s: a file of an earlier save was not removed: %s", directory, error)


def is_part(name: str) -> bool:
    """Whether a save makes files of such a name, which a kill may leave behind, besides the
    metadata."""
    return _is_data_file(name, None) or _TEMPORARY.fullmatch(name) is not None


def _is_temporary(name: str, rank: int | None) -> bool:
    """Whether it is what a kill left of a save's metadata; of a rank, or of the save as a whole."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match["rank"] == (None if rank is None else str(rank))


def _is_data_file(name: str, rank: int | None) -> bool:
    match = _DATA_FILE.fullmatch(name)
    return match is not None and rank in (None, int(match["rank"]))
