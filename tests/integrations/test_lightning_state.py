"""What else belongs to a state: averaged weights, several optimizers, metrics of ranks, signals,
where optimizers have their state; and what is said of what does not fit."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _lightning import BATCHES, Module, Stop, Validated, as_rank, same, trainer
from _ranks import RanksFailed, run_ranks
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as StockStrategy
from test_lightning_checkpoints import StopAt, fit
from torch import nn

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.lightning import Checkpoints, OptimizerPlacement, SingleDeviceStrategy


class Adversarial(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(8, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = self.other(self.one(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.one.parameters(), lr=0.02),
            torch.optim.SGD(self.other.parameters(), lr=0.02, momentum=0.9),
        ]

    train_dataloader = Module.train_dataloader


def test_optimizers_that_are_stepped_by_hand(tmp_path: Path) -> None:
    saves: dict[str, Any] = {"every_steps": 3, "when_busy": "wait"}  # steps are 2, 4, 6, ...
    whole = fit(tmp_path, Adversarial(), epochs=2)  # type: ignore[arg-type]
    fit(tmp_path, Adversarial(), Checkpoints(tmp_path / "a", **saves), StopAt(8), epochs=2)  # type: ignore[arg-type]
    assert [p.name[-2:] for p in sorted((tmp_path / "a").glob("step-*"))] == ["04", "06"]
    again = fit(tmp_path, Adversarial(), Checkpoints(tmp_path / "a", **saves), epochs=2)  # type: ignore[arg-type]
    assert same(again, whole)


@pytest.mark.parametrize("kind", ["callback", "strategy"])
def test_averaged_weights(tmp_path: Path, kind: str) -> None:
    def run(name: str, stop: int | None) -> Module:
        callbacks: list[Any] = [EMAWeightAveraging(decay=0.9)]
        if stop is not None:
            callbacks.append(StopAt(stop))
        options: dict[str, Any] = {"epochs": 2}
        if kind == "callback":
            callbacks.append(Checkpoints(tmp_path / name, every_steps=2, when_busy="wait"))
        else:
            callbacks.append(
                ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_last=True)
            )
            options["strategy"] = SingleDeviceStrategy()
        module = Module()
        with contextlib.suppress(Stop):
            trainer(tmp_path, *callbacks, **options).fit(
                module, ckpt_path=None if kind == "callback" else "last"
            )
        return module

    whole = run("whole", None)
    run("a", 4)
    saved = max((tmp_path / "a").iterdir(), key=lambda path: path.name)
    found = pyckpt.load(saved)
    averaged = found["model"]["layers.0.weight"]
    assert not torch.equal(averaged, found["lightning"]["current_model_state"]["layers.0.weight"])
    again = run("a", None)
    assert again.losses == {k: v for k, v in whole.losses.items() if k > 4}
    assert same(again, whole)


def test_the_best_by_what_the_module_logs_are_kept(tmp_path: Path) -> None:
    callback = Checkpoints(tmp_path / "a", keep_last=1, keep_best=("val_loss", 1, "min"))
    fit(tmp_path, Validated(), callback, epochs=4)
    with pyckpt.Checkpointer(tmp_path / "a") as checkpointer:
        found = {one.step: dict(one.metrics) for one in checkpointer.checkpoints()}
    assert found == {2 * BATCHES: {"val_loss": 0.0}, 4 * BATCHES: {"val_loss": 2.0}}
    assert callback.best_model_path.endswith(f"step-{2 * BATCHES:08}")
    assert callback.last_model_path.endswith(f"step-{4 * BATCHES:08}")


class Signal(Callback):
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_and_stops(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    module = fit(tmp_path, Module(), Signal(), Checkpoints(tmp_path / "a", on_signals="SIGTERM"))
    assert max(module.losses) == 3
    assert signal.getsignal(signal.SIGTERM) == before
    again = fit(tmp_path, Module(), Checkpoints(tmp_path / "a"), epochs=1)
    assert sorted(again.losses) == [4, 5, 6]


class Fill(Callback):
    """Puts a file where the directory of a step would be."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            self.path.mkdir(exist_ok=True)
            (self.path / "step-00000002").write_text("in the way")


def test_a_failed_background_save_ends_training(tmp_path: Path) -> None:
    callback = Checkpoints(tmp_path / "a", every_steps=2, when_busy="wait")
    with pytest.raises(NotADirectoryError, match="step-00000002"):
        fit(tmp_path, Module(), Fill(tmp_path / "a"), callback)


