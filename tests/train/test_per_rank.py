"""PerRank, dataloaders and RngState: each rank gets its own back, on as many ranks or another
number."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import RanksFailed, run_ranks
from _sampling import slow

import pyckpt
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.train.state.app_state import AppState


class Loader(torch.utils.data.DataLoader[int]):
    """What torchdata's StatefulDataLoader looks like from outside."""

    def __init__(self) -> None:
        super().__init__(range(100))  # type: ignore[arg-type]
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"_snapshot": {"position": self.position, 1: {}}, "workers": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["workers"] == {}
        self.position = state["_snapshot"]["position"]


class Merging(Loader):
    """Goes on behind what all ranks have seen."""

    def merge(self, states: list[Any], rank: int, world_size: int) -> Any:
        seen = sum(state["_snapshot"]["position"] for state in states)
        return {"_snapshot": {"position": seen // world_size}, "workers": {}}


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def save_loaders(path: str, cls: type[Loader]) -> None:
    loader = cls()
    loader.position = 10 * (dist.get_rank() + 1)
    buffer = {"samples": torch.full((dist.get_rank() + 1,), dist.get_rank())}
    state = {"data": loader, "buffer": pyckpt.PerRank(buffer), "step": 5}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))


def load_loader(path: str, cls: type[Loader]) -> int:
    loader = cls()
    AppState({"data": loader}).load(pyckpt.DirectReader(path))
    return loader.position


def load_buffer(path: str) -> list[int]:
    buffer = pyckpt.PerRank({"samples": torch.zeros(0)})
    value = buffer.value
    AppState({"buffer": buffer}).load(pyckpt.DirectReader(path))
    assert buffer.value is value
    return value["samples"].tolist()


def test_each_rank_gets_its_own(tmp_path: Path) -> None:
    path = str(tmp_path)
    run_ranks(3, save_loaders, path, Loader)
    assert run_ranks(3, load_loader, path, Loader) == [10, 20, 30]
    assert run_ranks(3, load_buffer, path) == [[0], [1, 1], [2, 2, 2]]
    with pytest.raises(RanksFailed) as info:
        run_ranks(2, load_loader, path, Loader)
    assert isinstance(info.value.__cause__, LoadError)
    assert "data: saved on 3 ranks, and Loader has no merge() to bring it to 2" in str(info.value)
    assert set(info.value.failures) == {0, 1}
    # In a process that is alone, too.
    with pytest.raises(LoadError, match="saved on 3 ranks"):
        load_loader(path, Loader)


@pytest.mark.parametrize("world", [slow(1), 2, slow(4)])
def test_merge(world: int, tmp_path: Path) -> None:
    run_ranks(2, save_loaders, str(tmp_path), Merging)
    expected = [10, 20] if world == 2 else [30 // world] * world
    assert run_ranks(world, load_loader, str(tmp_path), Merging) == expected


def test_merge_of_plain_values(tmp_path: Path) -> None:
    run_ranks(2, save_loaders, str(tmp_path), Loader)

    def merge(states: list[Any], rank: int, world_size: int) -> Any:
        assert (rank, world_size) == (0, 1)
        return {"samples": torch.cat([state["samples"] for state in states])}

    buffer = pyckpt.PerRank({"samples": None}, merge=merge)
    AppState({"buffer": buffer}).load(pyckpt.DirectReader(tmp_path))
    assert buffer.value["samples"].tolist() == [0, 1, 1]


def test_what_is_not_per_rank_in_the_checkpoint(tmp_path: Path) -> None:
    state = {"count": {"a": 3}}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(tmp_path))
    with pytest.raises(LoadError, match="count: it was not saved as something that each rank has"):
        AppState({"count": pyckpt.PerRank(3)}).load(pyckpt.DirectReader(tmp_path))


