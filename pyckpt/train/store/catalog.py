"""The checkpoints in a directory, and why its other entries are not valid ones.

A checkpoint is a directory ``step-00000100``. It is *valid* if its metadata is complete and each
file that it names has the recorded size. It is *verified* if all checksums match as well. Entries
that are not valid are told apart, since they are treated differently: interrupted saves,
interrupted removals, damaged checkpoints, and directories that are no checkpoints.

Finding the newest costs one listing and the metadata of one checkpoint, however many there are.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from pyckpt import _C
from pyckpt.dcp import objects
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.files import check_regular, open_regular, read_regular
from pyckpt.format.flock import close_unwritten, trying
from pyckpt.printable import printable
from pyckpt.remote.address import is_url
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.names import DEFAULT, Naming
from pyckpt.train.store.part import read_part
from pyckpt.train.store.transient import Failure, failure_of, is_shortage, persist

__all__ = [
    "NOTE_KEY",
    "OWN_KEYS",
    "STATES_KEY",
    "Catalog",
    "CheckpointInfo",
    "DirectoryEntry",
    "Note",
    "directory_name",
    "note",
    "note_of",
    "read_note",
    "reading",
]

_logger = logging.getLogger("pyckpt")

_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 10.0
"""A removal makes one system call between its lock and the metadata's new name."""

NOTE_KEY = "pyckpt.checkpoint"
"""The key, beside those of the state, under which a checkpoint describes itself: a string of JSON
with its step, whether it is final, and the metrics that were passed with it."""
STATES_KEY = "pyckpt.states"
"""The key of a dict whose keys name the entries that are states of modules and optimizers. Fabric's
strategies save it: the metadata alone shows it, and the form of an entry does not tell."""
OWN_KEYS = frozenset({NOTE_KEY, STATES_KEY})
"""The keys that are not the program's."""

_NAMES_SHOWN = 3
_NOTE_MAX = 1 << 20


directory_name = DEFAULT.name
"""The name of a step's checkpoint, unless a Checkpointer was given other names."""


def note(step: int, *, final: bool, metrics: Mapping[str, float]) -> str:
    """The string that is saved under ``NOTE_KEY``."""
    return json.dumps({"step": step, "final": final, "metrics": dict(metrics)})


class Note(NamedTuple):
    """What a checkpoint says of itself under ``NOTE_KEY``."""

    step: int | None
    """None if the note does not say."""
    final: bool
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointInfo:
    """A valid checkpoint."""

    step: int
    path: Path
    """Its directory. If ``is_local`` is False there is no such directory."""
    final: bool = False
    """Whether it was saved with ``final=True``, which keeps it from being pruned."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers that were passed when it was saved."""
    bytes: int = 0
    """Bytes of its data files."""
    saved_at: float = 0.0
    """When it was committed, in seconds since 1970, by the file system's clock; 0 if that is not
    known."""
    files: tuple[str, ...] = ()
    """The names of its data files, one for each rank that wrote one, if they are known."""
    mirror: str | None = None
    """Its directory or URL in the mirror, if it is there."""
    is_local: bool = True
    """Whether it is in the directory of the Checkpointer, and not in the mirror alone."""
    elsewhere: tuple[str, ...] = ()
    """The data files that are in the directories of other nodes, where each node has its own."""
    save_id: str | None = None
    """Which save it is of. A step that is saved again gets another."""

    @property
    def place(self) -> Path | str:
        """What ``pyckpt.load`` takes: its directory, or where it is in the mirror."""
        if self.is_local or self.mirror is None:
            return self.path
        return self.mirror if is_url(self.mirror) else Path(self.mirror)


@dataclass(frozen=True)
class DirectoryEntry:
    """An entry of the directory of the checkpoints, and its state."""

    path: Path
    step: int | None
    """None if the name is not that of a checkpoint."""
    state: Literal["valid", "unfinished", "removed", "damaged", "foreign", "unreadable"]
    """``unfinished``: a save that did not reach its commit. ``removed``: a removal that was
    interrupted. ``damaged``: it was committed, and a file is missing or altered since.
    ``foreign``: not a checkpoint of pyckpt. ``unreadable``: this process cannot read it, so its
    state is not known."""
    reason: str = ""
    """Why it is not valid, as text."""
    checkpoint: CheckpointInfo | None = None
    """The checkpoint, if it is valid."""
    error: OSError | None = None
    """The error that makes it unreadable; None for other states."""

    def __str__(self) -> str:
        return f"{self.path.name}: {self.state}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class _Known:
    """The content of a checkpoint's metadata, while the file has the same signature."""

    signature: tuple[int, int, int]
    files: dict[str, int]
    checkpoint: CheckpointInfo


