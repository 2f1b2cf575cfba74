"""What the coordinator remembers of a plan, and what ranks tell it of the items that they wrote."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt import _C
from pyckpt.dcp.packed_items import LazySequence, PackedItems, chosen
from pyckpt.dcp.plans import New, PlanCache, Turn
from pyckpt.errors import PyckptError
from pyckpt.format.columns import KeysMapping, PlacesMapping, storage_info
from pyckpt.locks import fork_safe_lock
from pyckpt.private import StorageInfo

__all__ = ["GlobalPlan", "GlobalPlans", "PackedResults", "global_plan_of", "global_plans"]

T = TypeVar("T")


class PackedResults(LazySequence):
    """Stands for a rank's list of `WriteResult`; makes it when it is looked at.

    Args:
        turn: which save of which plan.
        file: the name of the rank's file.
        size: bytes that the file must have at least.
        data: where the items lie: all of it, or what differs.
        against: the number of the save of which the rest is known; None where it is all there.
        make: the results, on the rank that wrote.
    """

    def __init__(
        self,
        turn: Turn,
        file: str,
        size: int,
        data: bytes,
        against: int | None,
        make: Callable[[], Sequence[WriteResult]] | None = None,
    ) -> None:
        self.turn = turn
        self.file = file
        self.size = size
        self.data = data
        self.against = against
        self._maker = make

    def _make(self) -> Sequence[WriteResult]:
        if self._maker is not None:
            return self._maker()
        plan = global_plans.get(self.turn.name)
        if plan is None:
            raise PyckptError("the coordinator has forgotten the plan that these results are of")
        return plan.results_of(self)

    def __reduce__(self) -> Any:
        return PackedResults, (self.turn, self.file, self.size, self.data, self.against)


# As many saves of one plan may overlap.
_TOLD_MAX = 4
# About what a path takes, and a chunk as DCP's object.
_PATH_BYTES = 300
_CHUNK_BYTES = 400


class GlobalPlan:
    """What the coordinator remembers of a plan.

    Args:
        blocks: what each rank said that it has.
        native: made of them.
        named_by: of each rank, whether it remembers the plan; the others never name it. All do,
            where it is left out.
    """

    def __init__(
        self,
        blocks: list[bytes],
        native: _C.GlobalPlan,
        named_by: Sequence[bool] | None = None,
    ) -> None:
        self.blocks = blocks
        self.native = native
        # A byte a rank.
        self._named_by = bytearray([True] * len(blocks) if named_by is None else named_by)
        self._planner_data = native.paths()
        self._described: dict[str, Any] | None = None
        self._numbers = itertools.count()
        # Of each rank, by the number of a save: results that say it all. Where saves overlap, those
        # of earlier ones may be what others build on.
        self._told: list[dict[int, bytes]] = [{} for _ in blocks]
        self._told_bytes = 0
        self._settled: list[int | None] = [None] * len(blocks)
        self._lock = fork_safe_lock()

    @property
    def memory_bytes(self) -> int:
        """About what it takes."""
        known = sum(map(len, self.blocks)) + self.native.memory_bytes + self._told_bytes
        objects = 0 if self._described is None else self.native.columns.item_count
        return known + len(self._planner_data) * _PATH_BYTES + objects * _CHUNK_BYTES

    @property
    def can_be_named(self) -> bool:
        """Whether a rank may still name it, as far as the coordinator knows."""
        return any(self._named_by)

    def is_forgotten_by(self, rank: int) -> None:
        """Rank ``rank`` of the plan will not name it again."""
        self._named_by[rank] = False

    def turns(self, name: str, *, is_packed: bool) -> list[Turn]:
        """The answers to all ranks for one more save by this plan.

        Args:
            name: of the plan.
            is_packed: whether `results_of` and `complete` will be given what the ranks wrote.
        """
        number = next(self._numbers)
        return [
            Turn(name, rank, number, is_packed, settled)
            for rank, settled in enumerate(self._settled)
        ]

    def items_of(self, rank: int) -> list[WriteItem]:
        """What a rank writes, as DCP's objects."""
        return chosen(PackedItems(self.blocks[rank]), self.native.answer(rank))

    def metadata(self, *, for_us: bool) -> Metadata:
        """The metadata of one save, for its writer to complete.

        Args:
            for_us: whether the writer is ours, so that ``state_dict_metadata`` may be a mapping
                whose objects are made when somebody looks. Others may expect a dict.
        """
        # Each save has its own, which a program may change.
        planner_data = dict(self._planner_data)
        keys: Any = KeysMapping(self.native.columns)
        if for_us:
            return Metadata(keys, planner_data)
        if self._described is None:
            self._described = keys.copy()
        return Metadata(
            {key: _copied(value) for key, value in self._described.items()}, planner_data
        )

    def is_plan_of(self, metadata: Metadata) -> bool:
        """Whether `metadata` made it for our writer, and nobody has put another description into it
        since."""
        keys = metadata.state_dict_metadata
        return isinstance(keys, KeysMapping) and keys.columns is self.native.columns

    def complete(
        self, metadata: Metadata, results: Sequence[PackedResults], encode: Callable[[Metadata], T]
    ) -> T:
        """Say where all items lie, and what ``encode`` makes of the metadata then.

        Args:
            results: of those ranks that wrote something.

        Raises:
            PyckptError: they are not those of the plan.
        """
        turns = {(of_rank.turn.name, of_rank.turn.number) for of_rank in results}
        for name, _ in turns:
            if len(turns) > 1 or global_plans.get(name) not in (self, None):
                raise PyckptError(
                    "the results are of another save than the plan: a planner is used by one save "
                    "at a time"
                )
        with self._lock:  # saves may overlap
            told = {of_rank.turn.rank for of_rank in results}
            for rank in range(len(self.blocks)):
                if rank not in told and self.native.written(rank):
                    raise PyckptError(
                        f"rank {rank} did not say where it wrote its items; a writer that leaves "
                        "items out does so in prepare_local_plan"
                    )
            for of_rank in results:
                self._place(of_rank)
            metadata.storage_data = PlacesMapping(self.native.columns)
            return encode(metadata)

    def _place(self, results: PackedResults) -> None:
        rank, number, told = results.turn.rank, results.turn.number, self._told[results.turn.rank]
        try:
            against = results.against
            if against is not None and against != self._settled[rank]:
                self._settled[rank] = None
                self.native.place(rank, results.file, told[against])
                self._settled[rank] = against
            if against is None:
                self._settled[rank] = None  # if it fails in between
            self.native.place(rank, results.file, results.data)
        except (KeyError, ValueError) as error:
            why = error if isinstance(error, ValueError) else "are of a save that was forgotten"
            raise PyckptError(f"the results of rank {rank} {why}") from None
        if results.against is None:
            self._settled[rank] = number
            told[number] = results.data
            self._told_bytes += len(results.data)
            for other in list(told)[:-_TOLD_MAX]:
                if other not in (number, self._settled[rank]):
                    self._told_bytes -= len(told.pop(other))

    def results_of(self, results: PackedResults) -> list[WriteResult]:
        """What a rank wrote, as DCP's objects."""
        rank = results.turn.rank
        try:
            if results.against is None:
                places = _C.unpack_places(results.data)
            else:
                before = _C.unpack_places(self._told[rank][results.against])
                checksums = _C.unpack_checksums(results.data)
                places = [
                    (*place[:4], None if place[4] is None else checksum, place[5])
                    for place, checksum in zip(before, checksums, strict=True)
                ]
            return [
                WriteResult(item.index, place[1], _info(results.file, place))
                for item, place in zip(self.items_of(rank), places, strict=True)
            ]
        except (KeyError, ValueError) as error:
            raise PyckptError(f"the results of rank {rank} cannot be read: {error}") from None