def test_a_rank_is_missing(tmp_path: Path) -> None:
    state = {"count": {"rank-00000-of-00002": 3}}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(tmp_path))
    with pytest.raises(CorruptCheckpoint, match=r"count.*each of 2 ranks"):
        AppState({"count": pyckpt.PerRank(3)}).load(pyckpt.DirectReader(tmp_path))


def save_with_dcp(path: str) -> Any:
    own = pyckpt.PerRank(100 + dist.get_rank())
    dcp.save({"own": own}, storage_writer=pyckpt.DirectWriter(path))
    restored = pyckpt.PerRank(None)
    dcp.load({"own": restored}, checkpoint_id=path)
    return restored.value


def test_dcp_alone_saves_and_loads_it(tmp_path: Path) -> None:
    assert run_ranks(2, save_with_dcp, str(tmp_path)) == [100, 101]
    with pytest.raises(LoadError, match="no state of rank 0"):
        pyckpt.PerRank(None).load_state_dict({"rank-00000-of-00002": 100})


# --- random numbers -----------------------------------------------------------------------------


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def save_random(path: str, same: bool) -> list[float]:
    seed = 1 if same else dist.get_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    draw()
    state = {"rng": pyckpt.RngState()}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    return draw()


def load_random(path: str) -> list[float]:
    AppState({"rng": pyckpt.RngState()}).load(pyckpt.DirectReader(path))
    return draw()


def test_generators_go_on(tmp_path: Path) -> None:
    path = str(tmp_path)
    expected = run_ranks(2, save_random, path, False)
    assert run_ranks(2, load_random, path) == expected
    assert run_ranks(1, load_random, path) == expected[:1]


@pytest.mark.slow
def test_generators_of_new_ranks(tmp_path: Path) -> None:
    path = str(tmp_path)
    expected = run_ranks(2, save_random, path, False)
    found = run_ranks(4, load_random, path)
    assert found[:2] == expected
    for column in zip(*found, strict=True):
        assert len(set(column)) == 4
    assert run_ranks(4, load_random, path) == found


@pytest.mark.slow
def test_generators_that_were_in_step_stay_so(tmp_path: Path) -> None:
    path = str(tmp_path)
    expected = run_ranks(2, save_random, path, True)
    assert run_ranks(3, load_random, path) == [expected[0]] * 3


def test_one_rank_s_generators_are_nobody_else_s(tmp_path: Path) -> None:
    path = str(tmp_path)
    expected = run_ranks(1, save_random, path, False)
    found = run_ranks(2, load_random, path)
    assert found[0] == expected[0]
    for mine, other in zip(*found, strict=True):
        assert mine != other


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators(tmp_path: Path) -> None:
    torch.cuda.manual_seed(3)
    state = {"rng": pyckpt.RngState()}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(tmp_path))
    expected = torch.rand(4, device="cuda")
    AppState(state).load(pyckpt.DirectReader(tmp_path))
    assert torch.equal(torch.rand(4, device="cuda"), expected)


def restore_own_keys(path: Path) -> list[str]:
    rank = dist.get_rank()
    # Each rank has another number of keys of its own, and other ones.
    own = {f"of {rank}.{i}": torch.full((3,), float(i)) for i in range(1 + 2 * rank)}
    state = {"own": pyckpt.PerRank(dict(own)), "step": 1}
    with pyckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, state).wait()
    blank = pyckpt.PerRank({name: torch.zeros(3) for name in own})
    with pyckpt.Checkpointer(path) as checkpointer:
        assert checkpointer.restore({"own": blank, "step": 0}) == 1
    for name, tensor in own.items():
        assert torch.equal(blank.value[name], tensor)
    return list(own)


def test_ranks_with_other_keys_compare_what_they_could_not_verify(tmp_path: Path) -> None:
    """Ranks agree on what to verify by its place in a list of keys, which has to be the same list
    on all of them."""
    assert [len(keys) for keys in run_ranks(2, restore_own_keys, tmp_path)] == [1, 3]
