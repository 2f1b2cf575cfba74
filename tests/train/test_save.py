"""``pyckpt.save``: what it saves comes back, and it replaces nothing unless it is told to."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pyckpt
from pyckpt.errors import CorruptCheckpoint, SaveError


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    else:
        assert found == expected


VALUES: dict[str, Any] = {
    "number": 3,
    "none": None,
    "empty": {},
    "no_entries": [],
    "array": np.arange(4, dtype=np.int16),
    "set": {1, 2},
    "tuple": (torch.ones(2), "x"),
    "by_number": {1: torch.ones(3), "b": (1, 2)},
    "by_pair": {(1, 2): 3},
    "dicts": [{"x": 1}, {"y": torch.zeros(2)}],
}


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    pyckpt.save(VALUES, tmp_path / "new" / "checkpoint")
    assert_same(pyckpt.load(tmp_path / "new" / "checkpoint"), VALUES)


def test_objects_are_asked_for_their_state_and_handed_it_back(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    pyckpt.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, tmp_path)

    other_model, other = trained(1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other, 7)
    state = {"model": other_model, "optimizer": other, "scheduler": other_scheduler}
    pyckpt.load(state, tmp_path)
    assert_same(other_model.state_dict(), model.state_dict())
    assert_same(other.state_dict(), optimizer.state_dict())
    assert_same(other_scheduler.state_dict(), scheduler.state_dict())

    fresh = torch.optim.Adam(nn.Linear(3, 2).parameters())  # which has no state yet
    pyckpt.load({"optimizer": fresh}, tmp_path)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_stock_loads_it(tmp_path: Path) -> None:
    pyckpt.save({"x": torch.arange(9.0), "step": 3}, tmp_path)
    state = {"x": torch.zeros(9), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path)
    assert_same(state, {"x": torch.arange(9.0), "step": 3})


def test_statistics(tmp_path: Path) -> None:
    statistics = pyckpt.save({"x": torch.zeros(1000)}, tmp_path, direct="off")
    assert statistics.items == 1
    assert statistics.bytes_written >= 4000
    assert not statistics.direct


def test_an_engine_of_its_own_is_used(tmp_path: Path) -> None:
    with pyckpt.Engine(io_threads=1) as engine:
        pyckpt.save({"x": torch.zeros(1000)}, tmp_path, engine=engine)
        assert torch.equal(pyckpt.load(tmp_path, engine=engine)["x"], torch.zeros(1000))
        pyckpt.to_torch(tmp_path, tmp_path / "out.pt", engine=engine)
    closed = pyckpt.errors.EngineClosed
    with pytest.raises(closed):
        pyckpt.save({"x": torch.zeros(1000)}, tmp_path / "other", engine=engine)
    with pytest.raises(closed):
        pyckpt.load(tmp_path, engine=engine)
    with pytest.raises(closed):
        pyckpt.load({"x": torch.zeros(1000)}, tmp_path, engine=engine)
    with pytest.raises(closed):
        pyckpt.to_torch(tmp_path, tmp_path / "out.pt", engine=engine)
    with pytest.raises(closed):
        pyckpt.export(tmp_path, tmp_path / "model", key=None, engine=engine)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_direct_is_passed_on(direct: Any, tmp_path: Path) -> None:
    state = {"x": torch.arange(5.0)}
    pyckpt.save(state, tmp_path, direct=direct)
    assert_same(pyckpt.load(tmp_path, direct=direct), state)
    for call in (
        lambda: pyckpt.save(state, tmp_path, direct="sometimes"),  # type: ignore[arg-type]
        lambda: pyckpt.load(tmp_path, direct="sometimes"),  # type: ignore[call-overload]
        lambda: pyckpt.to_torch(tmp_path, tmp_path / "x.pt", direct="sometimes"),  # type: ignore[arg-type]
        lambda: pyckpt.export(tmp_path, tmp_path, key=None, direct="sometimes"),  # type: ignore[arg-type]
        lambda: pyckpt.Checkpointer(tmp_path, direct="sometimes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="sometimes"):
            call()


# --- what is there already ------------------------------------------------------------------------


def test_a_checkpoint_is_replaced_only_when_asked(tmp_path: Path) -> None:
    pyckpt.save({"x": torch.zeros(9)}, tmp_path)
    files = sorted(os.listdir(tmp_path))
    with pytest.raises(FileExistsError, match="overwrite"):
        pyckpt.save({"x": torch.ones(9)}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == files
    assert torch.equal(pyckpt.load(tmp_path)["x"], torch.zeros(9))
    pyckpt.save({"x": torch.ones(9)}, tmp_path, overwrite=True)
    assert torch.equal(pyckpt.load(tmp_path)["x"], torch.ones(9))


def test_one_that_failed_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    pyckpt.save({"x": torch.zeros(9)}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pyckpt.format.commit.commit_metadata", full)
        with pytest.raises(OSError, match="No space left"):
            pyckpt.save({"x": torch.ones(9)}, tmp_path, overwrite=True)
    assert torch.equal(pyckpt.load(tmp_path)["x"], torch.zeros(9))


# --- errors ---------------------------------------------------------------------------------------


class OfMyOwn:
    pass


def test_errors_are_ordinary(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="OfMyOwn"):
        pyckpt.save({"x": OfMyOwn()}, tmp_path)
    with pytest.raises(TypeError, match="dict of objects by name"):
        pyckpt.save(nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="address"):
        pyckpt.save({"x": 1}, "other://bucket/x")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as raised:
        pyckpt.save({"x": 1}, tmp_path / "file" / "below")
    assert raised.value.__cause__ is None


def test_it_warns_of_nothing(tmp_path: Path) -> None:
    """DCP's own save warns at each call without a process group. Nobody is to be kept from that
    warning who calls DCP."""
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pyckpt.save({"x": torch.zeros(3)}, tmp_path)
        with pyckpt.Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, {"x": torch.zeros(3)}).wait()
            state = {"x": torch.ones(3)}
            assert checkpointer.restore(state) == 1
    assert list(warnings.filters) == before


# --- ranks ----------------------------------------------------------------------------------------


class Unwilling:
    """One whose state cannot be had on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if self.rank == 1:
            raise RuntimeError("not now")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _save_on_ranks(path: Path) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    state = {"x": distribute_tensor(whole, mesh, [Shard(0)]), "own": pyckpt.PerRank({"rank": rank})}
    statistics = pyckpt.save(state, path)
    assert statistics.items >= 1
    target = {
        "x": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]),
        "own": pyckpt.PerRank({"rank": -1}),
    }
    pyckpt.load(target, path)
    assert torch.equal(target["x"].full_tensor(), whole)  # type: ignore[union-attr]
    assert target["own"].value == {"rank": rank}  # type: ignore[union-attr]

    with pytest.raises(FileExistsError):
        pyckpt.save(state, path)
    with pytest.raises(SaveError, match=r"rank 1.*not now"):
        pyckpt.save({"x": Unwilling(rank)}, path, overwrite=True)
    with pytest.raises(SaveError, match="not in the same save"):
        pyckpt.save({"x": 1}, path / str(rank))
    # In this process alone, whatever there is of torch.distributed.
    pyckpt.save({"x": torch.tensor(rank)}, path / f"alone-{rank}", no_dist=True)
    assert pyckpt.load(path / f"alone-{rank}")["x"] == rank
    # Only the first rank has anything to write.
    statistics = pyckpt.save({"x": 1}, path / "small")
    assert (statistics.items, statistics.bytes > 0) == ((1, True) if rank == 0 else (0, False))
    dist.barrier()


