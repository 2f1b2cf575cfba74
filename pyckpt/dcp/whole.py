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

from pyckpt.errors import CorruptCheckpoint

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


_Memo = dict[int, tuple[Any, Any]]
"""What containers became, by their ids; with the containers, so that the ids stay theirs."""


def decode(value: Any) -> Any:
    """The value that was saved; the same object if there is nothing to decode in it.

    Raises:
        CorruptCheckpoint: it is nested deeper than this program's recursion limit.
    """
    return _decode(value, {})


def _decode(value: Any, memo: _Memo) -> Any:
    try:
        return _decoded(value, memo)
    except RecursionError:
        raise CorruptCheckpoint(
            "a saved value is nested deeper than sys.getrecursionlimit() lets it be read"
        ) from None


def _decoded(value: Any, memo: _Memo) -> Any:
    if type(value) in _ATOMS or isinstance(value, torch.Tensor):
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    memo[id(value)] = value, value  # what holds itself has nothing to decode there
    made = _decoded_container(value, memo)
    memo[id(value)] = value, made
    return made


def _decoded_container(value: Any, memo: _Memo) -> Any:
    if isinstance(value, Whole):
        return _decoded(value.value, memo)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        if value[0] == VALUE:
            return _decoded(value[1], memo)
        if value[0] == ARRAY:
            return value[1].numpy()
    if type(value) in (tuple, list):
        decoded = [_decoded(sub, memo) for sub in value]
        if all(one is other for one, other in zip(decoded, value, strict=True)):
            return value
        return type(value)(decoded)
    if isinstance(value, Mapping):
        if len(value) == 1 and VALUE in value:
            return _decoded(value[VALUE], memo)
        if type(value) not in (dict, OrderedDict, Counter):
            return value  # the program allowed its class, so it was saved as it is
        by_key = {key: _decoded(sub, memo) for key, sub in value.items()}
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
    """`decode` the entries of a dict or list, at any depth. The containers themselves stay.

    Raises:
        CorruptCheckpoint: as `decode`.
    """
    memo: _Memo = {}
    seen: dict[int, Any] = {}
    left = [container]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            _decode_entries(one, left, memo)


def _decode_entries(container: Any, left: list[Any], memo: _Memo) -> None:
    """Decode the entries that give way to others, and note those to go on with."""
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
            container[key] = _decode(value, memo)
        elif isinstance(value, dict) or type(value) is list:
            left.append(value)
        elif type(value) is tuple or isinstance(value, Whole):
            container[key] = _decode(value, memo)


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def is_special(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse or quantised: more than its elements, and no class of its own."""
    return type(tensor) in _PLAIN and (tensor.layout is not torch.strided or tensor.is_quantized)
