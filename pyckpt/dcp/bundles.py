"""Who reads what, where ranks share their reads.

Each rank computes it for itself, from what all of them said that they want. Of those that want the
same, each reads a stretch of it, and hands it on to the others (`pyckpt.dcp.sharing`).
"""

from __future__ import annotations

import hashlib
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from pyckpt.dcp.handing_on import Company, Wanted
from pyckpt.dcp.leaves import is_memory
from pyckpt.dcp.reading import save_id_of

__all__ = ["Bundle", "all_wanted", "around", "bundles_of"]


class Bundle(NamedTuple):
    """What one rank reads for the same others."""

    holders: tuple[int, ...]
    """The ranks of the group that want it, in their order."""
    owner: int
    wanted: list[Wanted]

    @property
    def chain(self) -> tuple[int, ...]:
        """The ranks, the owner first."""
        at = self.holders.index(self.owner)
        return self.holders[at:] + self.holders[:at]

    def leaders(self, hosts: Sequence[int]) -> dict[int, int]:
        """For each host the rank from whose memory the others of it copy."""
        leaders: dict[int, int] = {}
        for rank in self.chain:
            leaders.setdefault(hosts[rank], rank)
        return leaders


def around(rank: int, chain: Sequence[int]) -> tuple[int | None, int | None]:
    """The rank before one in a chain, and the one after it."""
    at = chain.index(rank)
    return (
        chain[at - 1] if at > 0 else None,
        chain[at + 1] if at + 1 < len(chain) else None,
    )


def all_wanted(items: Sequence[ReadItem], planner: LoadPlanner, company: Company) -> list[Wanted]:
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
    size, device, in_memory = info.length, company.device_for("cpu"), False
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
            in_memory = target.device.type == "cpu" and target.is_contiguous()
    if save_id_of(planner.metadata) is None:  # type: ignore[attr-defined]
        described.append(uuid.uuid4().hex)  # it may be that of anybody's checkpoint
    described += [device, in_memory]
    digest = hashlib.blake2b(repr(described).encode("utf-8", "surrogatepass"), digest_size=16)
    first, second = (
        int.from_bytes(half, "little", signed=True)
        for half in (digest.digest()[:8], digest.digest()[8:])
    )
    return Wanted(item, (first, second), (info.relative_path, info.offset), size, device, in_memory)


def bundles_of(wanted: Sequence[Wanted], rank: int, names: Sequence[torch.Tensor]) -> list[Bundle]:
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
            Bundle(holders, owner, share)
            for owner, share in zip(holders, shares, strict=True)
            if share
        ]
    return bundles
