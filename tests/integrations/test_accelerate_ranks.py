"""An Accelerator that saves and loads through pyckpt, on several ranks, and on others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _accelerate import EPOCH, Run, train
from _huggingface import set_up_rank
from _ranks import RanksFailed, run_ranks
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.tensor import DTensor

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.accelerate import Accelerator


def train_until_killed(path: Path, how: str) -> None:
    set_up_rank()
    train(path, how, save_at=(5, 17), kill_at=20)


def resume(path: Path, how: str) -> tuple[list[float], list[float]]:
    """The losses of the resumed run, and those of one that nobody has killed."""
    set_up_rank()
    found = train(path, how, resume=True)
    return found, train(path, how)


@pytest.mark.parametrize(
    "how",
    [
        "stateful",
        "fsdp stateful",
        "dispatch stateful",
        "dispatch skip",
        pytest.param("dispatch workers stateful", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed(how: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="died with exit code -9"):
        run_ranks(2, train_until_killed, tmp_path, how)
    for found, whole in run_ranks(2, resume, tmp_path, how):
        assert len(whole) == 3 * EPOCH
        assert found == whole[17:]


def save(path: Path, how: str, stop: int) -> list[Any]:
    set_up_rank()
    run = Run(how)
    for batch in run.loader:
        run.step(batch)
        if run.count.n == stop:
            break
    assert isinstance(next(run.model.parameters()), DTensor)
    run.accelerator.save_state(path)
    run.accelerator.wait_for_saves()
    return whole_state(run)


def whole_state(run: Run) -> list[Any]:
    """Parameters and moments, in one piece."""
    found = []
    for param in run.model.parameters():
        state = run.optimizer.state[param]
        assert state["step"].device.type == "cpu"
        for value in (param, state["exp_avg"], state["exp_avg_sq"], state["step"]):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.append(whole.detach().tolist())
    return found


def load(path: Path, how: str) -> tuple[list[Any], int]:
    set_up_rank()
    run = Run(how, seed=1)
    run.accelerator.load_state(path)
    return whole_state(run), run.count.n


def test_shards_are_loaded_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Each rank saves its shards, and no rank gathers them."""
    saved = run_ranks(2, save, tmp_path, "fsdp skip", 7)
    assert saved[0] == saved[1]
    assert len(list(tmp_path.glob("*.distcp"))) == 2
    assert run_ranks(3, load, tmp_path, "fsdp skip") == [(saved[0], 7)] * 3
    assert run_ranks(2, load, tmp_path, "skip") == [(saved[0], 7)] * 2  # DDP
    run = Run("skip", seed=1)
    run.accelerator.load_state(tmp_path)
    assert whole_state(run) == saved[0]


def examples_of_runs(path: Path, batch: int, *, save: bool) -> tuple[list[float], list[float]]:
    """The examples that this rank sees in an epoch until it saves, or from the load on; and in the
    epoch after it."""
    set_up_rank()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    data = torch.arange(48.0)
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)  # type: ignore[arg-type]
    )
    if not save:
        accelerator.load_state(path)
        accelerator.save_state(path / "again").wait()
    found: tuple[list[float], list[float]] = ([], [])
    for epoch in found:
        for number, examples in enumerate(loader):
            epoch += examples.tolist()
            if save and number == 2 and epoch is found[0]:
                accelerator.save_state(path).wait()
    accelerator.end_training()
    return found


def save_in_an_epoch(path: Path, batch: int) -> Any:
    torch.manual_seed(5)
    return examples_of_runs(path, batch, save=True)


def resume_in_an_epoch(path: Path, batch: int) -> Any:
    torch.manual_seed(6)
    return examples_of_runs(path, batch, save=False)


@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (3, 4), (4, 2)])
def test_a_position_on_another_number_of_ranks(ranks: int, batch: int, tmp_path: Path) -> None:
    """The ranks go on after the same examples: 3 steps of 2 ranks with 4 each."""
    first = run_ranks(2, save_in_an_epoch, tmp_path, 4)
    used = {example for seen, _ in first for example in seen[:12]}
    assert len(used) == 24
    found = run_ranks(ranks, resume_in_an_epoch, tmp_path, batch)
    rest = [example for seen, _ in found for example in seen]
    assert sorted(rest) == sorted({*range(48)} - used)
    # In the order of the epoch that was begun: step by step the same, for a step of as many.
    if ranks * batch == 8:
        steps = [sorted(e for s, _ in first for e in s[n : n + 4]) for n in range(12, 24, 4)]
        assert steps == [
            sorted(e for s, _ in found for e in s[n : n + batch])
            for n in range(0, 3 * batch, batch)
        ]
    assert sorted(e for _, seen in found for e in seen) == [*range(48)]  # and the next is whole
    # What was saved before the first batch is the same position, again on any number of ranks.
    again, _ = resume_in_an_epoch(tmp_path / "again", 8)
    assert sorted(again) == sorted(rest)


def test_a_position_that_is_no_whole_number_of_steps(tmp_path: Path) -> None:
    run_ranks(2, save_in_an_epoch, tmp_path, 4)
    with pytest.raises(LoadError, match=r"loader: .*after 24 examples.* steps of 5 on 1: choose"):
        resume_in_an_epoch(tmp_path, 5)


def save_on_the_main_process_alone(path: Path) -> str:
    set_up_rank()
    run = Run("skip")
    message = ""
    if run.accelerator.is_main_process:
        run.accelerator.patience = timedelta(seconds=0.5)
        for _ in range(2):  # it stays so
            with pytest.raises(pyckpt.errors.RanksLost) as error:
                run.accelerator.save_state(path)
            assert error.value.ranks == (1,)
        message = str(error.value)
    run.accelerator.wait_for_everyone()
    assert not path.exists()
    return message


def test_the_main_process_alone_is_told(tmp_path: Path) -> None:
    message, _ = run_ranks(2, save_on_the_main_process_alone, tmp_path / "run")
    assert "save_state was not called by process 1 within 0.5 s" in message
    assert "accelerator.is_main_process" in message


class Fragile:
    broken = False

    def state_dict(self) -> dict[str, int]:
        if self.broken:
            raise ZeroDivisionError
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def save_where_one_rank_cannot(path: Path) -> str:
    set_up_rank()
    run = Run("skip")
    fragile = Fragile()
    run.accelerator.register_for_checkpointing(fragile)
    fragile.broken = dist.get_rank() == 1
    run.accelerator.save_state(path)
    with pytest.raises(pyckpt.errors.PyckptError) as error:
        run.accelerator.wait_for_saves()
    fragile.broken = False
    for batch in run.loader:  # nobody hangs
        run.step(batch)
    run.accelerator.save_state(path).wait()
    run.accelerator.end_training()
    return str(error.value)


def test_a_rank_that_cannot_save(tmp_path: Path) -> None:
    for message in run_ranks(2, save_where_one_rank_cannot, tmp_path):
        assert "custom_1: state_dict() of this Fragile raised ZeroDivisionError" in message
    assert EPOCH in pyckpt.load(tmp_path)["custom"].values()
    assert torch.is_tensor(pyckpt.load(tmp_path)["model"]["0.weight"])
