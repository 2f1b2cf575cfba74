"""The checkpoints in a directory, with all that a person wants to know of them at a glance."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyckpt.errors import PyckptError
from pyckpt.format import commit
from pyckpt.remote.address import place_of
from pyckpt.remote.folder import RemoteFolder
from pyckpt.tools.contents import contents, ranks_of
from pyckpt.train.store.catalog import Catalog, DirectoryEntry
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.names import DEFAULT, Naming

__all__ = ["Listed", "listing"]


State = Literal["valid", "unfinished", "removed", "damaged", "foreign", "unreadable"]


@dataclass(frozen=True)
class Listed:
    """An entry of a directory of checkpoints."""

    name: str
    step: int | None
    """None if the name is not that of a checkpoint."""
    state: State
    """As `DirectoryEntry` has them."""
    reason: str
    """Why it is not valid."""
    age: float | None
    """Seconds since it was committed; None if it is not valid."""
    bytes: int | None
    """Of its data files; None if it is not valid."""
    bytes_shared: int
    """Of these, in files that an earlier entry has, too: links of one file, which takes its room
    once."""
    ranks: int | None
    """How many ranks wrote it; None if it is not valid."""
    final: bool
    metrics: dict[str, float]
    elsewhere: int = 0
    """How many of these ranks have their files in the directories of other nodes."""

    @property
    def is_bad(self) -> bool:
        """Whether it was a checkpoint, and cannot be loaded. Remains of interrupted saves and
        removals are not: the next save clears them away."""
        return self.state in ("damaged", "unreadable")


def listing(directory: str | os.PathLike[str], *, naming: str | None = None) -> list[Listed]:
    """All entries of a directory: checkpoints by step, then other entries by name.

    Args:
        directory: it, or its URL in an object store.
        naming: the names of the checkpoints, with ``{}`` in the place of the step:
            ``"checkpoint-{}"``. The default are those of a `Checkpointer`.

    Raises:
        OSError: there is no such directory, or it cannot be read.
        ValueError: the directory is itself a checkpoint, or ``naming`` is no such pattern.
    """
    pattern = DEFAULT if naming is None else Naming(naming)
    root = place_of(directory)
    if isinstance(root, str):
        return _listing_there(root, pattern)
    names = os.listdir(root)  # raises if there is no such directory
    if commit.metadata_name() in names:
        raise ValueError(f"{root} is itself a checkpoint, not a directory of them: inspect it")
    catalog = Catalog(root, naming=pattern)
    now = time.time()
    seen: set[tuple[int, int]] = set()
    return [_listed(entry, now, _shared(entry, seen)) for entry in catalog.entries()]


def _shared(entry: DirectoryEntry, seen: set[tuple[int, int]]) -> int:
    """Bytes of a checkpoint's files that are among those ``seen``, to which it adds its own."""
    shared = 0
    for name in () if entry.checkpoint is None else entry.checkpoint.files:
        if not commit.is_frozen_file(name):
            continue  # nothing else is linked
        with suppress(OSError):  # it was removed meanwhile
            status = os.stat(entry.path / name)
            identity = (status.st_dev, status.st_ino)
            shared += status.st_size if identity in seen else 0
            seen.add(identity)
    return shared


def _listing_there(url: str, naming: Naming) -> list[Listed]:
    """The folders below an address in a store. Of checkpoints the metadata is read, and all that
    is stored is listed, by names and sizes."""
    if commit.metadata_name() in _names(url):
        raise ValueError(f"{url} is itself a checkpoint, not a directory of them: inspect it")
    found = [(naming.step_of(name), name) for name in RemoteFolder(url).folders()]
    steps = sorted((step, name) for step, name in found if step is not None)
    others = sorted(name for step, name in found if step is None and name != FOLDER)
    return [
        *(_listed_there(f"{url}/{name}", name, step) for step, name in steps),
        *(_other(name, None, "foreign", "no name of a checkpoint") for name in others),
    ]


def _listed_there(url: str, name: str, step: int) -> Listed:
    try:
        return _examined_there(url, name, step)
    except (FileNotFoundError, PyckptError) as error:
        return _other(name, step, "damaged", str(error))
    except OSError as error:  # the store refuses, or fails: that says nothing of what it has
        return _other(name, step, "unreadable", str(error))


def _examined_there(url: str, name: str, step: int) -> Listed:
    sizes = _names(url)
    if commit.metadata_name() not in sizes:
        if commit.lost_metadata(sizes):
            return _other(name, step, "damaged", commit.LOST_METADATA)
        if all(map(commit.is_part, sizes)):
            return _other(name, step, "unfinished", "its save did not get to the commit")
        return _other(name, step, "foreign", "it has no metadata")
    found = contents(url)
    for file, size in found.files.items():
        if sizes.get(file) != size:
            reason = f"{file} has {sizes.get(file, 0)} bytes, and {size} were saved"
            return _other(name, step, "damaged", reason)
    saved = found.saved
    return Listed(
        name=name,
        step=step,
        state="valid",
        reason="",
        age=time.time() - saved.time,
        bytes=sum(found.files.values()),
        bytes_shared=0,  # a store has no links
        ranks=saved.ranks,
        final=saved.final,
        metrics=saved.metrics,
    )


def _names(url: str) -> dict[str, int]:
    """Names and bytes of the objects right below an address."""
    return RemoteFolder(url).sizes()


def _other(name: str, step: int | None, state: State, reason: str) -> Listed:
    return Listed(name, step, state, reason, None, None, 0, None, False, {})


def _listed(entry: DirectoryEntry, now: float, shared: int) -> Listed:
    checkpoint = entry.checkpoint
    reason = entry.reason
    if entry.step is None:
        reason = _why_none(entry.path)
    return Listed(
        name=entry.path.name,
        step=entry.step,
        state=entry.state,
        reason=reason,
        age=None if checkpoint is None else now - checkpoint.saved_at,
        bytes=None if checkpoint is None else checkpoint.bytes,
        bytes_shared=shared,
        ranks=None if checkpoint is None else ranks_of(checkpoint.files),
        final=checkpoint is not None and checkpoint.final,
        metrics={} if checkpoint is None else dict(checkpoint.metrics),
        elsewhere=0 if checkpoint is None else ranks_of(checkpoint.elsewhere),
    )


def _why_none(path: Path) -> str:
    """Why an entry that is not named as a checkpoint is none."""
    try:
        is_saved = (path / commit.metadata_name()).exists()
    except OSError as error:
        if error.errno != errno.ENOTDIR:
            return error.strerror or str(error)
        is_saved = False
    if is_saved:
        naming = Naming.of(path.name)
        how = f": --naming '{naming.pattern}' lists it" if naming is not None else ""
        return f"a checkpoint of another name{how}"
    if path.is_symlink() and not path.exists():
        return "a link to nothing"
    return "a directory without .metadata" if path.is_dir() else "a file"
