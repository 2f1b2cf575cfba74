"""The mirror on several ranks, in a bucket of a server, and killed at any instant."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import _s3
import pytest
import torch
import torch.distributed as dist
from _ranks import Child, Pipe, run_child, run_ranks
from _training import Run
from torch.distributed.fsdp import fully_shard

import pyckpt
from pyckpt import Checkpointer

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("PYCKPT_MIRROR_KILLS", "25"))


@pytest.fixture(params=["mounted", "s3"])
def mirror(request, tmp_path):
    if request.param == "mounted":
        yield str(tmp_path / "mirror")
    else:
        with _s3.bucket():
            yield "s3://runs/a"


def _sharded() -> Run:
    run = Run()
    fully_shard(run.model)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.05)
    return run


def _save(directory: Path, mirror: str, settings: dict[str, str]) -> list[str]:
    os.environ.update(settings)
    run = _sharded()
    with Checkpointer(directory, mirror=mirror, mirror_keep_last=2, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            run.train(step, alone=True)
            checkpointer.save(step, run.state)
            checkpointer.wait()
            assert checkpointer.wait_mirrored(120)
            dist.barrier()
    assert checkpointer.statistics.mirror.promoted == 3
    return [str(p.full_tensor().tolist()) for p in run.model.parameters()]


def _restore(
    directory: Path, mirror: str, settings: dict[str, str], rank_without: int | None
) -> list[str]:
    os.environ.update(settings)
    # A rank whose node lost its disk looks at an empty directory.
    lost = dist.get_rank() == rank_without
    run = _sharded()
    with Checkpointer(directory.with_name("lost") if lost else directory, mirror=mirror) as found:
        assert found.restore(run.state) == 3
    return [str(p.full_tensor().tolist()) for p in run.model.parameters()]


def test_ranks_bring_their_files_and_some_or_all_restore_from_there(tmp_path, mirror):
    saved = run_ranks(2, _save, tmp_path / "run", mirror, _s3.settings())
    assert run_ranks(2, _restore, tmp_path / "run", mirror, _s3.settings(), 1) == saved
    assert run_ranks(2, _restore, tmp_path / "run", mirror, _s3.settings(), 0) == saved
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "lost", ignore_errors=True)
    assert run_ranks(2, _restore, tmp_path / "run", mirror, _s3.settings(), None) == saved
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert run_ranks(1, _restore, tmp_path / "run", mirror, _s3.settings(), None)[0] == saved[0]


def _reference(_pipe: Pipe, steps: int) -> dict[int, str]:
    return Run().to(steps).losses


def _train_for_ever(pipe: Pipe, directory: Path, mirror: str, settings: dict[str, str]) -> None:
    os.environ.update(settings)
    run = Run()
    with Checkpointer(
        directory,
        every_steps=1,
        keep_last=1,
        mirror=mirror,
        mirror_keep_last=1,
        when_busy="wait",
    ) as checkpointer:
        start = checkpointer.restore(run.state) or 0
        pipe.send(("start", start, None))
        for step in range(start + 1, 10_000):
            run.train(step)
            pipe.send(("loss", step, run.losses[step]))
            checkpointer.step(step, run.state)
            if step % 2:
                checkpointer.wait_mirrored()
                pipe.send(("there", checkpointer.statistics.mirror.last_step or 0, None))


def test_killed_at_any_instant_the_mirror_has_a_checkpoint(tmp_path, mirror):
    expected = run_child(_reference, 300)
    generator = random.Random(5)
    there = 0
    for kill in range(KILLS):
        child = Child(_train_for_ever, tmp_path / "run", mirror, _s3.settings())
        kind, start, _ = child.receive()
        assert kind == "start"
        assert start >= there, f"kill {kill}: step {there} was in the mirror, and {start} is found"
        heard = [child.receive() for _ in range(generator.randrange(1, 12))]
        child.process.join(generator.uniform(0.0, 0.03))
        child.process.kill()
        assert child.join() == -signal.SIGKILL
        for said, step, loss in heard:
            if said == "loss":
                assert loss == expected[step]
            elif said == "there":
                there = max(there, step)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)  # the node is gone
    assert there > KILLS / 5
    state = Run().state
    with Checkpointer(tmp_path / "run", mirror=mirror) as checkpointer:
        found = checkpointer.restore(state, required=True)
        assert [one.step for one in checkpointer.checkpoints()][-1] == found
    pyckpt.load(f"{mirror}/step-{found:08d}")


def test_a_bucket_lets_one_job_win_and_one_checkpoint_replace_another(tmp_path):
    def state(value: int) -> dict[str, torch.Tensor]:
        return {"w": torch.full((5,), value)}

    with _s3.bucket() as bucket, Checkpointer(tmp_path / "old", mirror="s3://runs/a") as old:
        old.save(1, state(1)).wait()
        assert old.wait_mirrored(60)
        with Checkpointer(tmp_path / "new", mirror="s3://runs/a", mirror_keep_last=1) as new:
            new.save(1, state(2)).wait()
            assert new.wait_mirrored(60)
            old.save(5, state(3)).wait()
            assert not old.wait_mirrored(60)
            assert old.statistics.mirror.dropped == 1
            assert torch.equal(pyckpt.load("s3://runs/a/step-00000001")["w"], state(2)["w"])
            new.save(2, state(4)).wait()
            assert new.wait_mirrored(60)
        names = [one.key for one in bucket.objects.all()]
    # What the first job had brought of step 5 is not older than the newest, and stays.
    assert sorted(name for name in names if name.endswith(".metadata")) == [
        "a/step-00000002/.metadata"
    ]
    assert not [name for name in names if "step-00000001" in name]
    assert len([name for name in names if "generation" in name]) == 1
