"""A small training run on a Checkpointer: what the tests of it have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import pyckpt


class Run:
    """A model and its optimizer; a step is a function of the state and its number."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)  # type: ignore[call-arg]
        self.losses: dict[int, str] = {}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, step: int, *, alone: bool = False) -> float:
        """One step, together with the other ranks, of which the loss is kept exactly."""
        generator = torch.Generator().manual_seed(step)
        loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        if not alone and dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.losses[step] = loss.item().hex()
        return loss.item()

    def to(
        self, steps: int, checkpointer: pyckpt.Checkpointer | None = None, start: int = 1
    ) -> Run:
        """Train up to a step, saving as the Checkpointer sees fit."""
        for step in range(start, steps + 1):
            self.train(step)
            if checkpointer is not None:
                checkpointer.step(step, self.state)
                if checkpointer.stop_requested:
                    break
        return self

    def equals(self, other: Run) -> bool:
        """Whether both have the same weights and moments."""
        mine, theirs = self.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        return all(
            torch.equal(a, b)
            for a, b in zip(self.model.parameters(), other.model.parameters(), strict=True)
        ) and all(
            torch.equal(value, theirs[i][name])
            for i, values in mine.items()
            for name, value in values.items()
        )


def resumed(directory: Path, step: int | None = None) -> tuple[int | None, Run]:
    """A fresh run with what was restored into it."""
    run = Run()
    with pyckpt.Checkpointer(directory) as checkpointer:
        return checkpointer.restore(run.state, step=step), run


def damage(path: Path) -> None:
    """Flip a bit of a payload, so that the checkpoint looks valid."""
    from pyckpt.format import metadata as metadata_format

    for index, info in metadata_format.read(path / ".metadata").storage_data.items():
        if index.fqn.startswith("model") and info.length > 64:
            with (path / info.relative_path).open("r+b") as file:
                file.seek(info.offset + vars(info)["payload_offset"])
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 1]))
            return
    raise AssertionError("nothing of the model is there")
