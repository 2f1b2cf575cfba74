"""How often to save, and when a save is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyckpt.printable import seconds_text
from pyckpt.train.advice import advise, daly_interval
from pyckpt.train.policy import Policy
from pyckpt.train.statistics import CheckpointerStatistics, Stopwatch


def overhead(interval: float, cost: float, mtbf: float) -> float:
    """Expected time over useful time, with failures at random (Daly 2006, equation 20)."""
    return mtbf * (math.exp((interval + cost) / mtbf) - 1) / interval


@given(st.floats(0.001, 1000), st.floats(3600, 1e7))
def test_the_interval_is_the_best_one(cost: float, mtbf: float) -> None:
    best = daly_interval(cost, mtbf)
    least = overhead(best, cost, mtbf)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert least <= overhead(best * factor, cost, mtbf)


def test_saves_that_cost_more_than_failures() -> None:
    assert daly_interval(200.0, 100.0) == 100.0


def test_advice_in_numbers() -> None:
    advice = advise(mtbf_hours=10, save_seconds=2.0, commit_seconds=30, step_seconds=0.5)
    # Young: sqrt(2 * 2 s * 36000 s) = 379.5 s
    assert advice.interval_steps == pytest.approx(760, abs=5)
    assert advice.interval_seconds == advice.interval_steps * 0.5
    assert advice.overhead == pytest.approx(2 / 380 + (190 + 30) / 36000, rel=0.01)
    assert not advice.limited
    assert str(advice) == (
        f"with a failure every 10 h, save every {advice.interval_steps} steps "
        f"({seconds_text(advice.interval_seconds)}): {advice.overhead:.2%} of the time is lost"
    )


def test_not_more_often_than_saves_get_done() -> None:
    advice = advise(mtbf_hours=10, save_seconds=1e-4, commit_seconds=30, step_seconds=0.7)
    assert advice.interval_steps == math.ceil(30 / 0.7)
    assert advice.limited
    assert "as often as saves get done" in str(advice)


@pytest.mark.parametrize(("hours", "step"), [(0, 1), (-1, 1), (1, 0)])
def test_wrong_arguments(hours: float, step: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        advise(mtbf_hours=hours, save_seconds=1, commit_seconds=1, step_seconds=step)


def test_steps_beside_a_save_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    watch = Stopwatch()
    for seconds, saving, blocked in [
        (1.0, False, None),  # the time before the first call is no step
        (1.0, False, None),
        (1.0, True, 0.25),  # starts a save
        (1.5, True, None),
        (1.5, False, None),  # in which it ended
        (1.0, False, None),
    ]:
        now += seconds
        watch.enter(saving and blocked is None)
        now += blocked or 0.0
        watch.leave(saving, blocked)
    watch.committed(3.0)
    found = watch.statistics(saves=1)
    assert found == CheckpointerStatistics(
        saves=1,
        blocked_seconds=0.25,
        slowed_seconds=1.0,
        commit_seconds=3.0,
        step_seconds=1.0,
        lost_seconds=1.25,
    )
    watch.waited(2.0)
    assert watch.lost_seconds == 3.25
    watch.pause()
    now += 100.0
    watch.enter(False)
    assert watch.statistics().step_seconds == 1.0


def test_policy() -> None:
    policy = Policy(every_steps=3, every_minutes=2, save_when=lambda step: step == 4)
    assert [step for step in range(1, 10) if policy.due_at(step)] == [3, 4, 6, 9]
    assert not policy.due_after(119.9)
    assert policy.due_after(120.0)
    assert not Policy().due_at(1)
    assert not Policy().due_after(1e9)
