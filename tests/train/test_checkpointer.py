"""Checkpointer in a single process: saving, finding, restoring, keeping, stopping."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _staging import engine, slowed
from _training import Run, damage, resumed

import pyckpt
from pyckpt import Checkpointer
from pyckpt.errors import CorruptCheckpoint, SaveError
from pyckpt.train.saver import Saver


def steps_in(directory: Path) -> list[int]:
    with Checkpointer(directory) as checkpointer:
        return [checkpoint.step for checkpoint in checkpointer.checkpoints()]


# --- saving ---------------------------------------------------------------------------------------


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    whole = Run().to(30)
    for stop in (12, 25, 30):
        run = Run()
        with Checkpointer(
            tmp_path, keep_last=3, keep_every=20, every_steps=5, when_busy="wait"
        ) as checkpointer:
            start = checkpointer.restore(run.state)
            assert start == {12: None, 25: 10, 30: 25}[stop]
            run.to(stop, checkpointer, (start or 0) + 1)
        assert {step: whole.losses[step] for step in run.losses} == run.losses
    assert run.equals(whole)
    assert steps_in(tmp_path) == [20, 25, 30]


def test_stock_reads_it(tmp_path: Path) -> None:
    run = Run().to(3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, run.state, metrics={"loss": 1.5})
    assert sorted(os.listdir(tmp_path)) == [".pyckpt", "step-00000003"]
    target = {"model": Run().model.state_dict(), "pyckpt.checkpoint": ""}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000003")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(target["model"][name], tensor)
    said = json.loads(target["pyckpt.checkpoint"])
    assert said == {"step": 3, "final": False, "metrics": {"loss": 1.5}}


def test_a_forward_pass_may_change_parameters_right_after_the_call(tmp_path: Path) -> None:
    with (
        engine(io_threads=1) as own,
        Checkpointer(tmp_path, every_steps=1, engine=own) as checkpointer,
    ):
        for step in range(2):
            model = torch.nn.Embedding(64, 1024, max_norm=1.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            expected = model.weight.detach().clone()
            with slowed(own):
                handle = checkpointer.save(step, {"model": model, "optimizer": optimizer})
                model(torch.arange(64))
            assert not torch.equal(model.weight, expected)
            loaded = pyckpt.load(handle.wait())
            assert torch.equal(loaded["model"]["weight"], expected)


def test_a_handle_tells_how_far_it_is(tmp_path: Path) -> None:
    run = Run().to(1)
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, run.state)
        assert handle.step == 1
        assert handle.wait(timeout=60) == tmp_path / "step-00000001"
        assert handle.staged.result(timeout=0) is None
        written = handle.written.result(timeout=0)
        assert written is not None
        assert written.bytes > 1000
        assert handle.committed.result(timeout=0) == handle.path
        assert handle.progress == 1.0
        assert repr(handle).startswith("<SaveHandle of step 1: committed in ")
        statistics = handle.statistics
        assert statistics.write == written
        assert 0 < statistics.staged_seconds <= statistics.written_seconds
        assert statistics.written_seconds <= statistics.committed_seconds
        assert "step 1" in str(statistics)


class Gate:
    """Holds saves before their commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        finish = pyckpt.DirectWriter.finish

        def held(*arguments: Any, **options: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            finish(*arguments, **options)

        monkeypatch.setattr(pyckpt.DirectWriter, "finish", held)


def test_training_goes_on_beside_a_save_and_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(monkeypatch)
    run = Run()
    with Checkpointer(tmp_path, every_steps=10) as checkpointer:
        run.to(19, checkpointer)
        assert gate.reached.wait(60)
        handle = checkpointer.step(20, run.state)
        assert handle is None
        assert checkpointer.latest() is None
        assert "step 20 is not saved" in caplog.text
        gate.open.set()
        checkpointer._saver.wait()
        assert checkpointer.step(29, run.state) is None
        second = checkpointer.step(30, run.state)
        assert second is not None
        second.wait()
        statistics = checkpointer.statistics
    assert (statistics.saves, statistics.skipped, statistics.failed) == (2, 1, 0)
    assert steps_in(tmp_path) == [10, 30]


def test_what_was_due_last_and_left_out_is_saved_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    run = Run()
    with Checkpointer(tmp_path, every_steps=10) as checkpointer:
        run.to(22, checkpointer)
        threading.Timer(0, gate.open.set).start()
    assert steps_in(tmp_path) == [10, 22]
    step, again = resumed(tmp_path)
    assert step == 22
    assert again.equals(Run().to(22))


@pytest.mark.parametrize("what", ["saved since", "restored since", "raised"])
def test_what_was_left_out_is_not_always_owed(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    run = Run()
    with suppress(ZeroDivisionError), Checkpointer(tmp_path, every_steps=10) as checkpointer:
        run.to(22, checkpointer)
        gate.open.set()
        if what == "saved since":
            checkpointer.save(22, run.state)
            run.train(23)
            checkpointer.step(23, run.state)
        elif what == "restored since":
            assert checkpointer.restore(run.state) == 10
        else:
            raise ZeroDivisionError
    assert steps_in(tmp_path) == ([10, 22] if what == "saved since" else [10])


def test_what_is_saved_is_the_state_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    run = Run().to(4)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, run.state)
        run.to(9, start=5)
        gate.open.set()
    assert resumed(tmp_path)[1].equals(Run().to(4))


def test_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    run = Run().to(1)
    with Checkpointer(tmp_path) as checkpointer:
        first = checkpointer.save(1, run.state)
        assert gate.reached.wait(60)
        threading.Timer(0, gate.open.set).start()
        second = checkpointer.save(2, run.state)
        assert first.committed.done()
        second.wait()
    assert steps_in(tmp_path) == [1, 2]


def test_wait_waits_for_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    run = Run().to(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.wait()  # for nothing
        handle = checkpointer.save(1, run.state)
        assert gate.reached.wait(60)
        threading.Timer(0, gate.open.set).start()
        checkpointer.wait()
        assert handle.committed.done()
        checkpointer.save(2, run.state)
        checkpointer.wait()
    checkpointer.wait()
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize("by_call", [False, True])
def test_a_step_that_is_there_is_replaced_or_refused_as_overwrite_says(
    by_call: bool, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path, overwrite=by_call) as checkpointer:
        refuse = {"overwrite": False} if by_call else {}
        checkpointer.save(1, {"x": 1}, **refuse).wait()
        with pytest.raises(FileExistsError, match="overwrite"):
            checkpointer.save(1, {"x": 2}, **refuse).wait()
        with pytest.raises(FileExistsError, match="overwrite"):
            checkpointer.wait()
        state = {"x": 0}
        assert checkpointer.restore(state) == 1
        assert state == {"x": 1}
        checkpointer.save(1, {"x": 3}, overwrite=True).wait()
        assert checkpointer.restore(state) == 1
        assert state == {"x": 3}
        checkpointer.save(2, {"x": 4}, **refuse)
    assert [one.step for one in Checkpointer(tmp_path).checkpoints(verify=True)] == [1, 2]


def test_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    asked = []

    def save_when(step: int) -> bool:
        asked.append(step)
        return step in (3, 4)

    with Checkpointer(
        tmp_path, every_steps=6, save_when=save_when, every_minutes=1, when_busy="wait"
    ) as checkpointer:
        run.to(9, checkpointer)
        assert asked == [1, 2, 3, 4, 5, 7, 8, 9]
        now = checkpointer._requests.saved_at
        monkeypatch.setattr("time.monotonic", lambda: now + 59)
        checkpointer.step(10, run.state)
        monkeypatch.setattr("time.monotonic", lambda: now + 60)
        checkpointer.step(11, run.state)
        checkpointer.step(13, run.state)
        monkeypatch.undo()
        checkpointer.request_save()
        checkpointer.step(14, run.state)
        checkpointer.step(15, run.state)
    assert steps_in(tmp_path) == [3, 4, 6, 11, 14]


def test_a_step_that_was_saved_by_hand_is_not_saved_again(tmp_path: Path) -> None:
    run = Run().to(5)
    with Checkpointer(tmp_path, every_steps=5) as checkpointer:
        handle = checkpointer.save(5, run.state)
        assert checkpointer.step(5, run.state) is handle


def test_a_final_checkpoint_is_committed_on_return_and_stays(tmp_path: Path) -> None:
    run = Run().to(2)
    with Checkpointer(tmp_path, keep_last=0) as checkpointer:
        checkpointer.save(1, run.state)
        assert checkpointer.save(2, run.state, final=True).committed.done()
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.final
    assert steps_in(tmp_path) == [2]
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (3, 4):
            checkpointer.save(step, run.state)
    assert steps_in(tmp_path) == [2, 4]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, Run().to(1).state)
        checkpointer.save(1, Run().to(7).state)
    assert resumed(tmp_path)[1].equals(Run().to(7))
    assert len(os.listdir(tmp_path / "step-00000001")) == 2


def test_wrong_arguments(tmp_path: Path) -> None:
    for options, match in (
        ({"when_busy": "panic"}, "when_busy"),
        ({"every_steps": 0}, "every_steps"),
        ({"every_minutes": 0}, "every_minutes"),
        ({"on_signals": ["SIGNOTHING"]}, "SIGNOTHING"),
        ({"keep_last": -1}, "keep_last"),
    ):
        with pytest.raises(ValueError, match=match):
            Checkpointer(tmp_path, **options)  # type: ignore[arg-type]
    run = Run()
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="0 or more"):
            checkpointer.save(-1, run.state)
        checkpointer.step(4, run.state)
        with pytest.raises(ValueError, match="must be larger"):
            checkpointer.step(4, run.state)
    assert os.listdir(tmp_path) == []


