"""Ranks that wait for all others to come to a meeting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from _ranks import run_ranks

from pyckpt.errors import RanksLost
from pyckpt.train.sync.roll_call import RollCall


def all_come(_: Path) -> list[list[int]]:
    roll_call = RollCall("test", dist.get_rank(), dist.get_world_size())
    return [roll_call.assemble("save", late=60, limit=60, tell=print) for _ in range(3)]


def one_stays_away(_: Path) -> tuple[list[int], list[list[int]]]:
    rank = dist.get_rank()
    roll_call = RollCall("test", rank, dist.get_world_size())
    told: list[list[int]] = []
    missing = roll_call.assemble("save", late=60, limit=60, tell=told.append)
    assert not missing
    if rank != 1:
        missing = roll_call.assemble("save", late=0.01, limit=0.2, tell=told.append)
    dist.barrier()
    return missing, told


def one_does_another_thing(_: Path) -> str:
    rank = dist.get_rank()
    roll_call = RollCall("test", rank, dist.get_world_size())
    roll_call.assemble("save", late=60, limit=60, tell=print)
    with pytest.raises(RanksLost) as caught:
        roll_call.assemble("load" if rank == 1 else "save", late=60, limit=60, tell=print)
    dist.barrier()  # the store ends with the first rank
    return str(caught.value).partition(",")[0]


def test_one_does_another_thing(tmp_path: Path) -> None:
    save, load = "this process has called save", "this process has called load"
    assert run_ranks(3, one_does_another_thing, tmp_path) == [save, load, save]


def test_all_come(tmp_path: Path) -> None:
    assert run_ranks(3, all_come, tmp_path) == [[[], [], []]] * 3


def test_one_stays_away(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, one_stays_away, tmp_path)
    assert second == ([], [])
    for missing, told in (first, third):
        # The other one may not have come either by then, on a machine that is busy.
        assert 1 in missing
        assert all(1 in late for late in told)
        assert told
