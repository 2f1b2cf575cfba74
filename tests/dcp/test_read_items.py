"""What ranks read: the same as stock would have them read, looked up and not gone through."""

from __future__ import annotations

import math
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import Pipe, run_child, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.distributed.checkpoint.default_planner import (
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

import pyckpt
from pyckpt import _C
from pyckpt.dcp import read_items
from pyckpt.dcp.planner import LoadPlanner
from pyckpt.dcp.read_items import StayingItems, read_tensor
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format import metadata as metadata_format
from pyckpt.format.columns import chunks_of, columns_of, metadata_of

Seen = tuple[Any, ...]


def seen(items: Any) -> set[Seen]:
    """All that is in read items, the hints at numbers of chunks as well, and no order."""
    return {
        (
            item.type,
            item.dest_index,
            tuple(item.dest_offsets),
            item.storage_index,
            item.storage_index.index,
            tuple(item.storage_offsets),
            tuple(item.lengths),
        )
        for item in items
        if item.storage_index.offset is None or math.prod(item.lengths)
    }


# --- boxes ----------------------------------------------------------------------------------------


def shards(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[ChunkStorageMetadata]:
    """What the ranks of a mesh have of a tensor, each once."""
    found = {}
    for coordinate in product(*map(range, mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        found[chunk.offsets, chunk.sizes] = chunk
    return list(found.values())


def layouts(dims: int) -> st.SearchStrategy[tuple[tuple[int, ...], tuple[Placement, ...]]]:
    """Meshes of up to 12 ranks, and ways to lay a tensor out on them."""
    placement = st.sampled_from([Replicate(), *map(Shard, range(dims))])
    meshes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)
    return meshes.filter(lambda mesh: math.prod(mesh) <= 12).flatmap(
        lambda mesh: st.tuples(st.just(mesh), st.tuples(*[placement] * len(mesh)))
    )


@st.composite
def loads(draw: Any) -> tuple[tuple[int, ...], Any, list[ChunkStorageMetadata]]:
    """The size of a tensor, its chunks when saved, and those that are wanted."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    saved = shards(shape, *draw(layouts(len(shape))))
    wanted = shards(shape, *draw(layouts(len(shape))))
    return shape, draw(st.permutations(saved)), wanted


def described(shape: tuple[int, ...], chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)


def over_columns(saved: TensorStorageMetadata) -> TensorStorageMetadata:
    """The same as a reader has it of a file that pyckpt wrote."""
    columns = _C.Columns()
    columns.add_object("before")
    properties = columns.add_properties("float32", "torch.strided", False, 0, False)
    key = columns.add_tensor("t", properties, saved.size)
    for chunk in saved.chunks:
        columns.add_chunk(chunk.offsets, chunk.sizes)
    made = object.__new__(TensorStorageMetadata)
    # No chunks: who looks for them fails.
    vars(made).update(properties=saved.properties, size=saved.size, _source=(columns, key))
    return made


@pytest.mark.slow
@settings(deadline=None)
@given(loads(), st.booleans())
def test_it_reads_what_stock_reads(load: Any, each: bool) -> None:
    shape, chunks, wanted = load
    saved = described(shape, chunks)
    for some in [[chunk] for chunk in wanted] if each else [disjoint(wanted)]:
        expected = seen(create_read_items_for_chunk_list("t", saved, some))
        assert seen(read_tensor("t", over_columns(saved), some)) == expected
        assert seen(read_tensor("t", saved, some)) == expected
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(read_items, "_MANY_CHUNKS", 0)
            assert seen(read_tensor("t", saved, some)) == expected


def disjoint(chunks: list[ChunkStorageMetadata]) -> list[ChunkStorageMetadata]:
    """Without replicas of empty chunks, of which stock would read what is not there."""
    return [chunk for chunk in chunks if math.prod(chunk.sizes)]


def test_less_than_is_needed() -> None:
    half = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((4,)))]
    for saved in (described((8,), half), over_columns(described((8,), half))):
        with pytest.raises(CorruptCheckpoint, match="4 of the 8 elements") as caught:
            read_tensor("t", saved, [read_items.whole(torch.zeros(8))])
        assert caught.value.key == "t"


class Counted(list[ChunkStorageMetadata]):
    """Counts how often it is gone through."""

    count = 0

    def __iter__(self) -> Any:
        self.count += 1
        return super().__iter__()


def test_chunks_that_are_many_are_gone_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are wanted, and however stock goes about it."""
    monkeypatch.delattr(read_items, "create_read_items_for_chunk_list")
    rows = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 3))) for i in range(100)]
    saved = described((100, 3), Counted(rows))
    columns = [ChunkStorageMetadata(torch.Size((0, i)), torch.Size((100, 1))) for i in range(3)]
    assert len(read_tensor("t", saved, columns)) == 300
    assert saved.chunks.count == 1  # type: ignore[attr-defined]


