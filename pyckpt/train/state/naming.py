"""The names of an optimizer's parameters, now and in a checkpoint."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pyckpt.dcp.report import some
from pyckpt.dcp.whole import KEYS
from pyckpt.errors import LoadError
from pyckpt.speaking import for_all
from pyckpt.train.state.modules import Names, without_wrappers

__all__ = ["ParameterNames", "tensor_names"]

_logger = logging.getLogger("pyckpt")

_FLAT_PARAMETER = "FlatParameter"
_BY_PLACE = re.compile(r"group(\d+)\.param(\d+)")
# Optimizers for which the log has said that parameters have no names.
_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def tensor_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """For each tensor in dicts and lists of the state, by its id, its dotted place."""

    def walk(value: Any, name: str) -> Iterator[tuple[int, str]]:
        if isinstance(value, torch.Tensor):
            yield id(value), name
        elif not isinstance(value, dict | list) or id(value) in seen:
            return  # what is met again has its names by then
        seen.add(id(value))
        if isinstance(value, dict):
            for key, sub in value.items():
                yield from walk(sub, f"{name}.{key}")
        elif isinstance(value, list):
            for i, sub in enumerate(value):
                yield from walk(sub, f"{name}.{i}")

    seen: set[int] = set()
    found: dict[int, str] = {}
    for name, value in objects.items():
        for number, where in walk(value, name):
            found.setdefault(number, where)
    return found


class ParameterNames:
    """A parameter has its name in the module that has all of the optimizer's parameters. If they
    are in several modules, the module's name in the state comes first (``generator.conv.weight``).
    A parameter in no module is named by its place in a dict of the state, or as in the optimizer's
    ``param_names``. Otherwise it is named by its group and its index in the group.

    Args:
        name: of the optimizer in the state.
        owner: the name of the module that has all of its parameters.
        tensors: see `tensor_names`.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        modules: Mapping[str, nn.Module],
        owner: str | None,
        tensors: Mapping[int, str],
    ) -> None:
        self._name = name
        self._owner = owner
        self.rename: Callable[[str], str] | None = None
        self.groups = self._named(optimizer, modules, tensors)
        self.flat = [fqn for fqns in self.groups for fqn in fqns]
        self.params = {
            fqn: param
            for fqns, group in zip(self.groups, optimizer.param_groups, strict=True)
            for fqn, param in zip(fqns, group["params"], strict=True)
        }
        self.number_of = {fqn: i for i, fqn in enumerate(self.flat)}

    def _named(
        self, optimizer: Optimizer, modules: Mapping[str, nn.Module], tensors: Mapping[int, str]
    ) -> list[list[str]]:
        found: dict[int, str] = {}
        for module_name, module in modules.items():
            if self._owner not in (None, module_name):
                continue
            names = Names(module)
            for key, param in module.named_parameters():
                name = names(key) if self._owner is not None else f"{module_name}.{names(key)}"
                found.setdefault(id(param), name)
        groups = []
        for g, group in enumerate(optimizer.param_groups):
            given = group.get("param_names")
            names_of_group = []
            for i, param in enumerate(group["params"]):
                if id(param) not in found and type(param).__name__ == _FLAT_PARAMETER:
                    raise ValueError(
                        f"{self._name}: it has parameters of an FSDP module and of others, or the "
                        "module is not in the state; give each its own optimizer and save both"
                    )
                fqn = found.get(id(param)) or tensors.get(id(param))
                if fqn is None and given is not None:
                    fqn = given[i]
                names_of_group.append(fqn or f"group{g}.param{i}")
            groups.append(names_of_group)
        return groups

    def tell_nameless(self, optimizer: Optimizer) -> None:
        """Log once which parameters are named by group and index only."""
        nameless = [fqn for fqn in self.flat if _BY_PLACE.fullmatch(fqn)]
        if nameless and optimizer not in _told:
            _told.add(optimizer)
            _logger.log(
                for_all(logging.WARNING),
                "%s: %d of its parameters are in no module and no dict of the state, and go by "
                "their places (%s); in another order they would get each other's state. Put what "
                "they are of into the state, too, or give the optimizer their names",
                self._name,
                len(nameless),
                some(nameless),
            )

    # --- in a checkpoint --------------------------------------------------------------------------

    def of(self, saved: str) -> str:
        """The present name of a parameter, given its name in the checkpoint."""
        saved = without_wrappers(saved)
        match = _BY_PLACE.fullmatch(saved) if saved not in self.params else None
        if match is not None:
            g, i = int(match[1]), int(match[2])
            if g < len(self.groups) and i < len(self.groups[g]):
                return self.groups[g][i]
        return saved

    def renamed(self, saved: str) -> str:
        """As `of`, with the caller's new names of keys."""
        if self.rename is not None:
            prefixes = (
                f"{self._owner}." if self._owner is not None else "",
                f"{self._name}.state.",
            )
            for prefix in prefixes:
                new = self.rename(prefix + saved)
                if new != prefix + saved:
                    return self.of(new.removeprefix(prefix))
        return self.of(saved)

    def of_states(self, saved: Mapping[Any, Any]) -> dict[str, str]:
        """Present names for the keys of saved states. `Optimizer.state_dict` has numbers."""
        keys = [str(key) for key in saved if str(key) != KEYS]
        names = {key: self.of(key) for key in keys}
        if not any(name in self.params for name in names.values()):
            for key in filter(str.isdecimal, keys):
                names[key] = self.flat[int(key)] if int(key) < len(self.flat) else key
        return names

    def of_groups(self, saved: list[dict[str, Any]]) -> tuple[list[list[str]], dict[str, str]]:
        """Present names for the parameters of saved groups; and for the keys of saved states, if
        these are the numbers of `Optimizer.state_dict`.

        Raises:
            LoadError: the checkpoint has more or fewer numbered parameters than the optimizer.
        """
        total = sum(len(group["params"]) for group in saved)
        numbers: dict[str, str] = {}
        groups = []
        at = 0
        for group in saved:
            given = group.get("param_names") or ()
            names = []
            for i, param in enumerate(group["params"]):
                if isinstance(param, str):
                    names.append(self.renamed(param))
                    continue
                if i < len(given):
                    name = self.renamed(given[i])
                elif total != len(self.flat):
                    raise LoadError(
                        f"{self._name}: the checkpoint has {total} parameters by number, and the "
                        f"optimizer has {len(self.flat)}; which are which only names can tell"
                    )
                else:
                    name = self.flat[at + i]
                numbers[str(param)] = name
                names.append(name)
            at += len(group["params"])
            groups.append(names)
        return groups, numbers
