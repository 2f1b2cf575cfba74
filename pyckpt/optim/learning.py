"""Learns which state an optimizer creates for a parameter, by steps of a throw-away clone.

A step of the clone may fail. Most optimizers have created their state by then; other state stays
unknown. What was learned is remembered, by the options and attributes that it depends on.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from pyckpt.locks import fork_safe_lock
from pyckpt.optim.clone import NO_OPTIONS, Pretend, Spec, bare_step, clone_of, isolated, stepped
from pyckpt.optim.tensors import Path, any_index, leaves, replace

__all__ = ["Learned", "Native", "learn", "reads_of"]

# A bound, since some optimizers keep integer counters among the options of their groups, and each
# step then makes a new entry.
_CACHE_ENTRIES = 4096
_LONGEST_OPTION = 32  # entries


@dataclass(frozen=True)
class Native:
    """One tensor or number as its optimizer creates it. ``dtype`` is None for a number."""

    kind: Literal["host", "device", "pinned"]
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Learned:
    """The entries created for one parameter, by path (see `any_index`), and those created for no
    parameter, by a path from the optimizer's ``state``."""

    natives: dict[Path, Native] = field(default_factory=dict)
    shared: dict[Path, Native] = field(default_factory=dict)


_lock = fork_safe_lock()
_learned: OrderedDict[Hashable, Learned] = OrderedDict()
_reads: OrderedDict[Hashable, int | None] = OrderedDict()


def learn(optimizer: Any, group: dict[str, Any], specs: Iterable[Spec]) -> dict[Spec, Learned]:
    """The entries that the optimizer creates for parameters of these specs in this group."""
    base = _signature(optimizer, group)
    results: dict[Spec, Learned] = {}
    missing = []
    for spec in dict.fromkeys(specs):
        known = _recall(_learned, (base, spec))
        if known is None:
            missing.append(spec)
        else:
            results[spec] = known
    if missing:
        # All of a group in one step. If a parameter got nothing, since the step failed before, it
        # gets a step of its own.
        fresh = _run(optimizer, group, missing)
        if len(missing) > 1:
            for spec in missing:
                if not fresh[spec].natives:
                    fresh[spec] = _run(optimizer, group, [spec])[spec]
        for spec in missing:
            _remember(_learned, (base, spec), fresh[spec])
        results.update(fresh)
    return results


def reads_of(
    optimizer: Any,
    group: dict[str, Any],
    spec: Spec,
    path: Path,
    device: torch.device,
    *,
    shared: bool = False,
) -> int | None:
    """How often a step reads the tensor at ``path`` back to the host if it is on such a device;
    None if the step does not run. ``shared``: the path begins at the optimizer's ``state``."""
    if device.type == "cpu":
        return 0
    key = (_signature(optimizer, group), spec, path, device.type, shared)
    with _lock:
        if key in _reads:
            return _reads[key]
    reads = _count_reads(optimizer, group, spec, path, device, shared)
    _remember(_reads, key, reads)
    return reads


def _recall(cache: OrderedDict[Hashable, Any], key: Hashable) -> Any:
    with _lock:
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
    return None


def _remember(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    with _lock:
        cache[key] = value
        while len(cache) > _CACHE_ENTRIES:
            cache.popitem(last=False)


def _signature(optimizer: Any, group: dict[str, Any]) -> Hashable:
    """All that the state depends on, except for the parameter.

    A float enters only as zero or not, which may decide whether there is a buffer. Its value is a
    learning rate or the like, and changes with every step.
    """
    options = tuple(
        sorted(
            (str(key), _token(value))
            for key, value in group.items()
            if key not in ("params", "param_names")
        )
    )
    attributes = tuple(
        sorted(
            (name, _token(value))
            for name, value in vars(optimizer).items()
            if name not in NO_OPTIONS and not name.startswith("_")
        )
    )
    return type(optimizer), options, attributes, torch.get_default_dtype()


def _token(value: Any, depth: int = 3) -> str:
    if isinstance(value, Tensor):
        return f"tensor {value.device.type} {value.dtype} {tuple(value.shape)}"
    if isinstance(value, float):
        return f"float {value != 0.0}"
    if isinstance(value, bool | int | str | None | torch.dtype | torch.device | Enum):
        return repr(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    name = type(value).__qualname__
    # Long containers are records of steps or parameters, and no options.
    if isinstance(value, list | tuple | dict) and len(value) <= _LONGEST_OPTION and depth:
        entries = value.items() if isinstance(value, dict) else value
        return f"{name} {[_token(entry, depth - 1) for entry in entries]}"
    return name


# --- the run ----------------------------------------------------------------------------------


def _run(optimizer: Any, group: dict[str, Any], specs: list[Spec]) -> dict[Spec, Learned]:
    learned = {spec: Learned() for spec in specs}
    with isolated():
        try:
            clone, params = clone_of(optimizer, group, specs)
        except Exception:
            return learned
        clone = stepped(clone)
        shared = {key: state for key, state in clone.state.items() if not isinstance(key, Tensor)}
        natives = {
            path: native
            for path, native in _natives(shared).items()
            if not any(isinstance(key, Tensor) for key in path)
        }
        for spec, param in zip(specs, params, strict=True):
            state = clone.state.get(param, {})
            learned[spec] = Learned(_natives(state) if isinstance(state, dict) else {}, natives)
    return learned


def _natives(state: dict[Any, Any]) -> dict[Path, Native]:
    natives: dict[Path, Native] = {
        (key,): Native("host", None, None)
        for key, value in state.items()
        if isinstance(value, int | float)
    }
    alike: dict[Path, dict[Path, Native]] = defaultdict(dict)
    for path, tensor in leaves(state):
        on_host = tensor.device.type == "cpu"
        pinned = on_host and Pretend.is_pinned(tensor)
        alike[any_index(state, path)][path] = Native(
            "pinned" if pinned else "host" if on_host else "device",
            tensor.dtype,
            tuple(tensor.shape),
        )
    for generic, entries in alike.items():
        if len({(native.kind, native.dtype) for native in entries.values()}) == 1:
            natives[generic] = next(iter(entries.values()))
        else:
            natives.update(entries)  # entries of the list differ, so each index has its own
    return natives


def _count_reads(
    optimizer: Any,
    group: dict[str, Any],
    spec: Spec,
    path: Path,
    device: torch.device,
    shared: bool,
) -> int | None:
    if device.type == spec.device_type:
        device = spec.device  # that of the clone's parameters
    with isolated() as pretend:
        try:
            clone, params = clone_of(optimizer, group, [spec], resolve_foreach=True)
            clone = stepped(clone)
            pretend.reads = 0
            bare_step(clone)
            usual, pretend.reads = pretend.reads, 0
            state = clone.state if shared else clone.state[params[0]]
            tensor = functools.reduce(lambda entry, key: entry[key], path, state)
            elsewhere = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            replace(state, path, elsewhere)
            bare_step(clone)
        except Exception:
            return None
        return pretend.reads - usual
