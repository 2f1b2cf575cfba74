"""Optimizers: states under the names of parameters, so that any sharding and order may load them.

The layout is that of `torch.distributed.checkpoint.state_dict`: ``state.<parameter>.<key>`` and
``param_groups``, in which ``params`` lists names. Unlike there, no step is faked to create an
optimizer's state. Loading creates the entries that were saved.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from pyckpt import optim
from pyckpt.dcp.report import some
from pyckpt.dcp.whole import KEYS
from pyckpt.errors import LoadError
from pyckpt.optim.load import hand_over
from pyckpt.optim.wrappers import unsaved, unwrapped
from pyckpt.train.state import values
from pyckpt.train.state.claims import is_folded
from pyckpt.train.state.entry import Entry, StatefulEntry
from pyckpt.train.state.modules import Names, is_fsdp1, sharded, without_wrappers
from pyckpt.train.state.naming import ParameterNames
from pyckpt.train.state.saved import Path, Tree

__all__ = ["OptimizerEntry", "optimizer_entry"]


_DECOUPLED = "decoupled_weight_decay"

# Options of groups that do not show the kind of the optimizer.
_FLAGS = frozenset(
    {"capturable", _DECOUPLED, "differentiable", "foreach", "fused", "initial_lr"}
    | {"lr", "maximize", "param_names", "params", "weight_decay"}
)


def optimizer_entry(
    name: str,
    given: Any,
    modules: Mapping[str, nn.Module],
    others: Container[int],
    tensors: Mapping[int, str],
) -> Entry:
    """The entry of an optimizer, whose parameters are those of some of the modules.

    Args:
        given: the optimizer, or a wrapper without state of its own.
        others: ids of the optimizers in the state.
        tensors: names of tensors that are in no module, by id.
    """
    optimizer = unwrapped(given)
    owner = _owner(optimizer, modules)
    if owner is not None and is_fsdp1(modules[owner]):
        return FlatOptimizerEntry(name, given, modules[owner])
    state = optimizer.state_dict()
    if not isinstance(state.get("state"), dict) or not isinstance(state.get("param_groups"), list):
        # A wrapper with a layout of its own, such as torchao's CPUOffloadOptimizer.
        return StatefulEntry(name, optimizer)
    names = ParameterNames(name, optimizer, modules, owner, tensors)
    return OptimizerEntry(name, given, names, others)


def _owner(optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> str | None:
    """The name of the first module that has all of an optimizer's parameters."""
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, module in modules.items():
        if params <= {id(param) for param in module.parameters()}:
            return name
    return None


