"""What is committed locally comes to the mirror, and back from there."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import LocalStore

import pyckpt
from pyckpt.errors import CorruptCheckpoint
from pyckpt.remote import folder, objects
from pyckpt.train.store.names import Naming
from pyckpt.train.tiers import promotion
from pyckpt.train.tiers.bucket import BucketTier
from pyckpt.train.tiers.mounted import MountedTier
from pyckpt.train.tiers.opening import open_tier
from pyckpt.train.tiers.tier import Stopped, Throttle


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((1000, 7), float(step)), "epoch": step}


@pytest.fixture(params=["mounted", "bucket"])
def mirror(request, tmp_path, monkeypatch) -> str:
    """An address. The bucket is a store of obstore in a directory."""
    if request.param == "mounted":
        return str(tmp_path / "mirror")

    def store(url: str) -> LocalStore:
        return LocalStore(str(tmp_path / "mirror") + url.removeprefix("s3://bucket"), mkdir=True)

    monkeypatch.setattr(folder, "open_store", store)
    monkeypatch.setattr(objects, "open_store", store)
    return "s3://bucket"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(promotion, "_FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(promotion, "_FIRST_POLL_SECONDS", 0.01)


def there(tmp_path: Path) -> list[str]:
    """The checkpoints in the mirror that have their metadata."""
    return sorted(path.parent.name for path in (tmp_path / "mirror").glob("*/.metadata"))


def test_checkpoints_come_to_the_mirror_and_the_oldest_go(tmp_path, mirror):
    with pyckpt.Checkpointer(
        tmp_path / "run", keep_last=1, mirror=mirror, mirror_keep_last=2
    ) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
        checkpointer._pruner.close()
        found = checkpointer.checkpoints()
    assert there(tmp_path) == ["step-00000002", "step-00000003"]
    assert [(one.step, one.is_local) for one in found] == [(2, False), (3, True)]
    for step in (2, 3):
        expected = state_of(step)
        assert torch.equal(pyckpt.load(f"{mirror}/step-{step:08d}")["w"], expected["w"])
        stock = {"w": torch.zeros(1000, 7)}
        dcp.load(stock, checkpoint_id=tmp_path / "mirror" / f"step-{step:08d}", no_dist=True)
        assert torch.equal(stock["w"], expected["w"])
    statistics = checkpointer.statistics.mirror
    assert (statistics.promoted, statistics.dropped, statistics.last_step) == (3, 0, 3)
    assert not statistics.queued


@pytest.mark.parametrize("failures", [1, 1000])
def test_metadata_that_cannot_be_read_is_read_later(tmp_path, monkeypatch, caplog, failures):
    """Without it rank 0 does not know what to bring there, and must not say that it is there."""
    read = Path.read_bytes
    left = iter(range(failures))

    def fails(path: Path) -> bytes:
        if path.name == ".metadata" and next(left, None) is not None:
            raise OSError(5, "Input/output error", str(path))
        return read(path)

    with pyckpt.Checkpointer(
        tmp_path / "run", mirror=tmp_path / "mirror", mirror_wait=0.0
    ) as checkpointer:
        monkeypatch.setattr(Path, "read_bytes", fails)
        checkpointer.save(1, state_of(1)).wait()
        is_there = checkpointer.wait_mirrored(60 if failures == 1 else 0.1)
        monkeypatch.setattr(Path, "read_bytes", read)
    assert is_there == (failures == 1)
    if failures == 1:
        assert there(tmp_path) == ["step-00000001"]
        assert "Input/output error" not in checkpointer.statistics.mirror.last_error


def test_without_the_local_directory_it_restores_from_the_mirror(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(5, state_of(5))
    shutil.rmtree(tmp_path / "run")
    state = state_of(0)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert checkpointer.restore(state) == 5
        checkpointer.save(6, state_of(6))
    assert torch.equal(state["w"], state_of(5)["w"])
    assert there(tmp_path) == ["step-00000005", "step-00000006"]


def test_the_local_checkpoint_comes_first_if_the_step_is_the_same(tmp_path, mirror, monkeypatch):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(5, state_of(5))
    for file in (tmp_path / "mirror" / "step-00000005").glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))  # reading it would be noticed
    state = state_of(0)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert checkpointer.restore(state) == 5


def damage(directory: Path) -> None:
    (file,) = directory.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_damaged_local_checkpoint_is_read_in_the_mirror(tmp_path, mirror, caplog):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(4, state_of(4)).wait()
        checkpointer.save(5, state_of(5)).wait()
    damage(tmp_path / "run" / "step-00000005")
    state = state_of(0)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert checkpointer.restore(state) == 5
    assert torch.equal(state["w"], state_of(5)["w"])
    assert "its copy in the mirror is loaded instead" in caplog.text


def test_if_both_are_damaged_an_older_one_is_read(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(4, state_of(4)).wait()
        checkpointer.save(5, state_of(5)).wait()
    damage(tmp_path / "run" / "step-00000005")
    damage(tmp_path / "mirror" / "step-00000005")
    state = state_of(0)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert checkpointer.restore(state) == 4
    with (
        pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer,
        pytest.raises(CorruptCheckpoint),
    ):
        checkpointer.restore(state, step=5)


def test_only_some_steps_come_to_the_mirror(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_every=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step), final=step == 3).wait()
            checkpointer.wait_mirrored(60)
    assert there(tmp_path) == ["step-00000002", "step-00000003"]


class Gate:
    """Uploads wait, or fail, until it is opened."""

    def __init__(self, monkeypatch, error: Exception | None = None) -> None:
        self.opened = threading.Event()
        self.came = threading.Event()
        for tier in (MountedTier, BucketTier):
            monkeypatch.setattr(tier, "upload", self._around(tier.upload, error))

    def _around(self, upload: Callable[..., None], error: Exception | None) -> Callable[..., None]:
        def gated(*arguments: object) -> None:
            self.came.set()
            if error is None:
                self.opened.wait()
            elif not self.opened.is_set():
                raise error
            upload(*arguments)

        return gated


def test_while_it_is_copied_a_checkpoint_is_not_pruned(tmp_path, mirror, monkeypatch):
    gate = Gate(monkeypatch)
    with pyckpt.Checkpointer(tmp_path / "run", keep_last=1, mirror=mirror) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        assert gate.came.wait(60)
        checkpointer.save(2, state_of(2)).wait()
        checkpointer._pruner.wait()
        assert (tmp_path / "run" / "step-00000001").exists()
        gate.opened.set()
        assert checkpointer.wait_mirrored(60)
    assert not (tmp_path / "run" / "step-00000001").exists()
    assert there(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_store_that_is_down_delays_nothing(tmp_path, mirror, monkeypatch, caplog):
    gate = Gate(monkeypatch, OSError(5, "the store is down"))
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step, state_of(step)).wait()
        assert [one.step for one in checkpointer.checkpoints() if one.is_local] == [*range(1, 7)]
        assert not there(tmp_path)
        statistics = checkpointer.statistics.mirror
        assert "the store is down" in statistics.last_error or statistics.dropped
        assert len(statistics.queued) <= 3
        gate.opened.set()
        assert not checkpointer.wait_mirrored(60), "some were given up"
        assert checkpointer.wait_mirrored(60)
    assert there(tmp_path)[-1] == "step-00000006"
    errors = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert 1 <= len(errors) <= 6


def test_close_waits_no_longer_than_it_is_told(tmp_path, mirror, monkeypatch, caplog):
    gate = Gate(monkeypatch)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_wait=0.01) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
    assert "steps [1] stay in the local directory alone" in caplog.text
    gate.opened.set()


def test_a_job_that_was_replaced_leaves_the_mirror_alone(tmp_path, mirror, caplog):
    with pyckpt.Checkpointer(tmp_path / "old", mirror=mirror) as old:
        old.save(1, state_of(1)).wait()
        assert old.wait_mirrored(60)
        with pyckpt.Checkpointer(tmp_path / "new", mirror=mirror) as new:
            new.save(2, state_of(2)).wait()
            assert new.wait_mirrored(60)
        for step in (3, 4):
            old.save(step, state_of(step)).wait()
            assert not old.wait_mirrored(60)
        assert old.statistics.mirror.dropped == 2
    assert there(tmp_path) == ["step-00000001", "step-00000002"]
    assert "another job" in caplog.text or "has begun to save here" in caplog.text


def test_a_step_that_is_saved_again_replaces_that_in_the_mirror(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        assert checkpointer.wait_mirrored(60)
        checkpointer.save(1, state_of(9)).wait()
        assert checkpointer.wait_mirrored(60)
    assert len(list((tmp_path / "mirror" / "step-00000001").glob("*.distcp"))) == 1
    assert torch.equal(pyckpt.load(f"{mirror}/step-00000001")["w"], state_of(9)["w"])


def test_what_the_mirror_has_of_a_step_is_told_apart_from_what_is_here(tmp_path, mirror, caplog):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_every=1000) as checkpointer:
        checkpointer.save(1, state_of(9)).wait()
        found = [(one.step, one.is_local, one.mirror) for one in checkpointer.checkpoints()]
        assert found == [(1, True, None), (2, True, f"{mirror}/step-00000002")]
        shutil.rmtree(tmp_path / "run" / "step-00000002")
        assert checkpointer.restore(state_of(0), step=1) == 1
    assert f"{mirror}/step-00000002 is newer than step 1, which was restored" in caplog.text


def test_remains_of_an_upload_are_removed_by_the_next_run(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
    remains = tmp_path / "mirror" / "step-00000000"
    remains.mkdir()
    (remains / "__0_abc.distcp").write_bytes(b"half")
    (remains / ".saving").touch()
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=3) as checkpointer:
        checkpointer.save(2, state_of(2)).wait()
    assert not (remains / "__0_abc.distcp").exists()
    assert there(tmp_path) == ["step-00000001", "step-00000002"]


def test_after_going_back_what_is_saved_is_not_taken_for_old(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        for step in (1, 8, 9):
            checkpointer.save(step, state_of(step)).wait()
            checkpointer.wait_mirrored(60)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=1) as checkpointer:
        checkpointer.restore(state_of(0), step=1)
        for step in (2, 3):
            checkpointer.save(step, state_of(step)).wait()
            checkpointer.wait_mirrored(60)
    # 8 and 9 are of the branch that was left.
    assert there(tmp_path) == ["step-00000003", "step-00000008", "step-00000009"]


def test_a_new_run_is_not_taken_for_old_beside_that_of_an_earlier_one(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "earlier", mirror=mirror) as checkpointer:
        checkpointer.save(1000, state_of(1000))
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=1) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        assert checkpointer.wait_mirrored(60)
    assert there(tmp_path) == ["step-00000001", "step-00001000"]


def test_a_run_that_begins_anew_keeps_its_own_there_beside_those_of_an_earlier_run(
    tmp_path, mirror, caplog
):
    def run(directory, *steps):
        with pyckpt.Checkpointer(
            tmp_path / directory, mirror=mirror, mirror_keep_last=2
        ) as checkpointer:
            for step in steps:
                checkpointer.save(step, state_of(step)).wait()
                assert checkpointer.wait_mirrored(60)

    run("a", 8, 9)
    assert not caplog.text
    run("b", 1, 2, 3)
    assert there(tmp_path) == [f"step-{step:08d}" for step in (2, 3, 8, 9)]
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"training begins at step 1 or before, and {mirror}" in said
    assert said.endswith("steps 8, 9")


def test_going_back_gives_up_what_waits_of_the_branch_that_is_left(tmp_path, mirror, monkeypatch):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=1) as checkpointer:
        checkpointer.save(5, state_of(5)).wait()
        assert checkpointer.wait_mirrored(60)
        gate = Gate(monkeypatch)
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, mirror_keep_last=1) as checkpointer:
        for step in (8, 9):
            checkpointer.save(step, state_of(step)).wait()
        assert gate.came.wait(60)
        checkpointer.restore(state_of(0), step=5)
        gate.opened.set()
        checkpointer.wait_mirrored(60)
        for step in (6, 7):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
    # 8 was under way, and is passed; 9 was given up.
    assert there(tmp_path) == ["step-00000007", "step-00000008"]


def test_a_mirror_of_damaged_checkpoints_alone_is_told(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(5, state_of(5))
    shutil.rmtree(tmp_path / "run")
    (file,) = (tmp_path / "mirror" / "step-00000005").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-10])
    with (
        pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer,
        pytest.raises(CorruptCheckpoint, match="step 5 in the mirror"),
    ):
        checkpointer.restore(state_of(0))


def test_one_damaged_checkpoint_does_not_hide_the_others(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
    shutil.rmtree(tmp_path / "run")
    (file,) = (tmp_path / "mirror" / "step-00000005").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints()] == [4]
        assert checkpointer.restore(state_of(0)) == 4


def test_after_both_copies_were_damaged_a_new_one_is_trusted(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, state_of(step)).wait()
            assert checkpointer.wait_mirrored(60)
    damage(tmp_path / "run" / "step-00000005")
    damage(tmp_path / "mirror" / "step-00000005")
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        assert checkpointer.restore(state_of(0)) == 4
        checkpointer.save(5, state_of(50)).wait()
        assert checkpointer.restore(state_of(0)) == 5


def test_what_must_not_be_replaced_is_not_replaced_in_the_mirror(tmp_path, mirror, caplog):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(5, state_of(5), final=True)
    shutil.rmtree(tmp_path / "run")
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, overwrite=False) as checkpointer:
        checkpointer.save(5, state_of(9)).wait()
        assert not checkpointer.wait_mirrored(60)
    assert torch.equal(pyckpt.load(f"{mirror}/step-00000005")["w"], state_of(5)["w"])
    assert "overwrite=False" in caplog.text


def test_a_copy_without_its_metadata_is_not_taken_for_remains(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        assert checkpointer.wait_mirrored(60)
    (tmp_path / "mirror" / "step-00000001" / ".metadata").unlink()
    with pyckpt.Checkpointer(tmp_path / "other", mirror=mirror, mirror_keep_last=1) as checkpointer:
        checkpointer.save(2, state_of(2)).wait()
        assert checkpointer.wait_mirrored(60)
    assert len(list((tmp_path / "mirror" / "step-00000001").glob("*.distcp"))) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"mirror": "s3://bucket/a#1"},
        {"mirror": "s3://bucket/a?b=1"},
        {"mirror": "file://host/a"},
        {"mirror": "m", "mirror_max_mbps": 0},
        {"mirror": "m", "mirror_max_mbps": float("nan")},
        {"mirror": "m", "mirror_wait": -1},
        {"mirror": "m", "mirror_every": 0},
    ],
)
def test_arguments_of_the_mirror(tmp_path, arguments):
    with pytest.raises(ValueError, match=r"."):
        pyckpt.Checkpointer(tmp_path / "run", **arguments)


def test_names_are_the_same_in_the_mirror(tmp_path, mirror):
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, naming="checkpoint-{}") as saver:
        saver.save(4, state_of(4))
    assert there(tmp_path) == ["checkpoint-4"]
    shutil.rmtree(tmp_path / "run")
    with pyckpt.Checkpointer(tmp_path / "run", mirror=mirror, naming="checkpoint-{}") as found:
        assert found.restore(state_of(0)) == 4


@pytest.mark.parametrize(
    "pattern",
    ["a%20b{}", "x#{}", "a?b{}", "b\\{}", "{} ", " {}", "new\nline{}", "{}\x7f", "\udcff{}"],
)
def test_names_that_a_url_does_not_keep_are_refused(tmp_path, pattern):
    naming = Naming(pattern)
    with pytest.raises(ValueError, match="leave out"):
        open_tier("memory:///x", tmp_path, naming)
    open_tier(tmp_path / "mirror", tmp_path / "run", naming)


def test_the_directory_cannot_mirror_itself(tmp_path):
    with pytest.raises(ValueError, match="cannot mirror itself"):
        pyckpt.Checkpointer(tmp_path, mirror=f"file://{tmp_path}")


def test_the_throttle_lets_bytes_pass_at_its_rate():
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 4

    throttle = Throttle(1e6)
    for _ in range(3):
        throttle.pass_(10_000_000, wait)
    assert waits[0] == 0
    assert 9 < waits[1] <= 10
    assert 19 < waits[2] <= 20
    with pytest.raises(Stopped):
        throttle.pass_(1, wait)