class Catalog:
    """The checkpoints in one directory.

    Every call lists the directory anew, but each metadata file is decoded once. May be used from
    several threads.

    Args:
        naming: the names of their directories.
        verify: raises for a checkpoint whose bytes are not those that were saved.
    """

    def __init__(
        self,
        directory: Path,
        *,
        naming: Naming = DEFAULT,
        verify: Callable[[Path, Metadata], None] | None = None,
    ) -> None:
        self.directory = directory
        self.naming = naming
        self._verify = verify
        self._known: dict[int, _Known] = {}

    def path(self, step: int) -> Path:
        """The path of a step's checkpoint, which need not exist."""
        return self.directory / self.naming.name(step)

    def steps(self) -> list[int]:
        """Steps that have a directory, valid or not, newest first.

        Raises:
            OSError: the directory exists, and cannot be listed.
        """
        try:
            steps = persist(self._listed)
        except FileNotFoundError:
            return []
        return sorted((step for step in steps if step is not None), reverse=True)

    def _listed(self) -> list[int | None]:
        with os.scandir(self.directory) as entries:
            return [self.naming.step_of(entry.name) for entry in entries if _is_dir(entry)]

    def links(self) -> dict[str, int | None]:
        """The symbolic links in the directory, by name, each with the step whose directory there it
        leads to; None where it leads anywhere else.

        Raises:
            OSError: the directory exists, and cannot be listed.
        """
        try:
            with os.scandir(self.directory) as entries:
                names = [entry.name for entry in entries if entry.is_symlink()]
        except FileNotFoundError:
            return {}
        found: dict[str, int | None] = {}
        root = os.path.realpath(self.directory) if names else ""
        for name in names:
            parent, target = os.path.split(os.path.realpath(self.directory / name))
            found[name] = self.naming.step_of(target) if parent == root else None
        return found

    def newest(self, limit: int | None = None) -> CheckpointInfo | None:
        """The newest valid checkpoint, of those up to step ``limit``. Raises as `newest_first`."""
        return next(self.newest_first(limit), None)

    def newest_first(self, limit: int | None = None) -> Iterator[CheckpointInfo]:
        """The valid checkpoints. Each is examined only when the iteration reaches it.

        Raises:
            OSError: one cannot be read, so it is not known whether it is valid.
        """
        for step in self.steps():
            if limit is None or step <= limit:
                entry = self.examine(step)
                if entry.error is not None:
                    raise entry.error
                if entry.checkpoint is not None:
                    yield entry.checkpoint

    def entries(self, *, verify: bool = False) -> list[DirectoryEntry]:
        """All entries of the directory: checkpoints by step, then other entries by name."""
        steps = self.steps()
        found = [self.examine(step, verify=verify) for step in reversed(steps)]
        try:
            names = sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []
        known = {FOLDER, *map(self.naming.name, steps)}
        found += [
            DirectoryEntry(
                self.directory / name, None, "foreign", "this is not the name of a checkpoint"
            )
            for name in names
            if name not in known
        ]
        return found

    def describe_nothing(self) -> str:
        """Describe a directory without checkpoints, for a person who expected one."""
        try:
            names = sorted(os.listdir(self.directory))
        except OSError as error:
            return "there is no such directory" if error.errno == errno.ENOENT else str(error)
        if any(map(commit.is_metadata, names)):
            above = self.directory.parent
            other = (
                f"pass {above}, or " if self.naming.step_of(self.directory.name) is not None else ""
            )
            return f"this is itself a checkpoint; {other}load it with pyckpt.load"
        if commit.lost_metadata(names):
            return commit.LOST_METADATA
        if any(map(commit.is_part, names)):
            return "it holds what a save or a removal left that was interrupted"
        ours = [str(entry) for step in self.steps() for entry in [self.examine(step)]]
        others = [name for name in names if name != FOLDER and self.naming.step_of(name) is None]
        saved = [name for name in others if (self.directory / name / ".metadata").exists()]
        if saved:
            return (
                f"it holds {_few(saved)}, which pyckpt.load reads; what a Checkpointer restores is "
                f"called {self.naming.name(500)}{self._hint(saved[0])}"
            )
        if others:
            entries = "1 entry is" if len(others) == 1 else f"{len(others)} entries are"
            return f"{entries} not named as {self.naming.name(500)} is: {_few(others)}"
        return f"it holds {_few(ours)}" if ours else "the directory is empty"

    def _hint(self, name: str) -> str:
        """How to find a directory of that name, if it has the form of other programs' names."""
        other = Naming.of(name)
        return "" if other is None else f"; naming={other.pattern!r} finds {name}"

    def examine(self, step: int, *, verify: bool = False) -> DirectoryEntry:
        """Return the state of a step's directory. Damage in it raises no error.

        Args:
            step: the step; its directory need not exist.
            verify: read all of a valid checkpoint and compare checksums.

        Raises:
            OSError: this process has no memory or descriptors left to look with.
        """
        path = self.path(step)
        if verify and self._verify is None:
            raise ValueError("this catalog was made without a way to verify")
        try:
            return persist(partial(self._examine, step, path, verify))
        except PyckptError as error:
            return DirectoryEntry(path, step, "damaged", str(error))
        except OSError as error:
            if is_shortage(error):
                raise
            if failure_of(error, last=True) is Failure.DAMAGE:
                return DirectoryEntry(path, step, "damaged", str(error))
            return DirectoryEntry(path, step, "unreadable", str(error), error=error)
        # Reading damaged data may raise any error. One damaged checkpoint must not keep the others
        # from being found.
        except (Exception, MemoryError) as error:
            _logger.debug("%s cannot be read", path, exc_info=True)
            return DirectoryEntry(
                path, step, "damaged", printable(f"{type(error).__name__}: {error}")
            )

    def _examine(self, step: int, path: Path, verify: bool) -> DirectoryEntry:
        try:
            known = self._read(step, path)
            if verify and self._verify is not None:
                self._verify(path, metadata_format.read(path / commit.metadata_name()))
        except FileNotFoundError as error:
            return self._without_metadata(step, path, error)
        return DirectoryEntry(path, step, "valid", checkpoint=known.checkpoint)

    def _read(self, step: int, path: Path) -> _Known:
        name = path / commit.metadata_name()
        with open_regular(name) as file:
            status = os.fstat(file.fileno())
            signature = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._known.get(step)
            if known is not None and known.signature == signature:
                _check_files(path, known.files)
                return known
            data = read_regular(file, name, most=metadata_format.SIZE_MAX)
        metadata = metadata_format.decode(data, path=name)
        files = metadata_format.data_files(metadata)
        save_id = None if metadata.storage_meta is None else metadata.storage_meta.save_id
        part = None if save_id is None else read_part(path, save_id)
        elsewhere: tuple[str, ...] = ()
        if part is not None:
            elsewhere = part.on_other_nodes(path, files)
        here = {name: size for name, size in files.items() if name not in elsewhere}
        _check_files(path, here)  # says more than that a note in them cannot be read
        if part is not None:
            final, metrics = part.final, part.metrics
        else:
            final, metrics = read_note(path, metadata, step, partial(_range_of, path))
        checkpoint = CheckpointInfo(
            step=step,
            path=path,
            final=final,
            metrics=metrics,
            bytes=sum(files.values()),
            saved_at=status.st_mtime,
            files=tuple(files),
            elsewhere=elsewhere,
            save_id=save_id,
        )
        known = self._known[step] = _Known(signature, here, checkpoint)
        return known

    def _without_metadata(self, step: int, path: Path, error: OSError) -> DirectoryEntry:
        """Tell apart directories that lack their metadata, or a file that the metadata names."""
        try:
            names = set(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError) as gone:
            return DirectoryEntry(path, step, "foreign", str(gone))
        if commit.metadata_name() in names:
            return DirectoryEntry(path, step, "damaged", str(error))
        if commit.REMOVED in names:
            return DirectoryEntry(path, step, "removed", "its removal was interrupted")
        if commit.lost_metadata(names):
            return DirectoryEntry(path, step, "damaged", commit.LOST_METADATA)
        others = sorted(name for name in names if not commit.is_part(name))
        if not others:
            return DirectoryEntry(path, step, "unfinished", "its save did not get to the commit")
        reason = f"it has no metadata, and holds {_few(others)}"
        return DirectoryEntry(path, step, "foreign", reason)


