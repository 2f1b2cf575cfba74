"""The leaves of a state dict: which kinds there are, and how those that are not plain memory are
copied."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from pyckpt.private import AsyncCollectiveTensor, is_checkpointable_tensor

__all__ = [
    "Leaves",
    "copy_object",
    "dtensor_like",
    "is_checkpointable",
    "is_memory",
    "is_plain_type",
    "is_sharded_tensor",
    "local_tensor",
    "plans_itself",
    "tell_autograd",
    "values_of",
    "whole_size",
    "with_attributes",
]

# Nobody can change values of these types, so a reference is as good as a copy.
_IMMUTABLE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The part of a DTensor that is here."""
    local = tensor._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def is_plain_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class gives its memory no meaning of its own."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@lru_cache(maxsize=256)
def _is_sharded_type(cls: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == _SHARDED for base in cls.__mro__)


_SHARDED = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


def is_sharded_tensor(value: object) -> bool:
    """Whether a value is a ``ShardedTensor``, which `pyckpt.dcp.sharded_tensors` handles. The name
    of the value's class tells it, so that a program without such tensors never imports that
    module."""
    cls: Any = type(value)
    return _is_sharded_type(cls)


def plans_itself(value: object) -> bool:
    """Whether DCP asks the value itself which parts it holds. For all other values, DCP knows the
    parts from type and shape. Each value is asked, and not its type, because a program may give
    these attributes to any tensor."""
    return hasattr(value, "__create_write_items__") or hasattr(value, "global_offsets")


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is its elements in memory and nothing more."""
    return is_plain_type(tensor) and tensor.layout is torch.strided and not plans_itself(tensor)


def is_checkpointable(tensor: torch.Tensor) -> bool:
    """Whether this torch takes a tensor for parts of a larger one: a ``CheckpointableTensor``."""
    # This attribute is looked for first, since torch's own check takes microseconds a tensor.
    return hasattr(tensor, "global_offsets") and bool(is_checkpointable_tensor(tensor))


def whole_size(tensor: torch.Tensor) -> torch.Size:
    """The size of a tensor, or of the larger tensor of which it holds parts."""
    if is_checkpointable(tensor):
        whole: Any = tensor
        return torch.Size(whole.global_shape)
    return tensor.shape


def first_on_meta(state: dict[Any, Any] | list[Any]) -> str | None:
    """The name of a tensor without memory, on the meta device, in nested dicts and lists; None if
    there is none. They contain themselves nowhere, as in a state that is saved."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, torch.Tensor):
            if not is_sharded_tensor(value) and value.is_meta:
                return str(key)
        elif isinstance(value, dict | list):
            found = first_on_meta(value)
            if found is not None:
                return f"{key}.{found}"
    return None


