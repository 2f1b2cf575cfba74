"""Checkpoints that someone made to do harm: one does not hide the others, nor do more than fail."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _hostile import NAME, at, described, load, place, saved, write
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

import pyckpt
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format import metadata as metadata_format
from pyckpt.train.store import envelopes
from pyckpt.train.store.catalog import NOTE_KEY

# --- one that is damaged does not hide the others ------------------------------------------------


NOTES: dict[str, bytes] = {
    "deep": saved("[" * 100_000),
    "a huge number": saved('{"final": false, "metrics": {"loss": 1' + "0" * 400 + "}}"),
    "digits without end": saved('{"final": false, "metrics": {"loss": ' + "1" * 10_000 + "}}"),
    "no JSON": saved("\ud800"),
    "a tensor": saved(torch.ones(3)),
    "no archive": b"garbage" * 9,
    "two megabytes": saved(" " * (2 << 20) + "{}"),
}


def older_and(directory: Path, state: Mapping[str, Any], storage: Any, data: bytes | None) -> None:
    """A good checkpoint of step 1, and one of step 2."""
    with pyckpt.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"w": torch.full((4,), 1.0)}, final=True)
    write(directory / "step-00000002", state, storage, data, {"w": ("w",)})


def the_older_is_restored(directory: Path) -> None:
    state = {"w": torch.zeros(4)}
    with pyckpt.Checkpointer(directory) as checkpointer:
        assert [entry.state for entry in checkpointer.inspect()] == ["valid", "damaged"]
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 1
        assert checkpointer.restore(state) == 1
    assert bool(state["w"].eq(1).all())


@pytest.mark.parametrize("note", NOTES)
def test_notes_that_are_none(tmp_path: Path, note: str) -> None:
    content, item = NOTES[note], saved(torch.zeros(4))
    older_and(
        tmp_path,
        {NOTE_KEY: BytesStorageMetadata(), "w": described((4,))},
        {
            MetadataIndex(NOTE_KEY): place(0, len(content)),
            at("w", 0): place(len(content), len(item)),
        },
        content + item,
    )
    the_older_is_restored(tmp_path)


ITEM = saved(torch.full((4,), 2.0))
OURS: dict[str, Any] = {"crc32": 0, "payload_offset": 704, "payload_length": 16}
CONTRADICTIONS: dict[str, tuple[TensorStorageMetadata, Any]] = {
    "stored nowhere": (described((4,)), {}),
    "stored as something else": (described((4,)), {at("other", 0): place(0, len(ITEM))}),
    "nothing is stored": (described((4,)), None),
    "an object, and stored as one": (described((4,)), {MetadataIndex("w"): place(0, len(ITEM))}),
    "2^60 elements": (described((1 << 60,)), {at("w", 0): place(0, len(ITEM))}),
    "2^80 elements": (described((1 << 40, 1 << 40)), {at("w", 0, 0): place(0, len(ITEM))}),
    "none, in a box of 2^62": (described((0, 1 << 62, 4)), {at("w", 0, 0, 0): place(0, 1)}),
    "strides of another tensor": (
        described((4,)), {at("w", 0): place(0, len(ITEM), **OURS, payload_stride=(1, 2))}
    ),
    "strides below zero": (
        described((4,)), {at("w", 0): place(0, len(ITEM), **OURS, payload_stride=(-1,))}
    ),
    "a payload before its item": (
        described((4,)), {at("w", 0): place(0, len(ITEM), **{**OURS, "payload_offset": -5})}
    ),
    "a payload behind its item": (
        described((4,)), {at("w", 0): place(0, len(ITEM), **{**OURS, "payload_offset": 1 << 40})}
    ),
    "a payload of another length": (
        described((4,)), {at("w", 0): place(0, len(ITEM), **{**OURS, "payload_length": 12})}
    ),
    "no checksum": (
        described((4,)),
        {at("w", 0): place(0, len(ITEM), payload_offset=704, payload_length=16)},
    ),
    "a fraction": (described((4,)), {at("w", 0): place(0.5, len(ITEM))}),  # type: ignore[arg-type]
    "behind any file": (described((4,)), {at("w", 0): place(1 << 70, len(ITEM))}),
    "longer than any file": (described((4,)), {at("w", 0): place(1, (1 << 63) - 1)}),
    "transformed by a number": (
        described((4,)), {at("w", 0): place(0, len(ITEM), transform_descriptors=3)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_contradictions(tmp_path: Path, contradiction: str) -> None:
    item, storage = CONTRADICTIONS[contradiction]
    older_and(tmp_path, {"w": item}, storage, ITEM)
    the_older_is_restored(tmp_path)


def test_a_rank_of_a_hundred_billion(tmp_path: Path) -> None:
    key = "rng.rank-00000-of-99999999999"
    item = saved(("pyckpt.value", {}))
    write(
        tmp_path / "step-00000001",
        {key: BytesStorageMetadata()},
        {MetadataIndex(key): place(0, len(item))},
        item,
        {key: tuple(key.split(".", 1))},
    )
    tracemalloc.start()
    try:
        impossible = pytest.raises(CorruptCheckpoint, match="99999999999 ranks")
        with pyckpt.Checkpointer(tmp_path) as checkpointer, impossible:
            checkpointer.restore({"rng": pyckpt.RngState()})
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# --- what is no file -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("which", [".metadata", NAME])
@pytest.mark.parametrize("what", ["pipe", "device", "directory"])
def test_what_is_no_file(tmp_path: Path, which: str, what: str) -> None:
    """In a process of its own: one that waits for a writer would wait for ever."""
    directory = tmp_path / "step-00000001"
    write(directory, {"w": BytesStorageMetadata()}, {MetadataIndex("w"): place(0, 0)})
    (directory / which).unlink()
    if what == "pipe":
        os.mkfifo(directory / which)
    elif what == "device":
        (directory / which).symlink_to("/dev/zero")
    else:
        (directory / which).mkdir()
    code = (
        "import sys, pyckpt\n"
        "from pyckpt.errors import CorruptCheckpoint\n"
        "for what in (lambda: pyckpt.load({'w': None}, sys.argv[1]),\n"
        "             lambda: pyckpt.Checkpointer(sys.argv[2]).restore({'w': None})):\n"
        "    try: what()\n"
        "    except (OSError, CorruptCheckpoint) as error: print(type(error).__name__)\n"
    )
    run = [sys.executable, "-c", code, str(directory), str(tmp_path)]
    done = subprocess.run(run, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2, done.stderr


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    """Nor is a name taken that stands there already."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    directory = tmp_path / "step-00000001"
    directory.mkdir()
    (directory / ".metadata.tmp").symlink_to(victim)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}, final=True)
    assert victim.read_text() == "precious"
    assert (directory / ".metadata").is_file()
    assert not (directory / ".metadata").is_symlink()
    # What a kill has left of a metadata file goes with the next save.
    assert {path.name for path in directory.iterdir() if path.suffix != ".distcp"} == {".metadata"}


