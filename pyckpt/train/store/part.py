"""What a node holds of a checkpoint, where each node has a directory of its own.

Each node has the ``.metadata`` of the whole checkpoint, and the data files of its own ranks. A file
``.part.<save id>`` beside it names these. Without one, a directory holds all or is damaged.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format.files import open_regular, read_regular

__all__ = ["PENDING", "Part", "pending", "read_part", "write_durably", "write_part"]

PENDING = "pending-"
"""So begins the name of metadata that a node has prepared; its save and its directory follow."""

_SIZE_MAX = 64 << 20
_SAVE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Part:
    """A node's part of a checkpoint."""

    files: Collection[str]
    """The data files of the node's own ranks."""
    final: bool = False
    """Of the checkpoint, whose own note may be in a file of another node. So are the metrics."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def on_other_nodes(self, directory: Path, files: Iterable[str]) -> tuple[str, ...]:
        """Those of the checkpoint's files that other nodes have, in their order. One that was
        brought here is here."""
        return tuple(
            name for name in files if name not in self.files and not (directory / name).exists()
        )


def pending(folder: Path) -> set[str]:
    """The names of the directories for which a node has prepared a commit and not finished it.

    Args:
        folder: where it is prepared: that of the generations.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    prepared = (name.removeprefix(PENDING) for name in names if name.startswith(PENDING))
    return {name.partition("-")[2] for name in prepared}


def write_part(directory: Path, save_id: str, part: Part) -> None:
    """Write the record of a part, durably but for its name.

    Raises:
        OSError: it could not be written.
    """
    content = {"files": sorted(part.files), "final": part.final, "metrics": dict(part.metrics)}
    write_durably(directory / commit.part_name(save_id), json.dumps(content).encode())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; its name becomes durable with its directory.

    Raises:
        OSError: it could not be written. It is not there then.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(path, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def read_part(directory: Path, save_id: str) -> Part | None:
    """The record of the part of a save that a directory holds; None if there is none.

    Raises:
        CorruptCheckpoint: it is damaged.
        OSError: it cannot be read.
    """
    if not _SAVE_ID.fullmatch(save_id):
        return None  # not one of ours
    path = directory / commit.part_name(save_id)
    try:
        with open_regular(path) as file:
            data = read_regular(file, path, most=_SIZE_MAX)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(data)
        metrics = {str(name): float(value) for name, value in content["metrics"].items()}
        return Part(frozenset(map(str, content["files"])), content["final"] is True, metrics)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is damaged: {error}", path=str(path)) from error
