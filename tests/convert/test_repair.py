"""Host keys of optimizers, put right in saved files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import pyckpt
from pyckpt import Checkpointer, DirectWriter
from pyckpt.convert import copy_checkpoint, repair_optimizer
from pyckpt.errors import LoadError


def trained(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def spoilt(optimizer: Any, key: str = "step") -> dict[str, Any]:
    """A state whose counts were saved in bfloat16, as a loop that casts all tensors does it."""
    state = optimizer.state_dict()
    entries = {n: {**one, key: one[key].bfloat16()} for n, one in state["state"].items()}
    return {**state, "state": entries}


def steps_of(path: Path) -> list[torch.Tensor]:
    saved = pyckpt.load(path) if path.is_dir() else torch.load(path)
    return [entries["step"] for entries in saved["optimizer"]["state"].values()]


@pytest.mark.parametrize("stock", [False, True])
def test_a_checkpoint_is_put_right_in_its_place(stock: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": spoilt(optimizer), "epoch": 3}
    path = tmp_path / "ckpt"
    if stock:
        dcp.save(state, checkpoint_id=path)
    else:
        pyckpt.save(state, path)
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    said = repair_optimizer(path, dry_run=True)
    assert {name: (path / name).read_bytes() for name in os.listdir(path)} == before
    assert [str(one) for one in said] == [
        f"optimizer.state.{i}.step: cpu bfloat16 -> cpu float32" for i in range(4)
    ]
    assert repair_optimizer(path) == said
    assert all(torch.equal(step, torch.tensor(3.0)) for step in steps_of(path))
    loaded = pyckpt.load(path)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["model"]["0.weight"], model[0].weight)
    moment = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(next(iter(loaded["optimizer"]["state"].values()))["exp_avg"], moment)
    assert repair_optimizer(path) == []


@pytest.mark.parametrize("stock", [False, True])
def test_stock_loads_what_is_put_right_and_what_is_exported(stock: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)

    def state() -> dict[str, Any]:
        weights, optim = get_state_dict(model, optimizer)
        rest = {"plain": [{"a": 1}, {"b": [2]}], "tensors": [torch.ones(2), {"c": 3}, [4]]}
        entry = {"by number": {0: {"x": 1}, 1: torch.ones(1)}, "scheduler": scheduler.state_dict()}
        return {"model": weights, "optim": optim, **entry, **rest}

    def keys(path: Path) -> Any:
        metadata = dcp.FileSystemReader(path).read_metadata()
        return metadata.planner_data, metadata.state_dict_metadata.keys()

    spoiled = state()
    for entries in spoiled["optim"]["state"].values():
        entries["step"] = entries["step"].bfloat16()
    path = tmp_path / "ckpt"
    dcp.save(spoiled, checkpoint_id=path, storage_writer=None if stock else DirectWriter(path))
    before = keys(path)
    copy_checkpoint(path, tmp_path / "copy")
    assert len(repair_optimizer(path)) == 4
    for one in (path, tmp_path / "copy"):
        assert keys(one) == before
        loaded = state()
        loaded["optim"]["param_groups"][0]["lr"] = loaded["scheduler"]["step_size"] = 7
        dcp.load(loaded, checkpoint_id=one)
        assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
        assert loaded["scheduler"]["step_size"] == 10


def test_a_copy_keeps_what_pyckpt_saved_whole(tmp_path: Path) -> None:
    state = {
        "whole": {0: {"x": {}}, "y": [{"z": 1}], "set": {1}},
        "apart": {0: torch.ones(2), 1: {2: (3, {})}},
        "sparse": [torch.eye(2).to_sparse(), {"a": None}],
        "groups": [{"params": [1], "lr": 0.1}],
    }
    pyckpt.save(state, tmp_path / "a")
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    one, other = (dcp.FileSystemReader(tmp_path / n).read_metadata() for n in "ab")
    assert one.planner_data == other.planner_data
    loaded = pyckpt.load(tmp_path / "b")
    assert torch.equal(loaded["sparse"].pop(0).to_dense(), torch.eye(2))
    assert torch.equal(loaded["apart"].pop(0), torch.ones(2))
    del state["sparse"][0], state["apart"][0]
    assert loaded == state


def test_a_copy_of_lists_in_which_stock_forgot_empty_dicts(tmp_path: Path) -> None:
    dcp.save({"a": [{"b": 1}, {}, {"c": {}, "d": 2}], "e": {}}, checkpoint_id=tmp_path / "a")
    copy_checkpoint(tmp_path / "a", tmp_path / "b")
    one, other = (dcp.FileSystemReader(tmp_path / n).read_metadata() for n in "ab")
    assert one.planner_data == other.planner_data
    assert pyckpt.load(tmp_path / "a") == pyckpt.load(tmp_path / "b")


def test_out_leaves_the_checkpoint_alone(tmp_path: Path) -> None:
    _, optimizer = trained()
    pyckpt.save({"optimizer": spoilt(optimizer)}, tmp_path / "a")
    repair_optimizer(tmp_path / "a", out=tmp_path / "b")
    assert steps_of(tmp_path / "a")[0].dtype == torch.bfloat16
    assert steps_of(tmp_path / "b")[0].dtype == torch.float32
    with pytest.raises(FileExistsError):
        repair_optimizer(tmp_path / "a", out=tmp_path / "b")


def test_a_checkpointers_own_is_right(tmp_path: Path) -> None:
    model, optimizer = trained()
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, {"model": model, "optimizer": optimizer}).path
    assert repair_optimizer(path) == []


class _OnGpu:
    """Makes torch.save mark the tensors whose storages it knows as saved from a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tensors: list[torch.Tensor]) -> None:
        places = {one.untyped_storage().data_ptr() for one in tensors}
        own = torch.serialization.location_tag

        def tag(storage: Any) -> str:
            return "cuda:0" if storage.data_ptr() in places else own(storage)

        monkeypatch.setattr(torch.serialization, "location_tag", tag)


