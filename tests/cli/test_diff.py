"""``pyckpt diff``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _cli import Done, flip, parts_of, pyckpt
from _ranks import run_ranks

import pyckpt as package
from pyckpt.tools import numbers, objects
from pyckpt.train.store import pieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are compared in many pieces, so that tests of that need no large ones."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(numbers, "_PART", 37)


def compared(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], *more: object) -> Done:
    package.save(a, tmp_path / "a", overwrite=True)
    package.save(b, tmp_path / "b", overwrite=True)
    return pyckpt("diff", tmp_path / "a", tmp_path / "b", *more)


def differences(done: Done) -> dict[str, dict[str, Any]]:
    return {one["key"]: one for one in done.json["differences"]}


def test_the_same_state_is_equal_whoever_saved_it(made: Path) -> None:
    done = pyckpt("diff", made / "ours", made / "stock", "--json")
    assert (done.status, done.json["good"], done.json["equal"]) == (0, True, 8)


def test_steps_are_compared_without_their_notes(made: Path) -> None:
    first, second = made / "run" / "step-00000010", made / "run" / "step-00000020"
    done = pyckpt("diff", first, second, "--json")
    assert done.status == 1
    (one,) = done.json["differences"]
    assert (one["key"], one["different"], one["max_abs"], one["max_rel"]) == ("w", 4, 10.0, 0.5)
    assert "4 of 4" in pyckpt("diff", first, second).out


def test_keys_kinds_shapes_and_dtypes(tmp_path: Path) -> None:
    a = {"x": torch.ones(3), "y": torch.ones(3), "z": torch.ones(3), "k": 1, "o": 1, "same": 2}
    b = {"x": torch.ones(4), "y": torch.ones(3).double(), "w": 1, "k": torch.ones(1), "o": 2}
    done = compared(tmp_path, a, b | {"same": 2}, "--json")
    assert done.status == 1
    found = differences(done)
    kinds = {key: one["kind"] for key, one in found.items()}
    assert kinds == {
        "k": "kind",
        "o": "values",
        "w": "only in B",
        "x": "shape",
        "y": "dtype",
        "z": "only in A",
    }
    assert (found["y"]["different"], found["o"]["a"], found["o"]["b"]) == (0, "1", "2")
    assert done.json["equal"] == 1
    only = compared(tmp_path, a, b, "--key", "[yo]", "--metadata", "--json")
    assert [*differences(only)] == ["y"]


def test_values_are_compared_element_by_element(tmp_path: Path) -> None:
    a = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    a[:5] = torch.tensor([1.0, torch.nan, torch.nan, torch.inf, 0.0])
    b = a.clone()
    b[0], b[1], b[3], b[1999] = 1.5, 7.0, torch.inf, a[1999] + 0.25
    done = compared(tmp_path, {"x": a}, {"x": b}, "--json")
    one = differences(done)["x"]
    assert (one["count"], one["different"]) == (2000, 3)
    assert one["max_abs"] == 0.5
    gap = 0.25 / float(max(a[1999].abs(), b[1999].abs()))
    assert one["max_rel"] == pytest.approx(max(1 / 3, gap), rel=1e-6)
    assert (one["nan_a"], one["nan_b"]) == (2, 1)
    b[1] = torch.nan
    assert compared(tmp_path, {"x": a}, {"x": b}, "--atol", "0.5").status == 0
    assert compared(tmp_path, {"x": a}, {"x": b}, "--atol", "0.4").status == 1
    assert compared(tmp_path, {"x": a}, {"x": b}, "--rtol", "0.34").status in (0, 1)
    assert compared(tmp_path, {"x": a}, {"x": b}, "--atol", "-1").status == 2


def test_an_infinity_is_near_to_nothing_else(tmp_path: Path) -> None:
    done = compared(
        tmp_path,
        {"x": torch.tensor([torch.inf, 1.0])},
        {"x": torch.tensor([1.0, -torch.inf])},
        *("--rtol", "1", "--json"),
    )
    one = differences(done)["x"]
    assert (one["different"], one["max_abs"], one["max_rel"]) == (2, None, None)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_every_dtype_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    a = torch.arange(100).to(torch.float32).to(dtype)
    if dtype is torch.int64:
        a += 2**62  # neighbours that a double does not tell apart
    b = a.clone()
    b[50] = a[50] + 1 if dtype is torch.int64 else a[0]
    assert compared(tmp_path, {"x": a}, {"x": a}).status == 0
    one = differences(compared(tmp_path, {"x": a}, {"x": b}, "--json"))["x"]
    assert one["different"] == 1
    if dtype is torch.int64:
        assert one["max_abs"] == 1


def test_what_is_damaged_is_not_compared_and_the_rest_is(made: Path) -> None:
    part = parts_of(made / "ours")["model.a.bias"]
    assert part.payload_offset is not None
    flip(made / "ours", part, part.payload_offset)
    done = pyckpt("diff", made / "ours", made / "stock", "--json")
    assert done.status == 1
    (one,) = done.json["differences"]
    assert (one["key"], one["kind"]) == ("model.a.bias", "not compared")
    assert "CRC-32" in one["why"]
    assert done.json["equal"] == 7
    assert "model.a.bias: model.a.bias in" in pyckpt("diff", made / "ours", made / "stock").out


def test_equal_objects_are_not_equal_where_both_are_damaged(made: Path) -> None:
    part = parts_of(made / "ours")["names"]
    assert part.payload_offset is not None
    flip(made / "ours", part, part.length // 2)
    shutil.copytree(made / "ours", made / "again")
    done = pyckpt("diff", made / "ours", made / "again", "--json")
    assert done.status == 1
    (one,) = done.json["differences"]
    assert (one["key"], one["kind"]) == ("names", "not compared")
    assert "CRC-32" in one["why"]


def test_objects_are_compared_as_values(tmp_path: Path) -> None:
    a = {"nan": {"x": float("nan")}, "list": (1, [2, "3"]), "t": {1: torch.ones(2)}}
    b = {"nan": {"x": float("nan")}, "list": (1, [2, "4"]), "t": {1: torch.ones(2)}}
    done = compared(tmp_path, a, b, "--json")
    assert differences(done)
    assert all(key.startswith("list") for key in differences(done))


def test_objects_that_refer_to_one_list_many_times_are_compared_in_time() -> None:
    def deep() -> Any:
        value: Any = [1]
        for _ in range(60):  # two to the power of 60 leaves
            value = [value, value]
        return value

    assert objects.same(deep(), deep())
    assert not objects.same(deep(), [deep(), 2])


WHOLE = torch.arange(40_000.0).view(200, 200)


def _save(path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for dim in (0, 1):
        state = {"x": distribute_tensor(WHOLE, mesh, [Shard(dim)])}
        package.save(state, f"{path}/sharded-{dim}")


@pytest.mark.slow
def test_shards_do_not_matter(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path))
    writer = dcp.FileSystemWriter(tmp_path / "whole", sync_files=False)
    dcp.save({"x": WHOLE}, storage_writer=writer)
    for kind in ("sharded-0", "sharded-1"):
        assert pyckpt("inspect", tmp_path / kind, "--json").json["values"][0]["shards"] == 2
        done = pyckpt("diff", tmp_path / "whole", tmp_path / kind, "--json")
        assert (done.status, done.json["equal"]) == (0, 1)


def test_what_is_on_another_node_is_not_compared(nodes: tuple[Path, Path]) -> None:
    first, second = nodes
    done = pyckpt("diff", first, second)
    assert done.status == 1
    assert "model.both: A and B: it is on another node, or a part of it is" in done.out
    assert "model.one: B: it is on another node" in done.out
    assert pyckpt("diff", first, second, "--metadata").status == 0
