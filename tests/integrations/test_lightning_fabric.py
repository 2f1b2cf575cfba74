"""fabric.save and fabric.load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _lightning import as_rank
from _ranks import RanksFailed, run_ranks
from lightning.fabric import Fabric
from lightning.fabric import strategies as stock
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pyckpt
from pyckpt.convert import import_checkpoint
from pyckpt.errors import LoadError
from pyckpt.integrations.lightning import fabric as ours


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(fabric: Fabric, state: dict[str, Any], steps: int) -> list[str]:
    losses = []
    for _ in range(steps):
        state["step"] += 1
        numbers = torch.Generator().manual_seed(state["step"])
        loss = state["model"](torch.randn(4, 8, generator=numbers)).square().mean()
        state["optimizer"].zero_grad()
        fabric.backward(loss)
        state["optimizer"].step()
        losses.append(loss.item().hex())
    return losses


def start(fabric: Fabric) -> dict[str, Any]:
    module = fabric.setup(model())  # sharding replaces the parameters
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.05))
    return {"model": module, "optimizer": optimizer, "step": 0}


def test_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    fabric = Fabric(strategy=ours.SingleDeviceStrategy(), accelerator="cpu", devices=1)
    state = start(fabric)
    train(fabric, state, 3)
    fabric.save(tmp_path / "a", {**state, "note": {"more": (1, 2)}})
    whole = train(fabric, state, 3)  # while it is being saved
    again = start(fabric)
    rest = fabric.load(tmp_path / "a", again)
    assert again["step"] == 3
    assert rest == {"note": {"more": (1, 2)}}
    assert train(fabric, again, 3) == whole
    everything = fabric.load(tmp_path / "a")
    assert everything["step"] == 3
    assert everything.keys() == {"model", "optimizer", "step", "note"}


def test_a_filter_chooses_what_is_saved(tmp_path: Path) -> None:
    fabric = Fabric(strategy=ours.SingleDeviceStrategy(), accelerator="cpu", devices=1)
    state = start(fabric)
    fabric.save(tmp_path / "a", state, filter={"model": lambda name, _: "bias" not in name})
    assert set(fabric.load(tmp_path / "a")["model"]) == {"0.weight", "2.weight"}
    with pytest.raises(LoadError, match=r"0\.bias"):
        fabric.load(tmp_path / "a", state)
    fabric.load(tmp_path / "a", state, strict=False)


def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path) -> None:
    fabric = Fabric(strategy=ours.SingleDeviceStrategy(), accelerator="cpu", devices=1)
    state = start(fabric)
    (tmp_path / "file").write_text("in the way")
    fabric.save(tmp_path / "file" / "a", state)
    with pytest.raises(NotADirectoryError):
        fabric.save(tmp_path / "b", state)
    fabric.save(tmp_path / "b", state)
    fabric.strategy.wait()  # type: ignore[attr-defined]
    assert pyckpt.load(tmp_path / "b")["step"] == 0


@pytest.mark.parametrize("prewarm", [True, False])
def test_steps_look_at_no_module_once_prewarming_is_over(prewarm: bool) -> None:
    strategy = ours.SingleDeviceStrategy(prewarm=prewarm)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    looks = []

    class Frozen(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            looks.append(recurse)
            return super().parameters(recurse)

    frozen = fabric.setup(Frozen(2, 2).requires_grad_(False))
    state = start(fabric)
    looks.clear()
    train(fabric, state, 1)
    assert len(looks) == int(prewarm), frozen
    train(fabric, state, 3)
    assert len(looks) == int(prewarm)


def test_a_file_of_fabrics_own_is_loaded(tmp_path: Path) -> None:
    stock = Fabric(accelerator="cpu", devices=1)
    state = start(stock)
    train(stock, state, 3)
    stock.save(tmp_path / "a", state)
    whole = train(stock, state, 3)
    fabric = Fabric(strategy=ours.SingleDeviceStrategy(), accelerator="cpu", devices=1)
    again = start(fabric)
    fabric.load(tmp_path / "a", again)
    assert train(fabric, again, 3) == whole


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(module, mesh=mesh["data_parallel"])


def on_ranks(root: str, kind: str, *, load_only: bool) -> list[str]:
    world = as_rank()["devices"]
    strategy: Any = ours.DDPStrategy()
    if kind == "fsdp2":
        strategy = ours.ModelParallelStrategy(
            shard, data_parallel_size=world, tensor_parallel_size=1
        )
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world)
    fabric.launch()
    state = start(fabric)
    numbers = pyckpt.RngState()
    if not load_only:
        train(fabric, state, 3)
        torch.manual_seed(dist.get_rank())
        fabric.save(os.path.join(root, "a"), {**state, "rng": numbers})
        whole = train(fabric, state, 3)
    again = start(fabric)
    torch.manual_seed(100)
    fabric.load(os.path.join(root, "a"), {**again, "rng": numbers})
    assert dist.get_rank() >= 2 or torch.initial_seed() == dist.get_rank()
    again["step"] = 3
    found = train(fabric, again, 3)
    assert load_only or found == whole
    return [loss[:10] for loss in found]  # sums over other numbers of ranks round otherwise


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_save_together_and_other_numbers_of_them_load(tmp_path: Path, kind: str) -> None:
    one, other = run_ranks(2, _saving, str(tmp_path), kind)
    assert one == other
    assert run_ranks(3, _loading, str(tmp_path), kind) == [one] * 3


def load_a_part(root: str, kind: str) -> list[str]:
    """What a load of the model alone returns besides it, from a checkpoint with more."""
    world = as_rank()["devices"]
    strategy: Any = ours.DDPStrategy()
    if kind == "fsdp2":
        strategy = ours.ModelParallelStrategy(
            shard, data_parallel_size=world, tensor_parallel_size=1
        )
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world)
    fabric.launch()
    state = start(fabric)
    train(fabric, state, 1)
    mean = torch.ones(2)
    path = os.path.join(root, "a")
    averaged = {
        "weight": mean,
        "bias": mean + 1,
    }  # the program's own, though it looks like a module
    others = {"note": {"epoch": 2, "empty": {}}, "mean": mean, "averaged": averaged}
    fabric.save(path, {**state, **others})
    saved = {name: value.clone() for name, value in state["model"].state_dict().items()}
    train(fabric, state, 1)
    rest = fabric.load(path, {"model": state["model"]})
    for name, value in state["model"].state_dict().items():
        assert torch.equal(_whole(value), _whole(saved[name]))
    assert (rest["step"], rest["note"]) == (1, {"epoch": 2, "empty": {}})
    assert torch.equal(rest["mean"], mean)
    assert torch.equal(rest["averaged"]["bias"], averaged["bias"])
    return sorted(rest)


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_where_states_are_sharded_no_rank_reads_what_it_was_not_asked_for(
    tmp_path: Path, kind: str
) -> None:
    expected = ["averaged", "mean", "note", "step"]
    if kind == "ddp":
        expected.insert(3, "optimizer")  # as Lightning's own, from one file
    assert run_ranks(2, load_a_part, str(tmp_path), kind) == [expected] * 2


def test_of_another_writers_checkpoint_all_is_given_back(tmp_path: Path) -> None:
    pyckpt.save({"model": model().state_dict(), "mean": {"x": torch.ones(2)}}, tmp_path / "a")
    assert run_ranks(1, load_of_another_writer, str(tmp_path)) == [["mean"]]


def load_of_another_writer(root: str) -> list[str]:
    strategy = ours.ModelParallelStrategy(shard, data_parallel_size=1, tensor_parallel_size=1)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    return sorted(fabric.load(os.path.join(root, "a"), {"model": start(fabric)["model"]}))


def save_shards_of_fabrics_own(root: str) -> list[str]:
    world = as_rank()["devices"]
    strategy = stock.ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world)
    fabric.launch()
    state = start(fabric)
    train(fabric, state, 3)
    fabric.save(os.path.join(root, "a"), state)
    return [loss[:10] for loss in train(fabric, state, 3)]


def test_one_command_converts_the_shards_of_fabrics_own(tmp_path: Path) -> None:
    theirs, _ = run_ranks(2, save_shards_of_fabrics_own, str(tmp_path))
    fabric = Fabric(strategy=ours.SingleDeviceStrategy(), accelerator="cpu", devices=1)
    again = start(fabric)
    with pytest.raises(LoadError, match=rf"by: pyckpt import {tmp_path / 'a'} RUN"):
        fabric.load(tmp_path / "a", again)
    report = import_checkpoint(tmp_path / "a", tmp_path / "run")
    assert (report.step, report.kind) == (3, "a sharded checkpoint of Lightning Fabric")
    assert fabric.load(report.path, again) == {}
    assert [loss[:10] for loss in train(fabric, again, 3)] == theirs


def _saving(root: str, kind: str) -> list[str]:
    return on_ranks(root, kind, load_only=False)


def _loading(root: str, kind: str) -> list[str]:
    return on_ranks(root, kind, load_only=True)


def test_an_error_of_one_rank_is_raised_by_all(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _failing, str(tmp_path))
    assert [type(one.cause) for one in failed.value.failures.values()] == [NotADirectoryError] * 2


def _failing(root: str) -> None:
    fabric = Fabric(strategy=ours.DDPStrategy(), accelerator="cpu", **as_rank())
    fabric.launch()
    (Path(root) / "file").write_text("in the way")
    fabric.save(Path(root) / "file" / "a", start(fabric))
    fabric.strategy.wait()  # type: ignore[attr-defined]
