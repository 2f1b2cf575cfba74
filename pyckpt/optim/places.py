"""Where the tensors of an optimizer's state belong: learned, or given by a rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pyckpt.optim.clone import Spec
from pyckpt.optim.learning import Learned, learn
from pyckpt.optim.tensors import Path, any_index, is_dtensor, leaves
from pyckpt.optim.wrappers import added_to, members

__all__ = [
    "Placement",
    "Placements",
    "Resolver",
    "Rule",
    "found",
    "placement",
    "register_placement",
]

Kind = Literal["host", "device", "pinned", "paged", "unknown"]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Where one entry of an optimizer's state is, or belongs.

    Attributes:
        kind: "host" (plain CPU memory), "device" (with its parameter), "pinned" (page-locked CPU
            memory), "paged" (unified memory that the driver moves; torch calls its device "cpu"),
            or "unknown": nothing is known, and a tensor on the host stays there.
        dtype: None if it is unknown, or if the entry is a Python number.
        device: None if it is unknown, or if the parameter is not given yet.
    """

    kind: Kind
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def __str__(self) -> str:
        where = str(self.device) if self.kind == "device" and self.device else self.kind
        return where if self.dtype is None else f"{where} {str(self.dtype).removeprefix('torch.')}"


UNKNOWN = Placement("unknown")

Rule = Callable[[Any, dict[str, Any], Tensor | None, Path, Any], Placement | None]


class Placements(Mapping[Tensor, Mapping[Hashable, Placement]]):
    """The result of `placement`: for each parameter, for each key of its state, a `Placement`.

    An entry of a nested container is under the tuple of keys and indices that leads to it.

    Attributes:
        param_groups: for each group, the places of its tensors (``lr``, betas), where they stay.
    """

    def __init__(
        self,
        state: Mapping[Tensor, Mapping[Hashable, Placement]],
        param_groups: list[Mapping[Hashable, Placement]],
    ) -> None:
        self._state = state
        self.param_groups = param_groups

    def __repr__(self) -> str:
        places = (place for entries in self._state.values() for place in entries.values())
        counts = Counter(map(str, places))
        shown = ", ".join(f"{count} on {place}" for place, count in counts.most_common())
        return f"<Placements of {len(self._state)} parameters: {shown or 'no entries'}>"

    def __getitem__(self, param: Tensor) -> Mapping[Hashable, Placement]:
        return self._state[param]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def placement(optimizer: Any) -> Placements:
    """Return where every entry of an optimizer's state belongs, even if it does not exist yet.

    The optimizer's own ``step`` runs on a throw-away clone with fake tensors, under the live
    options of the groups, and the entries that it creates show their places. Nothing of the
    optimizer changes, no hook runs, and no GPU is needed. Results are cached by class, options, and
    device type, dtype and shape of the parameter. An optimizer that cannot be run in this way needs
    a rule; see `register_placement`. Without either, its entries are "unknown".

    Args:
        optimizer: a `torch.optim.Optimizer`, or a wrapper of optimizers.

    Returns:
        A mapping: parameter -> key -> `Placement`. Keys in nested containers are tuples.

    Raises:
        TypeError: ``optimizer`` is neither.
    """
    state: dict[Tensor, dict[Hashable, Placement]] = {}
    groups: list[Mapping[Hashable, Placement]] = []
    for member in members(optimizer):
        resolver = Resolver(member)
        for index, group in enumerate(member.param_groups):
            groups.append({_name(path): found(t) for path, t in leaves(_without_params(group), ())})
            for param in group["params"]:
                entries: dict[Hashable, Placement] = {
                    _name(path): resolver.completed(native, param)
                    for path, native in resolver.learned(index, param).items()
                }
                live = member.state.get(param, {})
                for path, tensor in leaves(live):
                    entries.pop(_name(any_index(live, path)), None)  # it has an index now
                    entries[_name(path)] = resolver.wanted(index, param, path, live, tensor)
                # An optimizer, and another that it holds, may both have state of a parameter.
                state.setdefault(param, {}).update(entries)
    return Placements(state, groups)


def _name(path: Path) -> Hashable:
    return path[0] if len(path) == 1 else path


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def found(tensor: Tensor) -> Placement:
    """The present place of a tensor."""
    device = tensor._local_tensor.device if is_dtensor(tensor) else tensor.device  # type: ignore[attr-defined]
    if getattr(tensor, "is_paged", False):
        return Placement("paged", tensor.dtype, device)
    if device.type != "cpu":
        return Placement("device", tensor.dtype, device)
    # Asking costs a call into CUDA, and subclasses may have no memory of their own.
    pinned = torch.cuda.is_available() and type(tensor) is Tensor and tensor.is_pinned()
    return Placement("pinned" if pinned else "host", tensor.dtype, device)


# --- rules ------------------------------------------------------------------------------------

_rules: dict[type | str, Rule] = {}


