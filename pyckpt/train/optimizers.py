"""Optimizers: states under the names of parameters, so that any sharding and order may load them.

The layout is that of `torch.distributed.checkpoint.state_dict`: ``state.<parameter>.<key>`` and
``param_groups``, in which ``params`` lists names. Unlike there, no step is faked to make an
optimizer's state: what was saved says what to make.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from pyckpt import optim
from pyckpt.dcp.report import some
from pyckpt.errors import LoadError
from pyckpt.optim.wrappers import unsaved, unwrapped
from pyckpt.train import values
from pyckpt.train.entry import Entry, StatefulEntry
from pyckpt.train.modules import Names, is_fsdp1, sharded, without_wrappers
from pyckpt.train.saved import Path, Tree

__all__ = ["OptimizerEntry", "optimizer_entry"]

_FLAT_PARAMETER = "FlatParameter"


def optimizer_entry(
    name: str, given: Any, modules: Mapping[str, nn.Module], others: Container[int]
) -> Entry:
    """The entry of an optimizer, whose parameters are those of some of the modules.

    Args:
        given: it, or a wrapper without state of its own.
        others: ids of the optimizers in the state.
    """
    optimizer = unwrapped(given)
    owner = _owner(optimizer, modules)
    if owner is not None and is_fsdp1(owner):
        return FlatOptimizerEntry(name, given, owner)
    state = optimizer.state_dict()
    if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
        # A wrapper with a layout of its own, such as torchao's CPUOffloadOptimizer.
        return StatefulEntry(name, optimizer)
    return OptimizerEntry(name, given, modules, owner, others)


def _owner(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The first module that has all of an optimizer's parameters."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for module in modules.values():
        if params <= {id(param) for param in module.parameters()}:
            return module
    return None


class OptimizerEntry(Entry):
    """An optimizer of parameters, plain or DTensors.

    A parameter goes by its name in the module that has all of the optimizer's parameters. If they
    are of several modules, the module's name in the state comes first (``generator.conv.weight``);
    if a parameter is in no module, its group and place are its name.
    """

    def __init__(
        self,
        name: str,
        given: Any,
        modules: Mapping[str, nn.Module],
        owner: nn.Module | None,
        others: Container[int],
    ) -> None:
        super().__init__(name)
        self._given = given
        self._optimizer = unwrapped(given)
        self._others = others
        self._names = self._name_parameters(modules, owner)
        self._params = {
            fqn: param
            for fqns, group in zip(self._names, self._optimizer.param_groups, strict=True)
            for fqn, param in zip(fqns, group["params"], strict=True)
        }

    def state(self) -> Any:
        state = self._optimizer.state_dict()
        lost = unsaved(self._optimizer, state, self._others)
        if lost:
            what = some(
                [f"{type(one).__name__} in its attribute {at}" for at, one in lost.items()], 20
            )
            raise TypeError(
                f"{self.name}: state_dict() of {type(self._optimizer).__name__} leaves out the "
                f"state of the {what}, which it steps; put that one into the state, too, under a "
                "name of its own"
            )
        fqn_of = {
            number: fqn
            for group, fqns in zip(state["param_groups"], self._names, strict=True)
            for number, fqn in zip(group["params"], fqns, strict=True)
        }
        named = {
            fqn_of.get(key, key): entries for key, entries in state["state"].items() if entries
        }
        groups = [
            {
                key: values.encode(value, f"{self.name}.param_groups.{i}.{key}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            | {"params": list(self._names[i])}
            for i, group in enumerate(state["param_groups"])
        ]
        rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        return {
            **values.encode({"state": named, **rest}, self.name),
            "param_groups": groups,
        }

    def template(self, saved: Tree) -> Any:
        states = _saved_states(saved)
        self._check_names(states)
        live = self._optimizer.state
        template: dict[str, Any] = {}
        for fqn, entries in states.items():
            param = self._params.get(fqn)
            now = live.get(param, {}) if param is not None else {}
            template[fqn] = values.template(dict(now), entries)
        return {**dict.fromkeys(saved), **({"state": template} if template else {})}

    def create(self, path: Path, item: TensorStorageMetadata) -> torch.Tensor | None:
        param = self._params.get(str(path[1])) if len(path) > 2 and path[0] == "state" else None
        if param is None or len(item.size) == 0:
            return None
        return _like(param.detach(), item)

    def live(self, path: Path) -> Path:
        return _live(path)

    def restore(self, loaded: Any) -> None:
        loaded = dict(loaded)
        groups = self._match_groups(loaded.pop("param_groups"))
        number_of = {fqn: i for i, fqn in enumerate(f for fqns in self._names for f in fqns)}
        state = {
            number_of.get(str(fqn), fqn): values.decode(entries)
            for fqn, entries in (values.decode(loaded.pop("state", {})) or {}).items()
        }
        for group, fqns in zip(groups, self._names, strict=True):
            group["params"] = [number_of[fqn] for fqn in fqns]
        rest = {key: values.decode(value) for key, value in loaded.items()}
        _load(self.name, self._given, {"state": state, "param_groups": groups, **rest})

    def _name_parameters(
        self, modules: Mapping[str, nn.Module], owner: nn.Module | None
    ) -> list[list[str]]:
        found: dict[int, str] = {}
        for module_name, module in modules.items():
            if owner is not None and module is not owner:
                continue
            names = Names(module)
            for key, param in module.named_parameters():
                name = names(key) if owner is not None else f"{module_name}.{names(key)}"
                found.setdefault(id(param), name)
        named = []
        for g, group in enumerate(self._optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in found and type(param).__name__ == _FLAT_PARAMETER:
                    raise ValueError(
                        f"{self.name}: it has parameters of an FSDP module and of others, or the "
                        "module is not in the state; give each its own optimizer and save both"
                    )
            named.append(
                [
                    found.get(id(param), f"group{g}.param{i}")
                    for i, param in enumerate(group["params"])
                ]
            )
        return named

    def _check_names(self, states: Mapping[Any, Any]) -> None:
        strangers = [
            str(fqn)
            for fqn, entries in states.items()
            if isinstance(entries, dict) and str(fqn) not in self._params
        ]
        if strangers:
            raise LoadError(
                f"{self.name}: the checkpoint has state of parameters that the optimizer does not "
                f"have ({len(strangers)}): {some(strangers, 20)}",
                unexpected=tuple(f"{self.name}.state.{fqn}" for fqn in strangers),
            )

    def _match_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved groups, without parameters, in the order of the live ones."""
        at = {without_wrappers(fqn): i for i, group in enumerate(saved) for fqn in group["params"]}
        matched = []
        for i, fqns in enumerate(self._names):
            sources = {at.get(fqn, -1) for fqn in fqns}
            if not fqns:
                sources = {i} if i < len(saved) and not saved[i]["params"] else {-1}
            if len(sources) > 1 or -1 in sources:
                missing = [fqn for fqn in fqns if fqn not in at]
                what = (
                    f"not in the checkpoint: {some(missing, 20)}"
                    if missing
                    else "in several groups of the checkpoint"
                )
                raise LoadError(
                    f"{self.name}: parameters of group {i} are {what}",
                    missing=tuple(f"{self.name}.{fqn}" for fqn in missing),
                )
            group = saved[sources.pop()]
            matched.append(
                {key: values.decode(value) for key, value in group.items() if key != "params"}
            )
        return matched


