"""Refuses saves in which ranks have different things under the same name.

If several ranks have an item of the same name, DCP saves one rank's. The checkpoint has the names
of all ranks. If one rank has a value where another has a dict or list, the checkpoint has both, and
nothing can load it. If ranks have lists of different lengths, the checkpoint has a mixture of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from pyckpt.dcp.report import some
from pyckpt.errors import PyckptError

__all__ = ["check", "refuse"]

_SHOWN = 5


def check(plans: Sequence[SavePlan]) -> None:
    """Raise PyckptError if the plans of the ranks contradict each other. Packed plans are checked
    natively, by the same rules (csrc/plan_conflicts.h).

    Args:
        plans: what each rank wants to write, as it was planned there.
    """
    found: dict[str, str] = {}
    kinds: dict[tuple[Any, ...], tuple[str, int]] = {}
    lengths: dict[tuple[Any, ...], tuple[int, int]] = {}
    for rank, plan in enumerate(plans):
        recorded = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        own: dict[tuple[Any, ...], str] = {}
        long: dict[tuple[Any, ...], int] = {}
        for item in plan.items:
            key = item.index.fqn
            path = tuple(recorded.get(key, (key,)))
            if path in own:
                continue  # another shard of the same tensor
            own[path] = "an object"
            if item.type is not WriteItemType.BYTE_IO and item.tensor_data is not None:
                own[path] = f"a tensor of shape {tuple(item.tensor_data.size)}"
            for end in range(1, len(path)):
                inner = path[end]
                if isinstance(inner, int):
                    own.setdefault(path[:end], "a list")
                    long[path[:end]] = max(long.get(path[:end], 0), inner + 1)
                else:
                    own.setdefault(path[:end], "a dict")
        for path, kind in own.items():
            before, other = kinds.setdefault(path, (kind, rank))
            if before != kind:
                name = ".".join(map(str, path))
                found.setdefault(name, f"{name} is {before} on rank {other} and {kind} on {rank}")
        for path, length in long.items():
            size, other = lengths.setdefault(path, (length, rank))
            if size != length:
                name = ".".join(map(str, path))
                found.setdefault(
                    name, f"{name} has {size} entries on rank {other} and {length} on {rank}"
                )
    refuse(found.values())


def refuse(found: Collection[str]) -> None:
    """Raise PyckptError if any contradiction was found. There is one line for each name."""
    if found:
        raise PyckptError(
            f"ranks would save different things under the same names ({len(found)}): "
            f"{some(found, _SHOWN)}; what each rank has its own of belongs into a "
            "pyckpt.PerRank, and the states of metrics into a pyckpt.MetricState"
        )