def test_ranks_save_together(tmp_path: Path) -> None:
    run_ranks(2, _save_on_ranks, tmp_path / "checkpoint")
    assert torch.equal(pyckpt.load(tmp_path / "checkpoint")["x"], torch.arange(8.0))


def test_corrupted_after_is_told(tmp_path: Path) -> None:
    pyckpt.save({"x": torch.zeros(1000)}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    with data.open("r+b") as file:
        file.seek(data.stat().st_size // 2)
        file.write(b"\x01")
    with pytest.raises(CorruptCheckpoint):
        pyckpt.load(tmp_path)


def test_home_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a Checkpointer, whichever function is given the path."""
    home, here = tmp_path / "home", tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    saved = {"model": torch.nn.Linear(2, 2)}
    pyckpt.save(saved, "~/best")
    pyckpt.save(saved, Path("~/other"))
    found = {"model": torch.nn.Linear(2, 2)}
    pyckpt.load(found, "~/best")
    assert torch.equal(found["model"].weight, saved["model"].weight)
    assert pyckpt.load("~/best").keys() == {"model"}
    pyckpt.load_model(found["model"], "~/best")
    pyckpt.export("~/best", "~/exported", config={})
    pyckpt.export("~/best", "~/again", config="~/exported/config.json")
    pyckpt.to_torch("~/best", "~/best.pt")
    assert pyckpt.DirectReader.validate_checkpoint_id("~/best")
    assert pyckpt.DirectWriter.validate_checkpoint_id("~/more")
    assert sorted(os.listdir(home)) == ["again", "best", "best.pt", "exported", "other"]
    assert os.listdir(here) == []


def test_a_name_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"no such home directory.*'\./~nobody-of-that-name'"):
        pyckpt.save({"x": 1}, "~nobody-of-that-name")
    pyckpt.save({"x": torch.ones(2)}, "./~nobody-of-that-name")
    assert os.listdir(tmp_path) == ["~nobody-of-that-name"]
    assert pyckpt.load("./~nobody-of-that-name").keys() == {"x"}
    model = torch.nn.Linear(2, 2)
    pyckpt.save({"model": model}, "./~nobody-of-that-name", overwrite=True)
    pyckpt.load_model(model, "./~nobody-of-that-name")


def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (
        lambda: pyckpt.save({"x": 1}, ""),
        lambda: pyckpt.load({"x": 1}, ""),
        lambda: pyckpt.load(""),
        lambda: pyckpt.export("", "out"),
        lambda: pyckpt.export(".", ""),
        lambda: pyckpt.to_torch(".", ""),
    ):
        with pytest.raises(ValueError, match="the path is empty"):
            use()
    for use in (lambda: pyckpt.export(".", "s3://b/x"), lambda: pyckpt.to_torch(".", "s3://b/x")):
        with pytest.raises(ValueError, match="is a URL"):
            use()
    assert os.listdir(tmp_path) == []
