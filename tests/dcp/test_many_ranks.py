"""Real ranks, as many as one machine stands, that save and load together."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pyckpt

RANKS = 32
KEYS = 12


class PlansWhole(pyckpt.SavePlanner):
    """Sends its plans item by item, at each save, since it is a class of its own."""


def values(number: int) -> torch.Tensor:
    # Rows that 32 ranks share evenly, unevenly, and of which some have none.
    rows = (64, 45, 20)[number % 3]
    return torch.arange(rows * 3.0).reshape(rows, 3) + 1000 * number


def make_state(turn: int) -> dict[str, Any]:
    row = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (4, RANKS // 4))
    model: dict[str, Any] = {}
    for number in range(KEYS):
        whole = values(number) + turn
        mesh, placements = [
            (row, [Shard(0)]),
            (grid, [Replicate(), Shard(0)]),
            (grid, [Shard(1), Shard(0)]),
        ][number // 3 % 3]
        model[f"layer.{number}"] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return {
        "model": model,
        "plain": {"step": torch.tensor(float(turn)), "numbers": torch.arange(50.0)},
        "objects": {"epoch": turn, "name": f"turn {turn}", "betas": (0.9, 0.95)},
    }


def saves(path: Path) -> None:
    for turn in range(2):  # the second by a plan that is known
        for planner in (pyckpt.SavePlanner(), PlansWhole()):
            name = f"{type(planner).__name__}-{turn}"
            writer = pyckpt.DirectWriter(path / name, sync_files=False)
            dcp.save(make_state(turn), storage_writer=writer, planner=planner)


def loads(path: Path) -> None:
    for turn in range(2):
        expected = make_state(turn)
        for name in ("SavePlanner", "PlansWhole"):
            for reader in (None, "stock"):
                state = make_state(turn)
                for tensor in state["model"].values():
                    tensor.to_local().zero_()
                state["objects"] = dict.fromkeys(state["objects"])
                directory = path / f"{name}-{turn}"
                if reader is None:
                    report = pyckpt.load(state, directory)
                    assert not report.filled
                else:
                    dcp.load(state, storage_reader=FileSystemReader(directory))
                assert state["objects"] == expected["objects"]
                assert torch.equal(state["plain"]["step"], expected["plain"]["step"])
                for key, tensor in expected["model"].items():
                    assert torch.equal(state["model"][key].to_local(), tensor.to_local()), key


def by_rank(directory: Path) -> dict[int, str]:
    """What each rank's file holds."""
    return {
        int(file.name.split("_")[2]): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.glob("*.distcp")
    }


@pytest.mark.slow
def test_32_ranks_write_the_same_however_they_plan(tmp_path: Path) -> None:
    run_ranks(RANKS, saves, tmp_path)
    for turn in range(2):
        packed, whole = (
            by_rank(tmp_path / f"{name}-{turn}") for name in ("SavePlanner", "PlansWhole")
        )
        assert packed == whole
        assert packed.keys() == set(range(RANKS))
    run_ranks(RANKS, loads, tmp_path)


def loads_of_eight(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "model": {
            f"layer.{number}": distribute_tensor(
                torch.zeros_like(values(number)), mesh, [Shard(1)], src_data_rank=None
            )
            for number in range(KEYS)
        }
    }
    pyckpt.load(state, path)
    for number in range(KEYS):
        expected = distribute_tensor(values(number), mesh, [Shard(1)], src_data_rank=None)
        found: Any = state["model"][f"layer.{number}"]
        assert torch.equal(found.to_local(), expected.to_local())


def saves_of_four(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "model": {
            f"layer.{number}": distribute_tensor(
                values(number), mesh, [Shard(number % 2), Shard(0)], src_data_rank=None
            )
            for number in range(KEYS)
        }
    }
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path, sync_files=False))


@pytest.mark.slow
def test_eight_ranks_load_what_four_saved(tmp_path: Path) -> None:
    run_ranks(4, saves_of_four, tmp_path)
    run_ranks(8, loads_of_eight, tmp_path)
