"""``pyckpt verify``."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _cli import flip, in_terminal, parts_of, pyckpt
from _hostile import at, described, place, write

import pyckpt as package
from pyckpt.errors import CheckpointReplaced
from pyckpt.tools import verify_reads, verifying
from pyckpt.tools.contents import contents
from pyckpt.tools.values import values
from pyckpt.train.store.catalog import NOTE_KEY

OLD = sorted((Path(__file__).parent.parent / "data" / "checkpoints").iterdir())


def test_what_is_sound_is_good(made: Path) -> None:
    done = pyckpt("verify", made / "ours", made / "run", made / "stock", "--json")
    assert done.status == 0
    assert [one["good"] for one in done.json] == [True] * 5
    assert [one["by_stock"] for one in done.json] == [False] * 4 + [True]
    assert done.json[0]["metadata_checked"]
    assert not done.json[-1]["metadata_checked"]
    shown = pyckpt("verify", made / "stock").out
    assert "its items have checksums, its metadata has none" in shown


@pytest.fixture(params=["whole", "in parts"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Items are read as a whole; or in several ranges and batches, as large ones are."""
    if request.param == "in parts":
        monkeypatch.setattr(verify_reads, "WHOLE_MAX", 16)
        monkeypatch.setattr(verify_reads, "_SMALL", 1 << 10)
        monkeypatch.setattr(verify_reads, "_BATCH_BYTES", 24 << 10)
    return str(request.param)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_sound_items_are_good_however_they_are_read(made: Path, kind: str) -> None:
    found = verifying.verify(made / kind)
    assert found.good
    assert found.items == len(parts_of(made / kind))
    assert found.unchecked == []


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("key", ["model.a.weight", "model.b.weight", "model.count", "names"])
@pytest.mark.parametrize("where", ["first", "in the payload", "last"])
def test_any_bit_of_an_item_that_is_wrong_is_found(made: Path, key: str, where: str) -> None:
    part = parts_of(made / "ours")[key]
    assert part.payload_offset is not None
    assert part.payload_length is not None
    payload = part.payload_offset + part.payload_length // 2
    at = {"first": 0, "in the payload": payload, "last": part.length - 1}[where]
    flip(made / "ours", part, at)
    done = pyckpt("verify", made / "ours", "--json")
    assert done.status == 1
    (damage,) = done.json[0]["damages"]
    assert (damage["key"], damage["file"], damage["offset"]) == (key, part.file, part.offset)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("key", ["model.a.weight", "model.b.weight", "epoch"])
def test_wrong_bytes_of_stocks_items_are_found(made: Path, key: str) -> None:
    part = parts_of(made / "stock")[key]
    with open(made / "stock" / part.file, "rb") as file:
        file.seek(part.offset)
        data = file.read(part.length)
    record = b"data/0" if key.startswith("model") else b"data.pkl"
    at = data.index(record) + 200  # past the padding behind the record's name
    flip(made / "stock", part, at if key.startswith("model") else data.index(b"K\x03.") + 1)
    done = pyckpt("verify", made / "stock", "--json")
    assert done.status == 1
    assert [damage["key"] for damage in done.json[0]["damages"]] == [key]


@pytest.mark.parametrize("key", ["model.a.weight", "epoch"])
def test_stocks_archives_that_torch_cannot_read_are_found(made: Path, key: str) -> None:
    """Their records are sound; where the directory says that these are is not."""
    part = parts_of(made / "stock")[key]
    with open(made / "stock" / part.file, "rb") as file:
        file.seek(part.offset)
        data = bytearray(file.read(part.length))
    at = data.index(b"PK\1\2") + 27  # of the first record's size
    flip(made / "stock", part, at)
    data[at] ^= 4
    with pytest.raises(RuntimeError):
        torch.load(io.BytesIO(data))
    done = pyckpt("verify", made / "stock", "--json")
    assert done.status == 1
    assert [damage["key"] for damage in done.json[0]["damages"]] == [key]


