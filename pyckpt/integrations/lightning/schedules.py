"""Schedulers that a resume by Lightning does not bring back.

- Those that look at a metric (``ReduceLROnPlateau``): Lightning steps them after the hooks in which
  checkpoints are saved, and no run that is resumed goes back to these. So the checkpoint says which
  of them step next, and with which metrics.
- The one that ``StochasticWeightAveraging`` puts in the place of others, and has in its own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

__all__ = ["KEY", "average_on", "averages", "catch_up", "note"]

KEY = "pyckpt_plateaus"
"""Where it is, in what is saved of the Trainer."""


def note(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Put the metrics of these schedulers into a checkpoint, and which of them step before the next
    batch. Nothing if there is no such scheduler."""
    if not trainer.lightning_module.automatic_optimization:
        return  # the module steps its schedulers
    configs = trainer.lr_scheduler_configs
    monitors = {one.monitor for one in configs if one.reduce_on_plateau and one.monitor is not None}
    if not monitors:
        return
    found = trainer.callback_metrics
    metrics = {name: found[name].detach().clone() for name in sorted(monitors) if name in found}
    interval, index = _next_interval(trainer)
    due = [
        number
        for number, one in enumerate(configs)
        if one.reduce_on_plateau
        and one.interval == interval
        and one.monitor in metrics
        and (index + 1) % one.frequency == 0
    ]
    checkpoint[KEY] = {"metrics": metrics, "due": due, "validating": trainer.validating}


def _next_interval(trainer: Trainer) -> tuple[str | None, int]:
    """The kind of the schedulers that step next, if they do so before the next batch, and how many
    of its intervals were over before this one."""
    epochs, loop = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop
    batches = loop.batch_progress.current
    if trainer.validating or batches.processed > batches.completed:
        return None if loop._should_accumulate() else "step", loop.batch_idx
    if epochs.processed > epochs.completed and loop._num_ready_batches_reached():
        return "epoch", trainer.current_epoch
    return None, 0


def catch_up(trainer: Trainer, saved: Mapping[str, Any], *, within_epoch: bool) -> None:
    """Make the steps that came after the save, right before training starts."""
    fit, module = trainer.fit_loop, trainer.lightning_module
    loop = fit.epoch_loop
    metrics = {name: value.to(module.device) for name, value in saved["metrics"].items()}
    trainer.callback_metrics.update(metrics)  # the next steps may come before the next validation
    configs = trainer.lr_scheduler_configs
    if within_epoch:
        # Lightning leaves these schedulers out at the end of an epoch within which it was resumed,
        # for it has lost the metrics.
        monitors = {one.monitor for one in configs if one.reduce_on_plateau}
        if monitors <= metrics.keys() or not loop.batch_progress.is_last_batch:
            fit._restarting = False
        assert fit._data_fetcher is not None
        if saved["validating"] and loop._should_check_val_fx(fit._data_fetcher):
            return  # Lightning goes on with what follows the validation
    for number in saved["due"]:
        if number < len(configs) and configs[number].reduce_on_plateau:
            one = configs[number]
            loop.scheduler_progress.increment_ready()
            module.lr_scheduler_step(one.scheduler, metrics[str(one.monitor)])
            loop.scheduler_progress.increment_completed()


def averages(trainer: Trainer, checkpoint: Mapping[str, Any]) -> bool:
    """Whether the scheduler in a checkpoint is one of ``StochasticWeightAveraging``, which makes it
    and restores it by itself when an epoch starts."""
    states = checkpoint.get("callbacks", {})
    return any(
        (states.get(one.state_key) or {}).get("scheduler_state") is not None
        for one in trainer.callbacks
        if isinstance(one, StochasticWeightAveraging)
    )


def average_on(trainer: Trainer) -> None:
    """Have the averaging put in its scheduler within an epoch, too, right before training goes on.
    It does so when an epoch starts, which this one has done."""
    for one in trainer.callbacks:
        if isinstance(one, StochasticWeightAveraging) and one._scheduler_state is not None:
            is_extra = trainer.current_epoch > one.swa_end  # for batch norm, without steps
            if not is_extra:
                one.on_train_epoch_start(trainer, trainer.lightning_module)
