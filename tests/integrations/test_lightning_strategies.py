"""The strategies, with ModelCheckpoint and ckpt_path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _lightning import BATCHES, Module, Validated, same, trainer
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy as StockStrategy
from test_lightning_checkpoints import StopAt, fit

import pyckpt
from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy


def model_checkpoint(root: Path, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"dirpath": root / "c", "save_last": True, **options})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "c").iterdir())


@pytest.mark.parametrize("stop", [4, BATCHES, BATCHES + 2])
def test_a_run_resumed_from_last_is_the_one_that_was_not_stopped(tmp_path: Path, stop: int) -> None:
    saves: dict[str, Any] = {"every_n_train_steps": 2} if stop % BATCHES else {}
    options: dict[str, Any] = {"epochs": 2}
    whole = fit(tmp_path, Module(), strategy=SingleDeviceStrategy(), **options)
    first = model_checkpoint(tmp_path, **saves)
    fit(tmp_path, Module(), first, StopAt(stop), strategy=SingleDeviceStrategy(), **options)
    again = Module()
    second = trainer(
        tmp_path, model_checkpoint(tmp_path, **saves), strategy=SingleDeviceStrategy(), **options
    )
    second.fit(again, ckpt_path="last")
    assert again.losses == {k: v for k, v in whole.losses.items() if k > stop}
    assert same(again, whole)


def test_the_best_are_kept_and_loaded(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        model_checkpoint(tmp_path, monitor="val_loss", save_top_k=2, filename="{epoch}"),
        strategy=SingleDeviceStrategy(),
        epochs=4,
    )
    module = Validated()
    seen = {}

    class Keep(Callback):
        def on_train_epoch_end(self, trainer: Any, module: LightningModule) -> None:
            seen[trainer.current_epoch] = module.layers[0].weight.detach().clone()

    run.callbacks.insert(0, Keep())
    run.fit(module)
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    for name in names(tmp_path):
        assert pyckpt.load(tmp_path / "c" / name)["model"]["layers.0.weight"].shape == (16, 8)
    run.validate(module, ckpt_path="best", verbose=False)
    assert torch.equal(module.layers[0].weight, seen[1])


def test_a_checkpoint_of_lightnings_own_is_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 2}
    fit(tmp_path, Module(), model_checkpoint(tmp_path), strategy=StockStrategy("cpu"), epochs=1)
    whole = Module()
    trainer(tmp_path, strategy=StockStrategy("cpu"), **options).fit(
        whole, ckpt_path=str(tmp_path / "c" / "last.ckpt")
    )
    again = Module()
    trainer(tmp_path, strategy=SingleDeviceStrategy(), **options).fit(
        again, ckpt_path=str(tmp_path / "c" / "last.ckpt")
    )
    assert sorted(again.losses) == sorted(whole.losses) == list(range(BATCHES + 1, 13))


def test_strategies_and_the_callback_load_each_others(tmp_path: Path) -> None:
    whole = fit(tmp_path, Module(), epochs=2)
    fit(tmp_path, Module(), Checkpoints(tmp_path / "a", every_steps=4), StopAt(4))
    (path,) = (tmp_path / "a").glob("step-*")
    again = Module()
    trainer(tmp_path, strategy=SingleDeviceStrategy(), epochs=2).fit(again, ckpt_path=str(path))
    assert min(again.losses) == 5
    assert same(again, whole)


def test_a_failed_save_ends_training(tmp_path: Path) -> None:
    class Break(Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            (tmp_path / "c").mkdir(exist_ok=True)
            (tmp_path / "c" / "epoch=0.ckpt").write_text("in the way")

    with pytest.raises(FileExistsError, match=r"epoch=0\.ckpt"):
        trainer(
            tmp_path,
            Break(),
            model_checkpoint(
                tmp_path, filename="{epoch}", save_last=False, enable_version_counter=False
            ),
            strategy=SingleDeviceStrategy(),
        ).fit(Module())
