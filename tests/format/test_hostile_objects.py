"""Saved objects that someone made to do harm, and those that nobody did."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import textwrap
import threading
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from _hostile import MANY, at, described, load, name_of, nested, place, saved, text, write
from _sampling import slow
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import pyckpt
from pyckpt.errors import CorruptCheckpoint, PyckptError, UnsafeCheckpoint
from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def archive(description: bytes, *, compress: bool = False, **records: bytes) -> bytes:
    file = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", how) as content:
        content.writestr("archive/data.pkl", description)
        for name, data in records.items():
            content.writestr("archive/" + name.replace("_", "/"), data)
        content.writestr("archive/version", "3")
    return file.getvalue()


def object_in(directory: Path, item: bytes) -> Path:
    storage = {MetadataIndex("o"): place(0, len(item))}
    return write(directory, {"o": BytesStorageMetadata()}, storage, item, {"o": ("o",)})


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that they are in beta state, and not checked
    OUT_OF_RANGE = torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 1 << 28]]), torch.ones(3), (8,), check_invariants=False
    )
    OUT_OF_ROWS = torch.sparse_csr_tensor(
        torch.tensor([0, 1, 1 << 28]), torch.tensor([0, 1]), torch.ones(2), (2, 2),
        check_invariants=False,
    )  # fmt: skip
    ROWS = torch.eye(3).to_sparse_csr()
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
OBJECTS: dict[str, bytes] = {
    "deep keys": archive(b"\x80\x02}" + b")" + b"\x85" * MANY + b"Ns."),
    "deep lists": archive(b"\x80\x02" + b"]" * MANY + b"a" * (MANY - 1) + b"."),
    "doubled": archive(b"\x80\x02})" + b"2\x86" * 60 + b"Ns."),
    "bytes by number": archive(
        b"\x80\x02" + name_of("__builtin__", "bytearray") + b"J\0\0\0\x7f\x85R."
    ),
    "memory that nobody wrote": archive(
        b"\x80\x02" + name_of("torch", "FloatTensor") + b"J\0\0\1\0\x85R."
    ),
    "storage that nobody wrote": archive(
        b"\x80\x02" + name_of("torch.storage", "UntypedStorage") + b"J\0\0\1\0\x85\x81."
    ),
    "compressed": archive(pickle.dumps("x" * 1_000_000, 2), compress=True),
    "a program": archive(pickle.dumps(1, 2), **{"constants.pkl": b""}),
    "sparse indices out of range": saved(OUT_OF_RANGE),
    "sparse rows out of range": saved(OUT_OF_ROWS),
    "no archive": b"garbage" * 9,
    "nothing": b"",
    "a tail alone": b"PK\5\6" + bytes(18),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects(tmp_path: Path, name: str) -> None:
    object_in(tmp_path, OBJECTS[name])
    state = {"o": None}
    with pytest.raises(PyckptError, match="o: "):
        load(tmp_path, state)
    assert state["o"] is None


@pytest.mark.parametrize("into", ["created", "sparse"])
def test_sparse_tensors_that_point_elsewhere(tmp_path: Path, into: str) -> None:
    item = saved(OUT_OF_RANGE)
    write(tmp_path, {"w": described((8,))}, {at("w", 0): place(0, len(item))}, item)
    with pytest.raises(CorruptCheckpoint, match="not a readable tensor"):
        load(tmp_path, {"w": None if into == "created" else torch.zeros(8).to_sparse()})


def test_tensors_of_another_size(tmp_path: Path) -> None:
    """Not plain, so that the item is read as an object."""
    item = saved(torch.tensor([1 + 1j, 2, 3]).conj())
    size = described((4,), dtype=torch.complex64)
    write(tmp_path, {"w": size}, {at("w", 0): place(0, len(item))}, item)
    with pytest.raises(CorruptCheckpoint, match="not a tensor of its size"):
        load(tmp_path, {"w": torch.zeros(4, dtype=torch.complex64)})


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"xyz"), bytearray(), b"xyz", {1, 2}, OrderedDict(a=1), torch.Size((2, 3)), 1j,
        torch.float32, torch.device("cpu"), [[[1, "x", None, True]]], "é", 1 << 100, -0.5,
        torch.arange(3.0), torch.ones(2, 2).to_sparse(), ROWS,
        torch.nn.Parameter(torch.ones(2)), torch.ones(2, 3).t(), torch.empty(0), nested(200),
        QUANTIZED,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_objects_as_torch_reads_them(tmp_path: Path, value: Any) -> None:
    item = saved(value)
    expected = torch.load(io.BytesIO(item), weights_only=True)
    loaded = load(object_in(tmp_path, item), {"o": None})["o"]
    assert type(loaded) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert loaded.layout == expected.layout
        dense = [t.dequantize() if t.is_quantized else t.to_dense() for t in (loaded, expected)]
        assert torch.equal(*dense)
    else:
        assert loaded == expected


class Custom:
    pass


def test_allow_is_for_one_load(tmp_path: Path) -> None:
    """While it lasts, neither torch's list nor another thread's load has what it allows."""
    object_in(tmp_path, saved(Custom()))
    seen: list[Any] = []

    class Looks(Custom):
        def __init__(self) -> None:
            with pytest.raises(pickle.UnpicklingError):
                torch.load(io.BytesIO(saved(Custom())), weights_only=True)
            seen.append(torch.serialization.get_safe_globals())
            other = threading.Thread(target=in_another_thread)
            other.start()
            other.join()

        __new__ = lambda cls, *args: (cls.__init__(object.__new__(cls)), object.__new__(cls))[1]  # noqa: E731

    def in_another_thread() -> None:
        try:
            load(tmp_path, {"o": None})
        except UnsafeCheckpoint as error:
            seen.append(error.refused)

    name = f"{Custom.__module__}.{Custom.__qualname__}"
    before = torch.serialization.get_safe_globals()
    state = {"o": None}
    pyckpt.load(state, tmp_path, allow=[(Looks, name)])
    assert type(state["o"]) is Looks
    assert seen == [before, (name,)]
    with torch.serialization.safe_globals([Custom]):  # what the program allows everybody
        assert type(load(tmp_path, {"o": None})["o"]) is Custom
    with pytest.raises(UnsafeCheckpoint):
        load(tmp_path, {"o": None})


def test_items_do_not_alter_what_they_name() -> None:
    """A description that sets the defaults of the function that it names."""
    plain = saved(torch.arange(4.0))
    state = b"N}" + text("__defaults__") + b"K\x01\x85s\x86b."
    evil = archive(
        b"\x80\x02" + name_of("torch._utils", "_rebuild_tensor_v2") + state, data_0=bytes(16)
    )

    def found(item: bytes) -> Any:
        return Locator().locate(item[:HEAD_BYTES], item[-TAIL_BYTES:], len(item))

    before = found(plain)
    assert before is not None
    assert found(evil) is None
    assert found(plain) == before


@pytest.mark.parametrize("layout", [slow("coo"), "csr"])
def test_warnings_of_sparse_tensors_are_no_damage(layout: str) -> None:
    """In a process that has not seen one yet, and takes warnings for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.eye(3)
        item = saved(tensor.to_sparse() if layout == "coo" else tensor.to_sparse_csr())
    loads = """
        import io, sys
        import torch
        from pyckpt.dcp import objects
        data = io.BytesIO(sys.stdin.buffer.read())
        import warnings
        warnings.simplefilter("error")
        loaded = objects.load(data, "key", device=torch.device("cpu"))
        assert loaded.to_dense().equal(torch.eye(3))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(loads)],
        input=item,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
