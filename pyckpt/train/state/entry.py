"""How one object of a training state is saved and loaded."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from pyckpt.dcp.leaves import is_sharded_tensor
from pyckpt.dcp.report import Difference, some
from pyckpt.errors import LoadError, PyckptError, SaveError
from pyckpt.optim.wrappers import parameters, sharding
from pyckpt.train.state import values
from pyckpt.train.state.claims import Claims, is_equal, is_folded, memory_like
from pyckpt.train.state.saved import Path, Policy, Tree

__all__ = ["Entry", "GradScalerEntry", "StatefulEntry", "ValueEntry", "asked"]


class Entry(ABC):
    """One object, under its name in the state."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.policy = Policy()
        self.claims = Claims()
        """The memory that this restore fills, which all entries share."""
        self.rename: Callable[[str], str] | None = None
        """The caller's function for keys of the checkpoint that have other names in the state."""
        self.kept: list[str] = []
        """Keys that stay as they are: the checkpoint lacks them, or has them in another shape."""
        self.tied: list[str] = []
        """Keys that hold what was saved under another key, since they share its tensor."""
        self.ignored: list[str] = []
        """Keys of the checkpoint that the object does not have."""
        self.mismatched: set[int] = set()
        """Ids of tensors that stay as they are, since their saved shape is another."""
        self.stays = False
        """Whether the object stays as it is: nothing was saved that could be loaded into it."""

    @abstractmethod
    def state(self) -> Any:
        """The state to save: live tensors and values, nested."""

    def check(self) -> None:
        """Raise the errors of ``state`` for an object that cannot be saved, as far as they can be
        found without communication and before the object is used."""
        self.state()

    def claim(self) -> None:
        """Claim the memory that is this object's before that of plain values, which may be given
        other memory."""
        return

    @abstractmethod
    def template(self, saved: Tree) -> Any:
        """The tree to load into, given the saved tree. None, at any depth, takes any saved value.

        Raises:
            LoadError: the object and the saved tree do not fit.
        """

    def _lacks(self, kind: str, keys: Sequence[str]) -> None:
        """Keep the object as it is, for which the checkpoint has something else: one value, such as
        the None that stood for it.

        Args:
            kind: what it was not saved as.
            keys: what the checkpoint lacks.

        Raises:
            LoadError: the policy is to raise.
        """
        if self.policy.missing == "error":
            raise LoadError(
                f"{self.name}: it was not saved as {kind}, but as one value, such as None; pass "
                "missing='keep' to leave it as it is",
                missing=tuple(keys),
            )
        self.kept += keys
        self.stays = True

    def create(self, path: Path, item: TensorStorageMetadata) -> torch.Tensor | None:
        """A tensor for a saved one that the template lacks, or None for a plain one on the CPU."""
        return None

    def live(self, path: Path) -> Path:
        """The present path of a saved item: older checkpoints have names with wrappers."""
        return path

    def translated(self, path: Path) -> Path:
        """The present path of a saved item, by the new name that the caller gave to another key: a
        new name of a parameter also applies to its optimizer state."""
        return path

    def wants(self, path: Path) -> bool:
        """Whether this rank reads the item saved at a path."""
        return True

    @abstractmethod
    def restore(self, loaded: Any) -> None:
        """Take the template as it was loaded."""


def asked(value: Any, name: str) -> Any:
    """The ``state_dict`` of somebody else's object.

    Raises:
        SaveError: it raised; says which object that was, which its own error seldom does.
    """
    try:
        return value.state_dict()
    except (OSError, MemoryError, PyckptError):
        raise
    except Exception as error:
        hint = ""
        if isinstance(value, DataLoader):
            # Accelerate's loaders have the method in any case.
            hint = "; of loaders, only torchdata's StatefulDataLoader knows its position"
        raise SaveError(
            f"{name}: state_dict() of this {type(value).__name__} raised "
            f"{type(error).__name__}: {error}{hint}"
        ) from error


