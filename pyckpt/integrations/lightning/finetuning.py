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
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["KEY", "callbacks_of", "note", "regroup", "settle"]

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
            "parameters": [
                name for name, one in module.named_parameters() if not one.requires_grad
            ],
            "batch_norms": [
                name
                for name, one in module.named_modules()
                if isinstance(one, _BatchNorm) and not one.track_running_stats
            ],
        }


def regroup(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Have the callbacks make the optimizers' groups that a checkpoint has, and freeze what was
    frozen.

    Args:
        saved: what Lightning itself saves of a Trainer.
    """
    module, states = trainer.lightning_module, saved.get("callbacks", {})
    for callback in callbacks_of(trainer):
        if (state := states.get(callback.state_key)) is not None:
            callback.load_state_dict(state)
            # Not that of a derived class, which was called, and may do other things.
            BaseFinetuning.on_fit_start(callback, trainer, module)
    frozen = saved.get(KEY)
    if frozen is None:  # of Lightning's own, or of an earlier release
        return
    for name, param in module.named_parameters():
        param.requires_grad_(name not in frozen["parameters"])
    for name, one in module.named_modules():
        if isinstance(one, _BatchNorm):
            one.track_running_stats = name not in frozen["batch_norms"]


def settle(trainer: Trainer) -> None:
    """To be called when all is loaded: the callbacks have their state a second time, and would make
    the groups once more when a later ``fit`` starts."""
    for callback in callbacks_of(trainer):
        callback._restarting = False
