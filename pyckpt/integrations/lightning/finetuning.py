"""Callbacks that freeze parameters and train them later (``BaseFinetuning``): what is frozen, and
the optimizers' groups of parameters, to which these callbacks add.

A checkpoint of an optimizer fits one that has the same parameters. So what the callbacks know of
the groups is loaded first, and they make them; then the optimizers are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyckpt.train.state.modules import Names

__all__ = ["KEY", "Before", "callbacks_of", "note", "regroup", "settle"]

KEY = "pyckpt_frozen"
"""Where it is, in what is saved of the Trainer."""


def callbacks_of(trainer: Trainer) -> list[BaseFinetuning]:
    """Those of a Trainer."""
    return [one for one in trainer.callbacks if isinstance(one, BaseFinetuning)]


def note(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put into a checkpoint what is frozen now. Nothing if there is no such callback."""
    if callbacks_of(trainer):
        module = trainer.lightning_module
        checkpoint[KEY] = {
            "parameters": _by_kind(
                {name: one.requires_grad for name, one in _parameters(module).items()}
            ),
            "batch_norms": _by_kind(
                {name: one.track_running_stats for name, one in _batch_norms(module).items()}
            ),
        }


def _by_kind(trained: Mapping[str, bool]) -> dict[str, list[str]]:
    return {
        "frozen": [name for name, is_trained in trained.items() if not is_trained],
        "trained": [name for name, is_trained in trained.items() if is_trained],
    }


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """By the names without wrappers, which may differ between a save and a resume."""
    plain = Names(module)
    return {plain(name): one for name, one in module.named_parameters()}


def _batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    """By the names without wrappers."""
    plain = Names(module)
    # A name shows a wrapper by the period after it.
    return {
        plain(f"{name}."): one
        for name, one in module.named_modules()
        if isinstance(one, _BatchNorm)
    }


def regroup(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Have the callbacks make the optimizers' groups that a checkpoint has, and freeze what was
    frozen. What the checkpoint does not name stays as it is.

    Args:
        saved: what Lightning itself saves of a Trainer.
    """
    module, states = trainer.lightning_module, saved.get("callbacks", {})
    for callback in callbacks_of(trainer):
        if (state := states.get(callback.state_key)) is not None:
            callback.load_state_dict(state)
            _rename(callback, module)
            # Not that of a derived class, which was called, and may do other things.
            BaseFinetuning.on_fit_start(callback, trainer, module)
    frozen = saved.get(KEY)
    if frozen is None:  # of Lightning's own, or of an earlier release
        return
    parameters, batch_norms = _parameters(module), _batch_norms(module)
    for kind, is_trained in (("frozen", False), ("trained", True)):
        for name in frozen["parameters"][kind]:
            if name in parameters:
                parameters[name].requires_grad_(is_trained)
        for name in frozen["batch_norms"][kind]:
            if name in batch_norms:
                batch_norms[name].track_running_stats = is_trained


def _rename(callback: BaseFinetuning, module: nn.Module) -> None:
    """Have a callback that was loaded name parameters as the module does now."""
    plain = Names(module)
    names = {plain(name): name for name, _ in module.named_parameters()}
    callback._internal_optimizer_metadata = {
        i: [
            {**group, "params": [names.get(plain(name), name) for name in group["params"]]}
            for group in groups
        ]
        for i, groups in callback._internal_optimizer_metadata.items()
    }


class Before:
    """What ``regroup`` changes, as it was when this was made: a checkpoint whose groups were made
    may prove damaged, and those of an older one may be others."""

    def __init__(self, trainer: Trainer) -> None:
        self._groups = [
            (one, [{**group, "params": [*group["params"]]} for group in one.param_groups])
            for one in trainer.optimizers
        ]
        module = trainer.lightning_module
        self._parameters = [(one, one.requires_grad) for one in module.parameters()]
        self._batch_norms = [
            (one, one.track_running_stats)
            for one in module.modules()
            if isinstance(one, _BatchNorm)
        ]
        self._callbacks = [(one, one._internal_optimizer_metadata) for one in callbacks_of(trainer)]

    def put_back(self) -> None:
        """Make it so again."""
        for optimizer, groups in self._groups:
            optimizer.param_groups = [{**one, "params": [*one["params"]]} for one in groups]
        for param, requires_grad in self._parameters:
            param.requires_grad_(requires_grad)
        for batch_norm, tracks in self._batch_norms:
            batch_norm.track_running_stats = tracks
        for callback, metadata in self._callbacks:
            callback._internal_optimizer_metadata = metadata


def settle(trainer: Trainer) -> None:
    """To be called when all is loaded: the callbacks have their state a second time, and would make
    the groups once more when a later ``fit`` starts."""
    for callback in callbacks_of(trainer):
        callback._restarting = False
