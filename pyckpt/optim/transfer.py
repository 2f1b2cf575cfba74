"""Many tensors to other devices and dtypes, in few copies and one synchronisation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from pyckpt.optim.tensors import is_plain, on_local_shard

__all__ = ["Request", "place"]

# Up to this size a copy costs more to start than to run, and tensors travel packed.
_PACKED_BYTES = 64 << 10


@dataclass(frozen=True)
class Request:
    """A tensor, and where it is to be. ``dtype`` None keeps its own."""

    tensor: Tensor
    device: torch.device
    dtype: torch.dtype | None = None
    pinned: bool = False

    @property
    def target_dtype(self) -> torch.dtype:
        return self.dtype or self.tensor.dtype


@torch.no_grad()
def place(requests: Sequence[Request]) -> list[Tensor]:
    """New tensors with the values of the old ones, in the order of the requests.

    None of them shares memory with an old one, so that writing to it changes nothing else; tensors
    that shared memory before, and go to the same place, share it after. The small ones of a source
    device go packed: gathered there, copied once, and taken apart into memory of their own. They do
    not stay views of the packed buffer: views of one tensor share a version counter, so that one
    step's change in place would look to autograd like a change of all of them, and each would keep
    all of it alive and carry all of it when it is pickled alone.
    """
    results: dict[int, Tensor] = {}
    packed: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    alone: list[int] = []
    first: dict[tuple[Any, ...], int] = {}
    same_as: dict[int, int] = {}
    shared = _shared_storages(requests)
    locals_ = [on_local_shard(request.tensor) for request in requests]
    for index, request in enumerate(requests):
        key = (id(request.tensor), request.device, request.target_dtype, request.pinned)
        if first.setdefault(key, index) != index:
            same_as[index] = first[key]
            continue
        local = locals_[index][0]
        if index in shared:
            continue
        small = is_plain(local) and local.numel() * local.element_size() <= _PACKED_BYTES
        if small and local.device != request.device:
            packed[local.device, request.device, request.pinned].append(index)
        else:
            alone.append(index)
    for (_, device, pinned), indices in packed.items():
        sources = [(locals_[i][0], requests[i].target_dtype) for i in indices]
        results.update(zip(indices, _place_packed(sources, device, pinned), strict=True))
    for index in alone:
        request = requests[index]
        results[index] = _place_alone(locals_[index][0], request)
    for group in _by_storage(requests, shared).values():
        results.update(zip(group, _place_shared([requests[i] for i in group]), strict=True))
    to_host = [i for i in (*alone, *shared) if requests[i].device.type == "cpu"]
    _finish([locals_[index][0] for index in to_host])
    for index in list(results):
        results[index] = locals_[index][1](results[index])
    for index, original in same_as.items():
        results[index] = results[original]
    return [results[index] for index in range(len(requests))]


def _place_packed(
    sources: list[tuple[Tensor, torch.dtype]], device: torch.device, pinned: bool
) -> list[Tensor]:
    """Small tensors of one device: a gather for each dtype, one copy."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = defaultdict(list)
    for index, (tensor, dtype) in enumerate(sources):
        by_dtype[tensor.dtype, dtype].append(index)
    # Wide elements first, so that each dtype's part of the buffer is aligned for it.
    kinds = sorted(by_dtype, key=lambda kind: (-kind[0].itemsize, str(kind)))
    gathered = [_gathered([sources[i][0] for i in by_dtype[kind]]) for kind in kinds]
    if len(gathered) == 1:
        arrived = [_copied(gathered[0], device)]
    else:
        buffer = _copied(torch.cat([part.view(torch.uint8) for part in gathered]), device)
        sizes = [part.numel() * part.element_size() for part in gathered]
        pairs = zip(torch.split(buffer, sizes), gathered, strict=True)
        arrived = [part.view(before.dtype) for part, before in pairs]
    results: dict[int, Tensor] = {}
    for kind, flat in zip(kinds, arrived, strict=True):
        indices = by_dtype[kind]
        tensors = [sources[i][0] for i in indices]
        results.update(zip(indices, _taken_apart(flat.to(kind[1]), tensors, pinned), strict=True))
    return [results[index] for index in range(len(sources))]


def _gathered(tensors: list[Tensor]) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        return torch.stack(tensors)  # a quarter of the time of reshaping each
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _copied(buffer: Tensor, device: torch.device) -> Tensor:
    """One copy; from a device to the host with the one synchronisation there is."""
    if buffer.device.type == "cpu" and _is_real_cuda(device, buffer):
        # From pinned memory, which the allocator keeps until the copy is done: nothing waits.
        return buffer.pin_memory().to(device, non_blocking=True)
    return buffer.to(device)


def _taken_apart(flat: Tensor, like: list[Tensor], pinned: bool) -> list[Tensor]:
    if all(tensor.dim() == 0 for tensor in like):
        views = list(flat.unbind())
    else:
        parts = torch.split(flat, [tensor.numel() for tensor in like])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
    if pinned and torch.cuda.is_available():
        return [view.pin_memory() for view in views]
    owned = [torch.empty_like(t, dtype=flat.dtype, device=flat.device) for t in like]
    torch._foreach_copy_(owned, views)
    return owned


def _place_alone(local: Tensor, request: Request) -> Tensor:
    if not is_plain(local):
        # A class of its own knows how it moves; its dtype says nothing about how it stores.
        return local.to(request.device, copy=True)
    new = torch.empty_like(
        local,
        dtype=request.target_dtype,
        device=request.device,
        pin_memory=request.pinned and torch.cuda.is_available(),
    )
    return new.copy_(local, non_blocking=True)


def _finish(sources: list[Tensor]) -> None:
    """Wait for what was copied to the host without waiting, once a device."""
    for device in {s.device for s in sources if _is_real_cuda(s.device, s)}:
        torch.cuda.current_stream(device).synchronize()


def _is_real_cuda(device: torch.device, tensor: Tensor) -> bool:
    return (
        device.type == "cuda" and torch.cuda.is_available() and not isinstance(tensor, FakeTensor)
    )


# --- shared memory ----------------------------------------------------------------------------


def _storage_key(request: Request) -> tuple[Any, ...] | None:
    tensor = request.tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.dtype, request.device, request.target_dtype, request.pinned


def _shared_storages(requests: Sequence[Request]) -> dict[int, tuple[Any, ...]]:
    """The requests whose tensors are parts of a memory that another one's is a part of too."""
    owners: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        key = _storage_key(request)
        if key is not None:
            owners[key].append(index)
    return {
        index: key
        for key, indices in owners.items()
        if len({id(requests[index].tensor) for index in indices}) > 1
        for index in indices
    }


def _by_storage(
    requests: Sequence[Request], shared: dict[int, tuple[Any, ...]]
) -> dict[tuple[Any, ...], list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, key in shared.items():
        groups[key].append(index)
    return groups


def _place_shared(requests: list[Request]) -> list[Tensor]:
    """The whole memory once, and in it each of the tensors where it was."""
    request = requests[0]
    tensor = request.tensor
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.element_size(),), (1,)
    )
    memory = _place_alone(
        whole, Request(whole, request.device, request.target_dtype, request.pinned)
    )
    return [
        memory.as_strided(r.tensor.shape, r.tensor.stride(), r.tensor.storage_offset())
        for r in requests
    ]
