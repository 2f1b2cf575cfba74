"""The content of a checkpoint as a tree, and the rank and policy of a load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.paths import Path, paths

__all__ = ["Path", "Policy", "Rank", "Tree", "leaves", "tree"]

Tree: TypeAlias = Any
"""A dict by path part (an int in a list), down to the metadata of an item."""


@dataclass(frozen=True)
class Policy:
    """What to do if a checkpoint and the state do not fit; see `AppState.load`."""

    missing: Literal["error", "keep"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    mismatched: Literal["error", "keep"] = "error"

    def __post_init__(self) -> None:
        for name, other in (("missing", "keep"), ("unexpected", "ignore"), ("mismatched", "keep")):
            value = getattr(self, name)
            if value not in ("error", other):
                raise ValueError(f"{name} must be 'error' or '{other}', not {value!r}")


@dataclass(frozen=True)
class Rank:
    """This process among those that save or load together."""

    index: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Rank:
        if not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)


def tree(metadata: Metadata) -> dict[str, Tree]:
    """The items of a checkpoint, each at the path that it had in the state.

    Raises:
        CorruptCheckpoint: two items contradict each other.
    """
    root: dict[Any, Any] = {}
    for key, path in paths(metadata).items():
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise CorruptCheckpoint(f"{key} is in the checkpoint as a value and more", key=key)
        if path[-1] in node:
            raise CorruptCheckpoint(f"the checkpoint has {key} twice", key=key)
        node[path[-1]] = metadata.state_dict_metadata[key]
    return root


def leaves(node: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The items below a node, with their paths."""
    if isinstance(node, dict):
        for part, sub in node.items():
            yield from leaves(sub, (*path, part))
    else:
        yield path, node
