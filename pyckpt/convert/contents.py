"""What an import puts into a checkpoint: objects in the form in which a Checkpointer saves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pyckpt.convert.numbering import name_parameters
from pyckpt.convert.unwrapping import REPLICATED, unwrapping
from pyckpt.train.state import values
from pyckpt.train.state.modules import without_wrappers
from pyckpt.train.state.per_rank import state_of_ranks

__all__ = ["Contents", "is_optimizer", "is_weights"]


def is_optimizer(value: Any) -> bool:
    """Whether a value has the form of an optimizer's ``state_dict``."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def is_weights(value: Any) -> bool:
    """Whether a value has the form of a module's ``state_dict``."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) for name in value)
        and sum(isinstance(one, torch.Tensor) for one in value.values()) * 2 > len(value)
    )


def _unwrapped(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights without the names that wrappers give them."""
    name_of = unwrapping(weights)
    return {name_of(name): one for name, one in weights.items()}


def _named_without_wrappers(
    optimizer: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """The groups and the states of an optimizer. The names of its parameters are those that its
    module has without wrappers, which the optimizer may have had when the module had them not."""
    groups = [dict(group) for group in optimizer["param_groups"]]
    lists = [
        group[key]
        for group in groups
        for key in ("params", "param_names")
        if isinstance(group.get(key), list)
    ]
    name_of = unwrapping({one for names in lists for one in names if isinstance(one, str)}, model)

    def renamed(one: Any) -> Any:
        return name_of(one) if isinstance(one, str) else one

    for group in groups:
        for key in ("params", "param_names"):
            if isinstance(group.get(key), list):
                group[key] = [renamed(one) for one in group[key]]
    return groups, {renamed(key): entries for key, entries in optimizer["state"].items()}


@dataclass
class Contents:
    """The objects of a checkpoint, collected one by one.

    Args:
        kind: what the source is, for people.
        step: the step that the source tells; None if it tells none.
        named_by_order: whether parameters that optimizers number get the names that weights of
            their shapes have, in their order. Wrong if an optimizer was made of its parameters in
            another order than that of the module.

    Attributes:
        objects: by name, encoded for DCP.
        notes: what is not carried over, or in another form, as sentences.
    """

    kind: str
    step: int | None = None
    named_by_order: bool = False
    objects: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_model(self, weights: Mapping[str, Any], name: str = "model") -> None:
        """Add the state of a module."""
        found = _unwrapped(weights)
        pairs = zip(weights, found, strict=True)
        if any(found_as not in (key, without_wrappers(key)) for key, found_as in pairs):
            self.notes.append(
                f"{name}: all names began with {REPLICATED!r}, as those of DDP do, and lost it"
            )
        self.objects[name] = {
            key: values.encode(value, f"{name}.{key}") for key, value in found.items()
        } or values.encode({}, name)

    def add_optimizer(
        self,
        state: Mapping[str, Any],
        name: str = "optimizer",
        weights: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the state of an optimizer, in the form that an `OptimizerEntry` saves.

        Args:
            weights: of the module whose parameters it steps, if they are known.
        """
        model = _unwrapped(weights or {})
        groups, states = _named_without_wrappers(state, model)
        named = {key: entries for key, entries in states.items() if entries}
        numbered = any(not isinstance(p, str) for group in groups for p in group["params"])
        if numbered and not all("param_names" in group for group in groups):
            names = None
            if self.named_by_order and weights is not None:
                names = name_parameters(groups, named, model)
            if names is None:
                why = ", and the order of the weights does not tell which is which"
                self.notes.append(
                    f"{name}: its parameters are known by their numbers, not by their names"
                    + (why if self.named_by_order else "")
                    + "; it resumes an optimizer that has the same parameters in the same order"
                )
            else:
                named = {names[key]: entries for key, entries in named.items()}
                for group in groups:
                    group["params"] = [names[number] for number in group["params"]]
        rest = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
        self.objects[name] = {
            **values.encode({"state": named, **rest}, name),
            "param_groups": [
                {
                    key: list(value)
                    if key == "params"
                    else values.encode(value, f"{name}.param_groups.{i}.{key}")
                    for key, value in group.items()
                }
                for i, group in enumerate(groups)
            ],
        }

    def add(self, name: str, value: Any) -> None:
        """Add anything else: plain values and tensors."""
        if is_optimizer(value):
            self.add_optimizer(value, name)
        else:
            self.objects[name] = values.encode(value, name)

    def add_ranks(self, name: str, states: Sequence[Any]) -> None:
        """Add state that each rank has for itself."""
        self.objects[name] = state_of_ranks(states, name)

    def leave_out(self, left_out: Mapping[str, str]) -> None:
        """Note objects that could not be read."""
        self.notes += [
            f"{key} is left out: it is a {kind}, which only code of its own makes"
            for key, kind in left_out.items()
        ]
