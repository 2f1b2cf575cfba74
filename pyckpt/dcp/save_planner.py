"""SavePlanner: plans once, and then again only what has changed.

DCP plans every save anew: each rank describes each of its tensors in Python, sends the descriptions
to the coordinator, which compares them all, and gets its part back. From one save to the next
nothing changes but the values. So the planner keeps the plan beside the shape of the state dict
(keys, shapes, dtypes, placements; compared natively), and a rank whose state dict has a shape that
it knows sends the name of the plan instead. The coordinator keeps what every rank said under that
name. When all know the same plan it stands; when one does not, the coordinator plans anew with what
the others said before, and a new name. Nothing is sent twice, and no rank is asked twice.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.dcp import conflicts
from pyckpt.dcp.leaves import is_plain_type, local_tensor, plans_itself
from pyckpt.dcp.whole import Whole
from pyckpt.errors import PyckptError
from pyckpt.format import plain
from pyckpt.format.metadata import read
from pyckpt.locks import fork_safe_lock
from pyckpt.timeline import named

__all__ = ["RESULTS", "KnownPlan", "PlannedMetadata", "SavePlanner"]

_PLANS_MAX = 16  # that a process keeps, for as many state dicts that take turns
_GLOBAL_PLANS_MAX = 64


class _Known(NamedTuple):
    """Sent in the place of a plan: the plan of that name, which both sides have."""

    name: str
    rank: int
    """Which of the plan's ranks this one is."""
    settled: bool = False
    """From the coordinator: it knows what a save of this plan has written, too."""


class _New(NamedTuple):
    """Sent with a final plan: the name that it goes by from now on, and whose part it is."""

    name: str
    rank: int


class KnownPlan:
    """What a rank remembers of a plan."""

    def __init__(self, planner: SavePlanner, final: SavePlan) -> None:
        self.name: str = final.planner_data.name
        self.rank: int = final.planner_data.rank
        self.final = final
        self.tree = planner.tree
        self.is_coordinator = planner.is_coordinator
        self._placements = planner.placements
        positions = {fqn: i for i, fqn in enumerate(planner.state_dict)}
        self.positions = positions
        self.order = [positions[item.index.fqn] for item in final.items]
        """Which leaf each item of the final plan comes from."""
        self.all_plain = all(is_plain_type(planner.leaves[i]) for i in self.order)
        self.notes: dict[str, Any] = {}
        """What writers remember with it."""

    def match(self, state_dict: dict[str, Any], is_coordinator: bool) -> list[Any] | None:
        """The leaves of a state dict that this is the plan of."""
        if is_coordinator != self.is_coordinator:
            return None
        leaves = self.tree.match(state_dict)
        if leaves is None or any(
            not _placed_as(leaves[i], placement) for i, placement in self._placements
        ):
            return None
        return leaves

    def is_remembered(self) -> bool:
        """Whether a save of such a state dict would go by this plan."""
        with _lock:
            return _known.get(self.name) is self

    def wanted(self) -> bytes:
        """Which leaves this rank writes: a byte each."""
        mask = bytearray(len(self.tree))
        for i in self.order:
            mask[i] = 1
        return bytes(mask)


class _GlobalPlan(NamedTuple):
    """What the coordinator remembers of a plan."""

    local: list[SavePlan]
    final: list[SavePlan]
    metadata: Metadata
    notes: dict[str, Any]


_lock = fork_safe_lock()
_known: OrderedDict[str, KnownPlan] = OrderedDict()  # least recently used first
_global: OrderedDict[str, _GlobalPlan] = OrderedDict()


def _keep(plans: OrderedDict[str, Any], name: str, plan: Any, most: int) -> None:
    with _lock:
        plans[name] = plan
        plans.move_to_end(name)
        while len(plans) > most:
            plans.popitem(last=False)


RESULTS = "results"
"""Under this name writers note what the ranks wrote in the first save of a plan."""


