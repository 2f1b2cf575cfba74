"""The metadata file: what it accepts, what it refuses, what it notices."""

from __future__ import annotations

import collections
import copyreg
import io
import os
import pathlib
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _load_helpers import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import pyckpt
from pyckpt.errors import CorruptCheckpoint, UnsafeCheckpoint
from pyckpt.format import metadata as m
from pyckpt.format.columns import columns_of

PATH = "some/.metadata"


def small() -> Metadata:
    size, start = torch.Size((2, 3)), torch.Size((0, 0))
    properties = TensorProperties(dtype=torch.float32)
    return Metadata(
        state_dict_metadata={
            "a.w": TensorStorageMetadata(properties, size, [ChunkStorageMetadata(start, size)]),
            "a.o": BytesStorageMetadata(),
        },
        planner_data={"a.w": ("a", "w"), "a.o": ("a", "o")},
        storage_data={
            MetadataIndex("a.w", start, 0): m.storage_info(
                "__0_0.distcp", 0, 1000, crc32=7, payload_offset=512, payload_length=24
            ),
            MetadataIndex("a.o"): _StorageInfo("__0_0.distcp", 1000, 20),
        },
        storage_meta=StorageMeta(checkpoint_id=Path("some"), save_id="x"),
        version="1.0.0",
    )


def test_round_trip_and_stock_reads_it() -> None:
    data = m.encode(small())
    assert m.decode(data, path=PATH) == small()
    assert pickle.load(io.BytesIO(data)) == small()


def test_trailer_bytes() -> None:
    data = m.encode(small())
    body = m.dumps(small())
    assert data == body + b"PYCKPTM1" + struct.pack("<QI", len(body), zlib.crc32(body))


@pytest.mark.parametrize("protocol", [3, 4])
def test_later_fields_of_tensors_are_not_written(
    monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    """Torch 2.15 pickles a sixth, and earlier ones load no metadata that has it."""
    five = m.dumps(small(), protocol)
    stock = TensorProperties.__getstate__

    def getstate(self: TensorProperties) -> Any:
        return (*stock(self)[:5], (3, 1))

    monkeypatch.setattr(TensorProperties, "__getstate__", getstate)
    assert m.dumps(small(), protocol) == five
    assert pickle.dumps(small(), protocol) != five


def test_storage_info_keeps_what_stock_does_not_know() -> None:
    info = m.storage_info(
        "f", 1, 2, crc32=3, payload_offset=4, payload_length=5, payload_stride=(1, 2)
    )
    assert info == _StorageInfo("f", 1, 2)
    copy = pickle.loads(pickle.dumps(info))
    assert vars(copy) == {
        "relative_path": "f",
        "offset": 1,
        "length": 2,
        "crc32": 3,
        "payload_offset": 4,
        "payload_length": 5,
        "payload_stride": (1, 2),
    }
    row_major = m.storage_info("f", 1, 2, crc32=3, payload_offset=4, payload_length=5)
    assert not hasattr(row_major, "payload_stride")
    assert "transform_descriptors" not in row_major.__getstate__()


def test_reads_what_stock_writes(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn]
    state = {f"t{i}": torch.zeros(2, i, dtype=dtype) for i, dtype in enumerate(dtypes)}
    save({**state, "scalar": torch.tensor(1), "nested": {"list": [1, {"x": None}]}}, tmp_path)
    stock = pickle.loads((tmp_path / ".metadata").read_bytes())
    assert m.read(tmp_path / ".metadata") == stock


def test_instances_are_of_dcps_own_classes() -> None:
    decoded = m.decode(m.encode(small()), path=PATH)
    tensor = decoded.state_dict_metadata["a.w"]
    assert type(tensor) is TensorStorageMetadata
    assert type(tensor.properties) is TensorProperties
    assert type(tensor.chunks[0]) is ChunkStorageMetadata
    assert type(decoded.state_dict_metadata["a.o"]) is BytesStorageMetadata
    assert {type(index) for index in decoded.storage_data} == {MetadataIndex}
    assert {type(info) for info in decoded.storage_data.values()} == {_StorageInfo}


def test_every_flipped_bit_is_noticed_or_harmless() -> None:
    whole = small()
    data = m.encode(whole)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptCheckpoint, match=PATH):
                m.decode(bytes(damaged), path=PATH)


