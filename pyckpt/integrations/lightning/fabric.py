"""Strategies of Fabric whose ``fabric.save`` and ``fabric.load`` go through pyckpt. ::

fabric = Fabric(devices=8, strategy=DDPStrategy())
fabric.save("checkpoints/a", {"model": model, "optimizer": optimizer, "step": step})
fabric.load("checkpoints/a", state)
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.strategies import DDPStrategy as _DDP
from lightning.fabric.strategies import FSDPStrategy as _FSDP
from lightning.fabric.strategies import ModelParallelStrategy as _ModelParallel
from lightning.fabric.strategies import SingleDeviceStrategy as _SingleDevice
from torch import nn
from torch.optim import Optimizer

from pyckpt.dcp.load import load_all
from pyckpt.dcp.reader import DirectReader
from pyckpt.format.paths import paths
from pyckpt.integrations.first import on_first
from pyckpt.integrations.lightning.contents import module_state
from pyckpt.integrations.lightning.strategies import look_at, no_checkpoint, refuse_shards
from pyckpt.train.path_saver import PathSaver
from pyckpt.train.prewarmer import Prewarmer
from pyckpt.train.restorer import LoadOptions
from pyckpt.train.state.modules import Replaced
from pyckpt.train.store.catalog import OWN_KEYS, STATES_KEY

__all__ = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"]

_Strategy: Any = object  # one of Lightning's, in each class that is made of these


class _Saving(_Strategy):
    """What the strategies have in common: ``fabric.save`` and ``fabric.load``.

    The state may have all that a `Checkpointer` takes, also `RngState`, `MetricState` and
    `PerRank`. A checkpoint is a directory, sharded where the strategy shards. ``save`` returns
    while it is being written. The next ``save`` or ``load`` waits for it, and raises its error if
    it failed. So does ``fabric.strategy.wait()``, which belongs at the end of the program: what
    fails after the last call is only logged.

    ``load`` returns the entries of the checkpoint that are not in the state. Where the strategy
    shards, it leaves out those that were modules and optimizers when they were saved, as
    Lightning's own do: each rank would read them whole.

    Args:
        direct: whether saving and loading bypass the page cache, as for `DirectWriter`.
        prewarm: whether the memory of the first save is made in the background, from the first step
            of the optimizers on, for the modules that are trained.
        args, kwargs: as for Fabric's strategy of the same name.
    """

    def __init__(
        self,
        *args: Any,
        direct: Literal["auto", "require", "off"] = "auto",
        prewarm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._direct = direct
        self._prewarmer = Prewarmer(enabled=prewarm)
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._saver: PathSaver | None = None

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> Any:
        """As of Lightning."""
        found = super().setup_module_and_optimizers(module, optimizers, scheduler)
        self._modules.add(found[0])
        self._optimizers.update(found[1])
        return found

    def setup_module(self, module: nn.Module) -> nn.Module:
        """As of Lightning."""
        found: nn.Module = super().setup_module(module)
        self._modules.add(found)
        return found

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As of Lightning."""
        found: Optimizer = super().setup_optimizer(optimizer)
        self._optimizers.add(found)
        return found

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """As of Lightning. After the first step it also begins to ``prewarm``."""
        found = super().optimizer_step(optimizer, **kwargs)
        if self._prewarmer.is_over:
            return found
        # A module that is not trained may be one that the program does not save.
        trained = [one for one in self._modules if any(p.requires_grad for p in one.parameters())]
        optimizers = {f"optimizer_{i}": one for i, one in enumerate(self._optimizers)}
        self._prewarmer.step_ended({"modules": trained, **optimizers})
        return found

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        chosen = {
            name: _filtered(name, value, (filter or {}).get(name)) for name, value in state.items()
        }
        self._prewarmer.saving()
        states = [name for name, one in state.items() if isinstance(one, nn.Module | Optimizer)]
        chosen[STATES_KEY] = dict.fromkeys(states, True)
        self._open().save(self.broadcast(path), chosen)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(self.broadcast(path))
        self.wait()
        # The first rank looks: file systems of others may lag behind.
        kind = on_first(lambda: look_at(path))
        if kind != "ours":
            if kind != "theirs":
                raise no_checkpoint(path, kind)
            if not self._shards:
                refuse_shards(path, self)
            return dict(super().load_checkpoint(path, state, strict, weights_only))
        if not state:
            return {name: value for name, value in load_all(path).items() if name not in OWN_KEYS}
        if isinstance(state, nn.Module | Optimizer):
            raise TypeError("a checkpoint of pyckpt is loaded into a dict, as it was saved")
        saved = on_first(lambda: _entries(path, all_of_them=not self._shards))
        rest = dict.fromkeys(saved - state.keys())
        objects = {**state, **rest}
        options = LoadOptions(
            missing="error" if strict else "keep", unexpected="error" if strict else "ignore"
        )
        self._open().load(path, objects, options)
        state.update({name: objects[name] for name in state})
        return {name: objects[name] for name in rest}

    def wait(self) -> None:
        """Wait until no save is under way. All ranks call it.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        if self._saver is not None:
            self._saver.wait()

    def teardown(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
        super().teardown()

    @property
    def _shards(self) -> bool:
        return isinstance(self, _FSDP | _ModelParallel)

    def _open(self) -> PathSaver:
        if self._saver is None:
            self._saver = PathSaver(direct=self._direct)
            # Fabric does not say when it ends.
            atexit.register(_end, weakref.ref(self._saver))
        return self._saver


def _end(saver: weakref.ref[PathSaver]) -> None:
    if (one := saver()) is not None:
        one.abandon()


def _entries(path: Path, *, all_of_them: bool) -> set[str]:
    """The names of a checkpoint's entries: all, or those that are not noted as states of modules
    and optimizers. Other writers note none."""
    found: set[str] = set()
    noted: set[str] = set()
    for entry, *below in paths(DirectReader(path).read_metadata()).values():
        if entry == STATES_KEY:
            noted.update(map(str, below))
        found.add(str(entry))
    return (found if all_of_them else found - noted) - OWN_KEYS


def _filtered(name: str, value: Any, keep: Callable[[str, Any], bool] | None) -> Any:
    if keep is None:
        return value
    if isinstance(value, nn.Module):
        found = module_state(value)
        return Replaced(value, {key: one for key, one in found.items() if keep(key, one)})
    if isinstance(value, Mapping):
        return {key: one for key, one in value.items() if keep(key, one)}
    raise NotImplementedError(f"filter: {name} is neither a module nor a dict")


class SingleDeviceStrategy(_Saving, _SingleDevice):
    __doc__ = _Saving.__doc__


class DDPStrategy(_Saving, _DDP):
    __doc__ = _Saving.__doc__


class FSDPStrategy(_Saving, _FSDP):
    __doc__ = _Saving.__doc__


class ModelParallelStrategy(_Saving, _ModelParallel):
    __doc__ = _Saving.__doc__
