"""Values as DCP can save them and loading gives them back, alike.

DCP takes dicts apart, and lists that hold tensors or dicts, and each part becomes an item. On the
way it turns the keys of dicts into strings and forgets dicts that are empty. `encode` leaves dicts
with string keys to it, and hides others in a tuple, which DCP saves whole; `decode` takes them out.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.serialization import get_safe_globals

from pyckpt.train.saved import Tree

__all__ = ["absent", "assign", "atoms", "decode", "encode", "template"]

_VALUE = "pyckpt.value"
_ARRAY = "pyckpt.ndarray"
_DETACHED = (torch.Tensor, nn.Parameter, DTensor)
_ATOMS = (int, float, complex, str, bytes, bytearray, bool, type(None), torch.dtype, torch.device)
_ATOM_TYPES = frozenset(_ATOMS)


def encode(value: Any, name: str, *, compact: bool = False) -> Any:
    """Make a value one that DCP saves without losing anything. Tensors stay what they are.

    Args:
        value: tensors, numbers, strings, None, numpy arrays, and dicts, lists, tuples and sets of
            them.
        name: what to call it in errors.
        compact: save whatever holds no tensors as one item, however deep it is.

    Raises:
        TypeError: it contains an object that loading, which runs no code from files, could not
            make; it is better to know when saving.
    """
    if isinstance(value, torch.Tensor):
        # FSDP1's ShardedTensor says that it is to have none of this.
        return value.detach() if type(value) in _DETACHED and value.requires_grad else value
    if _is_natural(value) and value and not (compact and not _has_tensor(value)):
        return {key: encode(sub, f"{name}.{key}", compact=compact) for key, sub in value.items()}
    if type(value) is list and _has_tensor(value):
        return [encode(sub, f"{name}.{i}", compact=compact) for i, sub in enumerate(value)]
    plain = _plain(value, name)
    if isinstance(plain, Mapping) or (isinstance(plain, list) and _has_mapping(plain)):
        return (_VALUE, plain)
    return plain


def decode(value: Any) -> Any:
    """The value that `encode` was given."""
    if type(value) in _ATOM_TYPES or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], str):
            if value[0] == _VALUE:
                return decode(value[1])
            if value[0] == _ARRAY:
                return value[1].numpy()
        return value if type(value) is not tuple else tuple(decode(sub) for sub in value)
    if type(value) is list:
        return [decode(sub) for sub in value]
    if isinstance(value, Mapping):
        decoded = {key: decode(sub) for key, sub in value.items()}
        return decoded if type(value) is dict else type(value)(decoded)  # type: ignore[call-arg]
    return value


def template(live: Any, saved: Tree) -> Any:
    """What to load a saved value into: the live value's tensors where they fit, and None, which
    stands for whatever was saved, everywhere else.

    Args:
        live: the value as it is, encoded.
        saved: what the checkpoint holds of it.
    """
    if not isinstance(saved, dict):
        fits = (
            isinstance(saved, TensorStorageMetadata)
            and isinstance(live, torch.Tensor)
            and live.shape == saved.size
            and not live.is_meta
        )
        return live if fits else None
    parts = {part: template(_part(live, part), sub) for part, sub in saved.items()}
    if all(part is None for part in parts.values()):
        return None
    if all(isinstance(part, int) for part in parts):
        return [parts.get(i) for i in range(1 + max(int(part) for part in parts))]
    return parts


def absent(live: Any, saved: Any, name: str) -> list[str]:
    """Keys of a live value that a program counts on, and that were not saved: those of dicts in
    dicts, as far as all keys are strings. What is in lists, and under other keys, is data.

    Args:
        live: the value as it is.
        saved: what was loaded for it; or, before that, what the checkpoint holds of it.
        name: what to call it.
    """
    if not (_is_natural(live) and _is_natural(saved)):
        return []
    found = [f"{name}.{key}" for key in live if key not in saved]
    for key in live.keys() & saved.keys():
        found += absent(live[key], saved[key], f"{name}.{key}")
    return sorted(found)


def atoms(value: Any, name: str) -> dict[str, Any]:
    """The numbers, strings and the like in a value, and in dicts in it, by key."""
    if _is_natural(value):
        found: dict[str, Any] = {}
        for key, sub in value.items():
            found |= atoms(sub, f"{name}.{key}")
        return found
    return {name: value} if type(value) in _ATOM_TYPES else {}


def assign(live: Any, loaded: Any, *, keep: bool = False) -> Any:
    """Fill a live dict or list with what was loaded, at any depth, so that references to it stay
    good. Returns what is to stand in its place: itself, or the loaded value if it is no container.

    Args:
        keep: leave what `absent` tells of where it is.
    """
    if isinstance(live, MutableMapping) and isinstance(loaded, Mapping):
        keep = keep and _is_natural(live) and _is_natural(loaded)
        merged = {
            k: assign(live[k], sub, keep=keep) if k in live else sub for k, sub in loaded.items()
        }
        if keep:
            merged |= {k: sub for k, sub in live.items() if k not in loaded}
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, list) and isinstance(loaded, list):
        live[:] = [assign(live[i], sub) if i < len(live) else sub for i, sub in enumerate(loaded)]
        return live
    return loaded


def _plain(value: Any, name: str) -> Any:
    """Check that a value can be loaded without running code; make numpy's torch's or Python's."""
    kind = type(value)
    if kind in _ATOM_TYPES or isinstance(value, torch.Tensor):
        return value
    if kind in (list, tuple, set, torch.Size):
        return kind(_plain(sub, name) for sub in value)
    if kind in (dict, OrderedDict, Counter):
        return kind({_plain(k, name): _plain(sub, f"{name}.{k}") for k, sub in value.items()})
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic):
            return _plain(value.item(), name)
        if kind is numpy.ndarray and value.dtype.kind in "biufc":
            # A copy: the array is live, and so is an object that no stager knows to copy.
            return (_ARRAY, torch.from_numpy(value.copy()))
    if kind in get_safe_globals():
        return value
    raise TypeError(
        f"{name} is or contains a {kind.__module__}.{kind.__qualname__}, which loading, running no "
        "code from files, could not make again; save plain values and tensors of it, or allow it "
        "with torch.serialization.add_safe_globals"
    )


def _part(live: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return live[part] if isinstance(live, list) and part < len(live) else None
    return live.get(part) if isinstance(live, Mapping) else None


def _is_natural(value: Any) -> bool:
    """Whether DCP takes it apart as a dict."""
    return (
        isinstance(value, dict)
        and not isinstance(value, Counter)
        and all(type(key) is str for key in value)
    )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(sub) for sub in value.values())
    return isinstance(value, list) and any(_has_tensor(sub) for sub in value)


def _has_mapping(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and any(_has_mapping(sub) for sub in value)
