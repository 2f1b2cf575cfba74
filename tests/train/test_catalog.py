"""What is a checkpoint, and why the rest is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import metadata as metadata_format
from pyckpt.train.store import pieces
from pyckpt.train.store.catalog import NOTE_KEY, Catalog, directory_name, note
from pyckpt.train.store.pieces import PIECE_BYTES, verify


def catalog_of(directory: Path) -> Catalog:
    return Catalog(directory, verify=verify)


def state(step: int) -> dict[str, Any]:
    return {
        "large": torch.arange(200_000, dtype=torch.float32),
        "small": torch.full((3,), step),
        "empty": torch.empty(0, 4),
        "object": {"step": step},
    }


def write(directory: Path, step: int, *, stock: bool = False, **extra: Any) -> Path:
    path = directory / directory_name(step)
    content = {**state(step), **extra}
    if stock:
        dcp.save(content, checkpoint_id=path)
    else:
        dcp.save(content, storage_writer=pyckpt.DirectWriter(path, sync_files=False))
    return path


def data_file(path: Path) -> Path:
    (file,) = path.glob("*.distcp")
    return file


def test_names() -> None:
    assert directory_name(100) == "step-00000100"
    assert directory_name(10**9) == "step-1000000000"


def test_nothing_there(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path / "absent")
    assert catalog.steps() == []
    assert catalog.entries() == []
    assert catalog.newest() is None


def test_valid_ones_newest_first(tmp_path: Path) -> None:
    for step in (5, 100, 20, 123_456_789):
        write(tmp_path, step)
    catalog = catalog_of(tmp_path)
    assert catalog.steps() == [123_456_789, 100, 20, 5]
    newest = catalog.newest()
    assert newest is not None
    assert newest.step == 123_456_789
    assert newest.bytes == data_file(newest.path).stat().st_size
    assert [c.step for c in catalog.newest_first(limit=99)] == [20, 5]
    assert [entry.state for entry in catalog.entries(verify=True)] == ["valid"] * 4


def test_what_a_checkpoint_says_of_itself(tmp_path: Path) -> None:
    write(tmp_path, 7, **{NOTE_KEY: note(7, final=True, metrics={"loss": 0.25})})
    newest = catalog_of(tmp_path).newest()
    assert newest is not None
    assert newest.final
    assert newest.metrics == {"loss": 0.25}


def test_what_stock_wrote_is_a_checkpoint_too(tmp_path: Path) -> None:
    path = write(tmp_path, 7, stock=True)
    entry = catalog_of(tmp_path).examine(7, verify=True)
    assert entry.state == "valid"
    assert entry.checkpoint is not None
    assert (entry.checkpoint.final, entry.checkpoint.metrics) == (False, {})
    damage(path, data_file(path).stat().st_size // 2)
    assert catalog_of(tmp_path).examine(7).state == "valid"
    assert catalog_of(tmp_path).examine(7, verify=True).state == "damaged"


def damage(path: Path, offset: int) -> None:
    with data_file(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def unfinished(path: Path) -> None:
    (path / ".metadata").unlink()
    (path / ".saving").touch()


def copied_by_a_glob(path: Path) -> None:
    (path / ".metadata").unlink()


def emptied(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def half_removed(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.removed")
    data_file(path).unlink()


def unreadable(path: Path) -> None:
    (path / ".metadata").write_bytes(b"\x80\x02no pickle")


def flipped(path: Path) -> None:
    data = bytearray((path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (path / ".metadata").write_bytes(data)


def without_data(path: Path) -> None:
    data_file(path).unlink()


def cut_short(path: Path) -> None:
    os.truncate(data_file(path), data_file(path).stat().st_size - 1)


def grown(path: Path) -> None:
    with data_file(path).open("ab") as file:
        file.write(b"x")


def something_else(path: Path) -> None:
    emptied(path)
    (path / "model.pt").touch()


def of_each_rank(path: Path) -> None:
    (path / ".metadata").rename(path / "__0.metadata")


@pytest.mark.parametrize(
    ("change", "becomes", "reason"),
    [
        (unfinished, "unfinished", "did not get to the commit"),
        (copied_by_a_glob, "damaged", "'cp directory/*' leaves that out"),
        (emptied, "unfinished", "did not get to the commit"),
        (half_removed, "removed", "was interrupted"),
        (unreadable, "damaged", "not readable metadata"),
        (flipped, "damaged", "CRC-32 of the metadata"),
        (without_data, "damaged", "No such file"),
        (cut_short, "damaged", "bytes, and"),
        (grown, "damaged", "bytes, and"),
        (something_else, "foreign", "holds model.pt"),
        (of_each_rank, "foreign", "holds __0.metadata"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_the_matter(change: Any, becomes: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    catalog = catalog_of(tmp_path)
    path = write(tmp_path, 2)
    assert catalog.examine(2).state == "valid"  # and remembered, which must not hide the change
    change(path)
    entry = catalog.examine(2)
    assert entry.state == becomes
    assert reason in entry.reason
    assert entry.checkpoint is None
    assert str(entry) == f"step-00000002: {becomes} ({entry.reason})"
    newest = catalog.newest()
    assert newest is not None
    assert newest.step == 1


def test_a_note_that_is_none_of_ours(tmp_path: Path) -> None:
    write(tmp_path, 1, **{NOTE_KEY: "[]"})
    entry = catalog_of(tmp_path).examine(1)
    assert entry.state == "damaged"
    assert NOTE_KEY in entry.reason


def test_other_names_are_foreign(tmp_path: Path) -> None:
    write(tmp_path, 100)
    for name in ("step-100", "step-000000100", "step-00000101.old", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000200").touch()  # a file
    entries = catalog_of(tmp_path).entries()
    assert [(e.step, e.state) for e in entries] == [(100, "valid")] + [(None, "foreign")] * 5


def test_what_cannot_be_looked_at_does_not_hide_the_rest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / directory_name(2)).symlink_to(directory_name(2))
    catalog = catalog_of(tmp_path)
    assert [(e.step, e.state) for e in catalog.entries()] == [(1, "valid"), (2, "damaged")]
    newest = catalog.newest()
    assert newest is not None
    assert newest.step == 1


def test_damage_is_found_by_checksum_wherever_it_is(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    metadata = metadata_format.read(path / ".metadata")
    for index, info in metadata.storage_data.items():
        extra = vars(info)
        if not extra["payload_length"]:
            continue
        offset = info.offset + extra["payload_offset"] + extra["payload_length"] - 1
        damage(path, offset)
        entry = catalog_of(tmp_path).examine(1, verify=True)
        assert entry.state == "damaged"
        assert index.fqn in entry.reason
        damage(path, offset)
    assert catalog_of(tmp_path).examine(1, verify=True).state == "valid"


def test_checksums_of_payloads_larger_than_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64 << 10)
    path = write(tmp_path, 1)
    metadata = metadata_format.read(path / ".metadata")
    verify(path, metadata)
    (info,) = [i for index, i in metadata.storage_data.items() if index.fqn == "large"]
    for at in (0, 70_000, 799_999):
        damage(path, info.offset + vars(info)["payload_offset"] + at)
        with pytest.raises(CorruptCheckpoint, match="large"):
            verify(path, metadata)
        damage(path, info.offset + vars(info)["payload_offset"] + at)
    verify(path, metadata)


@pytest.mark.parametrize("stock", [False, True])
def test_shares_of_a_checkpoint(stock: bool, tmp_path: Path) -> None:
    path = write(tmp_path, 1, stock=stock)
    metadata = metadata_format.read(path / ".metadata")
    assert not any(verify(path, metadata, share=(i, 3)) for i in range(3))
    damage(path, data_file(path).stat().st_size // 2)
    damaged = []
    for i in range(3):
        try:
            verify(path, metadata, share=(i, 3))
        except CorruptCheckpoint:
            damaged.append(i)
    assert len(damaged) == 1


def test_a_piece_is_a_multiple_of_any_element() -> None:
    assert PIECE_BYTES % 64 == 0


def test_newest_of_many_decodes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = write(tmp_path, 1000)
    for step in range(1, 1000):
        (tmp_path / directory_name(step)).symlink_to(newest)
    decoded: list[Path] = []
    decode = metadata_format.decode
    monkeypatch.setattr(
        metadata_format,
        "decode",
        lambda data, path: (decoded.append(path), decode(data, path=path))[1],
    )
    catalog = catalog_of(tmp_path)
    for _ in range(2):
        found = catalog.newest()
        assert found is not None
        assert found.step == 1000
    assert decoded == [newest / ".metadata"]


def test_a_flipped_bit_in_what_a_checkpoint_says_of_itself_is_damage(tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, {"w": torch.ones(3)}, metrics={"loss": 1.0}).wait()
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b'"loss": 1.0', b'"loss": 9.0'))
    (entry,) = pyckpt.Checkpointer(tmp_path).inspect()
    assert entry.state == "damaged"
    assert "CRC-32" in entry.reason