def _copied(described: Any) -> Any:
    if not isinstance(described, TensorStorageMetadata):
        return BytesStorageMetadata()
    # The rest of it cannot be changed.
    return TensorStorageMetadata(
        copy.copy(described.properties), described.size, list(described.chunks)
    )


def _info(file: str, place: tuple[Any, ...]) -> StorageInfo:
    offset, length, payload_offset, payload_length, crc32, stride = place
    if payload_offset is None:
        return StorageInfo(file, offset, length)
    return storage_info(
        file,
        offset,
        length,
        crc32=crc32,
        payload_offset=payload_offset,
        payload_length=payload_length,
        payload_stride=stride,
    )


class GlobalPlans(PlanCache[GlobalPlan]):
    """The plans of the saves that this process coordinates.

    Keeps those that ranks may name: at most ``most``, of at most ``most_bytes`` bytes together. The
    plan of the last save is kept whatever it takes. A plan that is not kept is found as long as a
    save goes on by it.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        super().__init__(most)
        self.most_bytes = most_bytes
        self._alive: WeakValueDictionary[str, GlobalPlan] = WeakValueDictionary()
        self._forgotten: deque[str] = deque(maxlen=16)

    @property
    def forgotten(self) -> tuple[str, ...]:
        """The names of the last plans that had to make room for others, while ranks might still
        have named them."""
        with self._lock:
            return tuple(self._forgotten)

    def get(self, name: str) -> GlobalPlan | None:
        with self._lock:
            return self._plans.get(name) or self._alive.get(name)

    def keep(self, name: str, plan: GlobalPlan) -> None:
        with self._lock:
            self._alive[name] = plan
        if plan.can_be_named:
            super().keep(name, plan)

    def forget_unnamed(self) -> None:
        """Forget the plans that no rank will name again."""
        with self._lock:
            for name in [n for n, plan in self._plans.items() if not plan.can_be_named]:
                del self._plans[name]

    def _make_room(self) -> None:
        sizes = {name: plan.memory_bytes for name, plan in self._plans.items()}
        total = sum(sizes.values())
        while len(self._plans) > max(1, self.most) or (
            len(self._plans) > 1 and total > self.most_bytes
        ):
            name, _ = self._plans.popitem(last=False)
            total -= sizes[name]
            self._forgotten.append(name)

    def clear(self) -> None:
        with self._lock:
            self._plans.clear()
            self._alive.clear()
            self._forgotten.clear()


global_plans = GlobalPlans(64, 1 << 30)
"""Of this process. A plan of three million items takes some 400 MiB."""


def global_plan_of(plans: Sequence[SavePlan]) -> GlobalPlan | None:
    """What the coordinator remembers of the plans that it is about to send to the ranks; None where
    no `SavePlanner` made them, or it did so in Python."""
    answer = plans[0].planner_data if plans else None
    turn = answer.turn if isinstance(answer, New) else answer
    return global_plans.get(turn.name) if isinstance(turn, Turn) else None
