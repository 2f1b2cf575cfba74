"""Commits a save: describes it, commits the description, and removes files that no longer count."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt.dcp.committed import look_up
from pyckpt.dcp.global_plan import GlobalPlan, PackedResults
from pyckpt.dcp.parts import Part, host_name
from pyckpt.errors import SaveError
from pyckpt.format import commit
from pyckpt.format.claim import Claim, turn
from pyckpt.format.columns import KeysMapping
from pyckpt.format.metadata import encode
from pyckpt.locks import fork_safe_lock
from pyckpt.private import CURRENT_DCP_VERSION
from pyckpt.timeline import named

__all__ = ["DataFile", "Destination", "Results", "describe"]

Results = Sequence[Sequence[WriteResult]]
"""The results of each rank's writing."""

# Commits of one process take turns, so that a commit, and the sweep after it, never see another one
# half done.
_commit_lock = fork_safe_lock()
# Data files of saves under way, which other saves of this process into the same directory must not
# remove. Saves of several ranks are not in it, since collectives keep these saves apart.
_unfinished: set[Path] = set()
# Claims of this process. Only the rank that commits learns how a save ended. And a program that
# keeps an error keeps the writer that raised it. So claims of other ranks may last until the next
# save.
_claims: WeakSet[Claim] = WeakSet()


class DataFile:
    """The file that a rank writes in one save.

    Args:
        path: of the file.
        shared: whether other ranks take part in the save. The file of a save without others is
            kept from the sweeps of other saves of this process.
    """

    def __init__(self, path: Path, *, shared: bool) -> None:
        self.path = path
        self._claim: Claim | None = None
        if not shared:
            _unfinished.add(path)

    def claim(self) -> None:
        """Keep the file from the sweeps of other processes. It must be there."""
        self._claim = Claim(self.path)
        _claims.add(self._claim)

    def let_go(self) -> None:
        """Call it when the save was committed, or has failed. Idempotent."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()
        _unfinished.discard(self.path)


@dataclass(frozen=True)
class Destination:
    """The directory that a save goes to, and how this rank saves there."""

    path: Path
    rank: int
    each_commits: bool
    """Whether each rank commits its own file, for itself alone."""
    sync: bool
    """Whether all files must be durable before the commit."""
    is_fenced: bool
    """Whether a fence keeps other processes from saving there."""

    @property
    def metadata_name(self) -> str:
        """The name of the file that makes the save count."""
        return commit.metadata_name(self.rank if self.each_commits else None)

    @property
    def _own_rank(self) -> int | None:
        """The rank whose files this process may remove; None for all."""
        return self.rank if self.each_commits else None

    def turn(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Keep processes apart that save there. A process that sweeps or commits runs this block
        alone; with ``shared``, several may."""
        # If each rank commits for itself, no rank removes files of another.
        return (
            nullcontext() if self.is_fenced or self.each_commits else turn(self.path, shared=shared)
        )

    def release_claims(self) -> None:
        """Release the files there that earlier saves of this process claimed and never released."""
        here = os.path.realpath(self.path)
        for claim in list(_claims):
            if claim.path not in _unfinished and os.path.realpath(claim.path.parent) == here:
                claim.release()

    def sweep_remains(self, before: Callable[[], None]) -> None:
        """Make room: remove the files that failed saves left, those of all ranks. Call it before
        any rank of this save writes. It first calls ``before``, which may refuse by raising."""
        with _commit_lock, self.turn():
            before()
            commit.begin_save(
                self.path, self._unfinished_names(), sync=self.sync, rank=self._own_rank
            )

    def commit(
        self,
        data: bytes,
        files: set[str],
        *,
        check: Callable[[], None],
        before_rename: Callable[[], None],
    ) -> None:
        """Make a save count, and remove the files that no longer do.

        Args:
            data: the bytes of the ``.metadata`` file.
            files: the names of the data files that ``data`` names.
            check: called while no other save commits or sweeps there. It raises if ``data`` is
                wrong about the files.
            before_rename: called right before the rename that makes the save count.
        """
        with _commit_lock, self.turn(), named("commit", len(data)):
            check()
            name = self.metadata_name
            commit.commit_metadata(
                self.path, name, data, sync=self.sync, before_rename=before_rename
            )
            commit.remove_unnamed(
                self.path,
                files | self._unfinished_names(),
                committed=name,
                rank=self._own_rank,
            )

    def look_for_files(
        self, results: Results, parts: Mapping[int, Part], own: DataFile | None
    ) -> int:
        """Check that this rank sees the files of all ranks, before they count. No cache of a
        network file system can answer wrongly, because this machine never looked for these names
        before.

        Args:
            results: of the ranks that wrote.
            parts: of the ranks, as far as this one knows them.
            own: this rank's file.

        Returns:
            The bytes of all files.

        Raises:
            FileNotFoundError: this rank's own file was removed.
            SaveError: this rank does not see what another wrote.
        """
        total = 0
        for rank, of_rank in enumerate(results):
            file = _file_of(of_rank)
            if file is None:
                continue
            name, size = file
            try:
                found: int | None = os.stat(self.path / name).st_size
            except FileNotFoundError:
                found = None
            if found is not None and found >= size:
                total += found
                continue
            if own is not None and self.path / name == own.path and found is None:
                raise FileNotFoundError(
                    errno.ENOENT, "removed before its save was committed", str(own.path)
                )
            part = parts.get(rank)
            where = "" if part is None else f" ({part.host}), into {part.path}"
            raise SaveError(
                f"rank {rank} wrote {size} bytes to {name}{where}; "
                f"rank {self.rank} ({host_name()}), which commits, "
                f"{'does not see that file' if found is None else f'sees {found} bytes of it'} "
                f"in {self.path}. All ranks must save into one directory, on a file system that "
                "they share; nothing was committed"
            )
        return total

    def _unfinished_names(self) -> set[str]:
        here = os.path.realpath(self.path)
        others = tuple(_unfinished)
        return {path.name for path in others if os.path.realpath(path.parent) == here}


