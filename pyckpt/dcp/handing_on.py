"""Bytes that ranks hand on to each other, and how the ranks keep together while they do.

A rank that fails must not leave others waiting for it: they would wait for as long as the process
group lets them. So the ranks agree, after each step that may fail, whether all of them go on. Once
they are at handing on, nothing keeps them from it: a rank that has no room for what it receives
passes it on nonetheless, through memory that it put aside before, and raises when it is through.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from pyckpt.dcp.failures import OfAnother, portable

__all__ = [
    "Company",
    "Keeper",
    "Passage",
    "Wanted",
    "as_bytes",
    "hand_on",
    "is_known_to_carry",
    "reliefs",
]

_PIECE_BYTES = 16 << 20
"""Of one transfer: large enough to be quick, small enough that a chain of ranks works at once."""
_SMALL_BYTES = 1 << 20
"""Tensors up to this size travel together."""
_ALIGNMENT = 16  # of a tensor among others, so that it can be looked at as its dtype
_SENDS_MAX = 4  # under way from one rank, whose memory is held until they are over
_NUMBER_BYTES = 8
_NUMBERS_MAX = 10  # that a rank tells the others at a time

T = TypeVar("T")


class Wanted(NamedTuple):
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
    is_memory: bool
    """Whether the destination is host memory, in one piece, on all ranks that want it."""


# --- the ranks ------------------------------------------------------------------------------------


def is_known_to_carry(group: dist.ProcessGroup | None) -> bool:
    """Whether a group's backends are of those of which pyckpt knows what they carry: the memory of
    the CPU, of a GPU, or both. A program may register others, and then has to ask for sharing."""
    config = dist.get_backend_config(group)
    # "gloo", or "cpu:gloo,cuda:nccl"
    names = {one.rpartition(":")[2] for one in str(config).lower().split(",")}
    return not names.isdisjoint(("gloo", "mpi", "nccl"))


class Company:
    """The ranks that load together.

    Args:
        group: of them; None for all.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self._ranks = dist.get_world_size(group)
        backends = str(dist.get_backend_config(group)).lower()
        self._carries_cpu = "gloo" in backends or "mpi" in backends or "fake" in backends
        self._carries_cuda = "nccl" in backends
        # Where there is no memory, there is this: whether this rank has failed, and a size; then a
        # row for each rank, and one for what this rank tells: whether it has failed, and numbers.
        row = 1 + _NUMBERS_MAX
        memory = torch.zeros(
            2 + (self._ranks + 1) * row, dtype=torch.int64, device=self.device_for("cpu")
        )
        self._state, self._told = memory[:2], memory[2:].view(self._ranks + 1, row)

    def device_for(self, device: str) -> str:
        """The type of the device by which bytes for a ``device`` travel."""
        if device == "cuda" and self._carries_cuda:
            return "cuda"
        return "cpu" if self._carries_cpu else "cuda"

    def together(self, do: Callable[[], T]) -> T:
        """What ``do`` returns, once it has returned on all ranks.

        Raises:
            Exception: what it raised on this rank.
            OfAnother: what it raised on another.
        """
        return self._agree(do, lambda _: 0)[0]

    def exchange(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What all ranks say, a row each, for `said`.

        Args:
            make: what this rank says: numbers, on the CPU.

        Raises:
            Exception: what it raised on this rank.
            OfAnother: what it raised on another.
        """
        device = self.device_for("cpu")

        def made() -> torch.Tensor:
            return make().view(torch.uint8)

        own, most = self._agree(made, torch.Tensor.numel)
        row = (1 - (-most // _NUMBER_BYTES)) * _NUMBER_BYTES  # behind the number of bytes

        def rows() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
            sent = torch.zeros(row, dtype=torch.uint8, device=device)
            sent[:_NUMBER_BYTES].view(torch.int64).fill_(own.numel())
            sent[_NUMBER_BYTES : _NUMBER_BYTES + own.numel()].copy_(own)
            received = torch.empty(self._ranks, row, dtype=torch.uint8, device=device)
            return sent, received, list(received.unbind(0))

        sent, received, rows_received = self.together(rows)
        dist.all_gather(rows_received, sent, group=self.group)
        return received

    def tell(self, make: Callable[[], Sequence[int]]) -> list[list[int]]:
        """What each rank says: a few numbers. One collective, where `exchange` is three.

        Args:
            make: what this rank says: as many numbers as the others, of 64 bits.

        Raises:
            Exception: what it raised on this rank.
            OfAnother: what it raised on another.
        """
        *rows, own = self._told.unbind(0)
        failure: Exception | None = None
        count = 0
        own.zero_()
        try:
            numbers = torch.tensor(make(), dtype=torch.int64, device="cpu")
            count = len(numbers)
            own[1 : 1 + count].copy_(numbers)
        except Exception as error:
            failure = error  # the other ranks wait for what this one says
            own[0] = 1
        dist.all_gather(rows, own, group=self.group)
        told: list[list[int]] = self._told[:-1].tolist()
        if any(has_failed for has_failed, *_ in told):
            self._raise(failure)
        return [row[1 : 1 + count] for row in told]

    @staticmethod
    def said(row: torch.Tensor) -> torch.Tensor:
        """The bytes that a rank said, in its row of `exchange`."""
        size = int(row[:_NUMBER_BYTES].view(torch.int64))
        return row[_NUMBER_BYTES : _NUMBER_BYTES + size]

    def _agree(self, do: Callable[[], T], size_of: Callable[[T], int]) -> tuple[T, int]:
        """What ``do`` returns, and the largest size of what it returns on any rank."""
        failure: Exception | None = None
        size = 0
        try:
            done = do()
            size = size_of(done)
        except Exception as error:
            failure = error  # the other ranks wait for what this one says
        self._state[0] = failure is not None
        self._state[1] = size
        dist.all_reduce(self._state, dist.ReduceOp.MAX, group=self.group)
        has_failed, most = self._state.tolist()
        if has_failed:
            self._raise(failure)
        return done, most

    def _raise(self, failure: Exception | None) -> NoReturn:
        """Raise why this rank has failed, or else why another has."""
        failures: list[Any] = [None] * self._ranks
        own = None if failure is None else portable(failure)
        dist.all_gather_object(failures, own, group=self.group)
        if failure is not None:
            raise failure
        raise next(OfAnother(i, error) for i, error in enumerate(failures) if error is not None)


def as_bytes(tensor: torch.Tensor) -> bytearray:
    """What is in a tensor of bytes."""
    data = bytearray(tensor.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return data


# --- handing on -----------------------------------------------------------------------------------


class Keeper:
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


def reliefs(devices: set[str]) -> dict[str, torch.Tensor]:
    """Memory for a piece on each of these types of devices: for a rank that gets no other."""
    return {
        device: torch.zeros(_PIECE_BYTES, dtype=torch.uint8, device=device)
        for device in sorted(devices)
    }


def hand_on(passages: Sequence[Passage], company: Company) -> None:
    """Receive and send what goes through this rank, all of it, whatever fails in between.

    Raises:
        Exception: what failed first on this rank.
    """
    failures: list[Exception] = []
    sends = _Sends(company.group)
    for passage in passages:
        passage.go(sends, failures)
    sends.wait()
    if failures:
        raise failures[0]


class _Sends:
    """Sends that are under way."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def start(self, buffer: torch.Tensor, after: int) -> None:
        """Send bytes to a rank of the group. They must stay as they are."""
        while len(self._under_way) >= _SENDS_MAX:
            self._wait()
        work = dist.isend(buffer, group=self.group, group_dst=after)
        self._under_way.append((work, buffer))

    def wait(self) -> None:
        """Wait for all of them."""
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        if work is not None:
            work.wait()


def _batches(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Tensors that travel together: of one device, as many as a piece has room for."""
    for device in sorted({one.device for one in wanted}):
        batch: list[Wanted] = []
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


def _room(one: Wanted) -> int:
    return -(-one.size // _ALIGNMENT) * _ALIGNMENT


class Passage:
    """The way of one bundle through this rank.

    Args:
        wanted: what is in it.
        neighbours: the rank before this one in the chain, and the one after it.
        keeper: it has the objects, where this rank read them, and the destinations.
        relief: see `reliefs`.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        neighbours: tuple[int | None, int | None],
        keeper: Keeper,
        relief: dict[str, torch.Tensor],
    ) -> None:
        self._before, self._after = neighbours
        self._keeper = keeper
        self._relief = relief
        tensors = [one for one in wanted if one.item.type is LoadItemType.TENSOR]
        self._batches = list(_batches([one for one in tensors if one.size <= _SMALL_BYTES]))
        self._large = [one for one in tensors if one.size > _SMALL_BYTES]
        self._objects = [one for one in wanted if one.item.type is not LoadItemType.TENSOR]
        device = self._objects[0].device if self._objects else "cpu"
        # Not in memory that there may be none of: it says how many bytes come after it.
        self._sizes = torch.empty(len(self._objects), dtype=torch.int64, device=device)

    def go(self, sends: _Sends, failures: list[Exception]) -> None:
        """Receive what another rank read, if it did, and send it to the next one, if there is one.

        Args:
            sends: of the load.
            failures: takes errors. The bytes travel on nonetheless, since the ranks behind this one
                wait for them.
        """
        self._sends = sends
        self._failures = failures
        for batch in self._batches:
            self._pass_small(batch)
        for one in self._large:
            self._pass_large(one)
        if self._objects:
            self._pass_objects()

    def _attempt(self, do: Callable[..., T], *args: Any) -> T | None:
        try:
            return do(*args)
        except Exception as error:
            self._failures.append(error)
            return None

    def _pass_small(self, batch: Sequence[Wanted]) -> None:
        room = self._attempt(self._small_room, batch)
        buffer, places = (None, []) if room is None else room
        self._pass_bytes(buffer, sum(map(_room, batch)), batch[0].device)
        if self._before is not None:
            for item, target, place in places:
                self._attempt(self._give, item, target, place)

    def _small_room(
        self, batch: Sequence[Wanted]
    ) -> tuple[torch.Tensor, list[tuple[ReadItem, torch.Tensor, torch.Tensor]]]:
        """Memory for a batch, with what this rank read in it; and where each tensor goes, and where
        it is in the memory."""
        size = sum(map(_room, batch))
        buffer = torch.empty(size, dtype=torch.uint8, device=batch[0].device)
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
        return buffer, places

    def _pass_large(self, one: Wanted) -> None:
        room = self._attempt(self._large_room, one)
        target, whole = (None, None) if room is None else room
        flat = None if whole is None else whole.view(-1).view(torch.uint8)
        self._pass_bytes(flat, one.size, one.device)
        if self._before is not None and target is not None:
            self._attempt(self._give, one.item, target, None if whole is target else whole)

    def _large_room(self, one: Wanted) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a tensor goes, and memory for it in one piece, with what this rank read in it. Both
        are the same where they can be."""
        target = self._keeper.resolve_tensor(one.item).detach()
        if target.is_contiguous() and target.device.type == one.device:
            return target, target
        if self._before is None:
            return target, target.to(one.device).contiguous()
        return target, torch.empty(target.shape, dtype=target.dtype, device=one.device)

    def _pass_objects(self) -> None:
        device = self._sizes.device.type
        travelling: torch.Tensor | None = None
        if self._before is None:
            travelling = self._attempt(self._own_objects)
            if travelling is None:
                self._sizes.fill_(-1)
        self._pass_bytes(self._sizes.view(torch.uint8), self._sizes.nbytes, device)
        total = int(self._sizes.sum())
        if total < 0:
            return  # the rank that read them has failed, and nothing comes
        if self._before is not None:
            travelling = self._attempt(
                partial(torch.empty, dtype=torch.uint8, device=device), total
            )
        self._pass_bytes(travelling, total, device)
        if self._before is not None and travelling is not None:
            self._attempt(self._take_objects, travelling)

    def _take_objects(self, travelling: torch.Tensor) -> None:
        received = memoryview(as_bytes(travelling))
        at = 0
        for one, size in zip(self._objects, self._sizes.tolist(), strict=True):
            self._attempt(self._take_object, one.item, received[at : at + size])
            at += size

    def _take_object(self, item: ReadItem, data: memoryview) -> None:
        self._keeper.load_bytes(item, io.BytesIO(data))

    def _own_objects(self) -> torch.Tensor:
        """The objects that this rank read, one after another; sets their sizes."""
        own = [self._keeper.objects[id(one.item)] for one in self._objects]
        data = torch.frombuffer(bytearray(b"".join(own)), dtype=torch.uint8)
        travelling = data.to(self._sizes.device)
        self._sizes.copy_(torch.tensor([len(one) for one in own], device="cpu"))
        return travelling

    def _give(self, item: ReadItem, target: torch.Tensor, source: torch.Tensor | None) -> None:
        if source is not None:
            target.copy_(source)
        self._keeper.commit_tensor(item, target)

    def _pass_bytes(self, data: torch.Tensor | None, size: int, device: str) -> None:
        """Pass on so many bytes, in ``data``, or where it is None in what was put aside. What the
        first rank of a chain sends from there means nothing."""
        for begin in range(0, size, _PIECE_BYTES):
            length = min(_PIECE_BYTES, size - begin)
            piece = self._relief[device][:length] if data is None else data[begin : begin + length]
            if self._before is not None:
                dist.recv(piece, group=self._sends.group, group_src=self._before)
            if self._after is not None:
                self._sends.start(piece, self._after)
                if data is None:
                    self._sends.wait()  # before it is used again
