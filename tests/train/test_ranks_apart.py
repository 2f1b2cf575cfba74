"""Ranks that cannot begin a save, are in another one, see another disk, or do not come at all:
nothing that does not belong together is committed or loaded, and the next save is whole again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import TIMEOUT_S, Child, Pipe, run_ranks
from _sampling import slow
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import pyckpt
from pyckpt import Checkpointer
from pyckpt.dcp.parts import Part, Seen, refuse_mismatch, refuse_mixture
from pyckpt.errors import CheckpointReplaced, LoadError, RanksLost, SaveError, StagerBusy


def sharded(value: float) -> dict[str, Any]:
    """A state of which each rank has a part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.full((64, 256), float(value))
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}


def value_of(state: dict[str, Any]) -> list[float]:
    w = state["w"]
    assert isinstance(w, DTensor)
    return w.full_tensor().unique().tolist()


def loaded(directory: Path) -> list[float]:
    """What stock makes of a checkpoint, on all ranks."""
    state = sharded(0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory))
    return value_of(state)


def _outcome(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except (Exception, CheckpointException) as error:
        return error
    return None


# --- a rank that cannot begin ---------------------------------------------------------------------


def _no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def _saves_without_threads(directory: Path, when: str) -> list[str]:
    """Rank 1 can start no thread: from before the Checkpointer, or for the second save."""
    start = threading.Thread.start
    without = dist.get_rank() == 1
    if when == "always" and without:
        ThreadPoolExecutor._adjust_thread_count = _no_thread  # type: ignore[attr-defined]
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2, 3, 4):
            if step == 2 and without:
                threading.Thread.start = _no_thread  # type: ignore[method-assign,assignment]
            checkpointer.save(step, sharded(step)).wait(TIMEOUT_S / 4)
            threading.Thread.start = start  # type: ignore[method-assign]
        state = sharded(0)
        assert checkpointer.restore(state) == 4
        assert value_of(state) == [4.0]
    return [str(entry) for entry in checkpointer.inspect(verify=True)]


@pytest.mark.parametrize("when", [slow("once"), "always"])
def test_a_rank_without_threads_saves_all_the_same(when: str, tmp_path: Path) -> None:
    for entries in run_ranks(2, _saves_without_threads, tmp_path, when):
        assert entries == [f"step-0000000{step}: valid" for step in (1, 2, 3, 4)]


def _no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError("nothing left on this rank")


def _cannot_stage(directory: Path) -> tuple[str, list[str], list[int], list[str]]:
    begin = pyckpt.PinnedStager.begin
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, sharded(1)).wait(TIMEOUT_S / 4)
        if dist.get_rank() == 1:
            pyckpt.PinnedStager.begin = _no_memory  # type: ignore[method-assign,assignment]
        error = checkpointer.save(2, sharded(2)).committed.exception(TIMEOUT_S / 4)
        pyckpt.PinnedStager.begin = begin  # type: ignore[method-assign]
        with suppress(SaveError):
            checkpointer._saver.raise_failure()
        before = sorted(os.listdir(directory))
        dist.barrier()
        for step in (3, 4):
            checkpointer.save(step, sharded(step)).wait(TIMEOUT_S / 4)
        steps = [checkpoint.step for checkpoint in checkpointer.checkpoints(verify=True)]
    return str(error), before, steps, sorted(os.listdir(directory))


def test_a_rank_that_cannot_begin_makes_the_save_fail_on_all(tmp_path: Path) -> None:
    for error, before, steps, after in run_ranks(2, _cannot_stage, tmp_path):
        assert "rank 1: MemoryError: nothing left" in error
        assert steps == [1, 3, 4]
        assert "step-00000002" in before
        assert "step-00000002" not in after


def _async_save_without_thread(directory: Path) -> list[str]:
    """Rank 1 finds no thread for its first save, and so is one behind in the next."""
    writer = pyckpt.DirectWriter(directory)
    start = threading.Thread.start
    dcp.save(sharded(0), storage_writer=writer)
    if dist.get_rank() == 1:
        threading.Thread.start = _no_thread  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError, match="can't start new thread"):
            dcp.async_save(sharded(1), storage_writer=writer)
        threading.Thread.start = start  # type: ignore[method-assign]
        error = _outcome(dcp.async_save(sharded(2), storage_writer=writer).result)
    else:
        error = _outcome(dcp.async_save(sharded(1), storage_writer=writer).result)
    assert loaded(directory) == [0.0]
    assert isinstance(error, CheckpointException)
    return [str(e) for e, _ in error.failures.values()]


