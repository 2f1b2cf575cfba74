"""Real signals to jobs of torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import permutations
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from _ranks import TIMEOUT_S, ChildFailed, Pipe, run_child, run_ranks
from _sampling import slow
from _training import Run

import pyckpt
from pyckpt import Checkpointer
from pyckpt.errors import SaveError
from pyckpt.train.sync.signals import StopSignals

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "helpers" / "_signal_job.py"
NEVER = 10**9


class Job:
    """A job, and what its ranks have said."""

    def __init__(self, process: subprocess.Popen[bytes], ranks: int) -> None:
        self.process = process
        self.ranks = ranks
        self.said: list[dict[str, Any]] = []

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Listen until a rank says something."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self.said.append(json.loads(line))
                if condition(self.said[-1]):
                    return self.said[-1]
        raise AssertionError(f"the job ended with {self.process.wait()}: {self.said[-3:]}")

    def pids(self) -> dict[int, int]:
        while len(pids := {s["rank"]: s["pid"] for s in self.of("start")}) < self.ranks:
            self.until(lambda said: said["event"] == "start")
        return pids

    def of(self, event: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["event"] == event]

    def end(self) -> int:
        """Listen to the end; the exit code."""
        assert self.process.stdout is not None
        self.said += [json.loads(li) for li in self.process.stdout if li.startswith(b"{")]
        return self.process.wait(TIMEOUT_S)


@contextmanager
def job(ranks: int, directory: Path, *, every: int = NEVER, gate: str = "") -> Iterator[Job]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(JOB), str(directory), str(every)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    log = directory.with_suffix(".stderr")
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, gate],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    # A job that hangs is killed, and then what it said ends.
    watchdog = threading.Timer(TIMEOUT_S, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        yield Job(process, ranks)
    finally:
        watchdog.cancel()
        watchdog.join()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


class Gate:
    """What a job's first save waits for."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "gate")
        os.mkfifo(self.path)

    def open(self) -> None:
        with open(self.path, "r+b", buffering=0) as pipe:  # which the job has open, or will
            pipe.write(b"1")


def newest(directory: Path) -> int | None:
    with Checkpointer(directory) as checkpointer:
        found = checkpointer.latest()
    return None if found is None else found.step


