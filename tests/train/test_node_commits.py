"""Commits on nodes, one at a time and half done. Each node here is a thread with its directory."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.nodes.committing import NodeCommit
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.pruner import Pruner, prune, sweep
from pyckpt.train.store.retention import Retention

NAME = "step-00000100"


class Meeting:
    """What `Nodes` does, between threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.found: dict[int, tuple[Any, Exception | None]] = {}


class ThreadNodes:
    is_first = True

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.meeting, self.ranks, self.members = rank, meeting, self, [rank]

    def meet(self, doing: str, step: Callable[[], Any]) -> list[Any]:
        try:
            self.meeting.found[self.rank] = (step(), None)
        except Exception as error:
            self.meeting.found[self.rank] = (None, error)
        self.meeting.barrier.wait()
        found = dict(sorted(self.meeting.found.items()))
        self.meeting.barrier.wait()
        failed = {rank: (error, None) for rank, (_, error) in found.items() if error is not None}
        if failed:
            raise CheckpointException(doing, failed)  # type: ignore[arg-type]
        return [value for value, _ in found.values()]

    def from_rank(self, rank: int, value: Any) -> Any:
        return value


def alone(directory: Path) -> tuple[NodeCommit, Fence]:
    fence = Fence(directory)
    nodes: Any = ThreadNodes(0, Meeting(1))
    return NodeCommit(directory, nodes, fence.held), fence


def together(directories: list[Path], method: str) -> None:
    """Call a method of the `NodeCommit` of each node at once."""
    meeting = Meeting(len(directories))

    def run(rank: int) -> None:
        nodes: Any = ThreadNodes(rank, meeting)
        getattr(NodeCommit(directories[rank], nodes, Fence(directories[rank]).held), method)()

    with ThreadPoolExecutor(len(directories)) as threads:
        list(threads.map(run, range(len(directories))))


def data(at: Path, scratch: Path, value: float) -> tuple[bytes, set[str]]:
    """Write the data file of a save, as a rank does; returns what its commit is given."""
    pyckpt.save({"x": torch.full((1000,), value)}, scratch)
    files = {path.name for path in scratch.glob("*.distcp")}
    at.mkdir(parents=True, exist_ok=True)
    for name in files:
        shutil.copy(scratch / name, at / name)
    return (scratch / ".metadata").read_bytes(), files


def half_committed(base: Path) -> tuple[Path, Path]:
    """Two nodes of which the first has committed a save, and the second has prepared it beside an
    older one."""
    first, second = base / "first", base / "second"
    for directory in (first, second):
        (directory / ".pyckpt").mkdir(parents=True)
    pyckpt.save({"x": torch.zeros(1000)}, second / NAME)
    metadata, _ = data(second / NAME, base / "scratch", 1.0)
    (first / NAME).mkdir()
    (first / NAME / ".metadata").write_bytes(metadata)
    meta = metadata_format.read(first / NAME / ".metadata").storage_meta
    assert meta is not None
    (second / ".pyckpt" / f"pending-{meta.save_id}-{NAME}").write_bytes(metadata)
    return first, second


def files(directory: Path) -> set[str]:
    return {path.name for path in (directory / NAME).glob("*.distcp")}


def test_a_job_that_was_replaced_right_after_its_commit_removes_nothing(tmp_path, monkeypatch):
    directory = tmp_path / "run"
    (old, _), (new, _) = alone(directory), alone(directory)
    described = data(directory / NAME, tmp_path / "old", 1.0)
    old.begin()
    renamed = NodeCommit._rename

    def replaced(self: NodeCommit, *arguments: Any) -> None:
        renamed(self, *arguments)
        monkeypatch.setattr(NodeCommit, "_rename", renamed)
        done.append(True)

    done: list[bool] = []
    met = ThreadNodes.meet

    def meet(self: ThreadNodes, doing: str, step: Callable[[], Any]) -> list[Any]:
        found = met(self, doing, step)
        if doing == "committing on all nodes" and done:
            done.clear()  # the old job stands still here; the new one saves the step again
            new.begin()
            again = data(directory / NAME, tmp_path / "new", 2.0)
            new.commit(directory / NAME, again, final=False, metrics={})
        return found

    monkeypatch.setattr(NodeCommit, "_rename", replaced)
    monkeypatch.setattr(ThreadNodes, "meet", meet)
    old.commit(directory / NAME, described, final=False, metrics={})
    assert Catalog(directory).examine(100).state == "valid"
    assert pyckpt.load(directory / NAME)["x"][0] == 2.0


def test_what_waits_for_its_commit_is_neither_swept_nor_pruned(tmp_path):
    first, second = half_committed(tmp_path)
    before = files(second)
    assert len(before) == 2
    sweep(Catalog(second))
    pyckpt.save({"x": torch.zeros(1)}, second / "step-00000200")
    assert not prune(Catalog(second), Retention(1))
    assert files(second) == before
    together([first, second], "begin")
    sweep(Catalog(second))
    assert len(files(second)) == 1
    assert (second / NAME / ".metadata").read_bytes() == (first / NAME / ".metadata").read_bytes()


def test_with_nodes_the_sweep_waits_until_all_is_settled(tmp_path):
    directory = tmp_path / "run"
    pyckpt.save({"x": torch.zeros(1000)}, directory / NAME)
    data(directory / NAME, tmp_path / "scratch", 1.0)
    pruner = Pruner(
        Catalog(directory),
        Retention(None),
        allowed=Fence(directory).held,
        busy=(),
        distrusted=(),
        settles=True,
    )
    pruner.begun()
    pruner.wait()
    assert len(files(directory)) == 2
    pruner.settled()
    pruner.close()
    assert len(files(directory)) == 1


@pytest.mark.parametrize("method", ["settle", "begin"])
def test_a_directory_that_was_removed_does_not_keep_its_commit_waiting(tmp_path, caplog, method):
    first, second = half_committed(tmp_path)
    shutil.rmtree(second / NAME)
    together([first, second], method)
    assert not list((second / ".pyckpt").glob("pending-*"))
    assert "was removed" in caplog.text
    assert commit.metadata_name() in {path.name for path in (first / NAME).iterdir()}