def test_remains_of_metadata_are_swept(tmp_path: Path) -> None:
    left = [".metadata.tmp", f".metadata.{'0' * 32}.tmp"]
    others = [f"__3.metadata.{'0' * 32}.tmp", ".metadata.mine.tmp"]
    for name in (*left, *others):
        (tmp_path / name).touch()
    dcp.save({"w": torch.ones(3)}, storage_writer=pyckpt.DirectWriter(tmp_path), no_dist=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names.isdisjoint(left)
    assert names.issuperset(others)


@pytest.mark.parametrize("position", [-1, 625, 1 << 30])
def test_numpys_position(tmp_path: Path, position: int) -> None:
    numpy = pytest.importorskip("numpy")
    rng = pyckpt.RngState()
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"rng": rng}, final=True)
    before = numpy.random.get_state()

    def wrong(self: Any, rank: Any) -> Any:
        state = own(self, rank)
        name, keys, _, *rest = state["numpy"]
        return {**state, "numpy": (name, keys, position, *rest)}

    own = pyckpt.RngState._own
    with pytest.MonkeyPatch.context() as patch, pyckpt.Checkpointer(tmp_path) as checkpointer:
        patch.setattr(pyckpt.RngState, "_own", wrong)
        checkpointer.save(2, {"rng": rng}, final=True)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"rng": rng}) == 1
    assert numpy.random.get_state()[2] == before[2]


