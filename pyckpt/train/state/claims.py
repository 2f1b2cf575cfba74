"""Which memory a restore fills for which key, so that none gets what another was saved with."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pyckpt.dcp.leaves import is_plain_type, is_sharded_tensor

__all__ = ["Claims", "fold", "is_alike", "is_equal", "is_folded", "memory_like"]

_TRIED_BYTES = 1 << 26  # of a map of elements, one byte each, that is made to compare two tensors


class Claims:
    """The memory that is taken, and the keys it is taken for; by address, since tensors that a
    program made of memory of its own may overlap though torch takes their storages for different
    ones."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, _Ranges] = {}
        self.containers: dict[int, tuple[Any, Any, Any]] = {}
        """By id, the dicts and lists that were filled: each with what it was filled with, and what
        it held before."""

    def add(self, tensor: torch.Tensor, key: str, owner: str = "") -> None:
        """Note that a tensor is filled for a key, or stays as it is.

        Args:
            owner: the object of the state that the tensor is of; empty for plain values.
        """
        for part in _parts(tensor):
            self._devices.setdefault(part.device, _Ranges()).add(_Claim(part, key), owner)

    def taken(self, tensor: torch.Tensor, *, but: str | None = None) -> str | None:
        """The key for which some of a tensor's memory is taken; None if there is none.

        Args:
            but: the owner whose claims do not count.
        """
        for part in _parts(tensor):
            ranges = self._devices.get(part.device)
            for claim in () if ranges is None else ranges.near(part, but):
                if _overlap(claim.tensor, part):
                    return claim.key
        return None


@dataclass(frozen=True)
class _Claim:
    tensor: torch.Tensor
    key: str


_Lattice = tuple[int, int, int]
_Claims = dict[str, dict[_Lattice, dict[int, list[_Claim]]]]
"""By owner; then by lattice; then by where in the lattice's step the elements lie. So the columns
of a matrix are not compared pair by pair."""


@dataclass
class _Ranges:
    """Ranges of addresses that do not overlap, in their order, each with the claims in it."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    claims: list[_Claims] = field(default_factory=list)

    def add(self, claim: _Claim, owner: str) -> None:
        begin, end = _extent(claim.tensor)
        first, last = self._find(begin, end)
        together: _Claims = self.claims[first] if first < last else {}
        if first < last:
            begin = min(begin, self.begins[first])
            end = max(end, self.ends[last - 1])
        for claims in self.claims[first + 1 : last]:
            for who, lattices in claims.items():
                for lattice, places in lattices.items():
                    for place, ones in places.items():
                        _at(together, who, lattice, place).extend(ones)
        lattice = _lattice(claim.tensor)
        _at(together, owner, lattice, claim.tensor.data_ptr() % lattice[0]).append(claim)
        self.begins[first:last] = [begin]
        self.ends[first:last] = [end]
        self.claims[first:last] = [together]

    def near(self, tensor: torch.Tensor, but: str | None) -> Iterator[_Claim]:
        """The claims that may overlap a tensor, but those of one owner."""
        first, last = self._find(*_extent(tensor))
        lattice = _lattice(tensor)
        mine = tensor.data_ptr() % lattice[0]
        for claims in self.claims[first:last]:
            for owner, lattices in claims.items():
                if owner == but:
                    continue
                for other, places in lattices.items():
                    if other == lattice:
                        yield from places.get(mine, ())
                    else:
                        for ones in places.values():
                            yield from ones

    def _find(self, begin: int, end: int) -> tuple[int, int]:
        return bisect_right(self.ends, begin), bisect_left(self.begins, end)


def _at(claims: _Claims, owner: str, lattice: _Lattice, place: int) -> list[_Claim]:
    return claims.setdefault(owner, {}).setdefault(lattice, {}).setdefault(place, [])


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors, with elements and memory, that a tensor consists of here."""
    if isinstance(tensor, DTensor):
        return _parts(tensor._local_tensor)
    if is_sharded_tensor(tensor):
        from pyckpt.dcp import sharded_tensors

        local: list[torch.Tensor] = sharded_tensors.local_parts(tensor)  # type: ignore[arg-type]
        return [part for one in local for part in _parts(one)]
    if not is_plain_type(tensor):
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None:
            return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor.detach()
        return [*_parts(tensor._indices()), *_parts(tensor._values())]
    elif tensor.layout is not torch.strided:
        return _parts(tensor.detach().values())
    if tensor.is_meta or not tensor.numel():
        return []
    try:
        has_memory = tensor.data_ptr() != 0
    except RuntimeError:  # a class that wraps others, and does not tell which
        has_memory = False
    return [tensor] if has_memory else []


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + (sum((n - 1) * s for n, s in steps) + 1) * tensor.itemsize