def test_ranks_one_save_apart_commit_nothing(tmp_path: Path) -> None:
    for errors in run_ranks(2, _async_save_without_thread, tmp_path):
        (error,) = errors
        assert "the ranks are not in the same save" in error
        assert f"rank 0 ({socket.gethostname()}): save 2, into {tmp_path}" in error
        assert f"rank 1 ({socket.gethostname()}): save 3, into {tmp_path}" in error


def test_a_save_that_finds_no_thread_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else gives back what was staged for it; the next step would wait for ever."""
    with pyckpt.Engine(slot_bytes=16384, max_pinned_bytes=4 << 20, io_threads=1) as engine:
        parameter = torch.nn.Parameter(torch.rand(3_000_000))  # more than there is room for
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        stager = pyckpt.PinnedStager(optimizers=[optimizer], engine=engine)
        writer = pyckpt.DirectWriter(tmp_path, stager=stager, engine=engine)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _no_thread)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                dcp.async_save({"w": parameter}, storage_writer=writer)
        optimizer.step()
        saved = parameter.detach().clone()
        dcp.async_save({"w": parameter}, storage_writer=writer).result(TIMEOUT_S / 4)
        target = {"w": torch.zeros_like(saved)}
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
        assert torch.equal(target["w"], saved)


# --- ranks in different saves, and on different disks ---------------------------------------------


def _different_steps(directory: Path) -> tuple[str, list[str]]:
    with Checkpointer(directory) as checkpointer:
        step = 2 + 2 * dist.get_rank()
        error = checkpointer.save(step, sharded(step)).committed.exception(TIMEOUT_S / 4)
        with suppress(SaveError):
            checkpointer._saver.raise_failure()
        checkpointer.save(5, sharded(5)).wait(TIMEOUT_S / 4)
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [5]
    return f"{type(error).__name__}: {error}", [str(e) for e in checkpointer.inspect()]


def test_ranks_that_save_different_steps(tmp_path: Path) -> None:
    for error, _ in run_ranks(2, _different_steps, tmp_path):
        assert error.startswith("SaveError")
        assert f"save 1, into {tmp_path}/step-00000002" in error
        assert f"save 1, into {tmp_path}/step-00000004" in error


def _paths_of_one_directory(directory: Path) -> list[float]:
    """Mounted, or linked, at another place on one rank."""
    link = directory / f"link-{dist.get_rank()}"
    (directory / "checkpoint").mkdir(exist_ok=True)
    link.symlink_to(directory / "checkpoint")
    dcp.save(sharded(1), storage_writer=pyckpt.DirectWriter(link))
    return loaded(directory / "checkpoint")


def test_one_directory_by_several_paths(tmp_path: Path) -> None:
    assert run_ranks(2, _paths_of_one_directory, tmp_path) == [[1.0], [1.0]]


def _part(rank: int, **changes: Any) -> Part:
    wanted = {"host": f"h{rank}", "path": "/a", "identity": 7, "number": 1, "save_id": f"s{rank}"}
    return Part(rank, **{**wanted, **changes})


def test_what_is_one_save() -> None:
    refuse_mismatch([_part(0), _part(1), _part(2, path="/b")])
    refuse_mismatch([_part(0), _part(1, identity=8)])  # some file systems number at each mount
    with pytest.raises(SaveError, match=r"rank 0 \(h0\): save 1.*ranks 1, 2 \(h1\): save 2"):
        refuse_mismatch([_part(0), _part(1, number=2), _part(2, number=2)])
    with pytest.raises(SaveError, match=r"into /a; rank 1 \(h1\): save 1, into /b"):
        refuse_mismatch([_part(0), _part(1, path="/b", identity=8)])


def _plans_are_kept(directory: Path) -> list[list[float]]:
    """By stock's planner, with all that was said in them. At the second save rank 1 does not send
    its plan again, and is to write what rank 0 had written."""
    found = []
    for step in range(2):
        path = directory / str(step)
        state = sharded(step)
        if step == 0 or dist.get_rank() == 1:
            state["on both"] = torch.ones(3)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
        dcp.save(state, storage_writer=pyckpt.DirectWriter(path), planner=planner)
        found.append(loaded(path))
    return found


def test_planners_that_keep_plans(tmp_path: Path) -> None:
    assert run_ranks(2, _plans_are_kept, tmp_path) == [[[0.0], [1.0]]] * 2


def _is_busy(*_: Any) -> StagerBusy:
    return StagerBusy("earlier saves have all the memory")


def _one_skips_what_another_plans_anew(directory: Path) -> list[str]:
    """The coordinator knows a plan of rank 1 by name, and makes another since its own changed."""
    state: dict[str, Any] = sharded(1)
    for step in range(3):
        stager = pyckpt.PinnedStager(when_busy="skip")
        if step == 1 and dist.get_rank() == 1:
            stager._busy = _is_busy  # type: ignore[method-assign]
        if step == 1 and dist.get_rank() == 0:
            state["more"] = torch.ones(3)
        writer = pyckpt.DirectWriter(directory / str(step), stager=stager)
        planner = pyckpt.SavePlanner()
        dcp.async_save(state, storage_writer=writer, planner=planner).result(TIMEOUT_S / 4)
        dist.barrier()
    return [str(step) for step in range(3) if (directory / str(step) / ".metadata").exists()]


def test_what_is_said_of_a_save_is_not_remembered_with_its_plan(tmp_path: Path) -> None:
    assert run_ranks(2, _one_skips_what_another_plans_anew, tmp_path) == [["0", "2"]] * 2


_CLONE_NEWNS = 0x20000
_MS_REC_PRIVATE = 0x4000 | 0x40000


def _own_disk(path: Path) -> None:
    """Mount something at a path that this thread, and those that it starts, see alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None) == 0


