"""The callback on several ranks: sharded models, metrics of each rank, other numbers of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _lightning import Module, Stop, as_rank, same, trainer
from _ranks import run_ranks
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from test_lightning_checkpoints import StopAt
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pyckpt.integrations.lightning import Checkpoints


class Sharded(Module):
    """By FSDP2, as ModelParallelStrategy has its modules do it."""

    def configure_model(self) -> None:
        mesh: DeviceMesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class Flat(FSDPStrategy):
    """Lightning's FSDPStrategy itself asks for a GPU."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def parts(kind: str) -> tuple[type[Module], Any]:
    world = dist.get_world_size()
    if kind == "ddp":
        return Module, DDPStrategy()
    if kind == "fsdp":
        return Module, Flat()
    return Sharded, ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)


def run(root: str, kind: str, stop: int | None, **options: Any) -> Module:
    """Train for two epochs, or until a step, with a save each step."""
    rank = as_rank()
    torch.manual_seed(dist.get_rank())
    module, strategy = parts(kind)
    callbacks: list[Any] = [Checkpoints(root, every_steps=1, when_busy="wait", **options)]
    if stop is not None:
        callbacks.append(StopAt(stop))
    trained = module()
    try:
        trainer(Path(root).parent, *callbacks, strategy=strategy, epochs=2, **rank).fit(trained)
    except Stop:
        pass
    return trained


def compare(root: str, kind: str, stop: int) -> int:
    whole = run(os.path.join(root, "whole"), kind, None)
    run(os.path.join(root, "a"), kind, stop)
    again = run(os.path.join(root, "a"), kind, None)
    assert again.losses == {k: v for k, v in whole.losses.items() if k > stop}
    assert min(again.losses) == stop + 1
    assert again.totals == whole.totals[-len(again.totals) :]
    assert kind == "fsdp" or same(again, whole)
    return stop


@pytest.mark.parametrize(("kind", "stop"), [("ddp", 4), ("ddp", 8), ("fsdp", 8), ("fsdp2", 8)])
def test_on_two_ranks_a_resumed_run_is_the_one_that_was_not_stopped(
    tmp_path: Path, kind: str, stop: int
) -> None:
    assert run_ranks(2, compare, str(tmp_path), kind, stop) == [stop, stop]