# --- plans ----------------------------------------------------------------------------------------

WORLD = 8
MESHES = [(8,), (2, 4), (4, 2)]
SHAPES = [(16, 3), (5, 7), (3, 2, 6), (9,), (0, 4)]


class Elsewhere:
    """A process that takes the places of many ranks, one after the other."""

    def __init__(self) -> None:
        from torch.testing._internal.distributed import fake_pg

        dist.init_process_group("fake", rank=0, world_size=WORLD, store=fake_pg.FakeStore())
        self.meshes: list[Any] = [init_device_mesh("cpu", mesh) for mesh in MESHES]

    def state(self, rank: int, layout: Any) -> dict[str, Any]:
        state: dict[str, Any] = {"object": 1, "plain": torch.zeros(3, 5), "scalar": torch.zeros(())}
        for number, (shape, (mesh_number, placements)) in enumerate(
            zip(SHAPES, layout, strict=True)
        ):
            mesh = self.meshes[mesh_number]
            coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
            mesh._coordinate_on_dim = type(mesh._coordinate_on_dim)(coordinate)
            state[f"t{number}"] = distribute_tensor(
                torch.zeros(shape), mesh, placements, src_data_rank=None
            )
        return {"model": {"state": state}, "list": [torch.zeros(2), {"x": 3}]}


def a_layout() -> st.SearchStrategy[Any]:
    def of_shape(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
        placement = st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])
        return st.integers(0, len(MESHES) - 1).flatmap(
            lambda mesh: st.tuples(st.just(mesh), st.tuples(*[placement] * len(MESHES[mesh])))
        )

    return st.tuples(*map(of_shape, SHAPES))


def saved_metadata(elsewhere: Elsewhere, layout: Any) -> Metadata:
    """As a coordinator makes it of all ranks' plans, through a file."""
    planners = []
    for rank in range(WORLD):
        planner = dcp.DefaultSavePlanner()
        planner.set_up_planner(elsewhere.state(rank, layout), is_coordinator=rank == 0)
        planners.append(create_default_local_save_plan(planner.state_dict, rank == 0))
    plans = planner._dedup_save_plans(planners)
    plans, metadata = create_default_global_save_plan(plans)
    metadata.planner_data = dict(planner.mappings)
    metadata.storage_data = {}
    at = 0
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            length = 64 if data is None else 4 * math.prod(data.chunk.sizes)
            metadata.storage_data[item.index] = metadata_format.storage_info(
                "__0_0.distcp", at, length + 8, crc32=0, payload_offset=8, payload_length=length
            )
            at += length + 8
    metadata.storage_meta = StorageMeta(checkpoint_id="x", save_id="y")
    return metadata


def read_again(metadata: Metadata) -> Metadata:
    """As the reader of the file has it that a save by pyckpt leaves."""
    columns = _C.Columns()
    file = columns.add_file("__0_0.distcp")
    properties = columns.add_properties("float32", "torch.strided", False, 0, False)
    for name, item in metadata.state_dict_metadata.items():
        chunks = getattr(item, "chunks", [None])
        if isinstance(item, TensorStorageMetadata):
            columns.add_tensor(name, properties, item.size)
        else:
            columns.add_object(name)
        for number, chunk in enumerate(chunks):
            at = columns.item_count - (chunk is None)
            if chunk is not None:
                columns.add_chunk(chunk.offsets, chunk.sizes)
            offset = None if chunk is None else chunk.offsets
            info = metadata.storage_data[MetadataIndex(name, offset, number)]
            columns.set_place(
                at,
                file,
                info.offset,
                info.length,
                info.payload_offset,
                info.payload_length,
                info.crc32,
            )
    over = metadata_of(columns, metadata.planner_data, metadata.storage_meta)
    decoded = metadata_format.decode(metadata_format.encode(over), path="x")
    assert columns_of(decoded) is not None
    return decoded


def plans_like_stock(pipe: Pipe) -> int:
    elsewhere = Elsewhere()
    compared = 0

    @settings(deadline=None, max_examples=30, database=None)
    @given(a_layout(), a_layout())
    def compare(at_save: Any, at_load: Any) -> None:
        nonlocal compared
        described = saved_metadata(elsewhere, at_save)
        for rank in range(WORLD):
            state = elsewhere.state(rank, at_load)
            stock = dcp.DefaultLoadPlanner()
            stock.set_up_planner(state, described)
            expected = create_default_local_load_plan(stock.state_dict, described)
            for metadata in (described, read_again(described)):
                planner = LoadPlanner()
                planner.set_up_planner(state, metadata)
                found = planner.create_local_plan()
                assert seen(found.items) == seen(expected.items)
                compared += len(found.items)
            # Planning looked at no chunk.
            assert all(
                chunks_of(item) is not None
                for item in metadata.state_dict_metadata.values()
                if isinstance(item, TensorStorageMetadata)
            )

    compare()
    return compared


