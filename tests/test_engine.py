"""The engine: its settings, its life, and what it promises to other threads."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import slow
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt import _C
from pyckpt.engine import default_engine


@pytest.fixture
def own_default() -> Iterator[None]:
    """Leave the process with a default engine of default settings."""
    yield
    pyckpt.configure()


def save(path: Path, engine: pyckpt.Engine | None = None) -> None:
    dcp.save({"a": torch.ones(1000)}, storage_writer=pyckpt.DirectWriter(path, engine=engine))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slot_bytes": 0}, "multiple of 4096"),
        ({"slot_bytes": 5000}, "multiple of 4096"),
        ({"io_threads": 0}, "must be positive"),
        ({"max_pinned_bytes": 4096, "slot_bytes": 8192}, "must hold a slot"),
    ],
)
def test_bad_settings(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pyckpt.Engine(**settings)
    before = default_engine()
    with pytest.raises(ValueError, match=message):
        pyckpt.configure(**settings)
    assert default_engine() is before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_pinned_bytes": "4GB"}, "^max_pinned_bytes must be bytes as an int, not '4GB'"),
        ({"max_pinned_bytes": 4e9}, "^max_pinned_bytes must be bytes as an int, not 4000000000.0"),
        ({"slot_bytes": "4MB"}, "^slot_bytes must be bytes as an int"),
        ({"slot_bytes": True}, "^slot_bytes must be bytes as an int, not True"),
        ({"io_threads": 2.5}, "^io_threads must be an int, not 2.5"),
    ],
)
def test_settings_of_another_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pyckpt.Engine(**settings)
    before = default_engine()
    with pytest.raises(TypeError, match=message):
        pyckpt.configure(**settings)
    assert default_engine() is before


def test_configure_replaces_the_default(own_default: None, tmp_path: Path) -> None:
    before = default_engine()
    engine = pyckpt.configure(slot_bytes=4096, max_pinned_bytes=8192, io_threads=1)
    assert default_engine() is engine
    assert before.closed
    save(tmp_path)
    with pytest.raises(CheckpointException) as info:
        save(tmp_path, before)
    assert isinstance(info.value.failures[0][0], pyckpt.errors.EngineClosed)


def test_a_closed_default_is_replaced(own_default: None, tmp_path: Path) -> None:
    default_engine().close()
    save(tmp_path)
    assert not default_engine().closed


def test_close_is_idempotent_and_a_context() -> None:
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=4096, io_threads=1) as engine:
        assert not engine.closed
    assert engine.closed
    engine.close()


def test_pickles_as_its_settings() -> None:
    with pyckpt.Engine(slot_bytes=8192, max_pinned_bytes=16384, io_threads=2) as engine:
        copy = pickle.loads(pickle.dumps(engine))
        try:
            assert copy == engine
            assert copy.native is not engine.native
        finally:
            copy.close()


def test_closing_fails_the_job_that_runs(tmp_path: Path) -> None:
    engine = pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=4096, io_threads=1)
    job = _C.WriteJob(engine.native, str(tmp_path / "file"))
    job.add_bytes(bytes(100))
    engine.close()
    with pytest.raises(pyckpt.errors.EngineClosed, match="while a job ran"):
        job.finish()
    job.abandon()
    assert not (tmp_path / "file").exists()


def test_a_job_that_is_dropped_removes_its_file(tmp_path: Path) -> None:
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=8192, io_threads=2) as engine:
        job = _C.WriteJob(engine.native, str(tmp_path / "file"))
        job.add_bytes(bytes(100_000))
        assert (tmp_path / "file").exists()
        del job
        assert not (tmp_path / "file").exists()


def test_an_error_is_raised_from_every_later_call(tmp_path: Path) -> None:
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=8192, io_threads=2) as engine:
        job = _C.WriteJob(engine.native, str(tmp_path / "file"))
        job.abandon()
        for call in (job.finish, job.finish, lambda: job.add_bytes(b"more")):
            with pytest.raises(RuntimeError, match="abandoned"):
                call()


@pytest.mark.slow
def test_storages_that_are_resized_are_written_as_they_were(tmp_path: Path) -> None:
    """Another thread may do that at any instant; here, as soon as they were added."""
    count = 10_000_000  # each in pages of its own, which go back to the system
    tensors = [torch.full((count,), float(i)) for i in range(3)]
    with pyckpt.Engine(slot_bytes=1 << 20, max_pinned_bytes=2 << 20, io_threads=1) as engine:
        job = _C.WriteJob(engine.native, str(tmp_path / "file"))
        for tensor in tensors:
            envelope = _C.Envelope(prefix=b"", suffix=b"", payload_size=4 * count, crc_positions=[])
            assert job.add_tensor(tensor, envelope)
            tensor.untyped_storage().resize_(0)
        places = list(struct.iter_unpack("<4QI4x", job.finish()))
    data = (tmp_path / "file").read_bytes()
    for i, (offset, length, *_) in enumerate(places):
        is_same = data[offset : offset + length] == struct.pack("<f", i) * count
        assert is_same  # pytest would explain the difference for a minute
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)


@pytest.mark.slow
def test_a_daemon_thread_does_not_end_the_process_that_exits() -> None:
    """Python ends such a thread where it asks for the GIL: in the midst of the engine's calls."""
    script = """
import threading
from pyckpt import _C
data = bytes(1 << 16)
begun = threading.Event()
def again():
    while True:
        _C.crc32(data)
        begun.set()
for _ in range(2):
    threading.Thread(target=again, daemon=True).start()
begun.wait()
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_fork(tmp_path: Path) -> None:
    """A child gets a default engine of its own, cannot use its parent's, and exits cleanly."""
    script = f"""
import os, sys, torch, torch.distributed.checkpoint as dcp, pyckpt, warnings
warnings.simplefilter("ignore")
engine = pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=8192, io_threads=2)
state = {{"a": torch.arange(10.0)}}
dcp.save(state, storage_writer=pyckpt.DirectWriter({str(tmp_path / "parent")!r}))
pid = os.fork()
if pid == 0:
    dcp.save(state, storage_writer=pyckpt.DirectWriter({str(tmp_path / "child")!r}))
    try:
        pyckpt._C.WriteJob(engine.native, {str(tmp_path / "file")!r})
    except pyckpt.errors.EngineClosed as error:
        print(error, flush=True)
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
dcp.save(state, storage_writer=pyckpt.DirectWriter({str(tmp_path / "parent")!r}))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "made in another process" in result.stdout
    assert "child 7" in result.stdout
    for name in ("parent", "child"):
        loaded = {"a": torch.zeros(10)}
        dcp.load(loaded, checkpoint_id=tmp_path / name)
        assert torch.equal(loaded["a"], torch.arange(10.0))


def test_waiting_holds_no_gil(tmp_path: Path) -> None:
    """A feeder that waits for room, and one that waits for the end, let other threads run."""
    state = {f"{i}": torch.zeros(1 << 18) for i in range(16)}
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=4096, io_threads=1) as engine:
        thread = threading.Thread(target=save_state, args=(state, tmp_path, engine))
        # With a switch interval this long, another thread runs only when one gives the GIL up.
        before = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            thread.start()
            turns = 0
            while thread.is_alive():
                turns += 1
                os.sched_yield()  # gives the GIL up, and waits to have it back
        finally:
            sys.setswitchinterval(before)
        thread.join()
    # 16 MiB in writes of 4 KiB: had the job kept the GIL, this loop had come round but a few times.
    assert turns > 64


def save_state(state: dict[str, torch.Tensor], path: Path, engine: pyckpt.Engine) -> None:
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path, engine=engine))


def test_threads_are_named_and_ignore_signals() -> None:
    with pyckpt.Engine(slot_bytes=4096, max_pinned_bytes=8192, io_threads=3):
        tasks = Path("/proc/self/task")
        names = {task: (task / "comm").read_text().strip() for task in tasks.iterdir()}
        ours = [task for task, name in names.items() if name.startswith("pyckpt-io-")]
        assert len(ours) >= 3
        for task in ours:
            fields = dict(
                line.split(":\t")
                for line in (task / "status").read_text().splitlines()
                if ":\t" in line
            )
            assert int(fields["SigBlk"], 16) >> (signal.SIGTERM - 1) & 1


def test_crc32() -> None:
    data = os.urandom(100_003)
    assert _C.crc32(data) == zlib.crc32(data)
    assert _C.crc32(memoryview(data)[7:], 5) == zlib.crc32(data[7:], 5)
    shifted = _C.crc32_shift(_C.crc32(data[:1000]), len(data) - 1000)
    assert shifted ^ _C.crc32(data[1000:]) == zlib.crc32(data)
    with pytest.raises(BufferError):
        _C.crc32(memoryview(data)[::2])
    with pytest.raises(TypeError):
        _C.crc32("text")  # type: ignore[arg-type]


def test_exceptions_cross_the_boundary(tmp_path: Path) -> None:
    native = default_engine().native
    with pytest.raises(FileNotFoundError) as missing:
        _C.WriteJob(native, str(tmp_path / "no" / "file"))
    assert missing.value.filename == str(tmp_path / "no" / "file")
    (tmp_path / "there").touch()
    with pytest.raises(FileExistsError):
        _C.WriteJob(native, str(tmp_path / "there"))
    with pytest.raises(IsADirectoryError) as directory:
        _C.ReadJob(native).add_file(str(tmp_path))
    assert directory.value.filename == str(tmp_path)
    with pytest.raises(ValueError, match="direct must be"):
        _C.WriteJob(native, str(tmp_path / "file"), direct="perhaps")  # type: ignore[arg-type]


def test_there_are_more_slots_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a thread goes on reading while what it read is on its way to a GPU."""
    made: list[dict[str, int]] = []
    monkeypatch.setattr(_C, "Engine", lambda **settings: made.append(settings))
    for threads in (1, 8):
        pyckpt.Engine(io_threads=threads, slot_bytes=4096, max_pinned_bytes=1 << 20)
        assert made[-1]["slots"] > made[-1]["io_threads"]
        assert made[-1]["slots"] * 4096 + made[-1]["arena_bytes"] == 1 << 20
    pyckpt.Engine(io_threads=8, slot_bytes=4096, max_pinned_bytes=8192)
    assert made[-1]["slots"] == 2


@pytest.mark.parametrize("what", [slow("engine"), "copies"])
def test_memory_goes_without_the_gil(what: str) -> None:
    """Other threads of the program go on while hundreds of megabytes are given back."""
    interval = sys.getswitchinterval()
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.is_set():
            ticks += 1
            time.sleep(0)

    size = 256 << 20
    sys.setswitchinterval(1e6)  # a thread runs until it gives the GIL away by itself
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(20):  # the other thread may be slow to wake up
            owner: list[object] = [pyckpt.Engine(max_pinned_bytes=2 * size)]
            engine: pyckpt.Engine = owner[0]  # type: ignore[assignment]
            if what == "engine":
                engine.native.prewarm(size, shared=False, devices=[])
            else:
                staging = _C.Staging(engine.native, [torch.ones(size, dtype=torch.uint8)])
                staging.wait()
                staging.release_sources()
                owner = [staging.take_tensors()]
                engine.close()
                del staging
            del engine
            before = ticks
            owner.clear()
            if ticks != before:
                break
        else:
            pytest.fail("no other thread ran")
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join()
