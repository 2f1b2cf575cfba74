"""Reads that ranks share: one of them reads, and hands on to the others what they want, too.

Replicas of a model want the same bytes: each rank of DDP all of them, the ranks of HSDP those of
their shard. A file system that all of them read from at once is often slower than the network
between them. So the ranks tell each other what they want; of those that want the same, one reads
it, checks it, and sends it along a chain of the others, in which each passes on what it received.

Every rank computes for itself who reads what, from what all said, so nobody coordinates. Transfers
have one order that all ranks keep to: the first that is not over has all of its ranks waiting for
it, so the ranks cannot wait for each other in a circle.
"""

from __future__ import annotations

import hashlib
import pickle
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pyckpt.dcp.handing_on import Company, Keeper, Passage, Wanted, as_bytes, hand_on, reliefs
from pyckpt.dcp.leaves import is_memory
from pyckpt.dcp.reading import save_id_of

__all__ = ["read_shared"]


class _Bundle(NamedTuple):
    """What one rank reads for the same others."""

    holders: tuple[int, ...]
    """The ranks of the group that want it, in their order."""
    owner: int
    wanted: list[Wanted]

    def neighbours(self, rank: int) -> tuple[int | None, int | None]:
        """The rank before this one in the chain, and the one after it."""
        chain = self.holders[self.holders.index(self.owner) :]
        chain += self.holders[: self.holders.index(self.owner)]
        at = chain.index(rank)
        return (
            chain[at - 1] if at > 0 else None,
            chain[at + 1] if at + 1 < len(chain) else None,
        )


