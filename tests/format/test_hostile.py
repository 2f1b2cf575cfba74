"""Metadata that someone made to do harm: it is refused, in bounded time and memory."""

from __future__ import annotations

import itertools
import pickle
import random
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from _hostile import (
    DCP,
    MANY,
    Box,
    at,
    described,
    load,
    name_of,
    nested,
    place,
    saved,
    text,
    write,
)
from _sampling import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

import pyckpt
from pyckpt import _C
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import metadata as metadata_format
from pyckpt.format.paths import path_of

# --- chunks that are not the tensor --------------------------------------------------------------

GAPS: dict[str, tuple[tuple[int, ...], list[Box]]] = {
    "overlap in a row": ((8,), [((0,), (4,)), ((1,), (4,))]),
    "overlap in a plane": ((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 2))]),
    "a hole in the middle": (
        (3, 3),
        [((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 1)), ((2, 0), (1, 3))],
    ),
    "as many elements, twice": (
        (4, 4),
        [((0, 0), (2, 4)), ((1, 0), (2, 4)), ((0, 0), (0, 4))],
    ),
    "none": ((4,), []),
    "half": ((4,), [((0,), (2,))]),
    "a scalar without": ((), []),
}


def with_chunks(directory: Path, key: str, size: tuple[int, ...], chunks: list[Box]) -> Path:
    data = b""
    storage = {}
    for number, (offsets, sizes) in enumerate(chunks):
        item = saved(torch.ones(sizes))
        storage[at(key, *offsets, number=number)] = place(len(data), len(item))
        data += item
    paths = {key: tuple(key.split("."))}
    return write(directory, {key: described(size, chunks)}, storage, data, paths)


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("into", ["created", "loaded"])
def test_chunks_with_gaps_are_not_loaded(tmp_path: Path, gap: str, into: str) -> None:
    size, chunks = GAPS[gap]
    with_chunks(tmp_path, "w", size, chunks)
    state = {"w": None if into == "created" else torch.full(size, 7.0)}
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        load(tmp_path, state)
    assert state["w"] is None or bool(state["w"].eq(7).all())


def own_metadata(size: tuple[int, ...], chunks: list[Box]) -> bytes:
    places = {
        at("w", *offsets, number=number): place(0, 1 << 20)
        for number, (offsets, _) in enumerate(chunks)
    }
    return metadata_format.encode(Metadata({"w": described(size, chunks)}, None, places))


@pytest.mark.parametrize("gap", GAPS)
def test_what_a_rank_saved_for_itself_may_have_gaps_alone(gap: str) -> None:
    size, chunks = GAPS[gap]
    data = own_metadata(size, chunks)
    with pytest.raises(CorruptCheckpoint, match="leave gaps"):
        metadata_format.decode(data, path="s3://bucket/step/.metadata")
    if "overlap" in gap or "twice" in gap:
        with pytest.raises(CorruptCheckpoint, match="'w' overlap"):
            metadata_format.decode(data, path="s3://bucket/step/__7.metadata")
    else:
        read = metadata_format.decode(data, path="s3://bucket/step/__7.metadata")
        assert len(read.state_dict_metadata["w"].chunks) == len(chunks)


def test_a_rank_cannot_save_a_part_of_a_tensor_twice() -> None:
    for size, chunk in (((4,), ((1,), (2,))), ((2, 4), ((0, 0), (1, 4)))):
        data = own_metadata(size, [chunk, chunk])
        with pytest.raises(CorruptCheckpoint, match="'w' overlap"):
            metadata_format.decode(data, path="__0.metadata")


def test_chunks_of_a_rank_that_cannot_be_compared_are_refused() -> None:
    """Each begins where no other does, beside all of those before it."""
    count = 2100
    size = (2 * count, 2 * count)
    chunks: list[Box] = [((i, count - i), (count, 1)) for i in range(count)]
    data = own_metadata(size, chunks)
    with pytest.raises(CorruptCheckpoint, match="too many"):
        metadata_format.decode(data, path="__0.metadata")