def test_it_goes_on_after_the_first_damage(made: Path) -> None:
    parts = parts_of(made / "ours")
    for key in ("model.a.weight", "epoch"):
        part = parts[key]
        assert part.payload_offset is not None
        flip(made / "ours", part, part.payload_offset)
    done = pyckpt("verify", made / "ours", made / "stock")
    assert done.status == 1
    assert "DAMAGED: 2 values; 6 items are good" in done.out
    for key in ("model.a.weight", "epoch"):
        assert f"{parts[key].file} at {parts[key].offset}: {key}: CRC-32 expected" in done.out
    assert "stock: good" in done.out


def test_files_that_are_cut_or_missing_are_named_and_the_rest_is_read(made: Path) -> None:
    parts = parts_of(made / "ours")
    last = max(parts.values(), key=lambda part: part.offset)
    os.truncate(made / "ours" / last.file, last.offset + 1)
    (damaged,) = pyckpt("verify", made / "ours", "--json").json
    assert damaged["items"] == len(parts) - 1
    whole, item = damaged["damages"]
    assert (whole["key"], whole["file"]) == (None, last.file)
    assert parts[item["key"]] == last
    (made / "ours" / last.file).unlink()
    done = pyckpt("verify", made / "ours")
    assert done.status == 1
    assert f"{last.file}: it is missing" in done.out
    os.mkfifo(made / "ours" / last.file)
    assert f"{last.file}: it is no regular file" in pyckpt("verify", made / "ours").out


def test_damaged_or_lost_metadata_is_damage(made: Path) -> None:
    name = made / "ours" / ".metadata"
    data = bytearray(name.read_bytes())
    data[100] ^= 1
    name.write_bytes(data)
    done = pyckpt("verify", made / "ours")
    assert done.status == 1
    assert "CRC-32 of the metadata" in done.out
    name.unlink()
    assert pyckpt("verify", made / "ours").status == 1


def test_the_note_of_a_checkpointer_is_verified(made: Path) -> None:
    step = made / "run" / "step-00000010"
    every = values(contents(step).metadata, with_note=True)
    (part,) = (part for value in every if value.key == NOTE_KEY for part in value.parts)
    with open(step / part.file, "rb") as file:
        file.seek(part.offset)
        flip(step, part, file.read(part.length).index(b'"loss": 0.1') + 8)
    (found,) = pyckpt("verify", step, "--json").json
    assert [damage["key"] for damage in found["damages"]] == [NOTE_KEY]


@pytest.mark.parametrize("where", ["before", "behind"])
def test_what_is_around_values_is_read_only_if_an_archive_has_so_much(
    tmp_path: Path, where: str
) -> None:
    # More than the memory of a batch: it would never be read.
    around = verify_reads._BATCH_BYTES + 1
    begin = around if where == "before" else 0
    info = place(0, around + 40, crc32=1, payload_offset=begin, payload_length=40)
    write(tmp_path / "x", {"w": described((10,))}, {at("w", 0): info}, b"")
    os.truncate(tmp_path / "x" / "__0_0.distcp", around + 40)
    found = verifying.verify(tmp_path / "x")
    assert [damage.key for damage in found.damages] == ["w"]
    assert f"{around} bytes around" in found.damages[0].what
    assert found.bytes == 40