def test_every_truncation_is_noticed_or_harmless() -> None:
    whole = small()
    data = m.encode(whole)
    body = len(m.dumps(whole))
    for length in range(len(data)):
        if length == body:
            assert m.decode(data[:length], path=PATH) == whole  # as stock writes it
        else:
            with pytest.raises(CorruptCheckpoint):
                m.decode(data[:length], path=PATH)


def test_checksum_error_says_what_differs() -> None:
    data = bytearray(m.encode(small()))
    data[10] ^= 1
    with pytest.raises(CorruptCheckpoint) as caught:
        m.decode(bytes(data), path=PATH)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.path, str(error)) == (PATH, str(caught.value))
    assert error.expected != error.found
    assert f"{error.expected:#010x}" in str(error)
    assert f"{error.found:#010x}" in str(error)


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", b"PK\x03\x04" * 9, pickle.dumps(3)])
def test_garbage_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match=PATH):
        m.decode(data, path=PATH)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda md: setattr(md, "state_dict_metadata", None),
        lambda md: md.state_dict_metadata.__setitem__("x", 1),
        lambda md: md.state_dict_metadata.__setitem__(1, BytesStorageMetadata()),
        lambda md: setattr(md.state_dict_metadata["a.w"], "size", (2, 3)),
        lambda md: setattr(md.state_dict_metadata["a.w"].chunks[0], "sizes", torch.Size((2, 4))),
        lambda md: setattr(md.state_dict_metadata["a.w"].chunks[0], "sizes", torch.Size((2,))),
        lambda md: setattr(md.state_dict_metadata["a.w"].properties, "dtype", "float32"),
        lambda md: md.storage_data.__setitem__("x", 1),
        lambda md: md.storage_data.__setitem__(MetadataIndex("y"), _StorageInfo("f", -1, 2)),
    ],
)
def test_well_formed_pickle_of_something_else_is_corrupt(break_it: Any) -> None:
    metadata = small()
    break_it(metadata)
    with pytest.raises(CorruptCheckpoint):
        m.decode(m.encode(metadata), path=PATH)


# --- other versions of torch and Python -------------------------------------------------------


class Fields:
    """Pickles as `TensorProperties` with fields of any number."""

    def __init__(self, fields: tuple[object, ...]) -> None:
        self.fields = fields

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (TensorProperties,), self.fields  # type: ignore[attr-defined]

    @property
    def __class__(self) -> Any:  # pickle checks that what it makes is what it was given
        return TensorProperties


def with_fields(*fields: object) -> bytes:
    metadata = small()
    metadata.state_dict_metadata["a.w"].properties = Fields(fields)  # type: ignore
    # Stock tells nothing of the bytes, which are of no matter here.
    metadata.storage_data[MetadataIndex("a.w", (0, 0))] = _StorageInfo("__0_0.distcp", 0, 1000)
    return pickle.dumps(metadata)


CHANNELS_LAST = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


@pytest.mark.parametrize("more", [(), ((3, 1),), (None,), ((3, 1), "of a later torch")])
def test_five_six_and_more_fields(more: tuple[object, ...]) -> None:
    metadata = m.decode(
        with_fields(torch.int8, torch.strided, True, CHANNELS_LAST, False, *more), path=PATH
    )
    properties = metadata.state_dict_metadata["a.w"].properties
    assert type(properties) is TensorProperties
    assert (properties.dtype, properties.requires_grad) == (torch.int8, True)
    assert properties.memory_format == torch.channels_last
    if more:
        assert properties.strides == more[0]


def test_unknown_attributes_are_kept() -> None:
    metadata = small()
    metadata.later = {"x": {1, 2}}  # type: ignore[attr-defined]
    assert m.decode(m.encode(metadata), path=PATH).later == {"x": {1, 2}}  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_protocols(protocol: int) -> None:
    assert m.decode(pickle.dumps(small(), protocol), path=PATH) == small()


