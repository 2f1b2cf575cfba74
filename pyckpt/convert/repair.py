"""``repair_optimizer``: a saved optimizer's host keys, such as Adam's ``step``, put right on disk.

A count that was saved from the GPU goes back to the GPU with ``torch.load``, and one that was saved
in bfloat16 cannot count. Which keys belong on the host, in which dtype and shape, is learned as
`pyckpt.optim` does it: an optimizer of the saved options makes a step with fake tensors.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyckpt.convert.contents import is_optimizer
from pyckpt.convert.copying import as_saved, existing_above, write
from pyckpt.convert.frameworks import flat_groups
from pyckpt.convert.stored import stored
from pyckpt.dcp.objects import load_file
from pyckpt.dcp.report import some
from pyckpt.dcp.to_torch import write_torch
from pyckpt.engine import Engine
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.optim.places import Resolver
from pyckpt.train.store.pieces import Direct

__all__ = ["Repair", "repair_optimizer"]

# Options that do not tell the kind of an optimizer, since versions of torch differ in them.
_FLAGS = frozenset(
    {"capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "initial_lr"}
    | {"lr", "maximize", "param_names", "params", "weight_decay"}
)


@dataclass(frozen=True)
class Repair:
    """A value that is, or would be, put right."""

    key: str
    """Where it is: the optimizer, the parameter, the key of its state."""
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.key}: {self.found} -> {self.wanted}"


def repair_optimizer(
    path: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    optimizer: str | None = None,
    dry_run: bool = False,
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> list[Repair]:
    """Put the host keys of the optimizers in a checkpoint right, on disk.

    A host key gets the dtype and shape in which its optimizer makes it, and is on the CPU. In a
    file of ``torch.save`` all other tensors are marked as saved from the CPU, too: torch's
    ``Optimizer.load_state_dict`` takes them to their parameters, and the host keys stay. The values
    do not change; one that the dtype cannot hold is rounded, and its `Repair` tells both numbers.
    The new checkpoint takes the place of the old one when it is whole and durable; if nothing is
    wrong, nothing is written, but for a file of its own, ``out``. A link stays, and leads to the
    new one; a file keeps its permissions.

    Args:
        path: a checkpoint's directory, of pyckpt or of stock PyTorch, or a file of ``torch.save``.
        out: write there, and leave ``path`` as it is.
        optimizer: the name of the class in `torch.optim`, such as "AdamW", if the saved options do
            not tell it.
        dry_run: only say what would change.
        direct: whether reading and writing bypass the page cache, as for `DirectWriter`.
        engine: the memory and threads to use; by default those that everyone shares.

    Returns:
        What was put right, or would be.

    Raises:
        FileNotFoundError: there is nothing.
        FileExistsError: there is something in ``out``.
        LoadError: there is no optimizer, or its kind is not known.
        UnsafeCheckpoint: a file holds objects that only its own code could make.
        CorruptCheckpoint: bytes are not those that were saved.
        OSError: a file cannot be read or written.
    """
    source = Path(path).expanduser()
    if not source.exists():
        raise FileNotFoundError(2, "there is no checkpoint", str(source))
    target = source.resolve() if out is None else Path(out).expanduser()
    if out is not None and target.exists() and not dry_run:
        raise FileExistsError(17, "there is something already", str(target))
    if source.is_file():
        return _repair_file(source, target, optimizer, dry_run)
    if not (source / commit.metadata_name()).exists():
        raise FileNotFoundError(2, "this directory is no checkpoint", str(source))
    # The first look reads no large tensor.
    scratch = existing_above(target)
    with stored(source, scratch=scratch, numbers_only=True, direct=direct, engine=engine) as found:
        repairs = _Repairer(source, optimizer, {}).repair(found.state)
    if dry_run or (not repairs and out is None):
        return repairs
    with stored(source, scratch=scratch, direct=direct, engine=engine) as found:
        _Repairer(source, optimizer, {}).repair(found.state)
        tree = as_saved(found.state, found.tree)
        write(tree, target, overwrite=out is None, direct=direct, engine=engine)
    return repairs


def _repair_file(source: Path, target: Path, kind: str | None, dry_run: bool) -> list[Repair]:
    devices: dict[int, str] = {}

    def located(storage: torch.UntypedStorage, saved_on: str) -> None:
        devices[storage.data_ptr()] = saved_on

    state = load_file(source, located=located)
    repairs = _Repairer(source, kind, devices).repair(state)
    if not dry_run and (repairs or target != source.resolve()):
        write_torch(state, target, like=source)
    return repairs


class _Repairer:
    """Puts right what it finds in a state, in place.

    Args:
        source: for errors.
        kind: the name of the class, if the caller knows it.
        devices: from which storages were saved, by their addresses; the CPU for others.
    """

    def __init__(self, source: Path, kind: str | None, devices: Mapping[int, str]) -> None:
        self._source = source
        self._kind = kind
        self._devices = devices
        self._repairs: list[Repair] = []

    def repair(self, state: Any) -> list[Repair]:
        found = list(_optimizers(state, ""))
        if not found:
            raise LoadError(f"{self._source} holds no state of an optimizer")
        for name, one in found:
            try:
                self._repair_one(name, one)
            except (AttributeError, LookupError, TypeError) as error:
                raise LoadError(
                    f"{self._source}: {name or 'optimizer'} has a form that is not known: "
                    f"{type(error).__name__}: {error}"
                ) from error
        return self._repairs

    def _repair_one(self, name: str, saved: Any) -> None:
        whole = saved if is_optimizer(saved) else flat_groups(saved)
        by_name = {str(key): entries for key, entries in whole["state"].items()}
        label = name or "optimizer"
        for group in whole["param_groups"]:
            named = list(group.get("param_names") or map(str, group["params"]))
            entries = [by_name.get(str(key), {}) for key in group["params"]]
            mine = [(n, one) for n, one in zip(named, entries, strict=True) if one]
            if not mine:
                continue
            wanted = self._host_keys(label, group, [one for _, one in mine])
            for (param, one), keys in zip(mine, wanted, strict=True):
                for key, native in keys.items():
                    if key in one:
                        self._put_right(f"{label}.state.{param}.{key}", one, key, native)
            if whole is not saved:  # back under the flat names
                for param, one in mine:
                    saved.update({f"state.{param}.{key}": value for key, value in one.items()})

    def _put_right(
        self, where: str, entries: dict[str, Any], key: str, native: torch.Tensor
    ) -> None:
        value = entries[key]
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_meta:
                return
            device = self._devices.get(value.untyped_storage().data_ptr(), "cpu")
            found = _said(device, value)
            right = device == "cpu" and _looks(value) == _looks(native)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found, right = f"the number {value!r}", False
        else:
            return
        if right:
            return
        number = value.item() if isinstance(value, torch.Tensor) else value
        entries[key] = torch.full(native.shape, number, dtype=native.dtype, device="cpu")
        wanted, rounded = _said("cpu", entries[key]), entries[key].item()
        if rounded != number and number == number:  # but for NaN
            wanted += f", {number!r} rounded to {rounded!r}"
        self._repairs.append(Repair(where, found, wanted))

    def _host_keys(
        self, label: str, group: Mapping[str, Any], entries: list[Mapping[str, Any]]
    ) -> list[dict[str, torch.Tensor]]:
        """For each parameter of a group, its keys that belong on the host, as they look there."""
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        saved_keys = {str(key) for one in entries for key in one}
        fitting = []
        for kind, defaults in _kinds(self._kind):
            if self._kind is None and not defaults - _FLAGS <= set(options):
                continue
            learned = _learn(kind, options, entries)
            if self._kind is not None or all(saved_keys <= set(one) for one in learned):
                unlike = len(set(options) - defaults - _FLAGS)
                fitting.append((unlike, kind.__name__, learned))
        if not fitting:
            raise LoadError(
                f"{self._source}: {label}: the options of its groups ({some(sorted(options), 20)}) "
                "are those of no optimizer of torch.optim; pass optimizer= (on the command line "
                "--optimizer) if it is one"
            )
        best = min(unlike for unlike, _, _ in fitting)
        found = [
            [{key: one for key, one in keys.items() if one is not None} for keys in learned]
            for unlike, _, learned in fitting
            if unlike == best
        ]
        looks = {repr([{k: _looks(v) for k, v in keys.items()} for keys in one]) for one in found}
        if len(looks) > 1:
            names = ", ".join(name for unlike, name, _ in fitting if unlike == best)
            raise LoadError(
                f"{self._source}: {label} may be any of {names}; pass optimizer= (on the command "
                "line --optimizer)"
            )
        return found[0]


def _optimizers(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The states of optimizers in a state, with their names."""
    if is_optimizer(value) or _is_flat(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, sub in value.items():
            yield from _optimizers(sub, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for i, sub in enumerate(value):
            yield from _optimizers(sub, f"{name}.{i}")


def _is_flat(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and any(str(key).startswith("param_groups.") for key in value)
        and all(str(key).startswith(("state.", "param_groups.")) for key in value)
    )


def _kinds(name: str | None) -> Iterator[tuple[type[torch.optim.Optimizer], set[str]]]:
    """The optimizers of torch, or the one of that name, with the names of their options."""
    if name is not None:
        one = getattr(torch.optim, name, None)
        if not inspect.isclass(one) or not issubclass(one, torch.optim.Optimizer):
            raise ValueError(f"optimizer={name!r} is no class of torch.optim")
        yield one, set(_made(one).defaults)
        return
    for _, one in sorted(inspect.getmembers(torch.optim, inspect.isclass)):
        if issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer:
            yield one, set(_made(one).defaults)


def _made(kind: Any, params: list[nn.Parameter] | None = None) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = kind(
        params or [nn.Parameter(torch.empty(2, 2, device="cpu"))], lr=0.1
    )
    return made


def _learn(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], entries: list[Mapping[str, Any]]
) -> list[dict[str, torch.Tensor | None]]:
    """For each parameter, the keys that the optimizer makes: a tensor for those on the host."""
    known: dict[Any, dict[str, torch.Tensor | None]] = {}
    specs = [_param_of(one) for one in entries]
    for shape, dtype in dict.fromkeys(specs):
        try:
            made = _made(kind, [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))])
        except (ValueError, TypeError, RuntimeError):  # not for such parameters
            known[shape, dtype] = {}
            continue
        group = made.param_groups[0]
        group.update({key: value for key, value in options.items() if key in made.defaults})
        resolver = Resolver(made, device=torch.device("cuda"))
        param = group["params"][0]
        found: dict[str, torch.Tensor | None] = {}
        for path, place in resolver.learned(0, param).items():
            host = None
            shape_there = resolver.shape(0, param, path)
            if place.kind == "host" and place.dtype is not None and shape_there == ():
                host = torch.empty((), dtype=place.dtype, device="cpu")
            found[str(path[0])] = host
        known[shape, dtype] = found
    return [known[spec] for spec in specs]


def _param_of(entries: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    """The shape and dtype of the parameter whose state it is, as far as the state shows them."""
    tensors = [one for one in entries.values() if isinstance(one, torch.Tensor) and one.dim()]
    floats = [one for one in tensors if one.is_floating_point()]
    if not floats:
        return (2, 2), torch.float32
    (shape, dtype), _ = Counter((tuple(one.shape), one.dtype) for one in floats).most_common(1)[0]
    return shape, dtype


def _looks(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _said(device: str, tensor: torch.Tensor) -> str:
    shape = f" {list(tensor.shape)}" if tensor.dim() else ""
    return f"{device} {str(tensor.dtype).removeprefix('torch.')}{shape}"
