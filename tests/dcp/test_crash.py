"""Killed at any instant, a directory holds the previous checkpoint or the new one."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _crash_child import CALLS, Call, is_in, run_traced, traced
from _ranks import TIMEOUT_S, Child, Pipe
from _sampling import slow
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt.format import commit

A, B, C = 1, 2, 3


def state(value: int, mib: int = 1) -> dict[str, Any]:
    """Large tensors, a small one and an object; all tell which save they are of."""
    large = {f"large/{i}": torch.full((mib << 16,), float(value)) for i in range(4)}
    return {**large, "small": torch.full((), value), "object": {"value": value}}


def loaded_value(directory: Path, mib: int = 1) -> int:
    """Of which save the checkpoint is that stock finds; all of it."""
    target = state(0, mib)
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    value = target["object"]["value"]
    for key, tensor in target.items():
        if key != "object":
            assert torch.equal(tensor, torch.full_like(tensor, value)), key
    return value


def save(value: int, directory: Path, engine: pyckpt.Engine | None = None) -> None:
    dcp.save(state(value), storage_writer=pyckpt.DirectWriter(directory, engine=engine))


def assert_clean(directory: Path) -> None:
    """Nothing but one checkpoint of one rank is there."""
    names = sorted(os.listdir(directory))
    assert len(names) == 2, names
    assert names[0] == ".metadata"
    assert re.fullmatch(r"__0_[0-9a-f]+\.distcp", names[1]), names


def _overwrite(pipe: Pipe, directory: Path, first: bool) -> None:
    # One thread and small slots: the calls come in one order, and the file takes several writes.
    with pyckpt.Engine(io_threads=1, slot_bytes=256 << 10) as engine:
        save(A, directory / "other" if first else directory, engine)
        with traced(pipe):
            save(B, directory / "first" if first else directory, engine)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("each", [False, slow(True)], ids=["one-of-a-name", "each"])
@pytest.mark.parametrize("first", [False, slow(True)], ids=["over-another", "first-save"])
def test_killed_before_each_system_call(first: bool, each: bool, tmp_path: Path) -> None:
    plan = run_traced(_overwrite, tmp_path / "plan", first)
    calls = [call for call in plan.calls if is_in(call, tmp_path / "plan") and call.name != "fcntl"]
    (commit,) = [i for i, call in enumerate(calls) if call.name == "rename"]
    names = [call.name for call in calls]
    assert set(names) >= set(CALLS) - {"fcntl", *(() if first else ("mkdir",))}
    assert names.count("pwrite64") >= 4
    # The file, its name, the metadata, its name; and before them the names of a new directory and
    # of the mark in it.
    assert names.count("fsync") == 4 + 2 * first

    # Where not before each: the last of each name, and the first after the commit.
    last = {name: i for i, name in enumerate(names)}
    for i, call in enumerate(calls):
        if not each and i not in (last[call.name], commit + 1):
            continue
        directory = tmp_path / f"{i}-{call.name}"
        killed = run_traced(
            _overwrite, directory, first, inject=f"{call.name}:signal=KILL:when={call.nth}"
        )
        assert killed.killed, call
        assert max(done.nth for done in killed.calls if done.name == call.name) == call.nth, call
        if first:
            directory /= "first"
        # The call that the kill came with was not made.
        if i > commit:
            assert loaded_value(directory) == B, call
        elif first:
            assert not (directory / ".metadata").exists(), call
        else:
            assert loaded_value(directory) == A, call
        save(C, directory)
        assert loaded_value(directory) == C, call
        assert_clean(directory)


def _save_traced(pipe: Pipe, directory: Path) -> None:
    with traced(pipe):
        save(B, directory)


def order_of(calls: list[Call], *wanted: tuple[str, Path]) -> list[int]:
    """Where, among the calls of a child, the first ones are that name these files."""
    return [
        next(i for i, call in enumerate(calls) if call.name == name and f"{path}>" in call.text)
        if name == "fsync"
        else next(i for i, call in enumerate(calls) if call.name == name and is_in(call, path))
        for name, path in wanted
    ]


@pytest.mark.usefixtures("strace")
def test_names_of_directories_that_another_process_made_are_made_durable(tmp_path: Path) -> None:
    """It may have been killed before it came to that."""
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    calls = run_traced(_save_traced, directory).calls
    wanted = [("fsync", tmp_path), ("fsync", tmp_path / "a"), ("rename", directory)]
    order = order_of(calls, *wanted)
    assert order == sorted(order)


def _saved_twice(pipe: Pipe, directory: Path) -> None:
    save(A, directory)
    with traced(pipe):
        save(B, directory)


def tells_generations(path: Path) -> bool:
    return commit._identity(path) is not None


@pytest.mark.usefixtures("strace")
def test_names_of_directories_are_made_durable_once(tmp_path: Path) -> None:
    if not tells_generations(tmp_path):
        pytest.skip("the file system does not tell a directory from one that has its inode")
    directory = tmp_path / "a"
    calls = run_traced(_saved_twice, directory).calls
    assert not [call for call in calls if call.name == "fsync" and f"{tmp_path}>" in call.text]


def synced_by(make: Callable[[], None]) -> list[Path]:
    synced: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "sync_directory", synced.append)
        make()
    return synced


def test_a_directory_that_was_made_again_is_another(tmp_path: Path) -> None:
    """Its inode may have the number of the one before it."""
    directory = tmp_path / "a"
    make = partial(commit.make_directory, directory, sync=True)
    make()
    assert tmp_path not in synced_by(make) or not tells_generations(tmp_path)
    directory.rmdir()
    assert tmp_path in synced_by(make)
    # By another process, such as another rank: this one finds it there.
    inode = directory.stat().st_ino
    for _ in range(20):
        directory.rmdir()
        directory.mkdir()
        if directory.stat().st_ino == inode:
            break
    assert tmp_path in synced_by(make)


def test_a_directory_in_another_one_of_its_parents_name_is_made_durable(tmp_path: Path) -> None:
    parent = tmp_path / "a"
    make = partial(commit.make_directory, parent / "b", sync=True)
    make()
    parent.rename(tmp_path / "old")
    parent.mkdir()
    (tmp_path / "old" / "b").rename(parent / "b")
    assert tmp_path in synced_by(make)


@pytest.mark.usefixtures("strace")
def test_a_commit_is_durable_before_another_process_sweeps_the_data_it_replaced(
    tmp_path: Path,
) -> None:
    """The process that committed was killed before it came to either."""
    committed = run_traced(_overwrite, tmp_path, False, inject="fsync:signal=KILL:when=4")
    assert committed.killed
    assert len([*tmp_path.glob("*.distcp")]) == 2
    calls = run_traced(_save_traced, tmp_path).calls
    order = order_of(calls, ("fsync", tmp_path), ("unlink", tmp_path))
    assert order == sorted(order)
    assert loaded_value(tmp_path) == B
    assert_clean(tmp_path)


def test_data_that_lost_its_metadata_is_not_overwritten(tmp_path: Path) -> None:
    """As by ``cp checkpoint/* copy``."""
    save(A, tmp_path / "checkpoint")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (tmp_path / "checkpoint").glob("*"):
        if not path.name.startswith("."):
            shutil.copy(path, copy)
    before = os.listdir(copy)
    assert before
    with pytest.raises(CheckpointException) as info:
        save(B, copy)
    error = info.value.failures[0][0]
    assert isinstance(error, FileExistsError)
    assert error.filename == str(copy)
    assert ".metadata" in str(error)
    assert os.listdir(copy) == before
    shutil.copy(tmp_path / "checkpoint" / ".metadata", copy)
    save(C, copy)
    assert loaded_value(copy) == C
    assert_clean(copy)


def test_remains_of_a_first_save_that_was_killed_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".saving").touch()
    (tmp_path / f"__3_{'0' * 32}.distcp").write_bytes(b"remains")
    save(A, tmp_path)
    assert loaded_value(tmp_path) == A
    assert_clean(tmp_path)


def _save_for_ever(pipe: Pipe, directory: Path, mib: int) -> None:
    for value in itertools.count(1):
        dcp.save(state(value, mib), storage_writer=pyckpt.DirectWriter(directory))
        pipe.send(value)


@pytest.mark.parametrize("mib", [1, slow(2), 4, slow(8), 16])
def test_killed_while_it_writes(mib: int, tmp_path: Path) -> None:
    child = Child(_save_for_ever, tmp_path, mib)
    committed = child.receive()
    before = set(os.listdir(tmp_path))
    deadline = time.monotonic() + TIMEOUT_S
    while not set(os.listdir(tmp_path)) - before:
        assert time.monotonic() < deadline
    child.process.kill()
    assert child.join() == -signal.SIGKILL
    try:
        while True:
            committed = child.receive()
    except EOFError:
        pass
    # It may have been killed between the commit and the telling.
    assert loaded_value(tmp_path, mib) in (committed, committed + 1)
    save(C, tmp_path)
    assert loaded_value(tmp_path) == C
    assert_clean(tmp_path)
