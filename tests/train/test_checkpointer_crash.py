"""Killed at any instant of saving, pruning and restoring, training resumes where it was.

PYCKPT_KILLS says how often; 200 by default.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from _ranks import Child, Pipe, run_child
from _training import Run

from pyckpt import Checkpointer
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.pruner import prune
from pyckpt.train.store.retention import Retention

KILLS = int(os.environ.get("PYCKPT_KILLS", "200"))
REFERENCE_STEPS = 40 * KILLS


def _reference(_pipe: Pipe, steps: int) -> dict[int, str]:
    return Run().to(steps).losses


def _train_for_ever(pipe: Pipe, directory: Path) -> None:
    """Tells where it begins, and every loss and commit."""
    run = Run()
    with Checkpointer(
        directory, keep_last=2, keep_every=50, every_steps=3, when_busy="wait"
    ) as checkpointer:
        start = checkpointer.restore(run.state)
        pipe.send(("start", start or 0, None))
        for step in range((start or 0) + 1, REFERENCE_STEPS + 1):
            run.train(step)
            pipe.send(("loss", step, run.losses[step]))
            handle = checkpointer.step(step, run.state)
            if handle is not None:
                handle.committed.add_done_callback(
                    lambda _, step=step: pipe.send(("committed", step, None))
                )


def _messages(child: Child) -> list[tuple[str, int, str | None]]:
    """What a child that was killed had said; the last of it may be cut off."""
    heard = []
    while True:
        try:
            heard.append(child.receive())
        except (EOFError, ConnectionResetError):
            return heard


def newest_committed(directory: Path) -> int:
    """As stock sees it: the newest that has its metadata."""
    found = [int(path.parent.name[5:]) for path in directory.glob("step-*/.metadata")]
    return max(found, default=0)


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path: Path) -> None:
    expected = run_child(_reference, REFERENCE_STEPS)
    generator = random.Random(os.environ.get("PYCKPT_SEED", "1"))
    committed = reached = 0
    instants = {"restoring": 0, "saving": 0, "removing": 0}
    for kill in range(KILLS):
        child = Child(_train_for_ever, tmp_path)
        heard = [child.receive() for _ in range(generator.randrange(16))]
        child.process.join(generator.uniform(0.0, 0.02))  # until some instant after that
        child.process.kill()
        assert child.join() == -signal.SIGKILL
        for said, step, loss in heard + _messages(child):
            if said == "loss":
                assert loss == expected[step], f"kill {kill}: the loss of step {step}"
                reached = max(reached, step)
            elif said == "committed":
                committed = max(committed, step)
            else:
                # What was committed when the one before was killed, and nothing older.
                assert step == committed, f"kill {kill}: resumed from {step}, not {committed}"
        on_disk = newest_committed(tmp_path)
        assert on_disk >= committed, f"kill {kill}: {committed} was committed, and is not there"
        committed = on_disk
        with Checkpointer(tmp_path) as checkpointer:
            entries = checkpointer.inspect(verify=kill % 20 == 0)
        states = [entry.state for entry in entries]
        # A directory is made before anything is in it, and left empty before it is removed.
        assert set(states) <= {"valid", "unfinished", "removed"}, entries
        instants["saving"] += bool(states) and states[-1] == "unfinished"
        instants["removing"] += "removed" in states
    # The kills did hit what they were to hit.
    assert reached > KILLS
    assert instants["saving"] > KILLS // 20, instants

    child = Child(_train_for_ever, tmp_path)
    said, start, _ = child.receive()
    assert (said, start) == ("start", committed)
    while said != "committed" or committed < reached:
        said, step, loss = child.receive()
        if said == "loss":
            assert loss == expected[step]
        elif said == "committed":
            committed = step
    child.kill()
    prune(Catalog(tmp_path), Retention(keep_last=2, keep_every=50))  # as far as it did not come
    with Checkpointer(tmp_path) as checkpointer:
        entries = checkpointer.inspect(verify=True)
    # It may have been killed in another save.
    kept = [entry.step for entry in entries if entry.step is not None and entry.state == "valid"]
    assert len(entries) - len(kept) <= 1
    # Of steps that were saved, every 150th one is a multiple of 50.
    assert [step for step in kept if step % 50 == 0] == list(range(150, kept[-1] + 1, 150))
    assert len(kept) <= kept[-1] // 150 + 2
    dcp.load({"model": Run().model.state_dict()}, checkpoint_id=tmp_path / f"step-{kept[-1]:08d}")