def test_stocks_reader_is_asked_for(tmp_path: Path) -> None:
    """It unpickles the metadata as it is; those that have a way of their own are taken."""
    write(tmp_path, {"w": described((4,))}, {at("w", 0): place(0, len(ITEM))}, ITEM)
    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(witness), "w")

    class Own(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            return metadata_format.read(Path(self.path) / ".metadata")

    state = {"w": torch.zeros(4)}
    pyckpt.load(state, reader=Own(tmp_path))
    pyckpt.load(state, reader=dcp.FileSystemReader(tmp_path), trust_metadata=True)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="trust_metadata=True"):
        pyckpt.load(state, reader=dcp.FileSystemReader(tmp_path))
    assert not witness.exists()


# --- what is printed -----------------------------------------------------------------------------


def test_keys_are_printed_escaped(tmp_path: Path) -> None:
    key = "w\x1b]0;owned\x07\nERROR root: a line\u202e"
    item = saved(torch.ones(1))
    write(tmp_path, {key: described((1,))}, {at(key, 0): place(0, len(item))}, item, {key: (key,)})
    report = pyckpt.load({"q": 1}, tmp_path, missing="keep")
    assert report.left_out == [key]
    with pytest.raises(PyckptError) as caught:
        load(tmp_path, {key: torch.zeros(2)})
    for shown in (str(report), str(caught.value)):
        assert r"w\x1b]0;owned\x07\nERROR root: a line\u202e" in shown
        assert all(line.isprintable() for line in shown.splitlines())


# --- envelopes -----------------------------------------------------------------------------------


def test_every_bit_of_an_envelope(tmp_path: Path) -> None:
    """Loading does not mind; verifying says that others will."""
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(3.0), "v": torch.ones(2, 3).t()}, final=True)
    directory = tmp_path / "step-00000001"
    metadata = metadata_format.read(directory / ".metadata")
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "w"]
    payload = range(info.payload_offset, info.payload_offset + info.payload_length)
    (data,) = directory.glob("*.distcp")
    content = data.read_bytes()
    envelopes.verify_envelopes(directory, metadata)
    with data.open("r+b", buffering=0) as file:
        for i in set(range(info.length)) - {*payload}:
            place_of = info.offset + i
            os.pwrite(file.fileno(), bytes([content[place_of] ^ 1 << i % 8]), place_of)
            with pytest.raises(CorruptCheckpoint, match=r"w in .*bytes around"):
                envelopes.verify_envelopes(directory, metadata)
            os.pwrite(file.fileno(), content[place_of : place_of + 1], place_of)
        os.pwrite(file.fileno(), b"\0", info.offset)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.checkpoints(verify=True) == []
        assert checkpointer.restore({"w": torch.zeros(3)}) == 1


def test_envelopes_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which this one would write otherwise: they must hold the tensor, and be whole."""
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.arange(3.0)}, final=True)
    directory = tmp_path / "step-00000001"
    metadata = metadata_format.read(directory / ".metadata")
    monkeypatch.setattr(envelopes, "envelope_of", lambda *_: None)
    envelopes.verify_envelopes(directory, metadata)
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "w"]
    (data,) = directory.glob("*.distcp")
    content = data.read_bytes()
    for what in (b"FloatStorage", b"little", b"PK\1\2"):
        where = content.index(what, info.offset)
        damaged = bytearray(content)
        damaged[where] ^= 1
        data.write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint, match="bytes around"):
            envelopes.verify_envelopes(directory, metadata)