def test_enum_members_by_getattr() -> None:
    class ByName:
        def __reduce__(self) -> Any:
            return getattr, (_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")

    metadata = small()
    metadata.state_dict_metadata["a.w"].properties.memory_format = torch.preserve_format
    metadata.version = ByName()  # type: ignore[assignment]
    assert m.decode(pickle.dumps(metadata), path=PATH).version == 2


def test_paths_of_either_system() -> None:
    class Windows:
        def __reduce__(self) -> Any:
            return pathlib.WindowsPath, ("C:\\", "x")

    metadata = small()
    metadata.storage_meta = StorageMeta(checkpoint_id=Windows())  # type: ignore[arg-type]
    decoded = m.decode(pickle.dumps(metadata), path=PATH)
    assert decoded.storage_meta is not None
    assert decoded.storage_meta.checkpoint_id == pathlib.PureWindowsPath("C:\\x")


# --- no code from files -----------------------------------------------------------------------


class Calls:
    def __init__(self, function: Any, *args: Any) -> None:
        self.how = function, args

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (os.system, ("touch {}",), f"{os.system.__module__}.system"),
        (eval, ("open({!r}, 'w')",), "builtins.eval"),
        (exec, ("open({!r}, 'w')",), "builtins.exec"),
        (collections.defaultdict, (list,), "collections.defaultdict"),
        (torch.load, ("{}",), "torch.serialization.load"),
        (pathlib.Path.touch, (Path("x"),), f"{pathlib.Path.touch.__module__}.Path.touch"),
    ],
)
def test_foreign_names_are_refused(
    tmp_path: Path, function: Any, args: tuple[Any, ...], name: str
) -> None:
    witness = tmp_path / "witness"
    args = tuple(a.format(str(witness)) if isinstance(a, str) else a for a in args)
    metadata = small()
    metadata.version = Calls(function, *args)  # type: ignore[assignment]
    for data in (m.encode(metadata), pickle.dumps(metadata)):
        with pytest.raises(UnsafeCheckpoint, match=name) as caught:
            m.decode(data, path=PATH)
        assert PATH in str(caught.value)
        assert caught.value.refused == (name,)
        assert pickle.loads(pickle.dumps(caught.value)).refused == (name,)
    assert not witness.exists()


@pytest.mark.parametrize("owner", [os.system, Path, TensorProperties, {}, "x"])
def test_getattr_reaches_nothing_but_the_enum(owner: Any) -> None:
    class Reach:
        def __reduce__(self) -> Any:
            return getattr, (owner, "__class__")

    with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint)):
        m.decode(pickle.dumps(Reach()), path=PATH)


GLOBALS = sorted(key for key in m._ALLOWED if key[0] != "torch" or key[1] in ("Size", "int8"))


@pytest.mark.parametrize(("module", "name"), GLOBALS)
@pytest.mark.parametrize("state", [{"planted": 1}, (None, {"planted": 1}), (None, {"__new__": 1})])
def test_a_file_cannot_alter_what_it_names(module: str, name: str, state: object) -> None:
    """BUILD on a class or function, rather than on an instance, would set its attributes."""
    named = f"c{module}\n{name}\n".encode()
    body = pickle.dumps(state, 2)[2:-1]
    with pytest.raises(CorruptCheckpoint):
        m.decode(b"\x80\x04" + named + body + b"b.", path=PATH)
    assert not hasattr(m._ALLOWED[module, name], "planted")


@pytest.mark.parametrize("value", [-1, 3, "x", None])
def test_impossible_memory_formats(value: object) -> None:
    number = Calls(_MEM_FORMAT_ENCODING, value)
    with pytest.raises(CorruptCheckpoint):
        m.decode(with_fields(torch.int8, torch.strided, True, number, False), path=PATH)


# --- data files -------------------------------------------------------------------------------


def test_data_files() -> None:
    metadata = small()
    metadata.storage_data[MetadataIndex("z")] = _StorageInfo("sub/other", 5, 5)
    assert m.data_files(metadata) == {"__0_0.distcp": 1020, "sub/other": 10}
    assert m.data_files(Metadata({})) == {}


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "", ".", "C:\\x", "..\\x", "a\0"]
)
def test_data_files_stay_inside(name: str) -> None:
    metadata = small()
    metadata.storage_data[MetadataIndex("z")] = _StorageInfo(name, 5, 5)
    with pytest.raises(CorruptCheckpoint, match=r"'z' is said to be stored .* outside"):
        m.decode(m.encode(metadata), path=PATH)


# --- from DCP's own objects -----------------------------------------------------------------------


def saved_by_stocks_planner(path: Path) -> Metadata:
    """Metadata as it comes to a writer from stock's planner."""
    state = {
        "m": {"w": torch.rand(3, 4), "e": torch.empty(0, 2), "n": 1, "s": torch.tensor(2)},
        "t": torch.rand(5, 2).t(),
        "l": [torch.rand(1), "x"],
    }
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path, sync_files=False), no_dist=True)
    metadata: Metadata = pickle.loads((path / ".metadata").read_bytes())
    return metadata


