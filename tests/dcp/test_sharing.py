"""Loads whose ranks read once what several of them want, and hand it on."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.utils._pytree as pytree
from _ranks import RanksFailed, run_ranks
from _sampling import slow
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pyckpt
from pyckpt.dcp import bundles, handing_on, neighbours, sharing
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.format.metadata import StorageInfo

PAGE = 4096
SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, 300_007, 1_000_003]
PIECE = 1 << 16


def _values(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=_generator(seed))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _state() -> dict[str, Any]:
    return {
        "bytes": {f"of {size}": _values(size, size) for size in SIZES},
        "floats": {f"{i}": torch.randn(17, 31, generator=_generator(i)) for i in range(40)},
        "columns": torch.randn(64, 48, generator=_generator(1)),
        "converted": torch.randn(33, dtype=torch.float64, generator=_generator(2)),
        "scalar": torch.tensor(7.5),
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(5, dtype=torch.complex64, generator=_generator(3)),
        "sparse": torch.eye(4).to_sparse(),
        "objects": {"step": 12, "name": "run", "nested": [1, (2, 3)], "nothing": None},
    }


def _empty_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _empty_like(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor) and not state.is_sparse:
        return torch.zeros_like(state)
    return None


def _check(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _check(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, torch.Tensor):
        dense = (found.to_dense(), expected.to_dense()) if expected.is_sparse else (found, expected)
        assert torch.equal(*dense), where
    else:
        assert found == expected, where


def _load(
    state: dict[str, Any], path: Path, *, near: bool = False, **options: Any
) -> tuple[Any, int]:
    if not near:  # each rank on a host of its own, so that all bytes go through the group
        neighbours._host = lambda: str(os.getpid())
    reader = pyckpt.DirectReader(path)
    report = pyckpt.load(state, reader=reader, share_reads=True, **options)
    return report, reader.statistics.bytes


def _replicas(path: Path) -> int:
    handing_on._PIECE_BYTES = PIECE
    handing_on._SMALL_BYTES = PAGE
    expected = _state()
    found = _empty_like(expected)
    # Destinations that are not like the file: their own memory order, and another dtype.
    found["columns"] = torch.zeros(48, 64).t()
    found["converted"] = torch.zeros(33)
    tensors = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
    before = [one._version for one in tensors]
    report, count = _load(found, path)
    # Autograd sees the change, whichever rank has read it.
    assert all(one._version > was for one, was in zip(tensors, before, strict=True) if one.numel())
    assert report.not_verified == []
    expected["converted"] = expected["converted"].float()
    _check(found, expected)
    return count


@pytest.mark.parametrize("ranks", [slow(2), 3, slow(8)])
def test_what_all_ranks_want_is_read_once(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    reader = pyckpt.DirectReader(path)
    alone = _empty_like(_state())
    pyckpt.load(alone, reader=reader)
    unique = reader.statistics.bytes
    # A sparse tensor takes the place of its destination, so each rank reads its own.
    del alone["sparse"]
    pyckpt.load(alone, reader=reader)
    sparse = unique - reader.statistics.bytes
    counts = run_ranks(ranks, _replicas, path)
    # Together they read neighbours that are not wanted, and to whole blocks, as one alone does.
    blocks = 2 * PAGE * len(_state()["floats"])
    assert abs(sum(counts) - unique - (ranks - 1) * sparse) <= blocks
    assert max(counts) < unique


def _save_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    dcp.save(_sharded(mesh), storage_writer=pyckpt.DirectWriter(path, sync_files=False))


def _sharded(mesh: Any) -> dict[str, Any]:
    whole = torch.arange(7 * 1000.0).reshape(1000, 7)
    return {
        "hybrid": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "shards": distribute_tensor(whole + 1, mesh, [Shard(0), Shard(1)]),
        "replicas": distribute_tensor(whole + 2, mesh, [Replicate(), Replicate()]),
    }


def _load_sharded(path: Path) -> int:
    mesh = init_device_mesh("cpu", (2, 2))
    expected = _sharded(mesh)
    found = {key: torch.zeros_like(value) for key, value in expected.items()}
    before = {key: value._version for key, value in found.items()}
    _, count = _load(found, path)
    assert all(value._version > before[key] for key, value in found.items())
    for key, value in expected.items():
        assert torch.equal(found[key].to_local(), value.to_local()), key
    return count


def test_replicas_of_shards_read_each_shard_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(4, _save_sharded, path)
    counts = run_ranks(4, _load_sharded, path)
    needed = 3 * 7 * 1000 * 4
    assert needed <= sum(counts) < needed + 16 * PAGE


def _load_damaged(path: Path) -> None:
    with pytest.raises(CorruptCheckpoint):
        _load(_empty_like(_state()), path)
    dist.barrier()  # all ranks got here, so none waits for bytes


def test_damage_that_one_rank_reads_fails_on_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(bytes(_values(1_000_003, 1_000_003).tolist())[:64])
    data[at + 5] ^= 1
    file.write_bytes(data)
    run_ranks(3, _load_damaged, path)


def _load_dying(path: Path) -> None:
    if dist.get_rank() == 1:
        original = pyckpt.DirectReader.read_data

        def read_data(*args: Any) -> Any:
            original(*args)
            raise OSError(5, "injected")

        pyckpt.DirectReader.read_data = read_data  # type: ignore[method-assign]
    _load(_empty_like(_state()), path)


def test_an_error_of_one_rank_fails_on_all(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, _load_dying, path)
    assert sorted(caught.value.failures) == [0, 1, 2]
    assert all("injected (rank 1)" in str(failure) for failure in caught.value.failures.values())


def _restore(path: Path) -> tuple[int, int]:
    model = torch.nn.Linear(500, 300)
    torch.nn.init.constant_(model.weight, 3.0)
    read = []
    original = pyckpt.DirectReader.read_data

    def read_data(self: pyckpt.DirectReader, *args: Any) -> Any:
        done = original(self, *args)
        read.append(self.statistics.bytes)
        return done

    with pyckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(4, {"model": model, "step": 4})
        checkpointer.wait()
        torch.nn.init.constant_(model.weight, 0.0)
        state = {"model": model, "step": 0}
        pyckpt.DirectReader.read_data = read_data  # type: ignore[method-assign]
        assert checkpointer.restore(state, share_reads=True) == 4
    assert state["step"] == 4
    assert bool((model.weight == 3.0).all())
    return sum(read), model.weight.nbytes


def test_a_checkpointer_restores_replicas_with_one_reading(tmp_path: Path) -> None:
    answers = run_ranks(3, _restore, tmp_path / "run")
    needed = answers[0][1]
    assert needed <= sum(count for count, _ in answers) < 1.5 * needed


def _save_alone(path: Path) -> None:
    state = {"tensor": torch.full((5,), float(dist.get_rank())), "name": f"rank {dist.get_rank()}"}
    writer = pyckpt.DirectWriter(path, sync_files=False)
    dcp.save(state, storage_writer=writer, use_collectives=False)
    dist.barrier()
    found = {"tensor": torch.zeros(5), "name": ""}
    pyckpt.load(found, path, share_reads=True)
    assert found["name"] == state["name"]
    assert torch.equal(found["tensor"], state["tensor"])


def test_what_ranks_saved_for_themselves_is_not_shared(tmp_path: Path) -> None:
    run_ranks(2, _save_alone, tmp_path / "checkpoint")


def _load_tied(path: Path) -> None:
    shared = torch.zeros(300_000)
    found = {"a": shared, "b": shared, "c": torch.zeros(7)}
    pyckpt.load(found, path, share_reads=True)
    assert bool((shared == 2.0).all())  # as without sharing: the later key stays
    assert bool((found["c"] == 3.0).all())


def test_tied_destinations_hold_the_later_key(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    state = {"a": torch.ones(300_000), "b": torch.full((300_000,), 2.0), "c": torch.full((7,), 3.0)}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    run_ranks(2, _load_tied, path)


class _Refusing(pyckpt.LoadPlanner):
    """Refuses an object on one rank, and a tensor on another."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        if dist.get_rank() == 1 and read_item.storage_index.fqn == "objects.step":
            raise ValueError("refused an object")
        super().load_bytes(read_item, value)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if dist.get_rank() == 2 and read_item.storage_index.fqn == "scalar":
            raise ValueError("refused a tensor")
        super().commit_tensor(read_item, tensor)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        if dist.get_rank() == self.blind:
            raise ValueError("cannot say where it goes")
        return super().resolve_tensor(read_item)

    blind = -1


