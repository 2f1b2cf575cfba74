"""What a commit needs: the description of the save, and a look at the files of all ranks."""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt.dcp.committed import look_up
from pyckpt.dcp.destination import Destination
from pyckpt.dcp.global_plan import GlobalPlan, PackedResults
from pyckpt.dcp.parts import Part, host_name
from pyckpt.errors import SaveError
from pyckpt.format.columns import KeysMapping
from pyckpt.format.metadata import encode
from pyckpt.private import CURRENT_DCP_VERSION

__all__ = ["Results", "describe", "look_for_files"]

Results = Sequence[Sequence[WriteResult]]
"""The results of each rank's writing."""


def look_for_files(
    destination: Destination,
    results: Results,
    parts: Mapping[int, Part],
    own: Collection[Path | str],
) -> int:
    """Check that this rank sees the files of all ranks, before they count.

    Args:
        destination: where they must be.
        results: of the ranks that wrote.
        parts: of the ranks, as far as this one knows them.
        own: this rank's files.

    Returns:
        The bytes of all files.

    Raises:
        FileNotFoundError: a file of this rank was removed.
        SaveError: this rank does not see what another wrote.
    """
    written = [(rank, *file) for rank, of in enumerate(results) for file in _files_of(of)]
    sizes = destination.sizes({name for _, name, _ in written})
    own_paths = {str(path).rpartition("/")[2]: str(path) for path in own}
    total = 0
    for rank, name, size in written:
        found = sizes.get(name)
        if found is not None and found >= size:
            total += found
            continue
        if name in own_paths and found is None:
            raise FileNotFoundError(
                errno.ENOENT, "removed before its save was committed", own_paths[name]
            )
        part = parts.get(rank)
        where = "" if part is None else f" ({part.host}), into {part.path}"
        raise SaveError(
            f"rank {rank} wrote {size} bytes to {name}{where}; "
            f"rank {destination.rank} ({host_name()}), which commits, "
            f"{'does not see that file' if found is None else f'sees {found} bytes of it'} "
            f"in {destination}. All ranks must save into one directory, on a file system that "
            "they share, or below one address (a Checkpointer also takes node_local=True); "
            "nothing was committed"
        )
    return total


def describe(
    metadata: Metadata, results: Results, plan: GlobalPlan | None, *, path: str, save_id: str
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
    metadata.storage_meta = StorageMeta(checkpoint_id=path, save_id=save_id)
    # A rank that writes nothing has no results.
    packed = [of_rank for of_rank in results if isinstance(of_rank, PackedResults)]
    if plan is not None and len(packed) == sum(bool(_files_of(of_rank)) for of_rank in results):
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


def _files_of(results: Sequence[WriteResult]) -> list[tuple[str, int]]:
    """The names of the files that a rank's items are in, and the least length of each."""
    if isinstance(results, PackedResults):
        return [(results.file, results.size)]
    ends: dict[str, int] = {}
    for result in results:
        info = result.storage_data
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    return list(ends.items())
