"""What a Checkpointer logs, and on which rank."""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _heard import Gate, Heard, beat_at_once
from _ranks import Pipe, run_child, run_ranks
from _training import Run, damage

import pyckpt
from pyckpt import Checkpointer, activity
from pyckpt.errors import NotDurable, SaveError
from pyckpt.format import commit
from pyckpt.train.handle import SaveHandle

SECONDS = r"[\d.e-]+ s"
RATE = r"\([\d.]+ [kMG]?B/s\)"


@pytest.fixture
def heard() -> Iterator[Heard]:
    heard = Heard()
    yield heard
    heard.stop()


def test_saves_restores_and_removals_are_logged(tmp_path: Path, heard: Heard) -> None:
    run = Run().to(1)
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.restore(run.state) is None
        checkpointer.save(10, run.state)
        checkpointer.save(20, run.state)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(run.state) == 20
    expected = [
        f"nothing to restore in {re.escape(str(tmp_path))}, so training begins: .* is empty",
        "saving step 10",
        rf"committed step 10 in {SECONDS} {RATE}",
        "saving step 20",
        rf"committed step 20 in {SECONDS} {RATE}",
        rf"removed step 10 \({re.escape(str(tmp_path / 'step-00000010'))}\)",
        rf"restored step 20 from {re.escape(str(tmp_path / 'step-00000020'))} in {SECONDS} "
        r"\([\d.]+ kB, [\d.]+ [kM]B/s\)",
    ]
    assert len(heard.texts) == len(expected), heard.texts
    for text, pattern in zip(heard.texts, expected, strict=True):
        assert re.fullmatch(pattern, text), (text, pattern)


def test_a_commit_that_may_not_be_durable_is_said_to_be_one(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = commit.sync_opened_directory
    failing = [True]

    def fails_after_a_commit(descriptor: int, path: Path) -> None:
        if path.name == "step-00000002" and (path / ".metadata").exists() and failing:
            failing.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor, path)

    monkeypatch.setattr(commit, "sync_opened_directory", fails_after_a_commit)
    state = {"x": torch.ones(4)}
    with Checkpointer(tmp_path, overwrite=False) as checkpointer:
        checkpointer.save(1, state).wait()
        with pytest.raises(NotDurable, match="is in place") as info:
            checkpointer.save(2, state).wait()
        assert info.value.errno == errno.EIO
        with suppress(NotDurable):
            checkpointer.wait()
        assert [one.step for one in checkpointer.checkpoints()] == [1, 2]
        assert any("step 2 was committed after" in text for text in heard.texts)
        state["x"].fill_(2)
        checkpointer.save(2, state).wait()  # a checkpoint of the program's is not replaced
        with pytest.raises(FileExistsError):
            checkpointer.save(2, state).wait()
        with pytest.raises(FileExistsError):
            checkpointer.wait()
        state["x"].zero_()
        assert checkpointer.restore(state) == 2
        assert state["x"].tolist() == [2.0] * 4


def test_a_save_that_fails_is_logged_when_it_does(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pyckpt.DirectWriter, "write_data", refuse)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(10, Run().state)
        said = heard.wait_for("saving step 10 failed")
        assert "No space left on device" in said
        with pytest.raises(OSError, match="No space left"):
            checkpointer.wait()


def test_saves_and_loads_at_a_path_are_logged(tmp_path: Path, heard: Heard) -> None:
    path = tmp_path / "best"
    pyckpt.save({"w": torch.ones(1000)}, path)
    pyckpt.load({"w": torch.zeros(1000)}, path)
    started, committed, loaded = heard.texts
    assert started == f"saving {path}"
    assert re.fullmatch(rf"committed {re.escape(str(path))} in {SECONDS} {RATE}", committed)
    assert loaded.startswith(f"{path}: loaded 1 key, 4.")


def _logger_of_a_program(_pipe: Pipe) -> tuple[list[str], int, bool]:
    logger = logging.getLogger("pyckpt")
    return list(map(repr, logger.handlers)), logger.level, logger.propagate


def test_the_library_configures_no_logging() -> None:
    """Without a handler Python shows warnings, and a program decides about all else."""
    assert run_child(_logger_of_a_program) == ([], logging.NOTSET, True)


