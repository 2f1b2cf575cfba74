"""Damaged, exchanged and hostile files: an error that says which, and never a wrong value."""

from __future__ import annotations

import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import slow
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

import pyckpt
from pyckpt.errors import CorruptCheckpoint, LoadError, PyckptError, UnsafeCheckpoint
from pyckpt.format import metadata as metadata_format


def save(state: dict[str, Any], path: Path, writer: str = "ours") -> Path:
    """Save; return the data file."""
    if writer == "ours":
        storage: Any = pyckpt.DirectWriter(path, sync_files=False)
    else:
        storage = FileSystemWriter(path, sync_files=False)
    dcp.save(state, storage_writer=storage, no_dist=True)
    (data,) = path.glob("*.distcp")
    return data


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {
        k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def flip(path: Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def info_of(path: Path, key: str) -> Any:
    metadata = metadata_format.read(path / ".metadata")
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    return info


# --- every bit ------------------------------------------------------------------------------------


class Loads:
    """Loads one checkpoint again and again, by the parts of a load that read the data files."""

    def __init__(
        self, path: Path, saved: dict[str, Any], engine: pyckpt.Engine, *, plain: bool = False
    ) -> None:
        self.path = path
        self.saved = saved
        self.engine = engine
        self.metadata: Metadata = metadata_format.read(path / ".metadata")
        self.state = blank(saved)
        self.planner = pyckpt.LoadPlanner()
        self.planner._items_stay = self.planner._reads_plain = plain  # as pyckpt.load sets them
        self.planner.set_up_planner(self.state, self.metadata, is_coordinator=True)
        plan = self.planner.create_local_plan()
        self.local_plan: LoadPlan = self.planner.finish_plan(plan)

    def load(self) -> list[str]:
        """Load everything; return what was not verified."""
        for value in self.state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        # The page cache sees a flipped bit at once; through it one load takes microseconds.
        reader = pyckpt.DirectReader(self.path, direct="off", engine=self.engine)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        reader.read_data(self.local_plan, self.planner).wait()
        return reader.unverified

    def right(self) -> bool:
        return all(equal(self.state[key], value) for key, value in self.saved.items())


def every_flip(path: Path) -> Iterator[tuple[int, int]]:
    """Flip each bit of a file in turn."""
    with path.open("r+b", buffering=0) as file:
        content = file.read()
        for at, byte in enumerate(content):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), at)
                yield at, bit
            os.pwrite(file.fileno(), bytes([byte]), at)


@pytest.fixture(scope="module")
def engine() -> Iterator[pyckpt.Engine]:
    """One thread: waking several takes longer than these loads do."""
    with pyckpt.Engine(slot_bytes=65536, max_pinned_bytes=65536, io_threads=1) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_every_bit_of_our_data_file(tmp_path: Path, engine: pyckpt.Engine, plain: bool) -> None:
    saved: dict[str, Any] = {
        "a": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "o": (1, "two"),
    }
    if plain:
        saved = {"a": torch.arange(6, dtype=torch.int16), "o": "two"}
    data = save(saved, tmp_path)
    loads = Loads(tmp_path, saved, engine, plain=plain)
    assert loads.load() == []
    assert loads.right()
    # Of an item, the payload counts; of an object that is all.
    counts: dict[int, str] = {}
    infos = {key: info_of(tmp_path, key) for key in saved}
    for key, info in infos.items():
        begin = info.offset + info.payload_offset
        counts |= dict.fromkeys(range(begin, begin + info.payload_length), key)
    flips = 0
    for at, bit in every_flip(data):
        flips += 1
        key = counts.get(at)
        if key is None:
            # An envelope, which is there for stock: its bytes take no part in what is loaded.
            assert loads.load() == [], (at, bit)
            assert loads.right(), (at, bit)
            continue
        with pytest.raises(CorruptCheckpoint) as caught:
            loads.load()
        error = caught.value
        assert (error.key, error.path) == (key, str(data))
        assert error.expected == infos[key].crc32
        assert error.found not in (None, error.expected)
    assert flips == 8 * data.stat().st_size
    assert len(set(counts.values())) == len(saved)