def _lattice(tensor: torch.Tensor) -> _Lattice:
    """The bytes by multiples of which all elements of a tensor are apart; those of an element; and
    where its address lies among these."""
    steps = (s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s)
    size = tensor.itemsize
    return (math.gcd(*steps) or 1) * size, size, tensor.data_ptr() % size


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one device have a byte in common."""
    begin, end = _extent(one)
    first, last = _extent(other)
    if last <= begin or end <= first:
        return False
    if begin == first or end == last:
        return True
    if _has_no_gaps(one) and (begin <= first or last <= end):
        return True
    if _has_no_gaps(other) and (first <= begin or end <= last):
        return True
    # Columns of one matrix, for instance, lie in each other's gaps.
    step = math.gcd(_lattice(one)[0], _lattice(other)[0])
    apart = (begin - first) % step
    if apart >= other.itemsize and apart + one.itemsize <= step:
        return False
    unit = math.gcd(one.itemsize, other.itemsize, begin - first)
    start = min(begin, first)
    size = (max(end, last) - start) // unit
    if size > _TRIED_BYTES:
        return True
    used = torch.zeros(size, dtype=torch.bool, device="cpu")
    _units(used, one, (begin - start) // unit, unit).fill_(True)
    return bool(_units(used, other, (first - start) // unit, unit).any())


def _units(used: torch.Tensor, tensor: torch.Tensor, at: int, unit: int) -> torch.Tensor:
    """A map of memory, where a tensor has its elements."""
    width = tensor.itemsize // unit
    # Each element once, since what shares memory cannot be filled.
    steps = [(n, s) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s]
    shape = [*(n for n, _ in steps), width]
    stride = [*(s * width for _, s in steps), 1]
    if _is_folded(shape, stride):
        extent = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        return used[at : at + extent]
    return used.as_strided(shape, stride, at)


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    begin, end = _extent(tensor)
    return not is_folded(tensor) and end - begin == tensor.numel() * tensor.itemsize


def is_folded(tensor: torch.Tensor) -> bool:
    """Whether elements of a plain tensor share memory with each other, as those that ``expand``
    makes; also of some that no program makes."""
    if not is_plain_type(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return False
    return _is_folded(tensor.shape, tensor.stride())


def _is_folded(shape: torch.Size | list[int], stride: tuple[int, ...] | list[int]) -> bool:
    reached = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step <= reached:
                return True
            reached += (size - 1) * step
    return False


def fold(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Fill a tensor whose elements share memory. Returns False, with the tensor as it was, where
    elements that share memory have different values."""
    tensor = tensor.detach()
    index = torch.zeros((), dtype=torch.int64, device=tensor.device)
    apart = values
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0:
            apart = apart.narrow(dim, 0, 1)
            size = 1
        places = torch.arange(size, device=tensor.device) * step
        index = index.unsqueeze(-1) + places
    extent = int(index.max()) + 1
    memory = tensor.as_strided((extent,), (1,))
    filled = memory.clone()
    filled[index.reshape(-1)] = apart.reshape(-1)
    if not is_equal(filled.as_strided(tensor.shape, tensor.stride()), values):
        return False
    memory.copy_(filled)
    return True


def memory_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, with memory of its own."""
    tensor = tensor.detach() if not is_sharded_tensor(tensor) else tensor
    return tensor.clone() if is_sharded_tensor(tensor) else torch.empty_like(tensor)


def is_equal(one: torch.Tensor, other: Any) -> bool:
    """Whether two tensors of one kind have the same bits here. False if the other is no tensor."""
    if not isinstance(other, torch.Tensor) or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    parts, others = _parts(one), _parts(other)
    return len(parts) == len(others) and all(map(_is_same, parts, others))


def is_alike(one: Any, other: Any) -> bool:
    """Whether two plain values are the same, as far as can be seen; tensors bit by bit."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return is_equal(one, other)
    if isinstance(one, Mapping):
        # In this order, in which they would be filled.
        return list(one) == list(other) and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_alike, one, other))
    # Numbers by what is shown of them: NaN is NaN, and -0.0 is not 0.0.
    return repr(one) == repr(other) if isinstance(one, float | complex) else bool(one == other)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8)
