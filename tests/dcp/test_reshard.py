"""Checkpoints of some ranks, loaded by others: every sharding into every other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _sampling import slow
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import pyckpt
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.format import metadata as metadata_format

WRITERS = ["ours", "stock"]
# Meshes by the number of ranks.
MESHES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}
# Sizes that the ranks share evenly, unevenly, and of which some ranks get nothing.
SHAPES = [(8,), (5, 7), (1, 3), (2, 3, 5), (0, 3)]
ONE = [Shard(0), Shard(1), Replicate()]


def storage_writer(kind: str, path: Path) -> dcp.StorageWriter:
    if kind == "ours":
        return pyckpt.DirectWriter(path, sync_files=False)
    return FileSystemWriter(path, sync_files=False, thread_count=2)


def save(state: dict[str, Any], path: Path, kind: str, **options: Any) -> None:
    dcp.save(state, storage_writer=storage_writer(kind, path), **options)


def placements_of(mesh: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """All ways to lay a tensor of this shape out on a mesh."""
    possible = [p for p in ONE if not isinstance(p, Shard) or p.dim < len(shape)]
    return list(product(possible, repeat=len(mesh)))


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1000 * seed


def sharded(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    # All ranks have the same values, so that nothing needs to be sent.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


# --- every sharding into every other --------------------------------------------------------------


def cases() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Keys of the state: one for each number of a placement when saved and when loaded."""
    for shape in SHAPES:
        for at_save, at_load in product(range(9), repeat=2):
            yield f"{'x'.join(map(str, shape))}/{at_save}/{at_load}", shape


def saves(path: Path, world: int) -> None:
    for mesh_shape, kind in product(MESHES[world], WRITERS):
        mesh = init_device_mesh("cpu", mesh_shape)
        state: dict[str, Any] = {"object": (world, kind), "plain": values((3, 5), 7)}
        for seed, (key, shape) in enumerate(cases()):
            possible = placements_of(mesh_shape, shape)
            number = int(key.split("/")[1])
            if number < len(possible):
                state[key] = sharded(values(shape, seed), mesh, possible[number])
        save(state, path / f"{kind}-{mesh_shape}", kind)


def loads(path: Path, world: int) -> None:
    for checkpoint, mesh_shape in product(sorted(path.iterdir()), MESHES[world]):
        kind, saved_mesh = checkpoint.name.split("-")
        mesh = init_device_mesh("cpu", mesh_shape)
        present = {
            index.fqn for index in metadata_format.read(checkpoint / ".metadata").storage_data
        }
        for ours in (True, False):
            state: dict[str, Any] = {"object": None, "plain": torch.zeros(3, 5)}
            expected = {}
            for seed, (key, shape) in enumerate(cases()):
                possible = placements_of(mesh_shape, shape)
                number = int(key.split("/")[2])
                if key in present and number < len(possible):
                    expected[key] = sharded(values(shape, seed), mesh, possible[number])
                    state[key] = torch.zeros_like(expected[key])
            reader = pyckpt.DirectReader(checkpoint)
            if ours:
                report = pyckpt.load(state, reader=reader)
                # Whatever its shards were, a tensor read whole is verified; the object of stock's
                # is not.
                assert "plain" not in report.not_verified
                assert ("object" in report.not_verified) is (kind == "stock")
            else:
                dcp.load(state, storage_reader=reader)
            assert state["object"][1] == kind
            assert torch.equal(state["plain"], values((3, 5), 7))
            assert len(expected) >= 30  # or this tests little
            for key, tensor in expected.items():
                local = state[key].to_local()
                assert torch.equal(local, tensor.to_local()), (saved_mesh, mesh_shape, key)


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    for world in (1, 2, 4):
        run_ranks(world, saves, path, world)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_sharding_into_every_other(saved_by: Path, world: int) -> None:
    assert len(list(saved_by.iterdir())) == 8
    run_ranks(world, loads, saved_by, world)


