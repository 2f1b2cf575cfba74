"""The checkpoint that training resumes from: which one an argument of the user means."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import trainer_utils

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.train.arguments import directory_of
from pyckpt.train.finder import Finder
from pyckpt.train.store.catalog import directory_name

__all__ = [
    "PART",
    "Source",
    "get_last_checkpoint",
    "newest",
    "source_at",
    "source_of",
    "step_of",
]

PART = "trainer"
"""The name in a checkpoint of what belongs to the Trainer itself."""


@dataclass(frozen=True)
class Source:
    """A checkpoint of pyckpt to resume from; ``trainer`` is what it holds of the Trainer."""

    path: Path
    step: int
    any_older: bool
    """Whether an older one may be loaded in its place, if this one proves corrupt."""
    trainer: dict[str, Any]


def newest(directory: Path) -> str | Source:
    """The newest checkpoint in a directory; the path of one in the Trainer's own format.

    Raises:
        ValueError: there is none, as of the Trainer.
    """
    found = _newest_of_both(directory)
    if found is not None:
        return found
    entries = Finder(directory, "auto", None).inspect()
    what = "; ".join(str(entry) for entry in entries[:5])
    raise ValueError(
        f"No valid checkpoint found in output directory ({directory}"
        + (f": {what})" if what else ")")
    )


def get_last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """In the place of the function of ``transformers.trainer_utils``, which knows its own format.

    Args:
        folder: the ``output_dir`` of a Trainer; need not exist.

    Returns:
        The path of the newest valid checkpoint, for ``resume_from_checkpoint``; None if there is
        none.

    Raises:
        LoadError: the newest was not saved by a Trainer.
        OSError, PyckptError: it cannot be read, or the directory cannot.
    """
    found = _newest_of_both(Path(folder))
    return str(found.path) if isinstance(found, Source) else found


def _newest_of_both(directory: Path) -> str | Source | None:
    theirs: str | None = None
    if directory.is_dir():
        theirs = trainer_utils.get_last_checkpoint(directory)  # type: ignore[no-untyped-call]
    step = -1 if theirs is None else int(theirs.rpartition("-")[2])
    ours = _newest_in(directory)
    return ours if ours is not None and ours.step >= step else theirs


def step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's directory; None for another name."""
    number = path.name.removeprefix("step-")
    if path.name == number or not number.isdecimal():
        return None
    return int(number) if path.name == directory_name(int(number)) else None


def _newest_in(directory: Path) -> Source | None:
    """The newest valid checkpoint of pyckpt in a directory, if it has one."""
    if not directory.is_dir():
        return None
    newest = Finder(directory, "auto", None).latest()
    return None if newest is None else source_of(newest.path, newest.step, any_older=True)


def source_at(path: Path) -> Source | None:
    """The checkpoint of pyckpt at a path, or the newest in it; None if there is none."""
    step = step_of(path)
    if step is not None:
        path = directory_of(path)
        entries = {entry.path: entry for entry in Finder(path.parent, "auto", None).inspect()}
        entry = entries.get(path)
        if entry is None or entry.checkpoint is None:
            what = "there is no such directory" if entry is None else f"{entry.state}"
            why = "" if entry is None else f": {entry.reason}"
            raise FileNotFoundError(2, f"no valid checkpoint ({what}{why})", str(path))
        return source_of(path, step, any_older=False)
    if (path / ".metadata").exists():
        raise LoadError(
            f"{path} is not named as a checkpoint of a Trainer is, such as {directory_name(100)}; "
            "if it is one that was renamed, give it its name again"
        )
    return _newest_in(path)


def source_of(path: Path, step: int, *, any_older: bool) -> Source:
    part: dict[str, Any] = {PART: {"state": None, "run": None}}
    try:
        pyckpt.load(part, path, unexpected="ignore", no_dist=True)
    except LoadError as error:
        raise LoadError(
            f"{path} was not saved by a Trainer: it has no state of one. Its model alone can be "
            f"loaded, with pyckpt.load({{'model': model}}, path, unexpected='ignore')"
        ) from error
    return Source(path, step, any_older, part[PART])
