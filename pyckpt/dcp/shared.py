"""Staged state on its way to another process (``async_checkpointer_type=PROCESS``).

DCP pickles the state through a pipe. There torch.multiprocessing would move every tensor's storage
into a piece of shared memory of its own, which costs a descriptor and a copy each. It would also
exchange the memory of the program's own tensors for memory that the other process sees. So this
module makes the tensors that are sent: views of the few segments in which the copies lie, or copies
of tensors that lie in no segment.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.dcp.leaves import dtensor_like, is_checkpointable, is_plain_type
from pyckpt.dcp.staging import Staging

__all__ = ["StagedStateDict"]


class StagedStateDict(dict[str, Any]):
    """A staged state dict on its way to DCP.

    It pickles as plain dicts and lists of tensors in shared memory; pickling waits until the copies
    are whole. DCP pickles it in a thread that it starts for this save. The memory is given back
    when that thread ends.
    """

    def __init__(self, values: dict[str, Any], staging: Staging) -> None:
        super().__init__(values)
        self.staging = staging

    def __del__(self) -> None:
        self.staging.drop()

    def __reduce__(self) -> tuple[Any, ...]:
        self.staging.take_over()
        if self.staging.given_up is not None:
            raise self.staging.given_up
        self.staging.end_planning()  # the other process plans
        self.staging.settle()
        segments: dict[int, torch.UntypedStorage] = {}
        return dict, ({key: _shared(value, segments) for key, value in self.items()},)


def _shared(value: Any, segments: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, dict):
        return {key: _shared(entry, segments) for key, entry in value.items()}
    if isinstance(value, list):
        return [_shared(entry, segments) for entry in value]
    if isinstance(value, DTensor):
        local = _shared(value._local_tensor, segments)
        # torch takes a DTensor for a wrapper of another tensor only if its data pointer is null.
        # The pointer is not null for a view that does not begin with its storage. So the DTensor is
        # made around an empty tensor.
        made = dtensor_like(value, local.new_empty(0))
        made._local_tensor = local
        return made
    if not isinstance(value, torch.Tensor) or not is_plain_type(value) or value.is_meta:
        return value
    return _described(_in_shared_memory(value, segments), value)


def _in_shared_memory(
    value: torch.Tensor, segments: dict[int, torch.UntypedStorage]
) -> torch.Tensor:
    place = _C.shared_memory_of(value) if value.layout is torch.strided and value.numel() else None
    if place is None:
        # The memory is private to this process; or the copies found no room, and it is the
        # program's own.
        return value.detach().to("cpu", copy=True)
    descriptor, size, offset = place
    storage = segments.get(descriptor)
    if storage is None:
        share_fd: Any = torch.UntypedStorage
        storage = segments[descriptor] = share_fd._new_shared_fd_cpu(os.dup(descriptor), size)
    view = torch.empty(0, dtype=value.dtype, device="cpu")
    return view.set_(storage, offset // value.itemsize, value.shape, value.stride())


class _Described:
    """Pickles as a tensor with its attributes, which torch itself would leave out."""

    def __init__(self, tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
        self._parts = tensor, attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return _with, self._parts


def _with(tensor: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    vars(tensor).update(attributes)
    return tensor


def _described(tensor: torch.Tensor, original: torch.Tensor) -> Any:
    """The tensor, with the attributes of the original that say where its parts belong, if any."""
    if not is_checkpointable(original):
        return tensor
    names = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
    return _Described(tensor, {name: getattr(original, name) for name in names})
