"""A small training run with an Accelerator, which tests of it share."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _ranks import preload
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from pyckpt.integrations.accelerate import Accelerator

# As children have; with more, sums have other last bits.
torch.set_num_threads(1)
preload("pyckpt.integrations.accelerate", "torchdata.stateful_dataloader")

EPOCH = 12  # batches of a rank
EPOCHS = 3


class Counter:
    """Of batches, as a program registers it."""

    n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Run:
    """A model with dropout, AdamW, a scheduler, and shuffled data.

    Args:
        how: may hold "stateful" (the loader knows its position), "seedable" (the order of each
            epoch follows from a seed), "dispatch" (one rank reads the data for all), "workers"
            (a process reads it) and "fsdp".
    """

    def __init__(
        self, how: str, *, kind: Any = Accelerator, seed: int = 0, width: int = 16, **options: Any
    ) -> None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if "workers" in how:  # which multiprocessing does not let a daemon have
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self.accelerator = kind(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader="stateful" in how,
                use_seedable_sampler="seedable" in how,
                dispatch_batches="dispatch" in how,
            ),
            **options,
        )
        if "fsdp" in how:
            from _huggingface import use_fsdp2

            use_fsdp2(self.accelerator)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.3), nn.Linear(width, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + 0.01 * n))
        examples = torch.randn(
            4 * EPOCH * world_size, 8, generator=torch.Generator().manual_seed(1)
        )
        loader = torch.utils.data.DataLoader(
            list(examples), batch_size=4, shuffle=True, num_workers=int("workers" in how)
        )
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.count = Counter()
        self.accelerator.register_for_checkpointing(self.count)

    def step(self, batch: torch.Tensor) -> float:
        loss = self.model(batch).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.count.n += 1
        return float(loss.detach())


def train(
    path: Path,
    how: str,
    *,
    resume: bool = False,
    stop: int | None = None,
    save_at: tuple[int, ...] = (),
    kill_at: int | None = None,
) -> list[float]:
    """The losses of a run to its end, or to a batch, with a save there; with saves before it."""
    run = Run(how)
    found = []
    loader = run.loader
    if resume:
        run.accelerator.load_state(path)
        if "skip" in how:
            skip = run.count.n % EPOCH
            # Of the batches of the rank that reads, a step has one for each rank.
            skip *= dist.get_world_size() if "dispatch" in how and dist.is_initialized() else 1
            loader = run.accelerator.skip_first_batches(loader, skip)
    for _ in range(run.count.n // EPOCH, EPOCHS):
        for batch in loader:
            found.append(run.step(batch))
            if run.count.n == stop:
                run.accelerator.save_state(path)
                run.accelerator.wait_for_saves()
                return found
            if run.count.n in save_at:
                run.accelerator.save_state(path)
            if run.count.n == kill_at:
                run.accelerator.wait_for_saves()
                os.kill(os.getpid(), signal.SIGKILL)
        loader = run.loader
    run.accelerator.wait_for_saves()
    return found
