"""Ranks that wait for all others to come to a meeting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from _ranks import run_ranks

from pyckpt.errors import RanksLost
from pyckpt.train.sync import roll_call as roll_call_module
from pyckpt.train.sync.ranks import Ranks
from pyckpt.train.sync.roll_call import RollCall


def all_come(_: Path) -> list[list[int]]:
    roll_call = RollCall("test", dist.get_rank(), dist.get_world_size())
    return [roll_call.assemble("save", late=60, limit=60, tell=print) for _ in range(3)]


def one_stays_away(_: Path) -> tuple[list[int], list[list[int]]]:
    rank = dist.get_rank()
    roll_call = RollCall("test", rank, dist.get_world_size())
    told: list[list[int]] = []
    missing = roll_call.assemble("save", late=60, limit=60, tell=told.append)
    assert not missing
    if rank != 1:
        missing = roll_call.assemble("save", late=0.01, limit=0.2, tell=told.append)
    dist.barrier()
    return missing, told


def one_does_another_thing(_: Path) -> str:
    rank = dist.get_rank()
    roll_call = RollCall("test", rank, dist.get_world_size())
    roll_call.assemble("save", late=60, limit=60, tell=print)
    with pytest.raises(RanksLost) as caught:
        roll_call.assemble("load" if rank == 1 else "save", late=60, limit=60, tell=print)
    dist.barrier()  # the store ends with the first rank
    return str(caught.value).partition(",")[0]


def test_one_does_another_thing(tmp_path: Path) -> None:
    save, load = "this process has called save", "this process has called load"
    assert run_ranks(3, one_does_another_thing, tmp_path) == [save, load, save]


def test_all_come(tmp_path: Path) -> None:
    assert run_ranks(3, all_come, tmp_path) == [[[], [], []]] * 3


def test_one_stays_away(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, one_stays_away, tmp_path)
    assert second == ([], [])
    for missing, told in (first, third):
        # The other one may not have come either by then, on a machine that is busy.
        assert 1 in missing
        assert all(1 in late for late in told)
        assert told


def two_lives_in_one_store(folder: Path) -> list[tuple[tuple[int, ...], bool]]:
    """What torchrun does with its own store: the ranks are started again, and the store stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), size)
    found = []
    for life in range(2):
        # Addresses of their own, or gloo would look for the ranks of the life before.
        addresses = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=addresses, rank=rank, world_size=size)
        ranks = Ranks()
        stays_away = life == 1 and rank == 1
        for _ in range(0 if stays_away else 3):
            ranks.arrive()
        said = ranks.is_first_to_say("the same")
        dist.barrier()
        looks = life == 1 and not stays_away
        found.append((ranks.lose(RuntimeError("reset"), "saving").ranks if looks else (), said))
        dist.barrier()
        ranks.close()
        dist.destroy_process_group()
    return found


@pytest.mark.slow
def test_what_a_job_before_the_restart_left_in_the_store_is_not_counted(tmp_path: Path) -> None:
    first, second, third = run_ranks(3, two_lives_in_one_store, tmp_path)
    assert [rank[1][0] for rank in (first, second, third)] == [(1,), (), (1,)]
    for life in range(2):  # one says it in each
        assert [ranks[life][1] for ranks in (first, second, third)].count(True) == 1


def first_meetings_under_one_name(_: Path, absent: int) -> list[list[int]]:
    """As of ranks that torchrun has started three times: in the last life, one does not come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for life in range(3):
        roll_call = RollCall("test", rank, size, may_be_left=True)
        limit = 60 if life < 2 else 0.3
        if life < 2 or rank != absent:
            found += [
                roll_call.assemble("save", late=limit, limit=limit, tell=print)
                for _ in range(max(1, 2 - life))
            ]
        dist.barrier()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("absent", [0, 1])
def test_ranks_before_a_restart_did_not_come_to_the_first_meeting(
    tmp_path: Path, absent: int
) -> None:
    for rank, found in enumerate(run_ranks(3, first_meetings_under_one_name, tmp_path, absent)):
        assert found[:3] == [[], [], []]
        # On a machine that is busy, the other one may not have come either by then.
        assert [absent in missing for missing in found[3:]] == [True] * (rank != absent)


# --- who is missing -------------------------------------------------------------------------------


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> list[RollCall]:
    """Of four ranks, in one process, which wait for each other for a shorter time."""
    store = dist.HashStore()
    monkeypatch.setattr(roll_call_module, "_store", lambda name: dist.PrefixStore(name, store))
    for name in ("_OTHERS_SECONDS", "_STORE_SECONDS"):
        monkeypatch.setattr(roll_call_module, name, 1.0)
    return [RollCall("test", rank, 4) for rank in range(4)]


def _judged_by(roll_calls: Sequence[RollCall]) -> list[list[int]]:
    with ThreadPoolExecutor(len(roll_calls)) as threads:
        return list(threads.map(RollCall.missing, roll_calls))


def test_a_rank_that_ends_a_meeting_ahead_of_the_others_is_missing(four: list[RollCall]) -> None:
    for roll_call in (*four, four[3]):
        roll_call.arrive()
    assert _judged_by(four[:3]) == [[3], [3], [3]]


@pytest.mark.slow
def test_a_rank_that_ends_while_it_finds_out_leaves_that_to_the_others(
    four: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    for roll_call in four:
        roll_call.arrive()
    with monkeypatch.context() as ending:
        ending.setattr(roll_call_module, "_within", lambda seconds, call: None)
        four[0].missing()
    assert _judged_by(four[1:3]) == [[3], [3]]


def test_a_rank_that_cannot_start_a_thread_at_once_names_the_missing_one(
    four: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    for roll_call in four[:3]:
        roll_call.arrive()
    start, refused = threading.Thread.start, list[str]()

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "pyckpt-roll-call" and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    assert _judged_by(four[:3]) == [[3], [3], [3]]
    assert len(refused) == 3


def test_a_rank_that_can_start_no_thread_names_nobody_and_does_not_wait(
    four: list[RollCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    four[0].arrive()
    monkeypatch.setattr(roll_call_module, "_THREAD_SECONDS", 0.1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as short_of_threads:
        short_of_threads.setattr(threading.Thread, "start", refuse)
        assert four[0].missing() == []


def test_nobody_is_missing_after_a_save_that_failed_early(four: list[RollCall]) -> None:
    for roll_call in four:
        roll_call.arrive()
        roll_call.count += 1  # as on leaving `Ranks.meetings(2)`
    assert [roll_call.late() for roll_call in four] == [[]] * 4
    assert _judged_by(four) == [[]] * 4


def test_a_rank_that_leaves_is_not_missing_and_not_waited_for(four: list[RollCall]) -> None:
    four[0].leave()
    assert _judged_by(four[1:3]) == [[3], [3]]
    assert not any(roll_call._is_led(roll_call._store) for roll_call in four[:2])
