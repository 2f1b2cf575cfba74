"""The names of a checkpoint's files, and the order of steps that makes a save all or nothing.

A directory holds data files, one a rank and save, and a metadata file that names those that count.
Data files get names that no earlier save used, so nothing that counts is ever written to. Renaming
the new metadata over the old is the commit: before it the directory is the old checkpoint, after it
the new one. Data files that no metadata names are the remains of saves that failed, or were
replaced; the next commit sweeps them out.

Where there is no metadata yet, a mark says that data files are those of a save that has begun, and
may be swept out. Without the mark they are a checkpoint that has lost its metadata.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import sys
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyckpt.errors import NotDurable, PyckptError
from pyckpt.format import metadata as metadata_format
from pyckpt.format.claim import is_claimed
from pyckpt.format.files import naming
from pyckpt.format.flock import close_unwritten

__all__ = [
    "LOST_METADATA",
    "REMOVED",
    "begin_save",
    "commit_metadata",
    "committed",
    "data_file_name",
    "frozen_file_name",
    "has_remains",
    "is_data_file",
    "is_frozen_file",
    "is_mark",
    "is_metadata",
    "is_part",
    "lost_metadata",
    "make_directory",
    "make_mark",
    "mark_name",
    "metadata_name",
    "new_save_id",
    "no_checkpoint",
    "part_name",
    "rank_of",
    "remove_failed",
    "remove_parts",
    "remove_remains",
    "remove_unnamed",
    "sync_directory",
    "sync_opened_directory",
]

_logger = logging.getLogger("pyckpt")

_Identity = tuple[int, int, int]
"""Device, inode and generation: which of the directories that had this inode."""

_DATA_FILE = re.compile(r"__(?P<rank>\d+)_[^/]+\.distcp")
# With an id that `new_save_id` gave, and perhaps another, of an upload.
_OWN_DATA_FILE = re.compile(r"__\d+_[0-9a-f]{32}(\.frozen)?(\.[0-9a-f]{32})?\.distcp")
_OWN_UPLOAD = re.compile(r"__\d+_[0-9a-f]{32}\.frozen\.[0-9a-f]{32}\.distcp")
_METADATA_FILE = re.compile(r"(__\d+)?\.metadata")
_MARK = re.compile(r"\.saving(\.\d+)?")
_PART = re.compile(r"\.part\.[0-9a-f]{32}")

REMOVED = ".metadata.removed"
"""What the metadata of a checkpoint is called once its removal has begun."""

LOST_METADATA = (
    "data files, and no .metadata: 'cp directory/*' leaves that out; bring it back from where they "
    "were copied"
)
"""What to say where ``lost_metadata``."""

_IS_A_FILE = (
    "this is a file, and not the directory of a checkpoint; pyckpt.load_model reads a file of "
    "weights, and 'pyckpt import FILE RUN' makes a checkpoint of a file of torch.save, of "
    "safetensors or of Lightning"
)

# Directories whose own name is on disk, by the path without links. With what tells them from those
# that another process may have put in their place since.
_durable: dict[str, _Identity] = {}
_GET_VERSION = 0x80087601
"""FS_IOC_GETVERSION, of linux/fs.h: ext4, xfs, btrfs, f2fs and Lustre answer it."""
# What becomes a metadata file by a rename; the first versions had one name for all saves.
_TEMPORARY = re.compile(r"(__(?P<rank>\d+))?\.metadata(\.[0-9a-f]{32})?\.tmp")


def new_save_id() -> str:
    """A name that no save has had."""
    return uuid.uuid4().hex


def data_file_name(rank: int, save_id: str) -> str:
    """The file that a rank writes in one save. Stock numbers these; any name will do for it."""
    return f"__{rank}_{save_id}.distcp"


def frozen_file_name(rank: int, save_id: str) -> str:
    """The file for what does not change, which later saves link."""
    return f"__{rank}_{save_id}.frozen.distcp"


def is_frozen_file(name: str, rank: int | None = None) -> bool:
    """Whether a file is one that ``frozen_file_name`` names, for a rank or for any."""
    return name.endswith(".frozen.distcp") and is_data_file(name, rank)


def metadata_name(rank: int | None = None) -> str:
    """The file that commits a save; of a rank, where each commits for itself
    (``use_collectives=False``)."""
    return ".metadata" if rank is None else f"__{rank}.metadata"


def mark_name(rank: int | None = None) -> str:
    """The file that is in a directory from the beginning of its first save to the commit; of a
    rank, where each commits for itself. Hidden, as the metadata is: what copies a checkpoint
    without the one does not copy the other."""
    return ".saving" if rank is None else f".saving.{rank}"


def part_name(save_id: str) -> str:
    """The file that says which part of a save a directory holds, where nodes have directories of
    their own."""
    return f".part.{save_id}"


def rank_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None if it is no such name."""
    match = _DATA_FILE.fullmatch(name)
    return None if match is None else int(match["rank"])


