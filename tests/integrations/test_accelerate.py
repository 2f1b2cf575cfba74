"""An Accelerator that saves and loads through pyckpt, in one process."""

from __future__ import annotations

import gc
import logging
import math
import pickle
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from _accelerate import EPOCH, Run, train
from _ranks import Child, run_child
from _training import damage
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.accelerate import Accelerator


@pytest.fixture(autouse=True)
def fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Accelerate keeps what the first Accelerator of a process was told."""
    caplog.set_level(logging.WARNING, logger="pyckpt")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize(
    "how",
    [
        "skip",
        "seedable skip",
        "stateful",
        "seedable stateful",
        "dispatch skip",
        "dispatch stateful",
        "dispatch seedable stateful",
    ],
)
@pytest.mark.parametrize("stop", [5, EPOCH, EPOCH + 5, 2 * EPOCH])
def test_resumed_at_any_batch(how: str, stop: int, tmp_path: Path) -> None:
    whole = train(tmp_path, how)
    begun = train(tmp_path, how, stop=stop)
    assert begun + train(tmp_path, how, resume=True) == whole


def train_in_child(_pipe: Any, path: Path, resume: bool) -> list[float]:
    import warnings

    warnings.simplefilter("default")
    return train(path, "stateful", resume=resume, save_at=(5, 17), kill_at=None if resume else 20)


def test_killed_and_resumed(tmp_path: Path) -> None:
    child = Child(train_in_child, tmp_path / "run", False)
    with pytest.raises(EOFError):
        child.receive()
    assert child.join() == -signal.SIGKILL
    found = run_child(train_in_child, tmp_path / "run", True)
    assert train(tmp_path / "whole", "stateful")[-len(found) :] == found
    assert len(found) == 3 * EPOCH - 17


@pytest.mark.parametrize("how", ["stateful", "skip"])
def test_saved_again_before_the_first_batch(how: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", how)
    train(tmp_path / "first", how, stop=17)
    run = Run(how, seed=1)
    run.accelerator.load_state(tmp_path / "first")
    run.accelerator.save_state(tmp_path / "second").wait()
    assert train(tmp_path / "second", how, resume=True) == whole[17:]


def leave(how: str, path: Path) -> Run:
    """A run that leaves its second epoch after 5 batches, and saves then."""
    run = Run(how)
    for _ in range(2):
        for batch in run.loader:
            run.step(batch)
            if run.count.n == EPOCH + 5:
                break
    run.accelerator.save_state(path).wait()
    return run


@pytest.mark.parametrize("how", ["stateful", "seedable stateful", "skip", "seedable skip"])
def test_saved_after_the_loop_was_left(how: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", how)
    leave(how, tmp_path / "run")
    assert train(tmp_path / "run", how, resume=True) == whole[EPOCH + 5 :]


def test_an_epoch_that_was_left_and_is_not_resumed(tmp_path: Path) -> None:
    """A program that ends its epochs early begins the next one, with or without a resume."""
    run = leave("", tmp_path)
    expected = [run.step(batch) for batch in run.loader]
    other = Run("", seed=1)
    other.accelerator.load_state(tmp_path)
    assert [other.step(batch) for batch in other.loader] == expected


def test_numbered_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def project() -> ProjectConfiguration:
        return ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)

    folder = tmp_path / "checkpoints"
    run = Run("skip", project_config=project())
    (folder / "checkpoint_mine").mkdir(parents=True)
    for batch in run.loader:
        run.step(batch)
        if run.count.n <= 4:
            handle = run.accelerator.save_state()
    assert handle.wait() == folder / "checkpoint_3"
    run.accelerator.wait_for_saves()
    names = ["checkpoint_2", "checkpoint_3", "checkpoint_mine"]
    assert sorted(path.name for path in folder.iterdir()) == names
    # The newest valid one is found, and the numbers go on.
    (folder / "checkpoint_7").mkdir()
    other = Run("skip", project_config=project())
    other.accelerator.load_state()
    assert other.count.n == 4
    assert other.accelerator.save_state().path.name == "checkpoint_4"
    other.accelerator.wait_for_saves()
    third = Run("skip", project_config=project()).accelerator
    third.project_configuration.iteration = 4
    with pytest.raises(FileExistsError, match=r"ProjectConfiguration\(iteration="):
        third.save_state()


def test_a_limit_counts_checkpoints_of_accelerates_own_format(tmp_path: Path) -> None:
    def run(kind: Any, **options: Any) -> Run:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, **options)
        return Run("skip", kind=kind, project_config=project)

    folder = tmp_path / "checkpoints"
    theirs = run(accelerate.Accelerator)
    for _ in range(3):
        theirs.accelerator.save_state()
    (folder / "checkpoint_0" / "mine").mkdir()
    mine = folder / "checkpoint_00"
    mine.mkdir()
    ours = run(Accelerator, total_limit=2, iteration=3)
    saved = folder / "checkpoint_3"
    saved.mkdir()
    (saved / "file").write_text("")
    ours.accelerator.save_state().wait()
    ours.accelerator.wait_for_saves()
    assert {path.name for path in folder.iterdir()} == {"checkpoint_2", "checkpoint_3", mine.name}


def test_a_limit_removes_nothing_if_the_save_fails(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    run = Run("skip", project_config=project)
    run.accelerator.save_state().wait()
    (tmp_path / "checkpoints" / "checkpoint_1").write_text("a file, where a directory has to be")
    run.accelerator.save_state()
    with pytest.raises(OSError, match="checkpoint_1"):
        run.accelerator.wait_for_saves()
    assert "model" in pyckpt.load(tmp_path / "checkpoints" / "checkpoint_0")


@pytest.mark.parametrize("dispatch", [False, True])
def test_what_was_prepared_pickles(dispatch: bool, tmp_path: Path) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(12)), batch_size=4))
    accelerator.save_state(tmp_path / "run").wait()  # starts a thread
    copy = pickle.loads(pickle.dumps(accelerator))
    (copied,) = copy._dataloaders
    assert [batch.tolist() for batch in copied] == [batch.tolist() for batch in loader]
    for _ in copied:  # its epochs are followed, too
        copy.save_state(tmp_path / "copy").wait()
        break
    assert "'start'" in str(pyckpt.load(tmp_path / "copy")["loader"])
    copy.end_training()


def test_a_loader_that_is_dropped_is_freed_at_once() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader([1, 2], batch_size=1))
    skipping = accelerator.skip_first_batches(loader, 1)
    epoch = iter(loader)
    assert next(epoch).tolist() == [1]
    freed = weakref.ref(loader)
    gc.disable()  # which would free it at last
    try:
        accelerator._dataloaders.clear()
        del loader, epoch
        assert freed() is None
    finally:
        gc.enable()
    assert [batch.tolist() for batch in skipping] == [[2]]


def test_a_save_that_fails_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run("skip")
    (tmp_path / "file").write_text("a file, where a directory has to be")
    run.accelerator.save_state(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        run.accelerator.save_state(tmp_path / "other")
    run.accelerator.save_state(tmp_path / "other").wait()  # told once
    run.accelerator.save_state(tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        run.accelerator.end_training()
    assert "save_state failed, and the next one will say so" in caplog.text


def test_a_checkpoint_of_accelerates_own_format(tmp_path: Path) -> None:
    theirs = Run("skip", kind=accelerate.Accelerator)
    for batch in theirs.loader:
        theirs.step(batch)
    theirs.accelerator.save_state(tmp_path)
    ours = Run("skip", seed=1)
    ours.accelerator.load_state(tmp_path)
    assert ours.count.n == EPOCH
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert pyckpt.optim.check(ours.optimizer) == []


def test_what_is_no_checkpoint_of_an_accelerator(tmp_path: Path) -> None:
    run = Run("skip")
    with pytest.raises(FileNotFoundError, match="no directory to load from"):
        run.accelerator.load_state(tmp_path / "missing")
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        run.accelerator.load_state()
    with pytest.raises(ValueError, match="automatic_checkpoint_naming"):
        run.accelerator.save_state()
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(LoadError, match=r"pyckpt import .*checkpoint-5 DIRECTORY"):
        run.accelerator.load_state(tmp_path / "checkpoint-5")
    pyckpt.save({"model": run.model}, tmp_path / "other")
    with pytest.raises(LoadError, match="was not saved by an Accelerator of pyckpt"):
        run.accelerator.load_state(tmp_path / "other")


def test_a_corrupt_checkpoint_is_refused(tmp_path: Path) -> None:
    run = Run("skip", width=64)
    run.accelerator.save_state(tmp_path).wait()
    damage(tmp_path)
    with pytest.raises(pyckpt.errors.CorruptCheckpoint, match="model"):
        run.accelerator.load_state(tmp_path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    Run("skip", width=64).accelerator.save_state(tmp_path).wait()
    with pytest.raises(LoadError, match=r"model\.0\.weight"):
        Run("skip", width=32).accelerator.load_state(tmp_path)


def test_models_that_hooks_save(tmp_path: Path) -> None:
    """As scripts that train adapters do: the hook saves the model, and takes its weights away."""

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        torch.save(models[0].state_dict(), Path(output_dir) / "mine.pt")
        weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "mine.pt"))

    run = Run("skip")
    run.accelerator.register_save_state_pre_hook(save)
    run.accelerator.save_state(tmp_path).wait()
    assert "model" not in pyckpt.load(tmp_path)
    other = Run("skip", seed=1)
    other.accelerator.register_load_state_pre_hook(load)
    other.accelerator.load_state(tmp_path)
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_plain_checkpointer_names_a_loader_without_a_position(tmp_path: Path) -> None:
    run = Run("skip")
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, {"model": run.model, "data": run.loader})
        with pytest.raises(pyckpt.errors.SaveError, match=r"data: .*StatefulDataLoader"):
            handle.wait()
        with pytest.raises(pyckpt.errors.SaveError, match="data: "):
            checkpointer.wait()


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    run = Run("skip", project_config=ProjectConfiguration(save_on_each_node=True))
    with pytest.raises(ValueError, match="save_on_each_node"):
        run.accelerator.save_state(tmp_path)
    run.accelerator.project_configuration.save_on_each_node = False
    with pytest.raises(TypeError, match="takes no client_state"):
        run.accelerator.save_state(tmp_path, client_state={})


def test_the_step_of_accumulation_comes_back(tmp_path: Path) -> None:
    run = Run("skip")
    run.accelerator.step = 3
    run.accelerator.save_state(tmp_path).wait()
    other: Accelerator = Run("skip").accelerator
    other.load_state(tmp_path)
    assert other.step == 3
    assert math.isfinite(run.step(next(iter(run.loader))))
