"""The checkpoints in a directory, with all that a person wants to know of them at a glance."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyckpt.format import commit
from pyckpt.tools.contents import ranks_of
from pyckpt.train.store.catalog import Catalog, DirectoryEntry
from pyckpt.train.store.names import DEFAULT, Naming

__all__ = ["Listed", "listing"]


@dataclass(frozen=True)
class Listed:
    """An entry of a directory of checkpoints."""

    name: str
    step: int | None
    """None if the name is not that of a checkpoint."""
    state: Literal["valid", "unfinished", "removed", "damaged", "foreign", "unreadable"]
    """As `DirectoryEntry` has them."""
    reason: str
    """Why it is not valid."""
    age: float | None
    """Seconds since it was committed; None if it is not valid."""
    bytes: int | None
    """Of its data files; None if it is not valid."""
    ranks: int | None
    """How many ranks wrote it; None if it is not valid."""
    final: bool
    metrics: dict[str, float]

    @property
    def is_bad(self) -> bool:
        """Whether it was a checkpoint, and cannot be loaded. Remains of interrupted saves and
        removals are not: the next save clears them away."""
        return self.state in ("damaged", "unreadable")


def listing(directory: str | os.PathLike[str], *, naming: str | None = None) -> list[Listed]:
    """All entries of a directory: checkpoints by step, then other entries by name.

    Args:
        naming: the names of the checkpoints, with ``{}`` in the place of the step:
            ``"checkpoint-{}"``. The default are those of a `Checkpointer`.

    Raises:
        OSError: there is no such directory, or it cannot be read.
        ValueError: the directory is itself a checkpoint, or ``naming`` is no such pattern.
    """
    root = Path(directory)
    names = os.listdir(root)  # raises if there is no such directory
    if commit.metadata_name() in names:
        raise ValueError(f"{root} is itself a checkpoint, not a directory of them: inspect it")
    catalog = Catalog(root, naming=DEFAULT if naming is None else Naming(naming))
    now = time.time()
    return [_listed(entry, now) for entry in catalog.entries()]


def _listed(entry: DirectoryEntry, now: float) -> Listed:
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
        ranks=None if checkpoint is None else ranks_of(checkpoint.files),
        final=checkpoint is not None and checkpoint.final,
        metrics={} if checkpoint is None else dict(checkpoint.metrics),
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