def test_closed_is_closed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.close()
    checkpointer.close()
    for call in (
        lambda: checkpointer.step(1, {}),
        lambda: checkpointer.save(1, {}),
        lambda: checkpointer.restore({}),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_the_reserved_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"pyckpt.checkpoint": 1, **Run().state})
        with pytest.raises(SaveError, match="is taken"):
            handle.wait()
        with pytest.raises(SaveError, match="is taken"):
            checkpointer.save(2, Run().state)


# --- failures -------------------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def finish(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(pyckpt.DirectWriter, "finish", finish)
    return monkeypatch


def test_a_failed_save_is_raised_once_by_the_next_call(
    tmp_path: Path, full_disk: pytest.MonkeyPatch
) -> None:
    run = Run().to(2)
    with Checkpointer(tmp_path, every_steps=1, when_busy="wait") as checkpointer:
        full_disk.undo()
        checkpointer.save(1, run.state).wait()
        with full_disk.context() as patch:
            patch.setattr(pyckpt.DirectWriter, "write_data", _no_space)
            handle = checkpointer.step(2, run.state)
            assert handle is not None
            with pytest.raises(OSError, match="No space"):
                handle.wait()
        assert isinstance(handle.written.exception(), OSError)
        with pytest.raises(OSError, match="No space") as info:
            checkpointer.step(3, run.state)
        assert info.value.errno == 28
        assert checkpointer.step(4, run.state) is not None
        checkpointer.wait()
        with full_disk.context() as patch:
            patch.setattr(pyckpt.DirectWriter, "write_data", _no_space)
            assert checkpointer.step(5, run.state) is not None
            with pytest.raises(OSError, match="No space"):
                checkpointer.wait()
        checkpointer.wait()
        assert checkpointer.statistics.failed == 2
    assert steps_in(tmp_path) == [1, 4]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_raised_may_be_repeated(
    by_hand: bool, tmp_path: Path, full_disk: pytest.MonkeyPatch
) -> None:
    run = Run().to(2)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        failed = checkpointer.save(2 if by_hand else 1, run.state)
        assert isinstance(failed.committed.exception(timeout=60), OSError)
        full_disk.undo()
        with pytest.raises(OSError, match="No space"):
            checkpointer.step(2, run.state)
        handle = checkpointer.step(2, run.state)
        assert handle is not None
        handle.wait()
        with pytest.raises(ValueError, match="must be larger"):
            checkpointer.step(2, run.state)
    assert steps_in(tmp_path) == [2]