class Narrow(Module):
    """In bfloat16, of which torch narrows the optimizer's state when it loads it."""

    def __init__(self) -> None:
        super().__init__(optimizer=torch.optim.NAdam)
        self.layers.bfloat16()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0].bfloat16()).square().mean()


class Look(Callback):
    found: torch.dtype

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        (optimizer,) = trainer.optimizers
        self.found = next(iter(optimizer.state.values()))["mu_product"].dtype


@pytest.mark.parametrize(
    ("callbacks", "expected"), [([], torch.bfloat16), ([OptimizerPlacement()], torch.float32)]
)
def test_optimizer_state_is_where_a_fresh_run_has_it(
    tmp_path: Path, callbacks: list[Any], expected: torch.dtype
) -> None:
    stock = StockStrategy("cpu")
    saves = ModelCheckpoint(tmp_path / "c", save_last=True)
    trainer(tmp_path, saves, strategy=stock, epochs=1).fit(Narrow())
    look = Look()
    again = trainer(tmp_path, *callbacks, look, strategy=StockStrategy("cpu"), epochs=2)
    again.fit(Narrow(), ckpt_path=str(tmp_path / "c" / "last.ckpt"))
    assert look.found == expected


class Other(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4))


def test_another_module_is_refused_by_name(tmp_path: Path) -> None:
    fit(tmp_path, Module(), Checkpoints(tmp_path / "a"), epochs=1)
    with pytest.raises(LoadError, match=r"layers\.3\.weight"):
        fit(tmp_path, Other(), Checkpoints(tmp_path / "a"), epochs=2)


def test_a_run_that_ends_between_two_saves_is_saved(tmp_path: Path) -> None:
    averaging = EMAWeightAveraging(decay=0.9)  # which at the end changes the weights
    fit(tmp_path, Module(), averaging, Checkpoints(tmp_path / "a", every_steps=5), epochs=2)
    names = sorted(path.name for path in (tmp_path / "a").glob("step-*"))
    assert names[-1] == f"step-{2 * BATCHES:08}"
    whole = fit(tmp_path, Module(), EMAWeightAveraging(decay=0.9), epochs=3)
    again = fit(
        tmp_path, Module(), EMAWeightAveraging(decay=0.9), Checkpoints(tmp_path / "a"), epochs=3
    )
    assert again.losses == {k: v for k, v in whole.losses.items() if k > 2 * BATCHES}
    assert same(again, whole)


# --- ranks ----------------------------------------------------------------------------------------


class Count(Module):
    """Each rank's metric has a sum of its own, 20 a batch on rank 0 and 40 on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.total.update(20.0 * (dist.get_rank() + 1))
        return self.layers(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        pass


def count(root: str, steps: int, merge: Any = None) -> tuple[float, float]:
    """The metric's state on this rank when training begins, and of all ranks."""
    found: list[float] = []

    class See(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            found.append(float(module.total.sum_value))

    options = {"max_steps": steps, "epochs": -1, "strategy": DDPStrategy(), **as_rank()}
    callback = Checkpoints(root, every_steps=1, merge_data=merge)
    module = Count()
    run = trainer(Path(root).parent, See(), callback, **options)
    run.fit(module)
    return found[0], float(module.total.compute())


def test_each_rank_has_its_metrics_again_and_other_ranks_their_sum(tmp_path: Path) -> None:
    root = str(tmp_path / "a")
    assert run_ranks(2, count, root, 1) == [(0.0, 60.0), (0.0, 60.0)]
    assert run_ranks(2, count, root, 2) == [(20.0, 120.0), (40.0, 120.0)]
    with pytest.raises(RanksFailed, match="merge_data="):
        run_ranks(1, count, root, 3)
    assert run_ranks(1, count, root, 3, begin) == [(120.0, 140.0)]
    assert run_ranks(3, count, root, 4, begin) == [(140.0, 260.0), (0.0, 260.0), (0.0, 260.0)]


def begin(states: list[Any], rank: int, world_size: int) -> list[Any]:
    return []


def signalled(root: str) -> tuple[int, bool]:
    callbacks = [Signal(), Checkpoints(root, every_steps=10**6, on_signals="SIGTERM")]
    options = {"epochs": 10**4, "strategy": DDPStrategy(), **as_rank()}
    module = fit(Path(root).parent, Module(), *callbacks, **options)
    with pyckpt.Checkpointer(root) as checkpointer:
        latest = checkpointer.latest()
    return max(module.losses), latest is not None and latest.step == max(module.losses)


def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path: Path) -> None:
    one, other = run_ranks(2, signalled, str(tmp_path / "a"))
    assert one == other
    assert one[1]