class OptimizerEntry(Entry):
    """An optimizer of parameters, plain or DTensors, each under its name: see `ParameterNames`."""

    def __init__(
        self, name: str, given: Any, names: ParameterNames, others: Container[int]
    ) -> None:
        super().__init__(name)
        self._given = given
        self._optimizer = unwrapped(given)
        self._others = others
        self._names = names
        self._left: set[str] = set()
        self._unwanted: set[str] = set()

    def state(self) -> Any:
        self._names.tell_nameless(self._optimizer)
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
            for group, fqns in zip(state["param_groups"], self._names.groups, strict=True)
            for number, fqn in zip(group["params"], fqns, strict=True)
        }
        others = {key: one for key, one in state["state"].items() if isinstance(key, str)}
        named = {
            fqn_of.get(key, key): one
            for key, one in state["state"].items()
            if key not in others and one
        }
        groups = [
            {
                key: values.encode(value, f"{self.name}.param_groups.{i}.{key}")
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            | {"params": list(self._names.groups[i])}
            for i, group in enumerate(state["param_groups"])
        ]
        rest = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        encoded = values.encode({"state": named, **rest}, self.name)
        return {**_with_others(encoded, others, self.name), "param_groups": groups}

    def claim(self) -> None:
        _claim_state(self, self._optimizer)

    def leave(self, params: Container[int]) -> None:
        """Keep the present state of these parameters, given by id."""
        self._left = {fqn for fqn, param in self._names.params.items() if id(param) in params}

    def template(self, saved: Tree) -> Any:
        if not isinstance(saved, dict):
            return self._lacks("an optimizer", [self.name])
        self._check_kind(saved)
        self._names.rename = self.rename
        states = _saved_states(saved)
        name_of = self._names.of_states(states)
        self._choose(states, name_of)
        live = self._optimizer.state
        template: dict[str, Any] = {}
        for key, entries in states.items():
            if str(key) in self._unwanted:
                continue
            param = self._names.params.get(name_of.get(str(key), ""))
            now = live.get(str(key) if param is None else param, {})
            now = dict(now) if isinstance(now, Mapping) else now
            template[key] = values.template(now, entries, place=self._place)
        whole = dict.fromkeys(saved)
        if template:
            whole["state"] = template
        elif states:
            del whole["state"]
        self._name_of = name_of
        return whole

    def _place(self, _: Path, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor to load into. What is another's, such as a parameter, is not state's to
        fill. Parameters of one optimizer may share state."""
        is_own = self.claims.taken(tensor, but=self.name) is None and not is_folded(tensor)
        return tensor if is_own else None

    def create(self, path: Path, item: TensorStorageMetadata) -> torch.Tensor | None:
        if len(path) < 3 or path[0] != "state" or len(item.size) == 0:
            return None
        param = self._names.params.get(self._name_of.get(str(path[1]), ""))
        return None if param is None else _like(param.detach(), item)

    def wants(self, path: Path) -> bool:
        return len(path) < 2 or path[0] != "state" or str(path[1]) not in self._unwanted

    def live(self, path: Path) -> Path:
        return _live(path)

    def translated(self, path: Path) -> Path:
        if path[0] != "state" or len(path) == 1 or str(path[1]).isdecimal():
            return path
        self._names.rename = self.rename
        return (path[0], self._names.renamed(str(path[1])), *path[2:])

    def restore(self, loaded: Any) -> None:
        loaded = dict(loaded)
        saved = values.decode(loaded.pop("param_groups", None))
        if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
            raise LoadError(f"{self.name}: it was not saved as an optimizer, with param_groups")
        names, numbers = self._names.of_groups(saved)
        groups = self._match_groups(saved, names)
        for group, live in zip(groups, self._optimizer.param_groups, strict=True):
            # Adam and AdamW differ in this option alone, and loading it would make one the other.
            if group.get(_DECOUPLED, live.get(_DECOUPLED)) != live.get(_DECOUPLED):
                raise LoadError(
                    f"{self.name}: the checkpoint is of another optimizer than "
                    f"{type(self._optimizer).__name__}, with {_DECOUPLED}={group[_DECOUPLED]}"
                )
        name_of = {**self._name_of, **numbers}
        number_of = self._names.number_of
        decoded = values.decode(loaded.pop("state", None)) or {}
        state: dict[Any, Any] = {}
        for key, entries in decoded.items():
            name = name_of.get(str(key), str(key))
            state[number_of.get(name, key)] = values.decode(entries)
        if self._left:
            now = self._optimizer.state_dict()["state"]
            for fqn in self._left:
                state.pop(number_of[fqn], None)
                if number_of[fqn] in now:
                    state[number_of[fqn]] = now[number_of[fqn]]
        _keep_false(self._optimizer, state)
        for group, fqns in zip(groups, self._names.groups, strict=True):
            group["params"] = [number_of[fqn] for fqn in fqns]
        rest = {key: values.decode(value) for key, value in loaded.items()}
        # What was loaded is in the optimizer's own tensors, or in new ones.
        with _named(self.name):
            hand_over(self._given, {"state": state, "param_groups": groups, **rest})

    def _check_kind(self, saved: Tree) -> None:
        """Refuse the state of another kind of optimizer, by the options of its groups."""
        groups = saved.get("param_groups") if isinstance(saved, dict) else None
        if not isinstance(groups, dict):
            return
        theirs = {str(key) for group in groups.values() if isinstance(group, dict) for key in group}
        ours = {key for group in self._optimizer.param_groups for key in group}
        # Another version of torch, or a program, may add options on one side. Another kind of
        # optimizer differs on both.
        lacking = sorted(set(self._optimizer.defaults) - theirs - _FLAGS)
        strange = sorted(theirs - ours - _FLAGS)
        if lacking and strange:
            raise LoadError(
                f"{self.name}: the checkpoint is of another optimizer than "
                f"{type(self._optimizer).__name__}: its groups have {some(strange, 8)}, and no "
                f"{some(lacking, 8)}",
                missing=tuple(f"{self.name}.param_groups.{key}" for key in lacking),
                unexpected=tuple(f"{self.name}.param_groups.{key}" for key in strange),
            )

    def _choose(self, states: Mapping[Any, Any], name_of: Mapping[str, str]) -> None:
        """Choose the saved states to load."""
        strangers, left = [], []
        for key, entries in states.items():
            name = name_of.get(str(key))
            if name not in self._names.params and not _is_other(key, entries, self._optimizer):
                strangers.append(str(key))
            elif name in self._left:
                left.append(str(key))
        unexpected = tuple(f"{self.name}.state.{key}" for key in strangers)
        if strangers and self.policy.unexpected == "error":
            raise LoadError(
                f"{self.name}: the checkpoint has state of parameters that the optimizer does not "
                f"have ({len(strangers)}): {some(strangers, 20)}; pass unexpected='ignore' to "
                "leave it out",
                unexpected=unexpected,
            )
        self.ignored += unexpected
        self.kept += [f"{self.name}.state.{key}" for key in left]
        self._unwanted = {*strangers, *left}

    def _match_groups(
        self, saved: list[dict[str, Any]], names: list[list[str]]
    ) -> list[dict[str, Any]]:
        """The saved groups, without parameters, in the order of the live ones."""
        at = {fqn: i for i, fqns in enumerate(names) for fqn in fqns}
        matched = []
        for i, fqns in enumerate(self._names.groups):
            missing = [fqn for fqn in fqns if fqn not in at]
            if missing and self.policy.missing == "keep":
                self._left.update(missing)
                self.kept += [f"{self.name}.{fqn}" for fqn in missing]
            elif missing:
                raise LoadError(
                    f"{self.name}: parameters of group {i} are not in the checkpoint: "
                    f"{some(missing, 20)}; pass missing='keep' to leave them as they are",
                    missing=tuple(f"{self.name}.{fqn}" for fqn in missing),
                )
            sources = {at[fqn] for fqn in fqns if fqn in at}
            if not fqns and i < len(saved) and not saved[i]["params"]:
                sources = {i}
            if len(sources) > 1:
                raise LoadError(
                    f"{self.name}: parameters of group {i} are in several groups of the checkpoint"
                )
            if sources:
                group = saved[sources.pop()]
            elif self.policy.missing == "keep":
                group = self._optimizer.param_groups[i]
            else:
                raise LoadError(f"{self.name}: group {i}, which is empty, is not in the checkpoint")
            matched.append(
                {
                    key: values.decode(value)
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                }
            )
        return matched


class FlatOptimizerEntry(Entry):
    """An optimizer of an FSDP1 module, whose parameters are flat pieces of the model's. Only FSDP
    can map the pieces to parameters, and saving and loading is collective."""

    def __init__(self, name: str, given: Any, module: nn.Module) -> None:
        super().__init__(name)
        self._given = given
        self._optimizer = unwrapped(given)
        self._module = module

    def state(self) -> Any:
        from torch.distributed.fsdp import FullyShardedDataParallel

        names = Names(self._module)
        with sharded(self._module), _own_apart(self._optimizer) as others:
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
        encoded = values.encode({"state": named}, self.name)
        return {**_with_others(encoded, others, self.name), "param_groups": groups}

    def claim(self) -> None:
        _claim_state(self, self._optimizer)

    def check(self) -> None:
        pass  # its state is collective

    def template(self, saved: Tree) -> Any:
        if not isinstance(saved, dict):
            return self._lacks("an optimizer", [self.name])
        names = Names(self._module)
        with sharded(self._module):
            state = self._module.state_dict()
        self._layout = {names(key): value for key, value in state.items()}
        self._raw = {names(key): key for key in state}
        unknown = [
            str(fqn)
            for fqn, entries in _saved_states(saved).items()
            if str(fqn) not in self._layout and not _is_other(fqn, entries, self._optimizer)
        ]
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
            for fqn, entries in (values.decode(loaded.get("state")) or {}).items()
        }
        params = set(raw.values())
        others = {key: state.pop(key) for key in list(state) if key not in params}
        _keep_false(self._optimizer, others)
        groups = [
            {
                key: values.decode(value)
                if key != "params"
                else [raw.get(fqn, fqn) for fqn in map(without_wrappers, value)]
                for key, value in group.items()
            }
            for group in loaded["param_groups"]
        ]
        with sharded(self._module), _own_apart(self._optimizer):
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                self._module, self._optimizer, {"state": state, "param_groups": groups}
            )
        flat["state"].update(others)
        with _named(self.name):
            optim.load_state_dict(self._given, flat, flags="live")


def _claim_state(entry: Entry, optimizer: Optimizer) -> None:
    for entries in optimizer.state.values():
        for key, tensor in values.tensors(entries):
            entry.claims.add(tensor, f"{entry.name}.state.{key}", entry.name)


@contextmanager
def _own_apart(optimizer: Optimizer) -> Iterator[dict[str, Any]]:
    """Take what an optimizer has under strings of its own out of its state, and put it back. By a
    first key that is a string, FSDP1 takes all keys for names."""
    state: dict[Any, Any] = optimizer.state
    own = {key: value for key, value in state.items() if isinstance(key, str)}
    for key in own:
        del state[key]
    try:
        yield own
    finally:
        state.update(own)


def _with_others(encoded: dict[str, Any], others: dict[Any, Any], name: str) -> dict[str, Any]:
    """The encoded state of an optimizer, with state that is not a parameter's: under keys of the
    optimizer's own. What is a dict there is one item, or has a list of its keys, by which a load
    tells it from the state of a parameter that is gone."""
    if not others:
        return encoded
    state = dict(encoded["state"]) if isinstance(encoded["state"], dict) else {}
    for key, value in others.items():
        made = values.encode(value, f"{name}.state.{key}", compact=True)
        if isinstance(made, dict) and KEYS not in made:
            made = {**made, KEYS: list(value)}
        if key in state:
            raise TypeError(f"{name} has state of its own under the name of a parameter, {key}")
        state[key] = made
    return {**encoded, "state": state}


def _is_other(key: Any, entries: Tree, optimizer: Optimizer) -> bool:
    """Whether saved state is of the optimizer itself, and not of a parameter."""
    if not isinstance(entries, dict) or all(isinstance(part, int) for part in entries):
        return True  # a value, or a list; that of a parameter is a dict
    return KEYS in entries or str(key) in optimizer.state


_FALSE = (bool, int, float, str, dict, list, tuple)  # those whose truth is told without a doubt


def _keep_false(optimizer: Optimizer, state: dict[Any, Any]) -> None:
    """Add what the optimizer has under keys of its own, if it is false: earlier versions did not
    save that."""
    for key, value in optimizer.state.items():
        if isinstance(key, str) and (value is None or (isinstance(value, _FALSE) and not value)):
            state.setdefault(key, value)


def _live(path: Path) -> Path:
    if path[0] != "state" or len(path) == 1:
        return path
    return (path[0], without_wrappers(str(path[1])), *path[2:])


def _saved_states(saved: Tree) -> Mapping[Any, Any]:
    states = saved.get("state") if isinstance(saved, dict) else None
    return states if isinstance(states, dict) else {}


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Raise what an optimizer says to its state as a LoadError that names it."""
    try:
        yield
    except ValueError as error:
        raise LoadError(f"{name}: {error}") from error


def _like(param: torch.Tensor, item: TensorStorageMetadata) -> torch.Tensor:
    """Memory for a piece of a parameter's state, sharded as the parameter is."""
    dtype = item.properties.dtype
    if isinstance(param, DTensor):
        if param.shape == item.size:
            return torch.empty_like(param, dtype=dtype)
        # The placement that DTensor gives to new_zeros of another shape than the parameter's.
        placements = [Replicate()] * param.device_mesh.ndim
        return torch.distributed.tensor.empty(
            item.size, dtype=dtype, device_mesh=param.device_mesh, placements=placements
        )
    if type(param) in (torch.Tensor, nn.Parameter):
        return torch.empty(item.size, dtype=dtype, device=param.device)
    copy = param.clone()  # FSDP1's ShardedTensor
    return copy if copy.dtype == dtype else copy.to(dtype)