@pytest.mark.slow
def test_every_bit_of_our_metadata(tmp_path: Path) -> None:
    saved = {"a": torch.arange(5.0), "o": 3}
    save(saved, tmp_path)
    count = 0
    for at, bit in every_flip(tmp_path / ".metadata"):
        state = blank(saved)
        with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint), match=r"\.metadata"):
            pyckpt.load(state, tmp_path)
        assert state["a"].count_nonzero() == 0, (at, bit)
        count += 1
    assert count == 8 * (tmp_path / ".metadata").stat().st_size


def test_gaps_are_not_read(tmp_path: Path) -> None:
    """Between aligned payloads there is nothing."""
    saved = {f"t{i}": torch.arange(16_384.0 + i) + i for i in range(3)}
    data = save(saved, tmp_path)
    taken = bytearray(data.stat().st_size)
    for key in saved:
        info = info_of(tmp_path, key)
        taken[info.offset : info.offset + info.length] = b"\1" * info.length
    content = bytearray(data.read_bytes())
    gaps = [at for at, used in enumerate(taken) if not used]
    assert len(gaps) > 100
    for at in gaps:
        assert content[at] == 0
        content[at] = 255
    data.write_bytes(content)
    state = blank(saved)
    assert pyckpt.load(state, tmp_path).not_verified == []
    assert all(equal(state[key], saved[key]) for key in saved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved",
    [
        {"a": torch.arange(6, dtype=torch.int16).reshape(2, 3).t()},
        {"a": torch.tensor([1 + 2j, 3 - 1j]).conj()},
    ],
    ids=["transposed", "not plain"],
)
def test_every_bit_of_stocks_data_file(
    tmp_path: Path, saved: dict[str, Any], engine: pyckpt.Engine
) -> None:
    """Of tensors: the zip that each is in has its checksum. Objects are in one too, but looking at
    that would double the time of loading the thousands that there may be."""
    data = save(saved, tmp_path, "stock")
    loads = Loads(tmp_path, saved, engine)
    assert loads.load() == []
    assert loads.right()
    errors: list[CorruptCheckpoint] = []
    harmless = 0
    for at, bit in every_flip(data):
        try:
            loads.load()
        except CorruptCheckpoint as error:
            errors.append(error)
        else:
            assert loads.right(), (at, bit)
            harmless += 1
    for error in errors:
        assert error.key in saved
        assert error.path == str(data)
    assert len(errors) > 8 * sum(value.nbytes for value in saved.values())
    assert harmless


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_checksums_are_what_catches_it(tmp_path: Path, writer: str) -> None:
    """Without verification the same flips are loaded."""
    saved = {"a": torch.arange(1, 6, dtype=torch.int32)}
    data = save(saved, tmp_path, writer)
    raw = saved["a"].numpy().tobytes()
    start = data.read_bytes().index(raw)
    for at in range(start, start + len(raw)):
        for bit in range(8):
            flip(data, at, 1 << bit)
            state = blank(saved)
            with pytest.raises(CorruptCheckpoint):
                pyckpt.load(state, tmp_path)
            report = pyckpt.load(state, tmp_path, verify="none")
            wrong = state["a"] ^ saved["a"]
            assert wrong.count_nonzero() == 1
            place = at - start
            assert wrong[place // 4].item() & 0xFFFFFFFF == 1 << (8 * (place % 4) + bit)
            assert report.not_verified == ["a"]
            flip(data, at, 1 << bit)


def test_the_error_tells_everything(tmp_path: Path) -> None:
    saved = {"m": {"w": torch.arange(100.0), "v": torch.arange(50.0), "u": torch.arange(9.0)}}
    data = save(saved, tmp_path)
    info = info_of(tmp_path, "m.w")
    at = info.offset + info.payload_offset
    flip(data, at + 17)
    state = {"m": {key: torch.zeros_like(value) for key, value in saved["m"].items()}}
    with pytest.raises(CorruptCheckpoint) as caught:
        pyckpt.load(state, tmp_path)
    error = caught.value
    assert (error.key, error.path, error.offset) == ("m.w", str(data), at)
    assert error.expected == info.crc32
    damaged = data.read_bytes()[at : at + info.payload_length]
    assert error.found == zlib.crc32(damaged)
    for part in ("m.w", str(data), str(at), f"{error.expected:#010x}", f"{error.found:#010x}"):
        assert part in str(error)
    assert "more" not in str(error)
    # All that is damaged is counted.
    for key in ("m.v", "m.u"):
        other = info_of(tmp_path, key)
        flip(data, other.offset + other.payload_offset)
    with pytest.raises(CorruptCheckpoint, match="2 more"):
        pyckpt.load(state, tmp_path)
    # What is not asked for is not looked at.
    report = pyckpt.load({"x": 1}, tmp_path, missing="keep")
    assert sorted(report.left_out) == ["m.u", "m.v", "m.w"]


@pytest.mark.parametrize("writer", ["ours", slow("stock")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_items(tmp_path: Path, writer: str, dtype: torch.dtype) -> None:
    """Read in pieces, some in place, or in parts of rows when converted: each byte counts."""
    saved = {"a": torch.arange(9_000_001.0)}
    data = save(saved, tmp_path, writer)
    content = data.read_bytes()
    begin = content.index(saved["a"][:64].numpy().tobytes())
    size = saved["a"].nbytes
    state = {"a": torch.zeros(9_000_001, dtype=dtype)}
    assert pyckpt.load(state, tmp_path).not_verified == []
    assert torch.equal(state["a"], saved["a"].to(dtype))
    for place in (0, size // 2, (32 << 20) - 1, 32 << 20, size - 1):
        flip(data, begin + place, 0x10)
        with pytest.raises(CorruptCheckpoint, match="a in"):
            pyckpt.load(state, tmp_path)
        flip(data, begin + place, 0x10)
    assert pyckpt.load(state, tmp_path).not_verified == []


def test_damaged_objects_and_opaque_tensors(tmp_path: Path) -> None:
    saved = {"o": ("x" * 1000,), "c": torch.tensor([1 + 2j]).conj()}
    data = save(saved, tmp_path)
    for key in saved:
        info = info_of(tmp_path, key)
        for at in (info.offset, info.offset + info.length // 2, info.offset + info.length - 1):
            flip(data, at)
            with pytest.raises(CorruptCheckpoint, match=f"{key} in .*CRC-32") as caught:
                pyckpt.load(blank(saved), tmp_path)
            assert caught.value.key == key
            assert caught.value.offset == info.offset
            flip(data, at)


# --- files as a whole -----------------------------------------------------------------------------


def truncated(data: Path) -> None:
    os.truncate(data, data.stat().st_size - 1)


def emptied(data: Path) -> None:
    os.truncate(data, 0)


def over_long(data: Path) -> None:
    with data.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("change", [truncated, emptied, over_long])
def test_sizes(tmp_path: Path, writer: str, change: Callable[[Path], None]) -> None:
    saved = {f"t{i}": torch.arange(1.0, 3000 + i) for i in range(4)}
    data = save(saved, tmp_path, writer)
    size = data.stat().st_size
    change(data)
    for verify in ("items", "none"):
        state = blank(saved)
        with pytest.raises(CorruptCheckpoint, match="bytes") as caught:
            pyckpt.load(state, tmp_path, verify=verify)  # type: ignore[arg-type]
        assert caught.value.path == str(data)
        assert str(data) in str(caught.value)
        assert (caught.value.expected, caught.value.found) == (size, data.stat().st_size)
        # It was known before anything was read.
        assert all(value.count_nonzero() == 0 for value in state.values())


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_missing_file(tmp_path: Path, writer: str) -> None:
    saved = {"a": torch.arange(1.0, 9)}
    data = save(saved, tmp_path, writer)
    data.unlink()
    state = blank(saved)
    with pytest.raises(FileNotFoundError) as caught:
        pyckpt.load(state, tmp_path)
    assert caught.value.filename == str(data)
    assert state["a"].count_nonzero() == 0
    data.mkdir()
    with pytest.raises((OSError, CorruptCheckpoint), match="distcp"):
        pyckpt.load(state, tmp_path)


def test_one_of_many_files(tmp_path: Path) -> None:
    """All sizes are looked at before the first file is read."""
    saved = {f"t{i}": torch.arange(1.0, 100 + i) for i in range(5)}
    writer = FileSystemWriter(tmp_path, sync_files=False, single_file_per_rank=False)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    for data in sorted(tmp_path.glob("*.distcp")):
        content = data.read_bytes()
        over_long(data)
        state = blank(saved)
        with pytest.raises(CorruptCheckpoint) as caught:
            pyckpt.load(state, tmp_path)
        assert caught.value.path == str(data)
        assert all(value.count_nonzero() == 0 for value in state.values())
        data.write_bytes(content)
    pyckpt.load(state, tmp_path)


def test_a_file_of_another_save(tmp_path: Path) -> None:
    """Of the same state a step later: all is as it should be, except the bytes."""
    first = save({"a": torch.zeros(2000), "o": 1}, tmp_path / "1")
    second = save({"a": torch.ones(2000), "o": 1}, tmp_path / "2")
    assert first.stat().st_size == second.stat().st_size
    second.rename(first)
    with pytest.raises(CorruptCheckpoint, match="a in") as caught:
        pyckpt.load({"a": torch.zeros(2000), "o": 0}, tmp_path / "1")
    assert caught.value.key == "a"


@pytest.mark.parametrize("content", [b"", b"\x80", b"no pickle at all", b"\x80\x04N.", b"\0" * 100])
def test_metadata_that_is_none(tmp_path: Path, content: bytes) -> None:
    save({"a": torch.ones(3)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata") as caught:
        pyckpt.load({"a": torch.zeros(3)}, tmp_path)
    assert caught.value.path == str(tmp_path / ".metadata")


def test_truncated_metadata(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": 1}, tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    body = len(content) - 20
    for end in [*range(0, body, 13), *range(body - 3, len(content))]:
        (tmp_path / ".metadata").write_bytes(content[:end])
        state = {"a": torch.zeros(3), "b": 0}
        if end == body:
            # The trailer alone is gone: what is left is what stock writes.
            pyckpt.load(state, tmp_path)
            assert state["a"].eq(1).all()
            continue
        with pytest.raises(CorruptCheckpoint):
            pyckpt.load(state, tmp_path)
        assert state["a"].eq(0).all()


# --- metadata that lies ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"payload_stride": (0, 0)},
        {"payload_stride": (-3, 1)},
        {"payload_stride": (1 << 40, 1)},
        {"payload_stride": (1, 1)},
        {"payload_stride": (4, 1)},
        {"payload_stride": (1,)},
        {"payload_stride": "ab"},
        {"xxh3": 7},
        {"xxh3": "0" * 31 + "g"},
        {"payload_offset": -1},
        {"payload_offset": 1 << 62},
        {"payload_offset": "x"},
        {"payload_length": 20},
        {"payload_length": None},
        {"crc32": 0},
        {"crc32": "x"},
        {"offset": 1 << 62},
        {"length": 1 << 62},
        {"length": 0},
        {"relative_path": "../other"},
        {"relative_path": "/etc/passwd"},
        {"relative_path": ".metadata"},
        {"relative_path": "a\0b"},
    ],
    ids=str,
)
def test_lies(tmp_path: Path, lie: dict[str, Any]) -> None:
    """An error of ours, whatever the numbers; the process lives on."""
    save({"a": torch.ones(2, 3)}, tmp_path)
    metadata = metadata_format.read(tmp_path / ".metadata")
    metadata.storage_data = dict(metadata.storage_data.items())
    (info,) = metadata.storage_data.values()
    for name, value in lie.items():
        object.__setattr__(info, name, value)
    (tmp_path / ".metadata").write_bytes(metadata_format.encode(metadata))
    with pytest.raises((PyckptError, OSError)):
        pyckpt.load({"a": torch.zeros(2, 3)}, tmp_path)


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_metadata_of_another_shape(tmp_path: Path, writer: str) -> None:
    save({"a": torch.ones(2, 3)}, tmp_path, writer)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["a"]
    tensor.size = torch.Size((3, 3))  # type: ignore[union-attr]
    tensor.chunks[0].sizes = torch.Size((3, 3))  # type: ignore[union-attr]
    (tmp_path / ".metadata").write_bytes(metadata_format.encode(metadata))
    found = "its length and its shape" if writer == "ours" else "a in .*a tensor of size"
    with pytest.raises(CorruptCheckpoint, match=found):
        pyckpt.load({"a": torch.zeros(3, 3)}, tmp_path)


# --- files that bring code ------------------------------------------------------------------------


OPEN = f"{open.__module__}.open"  # io, or _io from Python 3.12 on


class Evil:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_code_in_metadata(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    save({"a": torch.ones(3)}, tmp_path / "c")
    plain = metadata_format.read(tmp_path / "c/.metadata")
    hidden = metadata_format.read(tmp_path / "c/.metadata")
    hidden.planner_data = {"a": ("a",), "b": Evil(witness)}
    for value in (Evil(witness), hidden, {"x": [Evil(witness)]}):
        for content in (pickle.dumps(value), metadata_format.encode(value)):  # type: ignore[arg-type]
            (tmp_path / "c/.metadata").write_bytes(content)
            state = {"a": torch.zeros(3)}
            with pytest.raises(UnsafeCheckpoint, match=re.escape(OPEN)) as caught:
                pyckpt.load(state, tmp_path / "c")
            assert caught.value.refused == (OPEN,)
            assert caught.value.path == str(tmp_path / "c/.metadata")
            assert not witness.exists()
            assert state["a"].eq(0).all()
    (tmp_path / "c/.metadata").write_bytes(metadata_format.encode(plain))
    pyckpt.load(state, tmp_path / "c")
    # The same file, read by pickle, does what it says.
    pickle.loads(pickle.dumps(Evil(witness))).close()
    assert witness.exists()


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("into", [None, 1, "created"])
def test_code_in_objects(tmp_path: Path, writer: str, into: Any) -> None:
    witness = tmp_path / "witness"
    save({"a": {"evil": Evil(witness)}}, tmp_path / "c", writer)
    state = {"a": {} if into == "created" else {"evil": into}}
    with pytest.raises(UnsafeCheckpoint, match=rf"a\.evil.*{OPEN}.*allow=\[{OPEN}\]") as caught:
        pyckpt.load(state, tmp_path / "c")
    assert caught.value.key == "a.evil"
    assert caught.value.refused == (OPEN,)
    assert not witness.exists()


class Plain:
    pass


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_classes_in_objects(tmp_path: Path, writer: str) -> None:
    save({"a": Plain()}, tmp_path, writer)
    name = f"{Plain.__module__}.Plain"
    state: dict[str, Any] = {"a": None}
    with pytest.raises(UnsafeCheckpoint, match=rf"{name}.*allow=\[{name}\]"):
        pyckpt.load(state, tmp_path)
    pyckpt.load(state, tmp_path, allow=[Plain])
    assert type(state["a"]) is Plain


@pytest.mark.parametrize("writer", ["ours", "stock"])
def test_code_where_a_tensor_should_be(tmp_path: Path, writer: str) -> None:
    """The metadata says tensor, the item is a pickle with code."""
    witness = tmp_path / "witness"
    path = tmp_path / "c"
    save({"a": Evil(witness)}, path, writer)
    evil = metadata_format.read(path / ".metadata")
    save({"a": torch.ones(3)}, tmp_path / "t", "stock")
    tensor = metadata_format.read(tmp_path / "t/.metadata")
    ((index, _),) = tensor.storage_data.items()
    ((_, info),) = evil.storage_data.items()
    tensor.storage_data = {index: info}
    (path / ".metadata").write_bytes(pickle.dumps(tensor))
    state = {"a": torch.zeros(3)}
    with pytest.raises((UnsafeCheckpoint, CorruptCheckpoint, LoadError)):
        pyckpt.load(state, path)
    assert not witness.exists()
    assert state["a"].eq(0).all()
