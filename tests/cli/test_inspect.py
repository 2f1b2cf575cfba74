"""``pyckpt inspect``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _cli import flip, parts_of, pyckpt
from _hostile import described, place, saved, write
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import pyckpt as package
from pyckpt.format import metadata as metadata_format
from pyckpt.tools import numbers, values
from pyckpt.train.store import pieces


def shown(checkpoint: Path, *more: object) -> dict[str, Any]:
    done = pyckpt("inspect", checkpoint, *more, "--json")
    assert done.status == 0
    return {value["name"]: value for value in done.json["values"]}


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_keys_have_shapes_dtypes_shards_bytes_and_files(made: Path, kind: str) -> None:
    (file,) = (path.name for path in (made / kind).glob("*.distcp"))
    found = shown(made / kind)
    weight = found["model.a.weight"]
    assert weight == {
        "name": "model.a.weight",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [30, 7],
        "shards": 1,
        "bytes": 840,
        "files": [file],
    }
    assert found["model.half"]["dtype"] == "bfloat16"
    assert found["epoch"]["kind"] == "object"
    by = pyckpt("inspect", made / kind, "--json").json["saved"]["by"]
    assert by == {"ours": "pyckpt", "stock": "stock PyTorch"}[kind]


def test_it_tells_who_saved_a_step(made: Path) -> None:
    saved_by = pyckpt("inspect", made / "run" / "step-00000020", "--json").json["saved"]
    assert (saved_by["step"], saved_by["final"], saved_by["metrics"]) == (20, True, {"loss": 0.05})
    assert "20 (final)" in pyckpt("inspect", made / "run" / "step-00000020").out


def test_values_are_chosen_by_name_by_prefix_and_by_pattern(made: Path) -> None:
    ours = made / "ours"
    assert [*shown(ours, "model.count")] == ["model.count"]
    assert [*shown(ours, "model.a")] == ["model.a.weight", "model.a.bias"]
    assert [*shown(ours, "*.weight")] == ["model.a.weight", "model.b.weight"]
    assert [*shown(ours, "--top", 1)] == ["model.b.weight"]
    part = shown(ours, "model.b.weight")["model.b.weight"]["parts"][0]
    assert (part["sizes"], part["payload_length"]) == ([300, 300], 360_000)
    missing = pyckpt("inspect", ours, "model.a.wieght")
    assert missing.status == 1
    assert "model.a.weight" in missing.err


def test_the_tree_is_cut_where_it_is_told_to(made: Path) -> None:
    lines = pyckpt("inspect", made / "ours", "--depth", 1).out.splitlines()
    (model,) = (line for line in lines if line.startswith("model"))
    assert "6 values" in model
    assert not any("weight" in line for line in lines)
    assert any("weight" in line for line in pyckpt("inspect", made / "ours").out.splitlines())


def test_a_large_tree_is_cut_by_itself(tmp_path: Path) -> None:
    state = {f"layers.{i}": {"weight": torch.zeros(1), "bias": i} for i in range(60)}
    package.save({"model": state, "extra": 1}, tmp_path / "large")
    out = pyckpt("inspect", tmp_path / "large").out
    assert "121 values; --depth" in out
    assert len(out.splitlines()) < 120
    out = pyckpt("inspect", tmp_path / "large", "--depth", 9).out
    assert len(re.findall("weight", out)) == 60


def test_an_object_is_shown_in_a_few_words(made: Path) -> None:
    assert "\n3\n" in pyckpt("inspect", made / "ours", "epoch").out


# --- statistics -----------------------------------------------------------------------------------


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is read in many pieces, so that tests of that need no large ones."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(numbers, "_PART", 37)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_statistics_are_those_of_the_elements(tmp_path: Path, kind: str) -> None:
    generator = torch.Generator().manual_seed(2)
    plain = torch.randn(40, 30, generator=generator)
    state = {
        "plain": plain,
        "turned": plain.t() + 1e6,
        "double": plain.double() * 1e200,
        "half": plain.half(),
        "eight": plain.to(torch.float8_e4m3fn),
        "whole": torch.randint(-(2**62), 2**62, (500,), generator=generator),
        "flags": plain > 0,
        "imaginary": torch.complex(plain, plain),
        "none": torch.zeros(0, 2),
    }
    if kind == "ours":
        package.save(state, tmp_path / kind)
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / kind, sync_files=False))
    found = shown(tmp_path / kind, "--stats")
    for name, tensor in state.items():
        numbers = found[name]["statistics"]
        values = (tensor.cdouble().abs() if tensor.is_complex() else tensor).double()
        assert numbers["count"] == tensor.numel()
        assert (numbers["nan"], numbers["inf"]) == (0, 0)
        if name == "none":
            assert numbers["mean"] is None
            continue
        if name == "whole":  # more than a double holds
            assert numbers["min"] == int(tensor.min())
        else:
            assert numbers["min"] == float(values.min())
            assert numbers["max"] == float(values.max())
        assert numbers["mean"] == pytest.approx(float(values.mean()))
        if name != "double":  # its squares are more than a double holds
            assert numbers["std"] == pytest.approx(float(values.std(correction=0)))


@pytest.mark.usefixtures("small_pieces")
def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    tensor = torch.arange(1000.0)
    tensor[::10], tensor[5], tensor[15] = torch.nan, torch.inf, -torch.inf
    package.save({"x": tensor, "y": torch.full((3,), torch.nan)}, tmp_path / "x")
    found = shown(tmp_path / "x", "--stats")
    numbers = found["x"]["statistics"]
    assert (numbers["nan"], numbers["inf"], numbers["min"], numbers["max"]) == (100, 2, 1, 999)
    assert numbers["mean"] == pytest.approx(float(tensor[tensor.isfinite()].mean()))
    assert found["y"]["statistics"]["min"] is None
    assert re.search(r"\bx +float32 .* 100 +2", pyckpt("inspect", tmp_path / "x", "--stats").out)


def test_a_damaged_tensor_has_none_and_the_others_have(made: Path) -> None:
    parts = shown(made / "ours", "model.a.bias")["model.a.bias"]["parts"]
    with open(made / "ours" / parts[0]["file"], "r+b") as file:
        file.seek(parts[0]["offset"] + parts[0]["payload_offset"])
        file.write(b"\xff")
    done = pyckpt("inspect", made / "ours", "--stats", "--json")
    assert done.status == 1
    found = {value["name"]: value for value in done.json["values"]}
    assert "CRC-32" in found["model.a.bias"]["no_statistics"]
    assert [name for name, value in found.items() if "no_statistics" in value] == ["model.a.bias"]
    assert "statistics" in found["model.b.weight"]


# --- what nobody would save -----------------------------------------------------------------------


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_no_code_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    import pickle

    mark = tmp_path / "mark"
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    for command in (["inspect"], ["verify"], ["diff", tmp_path / "a"]):
        done = pyckpt(*command, tmp_path / "a")
        assert done.status in (1, 2)
        assert "mkdir" in done.err + done.out
    data = saved(Evil(mark))
    state = {"evil": BytesStorageMetadata()}
    write(tmp_path / "b", state, {MetadataIndex("evil"): place(0, len(data))}, data)
    done = pyckpt("inspect", tmp_path / "b", "evil")
    assert done.status == 0
    assert "mkdir, which is not loaded" in done.out
    other = saved([Evil(mark)])
    write(tmp_path / "c", state, {MetadataIndex("evil"): place(0, len(other))}, other)
    assert pyckpt("diff", tmp_path / "b", tmp_path / "c").status == 1
    assert not mark.exists()


def test_keys_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    package.save({"\x1b[2J": torch.zeros(2), "ok": "\x1b[2J"}, tmp_path / "x")
    for more in (["--stats"], ["--top", "2"], [], ["ok"]):
        out = pyckpt("inspect", tmp_path / "x", *more).out
        assert "\x1b" not in out
        assert "\\x1b[2J" in out


def test_what_is_no_checkpoint_is_said(made: Path, tmp_path: Path) -> None:
    for path, why in [
        (made, "holds some, such as"),
        (tmp_path / "gone", "No such file"),
        (made / "run" / ".pyckpt", "no checkpoint"),
        (made / "ours" / ".metadata", "this is a file"),
    ]:
        done = pyckpt("inspect", path)
        assert done.status == 2
        assert why in done.err


def test_damage_is_a_bad_answer(made: Path) -> None:
    ours = made / "ours"
    flip(ours, part := parts_of(ours)["names"], part.length // 2)
    done = pyckpt("inspect", ours, "names")
    assert done.status == 1
    assert "CRC-32 expected" in done.err
    (ours / ".metadata").unlink()
    for command in (["inspect", ours], ["diff", ours, made / "stock"]):
        done = pyckpt(*command)
        assert done.status == 1
        assert "bring it back" in done.err


def test_metadata_that_claims_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    key = MetadataIndex("x", torch.Size([0]), 0)
    huge = {"x": described((1 << 50,))}
    write(tmp_path / "huge", huge, {key: place(0, 8)}, b"12345678")
    assert pyckpt("inspect", tmp_path / "huge", "--stats").status in (1, 2)


def test_each_ranks_own_checkpoint_is_chosen_by_rank(tmp_path: Path) -> None:
    writer = package.DirectWriter(tmp_path / "own")
    dcp.save({"x": torch.ones(3)}, storage_writer=writer)
    (tmp_path / "own" / ".metadata").rename(tmp_path / "own" / "__0.metadata")
    done = pyckpt("inspect", tmp_path / "own")
    assert done.status == 2
    assert "--rank" in done.err
    assert [*shown(tmp_path / "own", "--rank", 0)] == ["x"]


@pytest.mark.parametrize("rows", [4, 400_000])
@pytest.mark.parametrize("is_stride", [False, True])
def test_a_ranks_part_of_a_tensor_is_told_as_such(
    rows: int, is_stride: bool, tmp_path: Path
) -> None:
    """What it has is read, in runs or box by box, and of what it has not nothing is said."""
    own = tmp_path / "own"
    part = torch.arange(rows * 3.0).view(rows, 3)
    writer = package.DirectWriter(own)
    dcp.save({"w": part.t().contiguous().t() if is_stride else part}, storage_writer=writer)
    metadata = FileSystemReader(own).read_metadata()
    metadata.state_dict_metadata["w"].size = torch.Size([rows, 7])
    (own / ".metadata").unlink()
    (own / "__1.metadata").write_bytes(metadata_format.encode(metadata))
    one = shown(own, "--rank", 1, "--stats")["w"]
    assert (one["elements_here"], one["bytes"], one["shape"]) == (3 * rows, 12 * rows, [rows, 7])
    found = one["statistics"]
    assert (found["count"], found["min"], found["max"]) == (3 * rows, 0.0, 3.0 * rows - 1)
    shape = f"{3 * rows} of {7 * rows} elements"
    out = pyckpt("inspect", own, "--rank", 1).out
    assert shape in out
    assert "what rank 1 saved for itself; it has 1 tensor in part only" in out
    assert f"of {shape}" in pyckpt("inspect", own, "--rank", 1, "--stats").out
    assert "own (rank 1): good: 1 item" in pyckpt("verify", own).out


def test_columns_and_objects_of_metadata_say_the_same(made: Path) -> None:
    metadata = metadata_format.read(made / "ours" / ".metadata")
    by_columns = [*values.values(metadata)]
    assert by_columns == [values.value(metadata, key) for key, *_ in by_columns]


def test_what_is_on_another_node_is_told_as_such(nodes: tuple[Path, Path]) -> None:
    first, second = nodes
    done = pyckpt("inspect", second, "--stats")
    assert done.status == 0
    assert done.out.count("on another node") == 2
    assert "1 of 2 files are on other nodes" in done.out
    for node in nodes:  # one of which does not have the note
        assert "loss=0.5" in pyckpt("inspect", node).out
    found = pyckpt("inspect", first, "--stats", "--json")
    numbers = {one["name"]: one.get("statistics") for one in found.json["values"]}
    assert numbers["model.one"]["mean"] == 5.0
    assert numbers["model.both"] is None
    assert len(found.json["elsewhere"]) == 1
    shown_by = [pyckpt("inspect", node, "words") for node in nodes]
    assert [done.status for done in shown_by] == [0, 0]
    assert sorted("it is on another node" in done.out for done in shown_by) == [False, True]
