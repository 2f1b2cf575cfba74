"""Plans that this process remembers, and the names that stand for them between ranks.

Two sides remember one plan under one name. Each rank has its own part of it, a `KnownPlan`. The
coordinator has a `GlobalPlan`, of all ranks. What the first save of a plan came to is kept with the
plan, so that later saves need not find it out again.
"""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.dcp.items import FirstWrite
from pyckpt.dcp.leaves import is_memory, is_plain_type, local_tensor
from pyckpt.format.template import Template
from pyckpt.locks import fork_safe_lock
from pyckpt.private import CURRENT_DCP_VERSION

__all__ = [
    "GlobalPlan",
    "Known",
    "KnownPlan",
    "New",
    "Placement",
    "PlanCache",
    "StateShape",
    "global_plan_of",
    "global_plans",
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
    settled: bool = False
    """From the coordinator: it also remembers what the first save of this plan wrote."""


class New(NamedTuple):
    """Sent with a final plan: the name that the plan has from now on, and whose part this is."""

    name: str
    rank: int


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


class KnownPlan:
    """What a rank remembers of a plan.

    Args:
        name: of the plan.
        rank: which of the plan's ranks this one is.
        final: what this rank writes.
        shape: of the state dicts that may be saved by this plan.
        leaves: of one such state dict.
    """

    def __init__(
        self, name: str, rank: int, final: SavePlan, shape: StateShape, leaves: Sequence[Any]
    ) -> None:
        self.name = name
        self.rank = rank
        self.final = final
        self.shape = shape
        self.order = [shape.positions[item.index.fqn] for item in final.items]
        """Which leaf each item of the final plan comes from."""
        self.all_plain = all(is_plain_type(leaves[i]) for i in self.order)
        """Whether the items are tensors without exception, each its own memory."""
        self.first_write: FirstWrite | None = None
        """How `DirectWriter` wrote this plan for the first time; None before it did."""

    def is_remembered(self) -> bool:
        """Whether a save of such a state dict would be made by this plan."""
        return known_plans.get(self.name) is self

    def wanted(self) -> bytes:
        """Which leaves this rank writes: a byte each."""
        mask = bytearray(len(self.shape.tree))
        for i in self.order:
            mask[i] = 1
        return bytes(mask)


# --- what the coordinator remembers ---------------------------------------------------------------


class GlobalPlan:
    """What the coordinator remembers of a plan.

    Args:
        local: what each rank said that it has.
        final: what each rank writes.
        metadata: as DCP made it of the plan, before anything is written.
    """

    def __init__(self, local: list[SavePlan], final: list[SavePlan], metadata: Metadata) -> None:
        self.local = local
        self.final = final
        self._metadata = metadata
        self.results: list[list[WriteResult]] | None = None
        """What each rank wrote in the first save of this plan by a `DirectWriter`; None before."""
        self._template: Template | None = None

    def metadata(self) -> Metadata:
        """The metadata of one save, for its writer to complete."""
        return Metadata(self._metadata.state_dict_metadata, self._metadata.planner_data)

    def is_plan_of(self, metadata: Metadata) -> bool:
        """Whether `metadata` made it, and nobody has put another description into it since."""
        return (
            metadata.state_dict_metadata is self._metadata.state_dict_metadata
            and metadata.planner_data is self._metadata.planner_data
        )

    def template(self) -> Template:
        """For the ``.metadata`` of the saves after the first; made when the second asks for it."""
        assert self.results is not None
        if self._template is None:
            metadata = self.metadata()
            metadata.version = CURRENT_DCP_VERSION
            self._template = Template(metadata, self.results)
        return self._template


# --- the memory -----------------------------------------------------------------------------------

P = TypeVar("P", KnownPlan, GlobalPlan)


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
            self._plans[name] = plan
            self._plans.move_to_end(name)
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
global_plans: PlanCache[GlobalPlan] = PlanCache(64)
"""Of the saves that this process coordinates."""


def global_plan_of(plans: Sequence[SavePlan]) -> GlobalPlan | None:
    """What the coordinator remembers of the plans that it is about to send to the ranks; None where
    no `SavePlanner` made them."""
    name = plans[0].planner_data if plans else None
    return global_plans.get(name.name) if isinstance(name, Known | New) else None
