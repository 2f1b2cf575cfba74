"""A small run with adapters on a frozen base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn


class Adapted(nn.Module):
    """A linear layer that stays, with an adapter that learns, as peft has them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(size, size).requires_grad_(False)
        self.lora_A = nn.Linear(size, 2, bias=False)
        self.lora_B = nn.Linear(2, size, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]

    def merge(self, sign: float) -> None:
        """Put the adapter into the base, or take it out, as peft does: autograd sees nothing."""
        self.base_layer.weight.data += sign * (self.lora_B.weight @ self.lora_A.weight).detach()


class LoraRun:
    """A model of frozen layers with adapters, and the optimizer of the adapters."""

    def __init__(self, size: int = 64, layers: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Adapted(size) for _ in range(layers)))
        self.size = size
        learning = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(learning, lr=0.05)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def base(self) -> torch.Tensor:
        """The first frozen weight."""
        first: Any = self.model[0]
        weight: torch.Tensor = first.base_layer.weight
        return weight

    def train(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self.size, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def copy(self) -> dict[str, torch.Tensor]:
        """What the model is now."""
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def stock_reads(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Assert that stock PyTorch finds the model in a checkpoint."""
    found = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    dcp.load(found, checkpoint_id=str(path), no_dist=True)
    for name, value in expected.items():
        assert torch.equal(found["model"][name], value), name


def frozen_files(path: Path) -> dict[str, int]:
    """The inodes of a checkpoint's files of frozen parts."""
    return {one.name: one.stat().st_ino for one in sorted(path.glob("*.frozen.distcp"))}


def disk_bytes(directory: Path, suffix: str = "") -> int:
    """What the files below a directory take whose names end so, each inode once."""
    inodes = {}
    for folder, _, names in os.walk(directory):
        for name in (one for one in names if one.endswith(suffix)):
            status = os.stat(os.path.join(folder, name))
            inodes[status.st_ino] = status.st_size
    return sum(inodes.values())