def _no_space(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("how", ["close", "save", "final", "exit"])
def test_where_a_failure_is_raised(how: str, tmp_path: Path) -> None:
    run = Run().to(1)
    checkpointer = Checkpointer(tmp_path)
    if how != "final":
        checkpointer.save(1, run.state)
    calls = {
        "close": checkpointer.close,
        "exit": lambda: checkpointer.__exit__(None, None, None),
        "save": lambda: checkpointer.save(2, run.state),
        "final": lambda: checkpointer.save(2, run.state, final=True),
    }
    with pytest.raises(OSError, match="No space"):
        calls[how]()
    checkpointer.close()  # and not again


def _save_and_raise(directory: Path) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, Run().state)
        raise ZeroDivisionError


@pytest.mark.usefixtures("full_disk")
def test_the_error_of_the_training_comes_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        _save_and_raise(tmp_path)
    assert "besides, a save failed" in caplog.text


def test_an_exception_does_not_lose_the_save_under_way(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        _save_and_raise(tmp_path)
    assert steps_in(tmp_path) == [1]


def test_a_state_that_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(*_: Any) -> None:
        raise RuntimeError("no state today")

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Saver, "_tree", tree)
            handle = checkpointer.save(1, Run().state)
        with pytest.raises(SaveError, match="no state today"):
            handle.wait()
        with pytest.raises(SaveError, match="no state today"):
            checkpointer.step(2, Run().state)
    assert steps_in(tmp_path) == []


