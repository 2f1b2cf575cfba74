"""Training that something other than the callback stops within an epoch: the run that is resumed
does the rest of the epoch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from _lightning import BATCHES, Module, data, same, trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping

import pyckpt
from pyckpt.integrations.lightning import Checkpoints

STOP = 4  # after so many of the batches of an epoch


class Drawing(Module):
    """Whose validation draws random numbers, so that one too many is seen in the next steps."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(1)
        self.log("val_loss", float(self.global_step))  # gets worse

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(), batch_size=24)


class Hooked(Module):
    """Stops training in a hook that runs after those of all callbacks."""

    def __init__(self, stop: int = STOP) -> None:
        super().__init__()
        self.stop = stop

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.stop:
            self.trainer.should_stop = True


class StopsAt(Callback):
    """As Timer, and so max_time, does it."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STOP:
            trainer.should_stop = True


class Signals(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STOP - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(root: Path, module: Module, *callbacks: Any, **options: Any) -> Module:
    saves = {"every_steps": 100, **options.pop("saves", {})}
    run = trainer(root, *callbacks, Checkpoints(root / "c", **saves), **{"epochs": 2, **options})
    run.fit(module)
    return module


def check_rest(whole: Module, again: Module, stop: int = STOP) -> None:
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > stop}
    assert same(again, whole)


@pytest.mark.parametrize("kind", [Module, Drawing])
def test_a_run_that_a_callback_stopped_goes_on_within_the_epoch(
    tmp_path: Path, kind: type[Module]
) -> None:
    whole = fit(tmp_path / "whole", kind())
    fit(tmp_path, kind(), StopsAt())
    again = fit(tmp_path, kind())
    check_rest(whole, again)
    assert again.totals == whole.totals


def test_a_run_that_its_module_stopped_goes_on_within_the_epoch(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Hooked(stop=-1))
    fit(tmp_path, Hooked())
    check_rest(whole, fit(tmp_path, Hooked(stop=-1)))


@pytest.mark.parametrize("saves", [{}, {"keep_best": ("val_loss", 1, "min")}])
def test_a_run_that_a_validation_stopped_goes_on_within_the_epoch(
    tmp_path: Path, saves: dict[str, Any]
) -> None:
    options = {"saves": saves, "val_check_interval": STOP // 2}
    whole = fit(tmp_path / "whole", Drawing(), **options)
    fit(tmp_path, Drawing(), EarlyStopping("val_loss", patience=1), **options)
    check_rest(whole, fit(tmp_path, Drawing(), **options))


def test_a_run_whose_steps_end_with_a_validation_goes_on_within_the_epoch(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Drawing(), val_check_interval=2)
    fit(tmp_path, Drawing(), val_check_interval=2, max_steps=STOP)
    check_rest(whole, fit(tmp_path, Drawing(), val_check_interval=2))


@pytest.mark.parametrize("stop", [Signals, StopsAt])
def test_what_was_saved_for_a_stop_is_not_saved_again_after_its_validation(
    tmp_path: Path, stop: type[Callback]
) -> None:
    saves = {"on_signals": "SIGTERM", "keep_best": ("val_loss", 1, "min"), "keep_last": 1}
    whole = fit(tmp_path / "whole", Drawing(), saves=saves)
    fit(tmp_path, Drawing(), stop(), saves=saves)
    with pyckpt.Checkpointer(tmp_path / "c") as checkpointer:
        assert [(one.step, one.metrics) for one in checkpointer.checkpoints()] == [(STOP, {})]
    check_rest(whole, fit(tmp_path, Drawing(), saves=saves))


def test_a_run_that_is_stopped_after_an_epoch_goes_on_with_the_next(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Hooked(stop=-1))
    fit(tmp_path, Hooked(stop=BATCHES))
    check_rest(whole, fit(tmp_path, Hooked(stop=-1)), BATCHES)