def _disks_not_shared(directory: Path) -> tuple[str, list[str]]:
    if dist.get_rank() == 1:
        _own_disk(directory)
    with Checkpointer(directory) as checkpointer:
        error = checkpointer.save(1, sharded(1)).committed.exception(TIMEOUT_S / 4)
        with suppress(SaveError):
            checkpointer._saver.raise_failure()
        return f"{type(error).__name__}: {error}", [str(e) for e in checkpointer.inspect()]


@pytest.mark.root
def test_ranks_on_disks_that_they_do_not_share(tmp_path: Path) -> None:
    for error, entries in run_ranks(2, _disks_not_shared, tmp_path):
        assert error.startswith("SaveError: rank 0: rank 1 wrote ")
        assert f"({socket.gethostname()}), into {tmp_path}/step-00000001; rank 0 (" in error
        assert "does not see that file" in error
        assert "nothing was committed" in error
        assert len(entries) == 1
        assert "valid" not in entries[0]


def _shorter(directory: Path) -> str:
    """What rank 1 wrote is cut off before the commit."""
    if dist.get_rank() == 0:
        finish = pyckpt.DirectWriter.finish

        def cut(*arguments: Any, **options: Any) -> None:
            (file,) = directory.glob("__1_*.distcp")
            os.truncate(file, 100)
            finish(*arguments, **options)

        pyckpt.DirectWriter.finish = cut  # type: ignore[method-assign,assignment]
    error = _outcome(lambda: dcp.save(sharded(1), storage_writer=pyckpt.DirectWriter(directory)))
    assert isinstance(error, CheckpointException)
    return "; ".join(str(e) for e, _ in error.failures.values())


def test_files_that_are_too_short_are_not_committed(tmp_path: Path) -> None:
    for error in run_ranks(2, _shorter, tmp_path):
        assert "sees 100 bytes of it" in error
    assert ".metadata" not in os.listdir(tmp_path)


# --- room for the next save -----------------------------------------------------------------------


