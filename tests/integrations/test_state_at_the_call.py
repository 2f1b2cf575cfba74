"""A checkpoint holds the state at the call, also where a framework then changes parameters by other
means than an optimizer's step: averaged weights, callbacks."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
pytest.importorskip("transformers")

import transformers
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

import pyckpt
from pyckpt.integrations.accelerate import Accelerator
from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy
from pyckpt.integrations.transformers import Trainer

LARGE = 4_000_000  # elements of a parameter: copying eight of them takes a while
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(LARGE)) for _ in range(8)])

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": sum(part.sum() for part in self.parts) * x.sum()}

    def values(self) -> set[float]:
        return {value for part in self.parts for value in part.detach()[::9973].tolist()}


def values_of(saved: Any) -> set[float]:
    if isinstance(saved, torch.Tensor):
        return set(saved.flatten()[::9973].tolist())
    return set().union(*map(values_of, saved.values()))


class LargeModule(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Large()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(batch)["loss"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("kind", ["callback", "strategy"])
def test_lightnings_averaged_weights(tmp_path: Path, kind: str) -> None:
    """They take the place of the parameters right after the last save."""
    average = EMAWeightAveraging(decay=0.5)
    if kind == "callback":
        trainer = LightningTrainer(callbacks=[average, Checkpoints(tmp_path)], **QUIET)
    else:
        saves = ModelCheckpoint(tmp_path, filename="c")
        trainer = LightningTrainer(
            strategy=SingleDeviceStrategy("cpu"), callbacks=[average, saves], **QUIET
        )
    trainer.fit(LargeModule(), torch.utils.data.DataLoader(torch.ones(4, 1), batch_size=1))
    (path,) = [one for one in tmp_path.iterdir() if (one / ".metadata").exists()]
    saved = pyckpt.load(path)
    assert values_of(saved["lightning"]["current_model_state"]) == {-4.0}


def test_accelerates_save(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Large()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    save = accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c").is_dir()  # for what a program writes beside it
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    save.wait()
    accelerator.load_state(tmp_path / "c")
    assert model.values() == {0.0}
    accelerator.end_training()


class _Fills(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.before: set[float] = set()

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.before = model.values()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(2.0)


def test_transformers_callback(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        save_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=1,
        optim="sgd",
        max_grad_norm=0,
    )
    fills = _Fills()
    data = [{"x": torch.ones(1)}] * 2
    Trainer(Large(), arguments, train_dataset=data, callbacks=[fills]).train()
    saved = pyckpt.load(tmp_path / "step-00000001")
    assert values_of(saved["model"]) == fills.before
    assert 2.0 not in fills.before


def test_accelerates_memory_is_freed(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.save_state(tmp_path / "1")
    weight = weakref.ref(model.weight)
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert (tmp_path / "1/.metadata").exists()
    gc.collect()
    assert weight() is None
    other = accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "2").wait()
    accelerator.load_state(tmp_path / "2")
    assert other is not None
    accelerator.end_training()