class PlannedMetadata(Metadata):
    """`Metadata` that a `SavePlanner` made, and a `DirectWriter` fills in.

    Where the items lie is read back from the file that was committed, for those who ask. To other
    ranks, which DCP sends the outcome of every save, goes the file's name alone.
    """

    notes: dict[str, Any]
    """What writers remember with the plan."""
    committed: str | None = None
    """The ``.metadata`` file."""

    @classmethod
    def of(cls, plan: _GlobalPlan) -> PlannedMetadata:
        metadata = cls(plan.metadata.state_dict_metadata, plan.metadata.planner_data)
        metadata.notes = plan.notes
        return metadata

    def __getattribute__(self, name: str) -> Any:
        if name == "storage_data" and self.committed is not None:
            return read(self.committed).storage_data
        return super().__getattribute__(name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Other writers pickle it as their ``.metadata``, which is to be as if it were stock's; and
        # pickle looks whether what is rebuilt is of the class that it says.
        return Metadata

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.committed is not None:
            return CommittedMetadata, (self.committed,)
        return Metadata(*(getattr(self, name) for name in _METADATA_FIELDS)).__reduce_ex__(protocol)


class CommittedMetadata(Metadata):
    """`Metadata` of a checkpoint that was committed; read when it is looked at."""

    path: str

    def __init__(self, path: str) -> None:
        self.path = path

    def __getattribute__(self, name: str) -> Any:
        if name in _METADATA_FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self.__dict__.update(vars(read(self.path)))
        return object.__getattribute__(self, name)

    def __reduce__(self) -> Any:
        return CommittedMetadata, (self.path,)


_METADATA_FIELDS = tuple(field.name for field in dataclasses.fields(Metadata))


def _is_known(leaf: Any) -> bool:
    """Whether all that a leaf's plan depends on is in what is compared: the shape of the state
    dict, and the placements."""
    if type(leaf) is DTensor:
        return _is_memory(local_tensor(leaf))
    return _is_memory(leaf) if isinstance(leaf, torch.Tensor) else not plans_itself(leaf)


def _is_memory(tensor: torch.Tensor) -> bool:
    return is_plain_type(tensor) and tensor.layout is torch.strided and not plans_itself(tensor)


def _placement_of(leaf: Any) -> Any:
    """What the plan of a DTensor depends on."""
    local = local_tensor(leaf)
    return leaf._spec, leaf.requires_grad, local.dtype, local.shape, local.stride()


def _placed_as(leaf: DTensor, placement: Any) -> bool:
    spec, requires_grad, dtype, shape, stride = placement
    local = local_tensor(leaf)
    return bool(
        _is_memory(local)
        and (leaf._spec is spec or leaf._spec == spec)
        and leaf.requires_grad == requires_grad
        and local.dtype == dtype
        and local.shape == shape
        and local.stride() == stride
    )


class SavePlanner(DefaultSavePlanner):
    """A ``SavePlanner`` for state dicts that look the same at every save::

        writer = pyckpt.DirectWriter(path)
        dcp.async_save(state_dict, storage_writer=writer, planner=pyckpt.SavePlanner())

    The first save of a state dict plans as stock does, with the same outcome. Later ones, as long
    as keys, shapes, dtypes and placements stay, spend no Python on single tensors and send no
    descriptions between ranks. Anything that changes on any rank is noticed and planned anew on
    all. What a replica's writer was stays its writer, so that other ranks need not stage it.

    Plans are remembered by the process, so that a new instance may be made for each save. Works
    with any writer; with `DirectWriter` what is written of the plan, ``.metadata``, is remembered,
    too. A state dict is planned at each save where it has tensors that are more than their memory,
    such as ``ShardedTensor``, or that say themselves which parts they hold; and so is any by a
    class that is made from this one.
    """

    tree: _C.StateTree
    placements: list[tuple[int, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.known: KnownPlan | None = None
        """The plan that the present save goes by; None where it cannot be known again."""
        self.leaves: list[Any] = []
        self._cacheable = False
        self.settled = False
        """Whether the coordinator knows what a save of the plan wrote."""
        self._wrote: list[set[MetadataIndex] | None] = []

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        with named("plan"):
            self._set_up(state_dict, storage_meta, is_coordinator)

    def _set_up(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None, is_coordinator: bool
    ) -> None:
        self.known = None
        with _lock:
            candidates = list(reversed(_known.values())) if type(self) is SavePlanner else []
        for known in candidates:
            leaves = known.match(state_dict, is_coordinator)
            if leaves is not None:
                self.known, self.leaves, self.is_coordinator = known, leaves, is_coordinator
                return
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.tree = _C.StateTree(state_dict)
        leaves = self.tree.match(state_dict) or []
        self.leaves = leaves
        self._cacheable = self._is_cacheable(leaves)
        if self._cacheable:
            self.placements = [
                (i, _placement_of(leaf))
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, DTensor)
            ]

    def __reduce__(self) -> Any:
        return type(self), ()

    def _is_cacheable(self, leaves: list[Any]) -> bool:
        """Whether the tree's leaves are DCP's items, and it can tell when one changes."""
        if type(self) is not SavePlanner:
            return False  # a class made from it may plan by whatever it likes
        flat = list(self.state_dict.values())
        return len(flat) == len(leaves) and all(
            mine is theirs and _is_known(mine) for mine, theirs in zip(leaves, flat, strict=True)
        )

    def create_local_plan(self) -> SavePlan:
        known = self.known
        if known is not None:
            # Until it has proved to be the coordinator's, too: see `finish_plan`.
            with _lock:
                _known.pop(known.name, None)
            return SavePlan([], planner_data=_Known(known.name, known.rank))
        with named("plan"):
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known = [
            plan.planner_data if isinstance(plan.planner_data, _Known) else None
            for plan in all_plans
        ]
        with _lock:
            before = [_global.get(of_rank.name) if of_rank else None for of_rank in known]
        for rank, (of_rank, plan) in enumerate(zip(known, before, strict=True)):
            if of_rank is not None and plan is None:
                raise PyckptError(
                    f"rank {rank} goes by the plan {of_rank.name}, which the coordinator does not "
                    "have: saves of other process groups, or too many different state dicts, came "
                    "between; the next save plans anew"
                )
        first, plan = known[0], before[0]
        if (
            first is not None
            and plan is not None
            and len(known) == len(plan.local)
            and known == [_Known(first.name, rank) for rank in range(len(known))]
        ):
            _keep(_global, first.name, plan, _GLOBAL_PLANS_MAX)
            answer = first._replace(settled=RESULTS in plan.notes)
            metadata = PlannedMetadata.of(plan)
            return [dataclasses.replace(p, planner_data=answer) for p in all_plans], metadata
        with named("plan of all ranks"), collector_paused():
            return self._plan_anew(all_plans, known, before)

    def _plan_anew(
        self,
        all_plans: list[SavePlan],
        known: Sequence[_Known | None],
        before: Sequence[_GlobalPlan | None],
    ) -> tuple[list[SavePlan], Metadata]:
        local = list(all_plans)
        self._wrote = [None] * len(local)
        for rank, (of_rank, plan) in enumerate(zip(known, before, strict=True)):
            if of_rank is not None and plan is not None:
                # In another process group it may have had another number.
                # What its writer says is of this save, and not in what is remembered.
                local[rank] = dataclasses.replace(
                    plan.local[of_rank.rank], storage_data=local[rank].storage_data
                )
                self._wrote[rank] = {item.index for item in plan.final[of_rank.rank].items}
        conflicts.check(local)
        final, metadata = self._create_global_plan(local)
        name = uuid.uuid4().hex
        made = _GlobalPlan(local, final, metadata, {})
        _keep(_global, name, made, _GLOBAL_PLANS_MAX)
        sent = [
            dataclasses.replace(plan, planner_data=_New(name, rank))
            for rank, plan in enumerate(final)
        ]
        return sent, PlannedMetadata.of(made)

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """One writer for what several ranks have: the one it had, or else the one with least. A
        rank that goes by a plan may have staged nothing but its own part of it."""
        holders: dict[MetadataIndex, list[int]] = defaultdict(list)
        sizes: dict[MetadataIndex, int] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders[item.index].append(rank)
                sizes[item.index] = item.tensor_storage_size() or 1
        loads = [0] * len(all_plans)
        writers: dict[MetadataIndex, int] = {}
        for index, ranks in holders.items():
            able = [
                rank for rank in ranks if (wrote := self._wrote[rank]) is None or index in wrote
            ]
            before = [rank for rank in able if self._wrote[rank] is not None]
            writer = min(before or able or ranks, key=loads.__getitem__)
            writers[index] = writer
            loads[writer] += sizes[index]
        return [
            dataclasses.replace(
                plan, items=[item for item in plan.items if writers[item.index] == rank]
            )
            for rank, plan in enumerate(all_plans)
        ]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        known = self.known
        self.settled = False
        if isinstance(new_plan.planner_data, _Known) and known is not None:
            self.settled = new_plan.planner_data.settled
            _keep(_known, known.name, known, _PLANS_MAX)
            self.plan = dataclasses.replace(known.final, storage_data=new_plan.storage_data)
            return self.plan
        if known is not None:
            # Another rank's state changed, and so did everyone's plan.
            renewed = self._renewed(known, new_plan)
        elif self._cacheable and isinstance(new_plan.planner_data, _New):
            renewed = KnownPlan(self, new_plan)
        else:
            renewed = None
        self.known = None
        if renewed is not None:
            self.known = renewed
            _keep(_known, renewed.name, renewed, _PLANS_MAX)
        self.plan = new_plan
        return self.plan

    def _renewed(self, known: KnownPlan, plan: SavePlan) -> KnownPlan:
        self.tree, self.placements = known.tree, known._placements
        self.state_dict = dict(zip(known.positions, self.leaves, strict=True))
        return KnownPlan(self, plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self.known is None:
            return super().lookup_object(index)
        leaf = self.leaves[self.known.positions[index.fqn]]
        return find_tensor_shard(leaf, index) if isinstance(leaf, torch.Tensor) else leaf

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = object.value if isinstance(object, Whole) else object
        return super().transform_object(write_item, value)

    def encode_plain(self, write_item: WriteItem) -> bytes | None:
        """The bytes of a plain object, as ``resolve_data`` gives them; None of any other."""
        if type(self).transform_object is not SavePlanner.transform_object:
            return None
        value = self.lookup_object(write_item.index)
        try:
            return plain.encode(value.value if type(value) is Whole else value)
        except plain.NotPlain:
            return None

    def tensors(self) -> list[torch.Tensor | None]:
        """For each item of the final plan of a known state dict its memory; None for objects."""
        assert self.known is not None
        leaves = self.leaves
        if self.known.all_plain:
            return [leaves[i] for i in self.known.order]
        return [_memory_of(leaves[i]) for i in self.known.order]


def _memory_of(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, DTensor):
        return local_tensor(leaf)
    return leaf if isinstance(leaf, torch.Tensor) else None