def _disk_fails(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


def _room(directory: Path) -> tuple[list[str], list[list[str]]]:
    """What is there when a save after one that failed on rank 1 begins to write."""
    write = pyckpt.DirectWriter._write
    seen: list[list[str]] = []

    def look(self: pyckpt.DirectWriter, *arguments: Any) -> Any:
        seen.append(sorted(os.listdir(directory)))
        return write(self, *arguments)

    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, sharded(1)).wait(TIMEOUT_S / 4)
        if dist.get_rank() == 1:
            pyckpt.DirectWriter._write = _disk_fails  # type: ignore[method-assign,assignment]
        for step in (2, 1):  # into a directory of its own, and over a checkpoint
            checkpointer.save(step, sharded(step + 10)).committed.exception(TIMEOUT_S / 4)
            with suppress(OSError):
                checkpointer._saver.raise_failure()
        dist.barrier()
        remains = sorted(path.name for path in directory.glob("*/__0_*"))
        dist.barrier()
        pyckpt.DirectWriter._write = look  # type: ignore[method-assign,assignment]
        checkpointer.save(3, sharded(3)).wait(TIMEOUT_S / 4)
        state = sharded(0)
        assert checkpointer.restore(state, step=1) == 1
        assert value_of(state) == [1.0]
        pyckpt.DirectWriter._write = write  # type: ignore[method-assign]
        if dist.get_rank() == 1:
            pyckpt.DirectWriter._write = _disk_fails  # type: ignore[method-assign,assignment]
        checkpointer.save(4, sharded(4)).committed.exception(TIMEOUT_S / 4)
        with suppress(OSError):
            checkpointer._saver.raise_failure()
    return remains, seen


def test_what_failed_saves_left_goes_before_the_next_one_writes(tmp_path: Path) -> None:
    results = run_ranks(2, _room, tmp_path)
    for remains, seen in results:
        assert len(remains) == 2  # that of step 1, and of what was to replace it
        assert seen == [[".pyckpt", "step-00000001", "step-00000003"]]
    files = [path.name for path in tmp_path.glob("*/__*.distcp")]
    assert len(files) == 4  # the last save failed, and the end cleared up after it


# --- ranks that do not come -----------------------------------------------------------------------