class StatefulEntry(Entry):
    """An object with ``state_dict`` and ``load_state_dict``, equal on all ranks."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self._value = value
        self._shared: dict[Path, torch.Tensor] = {}

    def state(self) -> Any:
        return values.encode(asked(self._value, self.name), self.name)

    def check(self) -> None:
        try:
            state = self._value.state_dict()
        except Exception:
            return  # it may have none before it is used
        values.encode(state, self.name)

    def template(self, saved: Tree) -> Any:
        return values.template(self.state(), saved, place=self._place)

    def _place(self, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to load into. The object is handed it, whether it was its own or is a new
        one."""
        if is_folded(tensor):
            return memory_like(tensor)
        if self.claims.taken(tensor) is not None:
            if self.claims.taken(tensor, but=self.name) is None:
                self._shared[path] = tensor
            return memory_like(tensor)
        self.claims.add(tensor, ".".join((self.name, *map(str, path))), self.name)
        return tensor

    def create(self, path: Path, item: TensorStorageMetadata) -> torch.Tensor | None:
        if len(item.chunks) < 2:
            return None
        # The state of a sharded parameter, in an optimizer that the object holds. It is read in
        # parts if all parameters of its shape are sharded in the same way.
        alike = [
            param
            for param in parameters(self._value)
            if isinstance(param, DTensor) and param.shape == item.size
        ]
        if len({(param.device_mesh, param.placements) for param in alike}) != 1:
            return None
        return torch.empty_like(alike[0].detach(), dtype=item.properties.dtype)

    def restore(self, loaded: Any) -> None:
        state = values.decode(loaded)
        alike = [
            path for path, one in self._shared.items() if is_equal(one, values.at(state, path))
        ]
        for path in alike:  # such as those of weights that are tied
            _put(loaded, path, self._shared[path])
        if alike:
            state = values.decode(loaded)
        if self._is_lacking(state):
            return
        with sharding(self._value):
            self._value.load_state_dict(state)

    def _is_lacking(self, saved: Any) -> bool:
        """Whether None was saved in the place of the object, which then stays as it is.

        Raises:
            LoadError: so it is, and the policy is to raise.
        """
        if saved is not None or self.state() is None:
            return False
        self._lacks(f"a {type(self._value).__name__}", [self.name])
        return True


class GradScalerEntry(StatefulEntry):
    """A GradScaler. Its own ``state_dict`` waits for the GPU to tell the scale."""

    def state(self) -> Any:
        state = self._value
        if not state.is_enabled() or state._scale is None or not _has_tracker(state):
            return super().state()
        return {
            "scale": state._scale,
            "growth_factor": state.get_growth_factor(),
            "backoff_factor": state.get_backoff_factor(),
            "growth_interval": state.get_growth_interval(),
            "_growth_tracker": state._growth_tracker,
        }

    def template(self, saved: Tree) -> Any:
        return None

    def restore(self, loaded: Any) -> None:
        saved = values.decode(loaded)
        if self._is_lacking(saved):
            return
        state = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in saved.items()
        }
        self._value.load_state_dict(state)


def _has_tracker(scaler: Any) -> bool:
    return isinstance(getattr(scaler, "_growth_tracker", None), torch.Tensor)