def check_stopped(of: Job, directory: Path, signalled_at: int) -> int:
    """All ranks ended at one step, after the signal and soon, with that step committed."""
    (end,) = {said["step"] for said in of.of("end")}
    assert len(of.of("end")) == of.ranks
    assert end >= signalled_at
    assert {s["rank"] for s in of.of("step") if s["step"] == end and s["saves"]} == {
        *range(of.ranks)
    }
    assert newest(directory) == end
    return end


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_worker_is_signalled(ranks: int, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with job(ranks, directory) as first:
        pid = first.pids()[ranks - 1]
        first.until(lambda said: said.get("step") == 20)
        os.kill(pid, signal.SIGTERM)
        assert first.end() == 0
        end = check_stopped(first, directory, 20)
    with job(ranks, directory) as second:
        pid = second.pids()[0]
        assert {said["step"] for said in second.of("start")} == {end}
        second.until(lambda said: said.get("step") == end + 20)
        os.kill(pid, signal.SIGTERM)
        assert second.end() == 0
        again = check_stopped(second, directory, end + 20)
    losses = {
        s["step"]: s["loss"] for s in [*first.of("step"), *second.of("step")] if s["rank"] == 0
    }
    assert sorted(losses) == list(range(1, again + 1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_workers_are_signalled_in_the_middle_of_a_save(ranks: int, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    gate = Gate(tmp_path)
    with job(ranks, directory, every=10, gate=gate.path) as running:
        pids = running.pids()
        running.until(lambda said: said.get("saves") is True)
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
        gate.open()
        assert running.end() == 0
        end = check_stopped(running, directory, 10)
        with Checkpointer(directory) as checkpointer:
            assert {10, end} == {checkpoint.step for checkpoint in checkpointer.checkpoints()}


@pytest.mark.slow
def test_the_launcher_is_signalled(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with job(2, directory) as running:
        running.pids()
        running.until(lambda said: said.get("step") == 20)
        running.process.terminate()  # which torchrun passes on
        running.end()
        check_stopped(running, directory, 20)


@pytest.mark.slow
def test_a_second_signal_gives_up_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with job(2, directory, every=10, gate=Gate(tmp_path).path) as running:
        pids = running.pids()
        running.until(lambda said: said.get("saves") is True)
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
        # Now each waits for a save that does not end. Another signal, that is no echo of the
        # first, ends it.
        deadline = time.monotonic() + TIMEOUT_S
        while running.process.poll() is None:
            assert time.monotonic() < deadline
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                running.process.wait(0.2)
        assert running.end() != 0
        assert running.of("end") == []
    assert newest(directory) is None


# --- interrupts -----------------------------------------------------------------------------------


class Interrupted:
    """A part of the state that Ctrl-C is pressed on, once."""

    def __init__(self) -> None:
        self.left = 1

    def state_dict(self) -> dict[str, int]:
        if self.left:
            self.left = 0
            signal.raise_signal(signal.SIGINT)
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]


def _interrupted_and_left(_pipe: Pipe, directory: Path) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {**Run().state, "extra": Interrupted()})


def test_an_interrupted_save_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed) as info:
        run_child(_interrupted_and_left, tmp_path)
    assert isinstance(info.value.cause, KeyboardInterrupt)
    assert newest(tmp_path) is None


def _interrupted_on_one(directory: Path) -> tuple[str, int | None]:
    run = Run()
    state = {**run.state, "extra": Interrupted()}
    with Checkpointer(directory) as checkpointer:
        if dist.get_rank() == 1:
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1, state)
        else:
            state["extra"].left = 0
            checkpointer.save(1, state)
        checkpointer._saver.wait()
        with pytest.raises(SaveError) as info:
            checkpointer.save(2, state)
        checkpointer.save(2, state).wait()
    return str(info.value), newest(directory)


def test_a_save_that_one_rank_did_not_get_to_fails_for_all(tmp_path: Path) -> None:
    for said, step in run_ranks(3, _interrupted_on_one, tmp_path):
        assert "rank 1: interrupted: KeyboardInterrupt" in said
        assert step == 2


def _interrupted_late(_pipe: Pipe, directory: Path) -> None:
    begun = threading.Event()
    storage_meta = pyckpt.DirectWriter.storage_meta

    def beginning(self: pyckpt.DirectWriter) -> Any:
        begun.set()
        return storage_meta(self)

    def synchronize(_: pyckpt.DirectWriter) -> None:
        assert begun.wait(60)
        signal.raise_signal(signal.SIGINT)

    pyckpt.DirectWriter.storage_meta = beginning  # type: ignore[method-assign]
    pyckpt.DirectWriter.synchronize_staging = synchronize  # type: ignore[method-assign]
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, Run().state)


def test_what_was_under_way_is_finished(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed) as info:
        run_child(_interrupted_late, tmp_path)
    assert isinstance(info.value.cause, KeyboardInterrupt)
    assert newest(tmp_path) == 1


class Signalled(Interrupted):
    """A part of the state that asks for its program's end, once."""

    def state_dict(self) -> dict[str, int]:
        if self.left:
            self.left = 0
            os.kill(os.getpid(), signal.SIGTERM)
        return {"left": self.left}


def _calls_from_a_handler(_pipe: Pipe, directory: Path, what: str, caught: bool) -> bool:
    checkpointer = Checkpointer(directory)
    state = {**Run().state, "extra": Signalled()}
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: checkpointer.save(2, Run().state, final=True),
        "step": lambda: checkpointer.step(2, Run().state),
        "wait": checkpointer.wait,
        "restore": lambda: checkpointer.restore(Run().state),
        "close": checkpointer.close,
    }

    def handler(*_: object) -> None:
        with suppress(RuntimeError) if caught else nullcontext():
            calls[what]()
            sys.exit(0)

    signal.signal(signal.SIGTERM, handler)
    with checkpointer:
        if caught:
            checkpointer.save(1, state).wait()
        else:
            with pytest.raises(RuntimeError, match=r"within a call that begins.*on_signals"):
                checkpointer.save(1, state)
            with pytest.raises(SaveError, match="within a call that begins"):
                checkpointer.wait()
        checkpointer.save(3, state).wait()
    return checkpointer.latest().step == 3 and (directory / "step-00000001/.metadata").exists()


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("what", ["save", slow("step"), "wait", slow("restore"), "close"])
def test_a_handler_that_would_wait_for_what_it_interrupts(
    what: str, caught: bool, tmp_path: Path
) -> None:
    assert run_child(_calls_from_a_handler, tmp_path, what, caught) is caught


# --- the handler ----------------------------------------------------------------------------------


class Handled(Exception):
    pass


