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
import io
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from pyckpt.dcp.failures import portable
from pyckpt.dcp.leaves import is_memory

__all__ = ["read_shared"]

_PIECE_BYTES = 16 << 20
"""Of one transfer: large enough to be quick, small enough that a chain of ranks works at once."""
_SMALL_BYTES = 1 << 20
"""Tensors up to this size travel together."""
_ALIGNMENT = 16  # of a tensor among others, so that it can be looked at as its dtype
_SENDS_MAX = 4  # under way from one rank, whose memory is held until they are over


class _Wanted(NamedTuple):
    """What an item of a plan asks for."""

    item: ReadItem
    name: tuple[int, int]
    """Two numbers that no other wish has: a hash of 128 bits."""
    place: tuple[str, int]
    """The file, and where in it the item begins."""
    size: int
    """Bytes that travel; those of an object may be fewer."""
    device: str
    """The type of the device that the bytes travel from and to."""


class _Bundle(NamedTuple):
    """What one rank reads for the same others."""

    holders: tuple[int, ...]
    """The ranks of the group that want it, in their order."""
    owner: int
    wanted: list[_Wanted]

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
    reader: Any, plan: LoadPlan, planner: LoadPlanner, group: dist.ProcessGroup | None
) -> set[str]:
    """Load the items of a plan, each from the file system or from another rank.

    All ranks of the group must call this, each with its own plan of the same checkpoint.

    Args:
        reader: a ``StorageReader``, set up. Where it has ``unverified``, as `DirectReader` does, it
            names there what it could not check.
        plan: of this rank.
        planner: it says where items go, and takes the objects.
        group: the ranks that load together; None for all.

    Returns the keys of what other ranks read for this one, and could not check.

    Raises:
        Exception: whatever the reader raised, on this rank or else on another.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    medium = _Medium(group)
    failure: Exception | None = None
    wanted: list[_Wanted] = []
    try:
        wanted = _all_wanted(plan.items, planner, medium)
    except Exception as error:
        failure = error  # the other ranks wait for what this one says
    bundles = _bundles(wanted, rank, _all_names(wanted, ranks, group))
    from_others = {id(one.item) for b in bundles if b.owner != rank for one in b.wanted}
    keeper = _Keeper(
        planner, {id(one.item) for b in bundles if b.owner == rank for one in b.wanted}
    )
    if failure is None:
        try:
            _read(reader, [item for item in plan.items if id(item) not in from_others], keeper)
        except Exception as error:
            failure = error
    own = _Outcome.of(bundles, rank, reader, keeper, failure)
    outcomes: list[Any] = [None] * ranks
    # Before any rank waits for what will not come.
    dist.all_gather_object(outcomes, own, group=group)
    if failure is not None:
        raise failure
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure
    unverified: set[str] = set()
    refused: list[Exception] = []
    with medium.sends() as sends:
        for bundle in bundles:
            taken = outcomes[bundle.owner].taken
            left = [one for one in bundle.wanted if one.name not in taken]
            if bundle.owner != rank:
                keys = {one.item.storage_index.fqn for one in bundle.wanted}
                unverified |= keys & outcomes[bundle.owner].unverified
            _Passage(bundle.neighbours(rank), keeper, medium, sends, refused).pass_on(left)
    if refused:
        raise refused[0]
    again = [
        one.item
        for bundle in bundles
        if bundle.owner != rank
        for one in bundle.wanted
        if one.name in outcomes[bundle.owner].taken
    ]
    if again:
        _read(reader, again, planner)
    return unverified


def _read(reader: Any, items: list[ReadItem], planner: Any) -> None:
    done = reader.read_data(LoadPlan(items), planner)
    if done is not None:
        done.wait()


class _Outcome(NamedTuple):
    """What a rank says when it has read."""

    failure: Exception | None
    """That every rank raises, so that they end alike."""
    taken: set[tuple[int, int]]
    """Names of what does not travel: its planner put it in the place of the destination."""
    unverified: set[str]
    """Keys of what the rank could not check, as far as others get it from it."""

    @classmethod
    def of(
        cls,
        bundles: Sequence[_Bundle],
        rank: int,
        reader: Any,
        keeper: _Keeper,
        failure: Exception | None,
    ) -> _Outcome:
        """That of this rank."""
        shared = [one for bundle in bundles if bundle.owner == rank for one in bundle.wanted]
        return cls(
            None if failure is None else portable(failure),
            {one.name for one in shared if id(one.item) in keeper.taken},
            {one.item.storage_index.fqn for one in shared} & set(getattr(reader, "unverified", ())),
        )


# --- who reads what -------------------------------------------------------------------------------


def _all_wanted(items: Sequence[ReadItem], planner: LoadPlanner, medium: _Medium) -> list[_Wanted]:
    """What a plan asks for. Destinations that share memory (tied weights) do not travel: what is
    there may be of the other key."""
    targets = {
        id(item): planner.resolve_tensor(item) for item in items if item.type is LoadItemType.TENSOR
    }
    tied = _tied(items, targets)
    return [
        _wanted(item, targets.get(id(item)), planner, medium, is_tied=id(item) in tied)
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
    medium: _Medium,
    *,
    is_tied: bool = False,
) -> _Wanted:
    info = planner.metadata.storage_data[item.storage_index]  # type: ignore[attr-defined]
    size, device = info.length, medium.device_for("cpu")
    described: list[Any] = [
        item.type.name,
        item.storage_index.fqn,
        item.storage_index.offset and tuple(item.storage_index.offset),
        # Ranks may have metadata of their own, with the same keys for other bytes.
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
            size, device = target.nbytes, medium.device_for(target.device.type)
    described.append(device)
    digest = hashlib.blake2b(repr(described).encode("utf-8", "surrogatepass"), digest_size=16)
    first, second = (
        int.from_bytes(half, "little", signed=True)
        for half in (digest.digest()[:8], digest.digest()[8:])
    )
    return _Wanted(item, (first, second), (info.relative_path, info.offset), size, device)


def _all_names(
    wanted: Sequence[_Wanted], ranks: int, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """What each rank wants: an int64 tensor of two columns."""
    own = torch.tensor([one.name for one in wanted], dtype=torch.int64, device="cpu")
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, own.reshape(-1, 2), group=group)
    return everyone


def _bundles(wanted: Sequence[_Wanted], rank: int, names: Sequence[torch.Tensor]) -> list[_Bundle]:
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
    together: dict[tuple[int, ...], list[_Wanted]] = defaultdict(list)
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
        shares: list[list[_Wanted]] = [[] for _ in holders]
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


# --- handing on -----------------------------------------------------------------------------------


class _Medium:
    """The process group, and the devices between which it carries bytes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        backends = str(dist.get_backend_config(group)).lower()
        self._carries_cpu = "gloo" in backends or "mpi" in backends or "fake" in backends
        self._carries_cuda = "nccl" in backends

    def device_for(self, device: str) -> str:
        """The type of the device by which bytes for a ``device`` travel."""
        if device == "cuda" and self._carries_cuda:
            return "cuda"
        return "cpu" if self._carries_cpu else "cuda"

    def empty(self, size: int, device: str) -> torch.Tensor:
        """Memory for bytes that travel."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def receive(self, buffer: torch.Tensor, before: int) -> None:
        """Receive bytes from a rank of the group."""
        dist.recv(buffer, group=self.group, group_src=before)

    def sends(self) -> _Sends:
        """The sends of one load."""
        return _Sends(self.group)


class _Sends:
    """Sends that are under way. Leaving the context waits for all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def __enter__(self) -> _Sends:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        while self._under_way and kind is None:
            self._wait()

    def start(self, buffer: torch.Tensor, after: int) -> None:
        """Send bytes to a rank of the group. They must stay as they are."""
        while len(self._under_way) >= _SENDS_MAX:
            self._wait()
        work = dist.isend(buffer, group=self._group, group_dst=after)
        self._under_way.append((work, buffer))

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        if work is not None:
            work.wait()


