"""Writes one rank's part of a save: the items of its plan, into its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt import _C
from pyckpt.activity import Amount
from pyckpt.collector import collector_paused
from pyckpt.dcp.global_plan import PackedResults
from pyckpt.dcp.items import (
    Raw,
    add,
    add_known,
    expected_size,
    first_write_of,
    last_place,
    places_of,
    write_result,
)
from pyckpt.dcp.known_planners import KNOWN_PLANNERS
from pyckpt.dcp.plans import Sent, Turn
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.staging import Staging
from pyckpt.statistics import WriteStatistics

__all__ = ["PlannedItems", "WriteProgress"]


class WriteProgress:
    """How far a rank is with its part of a save. May be read from any thread."""

    def __init__(self) -> None:
        self.jobs: list[_C.FillJob] = []
        """The jobs that write the rank's files, one after another; empty before the first."""
        self.items: Sequence[WriteItem] = ()
        """The items that the rank writes; empty until it knows them."""
        self.bytes_linked = 0
        """Bytes of items that it need not write, since earlier files have them."""
        self.checkpoint_bytes: int | None = None
        """Of the files of all ranks; known when it is committed, to the rank that commits."""

    @property
    def statistics(self) -> WriteStatistics | None:
        """Counts and times of the writing so far; None before it began."""
        jobs = [job.statistics() for job in self.jobs]
        if not jobs and not self.bytes_linked:
            return None
        return WriteStatistics.of(*jobs, bytes_linked=self.bytes_linked)

    @cached_property
    def bytes_planned(self) -> int:
        """Bytes of the tensors that this rank writes. They are added up at the first call, so that
        a save does not wait for it if nobody asks."""
        return sum(
            item.tensor_data.properties.dtype.itemsize * item.tensor_data.chunk.sizes.numel()
            for item in self.items
            if item.tensor_data is not None
        )

    @property
    def amount(self) -> Amount:
        """How far this rank's part of the save is."""
        statistics = self.statistics
        if statistics is None:
            return Amount(0, 0)
        # Beside the tensors the file has envelopes and objects, whose sizes were not planned.
        return Amount(min(statistics.bytes_written, self.bytes_planned), self.bytes_planned)

    @property
    def fraction(self) -> float:
        """The share of the planned tensor bytes that is written, from 0 to 1."""
        statistics = self.statistics
        if statistics is None or not self.bytes_planned:
            return 0.0
        return min(1.0, statistics.bytes_written / self.bytes_planned)


class PlannedItems:
    """The items of a rank's plan.

    Args:
        plan: the final one.
        planner: it resolves the items.
        staging: the copies that are written; None for a save that reads the state itself.
    """

    def __init__(self, plan: SavePlan, planner: StockSavePlanner, staging: Staging | None) -> None:
        self._plan = plan
        self._planner = planner
        self._staging = staging
        # Not a subclass, which may resolve items to something else.
        self._ours = planner if type(planner) is SavePlanner else None
        self._known = None if self._ours is None else self._ours.known
        self._first = None if self._known is None else self._known.first_write
        self._raws: list[Raw] = []

    @property
    def expected_size(self) -> int:
        """About how many bytes the file will have. Objects are not counted."""
        return expected_size(self._plan) if self._first is None else self._first.expected_size

    def add_to(self, job: _C.FillJob) -> None:
        """Give all items to the job that writes the file."""
        items = self._plan.items
        if self._ours is not None and self._first is not None:
            tensors = self._ours.tensors()
            self._raws = add_known(job, self._ours, items, tensors, self._first, self._settle)
            return
        if type(self._planner) not in KNOWN_PLANNERS:
            self._settle()
        self._raws = [add(job, self._planner, item, self._settle) for item in items]

    def results(self, name: str, places: bytes, *, learn: bool) -> Sequence[WriteResult]:
        """The results by which DCP learns where the items lie. After the first save of a plan, this
        also remembers how it was written.

        Args:
            name: of the file.
            places: where the items lie in it, as the job packs them.
            learn: whether later saves may stage only what this rank writes.
        """
        ours, known, raws = self._ours, self._known, self._raws
        items = self._plan.items
        if ours is not None and known is not None and self._first is None:
            with collector_paused():
                known.first_write = first_write_of(self._plan, raws, ours.tensors())
                if learn and self._staging is not None:
                    self._staging.learn(known)

        def made() -> list[WriteResult]:
            with collector_paused():
                return [
                    write_result(item, name, raw, place)
                    for item, raw, place in zip(items, raws, places_of(places), strict=True)
                ]

        turn = None if ours is None else ours.turn
        if turn is None or not turn.is_packed:
            return made()
        # Only DirectWriter.finish reads these packed results.
        before = None if known is None else known.sent
        packed, sent = _pack_results(turn, name, places, raws, before, made)
        if known is not None:
            known.sent = sent
        return packed

    def _settle(self) -> None:
        if self._staging is not None:
            self._staging.settle()


def _pack_results(
    turn: Turn,
    file: str,
    places: bytes,
    raws: list[Raw],
    before: Sent | None,
    make: Callable[[], Sequence[WriteResult]],
) -> tuple[PackedResults, Sent]:
    """Pack the results of a rank. Also return what it must remember of them for the next save.

    Args:
        turn: which save of which plan.
        file: the name of the rank's file.
        places: of the items, as the job packs them.
        raws: the other properties of each item that a result tells.
        before: the results that the coordinator was sent last.
        make: makes the results as DCP's objects, if somebody asks for these.
    """
    last = last_place(places)
    size = last.offset + last.length
    if before is not None and turn.settled == before.number and raws == before.raws:
        data = _C.pack_checksums(before.places, places)
        if data is not None:
            return PackedResults(turn, file, size, data, before.number, make), before
    data = _C.pack_places(
        places,
        bytes(raw.as_planned for raw in raws),
        [
            (i, raw.stride)
            for i, raw in enumerate(raws)
            if raw.as_planned and raw.stride is not None
        ],
    )
    return PackedResults(turn, file, size, data, None, make), Sent(turn.number, places, raws)
