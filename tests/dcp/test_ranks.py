"""Saves by several ranks, loaded with stock by as many, fewer and more."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_child, run_ranks
from _sampling import slow
from torch.distributed._shard.sharded_tensor import (
    Shard as LocalShard,
)
from torch.distributed._shard.sharded_tensor import (
    ShardedTensor,
    init_from_local_shards,
)
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import pyckpt
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.tools.verifying import verify


def whole(value: int) -> dict[str, torch.Tensor]:
    """What the tensors of a state are, before they are spread over ranks."""
    random = torch.Generator().manual_seed(value)
    bits = torch.randint(-(2**31), 2**31, (10, 6), generator=random, dtype=torch.int32)
    return {
        "rows": bits.view(torch.float32),  # all kinds of NaN among them
        "columns": torch.randn(6, 10, generator=random, dtype=torch.float64),
        "few": torch.randn(2, 3, generator=random).bfloat16(),  # fewer rows than some have ranks
        "large": torch.randn(130, 1024, generator=random),  # shards written from where they lie
        "replicated": torch.randn(7, 3, generator=random),
        "grid": torch.randn(9, 7, generator=random, dtype=torch.complex64),
        "plain": torch.randn(33, generator=random),
        "scalar": torch.tensor(value),
    }


def spread(value: int, *, as_loaded: bool = False) -> dict[str, torch.Tensor]:
    """A state as a rank has it; or in other placements, as one that loads it may have it."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 else line
    rows, columns = [Shard(0)], [Shard(1)]
    placements = {
        "rows": (line, columns if as_loaded else rows),
        "columns": (line, rows if as_loaded else columns),
        "few": (line, rows),
        "large": (line, columns if as_loaded else rows),
        "replicated": (line, rows if as_loaded else [Replicate()]),
        "grid": (grid, [Shard(0), Shard(1)][: grid.ndim]),
    }
    state = whole(value)
    for key, (mesh, placement) in placements.items():
        state[key] = distribute_tensor(state[key], mesh, placement, src_data_rank=None)
    return state


def objects(value: int, world: int) -> dict[str, Any]:
    return {f"rng/{rank}": ["of rank", rank, "save", value] for rank in range(world)}


def own_object(value: int) -> dict[str, Any]:
    key = f"rng/{dist.get_rank()}"
    return {key: objects(value, dist.get_world_size())[key]}


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor, key: str) -> None:
    assert type(found) is type(wanted), key
    if isinstance(found, DTensor):
        assert found.placements == wanted.placements, key
        found, wanted = found.to_local(), wanted.to_local()
    assert found.dtype == wanted.dtype, key
    assert found.shape == wanted.shape, key
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted)]
    assert torch.equal(*as_bytes), key


def load_and_compare(directory: Path, value: int, saved_by: int, template: Any) -> None:
    """Load with stock into tensors of other values and compare with what was saved."""
    wanted, target = template(value), template(value + 100)
    state: dict[str, Any] = {**target, **dict.fromkeys(objects(value, saved_by))}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory))
    for key, tensor in wanted.items():
        assert_same_bits(state[key], tensor, key)
    for key, content in objects(value, saved_by).items():
        assert state[key] == content


def listing(directory: Path) -> list[str]:
    return [re.sub("[0-9a-f]{32}", "ID", name) for name in sorted(os.listdir(directory))]


def one_file_each(ranks: int) -> list[str]:
    return [".metadata", *(f"__{rank}_ID.distcp" for rank in range(ranks))]


# The functions below run on every rank.


def _save(directory: Path, values: list[int], how: str) -> None:
    """Save, and save again with the same writer."""
    writer = pyckpt.DirectWriter(directory)
    for value in values:
        state = {**spread(value), **own_object(value)}
        if how == "async_save":
            dcp.async_save(state, storage_writer=writer).result()
        else:
            dcp.save(state, storage_writer=writer)
        # Each rank's data is in its own file.
        assert writer.statistics is not None
        (own,) = directory.glob(f"__{dist.get_rank()}_*.distcp")
        assert own.stat().st_size == writer.statistics.bytes


def _load(directory: Path, value: int, saved_by: int) -> None:
    load_and_compare(directory, value, saved_by, lambda v: spread(v, as_loaded=True))
    load_and_compare(directory, value, saved_by, spread)


