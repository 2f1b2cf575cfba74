"""Saves by DCP's background process: the copies lie in memory that it maps."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _staging import check_saved, engine, frozen, overwrite, wait_given_back, writer_to
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pyckpt


def can_have_a_process() -> None:
    """DCP's own, which pytest's child may not have without more ado."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")


def several_saves(path: Path, shared: bool) -> list[int]:
    can_have_a_process()
    mesh = init_device_mesh("cpu", (1,))
    state: dict[str, Any] = {
        "many": {f"{i}": torch.rand(300 + i) for i in range(200)},
        "large": torch.rand(300_000),
        "columns": torch.rand(40, 50)[:, ::3],
        "permuted": torch.rand(40, 50).t(),
        "dtype": torch.arange(50, dtype=torch.int16),
        "list": [torch.rand(5), {"a": torch.tensor(3.5)}],
        "tied": torch.rand(7),
        "empty": torch.empty(0, 2),
        "object": {"a": [1, (2, "three")]},
        "step": 0,
    }
    state["tied again"] = state["tied"]
    placed = torch.rand(9, 3)
    descriptors = []
    # The second engine has no room for all: what finds none is copied elsewhere.
    with engine() as roomy, engine(max_pinned_bytes=(2 << 20) + 3 * 4 * 4096) as tight:
        for turn in range(4):
            own = tight if turn == 3 else roomy
            stager = pyckpt.PinnedStager(engine=own, shared_memory=shared)
            state["step"] = turn
            state["dtensor"] = distribute_tensor(placed, mesh, [Shard(0)])
            if turn == 3:
                state["larger"] = torch.rand(700_000)
            before = frozen({key: value for key, value in state.items() if key != "dtensor"})
            before["dtensor"] = placed.clone()
            to = path / str(turn)
            # The path may be the writer's or the call's.
            writer = pyckpt.DirectWriter(
                None if turn % 2 else to, stager=stager, engine=own, sync_files=False
            )
            future = dcp.async_save(
                state,
                checkpoint_id=to if turn % 2 else None,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                planner=pyckpt.SavePlanner(),
            )
            overwrite({**state, "dtensor": state["dtensor"].to_local()})
            placed = state["dtensor"].to_local().clone()
            future.result()
            check_saved(before, to)
            del future
            wait_given_back(writer)
            assert own.native.arena_used_bytes == 0
            descriptors.append(len(os.listdir("/proc/self/fd")))
    return descriptors


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_several_saves(tmp_path: Path, shared: bool) -> None:
    [descriptors] = run_ranks(1, several_saves, tmp_path, shared)
    # Two hundred tensors, and not a descriptor for each.
    assert max(descriptors) - min(descriptors) < 20
    assert max(descriptors) < 150


@pytest.mark.slow
def test_failures_come_back(tmp_path: Path) -> None:
    run_ranks(1, a_failure, tmp_path)


def a_failure(path: Path) -> None:
    can_have_a_process()
    (path / "file").touch()
    state = {"t": torch.rand(30_000)}
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own, shared_memory=True)
        for to, works in ((path / "file" / "below", False), (path / "good", True)):
            writer = writer_to(to, stager=stager, engine=own)
            future = dcp.async_save(
                state,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            if works:
                future.result()
                check_saved(state, to)
            else:
                with pytest.raises(BaseException, match="Not a directory"):
                    future.result()
            wait_given_back(writer)
            assert own.native.arena_used_bytes == 0
