"""What people do with a Trainer besides `fit`: search a learning rate, test the best, start
processes, run under SLURM."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from _lightning import Module, Validated, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner

import pyckpt
from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy

HERE = Path(__file__).parent


class WithTest(Module):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        (inputs,) = batch
        self.log("norm", self.layers(inputs).norm())

    def test_dataloader(self) -> Any:
        return self.train_dataloader()


def test_the_learning_rate_finder_loads_what_is_being_saved(tmp_path: Path) -> None:
    class Found(WithTest):
        lr = 0.01

    run = trainer(tmp_path, strategy=SingleDeviceStrategy("cpu"), epochs=1)
    found = Tuner(run).lr_find(Found(), num_training=4, update_attr=False)
    assert found is not None
    assert list(tmp_path.glob(".lr_find*")) == []


def test_the_newest_is_tested_where_no_best_is_kept(tmp_path: Path) -> None:
    module = WithTest()
    run = trainer(tmp_path, Checkpoints(tmp_path), strategy=SingleDeviceStrategy("cpu"), epochs=1)
    run.fit(module)
    (result,) = run.test(module, ckpt_path="best", verbose=False)
    assert result["norm"] > 0


def test_processes_that_lightning_starts_hand_their_results_back(tmp_path: Path) -> None:
    script = f"""
        import sys
        sys.path[:0] = {[str(HERE), str(HERE.parent / "helpers")]!r}
        from pathlib import Path
        from lightning.pytorch.strategies import DDPStrategy
        from _lightning import Module, trainer
        from pyckpt.integrations.lightning import Checkpoints
        if __name__ == "__main__":
            root = Path(sys.argv[1])
            checkpoints = Checkpoints(root)
            spawn = DDPStrategy(start_method="spawn", process_group_backend="gloo")
            run = trainer(root, checkpoints, strategy=spawn, epochs=1)
            run.fit(Module())
            print("best", checkpoints.best_model_path)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "script.py", tmp_path / "run"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    best = Path(done.stdout.split()[-1])
    assert best.parent == tmp_path / "run"
    assert (best / ".metadata").exists()


@pytest.mark.slow
def test_a_save_after_processes_have_ended_is_on_disk_when_the_call_returns(
    tmp_path: Path,
) -> None:
    """The strategy of the first process never ran, so nothing would wait for it later."""
    script = f"""
        import os, sys
        sys.path[:0] = {[str(HERE), str(HERE.parent / "helpers")]!r}
        from pathlib import Path
        from _lightning import Module, trainer
        from pyckpt.integrations.lightning import DDPStrategy
        if __name__ == "__main__":
            root = Path(sys.argv[1])
            spawn = DDPStrategy(start_method="spawn", process_group_backend="gloo")
            run = trainer(root, strategy=spawn, epochs=1)
            run.fit(Module())
            run.save_checkpoint(root / "after")
            os._exit(0)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "script.py", tmp_path],
        capture_output=True,
        check=True,
    )
    weights = pyckpt.load(tmp_path / "after")["model"]
    (newest,) = (tmp_path / "checkpoints").iterdir()
    trained = pyckpt.load(newest)["model"]
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in weights)


def test_a_checkpoint_for_slurm_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    """Lightning has the job ended right after it."""

    class Requeued(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                path = tmp_path / "hpc_ckpt_1.ckpt"
                self.trainer.save_checkpoint(path)
                assert (path / ".metadata").exists()
                self.trainer.should_stop = True

    trainer(tmp_path, strategy=SingleDeviceStrategy("cpu"), epochs=1).fit(Requeued())
    assert (tmp_path / "hpc_ckpt_1.ckpt/.metadata").exists()


def test_a_program_can_wait_for_a_save(tmp_path: Path) -> None:
    seen = []

    class Waits(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 2:
                self.trainer.save_checkpoint(tmp_path / "mine")
                self.trainer.strategy.wait()
                seen.append((tmp_path / "mine/.metadata").exists())

    saves = ModelCheckpoint(tmp_path / "other")
    trainer(tmp_path, saves, strategy=SingleDeviceStrategy("cpu"), epochs=1).fit(Waits())
    assert seen == [True]


def test_a_run_that_begins_anew_does_not_count_the_checkpoints_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(best: int, epochs: int, **options: Any) -> Checkpoints:
        module = Validated()
        module.best = best
        saves = Checkpoints(
            tmp_path, keep_last=1, keep_best=("val_loss", 1, "min"), every_epochs=1, **options
        )
        trainer(tmp_path, saves, strategy=SingleDeviceStrategy("cpu"), epochs=epochs).fit(module)
        return saves

    earlier = run(best=3, epochs=4)  # its best is its last
    assert earlier.best_model_path.endswith("step-00000024")
    later = run(best=0, epochs=2, restore=False)
    assert later.best_model_path.endswith("step-00000006")
    kept = {path.name for path in tmp_path.iterdir() if (path / ".metadata").exists()}
    assert {"step-00000006", "step-00000012"} <= kept
    assert "has newer checkpoints of an earlier run" in caplog.text
