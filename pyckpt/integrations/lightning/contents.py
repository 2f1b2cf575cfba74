"""What the state of a Trainer is made of, and how it goes back.

The checkpoint has these objects:

- ``model``: the module, sharded where the strategy shards it
- ``optimizer_0``, ...: the optimizers, by the names of their parameters
- ``lightning``: the rest of the dict that Lightning would have saved: loops, callbacks, schedulers,
  hyperparameters, and what ``on_save_checkpoint`` hooks add
- ``metrics``: the states of the module's metrics, each rank's own
- ``loaders``: the positions of the dataloaders, each rank's own
- ``rng``: the random number generators, each rank's own
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torchmetrics import Metric

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.lightning import finetuning, schedules
from pyckpt.train.state import values
from pyckpt.train.state.app_state import AppState
from pyckpt.train.state.modules import Replaced
from pyckpt.train.state.per_rank import Merge
from pyckpt.train.state.saved import Rank

__all__ = ["Contents", "Handed", "Later", "Template", "dump", "module_state"]

_logger = logging.getLogger("pyckpt")

_LOADERS = "combined_loader"  # among the states of the fit loop
_told: set[tuple[str, ...]] = set()
"""Hyperparameters of which it was said that they are not saved."""


# --- saving ---------------------------------------------------------------------------------------


def module_state(module: nn.Module) -> dict[str, Any]:
    """The live tensors of a module, each rank's shards, by the names without wrappers."""
    state: Any = AppState({"model": module}).state_dict()["model"]
    return dict(state)


class Handed:
    """What is taken before anything else of a checkpoint is made.

    Attributes:
        weights: the module's state, as it was before any hook could change it.
        generators: the random number generators. A dataloader that is asked for its state between
            two epochs makes its next iterator, which draws numbers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.generators = _Generators()
        self.weights = module_state(module)


class _Generators(pyckpt.RngState):
    """The generators as they were when this was made."""

    def __init__(self) -> None:
        self._taken = super()._own(Rank.of())

    def _own(self, rank: Rank) -> Any:
        return self._taken


def dump(trainer: Trainer) -> tuple[dict[str, Any], Handed]:
    """The checkpoint that Lightning would save, of live tensors, without the optimizers."""
    strategy, module, data = trainer.strategy, trainer.lightning_module, trainer.datamodule
    assert strategy.model is not None
    handed = Handed(strategy.model)
    checkpoint: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": dict(handed.weights),
        "loops": {
            "fit_loop": trainer.fit_loop.state_dict(),
            "validate_loop": trainer.validate_loop.state_dict(),
            "test_loop": trainer.test_loop.state_dict(),
            "predict_loop": trainer.predict_loop.state_dict(),
        },
        "callbacks": {
            callback.state_key: state
            for callback in trainer.callbacks
            if (state := callback.state_dict())
        },
        "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
    }
    precision = trainer.precision_plugin
    if state := precision.state_dict():
        checkpoint[type(precision).__qualname__] = state
    precision.on_save_checkpoint(checkpoint)
    for owner in (module, data):
        if owner is not None and owner.hparams:
            checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
    if data is not None and (state := data.state_dict()):
        checkpoint[type(data).__qualname__] = state
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    schedules.note(trainer, checkpoint)
    finetuning.note(trainer, checkpoint)
    return checkpoint, handed


class Contents(Mapping[str, Any]):
    """The objects of a Trainer's state, to be saved. The names are known at once; the checkpoint is
    made when an object is asked for first, since most steps are not saved.

    Args:
        strategy: of the Trainer. A program can have connected a module without a Trainer.
        make: makes the checkpoint.
        weights_only: leave out all that only training needs.
    """

    def __init__(
        self,
        strategy: Strategy,
        make: Callable[[], tuple[dict[str, Any], Handed]],
        *,
        weights_only: bool = False,
    ) -> None:
        assert strategy.lightning_module is not None
        self._strategy = strategy
        self._module = strategy.lightning_module
        self._make = make
        self._objects: dict[str, Any] | None = None
        self._names = ["model", "lightning"]
        if not weights_only:
            self._names += [f"optimizer_{i}" for i in range(len(strategy.optimizers))]
            self._names += ["loaders", "rng"]
            if _has_metrics(self._module):
                self._names.append("metrics")

    def __getitem__(self, name: str) -> Any:
        if self._objects is None:
            self._objects = self._collect()
        return self._objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _collect(self) -> dict[str, Any]:
        checkpoint, handed = self._make()
        rest = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states", "hparams_type")
        }
        loops = rest["loops"] = dict(rest["loops"])
        fit = loops["fit_loop"] = dict(loops["fit_loop"])
        own = fit["state_dict"] = dict(fit["state_dict"])
        loaders = own.pop(_LOADERS, [])
        for owner in (LightningModule, LightningDataModule):
            key = owner.CHECKPOINT_HYPER_PARAMS_KEY
            if key in rest:
                rest[key] = _plain(rest[key], f"{type(self._module).__name__} ({key})")
        module: Any = self._strategy.model
        weights = checkpoint["state_dict"]
        if not _is_same(weights, handed.weights):  # a hook has put others in their place
            module = Replaced(module, weights)
        found = {
            "model": module,
            "lightning": rest,
            "loaders": pyckpt.PerRank(loaders),
            "rng": handed.generators,
            **{f"optimizer_{i}": one for i, one in enumerate(self._strategy.optimizers)},
        }
        if "metrics" in self._names:
            found["metrics"] = pyckpt.MetricState(self._module)
        return {name: found[name] for name in self._names}


def _has_metrics(module: nn.Module) -> bool:
    return any(isinstance(one, Metric) for one in module.modules())


def _is_same(state: Mapping[str, Any], handed: Mapping[str, Any]) -> bool:
    return state.keys() == handed.keys() and all(state[key] is handed[key] for key in state)


def _plain(hparams: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Hyperparameters that a load can make again without running code. Resuming needs none."""
    kept, left_out = {}, []
    for key, value in hparams.items():
        value = _simple(value)
        try:
            values.encode(value, key)
        except TypeError:
            left_out.append(key)
        else:
            kept[key] = value
    if left_out and (owner, *left_out) not in _told:
        _told.add((owner, *left_out))
        _logger.warning(
            "hyperparameters of %s that are no plain values are not saved: %s",
            owner,
            ", ".join(left_out),
        )
    return kept