def register_placement(cls: type | str, rule: Rule) -> None:
    """Register a rule for the state of an optimizer that cannot be run on fake tensors.

    Args:
        cls: the class, or its qualified name (``"package.module.Class"``), so that it need not be
            imported. The rule also applies to subclasses.
        rule: called as ``rule(optimizer, group, param, path, value)`` for each tensor. ``path`` are
            the keys and indices to it in the parameter's state. ``param`` is None for a tensor in
            the group itself. Returns a `Placement`, whose ``device`` may be left out, or None if it
            does not know. An optimizer with a rule is never run. The last rule for a class counts.
    """
    _rules[cls] = rule


def rule_for(cls: type) -> Rule | None:
    for base in cls.__mro__:
        for name in (base, f"{base.__module__}.{base.__qualname__}"):
            if name in _rules:
                return _rules[name]
    return None


# --- resolving --------------------------------------------------------------------------------


class Resolver:
    """Finds where each tensor of one optimizer belongs. Make a new one for each use, since it holds
    results for the present options of the groups.

    Args:
        groups: use the options of these groups instead of the live ones.
        device: learn for parameters on this device instead of their own.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        groups: list[dict[str, Any]] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._groups = optimizer.param_groups if groups is None else groups
        self._device = device
        self._rule = rule_for(type(optimizer))
        self._by_group: dict[int, dict[Spec, Learned]] = {}
        self._tables: dict[tuple[int, Spec], dict[Path, Placement]] = {}
        self._quick: dict[Any, dict[Hashable, tuple[Any, torch.dtype | None]]] = {}

    def spec(self, param: Tensor) -> Spec:
        return Spec.of(param, self._device)

    def learned(self, index: int, param: Tensor) -> dict[Path, Placement]:
        """The entries that a step creates for a parameter of that group, by path; no devices."""
        key = (index, self.spec(param))
        if key not in self._tables:
            natives = {} if self._rule is not None else self._group(index)[key[1]].natives
            table = {path: Placement(native.kind, native.dtype) for path, native in natives.items()}
            for path in added_to(self._optimizer):
                table[path] = Placement("device", param.dtype)
            self._tables[key] = table
        return self._tables[key]

    def table(self, index: int, param: Tensor) -> dict[Hashable, tuple[Any, torch.dtype | None]]:
        """For keys at the top of the parameter's state, a device and dtype with which an entry
        certainly is where it belongs."""
        key = (index, type(param), param.device, param.dtype, param.shape)
        table = self._quick.get(key)
        if table is None:
            completed = {
                path: self.completed(native, param)
                for path, native in self.learned(index, param).items()
            }
            table = self._quick[key] = {
                path[0]: (native.device, native.dtype)
                for path, native in completed.items()
                # Pinned memory and the devices of DTensors need more tests than these two values.
                if len(path) == 1 and native.kind in ("host", "device") and not is_dtensor(param)
            }
        return table

    def shape(self, index: int, param: Tensor, generic: Path) -> tuple[int, ...] | None:
        """The shape with which a step creates the tensor at that path; None if not learned."""
        if self._rule is not None:
            return None
        native = self._group(index)[self.spec(param)].natives.get(generic)
        return None if native is None else native.shape

    def _group(self, index: int) -> dict[Spec, Learned]:
        if index not in self._by_group:
            group = self._groups[index]
            specs = dict.fromkeys(self.spec(param) for param in group["params"])
            self._by_group[index] = learn(self._optimizer, group, specs)
        return self._by_group[index]

    def wanted(self, index: int, param: Tensor, path: Path, state: Any, value: Any) -> Placement:
        """Where the tensor at ``path`` of ``state``, the parameter's, belongs."""
        table = self.learned(index, param)
        native = table.get(path) or table.get(any_index(state, path))
        if native is None and self._rule is not None:
            native = self._rule(self._optimizer, self._groups[index], param, path, value)
        return UNKNOWN if native is None else self.completed(native, param)

    def wanted_shared(
        self, index: int, param: Tensor, path: Path, state: Any, value: Any
    ) -> Placement:
        """Where a tensor of ``state``, the optimizer's, belongs if it is no parameter's: the place
        that was learned, or the place as if it belonged to this parameter."""
        if self._rule is None:
            shared = self._group(index)[self.spec(param)].shared
            native = shared.get(path) or shared.get(any_index(state, path))
            if native is not None:
                return self.completed(Placement(native.kind, native.dtype), param)
        if len(path) > 1:
            path, state = path[1:], state[path[0]]
        return self.wanted(index, param, path, state, value)

    def wanted_in_group(self, index: int, path: Path, value: Any) -> Placement:
        """Where a tensor of the group itself belongs, which only rules say."""
        group = self._groups[index]
        if self._rule is None or not group["params"]:
            return UNKNOWN
        said = self._rule(self._optimizer, group, None, path, value)
        return UNKNOWN if said is None else self.completed(said, group["params"][0])

    def completed(self, native: Placement, param: Tensor) -> Placement:
        """The placement, with the device for this parameter."""
        if native.device is not None or native.kind == "unknown":
            return native
        if native.kind != "device":
            return replace(native, device=_CPU)
        device = param._local_tensor.device if is_dtensor(param) else param.device  # type: ignore[attr-defined]
        return replace(native, device=device)