def read_shared(
    reader: Any,
    plan: LoadPlan,
    planner: LoadPlanner,
    group: dist.ProcessGroup | None,
    *,
    failure: Exception | None = None,
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
        failure: why this rank cannot load, which the others have to hear.

    Returns the keys of what other ranks read for this one, and could not check.

    Raises:
        Exception: whatever the reader or the planner raised, on this rank or else on another.
    """
    company = Company(group)
    load = _SharedLoad(reader, plan, planner, company)

    def begin() -> torch.Tensor:
        if failure is not None:
            raise failure
        return load.names()

    names = company.exchange(begin)
    outcomes = company.exchange(lambda: load.read(names))
    passages = company.together(lambda: load.passages(outcomes))
    hand_on(passages, company)
    load.read_again()
    return load.unverified


class _SharedLoad:
    """What one rank does of a load. Its steps may fail; none of them waits for another rank."""

    def __init__(self, reader: Any, plan: LoadPlan, planner: LoadPlanner, company: Company) -> None:
        self._reader = reader
        self._items = plan.items
        self._planner = planner
        self._company = company
        self._rank = company.rank
        self._wanted: list[Wanted] = []
        self._bundles: list[_Bundle] = []
        self._keeper: Keeper
        self._again: list[ReadItem] = []
        self.unverified: set[str] = set()
        """Keys of what other ranks read for this one, and could not check."""

    def names(self) -> torch.Tensor:
        """The names of what this rank wants, two numbers each."""
        self._wanted = _all_wanted(self._items, self._planner, self._company)
        names = torch.tensor([one.name for one in self._wanted], dtype=torch.int64, device="cpu")
        return names.reshape(-1)

    def read(self, names: torch.Tensor) -> torch.Tensor:
        """Read what this rank does not get from others; what it says to them of that.

        Args:
            names: of all ranks.
        """
        rank, reader = self._rank, self._reader
        every = [Company.said(of_rank).view(torch.int64).reshape(-1, 2).cpu() for of_rank in names]
        self._bundles = _bundles(self._wanted, rank, every)
        shared = [one for b in self._bundles if b.owner == rank for one in b.wanted]
        from_others = {id(one.item) for b in self._bundles if b.owner != rank for one in b.wanted}
        self._keeper = keeper = Keeper(self._planner, {id(one.item) for one in shared})
        _read(reader, [item for item in self._items if id(item) not in from_others], keeper)
        said = _Outcome(
            {one.name for one in shared if id(one.item) in keeper.taken},
            {one.item.storage_index.fqn for one in shared} & set(getattr(reader, "unverified", ())),
        )
        return torch.frombuffer(bytearray(pickle.dumps(said)), dtype=torch.uint8)

    def passages(self, outcomes: torch.Tensor) -> list[Passage]:
        """The ways of all bundles through this rank, in the order of the transfers.

        Args:
            outcomes: what all ranks have said.
        """
        relief = reliefs({one.device for bundle in self._bundles for one in bundle.wanted})
        said: list[_Outcome] = [
            pickle.loads(as_bytes(Company.said(of_rank))) for of_rank in outcomes
        ]
        passages = []
        for bundle in self._bundles:
            of_owner = said[bundle.owner]
            left = [one for one in bundle.wanted if one.name not in of_owner.taken]
            if bundle.owner != self._rank:
                keys = {one.item.storage_index.fqn for one in bundle.wanted}
                self.unverified |= keys & of_owner.unverified
                self._again += [one.item for one in bundle.wanted if one.name in of_owner.taken]
            passages.append(Passage(left, bundle.neighbours(self._rank), self._keeper, relief))
        return passages

    def read_again(self) -> None:
        """Read what the ranks that read it could not hand on."""
        if self._again:
            _read(self._reader, self._again, self._planner)


def _read(reader: Any, items: list[ReadItem], planner: Any) -> None:
    done = reader.read_data(LoadPlan(items), planner)
    if done is not None:
        done.wait()


class _Outcome(NamedTuple):
    """What a rank says when it has read."""

    taken: set[tuple[int, int]]
    """Names of what does not travel: its planner put it in the place of the destination."""
    unverified: set[str]
    """Keys of what the rank could not check, as far as others get it from it."""


# --- who reads what -------------------------------------------------------------------------------


def _all_wanted(items: Sequence[ReadItem], planner: LoadPlanner, company: Company) -> list[Wanted]:
    """What a plan asks for. Destinations that share memory (tied weights) do not travel: what is
    there may be of the other key."""
    targets = {
        id(item): planner.resolve_tensor(item) for item in items if item.type is LoadItemType.TENSOR
    }
    tied = _tied(items, targets)
    return [
        _wanted(item, targets.get(id(item)), planner, company, is_tied=id(item) in tied)
        for item in items
    ]


def _tied(items: Sequence[ReadItem], targets: dict[int, torch.Tensor]) -> set[int]:
    """The identities of items whose destinations overlap that of another key."""
    spans = []
    for item in items:
        target = targets.get(id(item))
        if target is not None and _is_memory(target):
            pairs = zip(target.shape, target.stride(), strict=True)
            extent = sum((n - 1) * stride for n, stride in pairs) + 1
            begin = target.data_ptr()
            end = begin + extent * target.itemsize
            spans.append((str(target.device), begin, end, item.dest_index.fqn, id(item)))
    tied: set[int] = set()
    together: list[tuple[str, int]] = []  # keys and items that overlap, one by one
    device, furthest = "", 0
    for on, begin, end, key, number in sorted(spans):
        if on != device or begin >= furthest:
            device, furthest, together = on, 0, []
        together.append((key, number))
        furthest = max(furthest, end)
        if key != together[0][0]:
            tied.update(number for _, number in together)
        elif together[0][1] in tied:
            tied.add(number)
    return tied


def _is_memory(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor's elements are all of it, and there are any."""
    return bool(
        is_memory(tensor)
        and tensor.numel()
        and tensor.data_ptr()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _wanted(
    item: ReadItem,
    target: torch.Tensor | None,
    planner: LoadPlanner,
    company: Company,
    *,
    is_tied: bool = False,
) -> Wanted:
    info = planner.metadata.storage_data[item.storage_index]  # type: ignore[attr-defined]
    size, device = info.length, company.device_for("cpu")
    described: list[Any] = [
        item.type.name,
        item.storage_index.fqn,
        item.storage_index.offset and tuple(item.storage_index.offset),
        # Ranks may have metadata of their own, with the same keys for other bytes; and directories
        # of their own, with the same files.
        save_id_of(planner.metadata),  # type: ignore[attr-defined]
        info.relative_path,
        info.offset,
        info.length,
        vars(info).get("crc32"),
    ]
    if target is not None:
        # What travels is what the destination holds, in its dtype.
        described += [tuple(item.storage_offsets), tuple(item.lengths), str(target.dtype)]
        if is_tied or not _is_memory(target):
            described.append(uuid.uuid4().hex)  # each reads its own
        else:
            size, device = target.nbytes, company.device_for(target.device.type)
    if save_id_of(planner.metadata) is None:  # type: ignore[attr-defined]
        described.append(uuid.uuid4().hex)  # it may be that of anybody's checkpoint
    described.append(device)
    digest = hashlib.blake2b(repr(described).encode("utf-8", "surrogatepass"), digest_size=16)
    first, second = (
        int.from_bytes(half, "little", signed=True)
        for half in (digest.digest()[:8], digest.digest()[8:])
    )
    return Wanted(item, (first, second), (info.relative_path, info.offset), size, device)


def _bundles(wanted: Sequence[Wanted], rank: int, names: Sequence[torch.Tensor]) -> list[_Bundle]:
    """What this rank shares with others, in the order of the transfers."""
    every = torch.cat(list(names))
    of_rank = torch.repeat_interleave(
        torch.arange(len(names), device="cpu"),
        torch.tensor([len(one) for one in names], device="cpu"),
    )
    first, order = torch.sort(every[:, 0], stable=True)
    mine = torch.tensor([one.name[0] for one in wanted], dtype=torch.int64, device="cpu")
    begins = torch.searchsorted(first, mine).tolist()
    ends = torch.searchsorted(first, mine, right=True).tolist()
    together: dict[tuple[int, ...], list[Wanted]] = defaultdict(list)
    for one, begin, end in zip(wanted, begins, ends, strict=True):
        if end - begin < 2:
            continue
        at = order[begin:end]
        holders = tuple(sorted(of_rank[at].tolist()))
        # A rank that wants it twice reads it twice, and so do those who want what only seems to be
        # the same.
        if len(set(holders)) == len(holders) and bool((every[at, 1] == one.name[1]).all()):
            together[holders].append(one)
    bundles = []
    for holders, ones in sorted(together.items()):
        # To each a stretch of the files: what lies between the wanted bytes would be read, too.
        ones.sort(key=lambda one: (one.place, one.name))
        whole = sum(one.size for one in ones) or 1
        shares: list[list[Wanted]] = [[] for _ in holders]
        before = 0
        for one in ones:
            shares[min(before * len(holders) // whole, len(holders) - 1)].append(one)
            before += one.size
        bundles += [
            _Bundle(holders, owner, share)
            for owner, share in zip(holders, shares, strict=True)
            if share
        ]
    return bundles