def test_what_takes_long_says_how_far_it_is(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_at_once(monkeypatch)
    gate = Gate(monkeypatch)
    with Checkpointer(tmp_path) as checkpointer:
        try:
            checkpointer.save(1, Run().state)
            assert gate.reached.wait(60)
            said = heard.wait_for("saving step 1: ")
            heard.wait_for("100%")
            seen = [t for t in threading.enumerate() if t.name == "pyckpt-watch"]
        finally:
            gate.open.set()
        checkpointer.save(2, Run().state)
        checkpointer.wait()
        heard.wait_for("committed step 2")
        # Two saves, one thread; those of earlier tests sleep.
        assert [t for t in threading.enumerate() if t.name == "pyckpt-watch"] == seen
    assert re.search(r" of [\d.]+ bytes \(100%\) after \d+ s", heard.wait_for("100%")), said
    assert not activity._watch._due


def test_a_load_says_how_far_it_is(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run().to(1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, run.state)
    beat_at_once(monkeypatch)
    check = pyckpt.train.restorer.Restorer._check  # type: ignore[attr-defined]

    def held(*arguments: object) -> object:
        heard.wait_for("restoring ")
        heard.wait_for("100%")
        return check(*arguments)

    monkeypatch.setattr(pyckpt.train.restorer.Restorer, "_check", held)  # type: ignore[attr-defined]
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(run.state) == 1


def test_a_part_of_an_activity_is_no_other_one(heard: Heard) -> None:
    with activity.activity("the whole") as whole, activity.activity("a part") as part:
        assert part is whole
        assert list(activity._watch._due) == [whole]
    assert not activity.inside()


def _save_late(directory: Path) -> list[str]:
    """Two saves, of which rank 1 begins the first when rank 0 has said that it waits for it."""
    heard = Heard()
    torch.manual_seed(0)
    rank = dist.get_rank()
    run = Run().to(1)
    with pytest.MonkeyPatch.context() as monkeypatch, Checkpointer(directory) as checkpointer:
        beat_at_once(monkeypatch)
        if rank == 1:
            dist.barrier()
        checkpointer.save(1, run.state)
        if rank == 0:
            heard.wait_for(" s for rank 1")
            dist.barrier()
        checkpointer.wait()
        monkeypatch.setattr(activity, "HEARTBEAT_SECONDS", 30.0)
        monkeypatch.setattr(activity, "_watch", activity._Watch())
        checkpointer.save(2, run.state)
        checkpointer.wait()
        dist.barrier()
        if rank == 0:
            damage(directory / "step-00000002")
        dist.barrier()
        assert checkpointer.restore(run.state) == 1
    heard.stop()
    return [f"{record.levelname} {record.getMessage()}" for record in heard.records]


def test_what_all_ranks_could_say_the_first_one_says(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_late, tmp_path)
    # The second rank speaks only if the first is late itself.
    assert [text for text in second if "waiting 0 s for rank 0" not in text] == []
    shown = [text for text in first if "step 1: " not in text]
    expected = [
        "INFO saving step 1",
        "INFO committed step 1 in ",
        "INFO saving step 2",
        "INFO committed step 2 in ",
        f"ERROR {tmp_path / 'step-00000002'} is corrupt and is passed over",
        "INFO restored step 1 from ",
        "WARNING passed over step-00000002",
    ]
    assert [text[: len(part)] for text, part in zip(shown, expected, strict=True)] == expected


def test_nobody_can_cancel_what_others_wait_for(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"w": torch.ones(3)})
        assert not handle.committed.cancel()
        checkpointer.wait()
        assert handle.wait() == tmp_path / "step-00000001"


@pytest.mark.parametrize("fails", [False, True])
def test_a_log_that_raises_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    class Gone(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ConnectionError("the log's server is gone")

    logger, gone = logging.getLogger("pyckpt"), Gone()
    monkeypatch.setattr(logger, "level", logging.INFO)
    if fails:
        (tmp_path / "step-00000001").write_text("in the way")
    checkpointer = Checkpointer(tmp_path)
    logger.addHandler(gone)
    try:
        handle = checkpointer.save(1, {"w": torch.ones(3)})
        if fails:
            with pytest.raises(OSError, match="step-00000001"):
                handle.wait(60)
        else:
            handle.wait(60)
    finally:
        logger.removeHandler(gone)
        with suppress(OSError):
            checkpointer.close()


def test_a_save_that_timed_out_is_not_one_that_goes_on(tmp_path: Path) -> None:
    handle = SaveHandle(1, tmp_path)
    with pytest.raises(TimeoutError):
        handle.wait(0)
    handle.fail(OSError(errno.ETIMEDOUT, "the server does not answer"))
    with pytest.raises(SaveError, match="the server does not answer"):
        handle.wait(0)
