"""What ranks must not do when one of them is struck is noticed, in what they wrote down; and a case
of each way is run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from torture.rank_job import RANKS, Case, digest_at
from torture.ranks import BOUND_S, Life, cases, judge_first, judge_second, read
from torture.results import ROOT

_CASE = Case(0, "writing", "kill", 2, False)
_LOST = "saving step 3 failed: rank 2 (host) did not come (timeout=8 s)"


def _life(rank: int) -> Life:
    """Of a rank that saw another one's death."""
    return read(
        [
            "restore 1.0",
            "save 1 2.0",
            "committed 1 3.0",
            "restore 3.5",
            f"restored 1 {digest_at(1, rank)} 3.75",
            "save 3 4.0",
            *(["struck 5.0"] if rank == _CASE.who else []),
            *([] if rank == _CASE.who else [f"failed RanksLost 2 known {_LOST} 8.0", "gone 9.0"]),
        ]
    )


def _first() -> list[Life]:
    return [_life(rank) for rank in range(RANKS)]


def test_ranks_that_name_the_one_that_was_killed() -> None:
    assert judge_first(_CASE, _first()) == []


def _blames_another(lives: list[Life]) -> None:
    lives[0] = read([f"failed RanksLost 1,2 known {_LOST} 8.0", "gone 9.0"])


def _blames_nobody(lives: list[Life]) -> None:
    lives[3] = read(["failed RanksLost - known the ranks did not meet 8.0", "gone 9.0"])


def _raises_what_is_foreign(lives: list[Life]) -> None:
    lives[1] = read([f"failed RuntimeError - foreign {_LOST} 8.0", "gone 9.0"])


def _hangs(lives: list[Life]) -> None:
    lives[1].gone = None


def _takes_long(lives: list[Life]) -> None:
    lives[1].gone = 5.0 + BOUND_S + 1


def _restores_other_bits(lives: list[Life]) -> None:
    lives[1].restored = [(1, digest_at(2, 1))]


def _says_nothing(lives: list[Life]) -> None:
    lives[1].failure = None


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (_blames_another, "names [1, 2]"),
        (_blames_nobody, "names []"),
        (_raises_what_is_foreign, "none of pyckpt's"),
        (_hangs, "did not end"),
        (_takes_long, "ended after"),
        (_restores_other_bits, "other bits"),
        (_says_nothing, "without a word"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_is_wrong_is_told(plant: Callable[[list[Life]], None], said: str) -> None:
    lives = _first()
    plant(lives)
    assert any(said in one for one in judge_first(_CASE, lives)), judge_first(_CASE, lives)


def _again(restored: int) -> list[Life]:
    return [
        read(
            [
                f"restored {restored} {digest_at(restored, rank)} 1.0",
                f"committed {restored + 1} 2.0",
                f"committed {restored + 2} 2.0",
                "done 3.0",
                "gone 4.0",
            ]
        )
        for rank in range(RANKS)
    ]


def test_a_restart_resumes_from_the_newest() -> None:
    assert judge_second(_CASE, _again(2), 2) == []
    assert any("and not step 3" in one for one in judge_second(_CASE, _again(2), 3))


def test_cases_are_the_same_for_a_seed() -> None:
    first, again = (list(islice(cases(5), 150)) for _ in range(2))
    assert first == again
    assert first != list(islice(cases(6), 150))
    assert len({(case.phase, case.kind) for case in first}) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "kind"),
    [("writing", "kill"), ("reading", "kill"), ("planning", "raise"), ("before", "descriptors")],
)
def test_a_rank_is_struck(phase: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torture.ranks", "--cases", "1", "--phase", phase]
    command += ["--kind", kind, "--output", str(tmp_path / "ranks.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "'verified': 1" in done.stdout
    assert "0 wrong" in done.stdout