def with_attributes(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """A copy with the attributes that the program set on the original, such as where its parts
    belong."""
    for name, value in vars(original).items():
        vars(copy).setdefault(name, value)
    return copy


class _ToHost(TorchFunctionMode):
    """Tensors that ``copy.deepcopy`` comes upon are copied to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and is_plain_type(args[0]):
            tensor, memo = args
            copied = tensor.detach().to("cpu", copy=True)
            memo[id(tensor)] = copied
            return copied
        return func(*args, **(kwargs or {}))


def copy_object(value: Any) -> Any:
    """A copy of an object that DCP will pickle. Tensors in the copy are on the host."""
    with torch.no_grad(), _ToHost():
        return copy.deepcopy(value)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is more than its memory: sparse, quantized, of its own class."""
    with torch.no_grad():
        return with_attributes(tensor.detach().to("cpu", copy=True), tensor)


def _same_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if plans_itself(tensor):
        return _copy_tensor(tensor)
    return with_attributes(tensor.detach(), tensor)


def _same_object(value: Any) -> Any:
    return copy_object(value) if plans_itself(value) else value


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor placed as another is, with other memory."""
    make: Any = DTensor
    made: DTensor = make(local, tensor._spec, requires_grad=False)
    return made


@dataclass(frozen=True)
class _Wrapped:
    """A leaf that wraps other tensors, and has no memory besides theirs."""

    index: int
    parts: Callable[[Any], list[torch.Tensor]]
    wrap: Callable[[Any, list[torch.Tensor]], Any]


class Leaves:
    """How to copy the leaves of state dicts of one shape."""

    def __init__(self, leaves: list[Any]) -> None:
        self._wrapped: list[_Wrapped] = []
        self._objects: list[int] = []
        self._with_attributes: list[int] = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in _IMMUTABLE:
                    self._objects.append(i)
            elif isinstance(leaf, DTensor):
                self._wrapped.append(
                    _Wrapped(
                        i, lambda t: [local_tensor(t)], lambda t, parts: dtensor_like(t, parts[0])
                    )
                )
            elif is_sharded_tensor(leaf):
                from pyckpt.dcp import sharded_tensors

                self._wrapped.append(_Wrapped(i, sharded_tensors.local_parts, sharded_tensors.like))
            elif plans_itself(leaf):
                self._with_attributes.append(i)

    def sources(self, leaves: list[Any]) -> list[Any]:
        """The leaves, followed by the tensors that the wrapping leaves consist of."""
        if not self._wrapped:
            return leaves
        return leaves + [part for leaf in self._wrapped for part in leaf.parts(leaves[leaf.index])]

    def sources_wanted(self, leaves: list[Any], wanted: bytes) -> bytes:
        """Which of the `sources` are wanted, a byte each, given the same for the leaves."""
        return wanted + b"".join(
            wanted[leaf.index : leaf.index + 1] * len(leaf.parts(leaves[leaf.index]))
            for leaf in self._wrapped
        )

    def finish(self, leaves: list[Any], copies: list[Any]) -> list[Any]:
        """Make a list of copied leaves. ``copies`` are those of the `sources`, with None for a
        source that could not be copied as memory."""
        return self._finish(leaves, copies, _copy_tensor, copy_object)

    def outline(self, leaves: list[Any], copies: list[Any]) -> list[Any]:
        """`finish`, but what is not plain memory is not copied, unless it says itself how it is to
        be saved. Only types and shapes are to be looked at."""
        return self._finish(leaves, copies, _same_tensor, _same_object)

    def _finish(
        self,
        leaves: list[Any],
        copies: list[Any],
        copy_tensor: Callable[[torch.Tensor], torch.Tensor],
        copy_object: Callable[[Any], Any],
    ) -> list[Any]:
        count = len(leaves)
        done = copies[:count]
        at = count
        for leaf in self._wrapped:
            original = leaves[leaf.index]
            sources = leaf.parts(original)
            parts = copies[at : at + len(sources)]
            at += len(sources)
            parts = [
                copy_tensor(source) if part is None else part
                for source, part in zip(sources, parts, strict=True)
            ]
            done[leaf.index] = leaf.wrap(original, parts)
        for i in self._objects:
            done[i] = copy_object(leaves[i])
        for i in _missing(done):
            leaf = leaves[i]
            done[i] = copy_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for i in self._with_attributes:
            done[i] = with_attributes(done[i], leaves[i])
        return done


def _missing(values: Iterable[Any]) -> list[int]:
    return [i for i, value in enumerate(values) if value is None]


def values_of(planner: Any, keys: Iterable[str]) -> list[Any]:
    """The values of the state that a planner has under these keys; none where it keeps no state."""
    values = getattr(planner, "state_dict", None)
    return list(map(values.get, keys)) if isinstance(values, Mapping) else []


def tell_autograd(filled: Iterable[Any]) -> None:
    """Say that the engine has written to tensors, as torch's own operations say it of theirs. A
    backward pass that needs the values from before raises then, and computes nothing wrong."""
    tensors = [one for one in filled if isinstance(one, torch.Tensor)]
    tensors += [one._local_tensor for one in tensors if isinstance(one, DTensor)]
    # Those made in inference mode count no changes.
    torch.autograd.graph.increment_version([one for one in tensors if not one.is_inference()])