def test_memory_is_not_taken_for_what_a_rank_has_not_saved(tmp_path: Path) -> None:
    write(tmp_path, {}, {}, saved(torch.ones(4)))
    places = {at("w", 0): place(0, len(saved(torch.ones(4))))}
    described_as = described((1 << 50,), [((0,), (4,))])
    content = metadata_format.encode(Metadata({"w": described_as}, {"w": ("w",)}, places))
    (tmp_path / ".metadata").unlink()
    (tmp_path / "__0.metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="w: the checkpoint has 4 of the 1125899906842624"):
        load(tmp_path, {"w": None})


def test_chunks_with_gaps_are_not_exported(tmp_path: Path) -> None:
    size, chunks = GAPS["overlap in a row"]
    with_chunks(tmp_path / "step-00000001", "model.w", size, chunks)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CorruptCheckpoint, match="leave gaps"):
            checkpointer.export(tmp_path / "out", step=1)
        assert checkpointer.latest() is None
    assert not (tmp_path / "out").exists()


def test_chunks_with_gaps_are_passed_over(tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(8)}, final=True)
    with_chunks(tmp_path / "step-00000002", "w", *GAPS["overlap in a row"])
    state = {"w": torch.zeros(8)}
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert bool(state["w"].eq(1).all())


def test_what_covers_is_loaded(tmp_path: Path) -> None:
    """Uneven, in no order, with parts of no elements, and around a corner."""
    boxes = [
        ((2, 1), (2, 4)), ((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (2, 1)), ((4, 0), (0, 5)),
    ]  # fmt: skip
    with_chunks(tmp_path, "w", (4, 5), boxes)
    assert bool(load(tmp_path, {"w": torch.zeros(4, 5)})["w"].eq(1).all())


def covers(size: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Element by element; boxes that are given twice count once."""
    counts = dict.fromkeys(itertools.product(*map(range, size)), 0)
    for offsets, sizes in set(boxes):
        ends = [offset + extent for offset, extent in zip(offsets, sizes, strict=True)]
        for element in itertools.product(*map(range, offsets, ends)):
            if element not in counts:
                return False
            counts[element] += 1
    return set(counts.values()) <= {1}


def cut(draw: Any, size: tuple[int, ...], pieces: int) -> list[Box]:
    """Cut a box, and what comes of it, at random."""
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(pieces):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        where = draw(st.integers(0, sizes[dim]))
        for begin, extent in ((0, where), (where, sizes[dim] - where)):
            box_offsets, box_sizes = list(offsets), list(sizes)
            box_offsets[dim] += begin
            box_sizes[dim] = extent
            boxes.append((tuple(box_offsets), tuple(box_sizes)))
    return boxes


@st.composite
def tilings(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut to pieces, which are then, perhaps, tampered with."""
    size = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    boxes = cut(draw, size, draw(st.integers(0, 6)))
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[i]
        dim = draw(st.integers(0, len(size) - 1))
        change = draw(st.sampled_from(["move", "grow", "drop", "double", "nothing"]))
        by = draw(st.integers(-1, 1))
        if change == "move":
            offsets = (*offsets[:dim], max(0, offsets[dim] + by), *offsets[dim + 1 :])
        elif change == "grow":
            sizes = (*sizes[:dim], max(0, sizes[dim] + by), *sizes[dim + 1 :])
        boxes[i] = offsets, sizes
        if change == "double":
            boxes.append(boxes[i])
        elif change == "drop" and len(boxes) > 1:
            del boxes[i]
    return size, draw(st.permutations(boxes))


@settings(max_examples=examples(400), derandomize=True, deadline=None)
@given(tilings())
def test_tilings_as_counted(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    size, boxes = tiling
    whole = 0 in size or all(
        offset + extent <= end
        for offsets, sizes in boxes
        for offset, extent, end in zip(offsets, sizes, size, strict=True)
    )
    expected = 0 in size or (whole and covers(size, [box for box in boxes if 0 not in box[1]]))
    found = _C.is_tiling(size, [offsets for offsets, _ in boxes], [sizes for _, sizes in boxes])
    assert found == expected


@settings(max_examples=examples(200), derandomize=True, deadline=None)
@given(tilings())
def test_chunks_of_a_rank_as_counted(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    size, boxes = tiling
    boxes = [box for box in boxes if 0 not in box[1]]
    inside = all(
        offset + extent <= end
        for offsets, sizes in boxes
        for offset, extent, end in zip(offsets, sizes, size, strict=True)
    )
    if 0 in size or not inside:
        return
    elements = [
        element
        for offsets, sizes in boxes
        for element in itertools.product(
            *(range(begin, begin + extent) for begin, extent in zip(offsets, sizes, strict=True))
        )
    ]
    are_apart = len(elements) == len(set(elements))
    try:
        metadata_format.decode(own_metadata(size, boxes), path="__0.metadata")
    except CorruptCheckpoint:
        assert not are_apart
        assert not covers(size, boxes)
    else:
        assert are_apart or covers(size, boxes)


def test_many_chunks_take_as_long_as_sorting_them() -> None:
    """A grid of 40,000; and one chunk of it that is moved by a row."""
    side = 200
    boxes = [((3 * i, 5 * j, 0), (3, 5, 7)) for i in range(side) for j in range(side)]
    size = (3 * side, 5 * side, 7)
    offsets, sizes = map(list, zip(*boxes, strict=True))
    assert _C.is_tiling(size, offsets, sizes)
    offsets[777] = (offsets[777][0] + 1, *offsets[777][1:])
    assert not _C.is_tiling(size, offsets, sizes)


@pytest.mark.slow
def test_chunks_that_cannot_be_compared_are_refused() -> None:
    """Cut at random, again and again, in 24 dimensions: what ends somewhere ends alone."""
    dims = 24
    numbers = random.Random(1)
    boxes: list[Box] = [((0,) * dims, (1000,) * dims)]
    for _ in range(2000):
        i, dim = numbers.randrange(len(boxes)), numbers.randrange(dims)
        offsets, sizes = boxes[i]
        if sizes[dim] == 1:
            continue
        here = numbers.randrange(1, sizes[dim])
        boxes[i] = offsets, (*sizes[:dim], here, *sizes[dim + 1 :])
        offsets = (*offsets[:dim], offsets[dim] + here, *offsets[dim + 1 :])
        boxes.append((offsets, (*sizes[:dim], sizes[dim] - here, *sizes[dim + 1 :])))
    with pytest.raises(ValueError, match="too many"):
        _C.is_tiling((1000,) * dims, *map(list, zip(*boxes, strict=True)))


# --- pickles that are bombs ----------------------------------------------------------------------


INDEX = name_of(DCP, "MetadataIndex") + b")\x81}" + text("fqn")
BOMBS: dict[str, bytes] = {
    "a tuple of tuples as a key": b"\x80\x02}" + b")" + b"\x85" * MANY + b"Ns.",
    "in a set": b"\x80\x04\x8f(" + b")" + b"\x85" * MANY + b"\x90.",
    "in a frozenset": b"\x80\x04(" + b")" + b"\x85" * MANY + b"\x91.",
    "a list of lists": b"\x80\x02" + b"]" * MANY + b"a" * (MANY - 1) + b".",
    "a dict of dicts": b"\x80\x02" + b"}K\x01" * MANY + b"N" + b"s" * MANY + b".",
    "frozensets": b"\x80\x04" + b"(" * MANY + b"\x91" * MANY + b".",
    "keys in keys": b"\x80\x02}" + INDEX * MANY + b"N" + b"sb" * MANY + b"Ns.",
    # Equal halves that are one: 2^60 values to hash, from 200 bytes.
    "doubled": b"\x80\x02})" + b"2\x86" * 60 + b"Ns.",
    "doubled in a call": (
        b"\x80\x02" + name_of("torch", "Size") + b")" + b"2\x86" * 60 + b"\x85R."
    ),
    "doubled in a key's state": (
        b"\x80\x02}" + INDEX + b")" + b"2\x86" * 60 + b"sbNs."
    ),
    "remembered as number 2^31": b"\x80\x02Nr" + struct.pack("<I", 0x7FFFFFFF) + b".",
    "remembered as text": b"\x80\x02Np4294967295\n.",
    "copies of a tuple": (
        b"\x80\x02" + name_of("torch", "Size") + b"q\x00(" + b"K\x00" * 20_000 + b"tq\x010"
        + b"h\x00h\x01\x85R" * 4000 + b"."
    ),
    "copies of a state": (
        b"\x80\x02" + name_of(DCP, "StorageMeta") + b"q\x00("
        + b"".join(text(f"{i}") + b"K\x00" for i in range(20_000)) + b"dq\x010"
        + b"h\x00)\x81h\x01b" * 4000 + b"."
    ),
    "copies of half a state": (
        b"\x80\x02" + name_of(DCP, "StorageMeta") + b"q\x00("
        + b"".join(text(f"{i}") + b"K\x00" for i in range(20_000)) + b"dq\x010"
        + b"h\x00)\x81Nh\x01\x86b" * 4000 + b"."
    ),
    "copies of a long path": (
        b"\x80\x02" + name_of("pathlib", "PosixPath") + b"q\x00" + text("x" * 20_000) + b"q\x010"
        + b"h\x00h\x01\x85R" * 4000 + b"."
    ),
    "bytes that are not there": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
    "a frame that is not there": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "a number that is not there": b"\x80\x02\x8b" + struct.pack("<I", 0x7FFFFFFF) + b"x.",
    "a name of a megabyte": b"\x80\x02c" + b"x" * (1 << 20) + b"\ny\n.",
    "marks": b"(" * MANY + b".",
    "an empty stack": b"\x80\x02.",
    "a stack below its mark": b"\x80\x02N(\x85.",
    "a value without its key": b"\x80\x02}(Nu.",
    "extensions": b"\x80\x02\x82\x01.",
    "buffers of others": b"\x80\x05\x97.",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("sealed", [False, True])
def test_bombs(bomb: str, sealed: bool) -> None:
    body = BOMBS[bomb]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match=r"here/\.metadata"):
            metadata_format.decode(
                metadata_format.seal(body) if sealed else body, path="here/.metadata"
            )
        # Nothing was made of it.
        assert tracemalloc.get_traced_memory()[1] < 2 * len(body) + (1 << 20)
    finally:
        tracemalloc.stop()


class Copies:
    """Yields what it is made of."""

    def __init__(self, function: Any, *args: Any, **state: Any) -> None:
        self.how = (function, args, state or None)

    def __reduce__(self) -> Any:
        return self.how


PLAIN: dict[str, Any] = {
    "numbers": [0, 1, -1, 255, 1 << 20, -(1 << 40), 1 << 100, 0.5, True, None, 3j],
    "strings": ["", "x", "é" * 300, b"", b"\0" * 300, bytearray(b"xyz")],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "containers": [[], {}, {1: 2}, {1, 2}, frozenset({3})],
    "shared": [["x" * 100] * 1000, [(1, 2)] * 1000],
    "nested": [[[[[[[[[["x"]]]]]]]]]],
    "classes": [torch.Size((2, 3)), Path("a/b"), torch.float32, OrderedDict(a=1)],
}  # fmt: skip
PLAIN["cyclic"] = cyclic = []
cyclic.append([cyclic])


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("what", PLAIN)
def test_scan_takes_what_pickle_writes(what: str, protocol: int) -> None:
    data = pickle.dumps(PLAIN[what], protocol)
    assert _C.scan_pickle(data + b"more", depth=100, work_per_byte=64) == len(data)
    for end in range(len(data)):
        with pytest.raises(ValueError, match="at byte"):
            _C.scan_pickle(data[:end], depth=100, work_per_byte=64)


def test_scan_counts_depth() -> None:
    assert _C.scan_pickle(pickle.dumps(nested(100)), depth=100, work_per_byte=64)
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        _C.scan_pickle(pickle.dumps(nested(101)), depth=100, work_per_byte=64)


# --- names, places and paths ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/etc/hostname", "../" * 20 + "etc/hostname", "a/../../x"])
def test_files_outside_are_not_exported(tmp_path: Path, name: str) -> None:
    info = place(0, 2, name, crc32=0, payload_offset=1, payload_length=1)
    described_as = {"model.w": described((1,), dtype=torch.uint8)}
    write(tmp_path / "step-00000001", described_as, {at("model.w", 0): info}, None)
    outside = pytest.raises(CorruptCheckpoint, match="outside of the checkpoint")
    with pyckpt.Checkpointer(tmp_path) as checkpointer, outside:
        checkpointer.export(tmp_path / "out", step=1)


class Shadowed(dict[Any, Any]):
    """Pickles as an OrderedDict that has an attribute ``items``."""

    def __reduce__(self) -> Any:
        return OrderedDict, (), {"items": torch.Size}, None, iter(dict.items(self))


@pytest.mark.parametrize("part", ["state_dict_metadata", "storage_data", "planner_data"])
def test_items_cannot_be_shadowed(part: str) -> None:
    metadata = Metadata({"w": described((1,))}, {"w": ("w",)}, {at("w", 0): place(0, 1, "/etc/x")})
    setattr(metadata, part, Shadowed(getattr(metadata, part)))
    with pytest.raises(CorruptCheckpoint):
        metadata_format.decode(pickle.dumps(metadata), path="here")


@pytest.mark.parametrize("where", ["state_dict_metadata", "storage_data"])
def test_ordered_dicts_are_dicts(where: str) -> None:
    metadata = Metadata({"w": described((1,))}, {"w": ("w",)}, {at("w", 0): place(0, 9)})
    expected = pickle.loads(pickle.dumps(metadata))
    setattr(metadata, where, OrderedDict(getattr(metadata, where)))
    assert metadata_format.decode(pickle.dumps(metadata), path="here") == expected


PATHS: dict[str, tuple[Any, ...]] = {
    "a list": (["w"],),
    "a dict": ("w", {}),
    "a fraction": (1.5, "w"),
    "truth": (True, "w"),
    "none": (),
    "before the first": ("w", -1),
    "far behind the last": ("w", 1 << 40),
    "behind the last": ("w", (1 << 24) - 1),
    "deep": ("w",) * 5000,
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_are_none(tmp_path: Path, path: str) -> None:
    """The older checkpoint is restored, and nobody exports or loads the newer."""
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(2)}}, final=True)
    item = saved(torch.zeros(2))
    newer = write(
        tmp_path / "step-00000002",
        {"model.w": described((2,))},
        {at("model.w", 0): place(0, len(item))},
        item,
        {"model.w": PATHS[path]},
    )
    with pytest.raises(CorruptCheckpoint, match=r"path of 'model\.w'|lists would have"):
        load(newer, {"model": {"w": torch.zeros(2)}})
    state = {"model": {"w": torch.zeros(2)}}
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) == 1
        with pytest.raises(CorruptCheckpoint):
            checkpointer.export(tmp_path / "out", step=2)
    assert bool(state["model"]["w"].eq(1).all())


def test_paths_of_other_planners() -> None:
    """What is no path at all is not ours to judge."""
    for planner_data in (None, 3, {"w": 3}, {"other": ("w", -1)}):
        metadata = Metadata({"w": described((1,))}, planner_data, {at("w", 0): place(0, 9)})
        assert path_of(metadata_format.decode(pickle.dumps(metadata), path="here"), "w") == ("w",)
