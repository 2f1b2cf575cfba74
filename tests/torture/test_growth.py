"""What grows in a soak is noticed; what varies is not."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from torture import soak
from torture.growth import LIMITS, judge, sample, slope


def _steady(number: int = 200) -> dict[str, list[float]]:
    return {name: [100.0] * number for name in LIMITS}


@pytest.mark.parametrize("name", LIMITS)
def test_what_grows_is_told(name: str) -> None:
    samples = _steady()
    least = 4 * max(LIMITS[name].growth, 1.0) / 100
    samples[name] = [100 + least * number for number in range(200)]
    _, wrong = judge(samples)
    assert [one.split()[0] for one in wrong][:1] == [name]


def test_what_only_varies_is_not() -> None:
    random = Random(1)
    samples = _steady()
    samples["disk_bytes"] = [random.uniform(3e6, 6e6) for _ in range(200)]
    samples["memory_bytes"] = [3e8 + 3e6 * (1 - 0.9**number) for number in range(200)]
    samples["threads"][150] += 1  # one that was about to end
    assert judge(samples)[1] == []


def test_a_step_is_told_where_nothing_may_grow() -> None:
    samples = _steady()
    samples["children"][180:] = [101.0] * 20  # too late for a trend
    assert judge(samples)[1] == ["children: 1 above the first half; 0 allowed"]


def test_too_few_samples_are_no_proof() -> None:
    assert judge(_steady(3))[1]


def test_the_slope_is_that_of_most() -> None:
    assert slope([0, 1, 2, 3, 99, 5, 6, 7, 8, 0]) == 1


def test_descriptors_that_are_left_open_are_sampled(tmp_path: Path) -> None:
    before = sample(tmp_path)
    kept = [(tmp_path / str(number)).open("w") for number in range(3)]
    after = sample(tmp_path)
    for file in kept:
        file.close()
    assert after["descriptors"] - before["descriptors"] == 3
    assert after["disk_entries"] - before["disk_entries"] == 3


@pytest.mark.slow
def test_restored_bits_are_compared(tmp_path: Path) -> None:
    one = soak.Soak(tmp_path, Random(0), mounted=False)
    one.period()
    one._digests = dict.fromkeys(one._digests, "other")
    with pytest.raises(soak.Wrong, match="other bits"):
        one.period()
