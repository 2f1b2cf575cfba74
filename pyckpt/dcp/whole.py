"""Values that DCP would take apart or alter, in the form in which they are saved; and back.

DCP takes dicts apart, and lists that hold tensors or dicts; each part becomes an item. On the way
it turns the keys of dicts into strings and forgets dicts that are empty. So what holds no tensors
is saved as one item, a `Whole`, whose bytes are those of the value itself: stock PyTorch loads it
as it was. A dict that holds tensors and has other keys than strings is taken apart all the same, so
that its tensors are items like any other, and has a list of its keys beside them.
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
"""Marks a value in checkpoints of pyckpt's first form, and where another planner than ours saves a
`Whole`."""
ARRAY = "pyckpt.ndarray"
"""Marks a numpy array, which loading could not make without running code: a tuple with a tensor."""
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
        # For planners that know nothing of it; what they write can be loaded without running code.
        return OrderedDict, ([[VALUE, self.value]],)


def decode(value: Any) -> Any:
    """The value that was saved: the same object where there is nothing to decode in it."""
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
            return value  # of a class that was allowed, saved as it was
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
    """`decode` what is in a dict or list, at any depth, in the containers that are there."""
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