@pytest.mark.slow
def test_one_process_puts_it_together(saved_by: Path) -> None:
    """Plain tensors, made from the metadata, without a process group."""
    for checkpoint in sorted(saved_by.iterdir()):
        metadata = metadata_format.read(checkpoint / ".metadata")
        state: dict[str, Any] = dict.fromkeys(metadata.state_dict_metadata)
        report = pyckpt.load(state, checkpoint)
        for seed, (key, shape) in enumerate(cases()):
            if key in state:
                assert torch.equal(state[key], values(shape, seed)), (checkpoint.name, key)
        # All shards of all tensors were read whole.
        assert set(report.not_verified) <= {"object"}


# --- how much is read -----------------------------------------------------------------------------

ROWS, COLUMNS = 1200, 1000


def save_rows(path: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        name: sharded(values((rows, COLUMNS), i), mesh, (Shard(0),))
        for i, (name, rows) in enumerate([("even", ROWS), ("uneven", ROWS + 5)])
    }
    for kind in WRITERS:
        save(state, path / kind, kind)


def load_rows(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in WRITERS:
        expected = {
            name: sharded(values((rows, COLUMNS), i), mesh, (Shard(0),))
            for i, (name, rows) in enumerate([("even", ROWS), ("uneven", ROWS + 5)])
        }
        state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        reader = pyckpt.DirectReader(path / kind)
        report = pyckpt.load(state, reader=reader)
        for name, tensor in expected.items():
            assert torch.equal(state[name].to_local(), tensor.to_local())
        needed = sum(tensor.to_local().nbytes for tensor in expected.values())
        # Of stock's files the ends of the items are read as well, to know where the bytes are.
        assert needed <= reader.statistics.bytes_needed <= needed + 8 * 4096
        assert reader.statistics.bytes <= 1.1 * needed
        assert report.bytes == reader.statistics.bytes


class Rows(DefaultLoadPlanner):
    """What one of several ranks asks for, without there being several."""

    def __init__(self, metadata: Any, rank: int, world: int) -> None:
        super().__init__()
        self.targets: dict[str, torch.Tensor] = {}
        self.items = []
        for name, tensor in metadata.state_dict_metadata.items():
            step = -(-tensor.size[0] // world)
            begin, end = min(rank * step, tensor.size[0]), min((rank + 1) * step, tensor.size[0])
            self.targets[name] = torch.zeros(end - begin, COLUMNS)
            for number, chunk in enumerate(tensor.chunks):
                low = max(begin, chunk.offsets[0])
                high = min(end, chunk.offsets[0] + chunk.sizes[0])
                if low < high:
                    self.items.append(
                        ReadItem(
                            LoadItemType.TENSOR,
                            MetadataIndex(name),
                            torch.Size((low - begin, 0)),
                            MetadataIndex(name, chunk.offsets, number),
                            torch.Size((low - chunk.offsets[0], 0)),
                            torch.Size((high - low, COLUMNS)),
                        )
                    )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        first = read_item.dest_offsets[0]
        return self.targets[read_item.dest_index.fqn][first : first + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows")
    run_ranks(4, save_rows, path)
    return path


@pytest.mark.parametrize("world", [3, slow(4)])
def test_bytes_that_ranks_read(rows: Path, world: int) -> None:
    run_ranks(world, load_rows, rows)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_bytes_that_one_of_many_reads(rows: Path, kind: str, world: int) -> None:
    parts: dict[str, list[torch.Tensor]] = {"even": [], "uneven": []}
    for rank in range(world):
        reader = pyckpt.DirectReader(rows / kind)
        metadata = reader.read_metadata()
        planner = Rows(metadata, rank, world)
        reader.set_up_storage_reader(metadata, is_coordinator=rank == 0)
        reader.read_data(LoadPlan(planner.items), planner).wait()
        needed = sum(target.nbytes for target in planner.targets.values())
        assert needed <= reader.statistics.bytes_needed <= needed + 8 * 4096
        assert reader.statistics.bytes <= 1.1 * needed
        for name, target in planner.targets.items():
            parts[name].append(target)
        # Alone, a rank reads all of all shards and can verify them; so do those who share none.
        assert reader.unverified == [] or world > 1
    for i, name in enumerate(["even", "uneven"]):
        whole = torch.cat(parts[name])
        assert torch.equal(whole, values(tuple(whole.shape), i))


def test_bytes_that_one_process_reads(rows: Path) -> None:
    for kind in WRITERS:
        state: dict[str, Any] = {"even": None, "uneven": None}
        reader = pyckpt.DirectReader(rows / kind)
        report = pyckpt.load(state, reader=reader)
        needed = sum(tensor.nbytes for tensor in state.values())
        assert needed == 4 * COLUMNS * (2 * ROWS + 5)
        assert report.bytes <= 1.1 * needed
        assert report.not_verified == []


def test_replicated_tensors_are_saved_once(tmp_path: Path) -> None:
    run_ranks(2, save_replicated, tmp_path)
    sizes = [file.stat().st_size for file in tmp_path.glob("*/*.distcp")]
    assert sum(sizes) < 2 * 1.2 * 400_000  # two writers
    run_ranks(2, load_replicated, tmp_path)


def save_replicated(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in WRITERS:
        save({"t": sharded(values((100_000,), 1), mesh, (Replicate(),))}, path / kind, kind)


def load_replicated(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for kind in WRITERS:
        state = {"t": sharded(torch.zeros(100_000), mesh, (Replicate(),))}
        report = pyckpt.load(state, path / kind)
        assert torch.equal(state["t"].to_local(), values((100_000,), 1))
        assert report.bytes <= 1.1 * 400_000
        assert report.not_verified == []


# --- FSDP2 ----------------------------------------------------------------------------------------


def trained(world: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False)
    )
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        # The same on all ranks, so that the outcome is the same for any number of them.
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    if isinstance(state, list):
        return [full(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def assert_equal_states(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal_states(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal_states(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def save_fsdp(path: Path, world: int) -> None:
    state = states_of(*trained(world, 3))
    for kind in WRITERS:
        save(state, path / "checkpoints" / f"{kind}-{world}", kind)
    whole = full(state)
    if dist.get_rank() == 0:
        torch.save(whole, path / f"expected-{world}")


def load_fsdp(path: Path, world: int) -> None:
    checkpoints = sorted((path / "checkpoints").iterdir())
    assert len(checkpoints) == 4
    for checkpoint, planner in product(checkpoints, ["ours", "stock", "nothing"]):
        expected = torch.load(path / f"expected-{checkpoint.name.split('-')[1]}")
        model, optimizer = trained(world, 1)
        state = states_of(model, optimizer)
        if planner == "ours":
            report = pyckpt.load(state, checkpoint)
            assert report.kept == report.left_out == report.unexpected == []
        elif planner == "stock":
            dcp.load(state, storage_reader=pyckpt.DirectReader(checkpoint))
        else:
            # Moments that are not there yet are created, whole on each rank.
            state["optim"]["state"].clear()
            report = pyckpt.load(state, checkpoint)
            assert len(report.filled) == 15
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        assert_equal_states(full(states_of(model, optimizer)), expected)


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    for world in (2, 4):
        run_ranks(world, save_fsdp, tmp_path, world)
    for world in (1, 2, 3):
        run_ranks(world, load_fsdp, tmp_path, world)


# --- ranks that save each for themselves ----------------------------------------------------------


def save_without_collectives(path: Path) -> None:
    rank = dist.get_rank()
    state = {"t": values((50, 3), rank), "o": f"rank {rank}"}
    # Stock's, where the other rank has been quicker and is through.
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    for kind in WRITERS:
        save(state, path / kind, kind, use_collectives=False)


def load_without_collectives(path: Path) -> None:
    rank = dist.get_rank()
    for kind in WRITERS:
        state: dict[str, Any] = {"t": torch.zeros(50, 3), "o": ""}
        report = pyckpt.load(state, path / kind)
        assert torch.equal(state["t"], values((50, 3), rank))
        assert state["o"] == f"rank {rank}"
        assert report.not_verified == ([] if kind == "ours" else ["o"])
        state = {"t": torch.zeros(50, 3), "o": ""}
        dcp.load(state, storage_reader=pyckpt.DirectReader(path / kind))
        assert torch.equal(state["t"], values((50, 3), rank))
        assert state["o"] == f"rank {rank}"


def test_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, save_without_collectives, tmp_path)
    for kind in WRITERS:
        names = {path.name for path in (tmp_path / kind).glob("*.metadata")}
        assert names == {"__0.metadata", "__1.metadata"}
    run_ranks(2, load_without_collectives, tmp_path)


# --- failures -------------------------------------------------------------------------------------


def save_halves(path: Path, shift: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"t": sharded(values((64, 9), shift), mesh, (Shard(0),)), "o": 1}
    save(state, path, "ours")


def load_damaged(path: Path) -> tuple[type, str, Any, float]:
    mesh = init_device_mesh("cpu", (2,))
    state = {"t": sharded(torch.zeros(64, 9), mesh, (Shard(0),))}
    try:
        pyckpt.load(state, path)
    except Exception as error:
        # Nobody is left waiting for the others.
        dist.barrier()
        return (
            type(error),
            str(error),
            getattr(error, "path", None),
            state["t"].to_local().sum().item(),
        )
    raise AssertionError("loaded a damaged checkpoint")


def data_files(path: Path) -> list[Path]:
    """By rank."""
    return sorted(path.glob("*.distcp"), key=lambda file: int(file.name.split("_")[2]))


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_damage_that_one_rank_sees(tmp_path: Path, rank: int) -> None:
    run_ranks(2, save_halves, tmp_path, 1)
    data = data_files(tmp_path)[rank]
    metadata = metadata_format.read(tmp_path / ".metadata")
    (info,) = [
        info
        for index, info in metadata.storage_data.items()
        if index.fqn == "t" and info.relative_path == data.name
    ]
    content = bytearray(data.read_bytes())
    content[info.offset + info.payload_offset + 100] ^= 4
    data.write_bytes(content)
    for kind, message, path, _ in run_ranks(2, load_damaged, tmp_path):
        assert kind is CorruptCheckpoint
        assert message.startswith(f"rank {rank}: t in {data}")
        assert path == str(data)


def test_missing_file_of_one_rank(tmp_path: Path) -> None:
    run_ranks(2, save_halves, tmp_path, 1)
    data = data_files(tmp_path)[1]
    data.unlink()
    for kind, message, _, _ in run_ranks(2, load_damaged, tmp_path):
        assert kind is FileNotFoundError
        assert "rank 1" in message
        assert str(data) in message


def test_exchanged_files(tmp_path: Path) -> None:
    run_ranks(2, save_halves, tmp_path, 1)
    first, second = data_files(tmp_path)
    # One rank alone saves the object, so that the sizes differ: that is known before any reading.
    exchange(first, second)
    assert first.stat().st_size != second.stat().st_size
    for kind, message, _, total in run_ranks(2, load_damaged, tmp_path):
        assert kind is CorruptCheckpoint
        assert message.startswith("ranks 0, 1: ")
        assert str(first) in message
        assert total == 0
    exchange(first, second)
    state: dict[str, Any] = {"t": None}
    pyckpt.load(state, tmp_path)
    assert torch.equal(state["t"], values((64, 9), 1))


def exchange(a: Path, b: Path) -> None:
    other = a.with_name("other")
    a.rename(other)
    b.rename(a)
    other.rename(b)


def save_equal_halves(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    save({"t": sharded(values((64, 9), 0), mesh, (Shard(0),))}, path, "ours")


def test_exchanged_files_of_one_size(tmp_path: Path) -> None:
    run_ranks(2, save_equal_halves, tmp_path)
    first, second = data_files(tmp_path)
    assert first.stat().st_size == second.stat().st_size
    exchange(first, second)
    with pytest.raises(CorruptCheckpoint, match=r"t in .*1 more") as caught:
        pyckpt.load({"t": torch.zeros(64, 9)}, tmp_path)
    assert caught.value.path in (str(first), str(second))


def load_with_missing_key(path: Path) -> str:
    state: dict[str, Any] = {"t": torch.zeros(64, 9)}
    if dist.get_rank() == 1:
        state["not there"] = torch.zeros(1)
    with pytest.raises(LoadError) as caught:
        pyckpt.load(state, path)
    return str(caught.value)


def test_a_rank_that_asks_for_more(tmp_path: Path) -> None:
    run_ranks(2, save_halves, tmp_path, 1)
    for message in run_ranks(2, load_with_missing_key, tmp_path):
        assert message.startswith("rank 1: ")
        assert "not there" in message