def _stops(pipe: Pipe, store: str, directory: Path, rank: int, who: int, where: str) -> str:
    """Rank ``who`` is stopped in the middle of something, like one whose disk or host hangs."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 3),
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )

    def stop(*_: Any, **__: Any) -> None:
        pipe.send("stopping")
        os.kill(os.getpid(), signal.SIGSTOP)

    state = sharded(1)
    with Checkpointer(directory, timeout=5.0, every_steps=2) as checkpointer:
        checkpointer.save(1, state).wait(TIMEOUT_S / 4)
        dist.barrier()
        error: BaseException | None = None
        if where == "writing" and rank == who:
            pyckpt.DirectWriter._write = stop  # type: ignore[method-assign,assignment]
        if where == "restoring":
            if rank == who:
                stop()
            error = _outcome(lambda: checkpointer.restore(state))
        elif where == "idle":
            if rank == who:
                stop()
            while checkpointer._ranks.lost is None:
                time.sleep(0.01)
        else:
            error = checkpointer.save(2, state).committed.exception(TIMEOUT_S)
            assert isinstance(_outcome(checkpointer._saver.raise_failure), RanksLost)
        lost = checkpointer._ranks.lost
        assert isinstance(lost, RanksLost)
        assert error in (None, lost)
        # Training goes on, and hears of it wherever something is due.
        assert checkpointer.step(3, state) is None
        for call in (
            lambda: checkpointer.step(4, state),
            lambda: checkpointer.save(5, state),
            lambda: checkpointer.restore(state),
        ):
            assert _outcome(call) is lost
        checkpointer.request_stop()
        step = 7
        while not checkpointer.stop_requested:  # until it knows that it cannot agree on that
            step += 2
            stopped = _outcome(lambda: checkpointer.step(step, state))  # noqa: B023
            time.sleep(0.01)
        assert stopped is lost
        assert [checkpoint.step for checkpoint in checkpointer.checkpoints()] == [1]
    return f"{lost.ranks}: {lost}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "who"), [("writing", 0), ("writing", 2), ("restoring", 1), ("idle", 0)]
)
def test_a_rank_that_is_stopped_is_named_and_holds_nobody(
    where: str, who: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = str(tmp_path / "store")
    children = [Child(_stops, store, tmp_path / "run", rank, who, where) for rank in range(3)]
    try:
        assert children[who].receive() == "stopping"
        for rank in {0, 1, 2} - {who}:
            said = children[rank].receive()
            assert said.startswith(f"({who},): ")
            assert f"rank {who} (" in said or where == "idle"
            assert "did not come (timeout=5 s)" in said
            assert "saves and restores no more" in said
        assert children[who].process.exitcode is None
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0)])
def test_timeouts_are_positive(timeout: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Checkpointer(tmp_path, timeout=timeout)


# --- loads beside a save --------------------------------------------------------------------------


def _load_beside(directory: Path, how: str, times: int) -> tuple[list[float], str]:
    """Rank 1 reads the metadata after another save replaced it; so many times."""
    late = dist.get_rank() == 1
    left = times

    class Reader(pyckpt.DirectReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if not late:
                metadata = super().read_metadata(*args, **kwargs)
                dist.barrier(group)
                dist.barrier(group)
                return metadata
            dist.barrier(group)
            if left:
                left -= 1
                save_alone(directory, 10.0 + times - left, keep=True)
            dist.barrier(group)
            return super().read_metadata(*args, **kwargs)

    group = dist.new_group(backend="gloo")
    if late:
        save_alone(directory, 10.0)
    dist.barrier()
    state = {f"w{i}": torch.zeros(1000) for i in range(2)}
    reader = Reader(directory)
    error: BaseException | None
    if how == "pyckpt":
        error = _outcome(lambda: pyckpt.load(state, reader=reader))
    else:
        error = _outcome(lambda: dcp.load(state, storage_reader=reader))
        if isinstance(error, CheckpointException):
            (error,) = [e for e, _ in error.failures.values()]
    values = sorted({value for tensor in state.values() for value in tensor.tolist()})
    return values, "" if error is None else f"{type(error).__name__}: {error}"


def save_alone(directory: Path, value: float, *, keep: bool = False) -> None:
    """Save, and keep the old data, as on a disk that is slow to sync the commit before it goes."""
    with pytest.MonkeyPatch.context() as patch:
        if keep:
            patch.setattr("pyckpt.format.commit.remove_unnamed", lambda *_, **__: None)
            patch.setattr("pyckpt.format.commit._sweep", lambda *_, **__: None)
        state = {f"w{i}": torch.full((1000,), value) for i in range(2)}
        dcp.save(state, storage_writer=pyckpt.DirectWriter(directory), no_dist=True)


def test_a_load_beside_a_save_is_of_one_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(2, _load_beside, tmp_path, "pyckpt", 1) == [([11.0], "")] * 2


@pytest.mark.parametrize(("how", "times"), [("pyckpt", 100), ("stock", 1)])
def test_a_load_beside_saves_that_do_not_end(how: str, times: int, tmp_path: Path) -> None:
    for values, error in run_ranks(2, _load_beside, tmp_path, how, times):
        assert values == [0.0]
        assert error.startswith("CheckpointReplaced: ")
        assert "ranks see different checkpoints: rank 0: save " in error


def test_what_is_swept_out_while_it_is_loaded_is_loaded_again(tmp_path: Path) -> None:
    save_alone(tmp_path, 1.0)
    times = 0

    class Reader(pyckpt.DirectReader):
        def read_data(self, *args: Any) -> Any:
            nonlocal times
            times += 1
            if times == 1:
                save_alone(tmp_path, 2.0)
            return super().read_data(*args)

    state = {f"w{i}": torch.zeros(1000) for i in range(2)}
    pyckpt.load(state, reader=Reader(tmp_path))
    assert state["w0"].unique().tolist() == [2.0]
    assert times == 2
    os.unlink(next(tmp_path.glob("*.distcp")))
    with pytest.raises(FileNotFoundError):
        pyckpt.load(state, tmp_path)


def test_what_is_one_load() -> None:
    refuse_mixture([Seen("/a", "1"), Seen("/b", "1"), None])
    refuse_mixture([Seen("/a", None), Seen("/a", None)])
    with pytest.raises(CheckpointReplaced, match=r"ranks 0, 2: save 1 in /a; rank 1: save 2 in"):
        refuse_mixture([Seen("/a", "1"), Seen("/a", "2"), Seen("/a", "1")])
    assert issubclass(CheckpointReplaced, LoadError)
