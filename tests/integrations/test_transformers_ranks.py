"""A Trainer that saves and resumes through a Checkpointer, on several ranks, and on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _huggingface import EPOCH, At, ShardedTrainer, kill, losses, make_model, set_up_rank
from _huggingface import make_trainer as make
from _ranks import RanksFailed, run_ranks
from torch.distributed.tensor import DTensor

from pyckpt.integrations.transformers import Trainer

KINDS = {"ddp": Trainer, "fsdp2": ShardedTrainer}


def train(directory: Path, kind: str, **options: Any) -> list[float]:
    batch, resume = options.pop("batch", 2), options.pop("resume", False)
    trainer = make(
        directory,
        kind=KINDS[kind],
        model=make_model(dropout=options.pop("dropout")),
        per_device_train_batch_size=batch,
        num_train_epochs=2,
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    parameters = list(trainer.model_wrapped.parameters())
    assert any(isinstance(one, DTensor) for one in parameters) == (kind == "fsdp2")
    states = trainer.optimizer.state.values()
    assert {state["step"].device.type for state in states} == {"cpu"}
    return losses(trainer)


def train_until_killed(directory: Path, kind: str, dropout: float) -> None:
    set_up_rank()
    train(directory, kind, dropout=dropout, callbacks=[At(EPOCH + 5, kill)])


def resume(directory: Path, kind: str) -> tuple[list[float], list[float]]:
    """The losses of the resumed run, and those of one that nobody has killed."""
    set_up_rank()
    found = train(directory, kind, dropout=0.1, resume=True)
    return found, train(directory / "whole", kind, dropout=0.1, save_strategy="no")


@pytest.mark.parametrize("kind", list(KINDS))
def test_killed_and_resumed(kind: str, tmp_path: Path) -> None:
    # In the middle of the second epoch.
    with pytest.raises(RanksFailed, match="died with exit code -9"):
        run_ranks(2, train_until_killed, tmp_path, kind, 0.1)
    for found, whole in run_ranks(2, resume, tmp_path, kind):
        assert len(whole) == 2 * EPOCH
        assert found == whole


def test_on_another_number_of_ranks(tmp_path: Path) -> None:
    # Without dropout, whose numbers are each rank's own, one rank has the losses of two.
    with pytest.raises(RanksFailed, match="died with exit code -9"):
        run_ranks(2, train_until_killed, tmp_path, "fsdp2", 0.0)
    found = [
        train(path, "ddp", dropout=0.0, resume=resume, batch=4)
        for path, resume in ((tmp_path, True), (tmp_path / "whole", False))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