def _simple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _simple(sub) for key, sub in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_simple, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# --- restoring ------------------------------------------------------------------------------------


class Template:
    """The objects of a Trainer's state, to be loaded into.

    Args:
        trainer: whose state it is.
        fitting: whether the rest of training is restored, besides the module.
        merge_data: brings the positions of dataloaders to another number of ranks, as for
            `PerRank`.

    Attributes:
        objects: the state for ``AppState.load``.
    """

    def __init__(self, trainer: Trainer, *, fitting: bool, merge_data: Merge | None) -> None:
        self._trainer = trainer
        self._fitting = fitting
        self._loaders = pyckpt.PerRank([], merge=merge_data or _refuse)
        self._rest: dict[str, Any] = {}
        self._before: finetuning.Before | None = None
        self.objects: dict[str, Any] = {"model": trainer.strategy.model, "lightning": self._rest}
        if fitting:
            self.objects |= {f"optimizer_{i}": one for i, one in enumerate(trainer.optimizers)}
            self.objects |= {"loaders": self._loaders, "rng": pyckpt.RngState()}
            if _has_metrics(trainer.lightning_module):
                self.objects["metrics"] = pyckpt.MetricState(trainer.lightning_module)

    @property
    def first(self) -> dict[str, Any]:
        """What is loaded before all of the objects: callbacks that change the optimizers must do so
        before these are loaded. Empty if there are no such callbacks."""
        is_needed = self._fitting and finetuning.callbacks_of(self._trainer)
        return {"lightning": self._rest} if is_needed else {}

    def prepare(self) -> None:
        """Make the optimizers' groups, when ``first`` is loaded. Those that it made for another
        checkpoint, whose objects could not be loaded, are put aside."""
        if self._before is None:
            self._before = finetuning.Before(self._trainer)
        else:
            self._before.put_back()
        finetuning.regroup(self._trainer, self._rest)
        self._rest.clear()

    def checkpoint(self) -> dict[str, Any]:
        """What was loaded, as Lightning would have loaded it. Tensors of the module are its own."""
        assert self._trainer.strategy.model is not None
        checkpoint = {**self._rest, "state_dict": module_state(self._trainer.strategy.model)}
        if not _is_within_epoch(checkpoint["loops"]):
            # Callbacks save before Lightning counts the epoch as completed, and with max_steps it
            # would run it once more, without a batch.
            for count in checkpoint["loops"]["fit_loop"]["epoch_progress"].values():
                count["completed"] = count["processed"]
        if schedules.averages(self._trainer, checkpoint):
            checkpoint["lr_schedulers"] = []
        return checkpoint

    def rest_of(self) -> Later:
        """What is to be restored later; to be called when all else of this object was loaded."""
        return Later(
            self._loaders.value,
            self._rest.get(schedules.KEY),
            within_epoch=_is_within_epoch(self._rest["loops"]),
        )

    def apply(self) -> Later:
        """Hand the rest to those whose it is: what Lightning does once it has loaded a file.
        Returns what is to be restored later."""
        later = self.rest_of()
        trainer, checkpoint = self._trainer, self.checkpoint()
        module, data = trainer.lightning_module, trainer.datamodule
        module.on_load_checkpoint(checkpoint)
        if data is not None and (state := checkpoint.get(type(data).__qualname__)) is not None:
            data.load_state_dict(state)
        states = checkpoint.get("callbacks", {})
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, module, checkpoint)
        for callback in trainer.callbacks:
            if (state := states.get(callback.state_key)) is not None:
                callback.load_state_dict(state)
        precision = trainer.precision_plugin
        precision.on_load_checkpoint(checkpoint)
        if (state := checkpoint.get(type(precision).__qualname__)) is not None:
            precision.load_state_dict(state)
        trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs]
        saved = checkpoint["lr_schedulers"]
        if schedules.averages(trainer, checkpoint):
            schedulers = []
        if len(schedulers) != len(saved):
            raise LoadError(
                f"the checkpoint has {len(saved)} learning rate schedulers, and "
                f"configure_optimizers returned {len(schedulers)}"
            )
        for scheduler, state in zip(schedulers, saved, strict=True):
            scheduler.load_state_dict(state)
        later.generators()  # in case a hook has drawn numbers
        return later


