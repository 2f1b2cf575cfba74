"""Copies many tensors to other devices and dtypes, in few copies and one synchronisation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pyckpt.optim.tensors import is_dtensor, is_plain, on_local_shard, plain_parts

__all__ = ["Request", "is_there", "place"]

# Up to this size, starting a copy takes longer than the copy, so tensors are packed.
_PACKED_BYTES = 64 << 10


class Request(NamedTuple):
    """A tensor, and the place to copy it to. ``dtype`` None keeps its own."""

    tensor: Tensor
    device: torch.device
    dtype: torch.dtype | None = None
    pinned: bool = False

    @property
    def target_dtype(self) -> torch.dtype:
        return self.dtype or self.tensor.dtype


def is_there(request: Request) -> bool:
    """Whether a tensor is at its place already, and worth not being copied: it is large, and
    memory of its own, of which it uses all."""
    tensor = request.tensor
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return (
        type(local) is Tensor
        and local.layout is torch.strided
        and not local.requires_grad
        and local.device == request.device
        and local.dtype == request.target_dtype
        and not request.pinned
        and local.nbytes > _PACKED_BYTES
        and local.nbytes == local.untyped_storage().nbytes()
    )


@torch.no_grad()
def place(requests: Sequence[Request]) -> list[Tensor]:
    """New tensors with the values of the old ones, in the order of the requests.

    No new tensor shares memory with an old one. Tensors that shared memory before, and go to the
    same place, share it after. The small tensors of a source device are packed: gathered there,
    copied once, and taken apart into memory of their own. They do not stay views of the packed
    buffer, because views of one tensor share a version counter: to autograd, one step's change in
    place would look like a change of all of them. Each view would also keep the whole buffer alive,
    and would be pickled with all of it.
    """
    results: dict[int, Tensor] = {}
    packed: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    alone: list[int] = []
    first: dict[tuple[Any, ...], int] = {}
    same_as: dict[int, int] = {}
    shared = _shared_storages(requests)
    shards: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = {}
    for index, (tensor, device, dtype, pinned) in enumerate(requests):
        key = (id(tensor), device, dtype or tensor.dtype, pinned)
        if first.setdefault(key, index) != index:
            same_as[index] = first[key]
            continue
        if index in shared:
            continue
        plain = is_plain(tensor)
        if plain and tensor.device != device and tensor.nbytes <= _PACKED_BYTES:
            packed[tensor.device, device, pinned].append(index)
            continue
        if not plain:
            shards[index] = on_local_shard(tensor)
        alone.append(index)
    for (_, device, pinned), indices in packed.items():
        sources = [(requests[i].tensor, requests[i].target_dtype) for i in indices]
        results.update(zip(indices, _place_packed(sources, device, pinned), strict=True))
    for index in alone:
        request = requests[index]
        if index in shards:
            local, rewrapped = shards[index]
            results[index] = rewrapped(_place_alone(local, request))
        else:
            results[index] = _place_alone(request.tensor, request)
    for group in _by_storage(shared).values():
        results.update(zip(group, _place_shared([requests[i] for i in group]), strict=True))
    _finish(
        [
            (
                shards[index][0] if index in shards else requests[index].tensor,
                requests[index].device,
            )
            for index in (*alone, *shared)
        ]
    )
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
    if not is_plain(local) and not is_traceable_wrapper_subclass(local):
        return local.to(request.device, request.target_dtype, copy=True)  # a sparse layout
    if not is_plain(local):
        # A class that wraps tensors, such as quantised state: its memory has another dtype.
        wrapped: Any = local
        names, context = wrapped.__tensor_flatten__()
        parts = [getattr(wrapped, name) for name in names]
        copies = [_place_alone(p, Request(p, request.device, None, request.pinned)) for p in parts]
        result: Tensor = type(wrapped).__tensor_unflatten__(
            dict(zip(names, copies, strict=True)), context, wrapped.size(), wrapped.stride()
        )
        return result
    new = torch.empty_like(
        local,
        dtype=request.target_dtype,
        device=request.device,
        pin_memory=request.pinned and torch.cuda.is_available(),
    )
    return new.copy_(local, non_blocking=True)


def _finish(copies: list[tuple[Tensor, torch.device]]) -> None:
    """Wait, once for each device, for copies that are asynchronous: those to the host, and those
    from pinned memory, to which its owner may write after this."""
    devices: set[torch.device] = set()
    for source, target in copies:
        if target.type == "cpu":
            if _is_real_cuda(source.device, source):
                devices.add(source.device)
        elif (
            target not in devices
            and source.device.type == "cpu"
            and _is_real_cuda(target, source)
            and any(part.is_pinned() for part in plain_parts(source))
        ):
            devices.add(target)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def _is_real_cuda(device: torch.device, tensor: Tensor) -> bool:
    return (
        device.type == "cuda" and torch.cuda.is_available() and not isinstance(tensor, FakeTensor)
    )


# --- shared memory ----------------------------------------------------------------------------


def _shared_storages(requests: Sequence[Request]) -> dict[int, tuple[Any, ...]]:
    """The requests whose tensors share a storage with another request's tensor."""
    by_storage: dict[int, list[int]] = {}
    for index, request in enumerate(requests):
        tensor = request.tensor
        if type(tensor) is Tensor and tensor.layout is torch.strided:
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(index)
    shared: dict[int, tuple[Any, ...]] = {}
    for storage, indices in by_storage.items():
        if len(indices) == 1:
            continue
        owners: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index in indices:
            r = requests[index]
            owners[storage, r.tensor.dtype, r.device, r.target_dtype, r.pinned].append(index)
        for key, group in owners.items():
            if len({id(requests[index].tensor) for index in group}) > 1:
                shared.update(dict.fromkeys(group, key))
    return shared


def _by_storage(shared: dict[int, tuple[Any, ...]]) -> dict[tuple[Any, ...], list[int]]:
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index, key in shared.items():
        groups[key].append(index)
    return groups


def _place_shared(requests: list[Request]) -> list[Tensor]:
    """Copy a whole storage once; return each of its tensors as a view at the same offset."""
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
