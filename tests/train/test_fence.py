"""Two jobs in one directory: the one that began to save last saves there, and the other fails."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import Child, Pipe, run_child, run_ranks

from pyckpt import Checkpointer
from pyckpt.errors import Superseded
from pyckpt.format import commit
from pyckpt.format.flock import trying
from pyckpt.train.store.fence import FOLDER, Fence


def state(value: float) -> dict[str, Any]:
    return {"x": torch.full((1000,), value), "value": value, "of": {"y": torch.ones(2)}}


def generations(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory / FOLDER) if name != "lock")


def states(directory: Path) -> dict[int | None, str]:
    with Checkpointer(directory) as checkpointer:
        return {entry.step: entry.state for entry in checkpointer.inspect()}


def hold(fence: Fence) -> None:
    with fence.held():
        pass


# --- the fence ------------------------------------------------------------------------------------


def test_the_last_to_begin_has_it(tmp_path: Path) -> None:
    old, new = Fence(tmp_path / "run"), Fence(tmp_path / "run")
    hold(old)
    hold(old)
    hold(new)
    for _ in range(2):
        with pytest.raises(Superseded, match="another Checkpointer of this process has begun"):
            hold(old)
        hold(new)
    assert generations(tmp_path / "run") == ["generation-00000002"]


@pytest.mark.parametrize("which", ["pid", "host", "namespace"])
def test_the_process_that_has_it_is_named(tmp_path: Path, which: str) -> None:
    """Unless it is this one, which nobody should end."""
    old, new = Fence(tmp_path), Fence(tmp_path)
    hold(old)
    hold(new)
    file = tmp_path / FOLDER / "generation-00000002"
    who = json.loads(file.read_text()) | {which: 1 if which == "pid" else "another"}
    file.write_text(json.dumps(who))
    with pytest.raises(
        Superseded, match=rf"process {who['pid']} on {who['host']} .* end the other"
    ):
        hold(old)


def test_it_is_taken_again_where_everything_was_removed(tmp_path: Path) -> None:
    fence = Fence(tmp_path)
    hold(fence)
    shutil.rmtree(tmp_path / FOLDER)
    hold(fence)
    other = Fence(tmp_path)
    shutil.rmtree(tmp_path / FOLDER)
    hold(other)  # the same number, and another job
    with pytest.raises(Superseded):
        hold(fence)


def test_one_of_many_that_begin_at_once_has_it(tmp_path: Path) -> None:
    fences = [Fence(tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=hold, args=(fence,)) for fence in fences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert allowed(fences) == 1


def allowed(fences: list[Fence]) -> int:
    count = 0
    for fence in fences:
        try:
            hold(fence)
            count += 1
        except Superseded:
            pass
    return count


def _without_locks(_pipe: Pipe, directory: Path) -> tuple[int, int]:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    fcntl.flock = unsupported  # type: ignore[assignment]
    fences = [Fence(directory) for _ in range(8)]
    start = threading.Barrier(len(fences))

    def take(fence: Fence) -> None:
        start.wait()
        fence._make_folder()
        fence._take()

    threads = [threading.Thread(target=take, args=(fence,)) for fence in fences]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return allowed(fences), allowed(fences[::-1])


def test_file_systems_without_locks(tmp_path: Path) -> None:
    assert run_child(_without_locks, tmp_path) == (1, 1)


def test_a_number_that_came_back_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    first, second = Fence(tmp_path), Fence(tmp_path)
    hold(first)
    listed = Fence._generations
    late = [True]

    def stale(self: Fence) -> list[int]:
        # As it was before `second` took its own and removed that of `first`.
        return [] if late[0] else listed(self)

    hold(second)
    third = Fence(tmp_path)
    third._generations = stale.__get__(third)  # type: ignore[method-assign]
    real = third._write

    def write(path: Path) -> None:
        real(path)
        late[0] = False

    third._write = write  # type: ignore[method-assign]
    hold(third)
    assert generations(tmp_path) == ["generation-00000003"]
    assert allowed([first, second, third]) == 1


def _hold_until_told(pipe: Pipe, directory: Path) -> None:
    with Fence(directory).held():
        pipe.send("holding")
        pipe.wait()


def test_a_holder_that_hangs_is_an_error(tmp_path: Path) -> None:
    child = Child(_hold_until_told, tmp_path)
    assert child.receive() == "holding"
    fence = Fence(tmp_path, patience=0.0)
    with pytest.raises(TimeoutError, match="still hang"):
        hold(fence)
    child.kill()
    hold(fence)


def test_a_full_disk_does_not_keep_it_from_being_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    old, new = Fence(tmp_path), Fence(tmp_path)
    hold(old)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        hold(new)
    hold(new)
    with pytest.raises(Superseded, match="another job has begun"):
        hold(old)


@pytest.mark.parametrize("fills", [False, True])
def test_a_disk_that_takes_it_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fills: bool
) -> None:
    write = os.write
    counts: list[int] = []

    def writes(descriptor: int, data: bytes) -> int:
        if fills and counts:
            raise OSError(errno.ENOSPC, "No space left on device")
        counts.append(len(data))
        return write(descriptor, data[:10])

    fence = Fence(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", writes)
        with fence.held():
            pass
    assert len(counts) == 1 if fills else len(counts) > 5
    with fence.held():
        pass
    with Fence(tmp_path).held():
        pass
    with pytest.raises(Superseded), fence.held():
        pass


def test_a_lock_is_let_go_also_where_a_process_was_forked_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    read, write = os.pipe()
    first = os.open(path, os.O_RDWR | os.O_CREAT)
    second = os.open(path, os.O_RDWR)
    with trying(first) as mine:
        assert mine
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read, 1)  # until the parent is through
            os._exit(0)
        os.close(read)
        with trying(second) as mine:
            assert not mine
    try:
        os.close(first)
        with trying(second) as mine:
            assert mine
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        os.close(second)


# --- jobs -----------------------------------------------------------------------------------------


def test_the_old_job_fails_and_leaves_everything(tmp_path: Path) -> None:
    old = Checkpointer(tmp_path, keep_last=1)
    old.save(10, state(10)).wait()
    with Checkpointer(tmp_path, keep_last=2) as new:
        assert new.restore(state(0)) == 10
        old.save(11, state(11)).wait()  # the new one did not save yet
        new.save(20, state(20)).wait()
        with pytest.raises(Superseded):
            old.save(30, state(30)).wait()
        with pytest.raises(Superseded):
            old.save(30, state(30))
        new.save(21, state(21))
    with pytest.raises(Superseded):
        old.save(30, state(30)).wait()
    with pytest.raises(Superseded):
        old.close()
    assert states(tmp_path) == {11: "valid", 20: "valid", 21: "valid"}


def test_who_only_looks_takes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run", every_steps=1) as reader:
        assert reader.restore(state(0)) is None
    assert not (tmp_path / "run").exists()
    with Checkpointer(tmp_path / "run") as training:
        training.save(1, state(1)).wait()
        before = generations(tmp_path / "run")
        with Checkpointer(tmp_path / "run", every_steps=10) as reader:
            assert reader.restore(state(0)) == 1
            reader.step(2, state(2))
            reader.inspect(verify=True)
            assert reader.latest() is not None
            reader.export(tmp_path / "export", format="torch", key="of")
        assert generations(tmp_path / "run") == before
        training.save(2, state(2)).wait()


def _old_job(pipe: Pipe, directory: Path) -> str:
    """Saves step 10; and step 20, but hangs before the commit until it is told."""
    logging.getLogger("pyckpt").setLevel(logging.CRITICAL)
    checkpointer = Checkpointer(directory, keep_last=1)
    checkpointer.save(10, state(10)).wait()
    real = commit.commit_metadata

    def hung(*args: Any, **options: Any) -> None:
        pipe.send("hung")
        pipe.wait()
        real(*args, **options)

    commit.commit_metadata = hung
    handle = checkpointer.save(20, state(-20))
    try:
        handle.wait()
    except Superseded as error:
        return str(error)
    finally:
        checkpointer._pruner.wait()
    return "committed"


@pytest.mark.parametrize("steps", [(20,), (20, 30), (15,)])
def test_a_job_that_hung_does_not_destroy_what_its_replacement_saved(
    steps: tuple[int, ...], tmp_path: Path
) -> None:
    old = Child(_old_job, tmp_path)
    assert old.receive() == "hung"
    with Checkpointer(tmp_path, keep_last=1) as new:
        assert new.restore(state(0)) == 10
        for step in steps:
            new.save(step, state(step)).wait()
            new._pruner.wait()
        old.connection.send("go on")
        assert "has begun to save here" in old.receive()
        old.join()
        target = state(0)
        assert new.restore(target) == steps[-1]
        assert target["value"] == steps[-1]
        assert bool((target["x"] == steps[-1]).all())
        new.save(40, state(40)).wait()
    assert {step for step, found in states(tmp_path).items() if found == "valid"} == {40}


def test_what_the_old_job_commits_in_between_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as old:
        old.save(10, state(10)).wait()
        with Checkpointer(tmp_path, keep_last=1) as new:
            new.restore(state(0))
            old.save(20, state(-20)).wait()
            new.save(11, state(11)).wait()
            new.save(12, state(12)).wait()
            new._pruner.wait()
            assert "another job saved" in caplog.text
            assert str(tmp_path / "step-00000020") in caplog.text
            assert states(tmp_path) == {12: "valid", 20: "valid"}
            new.save(20, state(20)).wait()
            new.save(21, state(21)).wait()
    assert states(tmp_path) == {21: "valid"}


def _superseded_ranks(directory: Path) -> list[str]:
    told = []
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state(1)).wait()
    if checkpointer._ranks.rank == 0:
        hold(Fence(directory))
    try:
        checkpointer.save(2, state(2)).wait()
    except Superseded as error:
        told.append(str(error))
    try:
        checkpointer.save(3, state(3))
    except Superseded as error:
        told.append(str(error))
    checkpointer.close()
    return told


def test_all_ranks_are_told(tmp_path: Path) -> None:
    for told in run_ranks(2, _superseded_ranks, tmp_path):
        assert len(told) == 2
        assert all("has begun to save here" in line for line in told)
    assert states(tmp_path)[1] == "valid"
    assert "valid" not in (states(tmp_path).get(2), states(tmp_path).get(3))
