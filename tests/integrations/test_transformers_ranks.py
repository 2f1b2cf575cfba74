"""A Trainer that saves and resumes through a Checkpointer, on several ranks, and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _huggingface import EPOCH, STEPS, At, ShardedTrainer, kill, losses, make_model, set_up_rank
from _huggingface import make_trainer as make
from _ranks import RanksFailed, run_ranks
from torch.distributed.tensor import DTensor

from pyckpt.integrations.transformers import Trainer

KINDS = {"ddp": Trainer, "fsdp2": ShardedTrainer}


def train(
    directory: Path, kind: str, stop: int | None, resume: bool, batch: int, dropout: float
) -> tuple[list[float], float]:
    set_up_rank()
    trainer = make(
        directory,
        kind=KINDS[kind],
        model=make_model(dropout=dropout),
        callbacks=[] if stop is None else [At(stop, kill)],
        per_device_train_batch_size=batch,
    )
    trainer.train(resume_from_checkpoint=resume)
    parameters = list(trainer.model_wrapped.parameters())
    assert any(isinstance(one, DTensor) for one in parameters) == (kind == "fsdp2")
    steps = {
        value.device.type
        for state in trainer.optimizer.state.values()
        for name, value in state.items()
        if name == "step"
    }
    assert steps == {"cpu"}
    return losses(trainer), trainer.state.epoch


@pytest.mark.parametrize("kind", list(KINDS))
def test_killed_and_resumed(kind: str, tmp_path: Path) -> None:
    # With dropout, in the middle of the second epoch.
    whole = run_ranks(2, train, tmp_path / "whole", kind, None, False, 2, 0.1)
    assert len(whole[0][0]) == STEPS
    with pytest.raises(RanksFailed, match="died with exit code -9"):
        run_ranks(2, train, tmp_path / "run", kind, EPOCH + 5, False, 2, 0.1)
    assert run_ranks(2, train, tmp_path / "run", kind, None, True, 2, 0.1) == whole


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    # Without dropout, whose numbers are each rank's own, ranks add up to one.
    whole = run_ranks(2, train, tmp_path / "whole", "fsdp2", None, False, 2, 0.0)[0]
    with pytest.raises(RanksFailed, match="died with exit code -9"):
        run_ranks(2, train, tmp_path / "run", "fsdp2", EPOCH + 5, False, 2, 0.0)
    trainer: Any = make(tmp_path / "run", model=make_model(dropout=0.0))
    trainer.train(resume_from_checkpoint=True)
    torch.testing.assert_close(losses(trainer), whole[0], rtol=1e-4, atol=1e-4)
