"""`NodeCommit`: commits one save in the directories of all nodes.

The data of all ranks is durable by then. Each node first *prepares*: it checks that the files of
its ranks are there, and writes the metadata of the whole checkpoint beside its directories of
checkpoints, durably. When all have, rank 0 renames the metadata into its place in its node's
directory. That rename is the commit: the checkpoint counts if any node has it. Then the other nodes
rename theirs, and when all have, each removes the files of the checkpoint that was replaced.

Killed before the commit, no node has the new metadata, and the old checkpoint is whole. Killed
after it, some nodes have only prepared. The next restore or save *settles*: since one node has
committed, the others do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from pyckpt.dcp.failures import error_of
from pyckpt.errors import LoadError, PyckptError, SaveError, Superseded
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.nodes.grouping import Nodes
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.part import PENDING, Part, write_durably, write_part

__all__ = ["Description", "NodeCommit"]

_logger = logging.getLogger("pyckpt")


@dataclass(frozen=True)
class Description:
    """What rank 0 knows of a save, and all nodes write."""

    metadata: bytes
    """Of its ``.metadata``."""
    save_id: str
    files: Mapping[str, int]
    """All data files, and the bytes of each."""
    final: bool
    metrics: Mapping[str, float]


class NodeCommit:
    """Commits saves on all nodes. All ranks make the same calls; each is collective.

    Args:
        directory: of the checkpoints.
        nodes: the nodes.
        held: a block in which this job may write in the directory of this node; see `Fence`.
        on_settled: called on the first rank of each node when a save begins and nothing is half
            committed there any more.
    """

    MEETINGS = 8
    """The most that `begin` and `commit` come to."""

    def __init__(
        self,
        directory: Path,
        nodes: Nodes,
        held: Callable[[], AbstractContextManager[None]],
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory = directory
        self._folder = directory / FOLDER
        self._nodes = nodes
        self._held = held
        self._on_settled = on_settled

    def begin(self) -> None:
        """Have this job be the one that saves, on each node, and finish what an earlier save left
        half committed.

        Raises:
            CheckpointException: a node's directory refuses, or another job has begun to save.
        """

        def take() -> list[str]:
            if not self._nodes.is_first:
                return []
            with self._held():
                return self._pending()

        # All nodes are this job's from here on, so an older job can commit nothing more.
        self._settle(self._nodes.meet("beginning to save on each node", take), discards=True)
        if self._nodes.is_first:
            self._on_settled()

    def settle(self) -> None:
        """Finish what an earlier save left half committed, before a restore.

        Raises:
            Exception: as `pyckpt.load`; a node's directory refuses.
        """

        def look() -> list[str]:
            return self._pending() if self._nodes.is_first else []

        doing = "looking for unfinished commits"
        try:
            self._settle(self._nodes.meet(doing, look), discards=False)
        except CheckpointException as error:
            failure = error
        else:
            return
        raise error_of(failure, alone=False, kind=LoadError, doing=doing)

    @property
    def acts(self) -> bool:
        """Whether this rank makes the directory of its node ready, and commits there."""
        return self._nodes.is_first

    def commit(
        self,
        path: Path,
        described: tuple[bytes, set[str]] | None,
        *,
        final: bool,
        metrics: Mapping[str, float],
    ) -> None:
        """Commit a save.

        Args:
            path: directory of the checkpoint.
            described: the bytes of its ``.metadata`` and the names of its data files, on rank 0;
                None on other ranks, or if there is nothing to commit.
            final, metrics: of the checkpoint, on rank 0.

        Raises:
            CheckpointException: a node could not. If rank 0 had committed already, the next restore
                or save settles it.
        """
        nodes = self._nodes

        def describe() -> Description | None:
            if described is None:
                return None
            data, _ = described
            metadata = metadata_format.decode(data, path=path / commit.metadata_name())
            files = metadata_format.data_files(metadata)
            save_id = None if metadata.storage_meta is None else metadata.storage_meta.save_id
            return Description(data, str(save_id), files, final, metrics)

        # Not sent by the meeting, in which every rank sends as much as the one that sends most.
        own: list[Description | None] = []
        nodes.meet("describing the checkpoint", lambda: own.append(describe()))
        found = nodes.from_rank(0, own[0])
        if found is None:
            return
        pending = self._folder / f"{PENDING}{found.save_id}-{path.name}"
        is_rank_0 = nodes.ranks.rank == 0

        def rename(acts: bool) -> None:
            if acts:
                self._rename(pending, path, found.save_id)

        def rename_first() -> None:
            if is_rank_0:
                with self._held():
                    rename(True)

        nodes.meet("preparing to commit", lambda: self._prepare(pending, path, found))
        nodes.meet("committing", rename_first)
        nodes.meet("committing on all nodes", lambda: rename(nodes.is_first and not is_rank_0))
        if nodes.is_first:
            self._remove_replaced(path, found)

    def remains(self, path: Path) -> set[str]:
        """The data files in a directory of which a save has failed; none if its commit may have
        begun on another node. Not collective."""
        try:
            if any(self._parts_of(name)[1] == path for name in self._pending()):
                return set()
            return {name for name in os.listdir(path) if commit.rank_of(name) is not None}
        except OSError:
            return set()

    # --- on one node ---

    def _prepare(self, pending: Path, path: Path, described: Description) -> None:
        if not self._nodes.is_first:
            return
        members = set(self._nodes.members)
        ours = {
            name: size for name, size in described.files.items() if commit.rank_of(name) in members
        }
        with self._held():
            for name, size in ours.items():
                try:
                    found = os.stat(path / name).st_size
                except FileNotFoundError:
                    found = -1
                if found < size:
                    what = "is not there" if found < 0 else f"has {found} bytes of {size}"
                    raise SaveError(f"{path / name} {what}; nothing was committed")
            part = Part(frozenset(ours), described.final, described.metrics)
            write_part(path, described.save_id, part)
            commit.sync_directory(path)
            write_durably(pending, described.metadata)
            commit.sync_directory(self._folder)

    def _remove_replaced(self, path: Path, committed: Description) -> None:
        """Remove what the save replaced on this node. Does not raise, since the save counts."""
        try:
            with self._held():  # else it may be what a newer job has committed meanwhile
                commit.remove_unnamed(path, set(committed.files), committed=commit.metadata_name())
                commit.remove_parts(path, commit.part_name(committed.save_id))
        except (Superseded, OSError) as error:
            _logger.warning("%s: what this save replaced was not removed: %s", path, error)

    def _rename(self, pending: Path, path: Path, save_id: str) -> None:
        target = path / commit.metadata_name()
        try:
            os.replace(pending, target)
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            if is_gone and _committed(path) == save_id:
                pass  # another job has settled it
            else:
                what = f"{error.strerror}, when it was to be renamed to {target}"
                raise OSError(error.errno, what, str(pending)) from error
        with commit.committed(target):
            commit.sync_directory(path)
            commit.sync_directory(self._folder)

    def _pending(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.startswith(PENDING)]
        except FileNotFoundError:
            return []

    def _settle(self, pending: list[list[str]], *, discards: bool) -> None:
        """Args:
        pending: the names of what each rank's node has prepared.
        discards: whether to remove what no node has committed.
        """
        every = sorted({name for of_node in pending for name in of_node})
        if not every:
            return
        nodes = self._nodes

        def committed() -> set[str]:
            return {name for name in every if nodes.is_first and self._is_committed(name)}

        decided = set().union(*nodes.meet("looking at unfinished commits", committed))

        def finish() -> None:
            for name in pending[nodes.ranks.rank]:
                save_id, path = self._parts_of(name)
                if name in decided and path.is_dir():
                    self._rename(self._folder / name, path, save_id)
                elif name in decided:
                    # As after the loss of a disk: the other nodes or the mirror may have it all.
                    _logger.warning("%s was removed, so its commit is not finished here", path)
                    (self._folder / name).unlink(missing_ok=True)
                elif discards:
                    (self._folder / name).unlink(missing_ok=True)

        nodes.meet("finishing commits", finish)

    def _parts_of(self, name: str) -> tuple[str, Path]:
        save_id, _, of_step = name.removeprefix(PENDING).partition("-")
        return save_id, self._directory / of_step

    def _is_committed(self, name: str) -> bool:
        save_id, path = self._parts_of(name)
        return _committed(path) == save_id


def _committed(path: Path) -> str | None:
    """Which save is committed in a directory; None if none is, or it cannot be read."""
    try:
        metadata = metadata_format.read(path / commit.metadata_name())
    except (FileNotFoundError, NotADirectoryError, PyckptError):
        return None
    return None if metadata.storage_meta is None else metadata.storage_meta.save_id