class FlatOptimizerEntry(Entry):
    """An optimizer of an FSDP1 module, whose parameters are flat pieces of the model's. Only FSDP
    can tell which piece is of which; saving and loading it is collective."""

    def __init__(self, name: str, given: Any, module: nn.Module) -> None:
        super().__init__(name)
        self._given = given
        self._optimizer = unwrapped(given)
        self._module = module

    def state(self) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        names = Names(self._module)
        with sharded(self._module):
            state = FullyShardedDataParallel.optim_state_dict(self._module, self._optimizer)
        named = {names(fqn): entries for fqn, entries in state["state"].items() if entries}
        groups = [
            {
                key: values.encode(value, f"{self.name}.param_groups.{i}.{key}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            | {"params": [names(fqn) for fqn in group["params"]]}
            for i, group in enumerate(state["param_groups"])
        ]
        return {**values.encode({"state": named}, self.name), "param_groups": groups}

    def check(self) -> None:
        pass  # its state is collective

    def template(self, saved: Tree) -> Any:
        names = Names(self._module)
        with sharded(self._module):
            state = self._module.state_dict()
        self._layout = {names(key): value for key, value in state.items()}
        self._raw = {names(key): key for key in state}
        unknown = [str(fqn) for fqn in _saved_states(saved) if str(fqn) not in self._layout]
        if unknown:
            raise LoadError(
                f"{self.name}: the checkpoint has state of parameters that the module does not "
                f"have ({len(unknown)}): {some(unknown, 20)}",
                unexpected=tuple(f"{self.name}.state.{fqn}" for fqn in unknown),
            )
        return dict.fromkeys(saved)

    def create(self, path: Path, item: TensorStorageMetadata) -> torch.Tensor | None:
        like = self._layout.get(str(path[1])) if len(path) > 2 and path[0] == "state" else None
        if like is None or like.shape != item.size:
            return None
        return _like(like, item)

    def live(self, path: Path) -> Path:
        return _live(path)

    def restore(self, loaded: Any) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        raw = self._raw
        state = {
            raw.get(fqn, fqn): values.decode(entries)
            for fqn, entries in (loaded.get("state") or {}).items()
        }
        groups = [
            {
                key: values.decode(value)
                if key != "params"
                else [raw.get(fqn, fqn) for fqn in map(without_wrappers, value)]
                for key, value in group.items()
            }
            for group in loaded["param_groups"]
        ]
        with sharded(self._module):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module, self._optimizer, {"state": state, "param_groups": groups}
            )
        _load(self.name, self._given, flat)


def _live(path: Path) -> Path:
    if path[0] != "state" or len(path) == 1:
        return path
    return (path[0], without_wrappers(str(path[1])), *path[2:])


def _saved_states(saved: Tree) -> Mapping[Any, Any]:
    states = saved.get("state") if isinstance(saved, dict) else None
    return states if isinstance(states, dict) else {}


def _load(name: str, optimizer: Any, state_dict: dict[str, Any]) -> None:
    try:
        optim.load_state_dict(optimizer, state_dict, flags="live")
    except ValueError as error:
        raise LoadError(f"{name}: {error}") from error


def _like(param: torch.Tensor, item: TensorStorageMetadata) -> torch.Tensor:
    """Memory for a piece of a parameter's state, sharded as the parameter is."""
    dtype = item.properties.dtype
    if isinstance(param, DTensor):
        if param.shape == item.size:
            return torch.empty_like(param, dtype=dtype)
        # What DTensor makes of new_zeros in another shape than the parameter's.
        placements = [Replicate()] * param.device_mesh.ndim
        return torch.distributed.tensor.empty(
            item.size, dtype=dtype, device_mesh=param.device_mesh, placements=placements
        )
    if type(param) in (torch.Tensor, nn.Parameter):
        return torch.empty(item.size, dtype=dtype, device=param.device)
    copy = param.clone()  # FSDP1's ShardedTensor
    return copy if copy.dtype == dtype else copy.to(dtype)
