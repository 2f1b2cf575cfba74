"""A Trainer that saves and resumes through a Checkpointer, in one process."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _huggingface import EPOCH, STEPS, At, Data, Interrupt, interrupt, kill, losses, make_model
from _huggingface import make_trainer as make
from _ranks import Child, run_child
from _training import damage

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.transformers import CheckpointerMixin, Trainer, get_last_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that is not interrupted."""
    trainer = make(tmp_path_factory.mktemp("whole"), save_strategy="no")
    trainer.train()
    assert len(losses(trainer)) == STEPS
    return losses(trainer)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))


def start(directory: Path, stop: int, **arguments: Any) -> Any:
    """A run that ends by an exception at the end of a step."""
    trainer = make(directory, callbacks=[At(stop, interrupt)], **arguments)
    with pytest.raises(Interrupt):
        trainer.train()
    return trainer


def resume(directory: Path, found: str | bool = True, **arguments: Any) -> Any:
    trainer = make(directory, **arguments)
    trainer.train(resume_from_checkpoint=found)
    assert trainer.state.global_step == STEPS
    return trainer


def train_in_child(pipe: Any, directory: Path, stop: int | None) -> list[float]:
    import warnings

    warnings.simplefilter("default")
    trainer = make(directory, callbacks=[] if stop is None else [At(stop, kill)])
    trainer.train(resume_from_checkpoint=stop is None)
    return losses(trainer)


def test_killed_and_resumed_in_the_middle_of_an_epoch(tmp_path: Path, whole: list[float]) -> None:
    child = Child(train_in_child, tmp_path / "run", 17)
    with pytest.raises(EOFError):
        child.receive()
    assert child.join() == -signal.SIGKILL
    # A save may have been under way.
    found = pyckpt.Checkpointer(tmp_path / "run").latest()
    assert found is not None
    assert found.step in (10, 15)
    assert run_child(train_in_child, tmp_path / "run", None) == whole


@pytest.mark.parametrize("stop", [13, 26])  # the end of an epoch, and later
def test_saved_at_the_end_of_an_epoch(tmp_path: Path, whole: list[float], stop: int) -> None:
    start(tmp_path, stop, save_strategy="epoch")
    assert losses(resume(tmp_path, save_strategy="epoch")) == whole


def test_logs_and_sums_over_several_batches(tmp_path: Path) -> None:
    # The losses that are logged after the resume begin before it.
    arguments = {"logging_steps": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 6}
    expected = make(tmp_path / "whole", save_strategy="no", **arguments)
    result = expected.train()
    start(tmp_path / "run", 17, **arguments)
    trainer = make(tmp_path / "run", **arguments)
    found = trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(expected)
    # As of Transformers, what train() returns is of the steps that it made: here 15 to 36.
    logged = losses(expected)
    before = sum(4 * loss for loss in logged[:3])
    partial = result.training_loss * STEPS - before
    assert found.training_loss * (STEPS - 15) < partial


def test_a_checkpoint_by_its_path(tmp_path: Path, whole: list[float]) -> None:
    start(tmp_path / "run", 17)
    (tmp_path / "run").rename(tmp_path / "moved")
    path = tmp_path / "moved" / "step-00000010"
    assert losses(resume(tmp_path / "other", str(path))) == whole
    assert names(tmp_path / "other")[0] == "step-00000015"
    # A directory that holds some.
    assert losses(resume(tmp_path / "third", str(tmp_path / "moved"))) == whole
    indirect = tmp_path / "third" / ".." / "moved" / "step-00000010"
    assert losses(resume(tmp_path / "fourth", str(indirect))) == whole


def test_a_corrupt_checkpoint_is_passed_over(
    tmp_path: Path, whole: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, 17)
    damage(tmp_path / "step-00000015")
    assert losses(resume(tmp_path)) == whole
    assert "step-00000015 is corrupt and is passed over" in caplog.text


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_is_kept_and_loaded_at_the_end(tmp_path: Path, limit: int) -> None:
    arguments: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_total_limit": limit,
        "load_best_model_at_end": True,
        "learning_rate": 0.1,  # the loss on the other data grows at last
    }
    eval_data = Data(8)
    start(tmp_path, 17, eval_data=eval_data, **arguments)
    trainer = make(tmp_path, eval_data=eval_data, **arguments)
    trainer.train(resume_from_checkpoint=True)
    evaluations = {
        entry["step"]: entry["eval_loss"]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    }
    best = min(evaluations, key=lambda step: evaluations[step])
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"step-{best:08d}")
    last = [35, 36][-limit:]
    assert names(tmp_path) == [f"step-{step:08d}" for step in sorted({best, *last})]
    assert trainer.evaluate()["eval_loss"] == evaluations[best]
    # What was measured is in the checkpoint.
    found = {one.step: one.metrics for one in pyckpt.Checkpointer(tmp_path).checkpoints()}
    assert found[best]["eval_loss"] == evaluations[best]


