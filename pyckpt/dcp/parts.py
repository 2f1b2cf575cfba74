"""What the ranks of one save or load tell each other besides the plan.

It travels in the plan's ``storage_data``, which is the writer's, or the reader's, own.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakSet

from torch.distributed.checkpoint.planner import SavePlan

from pyckpt.dcp.report import some
from pyckpt.errors import CheckpointReplaced, SaveError

__all__ = [
    "Part",
    "Seen",
    "Skipped",
    "host_name",
    "name_ranks",
    "parts_by_rank",
    "refuse_mismatch",
    "refuse_mixture",
    "skipped",
    "with_part",
]

_RANKS_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's part in one save. Two parts are equal only if they are the same object."""

    rank: int
    host: str
    path: str
    identity: int | None
    """The inode of the directory at that path; None for an address in a store."""
    number: int
    """The number of this save, as the rank counts its saves."""
    save_id: str
    """The id in the name of the rank's file."""
    has_room: bool = True
    """Whether the rank has memory for this save."""
    others: tuple[str, ...] = ()
    """Names of other files that the rank may make besides the one that the id names: of frozen
    parts."""


@dataclass(frozen=True)
class Skipped:
    """The coordinator's answer to each rank's `Part` if some rank has no room: nobody saves."""

    save_id: str
    """The id in the part that this answers."""


# Parts that a coordinator has seen. A planner may keep a plan, with the part in it, and return it
# again at a later save. That part does not describe the later save.
_seen: WeakSet[Part] = WeakSet()


def with_part(plan: SavePlan, part: Part) -> SavePlan:
    """A rank's plan that tells the coordinator of the rank's part."""
    return dataclasses.replace(plan, storage_data=part)


def parts_by_rank(plans: Sequence[SavePlan]) -> dict[int, Part]:
    """What the ranks told the coordinator of this save. A rank is missing if its planner has lost
    its part, or has returned the part of an earlier save."""
    parts = [part for plan in plans if (part := _part_of(plan)) is not None and part not in _seen]
    _seen.update(parts)
    return {part.rank: part for part in parts}


def skipped(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans with the answer that nobody saves, to all ranks that told of their part."""
    return [
        plan
        if (part := _part_of(plan)) is None
        else dataclasses.replace(plan, storage_data=Skipped(part.save_id))
        for plan in plans
    ]


def _part_of(plan: SavePlan) -> Part | None:
    part = plan.storage_data
    return part if isinstance(part, Part) else None


@lru_cache(maxsize=1)
def host_name() -> str:
    """The name of this machine."""
    return socket.gethostname()


def name_ranks(ranks: Sequence[int]) -> str:
    """Say "rank 3", or "ranks 1, 2, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {some(list(ranks), _RANKS_SHOWN)}"


def refuse_mismatch(parts: Sequence[Part]) -> None:
    """Check that all ranks are in the same save.

    Raises:
        SaveError: they are not, so their files would not belong together.
    """
    first = parts[0]
    if all(_is_same_save(part, first) for part in parts):
        return
    members: dict[tuple[int, str], list[Part]] = defaultdict(list)
    for part in parts:
        members[part.number, part.path].append(part)
    said = "; ".join(
        f"{name_ranks([part.rank for part in group])} ({group[0].host}): save {number}, into {path}"
        for (number, path), group in members.items()
    )
    raise SaveError(
        f"the ranks are not in the same save: {said}. All ranks must make the same calls, with "
        "the same steps and paths; one may have failed to begin a save that the others began"
    )


@dataclass(frozen=True)
class Seen:
    """The checkpoint that a rank is about to load."""

    path: str
    save_id: str | None
    """None if the checkpoint does not name one."""


def refuse_mixture(seen: Sequence[object]) -> None:
    """Check that all ranks load the same save.

    Raises:
        CheckpointReplaced: they do not. Each rank reads the metadata for itself, and the checkpoint
            was replaced after some ranks had read it.
    """
    members: dict[Seen, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(seen):
        if isinstance(of_rank, Seen):  # a planner may have lost what a rank told
            members[of_rank].append(rank)
    if len({of_rank.save_id for of_rank in members}) > 1:
        said = "; ".join(
            f"{name_ranks(ranks)}: save {of_rank.save_id} in {of_rank.path}"
            for of_rank, ranks in members.items()
        )
        raise CheckpointReplaced(
            f"ranks see different checkpoints: {said}. It was saved over in between: load it "
            "again; or the path is not the same directory on all of them"
        )


def _is_same_save(part: Part, other: Part) -> bool:
    # Ranks may have mounted the same directory at different places.
    same_directory = part.path == other.path or (
        part.identity is not None and part.identity == other.identity
    )
    return same_directory and part.number == other.number
