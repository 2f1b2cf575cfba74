"""Plans that this process remembers, and the names that stand for them between ranks.

Two sides remember one plan under one name. Each rank has its own part of it, a `KnownPlan`. The
coordinator has a `GlobalPlan`, of all ranks (global_plan.py). What the first save of a plan came to
is kept with the plan, so that later saves need not find it out again.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.dcp.items import FirstWrite, Raw
from pyckpt.dcp.leaves import is_memory, is_plain_type, local_tensor
from pyckpt.dcp.packed_items import PackedItems
from pyckpt.locks import fork_safe_lock

__all__ = [
    "Ahead",
    "Known",
    "KnownPlan",
    "New",
    "Placement",
    "PlanCache",
    "Sent",
    "StateShape",
    "Turn",
    "known_plans",
    "new_name",
    "placement_of",
]

# --- what ranks send of a plan --------------------------------------------------------------------


class Known(NamedTuple):
    """Sent in the place of a plan: the plan of that name, which both sides have."""

    name: str
    rank: int
    """Which of the plan's ranks the sender is."""


class Ahead(NamedTuple):
    """Sent beside a plan, in the place of what a writer says: the ranks plan, and nothing is
    written yet."""


class Turn(NamedTuple):
    """The coordinator's answer to `Known`: one save by a plan, and whose part of it this is."""

    name: str
    """Of the plan."""
    rank: int
    number: int
    """Of the save, among those by this plan."""
    is_packed: bool
    """Whether the coordinator takes what the rank wrote as `PackedResults`."""
    settled: int | None = None
    """The number of the save by which the coordinator knows where this rank's items lie; None where
    it does not."""


class New(NamedTuple):
    """The coordinator's answer to a plan: the first save by a plan that is remembered."""

    turn: Turn
    answer: bytes
    """Which of its items the rank writes; for `chosen`."""
    forgotten: tuple[str, ...] = ()
    """The names of plans that the coordinator no longer has."""


def new_name() -> str:
    """A name that no other plan has."""
    return uuid.uuid4().hex


# --- what a rank remembers ------------------------------------------------------------------------


class Placement(NamedTuple):
    """What the plan of a DTensor depends on."""

    spec: Any
    requires_grad: bool
    dtype: Any
    shape: Any
    stride: Any

    def is_of(self, leaf: DTensor) -> bool:
        """Whether a DTensor is placed like this, and its local part is plain memory."""
        local = local_tensor(leaf)
        return bool(
            is_memory(local)
            and (leaf._spec is self.spec or leaf._spec == self.spec)
            and leaf.requires_grad == self.requires_grad
            and local.dtype == self.dtype
            and local.shape == self.shape
            and local.stride() == self.stride
        )


def placement_of(leaf: DTensor) -> Placement:
    """The placement of a DTensor as it is now."""
    local = local_tensor(leaf)
    return Placement(leaf._spec, leaf.requires_grad, local.dtype, local.shape, local.stride())


class StateShape(NamedTuple):
    """All that a rank's plan depends on: what a state dict must look like to be saved by it."""

    tree: _C.StateTree
    """Keys, shapes, dtypes and strides."""
    placements: list[tuple[int, Placement]]
    """Of the leaves that are DTensors, with their positions among the leaves."""
    positions: dict[str, int]
    """The position of each key's leaf."""
    is_coordinator: bool
    """Whether this rank coordinates: then it also writes what only one rank has to write."""

    def match(self, state_dict: dict[str, Any], is_coordinator: bool) -> list[Any] | None:
        """The leaves of a state dict of this shape; None where it has another shape."""
        if is_coordinator != self.is_coordinator:
            return None
        leaves = self.tree.match(state_dict)
        if leaves is None or any(not placed.is_of(leaves[i]) for i, placed in self.placements):
            return None
        return leaves


class Sent(NamedTuple):
    """What a rank told the coordinator of where it wrote a plan's items, all of it."""

    number: int
    """Of the save."""
    places: bytes
    """As ``_C.WriteJob.finish`` returns them."""
    raws: list[Raw]
    """What else is to be said of each."""


class KnownPlan:
    """What a rank remembers of a plan.

    Args:
        name: of the plan.
        rank: which of the plan's ranks this one is.
        local: what this rank has; None where that cannot be packed.
        final: what this rank writes.
        shape: of the state dicts that may be saved by this plan.
        leaves: of one such state dict.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        local: PackedItems | None,
        final: SavePlan,
        shape: StateShape,
        leaves: Sequence[Any],
    ) -> None:
        self.name = name
        self.rank = rank
        self.local = local
        self.final = final
        self.shape = shape
        self.order = [shape.positions[item.index.fqn] for item in final.items]
        """Which leaf each item of the final plan comes from."""
        self.all_plain = all(is_plain_type(leaves[i]) for i in self.order)
        """Whether the items are tensors without exception, each its own memory."""
        self.first_write: FirstWrite | None = None
        """How `DirectWriter` wrote this plan for the first time; None before it did."""
        self.sent: Sent | None = None
        """What the coordinator was told last of where the items lie."""

    def is_remembered(self) -> bool:
        """Whether a save of such a state dict would be made by this plan."""
        return known_plans.get(self.name) is self

    def wanted(self) -> bytes:
        """Which leaves this rank writes: a byte each."""
        mask = bytearray(len(self.shape.tree))
        for i in self.order:
            mask[i] = 1
        return bytes(mask)


# --- the memory -----------------------------------------------------------------------------------

P = TypeVar("P")


class PlanCache(Generic[P]):
    """Plans by their names; the plan that was not used for longest is the first to be forgotten.
    May be used from any thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        """How many plans it keeps."""
        self._plans: OrderedDict[str, P] = OrderedDict()
        self._lock = fork_safe_lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, name: str) -> P | None:
        """The plan of a name; None where it is not known, or forgotten."""
        with self._lock:
            return self._plans.get(name)

    def latest_first(self) -> list[P]:
        """All plans, the one that was used last before the others."""
        with self._lock:
            return list(reversed(self._plans.values()))

    def keep(self, name: str, plan: P) -> None:
        """Remember a plan that is used now."""
        with self._lock:
            is_new = name not in self._plans
            self._plans[name] = plan
            self._plans.move_to_end(name)
            if is_new:
                self._make_room()

    def _make_room(self) -> None:
        """Forget what there are too many of. Called with the lock held, and a new plan kept."""
        while len(self._plans) > self.most:
            self._plans.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget the plan of a name, if there is one."""
        with self._lock:
            self._plans.pop(name, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._plans.clear()


known_plans: PlanCache[KnownPlan] = PlanCache(16)
"""Of this process, for as many state dicts that take turns."""
