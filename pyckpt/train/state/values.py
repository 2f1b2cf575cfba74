"""Converts plain values to a form that DCP saves without loss, and back; see `pyckpt.dcp.whole`."""

from __future__ import annotations

import copy
import io
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.serialization import get_safe_globals

from pyckpt.dcp import objects
from pyckpt.dcp.leaves import first_on_meta, is_plain_type, whole_size
from pyckpt.dcp.whole import ARRAY, KEYS, VALUE, Whole, decode, is_special
from pyckpt.errors import PyckptError
from pyckpt.train.state.claims import Claims, is_alike
from pyckpt.train.state.saved import Path, Tree

__all__ = [
    "absent",
    "assign",
    "at",
    "atoms",
    "decode",
    "encode",
    "is_trained",
    "marked",
    "of_other_shape",
    "refuse_meta",
    "template",
    "tensors",
]

_DETACHED = (torch.Tensor, nn.Parameter, DTensor)
_ATOMS = (int, float, complex, str, bytes, bytearray, bool, type(None), torch.dtype, torch.device)
_ATOM_TYPES = frozenset(_ATOMS)
_CONTAINERS = frozenset((list, tuple, set, torch.Size, dict, OrderedDict, Counter))
# What these keep as attributes of a dict is not the program's: the versions of a module's state.
_DICT_PACKAGES = frozenset(("builtins", "collections", "torch"))
_MAY_BE_NESTED = frozenset(("Tensor", "Parameter", "Buffer", "NestedTensor"))
_SHARED = -1  # no object has this id
_BEGUN = object()
# Classes of tensors, besides torch's own, for which saving and loading was tried.
_proven: set[type] = set()


def marked(value: Any) -> Any:
    """Used in place of a `Whole` if stock's planners save the value."""
    return (VALUE, value)


def encode(
    value: Any, name: str, *, compact: bool = False, whole: Callable[[Any], Any] = Whole
) -> Any:
    """Convert a value to a form that DCP saves without loss. Tensors are not changed.

    Args:
        value: tensors, numbers, strings, None, numpy arrays, and dicts, lists, tuples and sets of
            them.
        name: what to call it in errors.
        compact: save a value without tensors as one item, however deep it is.
        whole: makes one item of a value that DCP would take apart.

    Raises:
        TypeError: it contains itself, or an object that could not be loaded, since loading runs no
            code from files. Saving raises this, since an error while loading would come too late.
    """
    try:
        return _encode(value, name, compact=compact, whole=whole)
    except RecursionError:
        raise TypeError(
            f"{name} contains itself, or is nested deeper than sys.getrecursionlimit() lets it be "
            "saved"
        ) from None


