"""Replaces the files of an earlier export by those of a new one.

The new files are written in a directory of their own, beside the old ones. They are renamed into
place when all of them are complete and durable. During the renames there is no index: a program
that is killed leaves the old model, the new one, or files that do not load as a model.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format.claim import turn
from pyckpt.format.files import naming, open_regular, refuse_to_replace
from pyckpt.format.flock import close_unwritten

__all__ = [
    "CONFIG",
    "MARK",
    "new_file",
    "put_in_place",
    "refuse_others_files",
    "refuse_what_is_no_file",
    "temporary_directory",
]

CONFIG = "config.json"
"""The file beside the weights that describes their model."""
MARK = {"pyckpt.export": "written by pyckpt"}
"""In the metadata of each file of safetensors, and of each index. Without it a file is not known to
be an earlier export's."""

_HEADER_MAX = 100 << 20
_PATIENCE_SECONDS = 60.0  # with another export, which is in the middle of some renames


class _File(FileIO):
    """Writes all that it is given, where the system writes a part of it."""

    def write(self, data: Any) -> int:
        with memoryview(data) as view:
            if not view.nbytes:  # a view with a zero in its shape cannot be cast
                return 0
            with view.cast("B") as left:
                size = len(left)
                written = 0
                while written < size:
                    with naming(self.name):
                        count = super().write(left[written:])
                    if not count:
                        raise OSError(errno.EIO, "nothing was written", str(self.name))
                    written += count
        return size


@contextmanager
def new_file(path: Path) -> Iterator[FileIO]:
    """A new file, which is durable when the block ends."""
    with _File(str(path), "w+b") as file:
        yield file
        with naming(path):
            os.fsync(file.fileno())
            file.close()


_TEMPORARY = re.compile(r"\.pyckpt-export-[0-9a-f]{32}")


@contextmanager
def temporary_directory(target: Path) -> Iterator[Path]:
    """A directory in ``target`` for the files of one export, removed at the end. Also removes those
    of killed exports, which are those that no process has locked.

    Raises:
        TimeoutError: see `_one_at_a_time`.
    """
    path = target / f".pyckpt-export-{uuid.uuid4().hex}"
    descriptor = -1
    try:
        with _one_at_a_time(target):
            for name in os.listdir(target):
                if _TEMPORARY.fullmatch(name):
                    _remove_unused(target / name)
            path.mkdir()
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # without locks, other exports do not remove it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        if descriptor >= 0:
            close_unwritten(descriptor)
        with suppress(OSError):  # the next export tries again
            _remove(path)


def _remove(path: Path) -> None:
    # shutil.rmtree gives up where closing a directory fails, which has no effect on Linux.
    for name in os.listdir(path):
        with suppress(OSError):  # the directory cannot be removed, then
            os.unlink(path / name)
    os.rmdir(path)


def _remove_unused(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        finally:
            close_unwritten(descriptor)


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Let one export at a time run this block for a directory, if the file system has locks.

    Raises:
        TimeoutError: another process has been in such a block for a minute.
    """
    with turn(directory, patience=_PATIENCE_SECONDS, doing="putting an export in place"):
        yield


def _is_same_config(temporary: Path, target: Path, names: Sequence[str]) -> bool:
    """Whether an export is a single file, with the ``config.json`` that is there already."""
    if list(names[:-1]) != [CONFIG]:
        return False
    try:
        return (target / CONFIG).read_bytes() == (temporary / CONFIG).read_bytes()
    except FileNotFoundError:
        return False


def _in_the_way(target: Path, kind: tuple[str, str]) -> list[str]:
    """The files that an export replaces or removes, by their names."""
    stem, suffix = kind
    names = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    return sorted(name for name in os.listdir(target) if names.fullmatch(name))


def refuse_others_files(target: Path, kind: tuple[str, str]) -> None:
    """Raise if an export would replace or remove a file that is not known to be of an export.

    Raises:
        FileExistsError: there is one.
    """
    for name in _in_the_way(target, kind):
        if not _is_marked(target / name):
            raise FileExistsError(
                errno.EEXIST,
                "a file that is not known to be an earlier export; replace it by overwrite",
                str(target / name),
            )


def refuse_what_is_no_file(target: Path, kind: tuple[str, str], names: Sequence[str] = ()) -> None:
    """Raise if an export would replace or remove what is no regular file.

    Args:
        names: files that it writes and that its kind does not tell.

    Raises:
        IsADirectoryError: it is a directory.
        FileExistsError: it is a device, a pipe or a socket.
    """
    for name in (*_in_the_way(target, kind), *names):
        refuse_to_replace(target / name)


def _is_marked(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            if path.suffix == ".json":
                notes = json.loads(file.read(_HEADER_MAX))["metadata"]
            elif path.suffix == ".safetensors":
                length = int.from_bytes(file.read(8), "little")
                notes = json.loads(file.read(min(length, _HEADER_MAX)))["__metadata__"]
            else:
                return False  # files of torch.save have no place for it
        return bool(MARK.items() <= notes.items())
    # Whatever else it holds, it is none of ours.
    except (CorruptCheckpoint, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False


def put_in_place(
    temporary: Path,
    target: Path,
    names: Sequence[str],
    kind: tuple[str, str],
    *,
    overwrite: bool = True,
) -> None:
    """Replace an earlier export by the files in ``temporary``. The last of ``names`` completes it:
    the only file, or the index, for which loaders look. Raises as `refuse_what_is_no_file`, and
    unless ``overwrite`` is given as `refuse_others_files`, and as `_one_at_a_time`."""
    stem, suffix = kind
    single = f"{stem}.{suffix}"
    index = target / f"{single}.index.json"
    with _one_at_a_time(target):
        refuse_what_is_no_file(target, kind, names)
        if not overwrite:
            refuse_others_files(target, kind)
        if len(names) > 1 and not _is_same_config(temporary, target, names):
            # New shards may have the names of old ones, and must not load by the old index. Nor
            # may old weights load with a new configuration.
            index.unlink(missing_ok=True)
            (target / single).unlink(missing_ok=True)
            commit.sync_directory(target)
        for name in names[:-1]:
            (temporary / name).replace(target / name)
        if len(names) > 1:
            commit.sync_directory(target)
        (temporary / names[-1]).replace(target / names[-1])
        commit.sync_directory(target)
        # An old index is removed before the files that it names.
        old = [name for name in _in_the_way(target, kind) if name not in names]
        for name in sorted(old, key=lambda name: name != index.name):
            (target / name).unlink()
            if name == index.name:
                commit.sync_directory(target)
