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
from _lightning import BATCHES, Module, Stop, data, same, trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torchdata.stateful_dataloader import StatefulDataLoader

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


# --- while gradients are being accumulated -----------------------------------------------------


class Accumulating(Drawing):
    """Whose epoch has batches enough for several steps of several batches each. Stops in the hook
    of the module, which runs after those of all callbacks."""

    def __init__(self, stop: int = -1) -> None:
        super().__init__()
        self.stop = stop
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.item().hex())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.fit_loop.total_batch_idx == self.stop:
            self.trainer.should_stop = True

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(data(), batch_size=4, shuffle=True)


class StopsAtBatch(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            trainer.should_stop = True


class Fails(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Stop


WINDOW = 4


@pytest.mark.parametrize(
    ("stop", "callbacks", "options"),
    [
        (-1, [StopsAtBatch(5)], {}),
        (5, [], {}),
        (-1, [EarlyStopping("val_loss", patience=0)], {"val_check_interval": 3}),
    ],
)
def test_a_stop_waits_until_the_gradients_are_used(
    tmp_path: Path, stop: int, callbacks: list[Callback], options: dict[str, Any]
) -> None:
    options = {"accumulate_grad_batches": WINDOW, **options}
    whole = fit(tmp_path / "whole", Accumulating(), **options)
    first = fit(tmp_path, Accumulating(stop), *callbacks, **options)
    assert len(first.seen) == 2 * WINDOW
    again = fit(tmp_path, Accumulating(), **options)
    assert first.seen + again.seen == whole.seen
    assert same(again, whole)


def test_the_minimum_of_steps_is_put_back(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        StopsAtBatch(5),
        Checkpoints(tmp_path / "c"),
        accumulate_grad_batches=WINDOW,
        min_epochs=0,
        min_steps=1,
    )
    run.fit(Accumulating())
    assert (run.global_step, run.min_steps) == (2, 1)
    failing = trainer(
        tmp_path, Fails(2), Checkpoints(tmp_path / "d"), accumulate_grad_batches=WINDOW
    )
    with pytest.raises(Stop):
        failing.fit(Accumulating())
    assert failing.min_steps is None


def test_a_validation_among_accumulated_gradients_is_saved_with_the_next_step(
    tmp_path: Path,
) -> None:
    saves = {"keep_best": ("val_loss", 1, "min"), "keep_last": 3, "when_busy": "wait"}
    options = {"accumulate_grad_batches": WINDOW, "val_check_interval": 6, "saves": saves}
    whole = fit(tmp_path / "whole", Accumulating(), **options)
    with pytest.raises(Stop):
        fit(tmp_path, Accumulating(), Fails(9), **options)
    with pyckpt.Checkpointer(tmp_path / "c") as checkpointer:
        found = [(one.step, one.metrics) for one in checkpointer.checkpoints()]
    assert found == [(2, {"val_loss": 1.0})]  # of the validation after step 1
    again = fit(tmp_path, Accumulating(), **options)
    assert again.seen == whole.seen[2 * WINDOW :]
    assert same(again, whole)
