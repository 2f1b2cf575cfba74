"""The callback on several ranks: sharded models, metrics of each rank, other numbers of ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _lightning import Module, Stop, as_rank, same, trainer
from _ranks import run_ranks
from lightning.pytorch import strategies as stock
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning_checkpoints import StopAt
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from pyckpt.convert import import_checkpoint
from pyckpt.errors import LoadError
from pyckpt.integrations import lightning as ours
from pyckpt.integrations.lightning import Checkpoints


class Sharded(Module):
    """By FSDP2, as ModelParallelStrategy has its modules do it."""

    def configure_model(self) -> None:
        mesh: DeviceMesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.layers, mesh=mesh)


class OnCpu:
    """FSDPStrategy asks for a GPU."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class StockFSDP(OnCpu, stock.FSDPStrategy):
    pass


class OurFSDP(OnCpu, ours.FSDPStrategy):
    pass


def parts(kind: str, *, of: Any) -> tuple[type[Module], Any]:
    world = dist.get_world_size()
    if kind == "ddp":
        return Module, of.DDPStrategy()
    if kind == "fsdp":
        return Module, OurFSDP() if of is ours else StockFSDP()
    return Sharded, of.ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)


def run(root: str, kind: str, stop: int | None, **options: Any) -> Module:
    """Train for two epochs, or until a step, with a save each step."""
    rank = as_rank()
    torch.manual_seed(dist.get_rank())
    module, strategy = parts(kind, of=stock)
    callbacks: list[Any] = [Checkpoints(root, every_steps=1, when_busy="wait", **options)]
    if stop is not None:
        callbacks.append(StopAt(stop))
    trained = module()
    with contextlib.suppress(Stop):
        trainer(Path(root).parent, *callbacks, strategy=strategy, epochs=2, **rank).fit(trained)
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


def with_last(root: str, kind: str, stop: int | None) -> Module:
    """The same with our strategies, ModelCheckpoint and ckpt_path."""
    rank = as_rank()
    module, strategy = parts(kind, of=ours)
    saves = ModelCheckpoint(root, every_n_train_steps=2, save_last=True, save_top_k=1)
    callbacks: list[Any] = [saves] if stop is None else [saves, StopAt(stop)]
    trained = module()
    one = trainer(Path(root).parent, *callbacks, strategy=strategy, epochs=2, **rank)
    with contextlib.suppress(Stop):
        one.fit(trained, ckpt_path="last")
    return trained


def compare_last(root: str, kind: str, stop: int) -> list[str]:
    whole = with_last(os.path.join(root, "whole"), kind, None)
    with_last(os.path.join(root, "a"), kind, stop)
    again = with_last(os.path.join(root, "a"), kind, None)
    assert again.losses == {k: v for k, v in whole.losses.items() if k > stop}
    assert kind == "fsdp" or same(again, whole)
    return sorted(os.listdir(os.path.join(root, "a", "last.ckpt")))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp2"])
def test_on_two_ranks_ckpt_path_resumes_the_run(tmp_path: Path, kind: str) -> None:
    files, _ = run_ranks(2, compare_last, str(tmp_path), kind, 8)
    assert files[0] == ".metadata"
    assert len(files) == 3  # one of each rank
    assert sorted(os.listdir(tmp_path / "a")) == ["epoch=1-step=12.ckpt", "last.ckpt"]


def from_stock(root: str) -> list[int]:
    rank = as_rank()
    last = os.path.join(root, "last.ckpt")
    _, strategy = parts("fsdp2", of=stock)
    saves = ModelCheckpoint(root, save_last=True)
    trainer(Path(root), saves, strategy=strategy, epochs=1, **rank).fit(Sharded())
    assert os.path.exists(os.path.join(last, "meta.pt"))
    again, strategy = Sharded(), parts("fsdp2", of=ours)[1]
    saves = ModelCheckpoint(root, save_last=True)
    trainer(Path(root), saves, strategy=strategy, epochs=2, **rank).fit(again, ckpt_path=last)
    return sorted(again.losses)


def test_a_sharded_checkpoint_of_lightnings_own_is_loaded(tmp_path: Path) -> None:
    assert run_ranks(2, from_stock, str(tmp_path)) == [list(range(7, 13))] * 2


class Plain(Module):
    """Without dropout and metrics, since generators and metrics are not in what Lightning saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].p = 0.0

    @property
    def strict_loading(self) -> bool:
        return False


class PlainSharded(Plain, Sharded):
    pass


def shards_of_lightnings_own(root: str, kind: str) -> dict[int, str]:
    """Train for an epoch and save; and train for two in one go."""
    rank = as_rank()
    saves = ModelCheckpoint(root, save_last=True)

    def fit(*callbacks: Any, epochs: int) -> Module:
        strategy: Any = StockFSDP(state_dict_type="sharded")
        if kind == "fsdp2":
            strategy = parts(kind, of=stock)[1]
        module = PlainSharded() if kind == "fsdp2" else Plain()
        trainer(Path(root), *callbacks, strategy=strategy, epochs=epochs, **rank).fit(module)
        return module

    fit(saves, epochs=1)
    assert os.path.exists(os.path.join(root, "last.ckpt", "meta.pt"))
    return fit(epochs=2).losses


def resume_what_was_imported(root: str, path: str) -> dict[int, str]:
    again = Plain()
    # Lightning saves where the first rank is in its data, and has all ranks go on there.
    strategy = ours.DDPStrategy(merge_data=lambda positions, rank, world_size: positions[0])
    trainer(Path(root), strategy=strategy, epochs=2, **as_rank()).fit(again, ckpt_path=path)
    return again.losses


@pytest.mark.parametrize("kind", ["fsdp", "fsdp2"])
def test_one_command_converts_the_shards_of_lightnings_own(tmp_path: Path, kind: str) -> None:
    wholes = run_ranks(2, shards_of_lightnings_own, str(tmp_path), kind)
    last = tmp_path / "last.ckpt"
    with pytest.raises(LoadError) as error:
        trainer(tmp_path, strategy=ours.SingleDeviceStrategy("cpu")).fit(Plain(), ckpt_path=last)
    command = str(error.value).partition("pyckpt import ")[2].split()
    assert command == [str(last), "RUN"]
    report = import_checkpoint(command[0], tmp_path / "run")
    assert (report.step, report.kind) == (6, "a sharded checkpoint of Lightning")
    found = run_ranks(2, resume_what_was_imported, str(tmp_path), str(report.path))
    for mine, whole in zip(found, wholes, strict=True):
        assert list(mine) == list(range(7, 13))
        for step, seen in mine.items():  # sums over shards round otherwise
            loss, inputs = seen.split()
            expected, same_inputs = whole[step].split()
            assert inputs == same_inputs
            assert float.fromhex(loss) == pytest.approx(float.fromhex(expected), rel=1e-5)