def is_mark(name: str) -> bool:
    """Whether a file is what ``mark_name`` names."""
    return _MARK.fullmatch(name) is not None


def is_metadata(name: str) -> bool:
    """Whether a file is what ``metadata_name`` names."""
    return _METADATA_FILE.fullmatch(name) is not None


def lost_metadata(names: Collection[str]) -> bool:
    """Whether a directory that holds these has data files of a checkpoint that has lost its
    metadata, and not the remains of a save, or of a removal, that was interrupted."""
    if not any(_DATA_FILE.fullmatch(name) for name in names) or REMOVED in names:
        return False
    return not any(is_mark(name) or _METADATA_FILE.fullmatch(name) for name in names)


def no_checkpoint(directory: Path) -> OSError:
    """The error of looking for a checkpoint in a directory that has no metadata, or that is a file,
    or is not there: a ``NotADirectoryError`` or a ``FileNotFoundError``.

    Raises:
        OSError: the directory cannot be listed.
    """
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError) as error:
        if directory.is_file():
            return NotADirectoryError(errno.ENOTDIR, _IS_A_FILE, str(directory))
        path = str(directory / metadata_name())
        return type(error)(error.errno, os.strerror(error.errno or 0), path)
    return FileNotFoundError(errno.ENOENT, _instead(directory, names), str(directory))


def _instead(directory: Path, names: list[str]) -> str:
    """What a directory is that has no metadata."""
    ranks = [name for name in names if metadata_format.is_of_rank(name)]
    if ranks:
        return (
            f"each of {len(ranks)} ranks saved its own checkpoint here; pyckpt inspect takes one "
            "by --rank"
        )
    if lost_metadata(names):
        return LOST_METADATA
    inner = [name for name in names if os.path.exists(directory / name / metadata_name())]
    if inner:
        return f"this is no checkpoint, but it holds some, such as {inner[-1]}"
    return "this is no checkpoint: it has no .metadata"


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable.

    Raises:
        OSError: the directory cannot be opened, or its disk failed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_opened_directory(descriptor, path)
    finally:
        close_unwritten(descriptor)


def sync_opened_directory(descriptor: int, path: Path) -> None:
    """The same, of a directory that is open; ``path`` is for the error."""
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; there is nothing more to do on them.
        if error.errno != errno.EINVAL:
            raise


def make_directory(path: Path, *, sync: bool) -> None:
    """Make a directory and those above it. One that exists is fine.

    Args:
        sync: return when the names of all of them are durable, whoever made them: it may have been
            a process that was killed before it came to that, or another rank. Done once a process
            for each directory, where the file system tells one from another that has its inode.

    Raises:
        NotADirectoryError: there is a file of that name.
        OSError: a directory cannot be made, or synced.
    """
    _make_directory(path)
    if sync:
        _sync_name(Path(os.path.realpath(path)))


def _make_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():  # or else another rank was faster
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    _durable.pop(os.path.realpath(path), None)


def _sync_name(path: Path) -> None:
    status = os.stat(path)
    # What is mounted has its place already.
    if path.parent == path or os.stat(path.parent).st_dev != status.st_dev:
        return
    _sync_name(path.parent)
    identity = _identity(path)
    # A directory that another process made again mostly gets the inode of the one before it, so
    # where generations are not told, nothing is remembered.
    if identity is not None and _durable.get(str(path)) == identity:
        return
    # Who may not read a directory cannot sync it, and did not make what is in it.
    with suppress(PermissionError):
        sync_directory(path.parent)
    if identity is not None:
        _durable[str(path)] = identity


def _identity(path: Path) -> _Identity | None:
    """What no other directory has had; None if the file system does not tell."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return None
    try:
        status = os.fstat(descriptor)
        # Room for a long: some file systems answer with one, though most with an int.
        said = fcntl.ioctl(descriptor, _GET_VERSION, bytes(8))
        return status.st_dev, status.st_ino, int.from_bytes(said, sys.byteorder)
    except OSError:
        return None
    finally:
        close_unwritten(descriptor)


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
        NotDurable: it stands there, and the directory could not be synchronised.
        OSError: it could not be written; what stood there still does.
    """
    path = directory / name
    # A name that nobody can have taken, and a file that was not there: a link of that name, in a
    # directory that others can write to, would have us write wherever it points.
    temporary = directory / f"{name}.{uuid.uuid4().hex}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Opened before the rename, so that only the disk can fail after it.
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY) if sync else None
    try:
        try:
            with naming(temporary), open(os.open(temporary, flags, 0o666), "wb") as file:
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
        if opened is not None:
            with committed(path):
                sync_opened_directory(opened, directory)
    finally:
        if opened is not None:
            close_unwritten(opened)


