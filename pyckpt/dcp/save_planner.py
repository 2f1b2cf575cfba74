"""SavePlanner: plans once, and then again only what has changed.

DCP plans every save anew: each rank describes each of its tensors in Python, sends the descriptions
to the coordinator, which compares them all, and gets its part back. From one save to the next
nothing changes but the values. So the planner keeps the plan beside the shape of the state dict
(keys, shapes, dtypes, placements; compared natively), and a rank whose state dict has a shape that
it knows sends the name of the plan instead. The coordinator keeps what every rank said under that
name. When all know the same plan it stands; when one does not, the coordinator plans anew with what
the others said before, and a new name. Nothing is sent twice, and no rank is asked twice.

What is sent is a block of bytes a rank (packed_items.py), of which the coordinator makes the plan
without a Python object an item (csrc/global_plan.h). It answers which of its items each rank
writes. Where some rank has what no block can hold, or has another planner, DCP's own code makes the
plan, of WriteItems, and nobody remembers it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.dcp import conflicts
from pyckpt.dcp.global_plan import GlobalPlan, global_plans
from pyckpt.dcp.leaves import is_memory, local_tensor, plans_itself
from pyckpt.dcp.packed_items import ImpliedItems, PackedItems, PackedPaths, chosen, pack
from pyckpt.dcp.parts import Part
from pyckpt.dcp.plans import (
    Ahead,
    Known,
    KnownPlan,
    New,
    StateShape,
    Turn,
    known_plans,
    new_name,
    placement_of,
)
from pyckpt.dcp.report import some
from pyckpt.dcp.whole import Whole
from pyckpt.errors import PyckptError
from pyckpt.format import plain
from pyckpt.private import find_tensor_shard, overrides
from pyckpt.timeline import named

__all__ = ["SavePlanner"]

_ERRORS_SHOWN = 3
_TWICE = "duplicated flatten key "
"""How DCP begins its error for two values of one name."""


def _is_known(leaf: Any) -> bool:
    """Whether all that a leaf's plan depends on is in what is compared: the shape of the state
    dict, and the placements."""
    if type(leaf) is DTensor:
        return is_memory(local_tensor(leaf))
    return is_memory(leaf) if isinstance(leaf, torch.Tensor) else not plans_itself(leaf)


class SavePlanner(DefaultSavePlanner):
    """A ``SavePlanner`` for state dicts that look the same at every save::

        writer = pyckpt.DirectWriter(path)
        dcp.async_save(state_dict, storage_writer=writer, planner=pyckpt.SavePlanner())

    The first save of a state dict plans as stock does, with the same outcome. Later saves spend no
    Python on single tensors, and send no descriptions between ranks, as long as keys, shapes,
    dtypes and placements stay. When any of them changes on any rank, the planner notices, and all
    ranks plan anew. The rank that wrote a replica goes on to write it, so that other ranks need
    not copy theirs.

    The process remembers plans, so a program may make a new planner for each save. Any writer will
    do; with `DirectWriter` the ``.metadata`` file of a plan is remembered, too.

    A state dict is planned at each save if it has tensors that are more than their memory, such as
    ``ShardedTensor``, or that say themselves which parts they hold. A class made from this one
    plans at each save.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: KnownPlan | None = None
        """The plan that the present save is made by; None where nothing is known of it."""
        self.leaves: list[Any] = []
        self.turn: Turn | None = None
        """Which save by the plan this is; None where the coordinator does not remember it."""
        self._local: PackedItems | None = None
        """What this rank has, as it said it to the coordinator; None where that was no block."""
        self._shape: StateShape | None = None
        """Of the state dict that is saved; None where it has to be planned at each save."""
        self._wrote: Sequence[set[MetadataIndex] | None] = ()

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
        self.known = self._shape = None
        for known in known_plans.latest_first() if type(self) is SavePlanner else ():
            leaves = known.shape.match(state_dict, is_coordinator)
            if leaves is not None:
                self.known, self.leaves, self.is_coordinator = known, leaves, is_coordinator
                return
        try:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
        except ValueError as error:
            if not str(error).startswith(_TWICE):
                raise
            raise ValueError(
                f"two values of the state are both named {str(error).removeprefix(_TWICE)!r}, "
                "since names are joined with dots; rename one"
            ) from error
        tree = _C.StateTree(state_dict)
        self.leaves = tree.match(state_dict) or []
        if self._can_be_known(self.leaves):
            self._shape = StateShape(
                tree,
                placements=[
                    (i, placement_of(leaf))
                    for i, leaf in enumerate(self.leaves)
                    if isinstance(leaf, DTensor)
                ],
                positions={fqn: i for i, fqn in enumerate(self.state_dict)},
                is_coordinator=is_coordinator,
            )

    def __reduce__(self) -> Any:
        return type(self), ()

    def _can_be_known(self, leaves: list[Any]) -> bool:
        """Whether the tree's leaves are DCP's items, and it can tell when one changes."""
        if type(self) is not SavePlanner:
            return False  # a class made from it may plan by whatever it likes
        flat = list(self.state_dict.values())
        return len(flat) == len(leaves) and all(
            mine is theirs and _is_known(mine) for mine, theirs in zip(leaves, flat, strict=True)
        )

    def create_local_plan(self) -> SavePlan:
        self._local = None
        known = self.known
        if known is not None:
            # `finish_plan` remembers it again, once the coordinator has shown that it knows it.
            known_plans.forget(known.name)
            items: Any = ImpliedItems(lambda: known.final.items)
            return SavePlan(items, planner_data=Known(known.name, known.rank))
        with named("plan"):
            plan = super().create_local_plan()
            if type(self) is SavePlanner:
                plan = self.plan = self._packed(plan)
            return plan

    def _packed(self, plan: SavePlan) -> SavePlan:
        """The plan as a block; as it is where no block can hold it."""
        mappings = plan.planner_data
        block = pack(plan.items, mappings) if isinstance(mappings, dict) else None
        if block is None:
            return plan
        self._local = PackedItems(block, plan.items, is_remembered=self._shape is not None)
        items: Any = self._local
        return dataclasses.replace(plan, items=items, planner_data=PackedPaths(block, mappings))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        known = [
            plan.planner_data if isinstance(plan.planner_data, Known) else None
            for plan in all_plans
        ]
        before = [global_plans.get(of_rank.name) if of_rank else None for of_rank in known]
        for rank, (of_rank, plan) in enumerate(zip(known, before, strict=True)):
            if of_rank is not None and plan is None:
                raise PyckptError(
                    f"rank {rank} goes by the plan {of_rank.name}, which the coordinator does not "
                    "have: saves of other process groups, or too many different state dicts, came "
                    "between; the next save plans anew"
                )
        # Only DirectWriter tells the coordinator of its part, and takes what is packed.
        for_us = all(isinstance(plan.storage_data, Part | Ahead) for plan in all_plans)
        first, plan = known[0], before[0]
        if (
            first is not None
            and plan is not None
            and all(isinstance(of_rank.items, ImpliedItems) for of_rank in all_plans)
            and len(known) == len(plan.blocks)
            and known == [Known(first.name, rank) for rank in range(len(known))]
        ):
            global_plans.keep(first.name, plan)
            turns = plan.turns(first.name, is_packed=for_us)
            return _answers(all_plans, plan, turns), plan.metadata(for_us=for_us)
        with named("plan of all ranks"), collector_paused():
            return self._plan_anew(all_plans, known, before, for_us=for_us)

    def _plan_anew(
        self,
        all_plans: list[SavePlan],
        known: Sequence[Known | None],
        before: Sequence[GlobalPlan | None],
        *,
        for_us: bool,
    ) -> tuple[list[SavePlan], Metadata]:
        blocks: list[bytes | None] = []
        wrote: list[bytes | None] = []
        named_by = []
        all_plans = list(all_plans)
        for i, (plan, of_rank, earlier) in enumerate(zip(all_plans, known, before, strict=True)):
            if of_rank is None or earlier is None:
                blocks.append(_block_of(plan))
                wrote.append(None)
                named_by.append(getattr(plan.items, "is_remembered", False))
                continue
            # In another process group it may have had another number.
            block: bytes | None = earlier.blocks[of_rank.rank]
            mask: bytes | None = earlier.native.wrote(of_rank.rank)
            if not isinstance(plan.items, ImpliedItems):
                # Its writer has put other items in.
                paths = dict(PackedPaths(earlier.blocks[of_rank.rank]))
                all_plans[i] = dataclasses.replace(plan, planner_data=paths)
                block = mask = None
            blocks.append(block)
            wrote.append(mask)
            named_by.append(True)
            # Whatever comes of this save: it remembers a plan that it has named only where that is
            # the answer.
            earlier.is_forgotten_by(of_rank.rank)
        global_plans.forget_unnamed()
        whole = [block for block in blocks if block is not None]
        if type(self) is not SavePlanner or len(whole) < len(blocks):
            return self._plan_in_python(all_plans, blocks, wrote)
        try:
            native = _C.GlobalPlan(whole, wrote)
        except ValueError as error:
            raise PyckptError(str(error)) from None
        conflicts.refuse(native.conflicts)
        if native.errors:
            # As DCP says it.
            raise ValueError(
                f"Failed to validate global plan: {some(native.errors, _ERRORS_SHOWN)}"
            )
        name = new_name()
        made = GlobalPlan(whole, native, named_by)
        global_plans.keep(name, made)
        forgotten = global_plans.forgotten
        answers = [
            New(turn, native.answer(turn.rank), forgotten)
            for turn in made.turns(name, is_packed=for_us)
        ]
        return _answers(all_plans, made, answers), made.metadata(for_us=for_us)

    def _plan_in_python(
        self,
        all_plans: list[SavePlan],
        blocks: Sequence[bytes | None],
        wrote: Sequence[bytes | None],
    ) -> tuple[list[SavePlan], Metadata]:
        local = []
        for plan, block in zip(all_plans, blocks, strict=True):
            if block is not None:
                # What its writer says is of this save, and not in what is remembered.
                items: Any = list(PackedItems(block))
                plan = dataclasses.replace(plan, items=items, planner_data=dict(PackedPaths(block)))
            local.append(plan)
        self._wrote = [
            None
            if mask is None
            else {item.index for item, is_own in zip(plan.items, mask, strict=True) if is_own}
            for plan, mask in zip(local, wrote, strict=True)
        ]
        conflicts.check(local)
        final, metadata = self._create_global_plan(local)
        # Nobody needs the paths on the way back.
        return [dataclasses.replace(plan, planner_data=None) for plan in final], metadata

    @overrides(DefaultSavePlanner, so_that="replicas keep writing what they staged")
    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Choose one rank to write what several have: the rank that wrote it before, or else the
        one with the least to write. A rank that goes by a known plan may have staged its own part
        of that and nothing else."""
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
        known, answer = self.known, new_plan.planner_data
        self.turn = None
        if isinstance(answer, Turn) and known is not None:
            known_plans.keep(known.name, known)
            if isinstance(new_plan.items, ImpliedItems):
                self.turn = answer
                self.plan = dataclasses.replace(known.final, storage_data=new_plan.storage_data)
                return self.plan
        # Where this rank sent a name and has a plan back, another rank's state has changed.
        local, self._local = self._local if known is None else known.local, None
        shape = self._shape if known is None else known.shape
        self.known = None
        # The coordinator's writer may have put other items in.
        if isinstance(answer, New) and isinstance(new_plan.items, ImpliedItems):
            assert local is not None  # or else the coordinator would have sent items
            self.turn = answer.turn
            for name in answer.forgotten:
                known_plans.forget(name)  # so that a state dict of it is planned anew
            new_plan = dataclasses.replace(new_plan, items=chosen(local, answer.answer))
            if shape is not None:
                name, rank = answer.turn.name, answer.turn.rank
                local = PackedItems(local.block)  # without the objects
                self.known = KnownPlan(name, rank, local, new_plan, shape, self.leaves)
                known_plans.keep(name, self.known)
        elif known is not None:
            # For this save alone: it is how items are looked up that `match` has found.
            self.known = KnownPlan("", 0, None, new_plan, known.shape, self.leaves)
        self.plan = new_plan
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self.known is None:
            return super().lookup_object(index)
        leaf = self.leaves[self.known.shape.positions[index.fqn]]
        return find_tensor_shard(leaf, index) if isinstance(leaf, torch.Tensor) else leaf

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        value = object.value if isinstance(object, Whole) else object
        return super().transform_object(write_item, value)

    def _encode_plain(self, write_item: WriteItem) -> bytes | None:
        """The bytes of a plain object, as ``resolve_data`` gives them; None of any other, or where
        a class made from this one gives others."""
        own = type(self)
        if (
            own.transform_object is not SavePlanner.transform_object
            or own.resolve_data is not DefaultSavePlanner.resolve_data
        ):
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


def _block_of(plan: SavePlan) -> bytes | None:
    """What a rank has, if it said so in a block."""
    items: Any = plan.items
    paths = plan.planner_data
    if not isinstance(items, PackedItems) or not isinstance(paths, PackedPaths):
        return None
    return items.block if items.block == paths.block else None


def _answers(
    plans: Sequence[SavePlan], made: GlobalPlan, answers: Sequence[Turn | New]
) -> list[SavePlan]:
    """What each rank is sent: not the items that it writes, which are made if somebody looks."""
    sent = []
    for rank, (plan, answer) in enumerate(zip(plans, answers, strict=True)):
        items: Any = ImpliedItems(partial(made.items_of, rank))
        sent.append(dataclasses.replace(plan, items=items, planner_data=answer))
    return sent