def test_a_checkpoint_of_the_trainers_own_format(tmp_path: Path, whole: list[float]) -> None:
    start(tmp_path, 17, kind=transformers.Trainer)
    assert losses(resume(tmp_path)) == whole
    assert names(tmp_path)[0] == "step-00000020"
    # Of both formats, the newest.
    assert losses(resume(tmp_path)) == whole


def test_the_last_checkpoint_is_found_by_a_script(tmp_path: Path, whole: list[float]) -> None:
    assert get_last_checkpoint(tmp_path / "none") is None
    start(tmp_path, 17, kind=transformers.Trainer)
    found = get_last_checkpoint(tmp_path)
    assert found == str(tmp_path / "checkpoint-15")
    (tmp_path / "step-00000020").mkdir()  # a save that was killed
    assert get_last_checkpoint(tmp_path) == found
    assert losses(resume(tmp_path, found)) == whole
    found = get_last_checkpoint(tmp_path)
    assert found == str(tmp_path / "step-00000036")
    assert losses(resume(tmp_path, found)) == whole


def test_a_save_that_fails_ends_training(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").write_text("a file, where a directory has to be")
    trainer = make(tmp_path)
    with pytest.raises(OSError, match="step-00000010"):
        trainer.train()
    assert trainer.state.global_step < 15  # not only at the next save
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def test_a_last_save_that_fails_is_raised(tmp_path: Path) -> None:
    (tmp_path / "step-00000036").write_text("a file, where a directory has to be")
    with pytest.raises(OSError, match="step-00000036"):
        make(tmp_path).train()


def test_a_signal_saves_and_stops(tmp_path: Path, whole: list[float]) -> None:
    options = {"on_signals": ("SIGTERM",)}
    before = signal.getsignal(signal.SIGTERM)
    trainer = make(
        tmp_path,
        checkpointer=options,
        callbacks=[At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))],
    )
    trainer.train()
    assert 7 <= trainer.state.global_step < STEPS
    assert signal.getsignal(signal.SIGTERM) == before
    assert names(tmp_path)[-1] == f"step-{trainer.state.global_step:08d}"
    assert losses(resume(tmp_path)) == whole


@pytest.mark.parametrize("step", [7, EPOCH])
def test_a_signal_is_not_the_end_of_an_epoch(tmp_path: Path, step: int) -> None:
    """In the middle of one, nothing is evaluated, or saved again with other random numbers."""
    arguments: dict[str, Any] = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "eval_data": Data(8),
        "checkpointer": {"on_signals": ("SIGTERM",)},
    }
    expected = make(tmp_path / "whole", **arguments)
    expected.train()
    stop = At(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = make(tmp_path / "run", callbacks=[stop], **arguments)
    stopped.train()
    assert stopped.state.global_step == step
    trainer = resume(tmp_path / "run", **arguments)
    assert losses(trainer) == losses(expected)

    def evaluated(trainer: Any) -> list[int]:
        return [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]

    assert evaluated(trainer) == evaluated(expected)


def test_the_model_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = start(tmp_path, 12, save_only_model=True)
    keys = pyckpt.load(tmp_path / "step-00000010").keys()
    assert keys == {"model", "trainer", "pyckpt.checkpoint"}
    found = resume(tmp_path, save_only_model=True)
    assert losses(found)[:10] == losses(trainer)[:10]
    assert "holds the model alone" in caplog.text


def test_other_data_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, 17)
    make(tmp_path, per_device_train_batch_size=2, data_seed=7, max_steps=16).train(
        resume_from_checkpoint=True
    )
    assert "not with the same data: seed was 42 and is 7; examples of a step was 4" in caplog.text


def test_an_earlier_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, 7)
    start(tmp_path, 2)
    assert "newer checkpoints of an earlier run" in caplog.text
    assert "steps 5" in caplog.text


class Scripted(Trainer):
    """Its evaluations find the losses that it was given, by their steps."""

    script: dict[int, float]

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_loss": self.script[self.state.global_step]}
        self.log({**metrics})
        return metrics


