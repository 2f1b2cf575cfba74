"""The checkpoints below a directory."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from pyckpt.format import commit
from pyckpt.train.store.fence import FOLDER

__all__ = ["below"]

_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


def below(directory: str | os.PathLike[str]) -> list[tuple[Path, int | None]]:
    """The checkpoints to verify for a path: itself, if it is one, or else the directories in it
    that are, whatever their names; each with a rank where every rank saved its own. Remains of
    saves and removals that were interrupted are none. A directory that this process may not list is
    one, since it may hold a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        NotADirectoryError: it is a file.
        OSError: the directory cannot be read.
    """
    root = Path(directory)
    if root.is_file():
        raise commit.no_checkpoint(root)
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
