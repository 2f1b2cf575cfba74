"""What a Checkpointer tells its ``on_event``: what, in which order, in which thread; and callbacks
that fail."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from _heard import Gate
from _ranks import run_ranks
from _training import Run

import pyckpt
from pyckpt import Checkpointer, events


def names(told: list[events.Event]) -> list[str]:
    return [f"{type(event).__name__} {event.step}" for event in told]


def test_the_events_of_a_run(tmp_path: Path) -> None:
    told: list[events.Event] = []
    threads = set()

    def listen(event: events.Event) -> None:
        told.append(event)
        threads.add(threading.current_thread().name)

    run = Run().to(1)
    with Checkpointer(tmp_path, keep_last=1, on_event=listen) as checkpointer:
        assert checkpointer.restore(run.state) is None
        checkpointer.save(10, run.state).wait()
        checkpointer.save(20, run.state)
        checkpointer.wait()
        checkpointer.restore(run.state)
        checkpointer._pruner.wait()
        statistics = checkpointer.statistics
    # After the commit a restore and a removal run beside each other.
    told.sort(key=lambda event: isinstance(event, events.Pruned))
    one_save = ("SaveStarted", "SaveStaged", "SaveWritten", "SaveCommitted")
    assert names(told) == [
        *(f"{name} 10" for name in one_save),
        *(f"{name} 20" for name in one_save),
        "Restored 20",
        "Pruned 10",
    ]
    assert threads == {"pyckpt-events_0"}
    for event in told:
        assert event.path == tmp_path / f"step-{event.step:08d}"
        assert event.rank == 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            event.step = 1  # type: ignore[misc]
    assert [event.time for event in told[:9]] == sorted(event.time for event in told[:9])
    _, staged, written, committed = told[:4]
    assert isinstance(staged, events.SaveStaged)
    assert isinstance(written, events.SaveWritten)
    assert isinstance(committed, events.SaveCommitted)
    assert 0 < staged.seconds <= written.seconds <= committed.seconds
    assert written.statistics is not None
    assert written.bytes == committed.bytes == written.statistics.bytes_written
    files = (tmp_path / "step-00000020").glob("*.distcp")
    assert isinstance(told[7], events.SaveCommitted)
    assert told[7].checkpoint_bytes == sum(file.stat().st_size for file in files)
    assert told[7].gigabytes_per_second > 0
    assert told[7].memory_bytes > 0
    assert 0 < told[7].lost_seconds <= statistics.lost_seconds
    assert isinstance(told[8], events.Restored)
    assert told[8].bytes > 0


def test_a_save_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    told: list[events.Event] = []
    run = Run()
    with Checkpointer(tmp_path, every_steps=10, on_event=told.append) as checkpointer:
        run.to(10, checkpointer)
        assert gate.reached.wait(60)
        assert checkpointer.step(20, run.state) is None
        gate.open.set()
        checkpointer.wait()
        assert checkpointer.step(30, run.state) is not None
    assert names(told)[3:5] == ["SaveSkipped 20", "SaveCommitted 10"]


def test_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told: list[events.Event] = []
    with Checkpointer(tmp_path, on_event=told.append) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(pyckpt.DirectWriter, "finish", refuse)
            checkpointer.save(1, Run().state)
            with pytest.raises(OSError, match="No space left") as raised:
                checkpointer.wait()
        checkpointer.save(2, Run().state)
    assert names(told)[3:5] == ["SaveFailed 1", "SaveStarted 2"]
    failed = told[3]
    assert isinstance(failed, events.SaveFailed)
    assert failed.error is raised.value


def test_a_callback_that_raises_is_logged_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[events.Event] = []

    def fail(event: events.Event) -> None:
        if isinstance(event, events.SaveStaged):
            raise SystemExit("not now")

    with Checkpointer(tmp_path, on_event=[fail, told.append]) as checkpointer:
        checkpointer.save(1, Run().state)
        checkpointer.save(2, Run().state)
    assert len(told) == 8
    failures = [record for record in caplog.records if "on_event failed" in record.getMessage()]
    assert len(failures) == 2
    assert failures[0].exc_info is not None
    assert failures[0].exc_info[0] is SystemExit
    assert "SaveStaged(step=1" in failures[0].getMessage()
    assert [found.step for found in checkpointer.checkpoints()] == [1, 2]


def test_a_callback_that_is_slow_holds_up_only_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    told: list[events.Event] = []

    def wait(event: events.Event) -> None:
        assert go_on.wait(60)
        told.append(event)

    with Checkpointer(tmp_path, on_event=wait) as checkpointer:
        checkpointer.save(1, Run().state).wait()
        checkpointer.save(2, Run().state)
        checkpointer.wait()
        assert told == []
        thread = checkpointer._announcer._thread
        shutdown = thread.shutdown

        def end() -> None:
            go_on.set()
            shutdown()

        monkeypatch.setattr(thread, "shutdown", end)
    assert len(told) == 8  # the end of the block waits for them


def test_a_callback_may_ask_for_a_stop(tmp_path: Path) -> None:
    def stop(event: events.Event) -> None:
        if isinstance(event, events.SaveCommitted):
            checkpointer.request_stop()

    with Checkpointer(tmp_path, on_event=stop) as checkpointer:
        checkpointer.save(1, Run().state).wait()
        checkpointer._announcer._thread.submit(int).result()
        checkpointer.step(2, Run().state)
        assert checkpointer.stop_requested


@pytest.mark.parametrize("given", [5, [print, 5]])
def test_what_cannot_be_called_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(TypeError, match="on_event must be callable, and 5 is not"):
        Checkpointer(tmp_path, on_event=given)


def _listen(directory: Path) -> list[events.Event]:
    told: list[events.Event] = []
    run = Run()
    with Checkpointer(directory, keep_last=1, on_event=told.append) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(2, run.state)
        checkpointer.wait()
        assert checkpointer.restore(run.state) == 2
    assert dist.get_rank() == told[0].rank
    return told


def test_each_rank_is_told(tmp_path: Path) -> None:
    first, second = run_ranks(2, _listen, tmp_path)
    assert set(names(first)) - set(names(second)) == {"Pruned 1"}
    assert set(names(second)) - set(names(first)) == set()
    sizes = {
        event.rank: (event.checkpoint_bytes is None, event.bytes > 0)
        for event in (*first, *second)
        if isinstance(event, events.SaveCommitted) and event.step == 2
    }
    assert sizes[0][0] is False
    assert sizes[1][0] is True
