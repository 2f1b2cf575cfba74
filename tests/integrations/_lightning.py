"""A small module, its data and Trainers for it: what the tests of Lightning have in common."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

BATCHES = 6  # of an epoch, on each rank


def data() -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(8 * BATCHES, 8, generator=numbers))


class Module(LightningModule):
    """Has what a resume may lose: dropout, a schedule by steps, a metric over the epoch, a shuffled
    loader."""

    def __init__(self, *, optimizer: Any = torch.optim.AdamW, odd: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 16, "odd": odd})
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 4))
        self.total = torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric()
        self.kind = optimizer
        self.losses: dict[int, str] = {}
        self.totals: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        loss = self.layers(inputs).square().mean()
        self.losses[self.global_step + 1] = f"{loss.item().hex()} {inputs.sum().item()}"
        self.total.update(inputs.sum().abs().round())
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.totals.append(float(self.total.compute()))
        self.total.reset()

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        if not dist.is_initialized():
            return StatefulDataLoader(data(), batch_size=8, shuffle=True)
        # The shuffle that Lightning would make of another sampler cannot be resumed in an epoch.
        sampler = DistributedSampler(data())
        return StatefulDataLoader(data(), batch_size=8 // dist.get_world_size(), sampler=sampler)


class Validated(Module):
    """Also validates, with a loss that is smallest after the epoch ``best``."""

    best = 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(abs(self.current_epoch - self.best)))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(), batch_size=24)


def trainer(root: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "callbacks": list(callbacks),
            "default_root_dir": root,
            "max_epochs": epochs,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        }
    )


def as_rank() -> dict[str, Any]:
    """Make a rank of `run_ranks` one that torchrun has started. Returns options for the Trainer."""
    warnings.simplefilter("default")
    world = dist.get_world_size()
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # not used: the group is there
        "TORCHELASTIC_RUN_ID": "test",
    }
    return {"devices": world}


class Stop(Exception):
    """Ends training, as a crash would."""


def weights(module: LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def same(one: LightningModule, other: LightningModule) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
