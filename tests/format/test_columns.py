"""Metadata over columns: it is DCP's, on disk and in memory."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _columns import columns_from, plain
from _sampling import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import pyckpt
from pyckpt import _C
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format import metadata as m
from pyckpt.format.checks import check
from pyckpt.format.columns import (
    LAYOUTS,
    MEMORY_FORMATS,
    KeysMapping,
    PlacesMapping,
    columns_of,
    metadata_of,
)
from pyckpt.private import StorageInfo

PATH = "some/.metadata"

# --- metadata of any kind -------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
FILES = [f"__{rank}_x.distcp" for rank in range(3)] + ["d/ä", "n" * 300]
COUNTS = st.one_of(st.integers(0, 300), st.integers(0, (1 << 62) - 1))


@st.composite
def places(draw: st.DrawFn, payload: int | None, dims: int | None) -> StorageInfo:
    """Of an item; ``payload`` is the bytes of its tensor, which has ``dims`` dimensions."""
    name, offset = draw(st.sampled_from(FILES)), draw(COUNTS)
    around = draw(st.integers(0, 3000))
    # All of it must have been saved, for all that is known.
    length = (payload or 0) + around
    if draw(st.booleans()):
        return StorageInfo(name, offset, length)
    before = 0 if payload is None else draw(st.integers(0, around))
    stride = None
    if dims and draw(st.booleans()):  # columns have none of a tensor without dimensions
        stride = tuple(draw(st.lists(COUNTS, min_size=dims, max_size=dims)))
    return m.storage_info(
        name,
        offset,
        length,
        crc32=draw(st.integers(0, (1 << 32) - 1)),
        payload_offset=before,
        payload_length=length if before == 0 else payload or 0,
        payload_stride=stride,
    )


def cut(draw: st.DrawFn, size: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A grid, in any order."""
    cuts: list[list[tuple[int, int]]] = []
    for extent in size:
        at = sorted({0, *draw(st.lists(st.integers(0, max(extent - 1, 0)), max_size=3))})
        cuts.append([(a, b - a) for a, b in zip(at, [*at[1:], extent], strict=True)])
    boxes = [tuple(zip(*box, strict=True)) or ((), ()) for box in itertools.product(*cuts)]
    return draw(st.permutations(boxes))  # type: ignore[arg-type]


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    keys = draw(st.lists(NAMES, max_size=5, unique=True))
    for key in keys:
        if draw(st.integers(0, 3)) == 0:
            state[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = draw(places(None, None))
            continue
        dtype = draw(st.sampled_from([torch.float32, torch.int8, torch.complex128]))
        size = torch.Size(draw(st.lists(st.integers(0, 400), max_size=5)))
        properties = TensorProperties(
            dtype,
            draw(st.sampled_from(list(LAYOUTS.values()))),
            draw(st.booleans()),
            draw(st.sampled_from(list(MEMORY_FORMATS.values()))),
            draw(st.booleans()),
        )
        chunks = []
        for number, (offsets, sizes) in enumerate(cut(draw, size)):
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            payload = math.prod(sizes) * dtype.itemsize
            storage[MetadataIndex(key, offsets, number)] = draw(places(payload, len(size)))
        state[key] = TensorStorageMetadata(properties, size, chunks)
    parts = st.one_of(NAMES, st.integers(0, 300))
    paths = {key: tuple(draw(st.lists(parts, min_size=1, max_size=5))) for key in keys}
    texts = st.one_of(st.none(), NAMES)
    return Metadata(
        state,
        draw(st.sampled_from([paths, None])),
        storage,
        StorageMeta(draw(texts), draw(texts)),
        draw(texts),
    )


def over_columns(metadata: Metadata) -> Metadata:
    return metadata_of(
        columns_from(metadata), metadata.planner_data, metadata.storage_meta, metadata.version
    )


def decode_in_python(data: bytes) -> Metadata:
    """As if the native decoder were not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(m, "_decode_native", lambda body: None)
        return m.decode(data, path=PATH)


def decode_natively(data: bytes) -> Metadata:
    decoded = m.decode(data, path=PATH)
    assert columns_of(decoded) is not None
    return decoded


@settings(max_examples=examples(60), deadline=None)
@given(metadatas())
def test_it_is_written_as_stock_reads_it_and_read_again(metadata: Metadata) -> None:
    check(metadata)
    data = m.encode(over_columns(metadata))
    stock = pickle.load(io.BytesIO(data))
    assert stock == metadata
    assert plain(stock) == plain(metadata)
    assert {type(key) for key in stock.storage_data} <= {MetadataIndex}
    assert {type(info) for info in stock.storage_data.values()} <= {StorageInfo}
    assert list(stock.state_dict_metadata) == list(metadata.state_dict_metadata)
    assert plain(decode_in_python(data)) == plain(metadata)
    decoded = decode_natively(data)
    assert decoded == metadata
    assert metadata == decoded
    assert plain(decoded) == plain(metadata)
    assert m.encode(decoded) == data
    assert m.data_files(decoded) == m.data_files(metadata)


def test_large_metadata() -> None:
    """Of several frames, batches and kinds of numbers."""
    data = m.encode(over_columns(large()))
    assert plain(decode_in_python(data)) == plain(decode_natively(data)) == plain(large())
    assert plain(pickle.load(io.BytesIO(data))) == plain(large())


# --- files that are changed -----------------------------------------------------------------------


def large() -> Metadata:
    """More chunks than a batch, more files than there are short numbers for, several frames."""
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for key, parts in {"one": 1, "many": 700, "some": 129}.items():
        size = torch.Size((4 * parts, 3))
        chunks = [
            ChunkStorageMetadata(torch.Size((4 * i, 0)), torch.Size((4, 3))) for i in range(parts)
        ]
        state[key] = TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)
        for i, chunk in enumerate(chunks):
            storage[MetadataIndex(key, chunk.offsets, i)] = m.storage_info(
                f"__{i % 300}_x", i << 20, 600, crc32=i, payload_offset=512, payload_length=48
            )
    state["object"] = BytesStorageMetadata()
    storage[MetadataIndex("object")] = m.storage_info(
        "__0_x", 1 << 40, 77, crc32=1, payload_offset=0, payload_length=77
    )
    return Metadata(state, {key: (key,) for key in state}, storage, StorageMeta("a", "b"), "1")


def small() -> Metadata:
    size = torch.Size((4, 6))
    boxes = [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3)), ((4, 0), (0, 6))]
    chunks = [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in boxes]
    storage: dict[MetadataIndex, Any] = {
        MetadataIndex("w", chunk.offsets, i): m.storage_info(
            f"f{i % 2}",
            1000 * i,
            700,
            crc32=i << 29,
            payload_offset=600,
            payload_length=2 * math.prod(chunk.sizes),
            payload_stride=(1, 2) if i else None,
        )
        for i, chunk in enumerate(chunks)
    }
    storage[MetadataIndex("o.0")] = StorageInfo("f0", 1 << 33, 70)
    storage[MetadataIndex("s", ())] = StorageInfo("f0", 300, 70)
    properties = TensorProperties(torch.bfloat16, requires_grad=True)
    scalar = TensorStorageMetadata(
        TensorProperties(torch.int8),
        torch.Size(()),
        [ChunkStorageMetadata(torch.Size(()), torch.Size(()))],
    )
    return Metadata(
        {
            "w": TensorStorageMetadata(properties, size, chunks),
            "o.0": BytesStorageMetadata(),
            "s": scalar,
        },
        {"w": ("w",), "o.0": ("o", 0), "s": ("s", "w", "o", 3)},
        storage,
        StorageMeta("there", "x"),
        "1.0.0",
    )


def outcome(data: bytes, *, natively: bool) -> Any:
    """What comes of reading a file: all of what it says, or the error."""
    try:
        metadata = m.decode(data, path=PATH) if natively else decode_in_python(data)
        return plain(metadata), m.data_files(metadata)
    except PyckptError as error:
        return type(error), str(error)


def changes(body: bytes, seed: int) -> Iterator[bytes]:
    """Of the bytes of a pickle, so that much of it is still a pickle."""
    draw = random.Random(seed)
    frames = [body.index(b"\x95"), body.index(b"\x95", 20)]
    opcodes = b"K\x00M\x00\x00J\x00\x00\x00\x00\x8a\x05()]}eus0hjqrb.NR\x81\x85\x86\x87\x88\x89t"
    while True:
        changed = bytearray(body)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            at = draw.randrange(len(changed))
            kind = draw.randrange(9)
            if kind > 5:  # the number behind an opcode
                at = draw.choice([i for i, code in enumerate(changed[:-3]) if code in b"KMJ\x8a"])
                changed[at + draw.randrange(1, 3)] = draw.choice((0, 1, 127, 255))
            elif kind == 0:
                changed[at] = draw.randrange(256)
            elif kind == 1:
                changed[at] = draw.choice(opcodes)
            elif kind == 2:  # a number near the one that was there
                changed[at] = (changed[at] + draw.choice((-2, -1, 1, 2))) % 256
            elif kind == 3:  # the same again
                to = at + draw.randrange(1, 90)
                changed[at:at] = changed[at:to]
            elif kind == 4:
                del changed[at : at + draw.randrange(1, 90)]
            else:  # what is the same elsewhere
                other = draw.randrange(len(changed))
                size = draw.randrange(1, 30)
                changed[at : at + size] = changed[other : other + size]
        if draw.randrange(8) and len(changed) > frames[1] + 9:
            changed[frames[1] + 1 : frames[1] + 9] = (len(changed) - frames[1] - 9).to_bytes(
                8, "little"
            )
        yield bytes(changed)


@st.composite
def broken(draw: st.DrawFn) -> Metadata:
    """Metadata of which something may not be so."""
    metadata = draw(metadatas())
    state: Any = metadata.state_dict_metadata
    storage: Any = metadata.storage_data
    numbers = st.one_of(st.integers(0, 5), st.sampled_from([1 << 20, 1 << 31, (1 << 63) - 1]))
    for _ in range(draw(st.integers(0, 3))):
        if not storage:
            break
        info = vars(storage[draw(st.sampled_from(list(storage)))])
        field = draw(st.sampled_from([field for field in info if field != "transform_descriptors"]))
        if field == "relative_path":
            names = ["..", "../f", "a/../f", "/f", ".", "", "C:f", "a\\b", "a\0b", "a//b", "..a"]
            info[field] = draw(st.sampled_from(names))
        elif field == "payload_stride":
            info[field] = tuple(draw(st.lists(numbers, max_size=3)))
        elif field == "crc32":
            info[field] = draw(st.integers(0, (1 << 32) - 1))
        else:
            info[field] = draw(numbers)
    tensors = [key for key, one in state.items() if isinstance(one, TensorStorageMetadata)]
    for _ in range(draw(st.integers(0, 2)) if tensors else 0):
        tensor = state[draw(st.sampled_from(tensors))]
        if draw(st.booleans()) and tensor.size:
            size = list(tensor.size)
            size[draw(st.integers(0, len(size) - 1))] = draw(numbers)
            tensor.size = torch.Size(size)
        elif tensor.chunks:
            chunk = draw(st.sampled_from(tensor.chunks))
            if draw(st.booleans()):
                tensor.chunks.remove(chunk)
            elif tensor.size:
                sizes = list(chunk.sizes)
                sizes[draw(st.integers(0, len(sizes) - 1))] = draw(numbers)
                chunk.sizes = torch.Size(sizes)
    if metadata.planner_data and draw(st.booleans()):
        key = draw(st.sampled_from(list(metadata.planner_data)))
        other: Any = [
            (),
            ("a", -1),
            ("a", 1 << 40),
            ("a",) * 300,
            ("a", True),
            ["a"],
            "a",
            ("a", ""),
        ]
        metadata.planner_data[key] = draw(st.sampled_from(other))
    return metadata


@settings(max_examples=examples(150), deadline=None)
@given(broken())
def test_what_is_not_so_is_refused_as_in_python(metadata: Metadata) -> None:
    data = m.encode(over_columns(metadata))
    assert outcome(data, natively=True) == outcome(data, natively=False)


@pytest.mark.parametrize("seed", range(4))
def test_changed_files_mean_what_they_mean_in_python(seed: int) -> None:
    """The native decoder takes nothing that Python refuses, and nothing for something else."""
    body = m.encode(over_columns(small()))[:-20]
    native = 0
    for changed in itertools.islice(changes(body, seed), 500):
        data = m.seal(changed)
        decoded = m._decode_native(memoryview(changed))
        assert outcome(data, natively=True) == outcome(data, natively=False)
        if decoded is not None:
            native += 1
            assert m.encode(decoded) == data
    assert native > 20


def test_every_byte_of_a_file() -> None:
    body = m.encode(over_columns(small()))[:-20]
    native = 0
    for at in range(len(body)):
        for change in (1, -1, 128):
            changed = bytearray(body)
            changed[at] = (changed[at] + change) % 256
            decoded = m._decode_native(memoryview(changed))
            if decoded is not None:
                native += 1
                assert plain(decoded) == plain(decode_in_python(m.seal(bytes(changed))))
    assert native > 100


def describe(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> _C.Columns:
    columns = _C.Columns()
    columns.add_file("f")
    columns.add_tensor("w", columns.add_properties("int8", "torch.strided", False, 0, False), (8,))
    for offsets, sizes in boxes:
        columns.set_place(columns.add_chunk(offsets, sizes), 0, 0, 1000)
    return columns


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([((0,), (4,))], "leave gaps"),
        ([((0,), (5,)), ((4,), (4,))], "leave gaps in it, or overlap"),
        ([((1,), (8,))], r"has a chunk of \(8,\) at \(1,\)"),
        ([], "leave gaps"),
    ],
)
def test_what_is_refused_is_refused_with_the_words_of_before(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], why: str
) -> None:
    data = m.encode(metadata_of(describe(*boxes), None, StorageMeta("a", "b"), "1"))
    with pytest.raises(CorruptCheckpoint, match=why):
        m.decode(data, path=PATH)


def test_a_file_of_two_numbers_has_the_size_that_all_of_it_has() -> None:
    columns = _C.Columns()
    for name in ("step", "epoch"):
        columns.add_object(name)
    for item, end in enumerate((10_000, 100)):  # the later, smaller one must not hide the other
        columns.set_place(item, columns.add_file("data"), 0, end)
    assert columns.file_sizes() == {"data": 10_000}
    data = m.encode(metadata_of(columns, None, StorageMeta(), None))
    decoded = m.decode(data, path=PATH)
    assert columns_of(decoded) is None  # read as any file that pyckpt did not write
    assert m.data_files(decoded) == {"data": 10_000}


def test_paths_are_checked() -> None:
    columns = describe(((0,), (8,)))
    data = m.encode(metadata_of(columns, {"w": ()}, StorageMeta("a", "b"), "1"))
    with pytest.raises(CorruptCheckpoint, match="the path of 'w' has 0 parts"):
        m.decode(data, path=PATH)


@pytest.mark.parametrize("planner_data", [3, {"w": 3}, {"w": {"x": 1}}, {"w": ["a"]}])
def test_planner_data_of_other_kinds(planner_data: Any) -> None:
    columns = describe(((0,), (8,)))
    written = metadata_of(columns, planner_data, StorageMeta("a", "b"), "1")
    data = m.encode(written)
    assert plain(m.decode(data, path=PATH)) == plain(written)
    assert plain(pickle.loads(data)) == plain(written)


def test_what_the_native_form_has_no_room_for_is_written_by_python() -> None:
    written = metadata_of(describe(((0,), (8,))), None, StorageMeta(Path("a"), "b"), "1")
    data = m.encode(written)
    assert type(written.state_dict_metadata) is KeysMapping
    assert type(pickle.loads(data).state_dict_metadata) is dict
    assert plain(m.decode(data, path=PATH)) == plain(written)
    assert not m.encode_to(written, pytest.fail)


# --- in memory ------------------------------------------------------------------------------------


def test_tensors_are_made_when_looked_at() -> None:
    real = small().state_dict_metadata["w"]
    lazy: Any = over_columns(small()).state_dict_metadata["w"]
    assert isinstance(lazy, TensorStorageMetadata)
    assert "chunks" not in vars(lazy)
    assert (lazy.properties, lazy.size) == (real.properties, real.size)
    assert "chunks" not in vars(lazy)
    assert lazy.chunks == real.chunks
    assert type(lazy) is TensorStorageMetadata
    assert vars(lazy) == vars(real)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        over_columns(small()).state_dict_metadata["w"].other  # noqa: B018


USES: dict[str, Any] = {
    "equal": lambda lazy, real: lazy == real,
    "equal the other way": lambda lazy, real: real == lazy,
    "not equal": lambda lazy, real: not (lazy != real or real != lazy),
    "of another size": lambda lazy, real: (
        lazy != dataclasses.replace(real, size=torch.Size((1,))) and lazy != 3
    ),
    "pickled": lambda lazy, real: pickle.dumps(lazy) == pickle.dumps(real),
    "copied": lambda lazy, real: vars(copy.copy(lazy)) == vars(real),
    "copied deeply": lambda lazy, real: vars(copy.deepcopy(lazy)) == vars(real),
    "shown": lambda lazy, real: repr(lazy) == repr(real),
    "replaced": lambda lazy, real: dataclasses.replace(lazy, chunks=[]).chunks == [],
    "as a dict": lambda lazy, real: dataclasses.asdict(lazy) == dataclasses.asdict(real),
}


@pytest.mark.parametrize("use", USES)
def test_tensors_are_as_stocks(use: str) -> None:
    real = small().state_dict_metadata["w"]
    assert USES[use](over_columns(small()).state_dict_metadata["w"], real)


def test_threads_that_look_at_a_tensor_at_once() -> None:
    expected = large().state_dict_metadata["many"]
    for _ in range(20):
        lazy: Any = over_columns(large()).state_dict_metadata["many"]
        begin = threading.Barrier(4)
        seen: list[Any] = []

        def look(lazy: Any = lazy, begin: Any = begin, seen: list[Any] = seen) -> None:
            begin.wait()
            seen.append(lazy.chunks)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4
        assert all(chunks is seen[0] for chunks in seen)
        assert lazy == expected


def test_mappings_are_as_dicts() -> None:
    metadata, expected = over_columns(small()), small()
    for mapping, known in (
        (metadata.state_dict_metadata, expected.state_dict_metadata),
        (metadata.storage_data, expected.storage_data),
    ):
        assert mapping == known
        assert known == mapping
        assert mapping != {}
        assert mapping != 3
        assert len(mapping) == len(known)
        assert list(mapping) == list(mapping.keys()) == [key for key, _ in mapping.items()]
        assert set(mapping) == set(known)
        assert list(mapping.values()) == [known[key] for key in mapping]
        assert dict(mapping) == {**mapping} == mapping.copy() == known
        assert all(key in mapping and mapping[key] == known[key] for key in known)
        assert type(pickle.loads(pickle.dumps(mapping))) is dict
        assert pickle.loads(pickle.dumps(mapping)) == copy.deepcopy(mapping) == known
        assert repr(mapping) == repr(mapping.copy())
        for other in ("x", 3, None, "\ud800", MetadataIndex("x")):
            assert other not in mapping
            assert mapping.get(other) is None
            with pytest.raises(KeyError):
                mapping[other]
        with pytest.raises(TypeError):
            hash(mapping)


def test_places_are_found_by_key_and_offsets() -> None:
    places = over_columns(small()).storage_data
    assert isinstance(places, PlacesMapping)
    info = places[MetadataIndex("w", (2, 3), 2)]
    assert vars(info) == vars(small().storage_data[MetadataIndex("w", (2, 3))])
    # The number is a hint, and no more.
    for hint in (None, 0, 99, -1, 1 << 70):
        assert places[MetadataIndex("w", (2, 3), hint)] == info
    for index in (
        MetadataIndex("w"),
        MetadataIndex("w", (2,)),
        MetadataIndex("w", (2, 2)),
        MetadataIndex("w", (2, 3, 0)),
        MetadataIndex("o.0", ()),
        MetadataIndex("s"),
        MetadataIndex("s", (0,)),
        MetadataIndex("w", (1 << 62, 3)),
    ):
        assert index not in places


def test_the_same_tensor_is_the_same_object() -> None:
    keys = over_columns(small()).state_dict_metadata
    assert keys["w"] is keys["w"]
    assert dict(keys)["w"] is keys["w"]


def test_columns_of() -> None:
    metadata = over_columns(small())
    columns = columns_of(metadata)
    assert columns is not None
    assert columns_of(small()) is None
    assert columns_of(Metadata(metadata.state_dict_metadata, None)) is columns
    assert columns_of(Metadata(metadata.state_dict_metadata, None, small().storage_data)) is None
    other = over_columns(small())
    assert columns_of(Metadata(metadata.state_dict_metadata, None, other.storage_data)) is None
    planned = _C.Columns()
    planned.add_object("o")
    assert metadata_of(planned).storage_data is None


# --- torch's own code -----------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint whose metadata is in the canonical form."""
    state = {"model": {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, "step": 3}
    pyckpt.save(state, tmp_path / "saved")
    file = tmp_path / "saved" / ".metadata"
    metadata = m.read(file)
    metadata.storage_meta = StorageMeta("there", "x")
    data = m.encode(over_columns(metadata))
    assert columns_of(m.decode(data, path=file)) is not None
    file.write_bytes(data)
    return file.parent


class OverColumns(FileSystemReader):
    """Stock's reader, given our metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = m.read(Path(self.path) / ".metadata")
        assert columns_of(metadata) is not None
        return metadata


@pytest.mark.parametrize("reader", [FileSystemReader, OverColumns])
def test_stock_loads_it(saved: Path, reader: Any) -> None:
    state: dict[str, Any] = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(2)}, "step": 0}
    dcp.load(state, storage_reader=reader(saved))
    assert state["step"] == 3
    assert bool(state["model"]["w"].eq(torch.arange(12.0).view(3, 4)).all())


def test_stock_loads_all_keys_of_it(saved: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(saved, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert whole["step"] == 3
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=OverColumns(saved),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert bool(state["model"]["b"].eq(1).all())


def test_pyckpt_loads_it(saved: Path) -> None:
    state: dict[str, Any] = {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(2)}, "step": 0}
    pyckpt.load(state, saved)
    assert state["step"] == 3
    assert bool(state["model"]["w"].eq(torch.arange(12.0).view(3, 4)).all())
