"""What a restore takes, and says, where the directory and the mirror have different things."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _nodes import enter_node
from _ranks import run_ranks
from _sampling import slow

import pyckpt
from pyckpt import Checkpointer
from pyckpt.train.tiers.mounted import MountedTier


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step)), "epoch": step}


def save(base: Path, *steps: int) -> None:
    with Checkpointer(base / "run", mirror=base / "mirror") as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)


def restore(base: Path, step: int | None = None) -> tuple[int | None, Any]:
    state = state_of(0)
    with Checkpointer(base / "run", mirror=base / "mirror") as checkpointer:
        return checkpointer.restore(state, step=step), state["epoch"]


@contextmanager
def down() -> Iterator[list[str]]:
    """The mirror cannot be looked into. Returns what was asked of it."""
    asked: list[str] = []

    def fails(name: str) -> Any:
        def failing(*_: object, **__: object) -> None:
            asked.append(name)
            raise TimeoutError(110, "the store is down")

        return failing

    names = ("newest", "damaged", "checkpoints")
    with mock.patch.multiple(MountedTier, **{name: fails(name) for name in names}):
        yield asked


def lose(directory: Path, what: str) -> None:
    """Damage a checkpoint in a way that is seen without reading its data."""
    (file,) = directory.glob("*.distcp")
    if what == "missing":
        file.unlink()
    elif what == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        (directory / ".metadata").unlink()


# --- the same step, saved twice ---


def test_another_save_of_a_step_in_the_mirror_is_not_taken_for_its_copy(tmp_path):
    save(tmp_path, 1, 2)
    with Checkpointer(
        tmp_path / "run", mirror=tmp_path / "mirror", mirror_every=1000
    ) as checkpointer:
        checkpointer.save(2, state_of(22)).wait()
        checkpointer.wait_mirrored(60)
        one, two = checkpointer.checkpoints()
    mirror = tmp_path / "mirror"
    assert (one.is_local, one.mirror) == (True, str(mirror / "step-00000001"))
    assert (two.is_local, two.mirror) == (True, None)
    assert pyckpt.load(two.place)["epoch"] == 22

    assert restore(tmp_path) == (2, 22)
    # It is an older save of the step, and newer than step 1.
    lose(tmp_path / "run" / "step-00000002", "missing")
    assert restore(tmp_path) == (2, 2)
    shutil.rmtree(tmp_path / "run")
    with Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        found = [(one.step, one.is_local, one.mirror) for one in checkpointer.checkpoints()]
    assert found == [(step, False, str(mirror / f"step-{step:08d}")) for step in (1, 2)]


# --- a mirror that cannot be reached ---


@pytest.mark.parametrize("what", ["missing", slow("short"), "metadata"])
def test_a_damaged_newest_checkpoint_is_not_passed_over_if_the_mirror_is_down(
    tmp_path, caplog, what
):
    save(tmp_path, 1, 2)
    lose(tmp_path / "run" / "step-00000002", what)
    with down(), pytest.raises(TimeoutError, match="the store is down"):
        restore(tmp_path)
    assert "step-00000002: damaged" in caplog.text
    assert restore(tmp_path) == (2, 2)


def test_an_exact_step_that_only_the_mirror_may_have_is_not_called_missing(tmp_path):
    save(tmp_path, 1, 2)
    lose(tmp_path / "run" / "step-00000002", "missing")
    with down():
        for step in (2, 3):
            with pytest.raises(TimeoutError, match="the store is down"):
                restore(tmp_path, step)
        # What is asked for is whole.
        assert restore(tmp_path, 1) == (1, 1)
    assert restore(tmp_path, 2) == (2, 2)


def test_what_proved_corrupt_here_is_not_passed_over_later_if_the_mirror_is_down(tmp_path):
    save(tmp_path, 1, 2)
    (file,) = (tmp_path / "run" / "step-00000002").glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror") as checkpointer:
        assert checkpointer.restore(state_of(0)) == 2
        with down(), pytest.raises(TimeoutError, match="the store is down"):
            checkpointer.restore(state_of(0))
        assert checkpointer.restore(state_of(0)) == 2


def test_if_nothing_newer_was_here_the_newest_local_checkpoint_is_taken(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    unfinished = tmp_path / "run" / "step-00000004"
    unfinished.mkdir()
    (unfinished / ".saving").touch()
    with down():
        assert restore(tmp_path) == (2, 2)
    assert "the mirror may have a newer checkpoint" in caplog.text


def outcome(checkpointer: Checkpointer, step: int | None, *, is_down: bool) -> str:
    """What a restore returns, or that its error is that of the mirror."""
    with down() if is_down else nullcontext():
        try:
            return str(checkpointer.restore({"epoch": 0}, step=step, unexpected="ignore"))
        except OSError as error:
            return "down" if "the store is down" in str(error) else repr(error)


def _restore_where_it_is_down_for_one(base: Path) -> list[str]:
    is_down = dist.get_rank() == 1
    with Checkpointer(base / "run", mirror=base / "mirror") as checkpointer:
        return [outcome(checkpointer, step, is_down=is_down) for step in (None, 2, 1)]


def test_all_ranks_learn_that_one_cannot_reach_the_mirror(tmp_path):
    save(tmp_path, 1, 2)
    lose(tmp_path / "run" / "step-00000002", "missing")
    said = run_ranks(2, _restore_where_it_is_down_for_one, tmp_path)
    assert said == [["down", "down", "1"]] * 2


# --- what is newer than the step that was asked for ---


def test_newer_checkpoints_that_only_the_mirror_has_are_told(tmp_path, caplog):
    save(tmp_path, 1, 2, 3)
    shutil.rmtree(tmp_path / "run")
    assert restore(tmp_path, 1) == (1, 1)
    for step in (2, 3):
        path = tmp_path / "mirror" / f"step-{step:08d}"
        assert f"{path} is newer than step 1, which was restored" in caplog.text
    caplog.clear()
    assert restore(tmp_path) == (3, 3)
    assert "is newer than" not in caplog.text


def test_not_all_of_many_newer_checkpoints_are_looked_at(tmp_path, caplog):
    save(tmp_path, *range(1, 9))
    shutil.rmtree(tmp_path / "run")
    assert restore(tmp_path, 1) == (1, 1)
    told = [r.getMessage() for r in caplog.records if "is newer than step 1" in r.getMessage()]
    assert [line.split()[0][-1] for line in told] == list("87654")


def test_a_mirror_that_is_down_is_not_asked_again_what_is_newer(tmp_path, caplog):
    save(tmp_path, 1, 2)
    with down() as asked:
        assert restore(tmp_path, 1) == (1, 1)
    assert asked == ["newest"]
    newest = MountedTier.newest

    def fails_later(self: MountedTier, limit: int | None = None, **options: Any) -> Any:
        if limit is None:
            raise TimeoutError(110, "the store is down")
        return newest(self, limit, **options)

    with mock.patch.object(MountedTier, "newest", fails_later):
        assert restore(tmp_path, 1) == (1, 1)
    assert "cannot tell what" in caplog.text


# --- nodes with a directory of their own each ---

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount directories")


def _node(base: Path) -> Checkpointer:
    at = base / "nvme"
    enter_node(at, base / f"disk-{dist.get_rank()}")
    return Checkpointer(at / "run", node_local=True, mirror=base / "mirror")


def _save_on_nodes(base: Path) -> None:
    with _node(base) as checkpointer:
        for step in (1, 2):
            own = pyckpt.PerRank(torch.full((50,), float(step)))
            checkpointer.save(step, {"epoch": step, "own": own}).wait()
            assert checkpointer.wait_mirrored(60)
            dist.barrier()


def _restore_on_nodes(base: Path, cases: list[tuple[int | None, str]]) -> list[str]:
    """What restores of some steps return while the mirror is down for some ranks."""
    rank = str(dist.get_rank())
    with _node(base) as checkpointer:
        return [outcome(checkpointer, step, is_down=rank in down_for) for step, down_for in cases]


@needs_root
def test_nodes_pass_over_nothing_that_a_mirror_may_have_if_it_is_down(tmp_path):
    run_ranks(2, _save_on_nodes, tmp_path)
    lose(tmp_path / "disk-1/run/step-00000002", "missing")
    cases = {(None, "01"): "down", (None, "1"): "down", (2, "01"): "down", (3, "0"): "down"}
    cases |= {(1, "01"): "1", (None, ""): "2"}
    said = run_ranks(2, _restore_on_nodes, tmp_path, list(cases))
    assert said == [list(cases.values())] * 2


@pytest.mark.slow
@needs_root
def test_nodes_that_have_nothing_newer_take_the_newest_that_they_have(tmp_path):
    run_ranks(2, _save_on_nodes, tmp_path)
    cases: list[tuple[int | None, str]] = [(None, "01")]
    assert run_ranks(2, _restore_on_nodes, tmp_path, cases) == [["2"]] * 2
    for disk in ("disk-0", "disk-1"):
        (tmp_path / disk / "run/step-00000002/.metadata").unlink()
    assert run_ranks(2, _restore_on_nodes, tmp_path, cases) == [["down"]] * 2
    for disk in ("disk-0", "disk-1"):
        shutil.rmtree(tmp_path / disk / "run/step-00000002")
    assert run_ranks(2, _restore_on_nodes, tmp_path, cases) == [["1"]] * 2
