"""What a killed job must not do is noticed, in what its ranks wrote down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torture.restarts import Life, judge, lives, read


def _life(begin: int, end: int, *, digest: str = "", restored: int | None = None) -> Life:
    found = read(
        [
            "begin 7",
            "restore",
            f"restored {begin - 1 if restored is None else restored}",
            *(f"step {step} {(step / 3).hex()}" for step in range(begin, end + 1)),
            f"save {end - 1}",
            f"committed {end - 1}",
        ]
    )
    found.digest = digest
    return found


def _calm() -> list[list[Life]]:
    return [[_life(1, 30, digest="a"), _life(1, 30, digest="b")]]


def _killed() -> list[list[Life]]:
    """A job that was killed twice: it came to step 12, and to step 21."""
    return [
        [_life(1, 12), _life(1, 12)],
        [_life(12, 21), _life(12, 21)],
        [_life(21, 30, digest="a"), _life(21, 30, digest="b")],
    ]


def test_a_job_that_goes_on_without_a_gap() -> None:
    assert judge(_killed(), _calm()) == []


def _skips(job: list[list[Life]]) -> None:
    del job[1][1].steps[0]


def _skips_on_all(job: list[list[Life]]) -> None:
    for life in job[1]:
        life.restored = 12
        del life.steps[0]
    for life in job[0]:
        life.steps = life.steps[:11]


def _loses(job: list[list[Life]]) -> None:
    job[1] = [_life(6, 21), _life(6, 21)]


def _differs(job: list[list[Life]]) -> None:
    job[1][0].steps[3] = (15, (5.5).hex())


def _disagrees(job: list[list[Life]]) -> None:
    job[1][1] = _life(13, 21)


def _ends_otherwise(job: list[list[Life]]) -> None:
    job[2][1].digest = "c"


def _fails(job: list[list[Life]]) -> None:
    job[2][0].failed.append(27)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_skips, "step 13 in place of 12"),
        (_skips_on_all, "never took the steps [12]"),
        (_loses, "restored step 5, and 11 was committed"),
        (_differs, "the loss of step 15"),
        (_disagrees, "ranks restored different steps"),
        (_ends_otherwise, "ended with other weights"),
        (_fails, "saves failed: [27]"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_lost_is_told(plant: Callable[[list[list[Life]]], None], said: str) -> None:
    job = _killed()
    plant(job)
    assert any(said in one for one in judge(job, _calm())), judge(job, _calm())


def test_what_a_kill_has_hit() -> None:
    lines = ["begin 3", "restore"]
    assert read(lines).under_way == {"restore"}
    lines += ["restored 4", "step 5 0x1p0", "save 5"]
    assert read(lines).under_way == {"save"}
    lines += ["committed 5", "prune step-00000002"]
    assert read(lines).under_way == {"prune"}
    assert read([*lines, "pruned step-00000002"]).under_way == set()


def test_a_rank_that_wrote_nothing_has_a_life_of_its_own(tmp_path: Path) -> None:
    activity = tmp_path / "activity"
    activity.mkdir()
    (activity / "0000-0").write_text("begin 1\n")
    (activity / "0000-1").write_text("begin 2\n")
    (activity / "0001-1").write_text("begin 3\n")
    assert [[life.pid for life in ranks] for ranks in lives(tmp_path)] == [[1, 2], [0, 3]]