def _encode(value: Any, name: str, *, compact: bool, whole: Callable[[Any], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, name, whole)
    if isinstance(value, dict) and type(value) is not Counter and value and not _is_object(value):
        has_tensor = _has_tensor(value)
        if _is_natural(value) and (has_tensor or not compact):
            keys = {}
        elif has_tensor:
            keys = {KEYS: _keys(value, name)}
        else:
            return whole(_plain(value, name))
        return {
            str(key): _encode(sub, f"{name}.{key}", compact=compact, whole=whole)
            for key, sub in value.items()
        } | keys
    if type(value) is list and _has_tensor(value):
        return [
            _encode(sub, f"{name}.{i}", compact=compact, whole=whole) for i, sub in enumerate(value)
        ]
    memo: dict[int, Any] = {}
    plain = _plain(value, name, memo)
    if isinstance(plain, Mapping) or (
        # DCP looks at what is in a list as often as it is met.
        isinstance(plain, list) and (_SHARED in memo or _has_mapping(plain))
    ):
        return whole(plain)
    return plain


def _tensor(value: torch.Tensor, name: str, whole: Callable[[Any], Any]) -> Any:
    _refuse_nested(value, name)
    if type(value) in _DETACHED and value.requires_grad:
        value = value.detach()  # FSDP1's ShardedTensor must not be detached
    if is_special(value):
        # If the state has no tensor, stock makes a dense one, into which it cannot copy this.
        return whole(value)
    if not is_plain_type(value) and not _has_chunks(value) and type(value) not in _proven:
        _prove(value, name)
        _proven.add(type(value))
    return value


def _refuse_nested(value: torch.Tensor, name: str) -> None:
    # FSDP1's ShardedTensor must not be asked.
    if type(value).__name__ in _MAY_BE_NESTED and value.is_nested:
        raise TypeError(
            f"{name} is a nested tensor, which cannot be saved; save a list of its tensors, as "
            "unbind() gives them"
        )


def _keys(value: dict[Any, Any], name: str) -> list[Any]:
    """The keys of a dict that DCP is to take apart.

    Raises:
        TypeError: two keys would have the same name.
    """
    keys = [_plain(key, name) for key in value]
    names = [str(key) for key in keys]
    if KEYS in names or len(set(names)) < len(names):
        raise TypeError(
            f"{name} has tensors under keys that are the same as strings, and could not be told "
            "apart when it is loaded; rename some"
        )
    return keys


def refuse_meta(states: dict[str, Any]) -> None:
    """Refuse to save tensors that have no values.

    Args:
        states: encoded values, by name.

    Raises:
        TypeError: one is on the meta device.
    """
    name = first_on_meta(states)
    if name is not None:
        raise TypeError(f"{name} is on the meta device; materialize it first: it has no values")


def template(
    live: Any,
    saved: Tree,
    given: Mapping[Path, Any] | None = None,
    place: Callable[[Path, torch.Tensor], torch.Tensor | None] = lambda _, tensor: tensor,
) -> Any:
    """The tree to load a saved value into: the live value's tensors if they fit, and None, which
    takes any saved value, everywhere else.

    Args:
        live: the live value, encoded.
        saved: the saved tree.
        given: what to load into at some paths of the tree.
        place: what to load into where a live tensor fits, given its path and it.
    """
    return _template(live, saved, given or {}, place, ())


def _template(
    live: Any,
    saved: Tree,
    given: Mapping[Path, Any],
    place: Callable[[Path, torch.Tensor], torch.Tensor | None],
    path: Path,
) -> Any:
    if path in given:
        return given[path]
    if not isinstance(saved, dict):
        fits = (
            isinstance(saved, TensorStorageMetadata)
            and isinstance(live, torch.Tensor)
            and live.shape == saved.size
            and not live.is_meta
        )
        return place(path, live) if fits else None
    parts = {
        part: _template(_part(live, part), sub, given, place, (*path, part))
        for part, sub in saved.items()
    }
    if all(part is None for part in parts.values()):
        return None
    if all(isinstance(part, int) for part in parts):
        return [parts.get(i) for i in range(1 + max(int(part) for part in parts))]
    return parts


def of_other_shape(
    live: Any, saved: Tree, path: Path = ()
) -> Iterator[tuple[Path, torch.Tensor, torch.Size]]:
    """The tensors of a live value that have another shape in the checkpoint, each with its path in
    the saved tree and its saved shape.

    Args:
        live: the live value, not encoded.
        saved: the saved tree.
        path: of both, which is put before those that are returned.
    """
    if isinstance(live, torch.Tensor):
        if (
            isinstance(saved, TensorStorageMetadata)
            and not is_special(live)
            and whole_size(live) != saved.size
        ):
            yield path, live, saved.size
    elif isinstance(saved, dict):
        if isinstance(live, Mapping):
            live = {str(key): sub for key, sub in live.items()}  # as it was encoded
        for part, sub in saved.items():
            yield from of_other_shape(_part(live, part), sub, (*path, part))


def at(value: Any, path: Path) -> Any:
    """What is at a path of a live value that was not encoded; None if there is nothing."""
    for part in path:
        if isinstance(value, Mapping) and part not in value:  # a key that is no string
            value = {str(key): sub for key, sub in value.items()}
        value = _part(value, part)
    return value


def tensors(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dicts and lists, at any depth, each with its last key."""
    for one in _within({"": value}, (Mapping, list)):
        parts = (
            one.items()
            if isinstance(one, Mapping)
            else enumerate(one)
            if isinstance(one, list)
            else ()
        )
        for key, sub in parts:
            if isinstance(sub, torch.Tensor):
                yield str(key), sub


def is_trained(tensor: torch.Tensor) -> bool:
    """Whether an optimizer may hold this very tensor, so that no other can take its place."""
    return tensor.requires_grad or isinstance(tensor, nn.Parameter | DTensor)


def absent(live: Any, saved: Any, name: str) -> list[str]:
    """Keys of a live value that were not saved. Only keys of nested dicts whose keys are all
    strings count. The content of lists, and of other dicts, is data.

    Args:
        live: the live value.
        saved: the loaded value; or, before loading, the saved tree.
        name: of the value.
    """
    if not (_is_natural(live) and _is_natural(saved)):
        return []
    found = [f"{name}.{key}" for key in live if key not in saved]
    for key in live.keys() & saved.keys():
        found += absent(live[key], saved[key], f"{name}.{key}")
    return sorted(found)


def atoms(value: Any, name: str) -> dict[str, Any]:
    """The numbers, strings and other atoms in a value, and in nested dicts, by key."""
    if _is_natural(value):
        found: dict[str, Any] = {}
        for key, sub in value.items():
            found |= atoms(sub, f"{name}.{key}")
        return found
    return {name: value} if type(value) in _ATOM_TYPES else {}


def assign(live: Any, loaded: Any, claims: Claims | None = None, *, keep: bool = False) -> Any:
    """Fill a live dict or list with loaded values, at any depth, so that references to it stay
    valid. Returns the value for the state: the live container, or the loaded value. A container
    that stands in several places stays one if the same was loaded for all of them. Otherwise it is
    filled for the first of them, and the others get one like it.

    Args:
        claims: what this restore has filled, if it fills more than this.
        keep: keep the entries that `absent` lists.
    """
    claims = Claims() if claims is None else claims
    if isinstance(live, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return _filled(live, loaded, claims)
    is_dict = isinstance(live, MutableMapping) and isinstance(loaded, Mapping)
    if not is_dict and not (isinstance(live, list) and isinstance(loaded, list)):
        return loaded
    known = claims.containers.get(id(live))
    if known is None:
        before: Any = dict(live) if is_dict else list(live)
        claims.containers[id(live)] = live, loaded, before
    else:
        _, other, before = known
        if is_alike(other, loaded):
            return live  # as far as can be seen, it stood in both places when it was saved, too
        live = copy.copy(live)
    if is_dict:
        keep = keep and _is_natural(before) and _is_natural(loaded)
        merged = {
            k: assign(before[k], sub, claims, keep=keep) if k in before else sub
            for k, sub in loaded.items()
        }
        if keep:
            merged |= {k: sub for k, sub in before.items() if k not in loaded}
        live.clear()
        live.update(merged)
    else:
        live[:] = [
            assign(before[i], sub, claims) if i < len(before) else sub
            for i, sub in enumerate(loaded)
        ]
    return live


def _plain(value: Any, name: str, memo: dict[int, Any] | None = None) -> Any:
    """Check that a value can be loaded without running code. Convert numpy's values to torch's or
    Python's. A container that is met again becomes one again, and is not looked at twice.

    Args:
        memo: what containers became, by their ids; with ``_SHARED`` in it where one was met again.
    """
    kind = type(value)
    if kind in _ATOM_TYPES:
        return value
    memo = {} if memo is None else memo
    if isinstance(value, dict) and kind not in _CONTAINERS and not _is_object(value):
        # Also if its class is allowed: torch then loads it only where it is empty.
        kind = next(base for base in kind.__mro__ if base in _CONTAINERS)
    if kind in _CONTAINERS and value:
        if id(value) in memo:
            memo[_SHARED] = True
            made = memo[id(value)]
            if made is _BEGUN:
                raise TypeError(f"{name} contains itself, which cannot be saved")
            return made
        memo[id(value)] = _BEGUN
        made = memo[id(value)] = (
            kind(
                {
                    _plain(key, name, memo): _plain(sub, f"{name}.{key}", memo)
                    for key, sub in value.items()
                }
            )
            if isinstance(value, dict)
            else kind(_plain_entries(value, name, memo))
        )
        return made
    if isinstance(value, torch.Tensor):
        _refuse_nested(value, name)
        if _has_chunks(value):
            raise TypeError(
                f"{name} is or contains a {kind.__name__} in a tuple or set, of which each rank "
                "would save its part only; put it into a list or a dict"
            )
        if not is_plain_type(value):
            _prove(value, name)
        return value
    if kind in _CONTAINERS:
        return kind()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, _numbers_of(numpy)) and not isinstance(value, numpy.timedelta64):
            return _plain(value.item(), name)
        if kind is numpy.ndarray and value.dtype.kind in "biufc":
            # A copy, since the array is live, and stagers do not copy the content of tuples.
            try:
                return (ARRAY, torch.from_numpy(value.copy()))
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{name} is or contains a numpy array of dtype {value.dtype.str}, which torch "
                    f"has not; convert it ({error})"
                ) from error
    if _has_state(value):
        # Even if its class is allowed: a load would make another one, and leave this one as it is.
        raise TypeError(
            f"{name} is or contains a {kind.__name__} inside of a dict or list; objects with a "
            f"state must be entries of the state itself, such as {{{name!r}: ...}}"
        )
    if kind in get_safe_globals():
        _prove(value, name)
        return value
    what = f"{kind.__module__}.{kind.__qualname__}"
    if numpy is not None and kind is numpy.ndarray:
        what += f" of dtype {value.dtype}"
    raise TypeError(
        f"{name} is or contains a {what}, which loading, running no code from files, could not "
        "make again; save plain values and tensors of it, or allow it with "
        "torch.serialization.add_safe_globals (then it is tried, at each save)"
    )


def _numbers_of(numpy: Any) -> Any:
    """Those of numpy's scalars whose ``item()`` is the same value: that of a time may be a number
    of nanoseconds."""
    return numpy.bool_, numpy.number, numpy.str_, numpy.bytes_


def _plain_entries(value: Iterable[Any], name: str, memo: dict[int, Any]) -> Iterator[Any]:
    """`_plain` of what is in a list, tuple or set, each with its place where it has one."""
    has_places = not isinstance(value, set)
    for i, sub in enumerate(value):
        if type(sub) in _ATOM_TYPES:
            yield sub
        else:
            yield _plain(sub, f"{name}.{i}" if has_places else name, memo)


def _is_object(value: dict[Any, Any]) -> bool:
    """Whether a dict is more than its entries: an object of a class of the program's own, with
    attributes or a state, which would be lost if it were taken apart."""
    kind = type(value)
    if kind in _CONTAINERS or kind.__module__.partition(".")[0] in _DICT_PACKAGES:
        return False
    # Some classes show their entries as attributes, too: these are saved.
    attributes = getattr(value, "__dict__", {})
    return _has_state(value) or any(
        key not in value or value[key] is not attribute for key, attribute in attributes.items()
    )


def _has_state(value: Any) -> bool:
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(map(callable, methods))


def _prove(value: Any, name: str) -> None:
    """Save and load an object, since an allowed class is not always enough: an empty deque can be
    loaded, but one with entries cannot.

    Raises:
        TypeError: it can be saved, but not loaded.
    """
    kind = type(value)
    file = io.BytesIO()
    torch.save(value, file)  # its own errors explain best why it fails
    file.seek(0)
    try:
        objects.load(file, name, device=torch.device("cpu"))
    except (PyckptError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise TypeError(
            f"{name} is or contains a {kind.__module__}.{kind.__qualname__}, which is allowed, and "
            f"yet cannot be loaded without running code from files; save plain values and tensors "
            f"of it, such as a list ({_reason(why)})"
        ) from error


def _reason(lines: list[str]) -> str:
    """The line of torch's error message that names the cause."""
    return next((line for line in reversed(lines) if "only append" in line), lines[0][:200])


def _part(live: Any, part: str | int) -> Any:
    if isinstance(part, int):
        return live[part] if isinstance(live, list) and part < len(live) else None
    return live.get(part) if isinstance(live, Mapping) else None


def _is_natural(value: Any) -> bool:
    """Whether a value is a dict that DCP can take apart."""
    return (
        isinstance(value, dict)
        and not isinstance(value, Counter)
        and all(type(key) is str for key in value)
    )


def _has_chunks(value: torch.Tensor) -> bool:
    """Whether a tensor is sharded over ranks."""
    return hasattr(type(value), "__create_chunk_list__") or type(value).__name__ == "ShardedTensor"


def _filled(live: torch.Tensor, loaded: torch.Tensor, claims: Claims) -> torch.Tensor:
    """The live tensor, if it was or can be filled with the loaded values; else the loaded one."""
    if live is not loaded and _is_alias(live, loaded):
        return live  # a parameter, which was loaded in place through its detached view
    same = (
        live is not loaded
        and is_special(live)
        and is_special(loaded)
        and (live.layout, live.shape, live.dtype) == (loaded.layout, loaded.shape, loaded.dtype)
    )
    # Two that hold nothing yet have no memory, and may yet be one.
    if not same or id(live) in claims.containers or claims.taken(live) is not None:
        return loaded
    claims.add(live, "")
    claims.containers[id(live)] = live, loaded, None
    with torch.no_grad():
        live.copy_(loaded)
    return live


def _is_alias(live: torch.Tensor, loaded: torch.Tensor) -> bool:
    if type(loaded) is not torch.Tensor or not is_plain_type(live) or is_special(live):
        return (
            isinstance(live, DTensor)
            and isinstance(loaded, DTensor)
            and live.shape == loaded.shape
            and _is_same_memory(live._local_tensor, loaded._local_tensor)
        )
    return not is_special(loaded) and _is_same_memory(live, loaded)


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if not one.numel():  # which has no memory, and nothing to load
        return one.dtype == other.dtype and one.device == other.device
    return one.data_ptr() == other.data_ptr() != 0


def _has_tensor(value: Any) -> bool:
    return any(isinstance(sub, torch.Tensor) for sub in _within(value, (Mapping, list)))


def _has_mapping(value: Any) -> bool:
    return any(isinstance(sub, Mapping) for sub in _within(value, (list,)))


def _within(value: Any, opened: tuple[type, ...]) -> Iterator[Any]:
    """A value, and what is in it at any depth; each container once, however often it is met."""
    seen: set[int] = set()
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, opened) and id(one) not in seen:
            seen.add(id(one))
            parts: Any = one
            left.extend(parts.values() if isinstance(parts, Mapping) else parts)