@pytest.mark.slow
def test_plans_are_those_of_stock() -> None:
    assert run_child(plans_like_stock) > 1000


# --- items that stay at home ----------------------------------------------------------------------

KEYS = 40


def item() -> ReadItem:
    return read_items.read_object("o")


def test_items_that_stay() -> None:
    here = StayingItems([item(), item()])
    assert list(here) == [item(), item()]
    assert here[1] == item()
    there = pickle.loads(pickle.dumps(here))
    assert len(there) == 2
    for look in (list, lambda items: items[0]):
        with pytest.raises(PyckptError, match="with the rank that made it"):
            look(there)


class ForeignReader(pyckpt.DirectReader):
    """May look at what others read."""

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert all(type(item) is ReadItem for plan in plans for item in plan.items)
        assert [len(plan.items) for plan in plans] == [KEYS] * len(plans)
        return super().prepare_global_plan(plans)


def load_and_count(path: Path) -> list[int]:
    """How many bytes this rank sends and gets for its plan, by reader."""
    wrapper = state_dict_loader._DistWrapper
    counts: list[int] = []

    class Counting(wrapper):  # type: ignore[misc, valid-type]
        def gather_object(self, object: Any) -> Any:
            counts.append(len(pickle.dumps(object)))
            return super().gather_object(object)

        def scatter_object(self, object_list: Any) -> Any:
            found = super().scatter_object(object_list)
            counts[-1] += len(pickle.dumps(found))
            return found

    state_dict_loader._DistWrapper = Counting
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for reader in (
        pyckpt.DirectReader(path),
        FileSystemReader(path),
        ForeignReader(path),
    ):
        state = {
            f"k{i}": distribute_tensor(torch.zeros(6), mesh, [Shard(0)], src_data_rank=None)
            for i in range(KEYS)
        }
        pyckpt.load(state, reader=reader, trust_metadata=True)
        for i in range(KEYS):
            expected = torch.arange(6.0).chunk(dist.get_world_size())[dist.get_rank()] + i
            assert torch.equal(state[f"k{i}"].to_local(), expected)
    # Used without `pyckpt.load`, a planner does not know the reader.
    dcp.load(state, storage_reader=ForeignReader(path), planner=LoadPlanner())
    return counts


def save_some(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        f"k{i}": distribute_tensor(torch.arange(6.0) + i, mesh, [Shard(0)], src_data_rank=None)
        for i in range(KEYS)
    }
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path, sync_files=False))


def test_what_readers_leave_alone_does_not_travel(tmp_path: Path) -> None:
    run_ranks(2, save_some, tmp_path)
    for ours, stock, foreign, unknown in run_ranks(2, load_and_count, tmp_path):
        assert ours < 1000
        assert stock < 1000
        assert foreign > 2 * KEYS * 50
        assert unknown > 2 * KEYS * 50


def test_a_load_without_others(tmp_path: Path) -> None:
    dcp.save({"k": torch.ones(3)}, storage_writer=pyckpt.DirectWriter(tmp_path), no_dist=True)
    state = {"k": torch.zeros(3)}
    report = pyckpt.load(state, tmp_path)
    assert torch.equal(state["k"], torch.ones(3))
    assert report.loaded == ["k"]


def test_index_that_names_another_key_after_renaming(tmp_path: Path) -> None:
    """Keys that change places are read from where each was."""
    saved = {"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": 5}
    dcp.save(saved, storage_writer=pyckpt.DirectWriter(tmp_path), no_dist=True)
    new = {"a": "b", "b": "a", "c": "d"}
    state: dict[str, Any] = {"a": torch.zeros(3), "b": torch.zeros(3), "d": 0}
    report = pyckpt.load(state, tmp_path, rename=new.__getitem__)
    assert torch.equal(state["a"], saved["b"])
    assert torch.equal(state["b"], saved["a"])
    assert state["d"] == 5
    assert report.not_verified == []


def test_renamed_places(tmp_path: Path) -> None:
    from pyckpt.dcp.renaming import as_saved, renamed
    from pyckpt.format.paths import paths

    dcp.save(
        {"a": torch.ones(3), "b": 2}, storage_writer=pyckpt.DirectWriter(tmp_path), no_dist=True
    )
    metadata = metadata_format.read(tmp_path / ".metadata")
    changed = renamed(metadata, paths(metadata), lambda key, path: ("n",) if key == "a" else path)
    assert as_saved(changed) is metadata
    places: Any = changed.storage_data
    before: Any = metadata.storage_data
    assert {index.fqn for index in places} == {"n", "b"}
    assert len(places) == 2
    index = MetadataIndex("n", torch.Size((0,)))
    assert vars(places[index]) == vars(before[MetadataIndex("a", torch.Size((0,)))])
    assert MetadataIndex("a", torch.Size((0,))) not in places
    assert MetadataIndex("b") in places
