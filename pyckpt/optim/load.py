"""``load_state_dict``: `Optimizer.load_state_dict` with the optimizer's own devices and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor

from pyckpt.optim.matching import listed, match_params
from pyckpt.optim.mover import dtype_fits, misplaced, name_of, relocate
from pyckpt.optim.own_loading import FLAGS, load_by_itself, loads_itself, saved_tensors
from pyckpt.optim.places import Placement, Resolver, found
from pyckpt.optim.tensors import Path, any_index, is_dtensor, leaves, mapped, replace
from pyckpt.optim.transfer import Request, is_there, place
from pyckpt.optim.wrappers import held, layers, members, relinked, unwrapped

__all__ = ["hand_over", "load_state_dict"]

_CPU = torch.device("cpu")


def load_state_dict(
    optimizer: Any, state_dict: dict[str, Any], *, flags: Literal["live", "saved"] = "live"
) -> None:
    """Load a result of ``optimizer.state_dict()``, with each tensor where this optimizer needs it.

    Unlike `Optimizer.load_state_dict`, it keeps the flags that the optimizer was made with. It puts
    every tensor on the device and into the dtype in which the optimizer itself creates it (see
    `placement`), wherever ``torch.load`` or DCP has put it. It moves tensors in the groups
    (``lr``, betas) to the devices of the live ones. It checks groups, parameters and shapes. The
    optimizer need not have stepped before. ``state_dict`` is not changed, shares no memory with the
    optimizer, and load hooks run as usual.

    Dtypes are those of the optimizer, not of the checkpoint. Float32 state of bfloat16 parameters
    stays as it was saved. Moments saved in float32 are rounded only if the optimizer keeps them in
    bfloat16 for such parameters, since its step could not use them otherwise. A tensor about which
    nothing is known keeps its saved dtype. It is loaded to its parameter's device if it has the
    parameter's shape, or was on a device, and to the host otherwise.

    If both sides have the same ``param_names``, parameters are matched by name. If they have no
    names in common (other prefixes, say), or no names, they are matched by position.

    If the optimizer has a ``load_state_dict`` of its own, that method loads. Flags, placement and
    dtypes are corrected after it.

    Args:
        optimizer: the optimizer to load, or a wrapper of optimizers. If pyckpt does not know it as
            either, only its own ``load_state_dict`` runs.
        state_dict: the saved state dict.
        flags: whose ``fused``, ``foreach``, ``capturable`` and ``differentiable`` to use: "live",
            those of ``optimizer``, or "saved".

    Raises:
        ValueError: groups, parameters or shapes do not fit, only some of a group's names are the
            checkpoint's, or ``flags`` is neither; nothing was loaded. Or ``optimizer`` is a wrapper
            that took the state and did not pass it on to the optimizer that it steps.
        TypeError: ``optimizer`` is neither.
    """
    _load_any(optimizer, state_dict, flags, given=False)


def hand_over(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """`load_state_dict` for a state that nobody else will use: large tensors that are where the
    optimizer needs them become its own, and are not copied."""
    _load_any(optimizer, state_dict, "live", given=True)


def _load_any(optimizer: Any, state_dict: dict[str, Any], flags: str, *, given: bool) -> None:
    if flags not in ("live", "saved"):
        raise ValueError(f"{flags = } must be 'live' or 'saved'.")
    relink = relinked(optimizer)
    optimizer = unwrapped(optimizer)
    if not hasattr(optimizer, "load_state_dict"):
        members(optimizer)  # raises a TypeError that names the class
    if loads_itself(optimizer):
        load_by_itself(optimizer, state_dict, flags)
    else:
        _load(optimizer, state_dict, flags, given=given)
    relink()
    _check_passed_on(optimizer, state_dict)


def _check_passed_on(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if an inner optimizer should have got loaded state, and has not."""
    inner = held(optimizer)
    if not inner:
        return
    loaded: dict[int, set[Hashable]] = defaultdict(set)
    for param, path in saved_tensors(optimizer, state_dict):
        loaded[param].add(path[0])
    for name, other in inner.items():
        lost = set()
        for layer in layers(other):
            if not hasattr(layer, "state"):
                continue
            resolver = Resolver(layer)
            for index, group in enumerate(layer.param_groups):
                for param in group["params"]:
                    missing = loaded[id(param)] - set(layer.state.get(param, ()))
                    if missing:
                        native = {path[0] for path in resolver.learned(index, param)}
                        lost |= missing & native
        if lost:
            raise ValueError(
                f"{type(optimizer).__qualname__} has loaded {listed(sorted(map(str, lost)))}, and "
                f"the {type(other).__qualname__} that it steps, in its attribute {name}, has not, "
                f"and would begin anew; load that one instead."
            )


# --- loading ------------------------------------------------------------------------------------


def _load(optimizer: Any, state_dict: dict[str, Any], flags: str, *, given: bool) -> None:
    state_dict = state_dict.copy()
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        given = False  # a hook may keep what it sees, or put in what is another's
        result = pre_hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    params = match_params(optimizer, state_dict)
    groups = _groups(optimizer, state_dict["param_groups"], flags)
    state = _state(optimizer, state_dict["state"], params, groups, given=given)
    optimizer.__setstate__({"state": state, "param_groups": groups})
    if flags == "saved":
        _tell_scaler(optimizer)
    # `__setstate__` turns numbers of old checkpoints into tensors, and chooses their device itself.
    relocate(misplaced(optimizer, exact=True), exact=True)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)