def test_a_directory_that_may_not_be_listed_is_not_left_out(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permissions do not bind root, who may run the tests.
    closed = made / "run" / "step-00000020"
    (closed / ".metadata").unlink()
    listdir = os.listdir

    def refusing(path: Any) -> Any:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    done = pyckpt("verify", made / "run")
    assert done.status == 2
    assert done.out.count(": good: ") == 2
    assert f"{closed}: " in done.err
    assert "Permission denied" in done.err


def test_a_directory_of_checkpoints_is_verified_as_a_whole(made: Path) -> None:
    (made / "run" / "notes").mkdir()
    (made / "run" / "step-00000040").mkdir()
    (made / "run" / "step-00000040" / ".saving").touch()
    second = made / "run" / "step-00000020"
    part = parts_of(second)["w"]
    assert part.payload_offset is not None
    flip(second, part, part.payload_offset)
    done = pyckpt("verify", made / "run", "--json")
    assert done.status == 1
    names = {Path(one["path"]).name: one["good"] for one in done.json}
    assert names == {"step-00000010": True, "step-00000020": False, "step-00000030": True}


def test_where_there_is_no_checkpoint_nothing_is_verified(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    done = pyckpt("verify", tmp_path / "empty", tmp_path / "gone", tmp_path / "file", made / "ours")
    assert done.status == 2
    assert "no checkpoint" in done.err
    assert "this is a file" in done.err
    assert "ours: good" in done.out


@pytest.mark.parametrize("old", OLD[:: max(1, len(OLD) - 1)], ids=lambda path: str(path.name))
def test_checkpoints_of_other_torches_are_good(old: Path) -> None:
    found = verifying.verify(old)
    assert found.good
    assert found.items
    assert found.by_stock


def test_read_errors_damage_only_what_they_hit(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No file system here fails at one place of a file, so the job of the engine is made to.
    job = verify_reads.Reader._job

    def failing(self: Any, batch: Any, places: Any) -> list[int]:
        if any(one.item.key == "model.a.bias" for one in batch):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return job(self, batch, places)

    monkeypatch.setattr(verify_reads.Reader, "_job", failing)
    found = verifying.verify(made / "ours")
    assert [(damage.key, damage.what) for damage in found.damages] == [
        ("model.a.bias", "Input/output error")
    ]
    assert found.items == len(parts_of(made / "ours")) - 1


def test_a_checkpoint_that_is_saved_over_meanwhile_is_not_called_damaged(made: Path) -> None:
    saved = False

    def progress(done: int, total: int) -> None:
        nonlocal saved
        if not saved:
            saved = True
            package.save({"x": torch.zeros(3)}, made / "ours", overwrite=True)

    with pytest.raises(CheckpointReplaced, match="saved over"):
        verifying.verify(made / "ours", progress=progress)


def test_it_is_not_removed_while_it_is_verified(made: Path) -> None:
    from pyckpt.train.store.removal import remove

    removed = []
    first = made / "run" / "step-00000010"
    verifying.verify(first, progress=lambda done, total: removed.append(remove(first)))
    assert removed
    assert not any(removed)


@pytest.mark.slow
def test_the_program_shows_a_bar_in_a_terminal_and_none_in_a_pipe(made: Path) -> None:
    shutil.rmtree(made / "run")
    status, output = in_terminal("verify", made)
    assert status == 0
    assert "\x1b[" in output  # the bar moves the cursor
    assert "\u2501" in output  # its line
    assert "stock: good" in output
    piped = subprocess.run(
        [sys.executable, "-m", "pyckpt", "verify", made], capture_output=True, text=True, check=True
    )
    assert "\x1b" not in piped.stdout + piped.stderr


def test_files_of_other_nodes_are_no_damage(nodes: tuple[Path, Path]) -> None:
    for node in nodes:
        done = pyckpt("verify", node.parent)
        assert done.status == 0
        assert "good" in done.out
        assert "1 of 2 files are on other nodes" in done.out
        (found,) = pyckpt("verify", node, "--json").json
        assert (found["files"], len(found["elsewhere"]), found["good"]) == (2, 1, True)
        assert found["items"] >= 2


def test_a_file_that_its_own_node_lacks_is_damage(nodes: tuple[Path, Path]) -> None:
    first, second = nodes
    (file,) = first.glob("*.distcp")
    file.unlink()
    done = pyckpt("verify", first)
    assert done.status == 1
    assert f"{file.name}: it is missing" in done.out
    assert "1 of 2 files are on other nodes" in done.out
    (record,) = second.glob(".part.*")
    record.write_bytes(b"{")
    done = pyckpt("verify", second)
    assert done.status == 1
    assert f"  {record.name}: " in done.out


def test_a_file_that_was_brought_from_another_node_is_read(nodes: tuple[Path, Path]) -> None:
    first, second = nodes
    (file,) = second.glob("*.distcp")
    (first / file.name).write_bytes(file.read_bytes()[:-1])
    done = pyckpt("verify", first)
    assert done.status == 1
    assert file.name in done.out
