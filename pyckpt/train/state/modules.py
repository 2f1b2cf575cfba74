"""Modules: states under fully qualified names, whatever wraps the module."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from pyckpt.dcp.leaves import whole_size
from pyckpt.dcp.renaming import WRAPPERS
from pyckpt.dcp.report import some
from pyckpt.dcp.whole import is_special
from pyckpt.errors import LoadError
from pyckpt.speaking import for_all
from pyckpt.train.state import values
from pyckpt.train.state.claims import fold, is_folded, memory_like
from pyckpt.train.state.entry import Entry
from pyckpt.train.state.saved import Path, Tree

__all__ = [
    "ModuleEntry",
    "Names",
    "Replaced",
    "Trainable",
    "is_fsdp1",
    "quiet",
    "reshard",
    "sharded",
    "without_wrappers",
]

_logger = logging.getLogger("pyckpt")

# Those whose left-out names were logged.
_told: weakref.WeakSet[Trainable] = weakref.WeakSet()

# DDP and DataParallel add "module", which may also be a submodule's own name, so `Names` looks at
# the modules themselves.
_WRAPPERS = tuple(f"{name}." for name in WRAPPERS)


def without_wrappers(name: str) -> str:
    """Return a name without the parts that wrappers add, if the name alone shows them."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class Names:
    """The names that a module's parameters and buffers would have without its wrappers."""

    def __init__(self, module: nn.Module) -> None:
        self._replicated: list[str] = []
        for name, sub in module.named_modules(remove_duplicate=False):
            if isinstance(sub, nn.parallel.DistributedDataParallel | nn.DataParallel):
                # Outer ones come first, so that an inner one's name is without them already.
                self._replicated.append(self(f"{name}." if name else ""))

    def __call__(self, name: str) -> str:
        name = without_wrappers(name)
        for prefix in self._replicated:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        return name


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is, or contains, a ``FullyShardedDataParallel``."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(sub, FullyShardedDataParallel) for sub in module.modules())


