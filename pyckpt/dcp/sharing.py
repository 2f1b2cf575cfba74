"""Reads that ranks share: one of them reads, and hands on to the others what they want, too.

Replicas of a model want the same bytes: each rank of DDP all of them, the ranks of HSDP those of
their shard. A file system that all of them read from at once is often slower than the network
between them. So the ranks tell each other what they want; of those that want the same, one reads
it, checks it, and sends it along a chain of the others, in which each passes on what it received.
Ranks of one host do not send: they copy from the memory of the one that read, or, if that is on
another host, of the one of theirs that is in the chain.

Every rank computes for itself who reads what, from what all said, so nobody coordinates. Transfers
have one order that all ranks keep to: the first that is not over has all of its ranks waiting for
it, so the ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pyckpt.dcp.bundles import Bundle, all_wanted, around, bundles_of
from pyckpt.dcp.failures import OfAnother
from pyckpt.dcp.handing_on import Company, Keeper, Passage, Wanted, as_bytes, hand_on, reliefs
from pyckpt.dcp.leaves import tell_autograd, values_of
from pyckpt.dcp.neighbours import HELLO, Copy, Neighbours, numbers_of
from pyckpt.dcp.read_items import StayingItems
from pyckpt.dcp.reading import save_id_of
from pyckpt.engine import Engine, default_engine

__all__ = ["WORTH_BYTES", "read_shared"]

_logger = logging.getLogger("pyckpt")

WORTH_BYTES = 32 << 20
"""Ranks that were not told to share do so where they want that much of the same: a disk takes
longer to read it again than the ranks to agree."""
_LARGE_BYTES = 64 << 10
"""And then tensors of this size: smaller ones lie between others that are read."""


def read_shared(
    reader: Any,
    plan: LoadPlan,
    planner: LoadPlanner,
    group: dist.ProcessGroup | None,
    *,
    automatic: bool = False,
    failure: Exception | None = None,
    marks: bool = False,
) -> set[str]:
    """Load the items of a plan, each from the file system or from another rank.

    All ranks of the group must call this, each with its own plan of the same checkpoint. If one
    fails before bytes travel between them, all of them raise its error. One that fails later raises
    alone, and what others have from it means nothing: whoever calls this tells them.

    Args:
        reader: a ``StorageReader``, set up. Where it has ``unverified``, as `DirectReader` does, it
            names there what it could not check.
        plan: of this rank.
        planner: it says where items go, and takes the objects.
        group: the ranks that load together; None for all.
        automatic: share what is worth it alone: much, among ranks of one host that want the same
            large tensors, and that can copy from each other's memory.
        failure: why this rank cannot load, which the others have to hear.
        marks: raise what another rank raised as `OfAnother`.

    Returns the keys of what other ranks read for this one, and could not check.

    Raises:
        Exception: whatever the reader or the planner raised, on this rank or else on another.
    """
    try:
        return _read_shared(reader, plan, planner, group, automatic, failure)
    except OfAnother as other:
        if marks:
            raise
        error = other.error
    raise error


def _read_shared(
    reader: Any,
    plan: LoadPlan,
    planner: LoadPlanner,
    group: dist.ProcessGroup | None,
    automatic: bool,
    failure: Exception | None,
) -> set[str]:
    company = Company(group)

    def begin() -> None:
        if failure is not None:
            raise failure

    def engine() -> Engine:
        return getattr(reader, "_engine", None) or default_engine()

    with Neighbours(company.rank, engine) as neighbours:
        load = _SharedLoad(reader, plan, planner, company, neighbours)
        try:
            if automatic:
                _share_on_hosts(load, company, begin)
            else:
                _share_everywhere(load, company, begin)
        finally:
            # What other ranks have read for this one.
            tell_autograd(values_of(planner, load.keys))
    return load.unverified


def _share_everywhere(load: _SharedLoad, company: Company, begin: Callable[[], None]) -> None:
    def names() -> torch.Tensor:
        begin()
        return load.names()

    said = company.exchange(names)
    outcomes = company.exchange(lambda: load.read(said))
    passages = company.together(lambda: load.passages(outcomes))
    if not load.copies:
        hand_on(passages, company)
        load.read_again()
        return
    company.together(lambda: hand_on(passages, company))
    tables = company.tell(load.table)
    company.together(lambda: load.copy(tables))


def _share_on_hosts(load: _SharedLoad, company: Company, begin: Callable[[], None]) -> None:
    def outline() -> list[int]:
        begin()
        return load.outline()

    outlines = company.tell(outline)
    if load.compare(outlines):
        probes = company.tell(load.probe)
        if load.agree(probes):
            tables = company.tell(load.read_share)
            # Memory that others copy from stays until they have.
            company.together(lambda: load.copy(tables))
            return
    load.read_alone()


class _SharedLoad:
    """What one rank does of a load. Its steps may fail; none of them waits for another rank."""

    def __init__(
        self,
        reader: Any,
        plan: LoadPlan,
        planner: LoadPlanner,
        company: Company,
        neighbours: Neighbours,
    ) -> None:
        self._reader = reader
        self._items = plan.items
        self._planner = planner
        self._company = company
        self._neighbours = neighbours
        self._rank = company.rank
        self._wanted: list[Wanted] = []
        self._bundles: list[Bundle] = []
        self._keeper: Keeper
        self._again: list[ReadItem] = []
        self._held: list[torch.Tensor] = []
        """What other ranks copy from."""
        self._alike: list[int] = []
        """The ranks of the host that this one shares with, where it was not told to."""
        self._hosts: Sequence[int] = ()
        """For each rank a number; ranks of the same one copy from each other."""
        self.copies = False
        """Whether any ranks copy from each other's memory."""
        self.unverified: set[str] = set()
        """Keys of what other ranks read for this one, and could not check."""

    @property
    def keys(self) -> set[str]:
        """Keys of what this rank may get from others."""
        return {one.item.dest_index.fqn for one in self._wanted}

    # --- among all ranks ---

    def names(self) -> torch.Tensor:
        """What this rank says of itself, and the names of what it wants, two numbers each."""
        self._wanted = all_wanted(self._items, self._planner, self._company)
        numbers = [self._neighbours.hello()] if self._wanted else [[0] * HELLO]
        numbers += [list(one.name) for one in self._wanted]
        flat = [number for one in numbers for number in one]
        return torch.tensor(flat, dtype=torch.int64, device="cpu")

    def read(self, names: torch.Tensor) -> torch.Tensor:
        """Read what this rank does not get from others; what it says to them of that.

        Args:
            names: what all ranks have said.
        """
        rank, reader, neighbours = self._rank, self._reader, self._neighbours
        said = [Company.said(of_rank).view(torch.int64).cpu() for of_rank in names]
        neighbours.hear([of_rank[:HELLO].tolist() for of_rank in said])
        ranks = range(len(said))
        works = bool(self._wanted) and neighbours.probe(filter(neighbours.is_near, ranks))
        self._bundles = bundles_of(
            self._wanted, rank, [of_rank[HELLO:].reshape(-1, 2) for of_rank in said]
        )
        shared = self._read_own()
        outcome = _Outcome(
            {one.name for one in shared if id(one.item) in self._keeper.taken},
            {one.item.storage_index.fqn for one in shared} & set(getattr(reader, "unverified", ())),
            works,
        )
        return torch.frombuffer(bytearray(pickle.dumps(outcome)), dtype=torch.uint8)

    def _read_own(self) -> list[Wanted]:
        """Read what this rank does not get from others; what of it they get from this one."""
        bundles, rank = self._bundles, self._rank
        shared = [one for b in bundles if b.owner == rank for one in b.wanted]
        from_others = {id(one.item) for b in bundles if b.owner != rank for one in b.wanted}
        self._keeper = Keeper(self._planner, {id(one.item) for one in shared})
        own: Sequence[ReadItem] = [item for item in self._items if id(item) not in from_others]
        if isinstance(self._items, StayingItems):
            own = StayingItems(own, self._items.plain)
        _read(self._reader, own, self._keeper)
        return shared

    def passages(self, outcomes: torch.Tensor) -> list[Passage]:
        """The ways of all bundles through this rank, in the order of the transfers.

        Args:
            outcomes: what all ranks have said.
        """
        relief = reliefs({one.device for bundle in self._bundles for one in bundle.wanted})
        said: list[_Outcome] = [
            pickle.loads(as_bytes(Company.said(of_rank))) for of_rank in outcomes
        ]
        hosts = self._hosts = self._neighbours.agree([outcome.works for outcome in said])
        self.copies = len(set(hosts)) < len(hosts)
        passages = []
        for bundle in self._bundles:
            of_owner = said[bundle.owner]
            left = [one for one in bundle.wanted if one.name not in of_owner.taken]
            if bundle.owner != self._rank:
                keys = {one.item.storage_index.fqn for one in bundle.wanted}
                self.unverified |= keys & of_owner.unverified
                self._again += [one.item for one in bundle.wanted if one.name in of_owner.taken]
            leaders = tuple(bundle.leaders(hosts).values())
            for chain, travelling in (
                (bundle.chain, [one for one in left if not one.is_memory]),
                (leaders, [one for one in left if one.is_memory]),
            ):
                if travelling and self._rank in chain:
                    ends = around(self._rank, chain)
                    passages.append(Passage(travelling, ends, self._keeper, relief))
        return passages

    # --- among those of a host ---

    def outline(self) -> list[int]:
        """What this rank says of itself, and of the large tensors that it wants."""
        metadata: Any = self._planner.metadata  # type: ignore[attr-defined]
        save_id = save_id_of(metadata)
        digest = hashlib.blake2b(repr(save_id).encode(), digest_size=16)
        size = 0
        for item in self._items if save_id is not None else ():
            nbytes = _nbytes(item, metadata)
            if nbytes >= _LARGE_BYTES:
                size += nbytes
                index = item.storage_index
                described = (index.fqn, index.offset, item.storage_offsets, item.lengths)
                digest.update(repr(described).encode("utf-8", "surrogatepass"))
        is_much = size >= WORTH_BYTES
        hello = self._neighbours.hello() if is_much else [0] * HELLO
        return [*hello, *numbers_of(digest.digest()), int(is_much)]

    def compare(self, outlines: Sequence[Sequence[int]]) -> bool:
        """Whether any ranks of one host want the same, which is much.

        Args:
            outlines: what all ranks have said.
        """
        self._neighbours.hear([of_rank[:HELLO] for of_rank in outlines])
        alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank, of_rank in enumerate(outlines):
            host, wants, is_much = of_rank[:2], of_rank[HELLO:-1], of_rank[-1]
            if is_much:
                alike[(*host, *wants)].append(rank)
        together = [ranks for ranks in alike.values() if len(ranks) > 1]
        self._alike = next((ranks for ranks in together if self._rank in ranks), [])
        return bool(together)

    def probe(self) -> list[int]:
        """Whether this rank can read the others' memory; what it wants to share."""
        works, names = False, b""
        if self._alike:
            works = self._neighbours.probe(self._alike)
            every = all_wanted(self._items, self._planner, self._company)
            self._wanted = [one for one in every if one.is_memory and one.size >= _LARGE_BYTES]
            names = repr([one.name for one in self._wanted]).encode()
        digest = hashlib.blake2b(names, digest_size=16).digest()
        return [int(works), *numbers_of(digest)]

    def agree(self, probes: Sequence[Sequence[int]]) -> bool:
        """Whether any ranks share.

        Args:
            probes: what all ranks have said.
        """
        own = probes[self._rank]
        self._hosts = [0] * len(probes)  # none has others to share with than those of its host
        if any(probes[rank] != own or not own[0] for rank in self._alike):
            self._alike = []
        return any(works for works, *_ in probes)

    def read_share(self) -> list[int]:
        """Read what this rank does not get from others; where they find what they get from it."""
        if self._alike:
            mine = torch.tensor(
                [one.name for one in self._wanted], dtype=torch.int64, device="cpu"
            ).reshape(-1, 2)
            every = [mine[:0]] * (max(self._alike) + 1)
            for rank in self._alike:
                every[rank] = mine
            self._bundles = bundles_of(self._wanted, self._rank, every)
        self._read_own()
        return self.table()

    def read_alone(self) -> None:
        """Read everything."""
        _read(self._reader, self._items, self._planner)

    # --- from memory to memory ---

    def table(self) -> list[int]:
        """The address and the size of a table, in this rank's memory, of what others copy."""
        hosts, addresses = self._hosts, {}
        for bundle in self._bundles:
            if bundle.leaders(hosts)[hosts[self._rank]] != self._rank:
                continue
            for one in bundle.wanted:
                if one.is_memory and id(one.item) not in self._keeper.taken:
                    target = self._keeper.resolve_tensor(one.item).detach()
                    addresses[one.name] = target.data_ptr()
                    self._held.append(target)
        unverified = set(getattr(self._reader, "unverified", ()))
        data = bytearray(pickle.dumps(_Table(addresses, unverified)))
        table = torch.frombuffer(data, dtype=torch.uint8)
        self._held.append(table)
        return [table.data_ptr(), len(data)]

    def copy(self, tables: Sequence[Sequence[int]]) -> None:
        """Copy what other ranks of the host have, or read it where that fails.

        Args:
            tables: what all ranks have said.
        """
        hosts = self._hosts
        wanted: dict[int, list[Wanted]] = defaultdict(list)
        for bundle in self._bundles:
            leader = bundle.leaders(hosts)[hosts[self._rank]]
            if leader != self._rank:
                wanted[leader] += [one for one in bundle.wanted if one.is_memory]
        places = {rank: tables[rank] for rank in wanted}
        copied: list[tuple[ReadItem, torch.Tensor]] = []
        try:
            copied = self._copy(wanted, places)
        except OSError as error:
            _logger.warning(
                "a rank reads from the checkpoint what it could not copy from another: %s", error
            )
            again = {id(item) for item in self._again}
            every = [one.item for of_rank in wanted.values() for one in of_rank]
            self._again += [item for item in every if id(item) not in again]
        for item, target in copied:
            self._keeper.commit_tensor(item, target)
        self.read_again()

    def _copy(
        self, wanted: dict[int, list[Wanted]], places: dict[int, Sequence[int]]
    ) -> list[tuple[ReadItem, torch.Tensor]]:
        """Copy what other ranks have; the items, and where they are now."""
        raw = {
            rank: torch.empty(size, dtype=torch.uint8, device="cpu")
            for rank, (_, size) in places.items()
        }
        self._neighbours.copy(Copy(rank, places[rank][0], data) for rank, data in raw.items())
        again = {id(item) for item in self._again}
        copies, copied = [], []
        for rank, ones in wanted.items():
            table: _Table = pickle.loads(as_bytes(raw[rank]))
            self.unverified |= table.unverified & {one.item.storage_index.fqn for one in ones}
            for one in ones:
                address = table.addresses.get(one.name)
                if id(one.item) in again:
                    continue  # the rank that has it reads it again, too
                if address is not None:
                    target = self._keeper.resolve_tensor(one.item).detach()
                    copies.append(Copy(rank, address, target))
                    copied.append((one.item, target))
                else:
                    self._again.append(one.item)
        self._neighbours.copy(copies)
        return copied

    def read_again(self) -> None:
        """Read what the ranks that read it could not hand on."""
        if self._again:
            _read(self._reader, self._again, self._planner)


def _nbytes(item: ReadItem, metadata: Any) -> int:
    """Bytes of an item as it was saved; none of what is no tensor."""
    if item.type is not LoadItemType.TENSOR:
        return 0
    saved = metadata.state_dict_metadata[item.storage_index.fqn]
    return int(item.lengths.numel() * saved.properties.dtype.itemsize)


def _read(reader: Any, items: Sequence[ReadItem], planner: Any) -> None:
    done = reader.read_data(LoadPlan(items), planner)  # type: ignore[arg-type]
    if done is not None:
        done.wait()


class _Outcome(NamedTuple):
    """What a rank says when it has read."""

    taken: set[tuple[int, int]]
    """Names of what does not travel: its planner put it in the place of the destination."""
    unverified: set[str]
    """Keys of what the rank could not check, as far as others get it from it."""
    works: bool
    """Whether the rank can read the memory of all others of its host."""


class _Table(NamedTuple):
    """What others of its host find in a rank's memory."""

    addresses: dict[tuple[int, int], int]
    """By name; none of what the rank's planner put in the place of the destination."""
    unverified: set[str]
    """Keys of what the rank could not check."""