def test_stocks_objects_are_written_in_columns(tmp_path: Path) -> None:
    metadata = saved_by_stocks_planner(tmp_path)
    assert type(metadata.state_dict_metadata) is dict
    read = m.read(tmp_path / ".metadata")
    assert columns_of(read) is not None
    assert pickle.loads(pickle.dumps(read)) == metadata
    assert columns_of(m.decode(m.encode(metadata), path="x"))


def _at(metadata: Metadata) -> Any:
    return metadata.storage_data[MetadataIndex("m.w", (0, 0))]


@pytest.mark.parametrize(
    "change",
    [
        lambda of: vars(_at(of)).update(note=1),
        lambda of: object.__setattr__(_at(of), "transform_descriptors", ["zstd"]),
        lambda of: vars(_at(of)).pop("crc32"),
        lambda of: object.__setattr__(_at(of), "offset", -1),
        lambda of: object.__setattr__(_at(of), "offset", 2**63),
        lambda of: object.__setattr__(_at(of), "offset", "0"),
        lambda of: object.__setattr__(_at(of), "relative_path", 5),
        lambda of: vars(_at(of)).update(payload_stride="x"),
        lambda of: vars(of.state_dict_metadata["m.w"]).update(note=1),
        lambda of: vars(of.state_dict_metadata["m.n"]).update(note=1),
        lambda of: vars(of.state_dict_metadata["m.w"].chunks[0]).update(note=1),
        lambda of: of.state_dict_metadata["m.w"].properties.__setattr__("note", 1),
        lambda of: vars(next(iter(of.storage_data))).update(note=1),
        lambda of: of.storage_data.pop(MetadataIndex("m.n")),
        lambda of: of.storage_data.update({MetadataIndex("other"): _at(of)}),
        lambda of: of.storage_data.update({MetadataIndex("m.w", (0, 1)): _at(of)}),
        lambda of: of.storage_data.update({MetadataIndex("m.n", (0,)): _at(of)}),
        lambda of: of.storage_data.update({"m.n": _at(of)}),
        lambda of: of.state_dict_metadata.update(other=5),
        lambda of: of.state_dict_metadata.update({"\ud800": BytesStorageMetadata()}),
        lambda of: of.state_dict_metadata["m.w"].chunks.append(None),
        lambda of: setattr(of.state_dict_metadata["m.w"], "chunks", ()),
        lambda of: setattr(of.state_dict_metadata["m.w"], "size", [3, 4]),
        lambda of: setattr(of.state_dict_metadata["m.w"], "size", torch.Size((3,))),
        lambda of: setattr(of.state_dict_metadata["m.w"].properties, "dtype", "float32"),
        lambda of: setattr(of.state_dict_metadata["m.w"].properties, "requires_grad", None),
        lambda of: setattr(of.state_dict_metadata["m.w"].chunks[0], "sizes", torch.Size((1, 2, 3))),
        lambda of: delattr(of.state_dict_metadata["m.w"].chunks[0], "sizes"),
        lambda of: of.state_dict_metadata["m.w"].chunks.append(
            of.state_dict_metadata["m.w"].chunks[0]
        ),
    ],
)
def test_what_has_no_place_in_columns_is_pickled(tmp_path: Path, change: Any) -> None:
    """As a whole, by Python: nothing that a program put there is lost, or changed."""
    metadata = saved_by_stocks_planner(tmp_path)
    blocks: list[bytes] = []
    assert m.encode_to(metadata, blocks.append)
    change(metadata)
    blocks.clear()
    assert not m.encode_to(metadata, blocks.append)
    assert blocks == []
    assert m.encode(metadata)[:-20] == m.dumps(metadata)


def test_a_mapping_over_columns_that_a_program_pickled_is_read(tmp_path: Path) -> None:
    metadata = saved_by_stocks_planner(tmp_path)
    read = m.read(tmp_path / ".metadata")
    again = m.decode(pickle.dumps(read), path="x")
    assert again == metadata


def test_dict_makes_nothing_but_a_dict() -> None:
    for argument in ([("a", 1)], 5, "ab", None):
        pickled = pickle.dumps(Called(dict, argument))
        with pytest.raises(CorruptCheckpoint, match="not readable"):
            m.decode(pickled, path="x")


class Called:
    """Its pickle calls a function with an argument."""

    def __init__(self, function: Any, argument: Any) -> None:
        self.function, self.argument = function, argument

    def __reduce__(self) -> Any:
        return self.function, (self.argument,)