@contextmanager
def committed(path: Path) -> Iterator[None]:
    """In this block, which makes a commit durable, an error is that of a save that counts.

    Raises:
        NotDurable: for an ``OSError``. Undoing the commit would not help: nobody knows which of
            both the disk has, and the new checkpoint is whole.
    """
    try:
        yield
    except OSError as error:
        what = f"{error.strerror}; {path.name} is in place, and a power failure may undo that"
        raise NotDurable(error.errno, what, str(path.parent)) from error


def remove_parts(directory: Path, keep: str) -> None:
    """Remove the files that say which part of a save is there, but for one. Does not raise."""
    try:
        _unlink(
            directory, {name for name in os.listdir(directory) if _PART.fullmatch(name)} - {keep}
        )
    except OSError as error:
        _logger.warning("%s: files of earlier saves were not looked for: %s", directory, error)


def remove_unnamed(
    directory: Path, named: set[str], *, committed: str, rank: int | None = None
) -> bool:
    """Remove the data files, of one rank or of all, that no metadata in the directory names, the
    mark of a first save, and the metadata of a removal that was interrupted.

    Call it right after a commit: ``committed`` is the metadata's name, and ``named`` what that
    metadata names. A file that cannot be removed is logged and stays: it takes room, but it cannot
    be mistaken for a part of the checkpoint. Nor is one removed that another save claims. Returns
    whether all of them are gone.
    """
    try:
        names = os.listdir(directory)
        unnamed = {name for name in names if is_data_file(name, rank)} - named
        claimed = {name for name in unnamed if is_claimed(directory / name)}
        others = {*filter(_METADATA_FILE.fullmatch, names)} - {committed}
        is_gone = _remove(directory, unnamed - claimed, others) and not claimed
        notes = {name for name in names if _is_note(name)}
        is_gone &= _unlink(directory, notes if rank is None else notes & {mark_name(rank)})
        return _unlink(directory, {name for name in names if _is_temporary(name, rank)}) and is_gone
    except (OSError, PyckptError) as error:
        _logger.warning("%s: files of earlier saves were not looked for: %s", directory, error)
        return False


def has_remains(directory: Path) -> bool:
    """Whether there is more beside a checkpoint than belongs to it: a save, or an upload, was
    interrupted after its commit and before the end of its sweep; or is under way. Where there are
    files of frozen parts, the metadata is read: their names do not say whether it has them.
    """
    names = os.listdir(directory)
    if metadata_name() not in names:
        return False
    own = [name for name in names if _OWN_DATA_FILE.fullmatch(name) and ".frozen." not in name]
    ranks = [name.split("_")[2] for name in own]
    notes = any(_is_note(name) or _TEMPORARY.fullmatch(name) for name in names)
    if notes or len(ranks) != len(set(ranks)):
        return True
    if any(_OWN_UPLOAD.fullmatch(name) for name in names):
        return True
    frozen = {name for name in names if is_frozen_file(name)}
    if not frozen:
        return False
    try:
        named = metadata_format.data_files(metadata_format.read(directory / metadata_name()))
    except PyckptError:
        return False  # `remove_remains` would remove nothing, either
    return not frozen <= named.keys()


def remove_remains(directory: Path, *, sync: bool) -> None:
    """Remove what `has_remains` tells of. No save into the directory may be under way. Does not
    raise for what cannot be removed, and logs it."""
    names = os.listdir(directory)
    metadata = {*filter(_METADATA_FILE.fullmatch, names)}
    if metadata_name() not in metadata:
        return
    data = {name for name in names if _OWN_DATA_FILE.fullmatch(name)}
    data = {name for name in data if not is_claimed(directory / name)}
    # A mark must not go before the metadata is known to be durable: after a power failure there
    # would be a checkpoint that has lost its metadata.
    if _sweep(directory, data, metadata, sync=sync):
        _unlink(directory, {name for name in names if _is_note(name) or _TEMPORARY.fullmatch(name)})