class _Keeper:
    """A planner that keeps the bytes of the objects that this rank hands on."""

    def __init__(self, planner: LoadPlanner, shared: set[int]) -> None:
        self._planner = planner
        self._shared = shared
        self.objects: dict[int, bytes] = {}
        """Their bytes, by the item's identity."""
        self.taken: set[int] = set()
        """The identities of items of which the planner took the tensor itself."""

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        if id(item) in self._shared:
            self.objects[id(item)] = value.getvalue()
        self._planner.load_bytes(item, value)

    def take(self, item: ReadItem, tensor: torch.Tensor) -> bool:
        take = getattr(self._planner, "take", None)
        if take is None or not take(item, tensor):
            return False
        self.taken.add(id(item))
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Tensors that travel together: of one device, as many as a piece has room for."""
    for device in sorted({one.device for one in wanted}):
        batch: list[_Wanted] = []
        size = 0
        for one in wanted:
            if one.device != device:
                continue
            if batch and size + _room(one) > _PIECE_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(one)
            size += _room(one)
        yield batch


def _room(one: _Wanted) -> int:
    return -(-one.size // _ALIGNMENT) * _ALIGNMENT


class _Passage:
    """The way of one bundle through this rank.

    Args:
        neighbours: the rank before this one in the chain, and the one after it.
        keeper: it has the objects, where this rank read them, and the destinations.
        medium: what bytes travel by.
        sends: of the load.
        refused: takes the errors of the planner. The bytes travel on nonetheless, since the ranks
            behind this one wait for them.
    """

    def __init__(
        self,
        neighbours: tuple[int | None, int | None],
        keeper: _Keeper,
        medium: _Medium,
        sends: _Sends,
        refused: list[Exception],
    ) -> None:
        self._before, self._after = neighbours
        self._keeper = keeper
        self._medium = medium
        self._sends = sends
        self._refused = refused

    def pass_on(self, wanted: Sequence[_Wanted]) -> None:
        """Receive what another rank read, if it did, and send it to the next one, if there is
        one."""
        tensors = [one for one in wanted if one.item.type is LoadItemType.TENSOR]
        for batch in _batches([one for one in tensors if one.size <= _SMALL_BYTES]):
            self._pass_small(batch)
        for one in tensors:
            if one.size > _SMALL_BYTES:
                self._pass_large(one)
        objects = [one for one in wanted if one.item.type is not LoadItemType.TENSOR]
        if objects:
            self._pass_objects(objects)

    def _pass_small(self, batch: Sequence[_Wanted]) -> None:
        buffer = self._medium.empty(sum(map(_room, batch)), batch[0].device)
        places = []
        at = 0
        for one in batch:
            target = self._keeper.resolve_tensor(one.item).detach()
            place = buffer[at : at + one.size].view(target.dtype).view(target.shape)
            places.append((one.item, target, place))
            at += _room(one)
        if self._before is None:
            for _, target, place in places:
                place.copy_(target)
        self._pass_bytes(buffer)
        if self._before is not None:
            for item, target, place in places:
                self._give(item, target, place)

    def _pass_large(self, one: _Wanted) -> None:
        target = self._keeper.resolve_tensor(one.item).detach()
        in_place = target.is_contiguous() and target.device.type == one.device
        if in_place:
            whole = target
        elif self._before is None:
            whole = target.to(one.device).contiguous()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=one.device)
        self._pass_bytes(whole.view(-1).view(torch.uint8))
        if self._before is not None:
            self._give(one.item, target, None if in_place else whole)

    def _pass_objects(self, objects: Sequence[_Wanted]) -> None:
        device = objects[0].device
        sizes = torch.empty(len(objects), dtype=torch.int64, device=device)
        own = (
            [self._keeper.objects[id(one.item)] for one in objects] if self._before is None else []
        )
        if self._before is None:
            sizes.copy_(torch.tensor([len(data) for data in own], device="cpu"))
        self._pass_bytes(sizes.view(torch.uint8))
        received = bytearray(b"".join(own) if self._before is None else int(sizes.sum()))
        data = torch.frombuffer(received, dtype=torch.uint8)
        travelling = data.to(device)
        self._pass_bytes(travelling)
        if self._before is None:
            return
        data.copy_(travelling)
        at = 0
        for one, size in zip(objects, sizes.tolist(), strict=True):
            try:
                self._keeper.load_bytes(one.item, io.BytesIO(received[at : at + size]))
            except Exception as error:
                self._refused.append(error)
            at += size

    def _give(self, item: ReadItem, target: torch.Tensor, source: torch.Tensor | None) -> None:
        try:
            if source is not None:
                target.copy_(source)
            self._keeper.commit_tensor(item, target)
        except Exception as error:
            self._refused.append(error)

    def _pass_bytes(self, data: torch.Tensor) -> None:
        for begin in range(0, data.numel(), _PIECE_BYTES):
            piece = data[begin : begin + _PIECE_BYTES]
            if self._before is not None:
                self._medium.receive(piece, self._before)
            if self._after is not None:
                self._sends.start(piece, self._after)
