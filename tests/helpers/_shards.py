"""A checkpoint of two ranks, of which each has a part of a tensor."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import pyckpt

__all__ = ["save_shards"]


def save_shards(directory: Path) -> None:
    """Save step 7; to be called on two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    model = {
        "both": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]),
        "one": torch.full((2,), 5.0),
    }
    with pyckpt.Checkpointer(directory) as checkpointer:
        checkpointer.save(7, {"model": model, "words": ["a", "b"]}, metrics={"loss": 0.5})