def begin_save(directory: Path, keep: set[str], *, sync: bool, rank: int | None = None) -> None:
    """Make a directory ready for a save: remove the data files, of one rank or of all, that saves
    which failed have left there; where there is no checkpoint yet, mark that a save has begun.

    Call it before a save writes, so that remains on a full disk do not keep it from having their
    room. Looks closer, at what the metadata names, only where there is more than a checkpoint has:
    two files of one rank.

    Args:
        keep: data files of other saves that are under way.

    Raises:
        FileExistsError: there are data files, with neither metadata nor mark: no save has left
            them, so they are not removed.
        OSError: the directory cannot be read, or the mark cannot be made.
    """
    names = os.listdir(directory)
    data = {name for name in names if is_data_file(name, rank)} - keep
    metadata = {*filter(_METADATA_FILE.fullmatch, names)}
    _unlink(directory, {name for name in names if _is_temporary(name, rank)})
    if metadata:
        ranks = [name.split("_")[2] for name in data]
        if len(ranks) != len(set(ranks)):
            data = {name for name in data if not is_claimed(directory / name)}
            _sweep(directory, data, metadata, sync=sync)
        return
    if data and lost_metadata(names):
        raise FileExistsError(
            errno.EEXIST,
            f"data files of a checkpoint without its {metadata_name()}, which this save would "
            "remove. It may be a copy that lacks it: 'cp directory/*' leaves it out. Bring it "
            "back, or move the files away",
            str(directory),
        )
    _unlink(directory, {name for name in data if not is_claimed(directory / name)})
    make_mark(directory, sync=sync, rank=rank)


def make_mark(directory: Path, *, sync: bool, rank: int | None = None) -> None:
    """Mark that a save has begun, where there is no checkpoint yet.

    Raises:
        OSError: the mark cannot be made.
    """
    mark = directory / mark_name(rank)
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        close_unwritten(os.open(mark, flags, 0o666))
    if sync:
        # Also one that was there: a name of a data file must not outlive it.
        sync_directory(directory)


def remove_failed(directory: Path, files: set[str], *, sync: bool) -> None:
    """Remove what a save that failed has left of its data files; and the directory, unless there is
    something else in it. Does not raise; logs what could not be removed.

    Args:
        files: those that the save was to write, whether it did or not.
    """
    try:
        names = set(os.listdir(directory))
        metadata = {*filter(_METADATA_FILE.fullmatch, names)}
        _sweep(directory, names & files, metadata, sync=sync)
        others = any(is_data_file(name, None) for name in names - files)
        if not metadata and not others:
            if sync and names & files:
                # The mark must not go before the data: that would be a checkpoint that has lost its
                # metadata, and would refuse the next save.
                sync_directory(directory)
            _unlink(directory, {*filter(is_mark, names)})
            with suppress(OSError):
                os.rmdir(directory)
                _durable.pop(os.path.realpath(directory), None)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("%s: what a failed save left was not removed: %s", directory, error)


def _sweep(directory: Path, names: set[str], metadata: set[str], *, sync: bool) -> bool:
    """`_remove`, beside metadata that another process may have put there and not made durable: the
    old metadata, which may come back, must find its data. Returns whether it could look; does not
    raise."""
    try:
        if sync and names and metadata:
            sync_directory(directory)
        _remove(directory, names, metadata)
    except (OSError, PyckptError) as error:
        _logger.warning("%s: files of earlier saves were not looked for: %s", directory, error)
        return False
    return True


def _remove(directory: Path, names: set[str], metadata: set[str]) -> bool:
    """Remove those of the data files that none of the metadata files names. Returns whether they
    are gone."""
    if names:
        for name in metadata:
            names -= metadata_format.data_files(metadata_format.read(directory / name)).keys()
    return _unlink(directory, names)


def _unlink(directory: Path, names: set[str]) -> bool:
    """Returns whether they are gone."""
    is_gone = True
    for name in names:
        try:
            os.unlink(directory / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            is_gone = False
            _logger.warning("%s: a file of an earlier save was not removed: %s", directory, error)
    return is_gone


def is_part(name: str) -> bool:
    """Whether a save makes files of such a name, which a kill may leave behind, besides the
    metadata."""
    others = (_TEMPORARY, _PART)
    return (
        is_data_file(name, None)
        or is_mark(name)
        or any(other.fullmatch(name) is not None for other in others)
    )


def _is_note(name: str) -> bool:
    """Whether it says of data without metadata that it is of a save, or of a removal. Beside
    metadata it says nothing."""
    return is_mark(name) or name == REMOVED


def _is_temporary(name: str, rank: int | None) -> bool:
    """Whether it is what a kill left of a save's metadata; of a rank, or of the save as a whole."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and match["rank"] == (None if rank is None else str(rank))


def is_data_file(name: str, rank: int | None) -> bool:
    """Whether a save makes data files of such a name; of one rank, or of any."""
    match = _DATA_FILE.fullmatch(name)
    return match is not None and rank in (None, int(match["rank"]))
