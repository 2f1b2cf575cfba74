"""Two processes that save into one directory, and know nothing of each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import Child, Pipe, run_child

import pyckpt
from pyckpt.format.claim import Claim, is_claimed, turn


def state(value: int) -> dict[str, Any]:
    return {"x": torch.full((50_000,), float(value)), "value": value}


def save(directory: Path, value: int) -> None:
    dcp.save(state(value), storage_writer=pyckpt.DirectWriter(directory), no_dist=True)


def loaded(directory: Path) -> int:
    target = state(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    assert bool((target["x"] == target["value"]).all())
    value: int = target["value"]
    return value


def data_files(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".distcp"))


def _save_and_wait(pipe: Pipe, directory: Path, value: int) -> None:
    """Save, and stop before the commit until told to go on."""
    finish = pyckpt.DirectWriter.finish

    def held(*arguments: Any, **options: Any) -> None:
        pipe.send("written")
        pipe.wait()
        finish(*arguments, **options)

    pyckpt.DirectWriter.finish = held  # type: ignore[method-assign]
    save(directory, value)


@pytest.mark.parametrize("over", [False, True], ids=["first", "over-another"])
def test_what_another_process_writes_is_not_swept_out(over: bool, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    if over:
        save(directory, 1)
    other = Child(_save_and_wait, directory, 2)
    assert other.receive() == "written"
    for value in (3, 4):  # looks for remains, commits and sweeps
        save(directory, value)
        assert loaded(directory) == value
    assert len(data_files(directory)) == 2
    other.connection.send("go on")
    other.receive()
    other.join()
    assert loaded(directory) == 2
    assert len(data_files(directory)) == 1
    assert sorted(os.listdir(directory)) == [".metadata", *data_files(directory)]


def test_what_a_killed_process_wrote_is(tmp_path: Path) -> None:
    other = Child(_save_and_wait, tmp_path, 1)
    assert other.receive() == "written"
    other.kill()
    save(tmp_path, 2)
    assert loaded(tmp_path) == 2
    assert len(data_files(tmp_path)) == 1


def test_a_writer_that_is_kept_claims_nothing_after_its_save(tmp_path: Path) -> None:
    writers = []
    for value in (1, 2, 3):
        writers.append(pyckpt.DirectWriter(tmp_path))
        dcp.save(state(value), storage_writer=writers[-1], no_dist=True)
        assert len(data_files(tmp_path)) == 1


def test_a_claim_ends(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert not is_claimed(file)
    claim = Claim(file)
    assert is_claimed(file)
    claim.release()
    claim.release()
    assert not is_claimed(file)
    claim = Claim(file)
    del claim
    assert not is_claimed(file)
    assert not is_claimed(tmp_path / "absent")


def test_turns(tmp_path: Path) -> None:
    def taken(shared: bool) -> bool:
        try:
            with turn(tmp_path, shared=shared, patience=0.0):
                return True
        except TimeoutError:
            return False

    with turn(tmp_path, shared=True):
        assert (taken(True), taken(False)) == (True, False)
    with turn(tmp_path):
        assert (taken(True), taken(False)) == (False, False)
    assert (taken(True), taken(False)) == (True, True)


def _without_locks(_pipe: Pipe, directory: Path) -> int:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    fcntl.flock = unsupported  # type: ignore[assignment]
    save(directory, 1)
    save(directory, 2)
    assert len(data_files(directory)) == 1
    return loaded(directory)


def test_file_systems_without_locks(tmp_path: Path) -> None:
    assert run_child(_without_locks, tmp_path) == 2
