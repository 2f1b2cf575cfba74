"""The callback: what it saves, and whether a resumed run is the one that was not stopped."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from _lightning import BATCHES, Module, Stop, same, trainer
from lightning.pytorch import Callback

from pyckpt.integrations.lightning import Checkpoints


class StopAt(Callback):
    """Ends training by an error after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise Stop


def fit(root: Path, module: Module, *callbacks: Any, **options: Any) -> Module:
    run = trainer(root, *callbacks, **options)
    with contextlib.suppress(Stop):
        run.fit(module)
    return module


@pytest.mark.parametrize("stop", [BATCHES // 2, BATCHES, BATCHES + 1, 2 * BATCHES])
@pytest.mark.parametrize("limit", [{}, {"epochs": -1, "max_steps": 3 * BATCHES}])
def test_a_resumed_run_is_the_one_that_was_not_stopped(
    tmp_path: Path, stop: int, limit: dict[str, Any]
) -> None:
    whole = fit(tmp_path, Module(), Checkpoints(tmp_path / "whole", every_steps=1), **limit)
    saves = {"every_steps": 1, "when_busy": "wait"}
    fit(tmp_path, Module(), Checkpoints(tmp_path / "a", **saves), StopAt(stop), **limit)
    again = fit(tmp_path, Module(), Checkpoints(tmp_path / "a", **saves), **limit)
    assert sorted(again.losses) == list(range(stop + 1, 3 * BATCHES + 1))
    assert again.losses.items() <= whole.losses.items()
    assert same(again, whole)
    assert again.totals == whole.totals[-len(again.totals) :]
    assert float(again.mean.compute()) == float(whole.mean.compute())