def train_scripted(directory: Path, limit: int, *script: float) -> list[str]:
    """The checkpoints after a run that evaluates and saves each step, and keeps the last ones and
    the best."""
    trainer = make(
        directory,
        kind=Scripted,
        eval_data=Data(4),
        max_steps=len(script),
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=limit,
        load_best_model_at_end=True,
    )
    trainer.script = dict(enumerate(script, start=1))
    trainer.train()
    return names(directory)


def test_one_that_was_the_best_goes(tmp_path: Path) -> None:
    # Each is the best while the next one is saved.
    assert train_scripted(tmp_path, 1, 9, 10, 8, 10, 7, 10) == ["step-00000005", "step-00000006"]


def test_one_that_became_the_best_after_its_save_is_kept_by_a_resumed_run(tmp_path: Path) -> None:
    for stop in (3, 5):
        trainer = make(
            tmp_path,
            kind=Scripted,
            data=Data(8),  # of which an epoch has two steps
            eval_data=Data(4),
            eval_strategy="epoch",  # after the save of the epoch's last step
            save_steps=1,
            save_total_limit=1,
            metric_for_best_model="loss",
            greater_is_better=False,
            callbacks=[At(stop + 1, interrupt)],
        )
        trainer.script = {2: 1.0, 4: 9.0}
        with pytest.raises(Interrupt):
            trainer.train(resume_from_checkpoint=stop == 5)
        assert trainer.state.best_global_step == 2
        assert names(tmp_path)[0] == "step-00000002"
    assert names(tmp_path) == ["step-00000002", "step-00000005"]


def test_checkpoints_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    earlier = train_scripted(tmp_path, 2, 9, 9, 9, 9, 4, 5)
    assert earlier == ["step-00000005", "step-00000006"]
    found = train_scripted(tmp_path, 2, 9, 1, 7, 6)
    assert found == [f"step-{step:08d}" for step in (2, 3, 4)] + earlier


def test_another_model_is_refused(tmp_path: Path) -> None:
    start(tmp_path, 7)
    trainer = make(tmp_path, model=make_model(width=32))
    with pytest.raises(LoadError, match=r"model\.transformer"):
        trainer.train(resume_from_checkpoint=True)


def test_what_is_no_checkpoint_of_a_trainer(tmp_path: Path) -> None:
    model = make_model()
    other = tmp_path / "other" / "step-00000003"
    with pyckpt.Checkpointer(other.parent) as checkpointer:
        checkpointer.save(3, {"model": model})
    trainer = make(tmp_path / "run", model=model)

    def refused(found: Any, kind: type[Exception], what: str) -> None:
        with pytest.raises(kind, match=what):
            trainer.train(resume_from_checkpoint=found)

    with pytest.raises(LoadError, match="was not saved by a Trainer"):
        get_last_checkpoint(other.parent)
    refused(str(other), LoadError, "was not saved by a Trainer")
    refused(str(other.parent), LoadError, "was not saved by a Trainer")
    refused(
        True, ValueError, "No valid checkpoint found in output directory"
    )  # the Trainer's words
    refused(str(tmp_path / "step-00000004"), FileNotFoundError, "there is no such directory")
    (other / ".metadata").unlink()
    refused(str(other), FileNotFoundError, "no valid checkpoint .damaged")
    renamed = tmp_path / "renamed"
    pyckpt.save({"model": model}, renamed)
    refused(str(renamed), LoadError, "give it its name again")
    refused(str(tmp_path), LoadError, rf"Can't find a valid.* pyckpt import {tmp_path} DIRECTORY")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"enable_jit_checkpoint": True}, "'on_signals': "),
    ],
)
def test_arguments_that_cannot_be_kept(
    tmp_path: Path, arguments: dict[str, Any], what: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(ValueError, match=what):
            make(tmp_path, **arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_trainer(tmp_path: Path, whole: list[float]) -> None:
    class Other(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs, *args, **kwargs)

    class Mine(CheckpointerMixin, Other):  # type: ignore[misc]
        pass

    start(tmp_path, 33, kind=Mine)
    assert losses(resume(tmp_path, kind=Mine)) == whole


def test_the_model_of_a_checkpoint_is_exported(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", max_steps=5)
    trainer.train()
    pyckpt.export(
        tmp_path / "run" / "step-00000005",
        tmp_path / "hf",
        tied={"lm_head.weight": "transformer.wte.weight"},
        config=trainer.model.config.to_dict(),
    )
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_saves_outside_of_training_are_refused(tmp_path: Path) -> None:
    trainer: Any = make(tmp_path)
    assert isinstance(trainer, Trainer)
    with pytest.raises(RuntimeError, match=r"during train\(\)"):
        trainer._save_checkpoint(trainer.model, None)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="pyckpt")
