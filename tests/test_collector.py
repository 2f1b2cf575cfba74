"""The garbage collector is held off while saves are planned, and always comes back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _staging import wait_given_back
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

import pyckpt
from pyckpt.collector import CollectorPause, collector_paused


@pytest.fixture(autouse=True)
def comes_back() -> Iterator[None]:
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def test_pauses_overlap() -> None:
    with collector_paused():
        assert not gc.isenabled()
        other = CollectorPause()
    assert not gc.isenabled()
    other.end()
    assert gc.isenabled()
    with collector_paused():
        other.end()  # it ended before
        assert not gc.isenabled()


def test_who_needs_no_collector_gets_none() -> None:
    gc.disable()
    with collector_paused(), collector_paused():
        pass
    assert not gc.isenabled()
    gc.enable()


def test_a_finalizer_ends_a_pause() -> None:
    """Which the collector may call in the middle of the end of another."""

    class Ends:
        def __init__(self) -> None:
            self.me = self
            self.pause = CollectorPause()

        def __del__(self) -> None:
            self.pause.end()

    ends = Ends()
    with collector_paused():
        del ends
    assert not gc.isenabled()
    gc.collect()
    assert gc.isenabled()


class Planner(DefaultSavePlanner):
    """Looks whether the collector is there, and fails where it is told."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.seen: dict[str, bool] = {}

    def _see(self, where: str) -> None:
        self.seen[where] = gc.isenabled()
        if where == self.fails:
            raise ValueError(where)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._see("set_up")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> Any:
        self._see("local")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        self._see("global")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        self._see("finish")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        self._see("resolve")
        return super().resolve_data(write_item)


STATE = {"a": torch.rand(300), "b": {"c": torch.rand(7)}}
PLANNED = {"set_up": False, "local": False, "global": False, "finish": False}


def test_while_a_save_is_planned(tmp_path: Path) -> None:
    planner = Planner()
    writer = pyckpt.DirectWriter(tmp_path, sync_files=False)
    dcp.async_save(STATE, storage_writer=writer, planner=planner).result()
    # And not while it is written, which may take minutes.
    assert planner.seen == {**PLANNED, "resolve": True}


def test_not_where_nobody_would_bring_it_back(tmp_path: Path) -> None:
    """A save that waits has no thread that ends, should planning fail."""
    planner = Planner(fails="global")
    writer = pyckpt.DirectWriter(tmp_path, sync_files=False)
    with pytest.raises(CheckpointException):
        dcp.save(STATE, storage_writer=writer, planner=planner)
    assert planner.seen == dict.fromkeys(("set_up", "local", "global"), True)


@pytest.mark.parametrize("where", ["set_up", "local", "global", "finish", "resolve"])
def test_where_a_save_fails(tmp_path: Path, where: str) -> None:
    planner = Planner(fails=where)
    stager = pyckpt.PinnedStager()
    writer = pyckpt.DirectWriter(tmp_path, sync_files=False, stager=stager)
    future = dcp.async_save(STATE, storage_writer=writer, planner=planner)
    with pytest.raises(BaseException, match=where):
        future.result()
    wait_given_back(writer)  # when DCP's thread ends, and with it the pause
    assert planner.seen[where] == (where not in PLANNED)


def on_ranks(path: Path) -> dict[str, bool]:
    planner = Planner()
    writer = pyckpt.DirectWriter(path, sync_files=False)
    dcp.async_save(STATE, storage_writer=writer, planner=planner).result()
    assert gc.isenabled()
    return planner.seen


def test_ranks(tmp_path: Path) -> None:
    coordinator, other = run_ranks(2, on_ranks, tmp_path)
    assert coordinator.items() >= {**PLANNED, "resolve": True}.items()
    assert other.items() >= {"set_up": False, "local": False, "finish": True}.items()