def describe(
    metadata: Metadata, results: Results, plan: GlobalPlan | None, *, path: Path, save_id: str
) -> tuple[bytes, set[str]]:
    """Complete the metadata of a save; return the bytes of its ``.metadata`` file, and the names of
    its data files.

    Args:
        metadata: what DCP made of the plan.
        results: of the ranks that wrote.
        plan: the plan from which the metadata was made; None if it is not remembered.
        path, save_id: of the checkpoint.

    Raises:
        PyckptError: the results are not those of the plan.
    """
    look_up(metadata)  # a planner may return the metadata of an earlier save again
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=str(path), save_id=save_id)
    # A rank that writes nothing has no results.
    packed = [of_rank for of_rank in results if isinstance(of_rank, PackedResults)]
    if plan is not None and len(packed) == sum(
        _file_of(of_rank) is not None for of_rank in results
    ):
        return plan.complete(metadata, packed, encode), {of_rank.file for of_rank in packed}
    if isinstance(metadata.state_dict_metadata, KeysMapping):
        metadata.state_dict_metadata = metadata.state_dict_metadata.copy()
    metadata.storage_data = {
        result.index: result.storage_data for of_rank in results for result in of_rank
    }
    _refuse_gaps(metadata)
    return encode(metadata), {info.relative_path for info in metadata.storage_data.values()}


def _refuse_gaps(metadata: Metadata) -> None:
    """Refuse metadata that speaks of what nobody wrote: no `DirectReader` would take it."""
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            wanted = [MetadataIndex(key, chunk.offsets) for chunk in described.chunks]
        else:
            wanted = [MetadataIndex(key)]
        if any(index not in metadata.storage_data for index in wanted):
            raise SaveError(
                f"{key} is in the plan, and nobody wrote all of it. A writer that leaves items out "
                "does so in prepare_local_plan; nothing was committed"
            )


def _file_of(results: Sequence[WriteResult]) -> tuple[str, int] | None:
    """The name of the file that a rank wrote, and its least length; None if it wrote none."""
    if isinstance(results, PackedResults):
        return results.file, results.size
    if not results:
        return None
    ends = [result.storage_data.offset + result.storage_data.length for result in results]
    return results[0].storage_data.relative_path, max(ends)