# --- restoring ------------------------------------------------------------------------------------


def save_steps(directory: Path, *steps: int) -> None:
    run = Run()
    with Checkpointer(directory) as checkpointer:
        done = 0
        for step in steps:
            run.to(step, start=done + 1)
            done = step
            checkpointer.save(step, run.state)


def test_nothing_to_restore(tmp_path: Path) -> None:
    fresh = Run()
    assert resumed(tmp_path / "absent")[0] is None
    (tmp_path / "step-00000001").mkdir()  # a first save that was interrupted
    step, run = resumed(tmp_path)
    assert step is None
    assert run.equals(fresh)


def test_corrupt_ones_are_passed_over_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    damage(tmp_path / "step-00000003")
    damage(tmp_path / "step-00000004")
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    with Checkpointer(tmp_path) as checkpointer:
        assert [c.step for c in checkpointer.checkpoints(verify=True)] == [1, 2]
        run = Run()
        assert checkpointer.restore(run.state) == 2
        assert checkpointer.load_report is not None
    assert run.equals(Run().to(2))
    errors = [r for r in caplog.records if r.levelname == "ERROR"]
    assert [r.args[0].name for r in errors] == ["step-00000004", "step-00000003"]  # type: ignore


def test_a_corrupt_one_does_not_count_when_pruning(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 9)
    damage(tmp_path / "step-00000009")
    run = Run()
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.restore(run.state) == 2
        checkpointer.save(3, run.state)
    assert steps_in(tmp_path) == [2, 3, 9]
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.restore(run.state) == 3
        checkpointer.save(9, run.state)  # now it is good again
    assert steps_in(tmp_path) == [9]
    assert resumed(tmp_path)[0] == 9


def test_a_file_that_vanishes_is_corruption_too(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for file in (tmp_path / "step-00000002").glob("*.distcp"):
        file.unlink()
    assert resumed(tmp_path)[0] == 1


def test_all_corrupt(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    damage(tmp_path / "step-00000001")
    damage(tmp_path / "step-00000002")
    with pytest.raises(CorruptCheckpoint, match="step-00000002"):
        resumed(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}" / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpoint, match="damaged checkpoints only"):
        resumed(tmp_path)


def test_a_step_that_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2, 3)
    step, run = resumed(tmp_path, step=2)
    assert step == 2
    assert run.equals(Run().to(2))
    assert "step-00000003 is newer" in caplog.text
    with pytest.raises(FileNotFoundError, match="no valid checkpoint"):
        resumed(tmp_path, step=4)
    damage(tmp_path / "step-00000002")
    with pytest.raises(CorruptCheckpoint):
        resumed(tmp_path, step=2)


def test_a_step_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "none") as checkpointer:
        with pytest.raises(FileNotFoundError, match="no valid checkpoint, nor one of another step"):
            checkpointer.restore({"v": 0}, step=99)
        assert not (tmp_path / "none").exists()
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"v": step}).wait()
        with pytest.raises(FileNotFoundError, match=r"no valid checkpoint; there are steps 1, 2: "):
            checkpointer.restore({"v": 0}, step=99)
        for step in (10, 20, 30, 40, 50, 60):
            (tmp_path / f"step-{step:08d}").mkdir()
        with pytest.raises(FileNotFoundError, match="steps 10, 20, 30, 40, 50 and 3 more: "):
            checkpointer.restore({"v": 0}, step=31)
        with pytest.raises(FileNotFoundError, match=r"no valid checkpoint \(unfinished: "):
            checkpointer.restore({"v": 0}, step=30)


