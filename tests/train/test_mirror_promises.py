"""What a program is told of the mirror is so, and what it wants kept there stays."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _ranks import run_ranks

import pyckpt
from pyckpt.train.tiers import promotion
from pyckpt.train.tiers.mounted import MountedTier


def state_of(value: int) -> dict[str, object]:
    return {"w": torch.full((1000, 7), float(value))}


def holds(mirror: Path, step: int) -> float:
    return float(pyckpt.load(mirror / f"step-{step:08}")["w"][0, 0])


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(promotion, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(promotion, "_FIRST_POLL_SECONDS", 0.01)


def test_what_was_given_up_is_told_by_a_later_call(tmp_path, monkeypatch):
    """A call that ends before all is over has told nothing yet."""
    is_down = True
    upload = MountedTier.upload

    def may_fail(self: MountedTier, *args: Any) -> None:
        if is_down:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        upload(self, *args)

    monkeypatch.setattr(MountedTier, "upload", may_fail)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror") as checkpointer:
        for step in (1, 2, 3, 4, 5):
            checkpointer.save(step, state_of(step)).wait()
        assert checkpointer.statistics.mirror.dropped > 0
        assert not checkpointer.wait_mirrored(0)
        is_down = False
        assert not checkpointer.wait_mirrored(60)
        assert checkpointer.wait_mirrored(60)


@pytest.mark.parametrize(
    ("default", "of_the_save"), [(False, None), (True, False)], ids=["by-default", "by-the-save"]
)
@pytest.mark.parametrize("failures", [0, 2])
def test_what_must_not_be_replaced_stays_after_failed_attempts(
    tmp_path, monkeypatch, default, of_the_save, failures
):
    mirror = tmp_path / "mirror"
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(5, state_of(5), final=True)
    shutil.rmtree(tmp_path / "run")
    sizes = MountedTier.sizes
    left = failures

    def may_fail(self: MountedTier, step: int) -> dict[str, int]:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return sizes(self, step)

    monkeypatch.setattr(MountedTier, "sizes", may_fail)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, overwrite=default) as checkpointer:
        checkpointer.save(5, state_of(9), overwrite=of_the_save).wait()
        assert not checkpointer.wait_mirrored(60)
        assert left == 0
    assert holds(mirror, 5) == 5


def test_a_save_may_replace_what_others_may_not(tmp_path):
    mirror = tmp_path / "mirror"
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, overwrite=False) as checkpointer:
        checkpointer.save(5, state_of(5)).wait()
        assert checkpointer.wait_mirrored(60)
        checkpointer.save(5, state_of(9), overwrite=True).wait()
        assert checkpointer.wait_mirrored(60)
    assert holds(mirror, 5) == 9


def _not_replaced(base: Path) -> bool:
    """Rank 1 has nothing to bring, and may look when rank 0 has committed."""
    with pyckpt.Checkpointer(base / "run", mirror=base / "mirror", overwrite=False) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"epoch": step}).wait()
        return checkpointer.wait_mirrored(60)


def test_a_rank_that_brings_nothing_finds_nothing_in_the_way(tmp_path):
    assert run_ranks(2, _not_replaced, tmp_path) == [True, True]


def test_a_protected_checkpoint_stays_in_the_mirror(tmp_path):
    mirror = tmp_path / "mirror"
    with pyckpt.Checkpointer(
        tmp_path / "run", keep_last=1, mirror=mirror, mirror_keep_last=1
    ) as checkpointer:

        def save(step: int) -> list[str]:
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
            return sorted(path.parent.name[-1] for path in mirror.glob("*/.metadata"))

        assert save(1) == ["1"]
        with checkpointer.protect(1):
            assert save(2) == ["1", "2"]
            assert save(3) == ["1", "3"]
        assert save(4) == ["4"]


def test_a_rank_does_not_wait_for_ever_for_the_first_one_to_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(promotion, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(promotion, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(MountedTier, "holder", lambda self: "another job's")
    with pyckpt.Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror") as checkpointer:
        checkpointer._promotion._is_first = False
        checkpointer.save(1, state_of(1), final=True)
        assert not checkpointer.wait_mirrored(60)
        assert checkpointer.statistics.mirror.dropped == 1