class ValueEntry(Entry):
    """A plain value: a number, a string, a tensor, or dicts and lists of them."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(name)
        self.value = value
        self.differing: list[Difference] = []
        self._kept: dict[tuple[str, ...], Any] = {}
        self._held: dict[Path, torch.Tensor] = {}
        self._shared: dict[Path, tuple[torch.Tensor, str]] = {}
        self.parted: dict[str, str] = {}
        """Keys of tensors that share memory with others, and get memory of their own; each with the
        key that keeps it."""

    def keep(self, path: tuple[str, ...]) -> None:
        """Keep the value at a path of dicts; the empty path is the value itself.

        Raises:
            KeyError: there is no value at the path.
        """
        # A copy, since tensors are loaded in place.
        self._kept[path] = copy.deepcopy(reduce(_below, path, self.value))

    @property
    def is_kept(self) -> bool:
        """Whether the whole value is kept."""
        return () in self._kept

    @property
    def fixed(self) -> bool:
        """Whether another value can only replace this one, and not be written into it."""
        if self.name in self.parted:
            return True
        return not isinstance(self.value, MutableMapping | list | torch.Tensor)

    def state(self) -> Any:
        return values.encode(self.value, self.name)

    def template(self, saved: Tree) -> Any:
        live = self.state()  # first: it refuses what contains itself
        changed = [
            one
            for one in values.of_other_shape(self.value, saved)
            if not any(one[0][: len(kept)] == kept for kept in self._kept)
        ]
        if self.policy.mismatched == "keep":
            self._held = {path: tensor for path, tensor, _ in changed}
            self.mismatched = {id(tensor) for tensor in self._held.values()}
            self.kept += [self._key(path) for path in self._held]
            self.stays = () in self._held
            # Nothing is loaded into an empty dict, and it holds the place in lists, too.
            for path, tensor in self._held.items():
                self.claims.add(tensor, self._key(path))
            return values.template(live, saved, {path: {} for path in self._held}, self._place)
        trained = {path: tensor for path, tensor, _ in changed if values.is_trained(tensor)}
        # Loading raises the error of those that hold something, together with those of modules.
        # What is empty it would take for something to be made yet.
        empty = [
            f"{self._key(path)}: {tuple(size)} is not {tuple(tensor.shape)}"
            for path, tensor, size in changed
            if path in trained and not tensor.numel()
        ]
        if empty:
            raise LoadError(
                f"tensors of another shape in the checkpoint than in the state ({len(empty)}): "
                f"{some(empty, 20)}",
                mismatched=tuple(one.partition(": ")[0] for one in empty),
            )
        return values.template(live, saved, trained, self._place)

    def _place(self, path: Path, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to load into: this one, or a new one if its memory is filled for another
        key."""
        if is_folded(tensor):
            return memory_like(tensor)
        other = self.claims.taken(tensor)
        if other is None:
            self.claims.add(tensor, self._key(path))
            return tensor
        if any(path[: len(kept)] == kept for kept in self._kept):
            return memory_like(tensor)  # what is kept takes its place
        live = values.at(self.value, path)
        # With a module, a program may share its tensors until it has others to put there, as the
        # best weights. These would follow the module if they were left so because they are equal.
        is_own = self.claims.taken(tensor, but="") is None
        if isinstance(live, torch.Tensor) and (is_own or _is_held(live)):
            self._shared[path] = live, other
        else:
            self.parted[self._key(path)] = other
        return memory_like(tensor)

    def compare(self, loaded: Any) -> None:
        """Have tensors that share memory with others stay where they are, if the same was saved for
        both.

        Raises:
            LoadError: something else was saved for some that an optimizer may hold.
        """
        if not self._shared:
            return
        loaded = values.decode(loaded)
        differing = []
        for path, (live, other) in self._shared.items():
            if is_equal(live, values.at(loaded, path)):
                self._held[path] = live
            elif _is_held(live):
                differing.append(f"{self._key(path)} and {other}")
            else:
                self.parted[self._key(path)] = other
        if differing:
            raise LoadError(
                "trained tensors that share memory in the state have different values in the "
                f"checkpoint: {some(differing, 20)}; give each its own, such as "
                "tensor.detach().clone()",
                mismatched=tuple(one.partition(" and ")[0] for one in differing),
            )

    def wants(self, path: Path) -> bool:
        return path not in self._held

    def _key(self, path: Path) -> str:
        return ".".join((self.name, *map(str, path)))

    def absent(self, saved: Any) -> list[str]:
        """Keys that the value has and the checkpoint lacks. ``saved`` is its ``Tree``, which does
        not show empty dicts, or the loaded value."""
        absent = values.absent(self.value, values.decode(saved), self.name)
        kept = [".".join((self.name, *path)) for path in self._kept]
        return [key for key in absent if not any(f"{key}.".startswith(f"{k}.") for k in kept)]

    def restore(self, loaded: Any) -> None:
        """Set ``value`` to the value for the state."""
        for path, tensor in self._held.items():
            if path:
                _put(loaded, path, tensor)
            else:
                loaded = tensor
        live = values.atoms(self.value, self.name)
        saved = values.decode(loaded)
        found = values.atoms(saved, self.name)
        self.value = values.assign(self.value, saved, self.claims, keep=True)
        for path, kept in self._kept.items():
            if path:
                reduce(_below, path[:-1], self.value)[path[-1]] = kept
            else:
                self.value = values.assign(self.value, kept)
        now = values.atoms(self.value, self.name)
        self.differing = [
            Difference(key, value, found[key], kept=_same(now.get(key), value))
            for key, value in live.items()
            if key in found and not _same(found[key], value)
        ]


def _is_held(live: torch.Tensor) -> bool:
    """Whether an optimizer may hold this very tensor."""
    if isinstance(live, nn.Parameter):
        return True
    return not is_sharded_tensor(live) and live.requires_grad


def _put(root: Any, path: Path, value: Any) -> None:
    """Put a value into a loaded tree. Lists were cut behind the last entry that was loaded."""
    node = root
    for part, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(node, list):
            node.extend({} for _ in range(len(node), int(part) + 1))
        elif part not in node:  # a key that is no string
            part = next((key for key in node if str(key) == part), part)
        if following is None:
            node[part] = value
            return
        if not node[part] and isinstance(following, int):
            node[part] = []
        node = node[part]


def _below(value: Any, key: str) -> Any:
    if not isinstance(value, MutableMapping):
        raise KeyError(key)
    return value[key]


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and one == other)