def _load_whole(_pipe: Any, directory: Path, value: int, saved_by: int) -> None:
    load_and_compare(directory, value, saved_by, whole)


@pytest.mark.parametrize("how", [slow("save"), "async_save"])
@pytest.mark.parametrize("world", [2, slow(4)])
def test_loads_on_any_number_of_ranks(world: int, how: str, tmp_path: Path) -> None:
    run_ranks(world, _save, tmp_path, [1, 2, 3], how)
    assert listing(tmp_path) == one_file_each(world)
    run_child(_load_whole, tmp_path, 3, world)
    for loading in (1, 3, 4):
        run_ranks(loading, _load, tmp_path, 3, world)


def _save_by_some(directory: Path, members: list[int]) -> None:
    group = dist.new_group(members)
    if dist.get_rank() in members:
        state = {
            "shared": torch.arange(6.0),
            f"of/{dist.get_rank()}": torch.tensor(dist.get_rank()),
        }
        dcp.save(state, storage_writer=pyckpt.DirectWriter(directory), process_group=group)


def test_a_process_group_of_some_ranks(tmp_path: Path) -> None:
    run_ranks(4, _save_by_some, tmp_path, [1, 3])
    assert listing(tmp_path) == one_file_each(2)
    target = {"shared": torch.zeros(6), "of/1": torch.tensor(0), "of/3": torch.tensor(0)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(target["shared"], torch.arange(6.0))
    assert (target["of/1"].item(), target["of/3"].item()) == (1, 3)


def _save_by_one(directory: Path, with_items: int) -> None:
    for value in (1.0, 2.0):
        state = {"w": torch.full((4,), value)} if dist.get_rank() == with_items else {}
        dcp.save(state, storage_writer=pyckpt.DirectWriter(directory))


@pytest.mark.parametrize("with_items", [0, 1])
def test_ranks_without_items_leave_no_file(with_items: int, tmp_path: Path) -> None:
    run_ranks(3, _save_by_one, tmp_path, with_items)
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(target["w"], torch.full((4,), 2.0))
    assert listing(tmp_path) == [".metadata", f"__{with_items}_ID.distcp"]


def test_a_state_without_items(tmp_path: Path) -> None:
    dcp.save({}, storage_writer=pyckpt.DirectWriter(tmp_path))
    dcp.load({}, storage_reader=dcp.FileSystemReader(tmp_path))
    assert listing(tmp_path) == [".metadata"]


def _sharded_tensor(value: int) -> ShardedTensor:
    # Rows 0 and 1 of five are rank 0's, the others rank 1's.
    first, rows = ((0, 2), (2, 3))[dist.get_rank()]
    local = whole(value)["columns"][first : first + rows].clone()
    shard = LocalShard.from_tensor_and_offsets(local, [first, 0], dist.get_rank())
    return init_from_local_shards([shard], 5, 10)


def _save_sharded_tensor(directory: Path) -> None:
    warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
    dcp.save({"w": _sharded_tensor(1)}, storage_writer=pyckpt.DirectWriter(directory))
    target = {"w": _sharded_tensor(2)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    found, wanted = (t.local_shards()[0].tensor for t in (target["w"], _sharded_tensor(1)))
    assert_same_bits(found, wanted, "w")


def test_sharded_tensors(tmp_path: Path) -> None:
    run_ranks(2, _save_sharded_tensor, tmp_path)
    assert listing(tmp_path) == one_file_each(2)
    target = {"w": torch.zeros(5, 10, dtype=torch.float64)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert_same_bits(target["w"], whole(1)["columns"][:5], "w")


def _save_alone(directory: Path, how: str) -> None:
    rank = dist.get_rank()
    save: Callable[..., Any] = dcp.async_save if how == "async_save" else dcp.save
    for value in (1, 2):
        state = {"w": torch.full((1000,), 10.0 * value + rank), "object": ["of rank", rank]}
        writer = pyckpt.DirectWriter(directory)
        saved = save(state, storage_writer=writer, use_collectives=False)
        if how == "async_save":
            saved.result()
    dist.barrier()
    target = {"w": torch.zeros(1000), "object": None}
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    assert torch.equal(target["w"], torch.full((1000,), 20.0 + rank))
    assert target["object"] == ["of rank", rank]


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_without_collectives_each_rank_commits_its_own(how: str, tmp_path: Path) -> None:
    run_ranks(3, _save_alone, tmp_path, how)
    assert listing(tmp_path) == [
        name for rank in range(3) for name in (f"__{rank}.metadata", f"__{rank}_ID.distcp")
    ]


def _save_shards_alone(directory: Path, by: str) -> None:
    rank = dist.get_rank()
    line = init_device_mesh("cpu", (2,))
    whole = torch.arange(30.0).view(5, 6)

    def sharded(dim: int, *, value: torch.Tensor) -> dict[str, Any]:
        shards = {"w": distribute_tensor(value.clone(), line, [Shard(dim)])}
        return {**shards, "few": distribute_tensor(torch.ones(1, 3), line, [Shard(0)]), "n": rank}

    writers = {"pyckpt": pyckpt.DirectWriter, "stock": dcp.FileSystemWriter}
    dcp.save(sharded(0, value=whole), storage_writer=writers[by](directory), use_collectives=False)
    dist.barrier()
    for load in (pyckpt.load, _load_with_stocks_planner):
        target = sharded(0, value=torch.zeros(5, 6))
        load(target, directory)
        assert torch.equal(target["w"].full_tensor(), whole)
        assert target["n"] == rank
        # The other half of each column is in the file of the other rank.
        target = sharded(1, value=torch.full((5, 6), -1.0))
        with pytest.raises(CorruptCheckpoint, match="w: the checkpoint has"):
            load(target, directory)
        dist.barrier()
        assert torch.equal(target["w"].to_local(), torch.full((5, 3), -1.0))


def _load_with_stocks_planner(state: dict[str, Any], directory: Path) -> None:
    dcp.load(state, storage_reader=pyckpt.DirectReader(directory))


@pytest.mark.parametrize("by", ["pyckpt", "stock"])
def test_shards_that_each_rank_saved_alone_are_loaded_by_as_many(by: str, tmp_path: Path) -> None:
    run_ranks(2, _save_shards_alone, tmp_path, by)
    for rank in range(2):
        assert verify(tmp_path, rank=rank).good


@pytest.mark.parametrize("target", [torch.full((5, 6), -1.0), None])
def test_a_ranks_own_file_is_not_the_whole_tensor(
    target: torch.Tensor | None, tmp_path: Path
) -> None:
    run_ranks(2, _save_shards_alone, tmp_path, "pyckpt")
    state = {"w": target}
    with pytest.raises(CorruptCheckpoint, match=r"w: .* 18 of the 30 elements.*load it on"):
        pyckpt.load(state, tmp_path)
    assert state["w"] is target
    if target is None:
        return
    with pytest.raises(CorruptCheckpoint, match="18 of the 30 elements"):
        _load_with_stocks_planner(state, tmp_path)
    assert torch.equal(target, torch.full((5, 6), -1.0))


class _NamelessPlanner(dcp.DefaultLoadPlanner):
    """A planner that does not say what it fills."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        self.hidden = self.state_dict

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        del self.state_dict
        return plan


def test_a_planner_that_hides_its_state_loads_no_part(tmp_path: Path) -> None:
    run_ranks(2, _save_shards_alone, tmp_path, "pyckpt")
    with pytest.raises(PyckptError, match="_NamelessPlanner has no state_dict"):
        dcp.load(
            {"w": torch.zeros(5, 6)},
            storage_reader=pyckpt.DirectReader(tmp_path),
            planner=_NamelessPlanner(),
        )


def _save_alone_and_together(directory: Path) -> None:
    state = {f"w{dist.get_rank()}": torch.ones(3)}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(directory), use_collectives=False)
    dist.barrier()
    dcp.save(state, storage_writer=pyckpt.DirectWriter(directory))


def test_sweeping_spares_what_another_metadata_file_names(tmp_path: Path) -> None:
    run_ranks(2, _save_alone_and_together, tmp_path)
    data = [name for rank in range(2) for name in [f"__{rank}_ID.distcp"] * 2]
    assert sorted(listing(tmp_path)) == sorted([".metadata", "__0.metadata", "__1.metadata", *data])
    for rank in range(2):
        metadata = dcp.FileSystemReader(tmp_path).read_metadata(rank=rank)
        for info in metadata.storage_data.values():
            assert (tmp_path / info.relative_path).exists()
