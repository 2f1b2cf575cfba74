"""Ranks that run apart learn the same things at the same step."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import pytest
import torch.distributed as dist
from _ranks import run_ranks
from _sampling import slow

from pyckpt.train.sync import agreement as agreement_module
from pyckpt.train.sync.agreement import Facts, GroupAgreement, LocalAgreement

CHANGES = 8


class Known:
    """What a rank knows, and changes."""

    def __init__(self) -> None:
        self.facts = Facts()

    def __call__(self) -> Facts:
        return self.facts

    def add(self, name: str) -> None:
        self.facts = self.facts._replace(**{name: getattr(self.facts, name) + 1})


def test_alone_one_agrees_at_once() -> None:
    known = Known()
    agreement = LocalAgreement(known)
    assert agreement.at(1) == Facts()
    known.add("stops")
    assert agreement.at(2) == Facts(stops=1)
    agreement.close(wait=True)


def _agreement(known: Known) -> GroupAgreement:
    group = dist.new_group(backend="gloo")
    assert group is not None
    return GroupAgreement(known, group)


def _work(generator: random.Random) -> float:
    return sum(generator.random() for _ in range(generator.randrange(20_000)))


def _apart(stride: int) -> list[tuple[int, Facts]]:
    """Ranks that run up to 5 steps apart, and come to know things at some of them."""
    rank = dist.get_rank()
    # Rounds without end, so that they meet the steps in every way.
    agreement_module._PERIOD_SECONDS = 0.0
    generator = random.Random(rank)
    known = Known()
    agreement = _agreement(known)
    changes = []
    last = Facts()
    for number in range(1_000_000):
        step = 5 + number * stride
        _work(generator)
        if number % 5 == 0:
            dist.barrier()  # so that one is not through before another begins
        if generator.random() < 0.02:
            known.add(generator.choice(["stops", "requests", "failed"]))
        if generator.random() < 0.5:
            known.add("saved")
        facts = agreement.at(step)
        if facts != last:
            changes.append((step, facts))
            last = facts
            if len(changes) == CHANGES:
                break
    agreement.close(wait=True)
    return changes


@pytest.mark.parametrize("ranks", [2, slow(3), slow(4)])
@pytest.mark.parametrize("stride", [slow(1), 10])
def test_the_same_facts_at_the_same_steps(ranks: int, stride: int) -> None:
    changes = run_ranks(ranks, _apart, stride)
    assert all(one == changes[0] for one in changes)
    assert len(changes[0]) == CHANGES
    for (_, before), (_, after) in zip(changes[0], changes[0][1:], strict=False):
        assert all(a >= b for a, b in zip(after, before, strict=True))


def _in_lockstep() -> tuple[int, int]:
    """Rank 1 is told to stop at step 20; who hears of it when?"""
    known = Known()
    agreement = _agreement(known)
    step = 0
    while True:
        step += 1
        if step == 20 and dist.get_rank() == 1:
            known.add("stops")
        dist.barrier()  # a step of training
        if agreement.at(step).stops:
            break
    agreement.close(wait=True)
    return step, agreement.at(step + 1).stops


def test_what_one_rank_hears_all_do_at_once() -> None:
    results = run_ranks(3, _in_lockstep)
    assert len(set(results)) == 1
    step, stops = results[0]
    assert step > 20
    assert stops == 1


class Clock:
    """Stands in the place of the module `time`."""

    def __init__(self) -> None:
        self.now = 1.0
        agreement_module.time = self  # type: ignore[attr-defined]

    def monotonic(self) -> float:
        return self.now


def _uneven_steps() -> int:
    """Nine steps are queued in a millisecond each, and with the tenth one waits for them."""
    clock = Clock()
    agreement = _agreement(Known())
    for step in range(1, 100):
        clock.now += 0.001 if step % 10 else 1.0
        agreement.at(step)
    ahead = agreement._promise(1.0) - 99
    agreement.close(wait=True)
    return ahead


def test_a_few_short_steps_are_not_the_pace() -> None:
    (ahead,) = run_ranks(1, _uneven_steps)
    assert ahead < 50


class Recorded(GroupAgreement):
    def _promise(self, seconds: float) -> int:
        asked.append(seconds)
        return super()._promise(seconds)


asked: list[float] = []


def _held_up() -> list[float]:
    """It takes a hundred seconds to know of the first stop."""
    clock = Clock()
    known = Known()

    def facts() -> Facts:
        if known.facts.stops == 1:
            clock.now += 100
        return known.facts

    group = dist.new_group(backend="gloo")
    assert group is not None
    agreement = Recorded(facts, group)
    for step in range(1, 10**9):
        dist.barrier()
        clock.now += 1
        if agreement.at(step).stops == known.facts.stops:
            if known.facts.stops == 2:
                break
            known.add("stops")
    agreement.close(wait=True)
    return asked


def test_a_round_that_is_held_up_does_not_make_later_ones_late() -> None:
    ((first, second),) = run_ranks(1, _held_up)
    assert first == 0
    assert second == agreement_module._AHEAD_SECONDS


def _saved_is_the_least() -> list[int]:
    rank = dist.get_rank()
    known = Known()
    agreement = _agreement(known)
    seen = []
    for step in range(1, 10**9):
        if rank == 0 and step == 1:
            known.add("saved")
        if rank == 1 and step == 30:
            known.add("saved")
        dist.barrier()
        facts = agreement.at(step)
        seen.append(facts.saved)
        if facts.saved:
            break
    agreement.close(wait=True)
    return seen


def test_a_save_is_over_when_it_is_for_all() -> None:
    first, second = run_ranks(2, _saved_is_the_least)
    assert first == second
    assert len(first) > 30


def _unequal_steps() -> list[int]:
    """Rank 0 is through before rank 1 begins; what comes then is for neither of them."""
    rank = dist.get_rank()
    known = Known()
    agreement = _agreement(known)
    if rank == 1:
        dist.barrier()
        known.add("stops")
    stops = [agreement.at(step).stops for step in range(1, 101)]
    if rank == 0:
        dist.barrier()
    agreement.close(wait=True)
    return stops


def test_what_comes_too_late_for_one_comes_for_none() -> None:
    assert run_ranks(2, _unequal_steps) == [[0] * 100] * 2


def _one_leaves() -> tuple[bool, Facts]:
    known = Known()
    agreement = _agreement(known)
    agreement.at(1)
    if dist.get_rank() == 1:
        agreement.close(wait=False)  # with an exception, say; the process lives on
        dist.barrier()
        facts = agreement.at(2)
    else:
        agreement.close(wait=True)
        dist.barrier()
        facts = agreement.at(2)
    return any(thread.name == "pyckpt-agree" for thread in threading.enumerate()), facts


def test_closing_does_not_wait_for_those_who_leave_without() -> None:
    results: list[Any] = run_ranks(2, _one_leaves)
    assert results[0] == (False, Facts())


def _all_leave() -> bool:
    """Whether what a rank knew is kept after all have left without waiting."""
    known = Known()
    agreement = _agreement(known)
    agreement.close(wait=False)
    agreement._thread.join()
    kept = weakref.ref(known)
    del known, agreement
    gc.collect()
    return kept() is not None


def test_nothing_is_kept_of_those_who_leave_without_waiting() -> None:
    assert run_ranks(2, _all_leave) == [False, False]


def _one_dies(rank_that_dies: int) -> str:
    import os

    known = Known()
    agreement = _agreement(known)
    agreement.at(1)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == rank_that_dies:
        store.wait(["connected"])  # not a collective: the other must be through with all of them
        os._exit(3)
    store.set("connected", "1")
    agreement.close(wait=True)  # comes back, since nobody is left to wait for
    known.add("stops")
    return str(agreement.at(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_holds_up_nobody(rank: int) -> None:
    from _ranks import RanksFailed

    with pytest.raises(RanksFailed) as info:
        run_ranks(2, _one_dies, rank)
    assert list(info.value.failures) == [rank]
