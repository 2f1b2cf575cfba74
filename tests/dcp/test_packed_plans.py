"""Plans as blocks: what is made of them natively is what Python makes of their items."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

import pyckpt
from pyckpt import _C
from pyckpt.dcp import conflicts, plans
from pyckpt.dcp.global_plan import GlobalPlan
from pyckpt.dcp.packed_items import ImpliedItems, PackedItems, PackedPaths, chosen, pack
from pyckpt.dcp.parts import Part
from pyckpt.errors import PyckptError


def tensor_item(
    name: str,
    shape: Sequence[int],
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    shard: bool = True,
    hint: int | None = None,
    **properties: Any,
) -> WriteItem:
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        TensorProperties(**{"dtype": torch.float32, **properties}),
        torch.Size(shape),
    )
    kind = WriteItemType.SHARD if shard else WriteItemType.TENSOR
    return WriteItem(MetadataIndex(name, offsets, hint), kind, tensor_data=data)


def object_item(name: str, hint: int | None = None) -> WriteItem:
    return WriteItem(MetadataIndex(name, None, hint), WriteItemType.BYTE_IO)


def hints(items: Sequence[WriteItem]) -> list[int | None]:
    """Equality leaves them out."""
    return [item.index.index for item in items]


# --- blocks ---------------------------------------------------------------------------------------

ITEMS = [
    tensor_item("a.b", (7, 3), (4, 0), (3, 3), dtype=torch.bfloat16, requires_grad=True),
    tensor_item("a.b", (7, 3), (0, 0), (4, 3), dtype=torch.bfloat16, requires_grad=True, hint=5),
    tensor_item("a.c", (), (), (), shard=False, dtype=torch.int64, pin_memory=True),
    tensor_item("a.d", (0, 4), (0, 0), (0, 4), shard=False, memory_format=torch.preserve_format),
    tensor_item("sparse", (5,), (0,), (5,), shard=False, layout=torch.sparse_coo),
    tensor_item("outside", (5,), (-3,), (1 << 60,)),
    object_item("list.10"),
    object_item("ключ.0", hint=3),
]
PATHS = {
    "a.b": ("a", "b"),
    "list.10": ("list", 10),
    "ключ.0": ("ключ", "0"),
    "a.c": ("a.c",),
    "nothing.here": ("nothing", "here"),
}


def test_items_come_back_as_they_were() -> None:
    block = pack(ITEMS, PATHS)
    assert block is not None
    packed = pickle.loads(pickle.dumps(PackedItems(block, ITEMS)))
    assert len(packed) == len(ITEMS)
    assert packed == ITEMS
    assert list(packed) == ITEMS
    assert hints(packed) == hints(ITEMS)
    assert packed[2:4] == ITEMS[2:4]
    paths = pickle.loads(pickle.dumps(PackedPaths(block, PATHS)))
    assert paths == PATHS
    # Not the objects, and the block only once.
    plan = SavePlan(PackedItems(block, ITEMS), planner_data=PackedPaths(block, PATHS))  # type: ignore[arg-type]
    assert len(pickle.dumps(plan)) < len(block) + 300


class _Part(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("items", "paths"),
    [
        ([object_item("a"), object_item("a")], {}),
        ([tensor_item("a", (2,), (0,), (1,)), tensor_item("a", (2,), (0,), (1,))], {}),
        ([object_item("a"), tensor_item("a", (2,), (0,), (1,))], {}),
        ([object_item("a.b")], {"a.b": ("a", "c")}),
        ([object_item("a.1")], {"a.1": ("a", True)}),
        ([object_item("a.b")], {"a.b": ("a", _Part("b"))}),
        ([object_item("a.-1")], {"a.-1": ("a", -1)}),
        ([object_item("a")], {"": ()}),
        ([object_item("a\ud800")], {}),
        ([WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO, BytesIOWriteData(3))], {}),
        ([WriteItem(MetadataIndex("a", [0]), WriteItemType.BYTE_IO)], {}),
        ([WriteItem(MetadataIndex("a", [0]), WriteItemType.SHARD)], {}),
        (
            [
                dataclasses.replace(
                    tensor_item("a", (2,), (0,), (1,)), index=MetadataIndex("a", [1])
                )
            ],
            {},
        ),
        ([tensor_item("a", (2, 2), (0,), (1,))], {}),
        ([tensor_item("a", (1 << 62, 4), (0, 0), (1, 1))], {}),
    ],
)
def test_what_cannot_be_packed_travels_as_it_is(items: Any, paths: Any) -> None:
    assert pack(items, paths) is None


def test_a_state_dict_that_cannot_be_packed_is_saved(tmp_path: Any) -> None:
    """One key that is two paths joined: DCP names both by the same name."""
    state = {"a": {"b\ud800": torch.ones(3)}}
    for turn in range(3):
        state["a"]["b\ud800"].fill_(turn)
        writer = pyckpt.DirectWriter(tmp_path / str(turn), sync_files=False)
        dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        loaded = {"a": {"b\ud800": torch.zeros(3)}}
        dcp.load(loaded, checkpoint_id=tmp_path / str(turn))
        assert loaded["a"]["b\ud800"].tolist() == [turn] * 3


# --- the plan of all ranks ------------------------------------------------------------------------


def cuts(extent: int, count: int) -> list[tuple[int, int]]:
    """Where parts begin and how long they are, as DTensor cuts a dimension."""
    step = -(-extent // count)
    begins = [min(i * step, extent) for i in range(count)]
    return [(begin, min(step, extent - begin)) for begin in begins]


def random_plans(seed: int, *, broken: bool) -> tuple[list[list[WriteItem]], list[dict[str, Any]]]:
    """The items and paths of each rank of some mesh: shards over any of its dimensions, replicas,
    objects, keys that some ranks lack or have alone."""
    draw = random.Random(seed)
    mesh = [draw.randint(1, 3) for _ in range(draw.randint(1, 3))]
    ranks = list(itertools.product(*map(range, mesh)))
    items: list[list[WriteItem]] = [[] for _ in ranks]
    paths: list[dict[str, Any]] = [{} for _ in ranks]
    for k in range(draw.randint(0, 9)):
        path = draw.choice(
            [(f"k{k}",), ("model", f"k{k}"), ("list", k), ("model", "deep.er", f"{k}")]
        )
        name = ".".join(map(str, path))
        kind = draw.choice(["object", "shard", "shard", "shard", "whole"])
        shape = [draw.choice([0, 1, 2, 5, 7, 12]) for _ in range(draw.randint(0, 3))]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.int64])
        placed = [draw.choice([None, *range(len(shape))]) for _ in mesh]
        here = draw.choice([1.0, 1.0, 0.7])
        for rank, coordinates in enumerate(ranks):
            if draw.random() > here:
                if draw.random() < 0.5:
                    paths[rank][name] = path
                continue
            if draw.random() < 0.97:
                paths[rank][name] = path
            if kind == "object":
                items[rank].append(object_item(name))
                continue
            own = list(shape)
            if broken and draw.random() < 0.05 and shape:
                own[0] += 1
            boxes = [(0, extent) for extent in own]
            if kind == "shard":
                for dimension, extent in enumerate(own):
                    over = [i for i, of in enumerate(placed) if of == dimension]
                    count, number = 1, 0
                    for i in over:
                        count, number = count * mesh[i], number * mesh[i] + coordinates[i]
                    boxes[dimension] = cuts(extent, count)[number]
                    if broken and draw.random() < 0.05:
                        at, size = boxes[dimension]
                        boxes[dimension] = (at + draw.choice([0, 1, -1]), size)
            offsets, sizes = [box[0] for box in boxes], [box[1] for box in boxes]
            items[rank].append(
                tensor_item(name, own, offsets, sizes, shard=kind == "shard", dtype=dtype)
            )
    for of_rank in items:
        if draw.random() < 0.2:
            draw.shuffle(of_rank)
    return items, paths


class InPython(pyckpt.SavePlanner):
    """Of another class, and so by DCP's own code."""


