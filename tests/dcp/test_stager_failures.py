"""PinnedStager short of memory, and saves that fail: nothing hangs, all is told, all given back."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import pickle
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _filesystems import TMPFS_BYTES
from _sampling import sampled
from _staging import RING, check_saved, engine, frozen, outcome, overwrite, writer_to
from torch.distributed.checkpoint import FileSystemWriter

import pyckpt
from pyckpt.dcp import staging as staging_module
from pyckpt.dcp.default_stager import default_stager
from pyckpt.dcp.staging import Staging
from pyckpt.errors import EngineClosed, StagerBusy

MIB = 1 << 20


class Gated(pyckpt.DirectWriter):
    """Writes when it is let."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, sync_files=False, **options)
        self.gate = threading.Event()
        self.reached = threading.Event()

    def prepare_local_plan(self, plan: Any) -> Any:
        self.reached.set()
        assert self.gate.wait(60)
        return super().prepare_local_plan(plan)


@pytest.fixture
def tight() -> Any:
    """With room for one state, and not for two."""
    with engine(max_pinned_bytes=RING + 4 * MIB) as made:
        yield made
        gc.collect()
        if not made.closed:
            assert made.native.arena_used_bytes == 0
            assert made.native.arena_held_bytes <= 4 * MIB


def large_state() -> dict[str, Any]:
    return {"large": torch.rand(700_000), "small": torch.rand(10), "step": 3}


def test_busy_error(tmp_path: Path, tight: pyckpt.Engine) -> None:
    stager = pyckpt.PinnedStager(engine=tight, when_busy="error")
    state = large_state()
    first = Gated(tmp_path / "first", stager=stager, engine=tight)
    future = dcp.async_save(state, storage_writer=first)
    second = writer_to(tmp_path / "second", stager=stager, engine=tight)
    with pytest.raises(StagerBusy, match="max_pinned_bytes"):
        dcp.async_save(state, storage_writer=second)
    small = {"small": torch.rand(10)}  # which there is room for
    third = writer_to(tmp_path / "third", stager=stager, engine=tight)
    dcp.async_save(small, storage_writer=third).result()
    check_saved(small, tmp_path / "third")
    first.gate.set()
    future.result()
    check_saved(state, tmp_path / "first")
    dcp.async_save(state, storage_writer=second).result()
    check_saved(state, tmp_path / "second")


def test_busy_skip(tmp_path: Path, tight: pyckpt.Engine, caplog: pytest.LogCaptureFixture) -> None:
    stager = pyckpt.PinnedStager(engine=tight, when_busy="skip")
    old = {"old": torch.rand(5)}
    dcp.save(old, storage_writer=writer_to(tmp_path / "second", engine=tight))
    names = sorted(path.name for path in (tmp_path / "second").iterdir())
    state = large_state()
    first = Gated(tmp_path / "first", stager=stager, engine=tight)
    future = dcp.async_save(state, storage_writer=first)
    second = writer_to(tmp_path / "second", stager=stager, engine=tight)
    dcp.async_save(state, storage_writer=second).result()
    assert "not saved" in caplog.text
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == names
    check_saved(old, tmp_path / "second")
    first.gate.set()
    future.result()
    check_saved(state, tmp_path / "first")
    dcp.async_save(state, storage_writer=second).result()
    check_saved(state, tmp_path / "second")