def reshard(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 put its sharded parameters back into modules, which are those that optimizers
    know. A forward leaves whole ones there until the backward, which an evaluation never runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in modules:
        for sub in module.modules():
            if isinstance(sub, fsdp.FSDPModule):
                sub.reshard()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's warnings about FSDP1, which is deprecated, and about its own internals."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        warnings.filterwarnings("ignore", message="FSDP.set_state_dict_type")
        warnings.filterwarnings("ignore", message="Please use DTensor instead")
        warnings.filterwarnings("ignore", message=".*_get_pg_default_device")
        warnings.filterwarnings("ignore", message="Multiple backends are registered")
        yield


@contextmanager
def sharded(module: nn.Module) -> Iterator[None]:
    """Have FSDP1 return and load each rank's shards. Other modules are not changed."""
    if not is_fsdp1(module):
        yield
        return
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    with (
        quiet(),
        FullyShardedDataParallel.state_dict_type(
            module,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ),
    ):
        yield


class Trainable:
    """Saves and restores only the trained part of a module::

        state = {"model": pyckpt.Trainable(model), "optimizer": optimizer}

    The trained part consists of the parameters that require gradients, and of the buffers of
    submodules that have such parameters of their own. The program itself makes the rest, such as
    the base model of a LoRA adapter, and restoring does not change it. From a checkpoint of the
    whole module, only the trained part is restored.

    Args:
        module: the module, wrapped or not. Each save and each restore looks anew which parameters
            require gradients.

    Attributes:
        module: as given.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Trainable takes a module, not {type(module).__name__}.")
        self.module = module

    @property
    def left_out(self) -> list[str]:
        """Names of the parameters and persistent buffers that are not saved."""
        kept = self._names()
        names = Names(self.module)
        with sharded(self.module):
            found = [names(key) for key in self.module.state_dict()]
        return [name for name in found if name not in kept]

    def _names(self) -> set[str]:
        names = Names(self.module)
        kept = set()
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            own = [(key, p) for key, p in module.named_parameters(recurse=False) if p.requires_grad]
            if own:
                own += list(module.named_buffers(recurse=False))
            kept |= {names(f"{prefix}.{key}" if prefix else key) for key, _ in own}
        return kept


class Replaced(Trainable):
    """A module of which other values are saved, under its names: averaged weights, or some of them.
    Loads as the module does.

    Args:
        module: the module, wrapped or not.
        values: what to save, by the names without wrappers.
    """

    def __init__(self, module: nn.Module, values: Mapping[str, Any]) -> None:
        super().__init__(module)
        self.values = values

    @property
    def left_out(self) -> list[str]:
        return []


class ModuleEntry(Entry):
    """A module's parameters, persistent buffers and extra states."""

    def __init__(self, name: str, value: nn.Module | Trainable) -> None:
        super().__init__(name)
        self._view = value if isinstance(value, Trainable) else None
        self._module = value.module if isinstance(value, Trainable) else value
        self._unwanted: set[str] = set()
        self._folded: set[str] = set()

    def state(self) -> Any:
        self._tell_left_out()
        return {
            name: values.encode(value, f"{self.name}.{name}")
            for name, (_, value) in self._raw().items()
        } or values.encode({}, self.name)

    def check(self) -> None:
        if not is_fsdp1(self._module):  # taking the state of FSDP1 is collective
            self.state()

    def claim(self) -> None:
        # All of the module, since what is not loaded stays as it is.
        names = Names(self._module)
        for key, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            self.claims.add(tensor, f"{self.name}.{names(key)}", self.name)

    def template(self, saved: Tree) -> Any:
        live = self._raw()
        if not isinstance(saved, dict):
            if live:
                self._lacks("a module with a state", [f"{self.name}.{name}" for name in live])
            return None
        left_out = set(self._view.left_out) if self._view is not None else set()
        unexpected = [name for name in saved if name not in live and name not in left_out]
        if unexpected and self.policy.unexpected == "error":
            raise LoadError(
                f"{self.name}: the checkpoint has what the module has not ({len(unexpected)}): "
                f"{some(unexpected, 20)}; pass unexpected='ignore' to leave it out",
                unexpected=tuple(f"{self.name}.{name}" for name in unexpected),
            )
        self.ignored += [f"{self.name}.{name}" for name in unexpected]
        tied = _tied(live, saved)
        self.tied += [f"{self.name}.{name}" for name in live if name in tied]
        changed = [name for name in live if _has_other_shape(live[name][1], saved.get(name))]
        if self.policy.mismatched == "error":
            changed = []  # loading raises the error
        self.kept += [f"{self.name}.{name}" for name in changed]
        self._unwanted = {*unexpected, *changed, *left_out, *tied}
        names = Names(self._module)
        self.mismatched = {
            id(param)
            for key, param in self._module.named_parameters(remove_duplicate=False)
            if names(key) in changed
        }
        template = {}
        for name, (_, value) in live.items():
            if name in changed or name in tied:
                continue
            if not isinstance(value, torch.Tensor):
                template[name] = values.template(None, saved.get(name))
            elif value.is_meta:
                raise LoadError(f"{self.name}.{name} is on the meta device; materialize it first")
            elif is_folded(value) and isinstance(saved.get(name), TensorStorageMetadata):
                template[name] = (
                    value if _has_other_shape(value, saved[name]) else memory_like(value)
                )
                self._folded.add(name)
            else:
                template[name] = value
        return template or None

    def live(self, path: Path) -> Path:
        return (without_wrappers(str(path[0])), *path[1:])

    def wants(self, path: Path) -> bool:
        return str(path[0]) not in self._unwanted

    def restore(self, loaded: Any) -> None:
        if not isinstance(loaded, dict):
            return  # a module without any state
        raw: OrderedDict[str, Any] = OrderedDict()
        with sharded(self._module):
            state = self._module.state_dict()
            names = Names(self._module)
            for key, now in state.items():
                name = names(key)
                if name in self._folded and not fold(now, loaded[name]):
                    raise LoadError(
                        f"{self.name}.{name}: its elements share memory, as expand() makes them, "
                        "and the checkpoint has different values for them",
                        mismatched=(f"{self.name}.{name}",),
                    )
                raw[key] = (
                    now
                    if name in self._folded or name in self._unwanted
                    else values.decode(loaded[name])
                )
            # Versions of modules, by which hooks recognise older states.
            raw._metadata = state._metadata  # type: ignore[attr-defined]
            # Tensors that were loaded in place are copied onto themselves, which torch skips.
            self._module.load_state_dict(raw)

    def _raw(self) -> dict[str, tuple[str, Any]]:
        """Key and value in the module's own state, by the name without wrappers."""
        if isinstance(self._view, Replaced):
            return {name: (name, value) for name, value in self._view.values.items()}
        names = Names(self._module)
        with sharded(self._module):
            state = self._module.state_dict()
        found: dict[str, tuple[str, Any]] = {}
        for key, value in state.items():
            name = names(key)
            if name in found:
                raise ValueError(
                    f"{self.name}: {found[name][0]} and {key} would both be saved as {name}"
                )
            found[name] = (key, value)
        if self._view is not None:
            kept = self._view._names()
            found = {name: entry for name, entry in found.items() if name in kept}
        return found

    def _tell_left_out(self) -> None:
        if self._view is None or self._view in _told:
            return
        _told.add(self._view)
        left_out = self._view.left_out
        _logger.log(
            for_all(logging.INFO),
            "%s: %d parameters and buffers are not trained and not saved: %s",
            self.name,
            len(left_out),
            some(left_out),
        )


def _tied(live: Mapping[str, tuple[str, Any]], saved: Mapping[str, Any]) -> set[str]:
    """Names that were not saved, of tensors that the checkpoint has under another of their names:
    safetensors keep one name of tied weights."""
    by_place = {_place(live[name][1]): name for name in live if name in saved}
    return {
        name
        for name, (_, value) in live.items()
        if name not in saved and _place(value) is not None and _place(value) in by_place
    }


def _place(value: Any) -> Any:
    """Which memory a tensor's elements are in, as something to compare; None if that does not tell
    it from others. Views of one memory that begin alike, but step otherwise, are not tied."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    if type(local) not in (torch.Tensor, nn.Parameter) or local.is_meta or is_special(local):
        return None
    if not local.data_ptr():
        return None
    steps = sorted(zip(local.shape, local.stride(), strict=True))
    # The stride of a dimension of one element says nothing.
    covered = tuple((size, stride) for size, stride in steps if size != 1)
    return local.data_ptr(), value.shape, local.dtype.itemsize, covered


def _has_other_shape(value: Any, saved: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and isinstance(saved, TensorStorageMetadata)
        and whole_size(value) != saved.size
    )