def test_counts_that_were_saved_from_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    with monkeypatch.context() as patch:
        _OnGpu(patch, [t for entries in state["state"].values() for t in entries.values()])
        torch.save({"optimizer": state}, tmp_path / "old.pt")
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(tmp_path / "old.pt")
    said = repair_optimizer(tmp_path / "old.pt")
    assert [str(one) for one in said] == [
        f"optimizer.state.{i}.step: cuda:0 float32 -> cpu float32" for i in range(4)
    ]
    assert all(torch.equal(step, torch.tensor(3.0)) for step in steps_of(tmp_path / "old.pt"))
    assert os.listdir(tmp_path) == ["old.pt"]


def test_a_capturable_count_belongs_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    state["param_groups"][0]["capturable"] = True
    with monkeypatch.context() as patch:
        _OnGpu(patch, [t for entries in state["state"].values() for t in entries.values()])
        torch.save({"optimizer": state}, tmp_path / "old.pt")
    assert repair_optimizer(tmp_path / "old.pt", dry_run=True) == []


def test_other_host_keys_than_step(tmp_path: Path) -> None:
    _, optimizer = trained(torch.optim.NAdam)
    pyckpt.save({"optimizer": spoilt(optimizer, "mu_product")}, tmp_path / "a")
    said = repair_optimizer(tmp_path / "a", dry_run=True)
    assert [one.key for one in said] == [f"optimizer.state.{i}.mu_product" for i in range(4)]


def test_numbers_and_shapes(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][0]["step"] = 3
    state["state"][1]["step"] = state["state"][1]["step"].reshape(1)
    torch.save({"optimizer": state}, tmp_path / "old.pt")
    said = repair_optimizer(tmp_path / "old.pt")
    assert [one.found for one in said] == ["the number 3", "cpu float32 [1]"]
    assert all(torch.equal(step, torch.tensor(3.0)) for step in steps_of(tmp_path / "old.pt"))


def test_a_file_keeps_its_permissions_and_the_links_to_it(tmp_path: Path) -> None:
    _, optimizer = trained()
    file, link = tmp_path / "own.pt", tmp_path / "latest.pt"
    torch.save({"optimizer": spoilt(optimizer)}, file)
    file.chmod(0o600)
    link.symlink_to(file.name)
    repair_optimizer(link, out=tmp_path / "out.pt")
    assert len(repair_optimizer(link)) == 4
    assert link.is_symlink()
    assert steps_of(file)[0].dtype == torch.float32
    for one in (file, tmp_path / "out.pt"):
        assert one.stat().st_mode & 0o777 == 0o600


def test_a_rounded_number_is_told(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.tensor(2**24 + 1)
    state["state"][1]["step"] = torch.tensor(2**24)
    state["state"][2]["step"] = torch.tensor(float("nan"), dtype=torch.bfloat16)
    torch.save({"optimizer": state}, tmp_path / "old.pt")
    assert [one.wanted for one in repair_optimizer(tmp_path / "old.pt")] == [
        "cpu float32, 16777217 rounded to 16777216.0",
        "cpu float32",
        "cpu float32",
    ]


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {0: 7}, "param_groups": [{"params": [0], "lr": 1}]},
        {"state": {}, "param_groups": [{"params": 5, "lr": 1}]},
    ],
)
def test_a_malformed_optimizer(optimizer: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"optimizer": optimizer}, tmp_path / "old.pt")
    with pytest.raises(LoadError, match="optimizer"):
        repair_optimizer(tmp_path / "old.pt")


def test_what_is_not_known_is_not_guessed(tmp_path: Path) -> None:
    _, optimizer = trained()
    state = spoilt(optimizer)
    for one in state["state"].values():
        one["memory"] = torch.ones(3)
    pyckpt.save({"optimizer": state}, tmp_path / "a")
    with pytest.raises(LoadError, match="--optimizer"):
        repair_optimizer(tmp_path / "a")
    assert len(repair_optimizer(tmp_path / "a", optimizer="AdamW", dry_run=True)) == 4
    with pytest.raises(ValueError, match="no class"):
        repair_optimizer(tmp_path / "a", optimizer="functional")
    pyckpt.save({"model": {"w": torch.ones(2)}}, tmp_path / "b")
    with pytest.raises(LoadError, match="no state of an optimizer"):
        repair_optimizer(tmp_path / "b")
