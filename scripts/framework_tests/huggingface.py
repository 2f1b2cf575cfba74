"""Accelerate's tests of its Accelerator, and Transformers' of its Trainer.

Accelerate's run as they are. Transformers' look into the directories of checkpoints, whose names
and files are others with ours. So after each training these get what the tests look for: a link
``checkpoint-5`` to ``step-00000005``, and in it, read from our checkpoint, the model's weights and
the Trainer's state. `os.listdir` of the tests leaves out what is ours alone. What training does
between is not touched.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.framework_tests._common import Suite

__all__ = ["SUITES"]


def _swap_accelerator() -> None:
    import accelerate
    import accelerate.accelerator

    from pyckpt.integrations.accelerate import Accelerator

    accelerate.Accelerator = Accelerator
    accelerate.accelerator.Accelerator = Accelerator


def _swap_trainer() -> None:
    import transformers

    import pyckpt
    from pyckpt.integrations.transformers import Trainer

    class Tested(Trainer):
        def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            directory = Path(self.args.output_dir)
            if isinstance(resume_from_checkpoint, str):
                resume_from_checkpoint = os.path.realpath(resume_from_checkpoint)
            # Else the links would be checkpoints of Transformers' own.
            for link in directory.glob("checkpoint-*"):
                link.unlink()
            result = super().train(resume_from_checkpoint, *args, **kwargs)
            for info in pyckpt.Checkpointer(directory).checkpoints():
                self._show(info.path)
                (directory / f"checkpoint-{info.step}").symlink_to(info.path.name)
            best = self.state.best_model_checkpoint
            if best is not None:
                step = int(best.rpartition("-")[2])
                self.state.best_model_checkpoint = str(directory / f"checkpoint-{step}")
            return result

        def _show(self, path: Path) -> None:
            import safetensors.torch

            saved = pyckpt.load(path)
            weights = {name: one.contiguous() for name, one in saved["model"].items()}
            metadata = {"format": "pt"}
            safetensors.torch.save_file(weights, path / "model.safetensors", metadata=metadata)
            state = json.loads(saved["trainer"]["state"])
            (path / "trainer_state.json").write_text(json.dumps(state))
            if getattr(self.model, "config", None) is not None:
                self.model.config.save_pretrained(path)

    transformers.Trainer = Tested
    transformers.trainer.Trainer = Tested


class _Os:
    """`os`, for tests that count the entries of a directory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def listdir(self, path: Any = ".") -> list[str]:
        return [name for name in os.listdir(path) if not re.match(r"step-|\.pyckpt", name)]


def _adapt_trainer(module: ModuleType) -> None:
    def check(self: Any, output_dir: str, freq: int, total: int, *args: Any, **kwargs: Any) -> None:
        import pyckpt

        valid = {one.step for one in pyckpt.Checkpointer(output_dir).checkpoints(verify=True)}
        assert {*range(freq, total, freq)} <= valid

    if hasattr(module, "os"):
        module.os = _Os()
    if hasattr(module, "TrainerIntegrationCommon"):
        module.TrainerIntegrationCommon.check_saved_checkpoints = check


_SHARDS = "changes the files of a checkpoint, which are others with ours"
_KEEPS = "expects that the newest checkpoint goes and the best stays; with ours, both stay"

SUITES = {
    "accelerate": Suite(
        package="accelerate",
        module=__name__,
        swap=_swap_accelerator,
        files=[
            "tests/test_state_checkpointing.py",
            "tests/test_accelerator.py",
            "tests/test_data_loader.py",
            "tests/test_optimizer.py",
        ],
    ),
    "transformers": Suite(
        package="transformers",
        module=__name__,
        swap=_swap_trainer,
        adapt=_adapt_trainer,
        files=["tests/trainer/test_trainer_checkpointing.py"],
        left_out={
            "*::test_resume_training_with_shard_checkpoint": _SHARDS,
            "*::TrainerResumeTrainingTest::test_resume_training_with_checkpoint": _SHARDS,
            "*::test_best_model_checkpoint_behavior": _KEEPS,  # in one of its cases
            "*::test_best_model_checkpoint_behavior_case_5": _KEEPS,
            "*::JITCheckpointTest::*": "of enable_jit_checkpoint, which ours refuses: on_signals",
            "*::TrainerSavingTest::*": "of save_model, which is Transformers' own",
        },
    ),
}