def test_a_restore_renames_by_a_mapping(tmp_path: Path) -> None:
    old, new = torch.nn.Module(), torch.nn.Module()
    old.head = torch.nn.Linear(2, 2)
    new.top = torch.nn.Linear(2, 2)
    names = {"model.head.weight": "model.top.weight", "model.head.bias": "model.top.bias"}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": old}).wait()
        checkpointer.restore({"model": new}, rename=names)
    assert torch.equal(new.top.weight, old.head.weight)
    for load in (
        lambda model: pyckpt.load_model(model, tmp_path, rename=names),
        lambda model: pyckpt.load({"model": model}, tmp_path / "step-00000001", rename=names),
    ):
        torch.nn.init.zeros_(new.top.weight)
        load(new)
        assert torch.equal(new.top.weight, old.head.weight)


def test_going_back(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(
        tmp_path, every_steps=1, keep_last=2, keep_every=4, when_busy="wait"
    ) as checkpointer:
        run.to(8, checkpointer)
        checkpointer._saver.wait()
        checkpointer._pruner.wait()
        assert [c.step for c in checkpointer.checkpoints()] == [4, 7, 8]
        assert checkpointer.restore(run.state, step=4) == 4
        with pytest.raises(ValueError, match="must be larger"):
            checkpointer.step(4, run.state)
        run.to(6, checkpointer, start=5)
        checkpointer._saver.wait()
        checkpointer._pruner.wait()
        # 7 and 8 take nothing from 5 and 6, and stay until they are saved again.
        assert [c.step for c in checkpointer.checkpoints()] == [4, 5, 6, 7, 8]
        run.to(7, checkpointer, start=7)
        checkpointer._saver.wait()
        checkpointer._pruner.wait()
        assert [c.step for c in checkpointer.checkpoints()] == [4, 6, 7, 8]
    assert resumed(tmp_path, step=7)[1].equals(run)


EARLIER = "has newer checkpoints of an earlier run"


def test_a_run_that_begins_anew_keeps_its_own_beside_those_of_an_earlier_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(*steps: int) -> list[int]:
        with Checkpointer(tmp_path, keep_last=2) as checkpointer:
            for step in steps:
                checkpointer.save(step, {"v": step}).wait()
        return steps_in(tmp_path)

    assert run(5, 8, 9) == [8, 9]
    assert EARLIER not in caplog.text
    assert run(1, 2, 3) == [2, 3, 8, 9]
    (said,) = [record.getMessage() for record in caplog.records if EARLIER in record.getMessage()]
    assert "training begins at step 1 or before, and" in said
    assert said.endswith("steps 8, 9")
    caplog.clear()
    assert run(8, 10) == [8, 9, 10]  # 2 and 3 are older, and count; 8 was saved again
    assert "steps 9" in caplog.text


def test_a_run_whose_restore_finds_nothing_says_nothing_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"v": 0}) is None
        for step in (2, 3):
            checkpointer.save(step, {"v": step}).wait()
        shutil.rmtree(tmp_path / ".pyckpt")  # so this job begins a second time
        checkpointer.save(1, {"v": 1}).wait()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(4, {"v": 4}).wait()
    assert EARLIER not in caplog.text
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_what_came_after_a_restore_that_found_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.restore({"v": 0}) is None
        with Checkpointer(tmp_path) as other:
            other.save(7, {"v": 7}).wait()
        checkpointer.save(1, {"v": 1}).wait()
        checkpointer.save(2, {"v": 2}).wait()
    assert EARLIER in caplog.text
    assert steps_in(tmp_path) == [2, 7]


def test_the_step_that_was_saved_last_is_saved_again_after_going_back(tmp_path: Path) -> None:
    run = Run().to(1)
    with Checkpointer(tmp_path, every_steps=1) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(2, Run().to(9).state)
        checkpointer.restore(run.state, step=1)
        run.to(2, checkpointer, start=2)
    assert resumed(tmp_path)[1].equals(Run().to(2))


