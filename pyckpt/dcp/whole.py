"""Values that DCP would take apart or alter: the form in which they are saved, and the way back.

DCP takes apart dicts, and lists that hold tensors or dicts; each part becomes an item. It turns the
keys of dicts into strings, and forgets empty dicts. So a value without tensors is saved as one
item, a `Whole`. The bytes of the item are those of the value itself, which stock PyTorch loads as
it was. A dict that holds tensors is taken apart even if it has other keys than strings, so that its
tensors are items like any other. A list of its true keys is saved beside them.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["ARRAY", "KEYS", "VALUE", "Whole", "decode", "decode_in_place", "is_special"]

VALUE = "pyckpt.value"
"""Marks a value in checkpoints of pyckpt's first form, and in those for which another planner than
ours has saved a `Whole`."""
ARRAY = "pyckpt.ndarray"
"""Marks a numpy array. It is saved as a tuple with a tensor, because loading an array would run
code."""
KEYS = "pyckpt.keys"
"""The key, in a dict that was taken apart, of the list of its true keys."""

_ATOMS = frozenset((int, float, complex, str, bytes, bytearray, bool, type(None)))


class Whole:
    """A value to be saved as one item. `SavePlanner` writes the value in its place."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return Whole(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> Any:
        # For planners that do not know this class. What they write then loads without running code.
        return OrderedDict, ([[VALUE, self.value]],)


def decode(value: Any) -> Any:
    """The value that was saved; the same object if there is nothing to decode in it."""
    if type(value) in _ATOMS or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Whole):
        return decode(value.value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        if value[0] == VALUE:
            return decode(value[1])
        if value[0] == ARRAY:
            return value[1].numpy()
    if type(value) in (tuple, list):
        decoded = [decode(sub) for sub in value]
        if all(one is other for one, other in zip(decoded, value, strict=True)):
            return value
        return type(value)(decoded)
    if isinstance(value, Mapping):
        if len(value) == 1 and VALUE in value:
            return decode(value[VALUE])
        if type(value) not in (dict, OrderedDict, Counter):
            return value  # the program allowed its class, so it was saved as it is
        by_key = {key: decode(sub) for key, sub in value.items()}
        if isinstance(by_key.get(KEYS), list):
            return _rekeyed(by_key)
        if all(sub is value[key] for key, sub in by_key.items()):
            return value
        kind: Any = type(value)
        return by_key if kind is dict else kind(by_key)
    return value


def _rekeyed(value: dict[Any, Any]) -> dict[Any, Any]:
    keys = value.pop(KEYS)
    by_name = {str(key): sub for key, sub in value.items()}
    rekeyed = {key: by_name.pop(str(key)) for key in keys if str(key) in by_name}
    return rekeyed | by_name


def decode_in_place(container: Any) -> None:
    """`decode` the entries of a dict or list, at any depth. The containers themselves stay."""
    if isinstance(container, dict):
        if isinstance(container.get(KEYS), list):
            rekeyed = _rekeyed(container)
            container.clear()
            container.update(rekeyed)
        places: Any = list(container.items())
    else:
        places = list(enumerate(container))
    for key, value in places:
        if isinstance(value, dict) and len(value) == 1 and VALUE in value:
            container[key] = decode(value)
        elif type(value) in (dict, OrderedDict, list):
            decode_in_place(value)
        elif type(value) is tuple or isinstance(value, Whole):
            container[key] = decode(value)


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def is_special(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse or quantised: more than its elements, and no class of its own."""
    return type(tensor) in _PLAIN and (tensor.layout is not torch.strided or tensor.is_quantized)
