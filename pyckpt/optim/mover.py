"""``check``, ``repair`` and ``move``: find and move misplaced optimizer state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pyckpt.optim.learning import reads_of
from pyckpt.optim.places import Placement, Resolver, found
from pyckpt.optim.tensors import (
    Path,
    is_dtensor,
    is_plain,
    leaves,
    on_local_shard,
    replace,
)
from pyckpt.optim.transfer import Request, place
from pyckpt.optim.wrappers import members

__all__ = ["Misplaced", "check", "move", "repair"]


@dataclass(frozen=True, eq=False, repr=False)
class Misplaced:
    """One tensor of an optimizer's state that is not where its optimizer would create it.

    Attributes:
        name: of the parameter: its own, or its group and index. For a tensor that belongs to no
            parameter, "group 0" (with the group's index) or "the optimizer".
        key: of the tensor in the parameter's state, in the group, or in the optimizer's state; in
            nested containers the tuple of keys.
        found: its present place and dtype.
        wanted: the place and dtype where it belongs.
        syncs: how often each step waits for the GPU because of it; None if that is not known.
        param: the parameter; None if it belongs to no parameter.
    """

    name: str
    key: Hashable
    found: Placement
    wanted: Placement
    syncs: int | None
    param: Tensor | None

    def __repr__(self) -> str:
        return f"<Misplaced {self}>"  # the default would show the parameter's values

    def __str__(self) -> str:
        cost = "" if not self.syncs else f", {self.syncs} synchronisations a step"
        return f"{self.key} of {self.name}: {self.found}, belongs on {self.wanted}{cost}"


def check(optimizer: Any) -> list[Misplaced]:
    """List the tensors of an optimizer's state that are not where the optimizer creates them.

    A floating-point tensor of a *wider* dtype than the optimizer creates is not misplaced: a
    program may keep moments in float32 on purpose, and narrowing them could not be undone.

    Args:
        optimizer: an optimizer, or a wrapper of optimizers.

    Returns:
        One entry for each misplaced tensor, in the order of the parameters. Its ``syncs`` are
        measured by stepping a throw-away clone on fake tensors.

    Raises:
        TypeError: ``optimizer`` is neither.
    """
    return [
        _described(entry, syncs=_syncs(entry))
        for member in members(optimizer)
        for entry in misplaced(member)
    ]


def repair(optimizer: Any) -> list[Misplaced]:
    """Move the tensors that `check` finds to where they belong.

    All small tensors of a device that belong on the host are gathered there, copied once and
    taken apart: one synchronisation, however many parameters. Tensors that belong on the device
    are also copied at once. Each tensor gets memory of its own; tensors that shared memory before
    still share it. The state's dictionaries and lists stay the same objects; the tensors in them
    are new ones.

    Returns:
        The tensors that were moved. Their ``syncs`` are None, since they are not measured here.

    Raises:
        TypeError: as for `check`.
    """
    entries = [entry for member in members(optimizer) for entry in misplaced(member)]
    relocate(entries)
    return [_described(entry, syncs=None) for entry in entries]


def move(optimizer: Any, device: torch.device | str | None = None) -> None:
    """Move an optimizer's state. Tensors that belong on the host stay there, or return there.

    Args:
        device: None for each parameter's own device; otherwise one device for all tensors that
            belong with their parameters, for example to free memory of the GPU. `Offloader` does
            that faster, and keeps the same tensor objects.

    Dtypes and shared memory are kept. DTensors move by their local shards. A tensor whose place is
    not known moves if it is on a device, and stays if it is on the host. Tensors in the groups
    (``lr``, betas) move only if they are on a device.

    Raises:
        TypeError: as for `check`.
    """
    target = None if device is None else _indexed(torch.device(device))
    entries: list[Entry] = []
    requests: list[Request] = []
    owners: list[tuple[Any, Path]] = []
    for member in members(optimizer):
        # Learn for parameters on the target. For parameters on the CPU, all state would seem to
        # belong on the host.
        elsewhere = target if target is not None and target.type != "cpu" else None
        resolver = Resolver(member, device=elsewhere)
        for index, param, state in _states(member):
            for path, tensor in leaves(state):
                wanted = resolver.wanted(index, param, path, state, tensor)
                entries.append(Entry(member, index, param, state, path, tensor, wanted))
        entries += _others(member, resolver)
    for entry in entries:
        goal = _goal(entry.wanted, entry.tensor, target or _device_of(entry.param))
        if goal is not None and goal != _device_of(entry.tensor):
            owners.append((entry.state, entry.path))
            requests.append(Request(entry.tensor, goal))
    _replace_all(owners, place(requests))


def _indexed(device: torch.device) -> torch.device:
    # A tensor's device always has an index where there can be several.
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    index = torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0
    return torch.device(device.type, index)


def _goal(wanted: Placement, tensor: Tensor, home: torch.device) -> torch.device | None:
    """The device to move to, or None to stay."""
    if wanted.kind == "device":
        return home
    if wanted.kind == "unknown":
        return None if _device_of(tensor).type == "cpu" else home
    if wanted.kind == "paged" or getattr(tensor, "is_paged", False):
        return None
    return torch.device("cpu")


# --- what check and repair share ----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor that may be replaced, its owner, and the place where it belongs.

    If it belongs to no parameter, ``param`` is one of its group's parameters, which gives the
    device.
    """

    optimizer: Any
    index: int
    param: Tensor
    state: Any
    path: Path
    tensor: Tensor
    wanted: Placement
    of: Literal["parameter", "group", "optimizer"] = "parameter"


def _states(optimizer: Any) -> Iterator[tuple[int, Tensor, Any]]:
    """Each parameter's state with the index of its group."""
    groups = _group_of(optimizer)
    for key, state in optimizer.state.items():
        index = groups.get(id(key))
        if index is not None:
            yield index, key, state


def _others(optimizer: Any, resolver: Resolver) -> Iterator[Entry]:
    """Tensors of the state and of the groups that belong to no parameter."""
    groups = _group_of(optimizer)
    firsts = [(i, g["params"][0]) for i, g in enumerate(optimizer.param_groups) if g["params"]]
    for key, state in optimizer.state.items() if firsts else ():
        if id(key) in groups:
            continue
        for path, tensor in leaves(state, (key,)):
            index, param = firsts[0]
            wanted = resolver.wanted_shared(index, param, path, optimizer.state, tensor)
            yield Entry(optimizer, index, param, optimizer.state, path, tensor, wanted, "optimizer")
    for index, param in firsts:
        group = optimizer.param_groups[index]
        for path, tensor in leaves({k: v for k, v in group.items() if k != "params"}):
            wanted = resolver.wanted_in_group(index, path, tensor)
            yield Entry(optimizer, index, param, group, path, tensor, wanted, "group")


def _group_of(optimizer: Any) -> dict[int, int]:
    return {
        id(param): index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }


def misplaced(optimizer: Any, *, exact: bool = False) -> list[Entry]:
    resolver = Resolver(optimizer)
    entries = []
    for index, param, state in _states(optimizer):
        table = resolver.table(index, param)
        for key, value in state.items() if isinstance(state, dict) else ():
            native = table.get(key)
            # Nearly all are where they belong, and there may be many: a quick test comes first.
            if native is not None and isinstance(value, Tensor):
                if value.dtype == native[1] and value.device == native[0]:
                    continue
            elif not isinstance(value, Tensor | dict | list | tuple):
                continue
            for path, tensor in leaves(value, (key,)):
                wanted = resolver.wanted(index, param, path, state, tensor)
                if not _is_home(optimizer, wanted, tensor, exact=exact):
                    entries.append(Entry(optimizer, index, param, state, path, tensor, wanted))
    entries += [
        entry
        for entry in _others(optimizer, resolver)
        if not _is_home(optimizer, entry.wanted, entry.tensor, exact=exact)
    ]
    return entries


def _is_home(optimizer: Any, wanted: Placement, tensor: Tensor, *, exact: bool) -> bool:
    if wanted.kind == "unknown":
        return True
    paged = getattr(tensor, "is_paged", False)
    on_host = _device_of(tensor).type == "cpu"
    if wanted.kind == "paged":
        return paged or not hasattr(optimizer, "get_state_buffer")
    if not paged:
        if wanted.kind == "device" and _device_of(tensor) != wanted.device:
            return False
        if wanted.kind in ("host", "pinned") and not on_host:
            return False
        if wanted.kind == "pinned" and torch.cuda.is_available() and found(tensor).kind == "host":
            return False
    return wanted.dtype is None or dtype_fits(tensor, wanted.dtype, exact=exact)


def dtype_fits(tensor: Tensor, wanted: torch.dtype, *, exact: bool) -> bool:
    """Whether a tensor may keep its dtype. A tensor that is neither float nor a single number has a
    format of its own, and keeps it."""
    has = tensor.dtype
    if has == wanted or not is_plain(on_local_shard(tensor)[0]):
        return True
    if not wanted.is_floating_point:
        return True
    if not has.is_floating_point:
        return tensor.numel() != 1 or has.is_complex
    return not exact and has.itemsize > wanted.itemsize


def _device_of(tensor: Tensor) -> torch.device:
    return tensor._local_tensor.device if is_dtensor(tensor) else tensor.device  # type: ignore[attr-defined]


def _described(entry: Entry, *, syncs: int | None) -> Misplaced:
    whose = {"group": f"group {entry.index}", "optimizer": "the optimizer"}.get(entry.of)
    # The key of state that a former parameter left behind begins with that parameter, a tensor
    # whose text would be all its values.
    path = entry.path[1:] if isinstance(entry.path[0], Tensor) else entry.path
    return Misplaced(
        name=whose or name_of(entry.optimizer, entry.index, entry.param),
        key=path[0] if len(path) == 1 else path,
        found=found(entry.tensor),
        wanted=entry.wanted,
        syncs=syncs,
        param=None if whose else entry.param,
    )


def name_of(optimizer: Any, index: int, param: Tensor) -> str:
    group = optimizer.param_groups[index]
    position = next(i for i, other in enumerate(group["params"]) if other is param)
    names = group.get("param_names")
    return names[position] if names else f"parameter {position} of group {index}"


def _syncs(entry: Entry) -> int | None:
    if entry.wanted.kind not in ("host", "pinned"):
        # On the host instead of the device: it depends on its kernels whether a step fails or
        # copies.
        on_host = _device_of(entry.tensor).type == "cpu"
        return None if on_host and entry.wanted.kind == "device" else 0
    if entry.of == "group":
        return None
    resolver = Resolver(entry.optimizer)
    return reads_of(
        entry.optimizer,
        entry.optimizer.param_groups[entry.index],
        resolver.spec(entry.param),
        entry.path,
        _device_of(entry.tensor),
        shared=entry.of == "optimizer",
    )


def relocate(entries: list[Entry], *, exact: bool = False) -> None:
    """Replace each entry's tensor by one of the same value in the wanted place."""
    owners: list[tuple[Any, Path]] = []
    requests: list[Request] = []
    for entry in entries:
        tensor, wanted = entry.tensor, entry.wanted
        if wanted.kind == "paged":
            _replace_all([(entry.state, entry.path)], [_paged(entry)])
            continue
        stays = getattr(tensor, "is_paged", False) or wanted.device is None
        fits = wanted.dtype is None or dtype_fits(tensor, wanted.dtype, exact=exact)
        requests.append(
            Request(
                tensor,
                _device_of(tensor) if stays else wanted.device or _device_of(tensor),
                None if fits else wanted.dtype,
                wanted.kind == "pinned",
            )
        )
        owners.append((entry.state, entry.path))
    _replace_all(owners, place(requests))


def _paged(entry: Entry) -> Tensor:
    """Unified memory from the optimizer itself, since each allocates it in its own way."""
    buffer: Tensor = entry.optimizer.get_state_buffer(entry.param, dtype=entry.tensor.dtype)
    buffer.copy_(entry.tensor.to("cpu"))
    return buffer


def _replace_all(owners: list[tuple[Any, Path]], tensors: list[Tensor]) -> None:
    for (state, path), tensor in zip(owners, tensors, strict=True):
        replace(state, path, tensor)