def test_a_state_that_does_not_fit_is_no_reason_to_go_back(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    run = Run()
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(pyckpt.errors.LoadError):
        checkpointer.restore({**run.state, "extra": torch.nn.Linear(3, 3)})


def test_inspect_says_why(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / ".metadata").unlink()
    (tmp_path / "logs").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        states = [(entry.path.name, entry.state) for entry in checkpointer.inspect(verify=True)]
    assert states == [
        ("step-00000001", "valid"),
        ("step-00000002", "damaged"),
        ("logs", "foreign"),
    ]


# --- keeping --------------------------------------------------------------------------------------


def test_keep_best_and_protect(tmp_path: Path) -> None:
    run = Run()
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 6.0}
    with Checkpointer(tmp_path, keep_last=1, keep_best=("loss", 1, "min")) as checkpointer:
        protection = checkpointer.protect(3)
        for step, loss in losses.items():
            checkpointer.save(step, run.state, metrics={"loss": loss})
        checkpointer._saver.wait()
        checkpointer._pruner.wait()
        assert [c.step for c in checkpointer.checkpoints()] == [2, 3, 5]
        protection.release()
        protection.release()
        checkpointer.save(6, run.state)
    assert steps_in(tmp_path) == [2, 6]


@pytest.mark.parametrize(
    "options", [{"keep_every": 2}, {"keep_best": ("loss", 1, "min")}, {"keep_last": 1}, {}]
)
def test_what_keeps_all_says_so(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, Run().state, metrics={"loss": 1.0})
    all_are_kept = "keep_last" not in options
    assert steps_in(tmp_path) == ([1, 2, 3] if all_are_kept else [3])
    assert ("keeps all checkpoints" in caplog.text) == (all_are_kept and options != {})


def test_what_is_protected_while_others_go_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rmdir = os.rmdir
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, Run().state)
    checkpointer = Checkpointer(tmp_path, keep_last=1)

    def removed(path: str, *, dir_fd: int) -> None:
        rmdir(path, dir_fd=dir_fd)
        checkpointer.protect(2)

    monkeypatch.setattr(os, "rmdir", removed)
    with checkpointer:
        checkpointer.save(4, Run().state)
    assert steps_in(tmp_path) == [2, 4]


def test_only_what_is_committed_makes_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    checkpointer = Checkpointer(tmp_path, keep_last=1)
    checkpointer.save(1, run.state).wait()
    monkeypatch.setattr(pyckpt.DirectWriter, "finish", _no_space)
    checkpointer.save(2, run.state)
    with pytest.raises(OSError, match="No space"):
        checkpointer.close()
    assert steps_in(tmp_path) == [1]


def test_pruning_that_fails_does_not_fail_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pyckpt.train.store.pruner.remove", refuse)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(2, run.state)
    assert "was not removed" in caplog.text
    assert steps_in(tmp_path) == [1, 2]


# The save is committed only once Python takes no more work for threads.
LEFT_OPEN = """
import concurrent.futures.thread, sys, threading
import torch
import pyckpt

ending = threading.Event()
threading._register_atexit(ending.set)
finish = pyckpt.DirectWriter.finish

def late(*arguments):
    ending.wait()
    while not concurrent.futures.thread._shutdown:
        pass
    finish(*arguments)

pyckpt.DirectWriter.finish = late
checkpointer = pyckpt.Checkpointer(sys.argv[1], keep_last=1)
handle = checkpointer.save(1, {"model": {"w": torch.ones(3)}})
handle.committed.add_done_callback(lambda committed: print("committed", committed.result()))
"""