class Later:
    """What is restored once the loop has made its dataloaders, right before training starts.

    Lightning has made an iterator of them by then, which has drawn numbers, and knew no epoch.
    Training that goes on within an epoch had its iterator when the checkpoint was saved. Training
    that goes on with a new epoch makes it, and needs the loaders as the last epoch left them.
    """

    def __init__(
        self, loaders: list[Any], plateaus: Mapping[str, Any] | None, *, within_epoch: bool
    ) -> None:
        self._loaders = loaders
        self._plateaus = plateaus
        self._within_epoch = within_epoch
        self._state = pyckpt.RngState().state_dict()

    def generators(self) -> None:
        """Restore the random number generators."""
        pyckpt.RngState().load_state_dict(self._state)

    def restore(self, trainer: Trainer) -> None:
        """Restore it.

        Raises:
            LoadError: there are other dataloaders than those that were saved.
        """
        finetuning.settle(trainer)
        if self._plateaus is not None:
            schedules.catch_up(trainer, self._plateaus, within_epoch=self._within_epoch)
        if self._within_epoch:
            schedules.average_on(trainer)
        if not self._within_epoch:
            trainer.fit_loop.epoch_loop.restarting = False
        if self._loaders and trainer.train_dataloader is not None:
            self._restore_loaders(trainer)
        elif self._within_epoch:
            self.generators()

    def _restore_loaders(self, trainer: Trainer) -> None:
        flat = CombinedLoader(trainer.train_dataloader).flattened
        stateful = [one for one in flat if hasattr(one, "load_state_dict")]
        if len(stateful) != len(self._loaders):
            raise LoadError(
                f"the checkpoint has the positions of {len(self._loaders)} dataloaders, and "
                f"{len(stateful)} can take one"
            )
        for loader, state in zip(stateful, self._loaders, strict=True):
            _set_epoch(loader, trainer.current_epoch)
            loader.load_state_dict(state)
            if not self._within_epoch:
                iter(loader)  # of the epoch that is over; the next one begins a new epoch
        if not self._within_epoch:
            self.generators()
        fetcher: Any = trainer.fit_loop._data_fetcher
        iter(fetcher)
        if self._within_epoch:
            self.generators()


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers the epoch, as Lightning does after it has made the iterator."""
    samplers = {getattr(loader, "sampler", None)}
    samplers.add(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    for sampler in samplers:
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def _is_within_epoch(loops: Mapping[str, Any]) -> bool:
    """Whether a state of the loops is between two batches of an epoch, not between two epochs."""
    progress = loops["fit_loop"]["epoch_progress"]["current"]
    return bool(progress["processed"] < progress["ready"])


def _refuse(states: list[Any], rank: int, world_size: int) -> Any:
    if not any(states):
        return []
    raise LoadError(
        f"the checkpoint has the position in the data of each of {len(states)} ranks, and there is "
        f"no general way to bring that to {world_size}; pass merge_data=, a function of yours or "
        "one of pyckpt.merges; merge_data=lambda states, rank, world_size: [] begins the epoch's "
        "data anew"
    )