def _tell_scaler(optimizer: Any) -> None:
    """Set the attribute by which a fused optimizer tells GradScaler that it unscales gradients
    itself. The constructor sets it, and loading does not."""
    if type(optimizer).__module__.startswith("torch.optim.") and hasattr(
        optimizer, "_step_supports_amp_scaling"
    ):
        optimizer._step_supports_amp_scaling = all(g.get("fused") for g in optimizer.param_groups)


def _groups(optimizer: Any, saved: list[dict[str, Any]], flags: str) -> list[dict[str, Any]]:
    """The saved options, in the live groups, with tensors where the live ones are."""
    groups: list[dict[str, Any]] = []
    owners: list[tuple[dict[str, Any], Path]] = []
    requests: list[Request] = []
    resolver = Resolver(optimizer)
    for index, (live, other) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        options = {key: value for key, value in other.items() if key != "params"}
        if flags == "live":
            for flag in FLAGS:
                options.pop(flag, None)
                if flag in live:
                    options[flag] = live[flag]
        for key, value in live.items():
            # Entries that the checkpoint lacks: parameters, their names, options of a newer torch.
            options.setdefault(key, value)
        if "param_names" in live and live.get("param_names") is not None:
            options["param_names"] = live["param_names"]
        group = {
            key: value
            if key in ("params", "param_names")
            else _as_live(value, live.get(key), flags)
            for key, value in options.items()
        }
        for path, tensor in leaves(_without_params(group)):
            owners.append((group, path))
            requests.append(_request_in_group(resolver, index, live, path, tensor))
        groups.append(group)
    for (group, path), tensor in zip(owners, place(requests), strict=True):
        replace(group, path, tensor)
    return groups


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _as_live(saved: Any, live: Any, flags: str) -> Any:
    """A saved option in the form of the live one: a number or a tensor."""
    if isinstance(saved, list | tuple) and isinstance(live, list | tuple):
        if len(saved) == len(live):
            pairs = zip(saved, live, strict=True)
            return type(live)(_as_live(entry, of, flags) for entry, of in pairs)
        return deepcopy(saved)
    if isinstance(saved, Tensor):
        # Only a captured graph needs a tensor. The checkpoint has one if it was saved with
        # capturable=True.
        number = isinstance(live, int | float) and not isinstance(live, bool)
        return saved.item() if flags == "live" and number and saved.numel() == 1 else saved
    if isinstance(live, Tensor) and isinstance(saved, int | float):
        return torch.full_like(live, saved)
    return mapped(saved, lambda _, leaf: leaf if isinstance(leaf, Tensor) else deepcopy(leaf))


def _request_in_group(
    resolver: Resolver, index: int, live: dict[str, Any], path: Path, tensor: Tensor
) -> Request:
    said = resolver.wanted_in_group(index, path, tensor)
    if said.device is not None:
        return Request(tensor, said.device, said.dtype)
    like: Any = live
    try:
        for key in path:
            like = like[key]
    except (LookupError, TypeError):
        like = None
    if isinstance(like, Tensor):
        return Request(tensor, like.device, like.dtype)
    if tensor.device.type == "cpu" or not live["params"]:
        return Request(tensor, tensor.device)
    return Request(tensor, found(live["params"][0]).device or _CPU)


def _state(
    optimizer: Any,
    saved: dict[Any, Any],
    params: dict[Any, tuple[int, Tensor]],
    groups: list[dict[str, Any]],
    *,
    given: bool,
) -> dict[Any, Any]:
    """The saved state by parameter, with tensors in the places where they belong: new ones, or,
    where they are ``given`` away, those that are there already.

    Raises:
        ValueError: a tensor that a step creates in its parameter's shape has another one.
    """
    resolver = Resolver(optimizer, groups=groups)
    state: dict[Any, Any] = defaultdict(dict)
    owners: list[tuple[Any, Path]] = []
    requests: list[Request] = []
    for key, entries in saved.items():
        if key not in params:
            state[key] = deepcopy(entries)
            continue
        index, param = params[key]
        for path, tensor in leaves(entries):
            generic = any_index(entries, path)
            native = resolver.shape(index, param, generic)
            _check_shape(optimizer, index, param, path, tensor, native)
            wanted = resolver.wanted(index, param, path, entries, tensor)
            request = _request(wanted, param, tensor)
            if given and is_there(request):
                continue
            owners.append((param, path))
            requests.append(request)
        state[param] = mapped(
            entries, lambda _, leaf: leaf if isinstance(leaf, Tensor) else deepcopy(leaf)
        )
    for (param, path), tensor in zip(owners, place(requests), strict=True):
        state[param] = replace(state[param], path, tensor)
    return state


def _check_shape(
    optimizer: Any,
    index: int,
    param: Tensor,
    path: Path,
    tensor: Tensor,
    native: tuple[int, ...] | None,
) -> None:
    shape = tuple(param.shape)
    # If only one of the two is sharded, DTensor checks the shapes.
    if native != shape or tuple(tensor.shape) == shape or is_dtensor(param) != is_dtensor(tensor):
        return
    key: Hashable = path[0] if len(path) == 1 else path
    raise ValueError(
        f"{key!r} of {name_of(optimizer, index, param)} has the shape {tuple(tensor.shape)} in the "
        f"checkpoint, and the parameter {shape}."
    )


def _request(wanted: Placement, param: Tensor, tensor: Tensor) -> Request:
    home = found(param).device or _CPU
    if wanted.kind == "unknown":
        on_host = found(tensor).kind != "device"
        like_param = tensor.dim() > 0 and tensor.shape == param.shape
        return Request(tensor, _CPU if on_host and not like_param else home)
    fits = wanted.dtype is None or dtype_fits(tensor, wanted.dtype, exact=True)
    device = home if wanted.kind == "device" else _CPU
    return Request(tensor, device, None if fits else wanted.dtype, wanted.kind == "pinned")