@pytest.fixture
def handler() -> Iterator[Callable[..., None]]:
    """What handles SIGUSR1 before."""

    def handle(*_: object) -> None:
        raise Handled

    before = signal.signal(signal.SIGUSR1, handle)
    yield handle
    signal.signal(signal.SIGUSR1, before)


def test_signals_are_counted_by_time(handler: Callable[..., None]) -> None:
    now = 100.0
    signals = StopSignals(["SIGUSR1", signal.SIGUSR1], clock=lambda: now)
    assert not signals.received
    signal.raise_signal(signal.SIGUSR1)
    assert signals.received
    now += 0.99
    signal.raise_signal(signal.SIGUSR1)  # an echo
    now += 0.01
    with pytest.raises(Handled):
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is handler
    signals.close()


def test_handlers_are_put_back(handler: Callable[..., None]) -> None:
    signals = StopSignals(["SIGUSR1"])
    assert signal.getsignal(signal.SIGUSR1) is not handler
    signals.close()
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.usefixtures("handler")
def test_a_handler_that_came_later_stays() -> None:
    signals = StopSignals(["SIGUSR1"])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_handlers_are_put_back_in_any_order(
    handler: Callable[..., None], order: tuple[int, ...]
) -> None:
    several = [StopSignals(["SIGUSR1"]) for _ in range(3)]
    for one in order:
        several[one].close()
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_the_last_one_open_records(handler: Callable[..., None]) -> None:
    """Whichever it is."""
    first, second = StopSignals(["SIGUSR1"]), StopSignals(["SIGUSR1"])
    second.close()
    signal.raise_signal(signal.SIGUSR1)
    assert first.received
    assert not second.received
    first.close()
    first, second = StopSignals(["SIGUSR1"]), StopSignals(["SIGUSR1"])
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    assert second.received
    second.close()
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.parametrize("reached", ["called", "installed again"])
def test_a_closed_one_that_other_code_kept_passes_signals_on(
    handler: Callable[..., None], reached: str
) -> None:
    signals = StopSignals(["SIGUSR1"])
    ours = signal.getsignal(signal.SIGUSR1)
    assert callable(ours)

    def other(number: int, frame: FrameType | None) -> None:
        ours(number, frame)

    signal.signal(signal.SIGUSR1, other if reached == "called" else handler)
    signals.close()
    if reached == "installed again":
        signal.signal(signal.SIGUSR1, ours)
    for _ in range(2):
        with pytest.raises(Handled):
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.usefixtures("handler")
def test_a_closed_one_ignores_what_was_ignored_before() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals = StopSignals(["SIGUSR1"])
    ours = signal.getsignal(signal.SIGUSR1)
    signals.close()
    signal.signal(signal.SIGUSR1, ours)
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)


def _ended_after_both_were_closed(_pipe: Pipe) -> int:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        first, second = StopSignals("SIGTERM"), StopSignals("SIGTERM")
        ours = signal.getsignal(signal.SIGTERM)
        first.close()
        second.close()
        signal.signal(signal.SIGTERM, ours)  # as other code may
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    return 0


def test_a_closed_one_ends_the_process_as_signals_do_by_default() -> None:
    run_child(_ended_after_both_were_closed)


def _forked(_pipe: Pipe) -> int:
    signals = StopSignals(["SIGTERM"])
    reading, writing = os.pipe()
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.write(begun, b"1")  # what comes before this Python forgets
        os.read(reading, 1)  # until the signal, or the end of the parent
        os._exit(0)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert not signals.received
    signal.raise_signal(signal.SIGTERM)
    assert signals.received
    signals.close()
    return os.waitstatus_to_exitcode(status)


def test_processes_that_are_forked_can_be_terminated() -> None:
    assert run_child(_forked) == -signal.SIGTERM


def test_a_handler_may_ask_for_a_save(tmp_path: Path) -> None:
    run_child(_asks_in_a_handler, tmp_path)
    assert newest(tmp_path) == 1


def _asks_in_a_handler(_pipe: Pipe, directory: Path) -> None:
    with Checkpointer(directory) as checkpointer:
        signal.signal(signal.SIGUSR1, lambda *_: checkpointer.request_save())
        with checkpointer._requests.lock:  # as any call of this thread may
            signal.raise_signal(signal.SIGUSR1)
        checkpointer.step(1, Run().state)


def test_other_threads_cannot_handle_signals(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Checkpointer, tmp_path, on_signals=["SIGUSR1"])
        with pytest.raises(ValueError, match="main thread"):
            made.result()
        pool.submit(Checkpointer, tmp_path).result().close()
