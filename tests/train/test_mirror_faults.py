"""A mirror that refuses, fails or is full, and promotions that are interrupted on the way."""

from __future__ import annotations

import errno
import http.server
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _ranks import Child, Pipe, run_ranks

import pyckpt
from pyckpt import Checkpointer
from pyckpt.remote import address
from pyckpt.train.tiers import promotion
from pyckpt.train.tiers.mounted import MountedTier

FAILURES = 2


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((1000, 7), float(step)), "epoch": step}


@contextmanager
def store_that_says(status: int, code: str) -> Iterator[None]:
    """All requests to S3 get this answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            body = f"<Error><Code>{code}</Code></Error>".encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
    }
    address.open_store.cache_clear()
    with mock.patch.dict(os.environ, settings):
        yield
    address.open_store.cache_clear()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "InvalidAccessKeyId", "the environment has: 403"),
        (404, "NoSuchBucket", "there is no such bucket: 404"),
        # obstore itself repeats these for some seconds.
        pytest.param(507, "Full", "the store is full: 507", marks=pytest.mark.slow),
        pytest.param(503, "SlowDown", "asks for fewer requests: 503", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_refuses_is_told_once_and_saves_go_on(
    tmp_path, monkeypatch, caplog, status, code, said
):
    monkeypatch.setattr(promotion, "_FIRST_DELAY_SECONDS", 0.01)
    with (
        store_that_says(status, code),
        Checkpointer(tmp_path / "run", mirror="s3://bucket/a", mirror_wait=0) as checkpointer,
    ):
        checkpointer.save(1, state_of(1)).wait()
        promoting = checkpointer._promotion
        with promoting._changed:
            assert promoting._changed.wait_for(lambda: promoting._failures >= FAILURES, 60)
        assert [one.step for one in checkpointer._catalog.newest_first()] == [1]
        statistics = checkpointer.statistics.mirror
        assert said in statistics.last_error
        assert code in statistics.last_error
        assert statistics.failures >= FAILURES
        assert statistics.queued == (1,)
    told = [one for one in caplog.records if "is tried again" in one.getMessage()]
    assert len([one for one in told if one.levelno == logging.ERROR]) == 1


class Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("a program's handler, as planned")


def test_a_handler_of_the_log_that_raises_does_not_end_promotions(tmp_path, monkeypatch):
    monkeypatch.setattr(promotion, "_FIRST_DELAY_SECONDS", 0.01)
    in_the_way = tmp_path / "mirror" / "step-00000001"
    in_the_way.parent.mkdir()
    in_the_way.write_text("not a directory")
    handler = Raising()
    with Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror", mirror_wait=60) as checkpointer:
        logging.getLogger("pyckpt").addHandler(handler)
        try:
            checkpointer.save(1, state_of(1)).wait()
            promoting = checkpointer._promotion
            with promoting._changed:
                assert promoting._changed.wait_for(lambda: promoting._failures >= FAILURES, 60)
            in_the_way.unlink()
            assert checkpointer.wait_mirrored(60)
        finally:
            logging.getLogger("pyckpt").removeHandler(handler)


# --- several ranks ---


def _superseded(base: Path) -> list[object]:
    mirror = base / "mirror"
    with Checkpointer(base / "old", mirror=mirror) as old:
        old.save(1, state_of(1)).wait()
        assert old.wait_mirrored(60)
        dist.barrier()
        with Checkpointer(base / "new", mirror=mirror) as new:
            new.save(2, state_of(2)).wait()
            assert new.wait_mirrored(60)
            dist.barrier()
        state = {"sharded": torch.full((1000,), float(dist.get_rank()))}
        old.save(3, {**state_of(3), f"of-{dist.get_rank()}": state}).wait()
        is_there = old.wait_mirrored(60)
        dist.barrier()
        return [is_there, old.statistics.mirror.dropped, old.statistics.mirror.last_error]


def test_all_ranks_of_a_job_that_was_replaced_stop(tmp_path):
    for is_there, dropped, error in run_ranks(2, _superseded, tmp_path):
        assert (is_there, dropped) == (False, 1)
        assert "has begun to" in str(error)
    assert not (tmp_path / "mirror" / "step-00000003").exists()


def _down(base: Path) -> list[str]:
    heard: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyckpt").addHandler(handler)
    with Checkpointer(base / "run", mirror=base / "file" / "mirror", mirror_wait=0) as checkpointer:
        own = {f"of-{dist.get_rank()}": torch.zeros(1000)}
        checkpointer.save(1, own).wait()
        promoting = checkpointer._promotion
        with promoting._changed:
            assert promoting._changed.wait_for(lambda: promoting._failures >= 1, 60)
        dist.barrier()
    return [text for text in heard if "is tried again" in text]


@pytest.mark.slow
def test_what_all_ranks_find_out_of_a_mirror_one_logs(tmp_path):
    (tmp_path / "file").touch()
    told = run_ranks(2, _down, tmp_path)
    assert len([*told[0], *told[1]]) == 1
    assert "Not a directory" in [*told[0], *told[1]][0]


def _replace(base: Path) -> None:
    with Checkpointer(base / "run", mirror=base / "mirror") as checkpointer:
        checkpointer.save(4, state_of(4)).wait()
        checkpointer.save(5, state_of(5)).wait()
        assert checkpointer.wait_mirrored(60)
    with Checkpointer(base / "run") as checkpointer:
        checkpointer.save(5, state_of(55)).wait()


def _restore_apart(base: Path) -> tuple[int | None, object]:
    directory = base / ("lost" if dist.get_rank() else "run")
    state = state_of(0)
    with Checkpointer(directory, mirror=base / "mirror") as checkpointer:
        return checkpointer.restore(state), state["epoch"]


def test_ranks_that_see_different_saves_of_a_step_load_one_that_all_see(tmp_path):
    run_ranks(2, _replace, tmp_path)
    assert run_ranks(2, _restore_apart, tmp_path) == [(5, 5)] * 2


def _save_again(base: Path) -> bool:
    """Rank 1 cannot upload until the step has been saved again, which removes its first file."""
    promotion._FIRST_DELAY_SECONDS = promotion._FIRST_POLL_SECONDS = 0.01
    upload = MountedTier.upload
    is_back = threading.Event()

    def fails(self: MountedTier, step: int, file: Path, passing: Any) -> None:
        if dist.get_rank() == 1 and not is_back.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        upload(self, step, file, passing)

    MountedTier.upload = fails  # type: ignore[method-assign]
    own = {"own": pyckpt.PerRank(torch.full((50,), float(dist.get_rank())))}
    with Checkpointer(base / "run", mirror=base / "mirror", mirror_wait=30) as checkpointer:
        checkpointer.save(10, own).wait()
        checkpointer.save(10, own, final=True).wait()
        is_back.set()
        return checkpointer.wait_mirrored(20)


@pytest.mark.slow
def test_a_step_that_was_saved_twice_comes_there_though_a_rank_lost_its_first_file(tmp_path):
    assert run_ranks(2, _save_again, tmp_path) == [True, True]
    path = tmp_path / "mirror" / "step-00000010"
    assert (path / ".metadata").read_bytes() == (
        tmp_path / "run" / "step-00000010" / ".metadata"
    ).read_bytes()


def test_a_step_that_was_given_up_and_saved_again_is_not_lost(tmp_path, monkeypatch):
    """The save removes the file of the first, and the mirror notices it before the save returns."""
    upload = MountedTier.upload
    is_back = threading.Event()

    def fails(self: MountedTier, step: int, file: Path, passing: Any) -> None:
        if not is_back.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        upload(self, step, file, passing)

    monkeypatch.setattr(promotion, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(MountedTier, "upload", fails)
    with Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror") as checkpointer:
        promoting = checkpointer._promotion
        submit = promoting.submit

        def late(*args: Any, **kwargs: Any) -> None:
            with promoting._changed:
                assert promoting._changed.wait_for(lambda: not promoting._jobs, 60)
            submit(*args, **kwargs)

        checkpointer.save(10, state_of(1)).wait()
        monkeypatch.setattr(promoting, "submit", late)
        checkpointer.save(10, state_of(2)).wait()
        is_back.set()
        assert promoting.statistics.dropped == 1
        assert checkpointer.wait_mirrored(60)


# --- time ---


@pytest.mark.parametrize(("size", "mbps"), [(10, None), (3_600 * 10**6, None), (10**9, 0.1)])
def test_a_large_file_of_another_rank_has_time_to_arrive(tmp_path, monkeypatch, size, mbps):
    """At the rate that is allowed, and at 1 MB/s at most."""
    now = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    def pause(seconds: float, **_: object) -> bool:
        nonlocal now
        now += seconds
        return False

    with Checkpointer(
        tmp_path / "run", mirror=tmp_path / "mirror", mirror_max_mbps=mbps
    ) as checkpointer:
        promoting = checkpointer._promotion
        monkeypatch.setattr(promotion, "time", Clock)
        monkeypatch.setattr(promoting, "_pause", pause)
        monkeypatch.setattr(promoting, "_is_abandoned", lambda job, missing: False)
        job = mock.Mock(step=1)
        with pytest.raises(promotion.Stopped, match="other ranks have not brought"):
            promoting._await(job, {"__1_a.distcp": size})
        monkeypatch.undo()
    needed = size / (1e6 * (mbps or 1))
    assert 600 + needed < now < 620 + needed


@pytest.mark.parametrize("years", [-30, 30])
def test_a_clock_that_is_wrong_neither_keeps_remains_nor_removes_what_is_live(tmp_path, years):
    then = 1_800_000_000 + years * 31_536_000
    mirror = tmp_path / "mirror"
    for step in (0, 9):  # the later one may be of an upload that is under way
        remains = mirror / f"step-{step:08d}"
        remains.mkdir(parents=True)
        for name in ("__0_abc.distcp", ".saving"):
            (remains / name).touch()
            os.utime(remains / name, (then, then))
        os.utime(remains, (then, then))
    with Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
    assert sorted(path.name for path in mirror.glob("step-*")) == ["step-00000002", "step-00000009"]


# --- interrupted ---


def _promote(pipe: Pipe, base: Path, at: int, how: str) -> None:
    """Save a step over; the ``at``-th operation on a file of the mirror kills this process, or
    fails."""
    count = 0
    below = os.fspath(base / "mirror")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _OPERATIONS or below not in str(arguments[0]):
            return
        count += 1
        if count == at and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif count == at:
            raise OSError(errno.ENOSPC, "no room there", str(arguments[0]))

    promotion._FIRST_DELAY_SECONDS = promotion._FIRST_POLL_SECONDS = 0.01
    with Checkpointer(base / "run", mirror=base / "mirror", mirror_keep_last=1) as checkpointer:
        sys.addaudithook(audit)
        checkpointer.save(1, state_of(2)).wait()
        assert checkpointer.wait_mirrored(60)
    pipe.send(count)


_OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.listdir", "os.scandir", "os.rmdir")


@pytest.mark.parametrize("how", ["kill", "fail"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_at_every_operation_the_mirror_has_the_old_or_the_new(tmp_path, how, every):
    base = tmp_path / "base"
    with Checkpointer(base / "run", mirror=base / "mirror") as checkpointer:
        checkpointer.save(1, state_of(1))
    seen = set()
    for at in range(2, 10_000, every):
        case = tmp_path / f"case-{at}"
        shutil.copytree(base, case)
        child = Child(_promote, case, at, how)
        try:
            reached = child.receive() >= at
        except EOFError:
            assert child.join() == -signal.SIGKILL
            reached = True
        found = pyckpt.load(str(case / "mirror" / "step-00000001"))
        assert torch.equal(found["w"], torch.full((1000, 7), float(found["epoch"])))
        seen.add(found["epoch"])
        assert how == "kill" or found["epoch"] == 2, "what failed was not repeated"
        # The next run goes on, and removes what was left.
        with Checkpointer(case / "run", mirror=case / "mirror", mirror_keep_last=1) as checkpointer:
            assert checkpointer.restore(state_of(0)) == 1
            checkpointer.save(2, state_of(3)).wait()
            assert checkpointer.wait_mirrored(60)
        assert [path.name for path in (case / "mirror").glob("step-*")] == ["step-00000002"]
        shutil.rmtree(case)
        if not reached:
            break
    assert seen == ({1, 2} if how == "kill" else {2})
