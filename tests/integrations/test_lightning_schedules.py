"""Schedulers that look at a metric: Lightning steps them after it has saved."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from _lightning import BATCHES, Module, Stop, data, same, trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy

END = 3 * BATCHES


class Plateau(Module):
    """Whose rate halves whenever its scheduler looks at the metric, which is never good enough."""

    def __init__(self, monitor: str, interval: str, frequency: int = 1) -> None:
        super().__init__()
        self.options = {"monitor": monitor, "interval": interval, "frequency": frequency}
        self.rates: dict[int, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates[self.global_step + 1] = self.optimizers().param_groups[0]["lr"]
        loss = super().training_step(batch, batch_idx)
        self.log("loss", 5.0 + self.global_step, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 5.0 + self.global_step)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(), batch_size=24)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        plateau.best = 0.0
        return [optimizer], [{"scheduler": plateau, **self.options}]


class Kill(Callback):
    """Ends training by an error before a batch of the whole run."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Stop


def fit(root: Path, module: Plateau, *callbacks: Any, **options: Any) -> Plateau:
    path = options.pop("ckpt_path", None)
    run = trainer(root, *callbacks, **options)
    with contextlib.suppress(Stop):
        run.fit(module, ckpt_path=path)
    return module


def check_rest(whole: Plateau, again: Plateau, begin: int, end: int = END) -> None:
    assert again.rates == {step: whole.rates[step] for step in range(begin + 1, end + 1)}
    assert again.losses == {step: whole.losses[step] for step in range(begin + 1, end + 1)}
    assert same(again, whole)


@pytest.mark.parametrize(
    ("module", "saves", "stop", "options"),
    [
        (("loss", "epoch"), {}, BATCHES, {}),
        (("val_loss", "epoch"), {}, 2 * BATCHES, {}),
        (("val_loss", "epoch", 2), {}, 2 * BATCHES, {}),
        (("val_loss", "epoch"), {"every_steps": 1}, BATCHES + 2, {}),
        (("val_loss", "epoch"), {"every_steps": 1}, BATCHES + 4, {"val_check_interval": 2}),
        (("loss", "step"), {"every_steps": 1}, BATCHES + 2, {}),
        (("loss", "step"), {}, BATCHES, {}),
        (("loss", "step", 2), {"every_steps": 1}, BATCHES + 2, {}),
        (("val_loss", "step"), {"every_steps": 1}, BATCHES + 2, {"val_check_interval": 2}),
        (("val_loss", "step"), {"every_steps": 1}, BATCHES + 3, {"val_check_interval": 2}),
    ],
)
def test_no_step_is_lost_to_a_save(
    tmp_path: Path,
    module: tuple[Any, ...],
    saves: dict[str, Any],
    stop: int,
    options: dict[str, Any],
) -> None:
    # Before the first validation, its loss is not known.
    kind = Lenient if module == ("val_loss", "step") else Plateau

    def run(name: str, *callbacks: Any) -> Plateau:
        callback = Checkpoints(tmp_path / name, when_busy="wait", **saves)
        return fit(tmp_path, kind(*module), callback, *callbacks, **options)

    whole = run("whole")
    assert len(set(whole.rates.values())) > 1
    run("a", Kill(stop))
    check_rest(whole, run("a"), stop)


class Lenient(Plateau):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.options["strict"] = False


def test_no_step_is_lost_between_the_end_of_a_run_and_a_longer_one(tmp_path: Path) -> None:
    whole = fit(tmp_path, Plateau("loss", "epoch"))
    for epochs in (1, 2, 3):
        again = fit(tmp_path, Plateau("loss", "epoch"), Checkpoints(tmp_path / "a"), epochs=epochs)
        begin, end = (epochs - 1) * BATCHES, epochs * BATCHES
        if epochs < 3:
            assert again.rates == {k: v for k, v in whole.rates.items() if begin < k <= end}
    check_rest(whole, again, begin)


@pytest.mark.parametrize(
    ("module", "saves", "stop"),
    [
        (("val_loss", "epoch"), {}, BATCHES),  # saved after the validation
        (("loss", "epoch"), {"save_on_train_epoch_end": True}, BATCHES),
        (("loss", "step"), {"every_n_train_steps": 2}, BATCHES + 2),
    ],
)
def test_no_step_is_lost_to_a_save_of_model_checkpoint(
    tmp_path: Path, module: tuple[Any, ...], saves: dict[str, Any], stop: int
) -> None:
    def run(name: str, *callbacks: Any, **options: Any) -> Plateau:
        callback = ModelCheckpoint(tmp_path / name, save_last=True, **saves)
        strategy = SingleDeviceStrategy("cpu")
        return fit(tmp_path, Plateau(*module), callback, *callbacks, strategy=strategy, **options)

    whole = run("whole")
    run("a", Kill(stop))
    check_rest(whole, run("a", ckpt_path=str(tmp_path / "a" / "last.ckpt")), stop)