def _check_files(path: Path, files: Mapping[str, int]) -> None:
    """Raise unless the data files are there, with the bytes that were saved."""
    for name, expected in files.items():
        status = (path / name).stat()
        check_regular(status, path / name)
        found = status.st_size
        if found != expected:
            raise CorruptCheckpoint(
                f"{name} has {found} bytes, and {expected} were saved", path=str(path)
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return True  # an unreadable entry must not hide the others; `examine` reports it


def read_note(
    place: Path | str, metadata: Metadata, step: int, read: Callable[[str, int, int], bytes]
) -> tuple[bool, dict[str, float]]:
    """Whether a checkpoint is final, and its metrics. One that another tool wrote has no note.

    Args:
        place: of the checkpoint, for messages.
        metadata, step: of it.
        read: reads a file of it, by name, from an offset on, so many bytes.

    Raises:
        CorruptCheckpoint: its note is damaged.
    """
    noted = note_of(place, metadata, read)
    return (False, {}) if noted is None else (noted.final, dict(noted.metrics))


def note_of(
    place: Path | str, metadata: Metadata, read: Callable[[str, int, int], bytes] | None = None
) -> Note | None:
    """What a checkpoint says of itself; None if it says nothing. Arguments and errors as
    `read_note`; a checkpoint at a ``Path`` is read without ``read``."""
    info = (metadata.storage_data or {}).get(MetadataIndex(NOTE_KEY))
    if info is None:
        return None
    if read is None:
        read = partial(_range_of, Path(place))
    try:
        if info.length > _NOTE_MAX:
            raise ValueError(f"it has {info.length} bytes")
        found = read(info.relative_path, info.offset, info.length)
        expected = vars(info).get("crc32")
        if expected is not None and _C.crc32(found) != expected:
            raise ValueError("it is not what was saved, by its CRC-32")
        data = io.BytesIO(found)
        content = json.loads(objects.load(data, NOTE_KEY, device=torch.device("cpu")))
        final, metrics = content["final"], content["metrics"]
        if type(final) is not bool or not isinstance(metrics, dict):
            raise TypeError("not a note of pyckpt")
        step = content.get("step")
        numbers = {str(name): float(value) for name, value in metrics.items()}
        return Note(step if type(step) is int else None, final, numbers)
    # JSON may be nested too deep, and a number too large for a float.
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CorruptCheckpoint(
            f"{place} has an unreadable {NOTE_KEY}: {error}", path=str(place), key=NOTE_KEY
        ) from error


def _range_of(directory: Path, name: str, offset: int, length: int) -> bytes:
    with open_regular(directory / name) as file:
        file.seek(offset)
        return file.read(length)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Keep a checkpoint from being pruned while the block runs, by this process or by another on
    any machine that shares the file system's locks.

    The lock is a shared ``flock`` of the metadata file, and pruning needs an exclusive one. It ends
    with the process that holds it. On file systems without locks this does nothing.

    Raises:
        FileNotFoundError: there is no checkpoint, or it is being removed.
    """
    name = path / commit.metadata_name()
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with trying(descriptor, shared=True) as mine:
                if mine and _is_still(name, descriptor):
                    yield
                    return
            # Who holds the lock renames the file at once, or finds that the checkpoint is to stay.
            if mine or not _is_still(name, descriptor) or time.monotonic() > deadline:
                raise FileNotFoundError(2, "the checkpoint is being removed", str(path))
            time.sleep(_POLL_SECONDS)
    finally:
        close_unwritten(descriptor)


def _is_still(name: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(name), os.fstat(descriptor))
    except FileNotFoundError:
        return False
