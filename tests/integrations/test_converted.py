"""What frameworks saved by themselves, imported: training goes on as after their own resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning")
pytest.importorskip("torchtitan")

import accelerate
import transformers
from _accelerate import EPOCH, Run
from _huggingface import losses, make_trainer
from _lightning import Module, trainer
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import ModelCheckpoint
from test_torchtitan import Job
from torchtitan.components.checkpointer import CheckpointManager as TitansCheckpointManager

import pyckpt
from pyckpt.convert import import_checkpoint
from pyckpt.integrations.lightning import Checkpoints
from pyckpt.integrations.transformers import Trainer


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# --- Lightning ------------------------------------------------------------------------------------


class Without(Module):
    """Without dropout, since generators are not in a checkpoint of Lightning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.layers[2].p = 0.0

    @property
    def strict_loading(self) -> bool:
        return False  # nor are metrics


class Odd:
    """A hyperparameter that only code of its own makes."""


def test_lightning(tmp_path: Path) -> None:
    own = ModelCheckpoint(tmp_path / "own", every_n_train_steps=4, save_top_k=-1)
    whole = Without(odd=Odd())
    trainer(tmp_path, own, epochs=3).fit(whole)
    (path,) = (tmp_path / "own").glob("*step=8.ckpt")
    theirs = Without()
    trainer(tmp_path, epochs=3).fit(theirs, ckpt_path=path, weights_only=False)
    report = import_checkpoint(path, tmp_path / "run")
    assert (report.step, report.kind) == (8, "a checkpoint of Lightning")
    assert any("hyper_parameters.odd" in note for note in report.notes)
    ours = Without()
    trainer(tmp_path, Checkpoints(tmp_path / "run"), epochs=3).fit(ours)
    assert list(ours.losses) == list(range(9, 19))
    assert ours.losses == theirs.losses
    # At the last batch of an epoch, Lightning's own resume with this loader trains no further.
    (path,) = (tmp_path / "own").glob("*step=12.ckpt")
    import_checkpoint(path, tmp_path / "at-end")
    after = Without()
    trainer(tmp_path, Checkpoints(tmp_path / "at-end"), epochs=3).fit(after)
    assert after.losses == {step: whole.losses[step] for step in range(13, 19)}


# --- Transformers ---------------------------------------------------------------------------------


def test_trainer(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path / "own", kind=transformers.Trainer)
    whole.train()
    report = import_checkpoint(tmp_path / "own" / "checkpoint-20", tmp_path / "run")
    assert (report.step, report.kind) == (20, "a checkpoint of Transformers' Trainer")
    theirs = make_trainer(tmp_path / "own", kind=transformers.Trainer)
    theirs.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-20"))
    ours = make_trainer(tmp_path / "run", kind=Trainer)
    ours.train(resume_from_checkpoint=True)
    assert losses(ours) == losses(theirs)
    assert ours.state.global_step == 36
    assert len(losses(ours)) == 36


# --- Accelerate -----------------------------------------------------------------------------------


def go_on(run: Run, path: Path) -> list[float]:
    """The losses of the rest of an epoch, after a state was loaded."""
    run.accelerator.load_state(str(path))
    loader = run.accelerator.skip_first_batches(run.loader, run.count.n % EPOCH)
    return [run.step(batch) for batch in loader]


def test_accelerate(tmp_path: Path) -> None:
    run = Run("seedable", kind=accelerate.Accelerator)
    for batch in run.loader:
        run.step(batch)
        if run.count.n == 5:
            run.accelerator.save_state(str(tmp_path / "step_5"))
    report = import_checkpoint(tmp_path / "step_5", tmp_path / "run")
    assert (report.step, report.kind) == (5, "a folder of Accelerate's save_state")
    theirs = go_on(Run("seedable", kind=accelerate.Accelerator, seed=3), tmp_path / "step_5")
    ours = go_on(Run("seedable", seed=3), report.path)
    assert ours == theirs
    assert len(ours) == EPOCH - 5


def test_accelerates_shards(tmp_path: Path) -> None:
    """The folders that it writes under FSDP, with their names and layouts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    run = Run("", kind=accelerate.Accelerator)
    for batch in run.loader:
        run.step(batch)
    folder = tmp_path / "step_12"
    run.accelerator.save_state(str(folder))
    plain = import_checkpoint(folder, tmp_path / "plain")
    inner = run.optimizer.optimizer
    model, optimizer = get_state_dict(run.model, inner)
    os.remove(folder / "model.safetensors")
    os.remove(folder / "optimizer.bin")
    dcp.save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")
    sharded = import_checkpoint(folder, tmp_path / "sharded")
    found = []
    for report in (plain, sharded):
        other = Run("", seed=3)
        other.accelerator.load_state(report.path)
        found.append([other.step(torch.ones(4, 8)) for _ in range(3)])
    assert found[0] == found[1]


# --- torchtitan -----------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_torchtitan(group: None, tmp_path: Path) -> None:
    job = Job(tmp_path, TitansCheckpointManager, async_mode="disabled")
    job.run(4)
    job.checkpointer.close()
    (path,) = tmp_path.glob("**/step-4")
    theirs = Job(tmp_path, TitansCheckpointManager, async_mode="disabled")
    assert theirs.checkpointer.load(4)
    report = import_checkpoint(path, tmp_path / "run")
    assert (report.step, report.kind) == (4, "a checkpoint of torchtitan")
    ours = Job(tmp_path / "other")
    optimizer = next(iter(ours.optimizers))
    state = {"model": ours.model, "optimizer": optimizer, "scheduler": ours.schedulers}
    state["dataloader"] = ours.data
    with pyckpt.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.restore(state) == 4
    mine, other = optimizer.state_dict(), next(iter(theirs.optimizers)).state_dict()
    for number, entries in other["state"].items():
        for key, value in entries.items():
            assert torch.equal(mine["state"][number][key], value)
    assert mine["param_groups"] == other["param_groups"]
    assert ours.schedulers.state_dict() == theirs.schedulers.state_dict()
    assert ours.data.at == theirs.data.at == 4
    for one, two in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, two)
    ours.checkpointer.close()
    theirs.checkpointer.close()