def _load_refusing(path: Path, blind: int) -> None:
    import pyckpt.dcp.load as module

    _Refusing.blind = blind
    module.LoadPlanner = _Refusing  # type: ignore[misc]
    with pytest.raises((ValueError, LoadError), match=r"refused|cannot say"):
        _load(_empty_like(_state()), path)
    dist.barrier()


@pytest.mark.parametrize("blind", [slow(-1), 0, slow(2)])
def test_what_a_planner_refuses_leaves_no_rank_waiting(tmp_path: Path, blind: int) -> None:
    path = tmp_path / "checkpoint"
    dcp.save(_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    run_ranks(3, _load_refusing, path, blind)


class _Scarce:
    """Stands for torch in a module; has no memory once so many tensors were made."""

    def __init__(self) -> None:
        self.left = -1  # never

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in ("empty", "zeros", "tensor", "frombuffer", "cat", "arange"):
            return value

        def made(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise MemoryError("none left")
            return value(*args, **kwargs)

        return made


def _small_state() -> dict[str, Any]:
    return {
        "small": {f"{i}": torch.full((i + 1,), float(i)) for i in range(4)},
        "large": {f"{i}": _values(3 * PAGE, i) for i in range(3)},
        "columns": torch.rand(64, 48, generator=_generator(1)),
        "objects": {"step": 12, "name": "run", "more": ["x" * 500]},
    }


def _ends_alike(path: Path, near: bool = False) -> bool:
    """Whether a load failed: on all ranks, or on none, for want of memory."""
    expected, said = _small_state(), ""
    found = _empty_like(expected)
    found["columns"] = torch.zeros(48, 64).t()
    try:
        _load(found, path, near=near)
    except LoadError as error:
        said = str(error)
    else:
        _check(found, expected)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    assert len(set(everyone)) == 1
    assert "MemoryError: none left" in said or not said
    return bool(said)


def _load_with_little_memory(path: Path, victim: int, near: bool) -> int:
    handing_on._PIECE_BYTES = PAGE
    handing_on._SMALL_BYTES = PAGE // 2
    scarce = _Scarce()
    if dist.get_rank() == victim:
        bundles.torch = sharing.torch = handing_on.torch = scarce  # type: ignore[assignment]
    for count in range(1, 1000):  # the first is what the ranks say by that one failed
        scarce.left = count
        if not _ends_alike(path, near):
            return count
    return 0


@pytest.mark.parametrize(("victim", "near"), [slow(0, False), (1, True), slow(1, False)])
def test_no_rank_waits_for_one_without_memory(tmp_path: Path, victim: int, near: bool) -> None:
    """Wherever it runs out."""
    path = tmp_path / "checkpoint"
    dcp.save(_small_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    counts = run_ranks(3, _load_with_little_memory, path, victim, near)
    assert len(set(counts)) == 1
    assert counts[0] > 12


_STEPS = [
    "pyckpt.LoadPlanner.finish_plan",
    "pyckpt.DirectReader.read_data",
    "pyckpt.dcp.sharing.all_wanted",
    "pyckpt.dcp.sharing.bundles_of",
    "pyckpt.dcp.sharing._Outcome",
    "pyckpt.dcp.sharing.Keeper",
    "pyckpt.dcp.sharing.reliefs",
    "pyckpt.dcp.sharing.Passage",
    "pyckpt.dcp.handing_on.Passage._small_room",
    "pyckpt.dcp.handing_on.Passage._large_room",
    "pyckpt.dcp.handing_on.Passage._own_objects",
    "pyckpt.dcp.handing_on.Passage._take_objects",
]


def _load_failing_at(path: Path) -> None:
    handing_on._PIECE_BYTES = PAGE
    handing_on._SMALL_BYTES = PAGE // 2

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("none left")

    for step in _STEPS:
        failed = []
        for victim in range(dist.get_world_size()):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == victim:
                    patch.setattr(step, fails)
                failed.append(_ends_alike(path))
        assert any(failed), step  # not all ranks hand on objects
    assert not _ends_alike(path)


@pytest.mark.slow
def test_no_rank_waits_for_one_that_fails(tmp_path: Path) -> None:
    """At any step."""
    path = tmp_path / "checkpoint"
    dcp.save(_small_state(), storage_writer=pyckpt.DirectWriter(path), no_dist=True)
    run_ranks(2, _load_failing_at, path)


def _load_own_directory(path: Path, names_its_save: bool) -> None:
    """Each rank has a disk of its own, with a checkpoint that stock wrote."""
    rank = dist.get_rank()
    own = path / f"{rank}"
    state = {"tensor": torch.full((70_000,), float(rank)), "name": f"rank {rank}"}
    dcp.save(state, checkpoint_id=own, no_dist=True)
    if not names_its_save:
        metadata = pickle.loads((own / ".metadata").read_bytes())
        metadata.storage_meta = None
        (own / ".metadata").write_bytes(pickle.dumps(metadata))
    found = {"tensor": torch.zeros(70_000), "name": ""}
    pyckpt.load(found, reader=FileSystemReader(own), trust_metadata=True, share_reads=True)
    assert found["name"] == state["name"]
    assert torch.equal(found["tensor"], state["tensor"])


@pytest.mark.parametrize("names_its_save", [True, False])
def test_directories_of_their_own_are_not_shared(tmp_path: Path, names_its_save: bool) -> None:
    run_ranks(2, _load_own_directory, tmp_path, names_its_save)


def _wishes(rank_wants: Sequence[Sequence[int]]) -> list[list[Any]]:
    """For each rank what `read_shared` makes of the items of these numbers."""

    class Planner:
        metadata: Any

    class Company:
        def device_for(self, device: str) -> str:
            return device

    def wanted(number: int) -> Any:
        index = MetadataIndex(f"key {number}", torch.Size([number]))
        size = torch.Size([number % 5 + 1])
        item = ReadItem(LoadItemType.TENSOR, index, size, index, torch.Size([0]), size)
        target = torch.empty(size)
        return bundles._wanted(item, target, Planner(), Company())  # type: ignore[arg-type]

    storage = {
        MetadataIndex(f"key {number}", torch.Size([number])): StorageInfo("file", 10 * number, 10)
        for number in range(60)
    }
    Planner.metadata = Metadata({}, None, storage, StorageMeta(save_id="one"))
    return [[wanted(number) for number in wants] for wants in rank_wants]


@pytest.mark.parametrize("seed", range(20))
def test_all_ranks_agree_on_who_reads_what(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(1, 9)
    wants = [
        [number for number in range(60) if draw.random() < draw.choice([0.1, 0.9])]
        for _ in range(ranks)
    ]
    wishes = _wishes(wants)
    names = [
        torch.tensor([one.name for one in of_rank], dtype=torch.int64).reshape(-1, 2)
        for of_rank in wishes
    ]
    found = [bundles.bundles_of(of_rank, rank, names) for rank, of_rank in enumerate(wishes)]
    owners: dict[Any, int] = {}
    orders: dict[Any, list[Any]] = {}
    for rank, of_rank in enumerate(found):
        shared = set()
        for bundle in of_rank:
            assert rank in bundle.holders
            assert bundle.owner in bundle.holders
            described = (bundle.holders, bundle.owner, tuple(one.name for one in bundle.wanted))
            orders.setdefault(bundle.holders, []).append((rank, described))
            for one in bundle.wanted:
                assert owners.setdefault(one.name, bundle.owner) == bundle.owner
                shared.add(one.name)
        expected = {
            one.name
            for one, number in zip(wishes[rank], wants[rank], strict=True)
            if sum(number in other for other in wants) > 1
        }
        assert shared == expected
        # One order on all ranks: by holders, and by owners among them.
        keys = [(bundle.holders, bundle.owner) for bundle in of_rank]
        assert keys == sorted(keys)
    for holders, described in orders.items():
        by_rank = {rank: [d for r, d in described if r == rank] for rank in holders}
        assert all(one == by_rank[holders[0]] for one in by_rank.values())


def test_destinations_are_tied_where_their_memory_overlaps() -> None:
    """Parts of one flat tensor are not, as FSDP1's parameters are; a part that two keys have is."""
    flat = torch.zeros(100)
    places = {
        "left": flat[:50],
        "right": flat[50:],
        "other": torch.zeros(10),
        "whole": (whole := torch.zeros(20)),
        "part": whole[5:10],
        "again": whole[15:],
    }
    size = torch.Size([1])
    items = [
        ReadItem(LoadItemType.TENSOR, MetadataIndex(key), size, MetadataIndex(key), size, size)
        for key in places
    ]
    targets = {id(item): places[item.dest_index.fqn] for item in items}
    tied = bundles._tied(items, targets)
    assert {item.dest_index.fqn for item in items if id(item) in tied} == {"whole", "part", "again"}