def made_in_python(
    items: list[list[WriteItem]], paths: list[dict[str, Any]], wrote: list[bytes | None]
) -> tuple[list[SavePlan], Metadata]:
    local = [
        SavePlan(of_rank, planner_data=of_paths)
        for of_rank, of_paths in zip(items, paths, strict=True)
    ]
    return InPython()._plan_in_python(local, [None] * len(items), wrote)


def made_natively(
    items: list[list[WriteItem]], paths: list[dict[str, Any]], wrote: list[bytes | None]
) -> tuple[list[list[WriteItem]], Metadata, GlobalPlan]:
    blocks = [
        pack(of_rank, of_paths) or pytest.fail("could not be packed")
        for of_rank, of_paths in zip(items, paths, strict=True)
    ]
    native = _C.GlobalPlan(blocks, wrote)
    conflicts.refuse(native.conflicts)
    if native.errors:
        raise ValueError(native.errors)
    made = GlobalPlan(blocks, native)
    final = [chosen(of_rank, native.answer(rank)) for rank, of_rank in enumerate(items)]
    return final, made.metadata(for_us=False), made


def check_as_python(
    items: list[list[WriteItem]], paths: list[dict[str, Any]], wrote: list[bytes | None]
) -> bool:
    """Whether it can be saved, as both say."""
    try:
        expected, metadata = made_in_python(items, paths, wrote)
    except (PyckptError, ValueError, AssertionError) as error:
        same = re.escape(str(error)) if isinstance(error, PyckptError) else None
        with pytest.raises((PyckptError, ValueError), match=same):
            made_natively(items, paths, wrote)
        return False
    final, described, made = made_natively(items, paths, wrote)
    assert described.state_dict_metadata == metadata.state_dict_metadata
    assert list(described.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert described.planner_data == metadata.planner_data
    assert made.metadata(for_us=True).state_dict_metadata == metadata.state_dict_metadata
    for rank, (mine, theirs) in enumerate(zip(final, expected, strict=True)):
        assert mine == list(theirs.items)
        assert hints(mine) == hints(theirs.items)
        assert made.items_of(rank) == mine
        assert made.native.written(rank) == len(mine)
    return True


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_as_python_makes_it(seed: int) -> None:
    items, paths = random_plans(seed, broken=False)
    nobody: list[bytes | None] = [None] * len(items)
    check_as_python(items, paths, nobody)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_with_ranks_that_wrote_before(seed: int) -> None:
    items, paths = random_plans(seed, broken=False)
    draw = random.Random(seed)
    wrote = [
        bytes(draw.choice([0, 1]) for _ in of_rank) if draw.random() < 0.6 else None
        for of_rank in items
    ]
    check_as_python(items, paths, wrote)


def test_refused_as_python_refuses() -> None:
    """Where ranks contradict each other, or chunks are not one tensor."""
    outcomes = [
        check_as_python(items, paths, [None] * len(items))
        for items, paths in (random_plans(seed, broken=True) for seed in range(200))
    ]
    assert 25 < sum(outcomes) < 175


def test_as_stock_makes_it() -> None:
    """Where no rank goes by a known plan, DCP itself chooses the same writers."""
    compared = 0
    for seed in range(100):
        items, paths = random_plans(seed, broken=False)
        local = [
            SavePlan(of_rank, planner_data=of_paths)
            for of_rank, of_paths in zip(items, paths, strict=True)
        ]
        try:
            final, metadata = dcp.DefaultSavePlanner().create_global_plan(local)
            mine, described, _ = made_natively(items, paths, [None] * len(items))
        except (ValueError, AssertionError, PyckptError):  # lists of several lengths are ours
            continue
        assert mine == [list(plan.items) for plan in final]
        assert described.state_dict_metadata == metadata.state_dict_metadata
        assert described.planner_data == metadata.planner_data
        compared += 1
    assert compared > 40


@pytest.mark.parametrize(
    ("offsets", "sizes", "why"),
    [
        ([(0,), (3,)], [(4,), (4,)], "overlapping"),
        ([(0,), (5,)], [(4,), (2,)], "fill"),
        ([(0,), (4,)], [(4,), (4,)], "out of bounds"),
    ],
)
def test_chunks_that_are_no_tensor_are_refused_with_their_key(
    offsets: Any, sizes: Any, why: str
) -> None:
    planner = pyckpt.SavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    local = []
    for at, size in zip(offsets, sizes, strict=True):
        block = pack([tensor_item("the.key", (7,), at, size)], {})
        assert block is not None
        local.append(SavePlan(PackedItems(block), planner_data=PackedPaths(block)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"the\.key.*{why}"):
        planner.create_global_plan(local)


# --- what others see ------------------------------------------------------------------------------


def part(rank: int) -> Part:
    return Part(rank, "host", "/path", 1, 1, "id")


def planned(state: dict[str, Any], planner: pyckpt.SavePlanner | None = None) -> Any:
    planner = planner or pyckpt.SavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner, dataclasses.replace(planner.create_local_plan(), storage_data=part(0))


def test_plans_look_like_stocks() -> None:
    plans.known_plans.clear()
    state = {"model": {"w": torch.rand(3, 4), "b": torch.rand(4)}, "step": 3}
    stock = dcp.DefaultSavePlanner()
    stock.set_up_planner(state, is_coordinator=True)
    expected = stock.create_local_plan()
    (expected_final,), expected_metadata = stock.create_global_plan([expected])
    planner, local = planned(state)
    assert isinstance(local.items, PackedItems)
    assert list(local.items) == expected.items
    assert local.planner_data == expected.planner_data
    for turn in range(2):
        (answer,), metadata = planner.create_global_plan([local])
        assert list(answer.items) == expected_final.items
        assert metadata.state_dict_metadata == expected_metadata.state_dict_metadata
        assert metadata.planner_data == expected_metadata.planner_data
        crossed = pickle.loads(pickle.dumps(answer))
        assert len(pickle.dumps(answer)) < 1000
        final = planner.finish_plan(crossed)
        assert final.items == expected_final.items
        assert hints(final.items) == hints(expected_final.items)
        planner, local = planned(state)
        assert isinstance(local.items, ImpliedItems)
        assert list(local.items) == expected_final.items, turn
        assert len(pickle.dumps(local)) < 600


def test_items_by_name_need_our_planner() -> None:
    """They are not an empty list, of which a checkpoint without them would be made."""
    plans.known_plans.clear()
    planner, local = planned({"a": torch.rand(3)})
    (answer,), _ = planner.create_global_plan([local])
    planner.finish_plan(answer)
    _, local = planned({"a": torch.rand(3)})
    crossed = pickle.loads(pickle.dumps(local))
    with pytest.raises(PyckptError, match="same planner"):
        dcp.DefaultSavePlanner().create_global_plan([crossed])


@pytest.mark.parametrize("how", ["damaged", "version", "cut", "kind"])
def test_bad_blocks(how: str) -> None:
    planner, local = planned({"a": torch.rand(3)})
    block = bytearray(local.items.block)
    if how == "damaged":
        block[len(block) // 2] ^= 4
    elif how == "version":
        block[6] += 1
        block[-4:] = _C.crc32(block[:-4]).to_bytes(4, "little")
    elif how == "cut":
        del block[-1]
    else:
        block[:] = b"something else that is long enough"
    bad = dataclasses.replace(
        local, items=PackedItems(bytes(block)), planner_data=PackedPaths(bytes(block))
    )
    expected = {"version": "version 2.*version 1", "kind": "is not what"}.get(how, "damaged")
    with pytest.raises(PyckptError, match=f"rank 1.*{expected}"):
        planner.create_global_plan([local, bad])


def test_a_planner_that_two_saves_use_at_once(tmp_path: Path) -> None:
    """The one that began first would write the other's tensors."""
    planned, go_on = threading.Event(), threading.Event()

    class Late(pyckpt.DirectWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            planned.set()
            assert go_on.wait(60)
            return super().write_data(plan, planner)

    planner = pyckpt.SavePlanner()
    failures: list[BaseException] = []

    def save_late() -> None:
        try:
            state = {"w": torch.zeros(4), "v": torch.zeros(4)}
            writer = Late(tmp_path / "late", sync_files=False)
            dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        except BaseException as error:
            failures.append(error)

    late = threading.Thread(target=save_late)
    late.start()
    try:
        assert planned.wait(60)
        state = {"x": torch.ones(4), "y": torch.full((4,), 2.0)}
        writer = pyckpt.DirectWriter(tmp_path / "other", sync_files=False)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    finally:
        go_on.set()
        late.join()
    assert len(failures) == 1
    assert "one save at a time" in str(failures[0])
    assert not (tmp_path / "late" / ".metadata").exists()


def test_a_plan_says_what_it_takes() -> None:
    """So much more for each item, and for what is told of it."""

    def made(items: int, ranks: int) -> GlobalPlan:
        blocks = [
            pack([tensor_item(f"k{i}", (64, 2), (r, 0), (1, 2)) for i in range(items)], {})
            for r in range(ranks)
        ]
        whole = [block for block in blocks if block is not None]
        return GlobalPlan(whole, _C.GlobalPlan(whole, [None] * ranks))

    sizes = [made(100, 64).memory_bytes, made(200, 64).memory_bytes]
    least = 8 * 4 + 4 * 5 + 4 * 8  # what the columns hold, and who writes it
    assert 64 * 100 * least < sizes[1] - sizes[0] < 3 * 64 * 100 * least
    plan = made(10, 64)
    before = plan.memory_bytes
    plan.metadata(for_us=False)
    assert plan.memory_bytes - before >= 64 * 10 * 100