@pytest.mark.slow
def test_a_save_that_outlives_the_program(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == f"committed {tmp_path / 'step-00000001'}\n", ended.stderr


# --- stopping -------------------------------------------------------------------------------------


def test_a_signal_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    run = Run()
    with Checkpointer(tmp_path, on_signals=("SIGUSR1",)) as checkpointer:
        run.to(3, checkpointer)
        assert not checkpointer.stop_requested
        signal.raise_signal(signal.SIGUSR1)
        assert not checkpointer.stop_requested  # in the middle of a step nothing happens
        run.to(99, checkpointer, start=4)
        assert checkpointer.stop_requested
        assert max(run.losses) == 4
    assert signal.getsignal(signal.SIGUSR1) == before
    step, again = resumed(tmp_path)
    assert step == 4
    assert again.equals(run)


def test_a_request_does_as_a_signal_does(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.request_stop()
        run.to(9, checkpointer)
    assert list(run.losses) == [1]
    assert steps_in(tmp_path) == [1]


def test_a_stop_saves_even_beside_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    run = Run()
    with Checkpointer(tmp_path, every_steps=5) as checkpointer:
        run.to(5, checkpointer)
        assert gate.reached.wait(60)
        checkpointer.request_stop()
        gate.open.set()
        run.to(9, checkpointer, start=6)
    assert steps_in(tmp_path) == [5, 6]


# --- the rest -------------------------------------------------------------------------------------


def test_export(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = Run().to(2)
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(FileNotFoundError):
            checkpointer.export(tmp_path / "out")
        checkpointer.save(1, Run().state)
        checkpointer.save(2, run.state).wait()
        (file,) = checkpointer.export(tmp_path / "out")
        (older,) = checkpointer.export(tmp_path / "older", step=1, format="torch")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(load_file(file)[name], tensor)
    for name, tensor in Run().model.state_dict().items():
        assert torch.equal(torch.load(older)[name], tensor)


def test_statistics_and_advice(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(tmp_path, every_steps=10, keep_last=1, when_busy="wait") as checkpointer:
        assert checkpointer.advice(mtbf_hours=24) is None
        assert "failure" not in str(checkpointer.statistics)
        run.to(40, checkpointer)
        checkpointer._saver.wait()
        checkpointer._pruner.wait()
        statistics = checkpointer.statistics
        advice = checkpointer.advice(mtbf_hours=24)
    assert (statistics.saves, statistics.pruned) == (4, 3)
    assert statistics.step_seconds > 0
    assert statistics.blocked_seconds > 0
    assert statistics.commit_seconds >= statistics.blocked_seconds
    assert advice is not None
    assert advice.interval_steps >= 1
    assert str(advice) in str(statistics)
    with pytest.raises(ValueError, match="positive"):
        checkpointer.advice(mtbf_hours=0)


# --- the end of a run -----------------------------------------------------------------------------


def test_save_last_saves_what_no_save_has(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every_steps=5, save_last=True) as checkpointer:
        Run().to(13, checkpointer)
    step, run = resumed(tmp_path)
    assert step == 13
    assert run.equals(Run().to(13))


def test_save_last_saves_nothing_twice(tmp_path: Path) -> None:
    run = Run()
    with Checkpointer(tmp_path, every_steps=5, when_busy="wait", save_last=True) as checkpointer:
        run.to(10, checkpointer)
        assert checkpointer.statistics.saves == 2
    assert checkpointer.statistics.saves == 2
    with Checkpointer(tmp_path / "b", save_last=True) as checkpointer:
        checkpointer.save(3, run.state)
        checkpointer.step(3, run.state)
    assert steps_in(tmp_path / "b") == [3]
    assert checkpointer.statistics.saves == 1


def test_save_last_saves_no_state_in_the_middle_of_a_step(tmp_path: Path) -> None:
    with (
        suppress(KeyboardInterrupt),
        Checkpointer(tmp_path, every_steps=5, when_busy="wait", save_last=True) as checkpointer,
    ):
        Run().to(7, checkpointer)
        raise KeyboardInterrupt
    assert steps_in(tmp_path) == [5]


def test_a_save_that_was_interrupted_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while the program has the interrupt, which holds the call, and so the copies."""
    in_thread = Saver._in_thread
    left = [1]

    def interrupted(self: Saver, task: Any) -> None:
        if left:
            left.pop()
            raise KeyboardInterrupt
        in_thread(self, task)

    monkeypatch.setattr(Saver, "_in_thread", interrupted)
    state = {"x": torch.randn(1 << 20)}  # for which the memory has no room, either
    with (
        engine(max_pinned_bytes=4 << 20) as own,
        Checkpointer(tmp_path, every_steps=1, engine=own) as checkpointer,
    ):
        with pytest.raises(KeyboardInterrupt) as interrupt:
            checkpointer.save(1, state)
        with pytest.raises(SaveError, match="interrupted"):
            checkpointer.wait()
        assert own.native.arena_used_bytes == 0
        checkpointer.wait_staged()
        parameter = torch.nn.Parameter(torch.zeros(1))
        torch.optim.SGD([parameter]).step()
        checkpointer.save(2, state).wait()
        assert interrupt.value.__traceback__ is not None
    assert steps_in(tmp_path) == [2]


def test_save_last_saves_nothing_after_a_restore(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, every_steps=5, save_last=True, when_busy="wait") as checkpointer:
        run = Run().to(7, checkpointer)
        assert checkpointer.restore(run.state) == 5
    assert steps_in(tmp_path) == [5]
