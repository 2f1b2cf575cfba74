"""The end of one save's copies, whoever saves them and however that goes."""

from __future__ import annotations

import dataclasses
import gc
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt.dcp import staging
from pyckpt.dcp.staging import Staging
from pyckpt.format import metadata as metadata_format
from pyckpt.locks import Latch


@pytest.fixture
def engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(max_pinned_bytes=8 << 20, slot_bytes=65536, io_threads=1) as engine:
        yield engine


def begin(engine: pyckpt.Engine) -> Staging:
    stager = pyckpt.PinnedStager(engine=engine)
    begun, _ = stager.begin({"a": torch.ones(10)}, direct=True)
    begun.owner_of_test = stager  # type: ignore[attr-defined]  # which holds it weakly
    return begun


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as somebody waits for a latch."""
    event = threading.Event()
    real = Latch.wait

    def wait(self: Latch, timeout: float | None = None) -> bool:
        event.set()
        return real(self, timeout)

    monkeypatch.setattr(Latch, "wait", wait)
    return event


def test_a_waiter_sees_the_end_while_the_watch_is_being_made(
    engine: pyckpt.Engine, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that saves is one of a pool, and goes on living."""
    begun = begin(engine)
    inside, gate = threading.Event(), threading.Event()
    made = staging._Watch.__init__

    def slow(self: Any, thread: threading.Thread) -> None:
        inside.set()
        gate.wait()
        made(self, thread)

    def save() -> None:
        assert begun.take_over()
        begun.release()

    monkeypatch.setattr(staging._Watch, "__init__", slow)
    with ThreadPoolExecutor(1) as waiter, ThreadPoolExecutor(1) as saver:
        saved = saver.submit(save)
        inside.wait()
        waited = waiter.submit(begun.wait_released)
        told = waiting.wait(120)
        gate.set()
        saved.result()
        waited.result(120)
    assert told
    assert begun.released


def test_a_waiter_sees_the_end_where_no_watch_can_be_had(
    engine: pyckpt.Engine, waiting: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(engine)
    taken, go = threading.Event(), threading.Event()

    def no_thread(self: Any, thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def save() -> None:
        assert begun.take_over()
        taken.set()
        go.wait()
        begun.release()

    monkeypatch.setattr(staging._Watch, "__init__", no_thread)
    with ThreadPoolExecutor(1) as waiter, ThreadPoolExecutor(1) as saver:
        saved = saver.submit(save)
        taken.wait()
        waited = waiter.submit(begun.wait_released)
        told = waiting.wait(120)
        go.set()
        saved.result()
        waited.result(120)
    assert told
    assert begun.released


def test_a_thread_that_dies_unwatched_ends_its_save(
    engine: pyckpt.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(engine)

    def no_thread(self: Any, thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(staging._Watch, "__init__", no_thread)
    thread = threading.Thread(target=begun.take_over)
    thread.start()
    thread.join()
    begun.wait_released()
    assert engine.native.arena_used_bytes == 0


def test_memory_is_given_back_where_written_was_cancelled(
    engine: pyckpt.Engine, tmp_path: Path
) -> None:
    writer = pyckpt.DirectWriter(tmp_path, engine=engine)
    staged = writer.stage({"t": torch.ones(1 << 16)})
    assert writer.written.cancel()
    held: list[int] = []

    def save() -> None:
        dcp.save(staged, storage_writer=writer, no_dist=True)
        held.append(engine.native.arena_used_bytes)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert held == [0]
    assert pyckpt.load(tmp_path)["t"].eq(1).all()


def test_the_collector_runs_while_another_process_saves(tmp_path: Path) -> None:
    stager = pyckpt.PinnedStager(shared_memory=True)
    staged = pyckpt.DirectWriter(tmp_path, stager=stager).stage({"t": torch.ones(3)})
    sent, go = threading.Event(), threading.Event()

    def send() -> None:  # as DCP's thread does, which then waits for the answer
        staged.__reduce__()
        sent.set()
        go.wait()

    thread = threading.Thread(target=send)
    thread.start()
    sent.wait()
    assert gc.isenabled()
    go.set()
    thread.join()


@pytest.mark.parametrize("when_busy", ["skip", "error"])
def test_copies_that_were_dropped_keep_no_save_out(
    engine: pyckpt.Engine, tmp_path: Path, when_busy: Any
) -> None:
    stager = pyckpt.PinnedStager(engine=engine, when_busy=when_busy)
    state = {"t": torch.ones(engine.native.arena_max_bytes * 6 // 10, dtype=torch.uint8)}
    first = pyckpt.DirectWriter(tmp_path / "first", stager=stager, engine=engine)
    staged = first.stage(state)
    del staged
    second = pyckpt.DirectWriter(tmp_path / "second", stager=stager, engine=engine)
    assert second.stage(state).staging.has_room


def test_a_thread_that_is_past_a_save_does_not_wait_for_it(engine: pyckpt.Engine) -> None:
    stager = pyckpt.PinnedStager(engine=engine)
    state = {"t": torch.ones(engine.native.arena_max_bytes * 6 // 10, dtype=torch.uint8)}
    first, _ = stager.begin(state, direct=True)
    assert first.take_over()
    second, _ = stager.begin(state, direct=True)
    assert first.released
    assert second.has_room


def test_latch() -> None:
    latch = Latch()
    assert not latch.wait(0.0)
    with ThreadPoolExecutor(3) as threads:
        waits = [threads.submit(latch.wait) for _ in range(3)]
        latch.set()
        assert all(wait.result(120) for wait in waits)
    assert latch.wait(0.0)


class Changing(pyckpt.SavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        if isinstance(data, io.BytesIO):
            data = io.BytesIO()
            torch.save("changed", data)
        return data


def test_a_planner_that_resolves_data_itself(tmp_path: Path) -> None:
    writer = pyckpt.DirectWriter(tmp_path)
    dcp.save({"a": 5}, storage_writer=writer, planner=Changing(), no_dist=True)
    assert pyckpt.load(tmp_path) == {"a": "changed"}


class Keeping(pyckpt.SavePlanner):
    """Gives the metadata of its first save at each."""

    kept: Any = None

    def create_global_plan(self, plans: Any) -> Any:
        if self.kept is None:
            self.kept = super().create_global_plan(plans)
        final, metadata = self.kept
        pairs = zip(final, plans, strict=True)
        return [
            dataclasses.replace(own, storage_data=plan.storage_data) for own, plan in pairs
        ], metadata


def test_a_planner_that_gives_metadata_again(tmp_path: Path) -> None:
    planner = Keeping()
    for value in range(3):
        state = {"a": value, "t": torch.full((3,), float(value))}
        writer = pyckpt.DirectWriter(tmp_path)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        found: dict[str, Any] = {"a": -1, "t": torch.zeros(3)}
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert found["a"] == value
        assert pyckpt.load(tmp_path)["t"].eq(value).all()


def test_metadata_that_nobody_could_load_is_not_written(tmp_path: Path) -> None:
    dcp.save({"a": 1}, storage_writer=pyckpt.DirectWriter(tmp_path), no_dist=True)
    metadata = metadata_format.read(tmp_path / ".metadata")
    metadata.state_dict_metadata = collections_of(metadata.state_dict_metadata)
    with pytest.raises(TypeError, match="must be a dict"):
        metadata_format.encode(metadata)


def collections_of(value: dict[str, Any]) -> Any:
    class Own(dict[str, Any]):
        pass

    return Own(value)
