"""Tensors in nested state: finding them, replacing them, and finding the tensors in subclasses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Path = tuple[Hashable, ...]

__all__ = [
    "Path",
    "any_index",
    "is_dtensor",
    "is_plain",
    "leaves",
    "mapped",
    "on_local_shard",
    "plain_parts",
    "replace",
]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested dictionaries, lists and tuples, with the keys and indices to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*path, key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*path, index))


def mapped(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """A copy of nested containers with ``change(path, leaf)`` in place of every leaf.

    Containers keep their class. It must be possible to make one from its entries, as
    `Optimizer.load_state_dict` also expects.
    """
    if isinstance(value, dict):
        entries = {key: mapped(entry, change, (*path, key)) for key, entry in value.items()}
        return entries if type(value) is dict else _of_class(value, entries)
    if isinstance(value, list | tuple):
        items = [mapped(entry, change, (*path, index)) for index, entry in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*items)  # a named tuple
        return type(value)(items)
    return change(path, value)


def _of_class(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    copy = value.copy()  # keeps the default factory, and other attributes of the class
    copy.clear()
    copy.update(entries)
    return copy


def replace(container: Any, path: Path, new: Tensor) -> Any:
    """Put ``new`` at ``path``, in place but for tuples; returns the container."""
    if not path:
        return new
    head: Any = path[0]
    entry = replace(container[head], path[1:], new)
    if isinstance(container, tuple):
        items = [*container[:head], entry, *container[head + 1 :]]
        return type(container)(*items) if hasattr(container, "_fields") else type(container)(items)
    container[head] = entry
    return container


def any_index(container: Any, path: Path) -> Path:
    """The path with ``...`` in place of the indices of lists, since entries of lists are alike, and
    their number changes."""
    if len(path) == 1:
        return path
    generic: list[Hashable] = []
    for key in path:
        generic.append(... if isinstance(container, list | tuple) else key)
        container = container[key]
    return tuple(generic)


def is_dtensor(value: Any) -> bool:
    # Importing the module takes long. A program that has a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    cls = getattr(module, "DTensor", None)  # None while that module is being imported
    return cls is not None and isinstance(value, cls)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided memory and nothing else: no subclass that wraps other tensors."""
    if type(tensor) is Tensor or type(tensor) is FakeTensor:
        return tensor.layout is torch.strided
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors in a tensor: itself, its local shard, or the tensors that it wraps."""
    if is_plain(tensor):
        yield tensor
    elif is_dtensor(tensor):
        yield from plain_parts(tensor._local_tensor)  # type: ignore[attr-defined]
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from plain_parts(getattr(tensor, name))


def on_local_shard(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the local tensor of this rank, and a function that makes a tensor like the given one
    from a new local tensor."""
    if not is_dtensor(tensor):
        return tensor, lambda new: new

    def rewrapped(new: Tensor) -> Tensor:
        # Not DTensor.from_local, which moves the shard to the device of the mesh. A new DTensor,
        # since one keeps the device and the dtype of the shard that it was made with.
        whole: Any = tensor
        meta = whole._spec.tensor_meta._replace(dtype=new.dtype)
        spec = dataclasses.replace(whole._spec, tensor_meta=meta)
        result: Tensor = type(whole)(new, spec, requires_grad=False)
        return result

    return tensor._local_tensor, rewrapped  # type: ignore[attr-defined]