def test_busy_wait(tmp_path: Path, tight: pyckpt.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stager = pyckpt.PinnedStager(engine=tight)
    state = large_state()
    first = Gated(tmp_path / "first", stager=stager, engine=tight)
    before = frozen(state)
    future = dcp.async_save(state, storage_writer=first)
    overwrite(state)
    original = Staging.wait_released
    waited: list[bool] = []

    def wait_released(self: Staging) -> None:
        waited.append(first.written.done())
        first.gate.set()
        original(self)

    monkeypatch.setattr(Staging, "wait_released", wait_released)
    second = writer_to(tmp_path / "second", stager=stager, engine=tight)
    other = dcp.async_save(state, storage_writer=second)
    assert waited == [False]
    assert first.written.done()
    other.result()
    future.result()
    check_saved(before, tmp_path / "first")
    check_saved(state, tmp_path / "second")


def test_shared_memory_is_needed_once(tmp_path: Path, tight: pyckpt.Engine) -> None:
    """What a save needs is not more than it will take."""
    stager = pyckpt.PinnedStager(engine=tight, when_busy="error")
    tensor = torch.rand(400_000)
    holder = Gated(tmp_path / "first", stager=stager, engine=tight)
    future = dcp.async_save({"a": torch.rand(300_000)}, storage_writer=holder)
    tied = {f"{i}": tensor for i in range(10)}
    dcp.async_save(
        tied, storage_writer=writer_to(tmp_path / "tied", stager=stager, engine=tight)
    ).result()
    check_saved(tied, tmp_path / "tied")
    holder.gate.set()
    future.result()


def test_larger_than_the_budget(tmp_path: Path, tight: pyckpt.Engine) -> None:
    """Streamed from where it is, with and without a guard, and the rest is copied."""
    parameters = [torch.nn.Parameter(torch.rand(500_000)) for _ in range(6)]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    stager = pyckpt.PinnedStager(engine=tight, optimizers=[optimizer])
    for turn in range(3):
        state = {
            "model": {f"{i}": parameter for i, parameter in enumerate(parameters)},
            "buffer": torch.rand(900),
            "step": turn,
        }
        before = frozen(state)
        path = tmp_path / str(turn)
        writer = writer_to(path, stager=stager if turn else None, engine=tight)
        future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        state["buffer"].zero_()
        if turn:
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        else:
            overwrite(state)
        future.result()
        check_saved(before, path)


class Raises(dcp.DefaultSavePlanner):
    """Fails in one of its calls."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        if self.at == "set_up_planner":
            raise RuntimeError("made to fail")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: Any) -> Any:
        if self.at == "create_global_plan":
            raise RuntimeError("made to fail")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        if self.at == "finish_plan":
            raise RuntimeError("made to fail")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self.at == "resolve_data":
            raise RuntimeError("made to fail")
        return super().resolve_data(write_item)


@pytest.mark.parametrize(
    ("at", "size"),
    sampled(
        itertools.product(
            ["set_up_planner", "create_global_plan", "finish_plan", "resolve_data"],
            [10_000, 3_000_000],  # copied, streamed
        ),
        3,
    ),
)
def test_planner_that_raises(tmp_path: Path, tight: pyckpt.Engine, at: str, size: int) -> None:
    parameter = torch.nn.Parameter(torch.rand(size))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    stager = pyckpt.PinnedStager(engine=tight, optimizers=[optimizer])
    state = {"weight": parameter}
    writer = writer_to(tmp_path, stager=stager, engine=tight)
    future = dcp.async_save(state, storage_writer=writer, planner=Raises(at))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # does not wait for ever
    assert "made to fail" in str(outcome(future.result))
    assert writer.staged.exception(60) is None
    with pytest.raises((CancelledError, RuntimeError)):  # never began, or failed
        writer.written.result(60)
    gc.collect()
    assert tight.native.arena_used_bytes == 0
    again = writer_to(tmp_path, stager=stager, engine=tight)
    if at == "resolve_data":  # what fails on a rank that writes, the next save tells once
        with pytest.raises(RuntimeError, match="made to fail"):
            dcp.async_save(state, storage_writer=again)
    before = frozen(state)
    dcp.async_save(state, storage_writer=again).result()
    check_saved(before, tmp_path)


def test_directory_that_cannot_be_made(tmp_path: Path, tight: pyckpt.Engine) -> None:
    (tmp_path / "file").touch()
    stager = pyckpt.PinnedStager(engine=tight)
    state = large_state()
    writer = writer_to(tmp_path / "file" / "below", stager=stager, engine=tight)
    future = dcp.async_save(state, storage_writer=writer)
    error = outcome(future.result)
    assert isinstance(error, NotADirectoryError | FileExistsError)
    assert writer.staged.exception(60) is None
    with pytest.raises(CancelledError):
        writer.written.result(60)
    assert tight.native.arena_used_bytes == 0


@pytest.mark.root
@pytest.mark.parametrize("filesystem", ["tmpfs"], indirect=True)
@pytest.mark.parametrize("budget", [32 * MIB, 4 * MIB], ids=["copied", "streamed"])
def test_disk_full(filesystem: Path, budget: int) -> None:
    parameter = torch.nn.Parameter(torch.rand(TMPFS_BYTES // 4 + 1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones_like(parameter)
    with engine(max_pinned_bytes=RING + budget) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        writer = writer_to(filesystem / "full", stager=stager, engine=own)
        small = {"small": torch.rand(9)}
        dcp.async_save(small, storage_writer=writer).result()
        future = dcp.async_save({"weight": parameter}, storage_writer=writer)
        optimizer.step()
        error = outcome(future.result)
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC
        told = writer.written.exception(60)
        assert isinstance(told, OSError)
        assert told.errno == errno.ENOSPC
        assert own.native.arena_used_bytes == 0
        with pytest.raises(OSError, match="No space left"):
            dcp.async_save(small, storage_writer=writer)
        check_saved(small, filesystem / "full")
        dcp.async_save(small, storage_writer=writer).result()
        check_saved(small, filesystem / "full")


def test_take_failure(tmp_path: Path, tight: pyckpt.Engine) -> None:
    stager = pyckpt.PinnedStager(engine=tight)
    assert stager.take_failure() is None
    writer = writer_to(tmp_path, stager=stager, engine=tight)
    future = dcp.async_save(
        {"t": torch.rand(3)}, storage_writer=writer, planner=Raises("resolve_data")
    )
    assert "made to fail" in str(outcome(future.result))
    failure = stager.take_failure()
    assert isinstance(failure, RuntimeError)
    assert stager.take_failure() is None
    dcp.async_save({"t": torch.rand(3)}, storage_writer=writer).result()


@pytest.mark.parametrize("size", [10_000, 3_000_000], ids=["copied", "streamed"])
def test_engine_closed_in_between(tmp_path: Path, size: int) -> None:
    own = engine(max_pinned_bytes=RING + 4 * MIB)
    parameter = torch.nn.Parameter(torch.rand(size))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones_like(parameter)
    stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
    writer = Gated(tmp_path, stager=stager, engine=own)
    future = dcp.async_save({"weight": parameter}, storage_writer=writer)
    closing = threading.Thread(target=own.close)
    closing.start()
    writer.gate.set()
    optimizer.step()
    error = outcome(future.result)
    closing.join(60)
    assert not closing.is_alive()
    assert isinstance(error, EngineClosed)
    assert isinstance(writer.written.exception(60), EngineClosed)
    with pytest.raises(EngineClosed):
        dcp.async_save({"weight": parameter}, storage_writer=writer)
    assert own.native.arena_used_bytes == 0


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("a program's handler, as planned")


def test_a_handler_of_the_log_that_raises_holds_no_save_up(tight: pyckpt.Engine) -> None:
    stager = pyckpt.PinnedStager(engine=tight)
    gate = threading.Event()
    stager._run_later(lambda: gate.wait(60))
    staging, _ = stager.begin({"t": torch.rand(10)}, direct=False)
    staging._native.fail("as planned")
    handler = Raising()
    logging.getLogger("pyckpt").addHandler(handler)
    try:
        gate.set()
        with pytest.raises(RuntimeError, match="as planned"):
            staging.staged.result(60)
    finally:
        logging.getLogger("pyckpt").removeHandler(handler)
    staging.release()


def test_engine_closed_before(tmp_path: Path) -> None:
    own = engine()
    own.close()
    stager = pyckpt.PinnedStager(engine=own)
    with pytest.raises(EngineClosed):
        stager.stage({"t": torch.rand(3)})
    with pytest.raises(EngineClosed):
        dcp.async_save(
            {"t": torch.rand(3)},
            storage_writer=FileSystemWriter(tmp_path),
            async_stager=stager,
        )


def test_an_object_that_cannot_be_copied(tmp_path: Path, tight: pyckpt.Engine) -> None:
    """The call raises, and nothing of the save stays behind."""
    stager = pyckpt.PinnedStager(engine=tight)
    state = {**large_state(), "lock": threading.Lock()}
    for _ in range(3):
        writer = writer_to(tmp_path, stager=stager, engine=tight)
        with pytest.raises(TypeError, match="lock"):
            dcp.async_save(state, storage_writer=writer)
        gc.collect()
        assert tight.native.arena_used_bytes == 0


def test_writer_used_for_a_plain_save_after_a_failed_one(
    tmp_path: Path, tight: pyckpt.Engine
) -> None:
    """Nothing of the failed one is in it."""
    stager = pyckpt.PinnedStager(engine=tight, when_busy="skip")
    holder, _ = stager.begin(large_state(), direct=True)
    writer = writer_to(tmp_path, stager=stager, engine=tight)
    state = large_state()
    future = dcp.async_save(state, storage_writer=writer, planner=Raises("create_global_plan"))
    assert "made to fail" in str(outcome(future.result))
    dcp.save(state, storage_writer=writer)
    check_saved(state, tmp_path)
    holder.release()


def test_a_save_that_no_thread_ever_made(tmp_path: Path, tight: pyckpt.Engine) -> None:
    """DCP found no thread, say: who waits for room is woken when the state dict is dropped, and the
    memory is given back."""
    stager = pyckpt.PinnedStager(engine=tight)
    lost = writer_to(tmp_path / "lost", stager=stager, engine=tight)
    staged = [lost.stage(large_state())]
    staging = staged[0].staging
    waiting = threading.Thread(target=staging.wait_released)
    waiting.start()
    assert not staging.released
    staged.clear()
    waiting.join(60)
    assert staging.released
    assert lost.written.cancelled()
    state = large_state()
    writer = writer_to(tmp_path / "next", stager=stager, engine=tight)
    dcp.async_save(state, storage_writer=writer).result()
    check_saved(state, tmp_path / "next")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that have not begun are given up as soon as somebody waits for them."""
    monkeypatch.setattr(staging_module, "_LOOK_S", 0.001)
    monkeypatch.setattr(staging_module, "_BEGINS_S", 0.0)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("waits", ["save", "step"])
def test_a_save_that_does_not_begin_is_given_up(
    tmp_path: Path, tight: pyckpt.Engine, waits: str, caplog: pytest.LogCaptureFixture
) -> None:
    """DCP found no thread, say, and the program still has the exception, which holds the call."""
    state = {"t": torch.rand(700_000 if waits == "save" else 1_300_000)}
    stager = pyckpt.PinnedStager(
        engine=tight, optimizers=[torch.optim.SGD([torch.nn.Parameter(state["t"])])]
    )
    lost = writer_to(tmp_path / "lost", stager=stager, engine=tight)
    staged = lost.stage(state)
    writer = writer_to(tmp_path / "next", stager=stager, engine=tight)
    if waits == "save":
        dcp.async_save(state, storage_writer=writer).result()
        check_saved(state, tmp_path / "next")
    else:
        stager.wait_staged()
    assert staged.staging.released
    assert lost.written.cancelled()
    assert tight.native.arena_used_bytes == 0
    assert "did not begin" in caplog.text
    # It begins after all. Its memory may hold another save by now.
    error = outcome(lambda: dcp.save(staged, storage_writer=lost, no_dist=True))
    assert isinstance(error, StagerBusy)
    assert "so late" in str(error)
    with pytest.raises(StagerBusy, match="so late"):
        pickle.dumps(staged)
    dcp.save(state, storage_writer=lost, no_dist=True)
    check_saved(state, tmp_path / "lost")


@pytest.mark.usefixtures("impatient")
def test_a_save_that_has_begun_is_not_given_up(tmp_path: Path, tight: pyckpt.Engine) -> None:
    writer = Gated(tmp_path, stager=pyckpt.PinnedStager(engine=tight), engine=tight)
    state = {"t": torch.rand(1000)}
    future = dcp.async_save(state, storage_writer=writer)
    assert writer.reached.wait(60)
    staging = writer._staging
    assert staging is not None
    assert not staging.give_up()
    writer.gate.set()
    future.result()
    check_saved(state, tmp_path)


def test_a_writer_whose_save_never_began_saves_again(tmp_path: Path, tight: pyckpt.Engine) -> None:
    stager = pyckpt.PinnedStager(engine=tight)
    writer = writer_to(tmp_path, stager=stager, engine=tight)
    state = large_state()
    staged = writer.stage(state)
    dcp.async_save(state, storage_writer=writer).result()
    assert staged.staging.released
    check_saved(state, tmp_path)


@pytest.mark.parametrize("why", ["memory", "busy", "earlier"])
def test_futures_of_a_save_that_could_not_be_staged_are_cancelled(
    tmp_path: Path, tight: pyckpt.Engine, why: str
) -> None:
    stager = pyckpt.PinnedStager(engine=tight, when_busy="error")
    state = large_state()
    holder, _ = stager.begin(state if why == "busy" else {}, direct=True)
    if why == "memory":
        state["large"].untyped_storage().resize_(0)
    if why == "earlier":
        stager.keep_failure(ValueError("an earlier save failed"))
    writer = writer_to(tmp_path, stager=stager, engine=tight)
    staged, written = writer.staged, writer.written
    with pytest.raises((ValueError, StagerBusy)):
        dcp.async_save(state, storage_writer=writer)
    assert writer.staged.cancelled()
    assert writer.written.cancelled()
    assert staged is not writer.staged
    assert written is not writer.written
    holder.release()
    assert tight.native.arena_used_bytes == 0


def test_a_thread_that_ends_without_a_word(tmp_path: Path, tight: pyckpt.Engine) -> None:
    """It began two saves, and wrote neither: the first is over when the second begins, the second
    when the thread ends."""
    stager = pyckpt.PinnedStager(engine=tight)
    writers = [writer_to(tmp_path / name, stager=stager, engine=tight) for name in "ab"]
    staged = [writer.stage({"t": torch.rand(1000)}) for writer in writers]

    def begin() -> None:
        for writer in writers:
            writer.storage_meta()
        assert staged[0].staging.released
        assert not staged[1].staging.released

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    staged[1].staging.ended.result(60)
    assert tight.native.arena_used_bytes == 0


def test_stagers_of_writers_that_were_given_none(tmp_path: Path) -> None:
    """One an engine, which it does not keep alive. Engines of equal settings are not the same."""
    engines = [engine(), engine()]
    assert engines[0] == engines[1]
    first, second = (default_stager(own) for own in engines)
    assert first is not second
    assert default_stager(engines[0]) is first
    for own in engines:
        writer = writer_to(tmp_path, engine=own)
        dcp.async_save({"t": torch.rand(3)}, storage_writer=writer).result()
    native = weakref.ref(engines[0].native)
    del first, second, writer, own
    engines.clear()
    gc.collect()
    assert native() is None
