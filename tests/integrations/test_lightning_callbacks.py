"""Callbacks of Lightning's own that change what is trained: another scheduler, other parameters."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist
from _lightning import BATCHES, Module, Stop, as_rank, same, trainer
from _ranks import run_ranks
from _training import damage
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as StockStrategy
from torch import nn

from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy

EPOCHS = 4


class Kill(Callback):
    """Ends training by an error before a batch of the whole run."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise Stop


def fit(
    root: Path, module: Module, way: str, *callbacks: Any, every: int, ckpt_path: Any = None
) -> Module:
    """Train, and save every so many steps."""
    options: dict[str, Any] = {}
    if way == "callback":
        saves: Any = Checkpoints(root, every_steps=every, when_busy="wait")
    else:
        steps = None if every == BATCHES else every
        saves = ModelCheckpoint(root, every_n_train_steps=steps, save_last=True)
        stock = StockStrategy("cpu")
        options["strategy"] = stock if way == "stock" else SingleDeviceStrategy("cpu")
    run = trainer(root, saves, *callbacks, epochs=EPOCHS, **options)
    with contextlib.suppress(Stop):
        run.fit(module, ckpt_path=ckpt_path)
    return module


def last(root: Path, way: str) -> Path | None:
    return None if way == "callback" else root / "last.ckpt"


def check_rest(whole: Module, again: Module, begin: int) -> None:
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > begin}
    assert same(again, whole)


class Scheduled(Module):
    """With a scheduler that cannot take the state of another, or none."""

    def __init__(self, *, scheduled: bool) -> None:
        super().__init__()
        self.scheduled = scheduled

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if not self.scheduled:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.9**e)]


@pytest.mark.parametrize("way", ["callback", "strategy"])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("stop", [2 * BATCHES, 2 * BATCHES + 2])
def test_stochastic_weight_averaging_goes_on(
    tmp_path: Path, way: str, scheduled: bool, stop: int
) -> None:
    def run(name: str, *callbacks: Any, **options: Any) -> Module:
        averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2, annealing_epochs=2)
        module = Scheduled(scheduled=scheduled)
        every = 2 if stop % BATCHES else BATCHES
        return fit(tmp_path / name, module, way, averaging, *callbacks, every=every, **options)

    whole = run("whole")
    run("a", Kill(stop))
    check_rest(whole, run("a", ckpt_path=last(tmp_path / "a", way)), stop)


class Backbone(Module):
    """Whose first layers are frozen at first, batch norm among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 4)
        self.layers = nn.Sequential(self.backbone, self.head)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.02)


@pytest.mark.parametrize("way", ["callback", "strategy"])
@pytest.mark.parametrize("stop", [BATCHES, 2 * BATCHES, 2 * BATCHES + 2])
def test_finetuning_goes_on(tmp_path: Path, way: str, stop: int) -> None:
    def run(name: str, *callbacks: Any, **options: Any) -> Module:
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        every = 2 if stop % BATCHES else BATCHES
        callbacks = (unfreezing, *callbacks)
        return fit(tmp_path / name, Backbone(), way, *callbacks, every=every, **options)

    whole = run("whole")
    run("a", Kill(stop))
    check_rest(whole, run("a", ckpt_path=last(tmp_path / "a", way)), stop)


class Taught(Module):
    """With a part that the program itself freezes, and one that a callback trains later; each is
    wrapped, or not."""

    def __init__(self, *, wrapped: bool = False, larger: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        wrap: Any = partial(torch.compile, backend="eager") if wrapped else lambda one: one
        teacher = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        teacher[1].track_running_stats = False
        self.teacher = wrap(teacher)
        self.backbone = wrap(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)))
        self.layers = nn.Sequential(self.backbone, nn.Linear(16, 4))
        if larger:
            self.late = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)
            self.late[1].track_running_stats = False
            self.strict_loading = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layers[1].parameters(), lr=0.02)


class Unfreezing(BaseFinetuning):
    """Trains the backbone, too, from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.01)


def tracks(module: nn.Module) -> list[bool]:
    """Whether its batch norms keep statistics."""
    return [one.track_running_stats for one in module.modules() if isinstance(one, nn.BatchNorm1d)]


@pytest.mark.parametrize("way", ["callback", "strategy"])
@pytest.mark.parametrize("stop", [BATCHES, 2 * BATCHES])
@pytest.mark.parametrize("wrapped", [False, True])
def test_finetuning_goes_on_with_other_wrappers(
    tmp_path: Path, way: str, stop: int, wrapped: bool
) -> None:
    def run(name: str, *callbacks: Any, wrapped: bool, **options: Any) -> Module:
        module = Taught(wrapped=wrapped)
        return fit(tmp_path / name, module, way, Unfreezing(), *callbacks, every=BATCHES, **options)

    whole = run("whole", wrapped=wrapped)
    run("a", Kill(stop), wrapped=not wrapped)
    again = run("a", wrapped=wrapped, ckpt_path=last(tmp_path / "a", way))
    check_rest(whole, again, stop)
    for module in (whole, again):
        assert not any(one.requires_grad for one in module.teacher.parameters())
        assert all(one.requires_grad for one in module.layers.parameters())
        assert [tracks(module.teacher), tracks(module.backbone)] == [[False], [True]]


def test_what_a_checkpoint_does_not_know_stays_frozen(tmp_path: Path) -> None:
    fit(tmp_path, Taught(), "callback", Unfreezing(), Kill(BATCHES), every=BATCHES)
    again = Taught(larger=True)
    fit(tmp_path, again, "callback", Unfreezing(), every=BATCHES)
    assert min(again.losses) == BATCHES + 1
    assert not any(one.requires_grad for one in again.late.parameters())
    assert tracks(again.late) == [False]


def test_finetuning_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    """The newest ones have another group of parameters, and prove damaged after it was made."""
    whole = fit(tmp_path / "whole", Taught(), "callback", Unfreezing(), every=3)
    fit(tmp_path / "a", Taught(), "callback", Unfreezing(), Kill(2 * BATCHES + 1), every=3)
    steps = sorted((tmp_path / "a").glob("step-*"))
    assert steps[-1].name == f"step-{2 * BATCHES:08}"
    for path in steps[BATCHES // 3 : 2 * BATCHES // 3]:
        damage(path)
    again = Taught()
    fit(tmp_path / "a", again, "callback", Unfreezing(), every=3)
    check_rest(whole, again, BATCHES)


def resume_past_damage(root: str) -> list[tuple[int, list[int], list[bool]]]:
    """On each rank: the step, the sizes of the groups and what is trained, of an older checkpoint
    once the newest one is damaged."""
    found, rank = [], as_rank()

    class Look(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            sizes = [len(group["params"]) for group in trainer.optimizers[0].param_groups]
            trained = [one.requires_grad for one in module.layers.parameters()]
            found.append((trainer.global_step, sizes, trained))

    def run(stop: int) -> None:
        saves = Checkpoints(root, every_steps=BATCHES, when_busy="wait")
        callbacks = (Unfreezing(), saves, Look(), Kill(stop))
        one = trainer(Path(root), *callbacks, epochs=EPOCHS, strategy=DDPStrategy(), **rank)
        with contextlib.suppress(Stop):
            one.fit(Taught())

    run(2 * BATCHES)
    if dist.get_rank() == 0:
        damage(Path(root) / f"step-{2 * BATCHES:08}")
    dist.barrier()
    run(BATCHES)
    return found[1:]


def test_ranks_go_on_from_the_same_older_checkpoint(tmp_path: Path) -> None:
    one = (BATCHES, [2], [False] * 4 + [True] * 2)
    assert run_ranks(2, resume_past_damage, str(tmp_path)) == [[one], [one]]


def test_finetuning_goes_on_from_a_file_of_lightnings_own(tmp_path: Path) -> None:
    def run(way: str, *callbacks: Any, **options: Any) -> Module:
        unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=1)
        callbacks = (unfreezing, *callbacks)
        return fit(tmp_path / way, Backbone(), way, *callbacks, every=BATCHES, **options)

    run("stock", Kill(2 * BATCHES))
    again = run("strategy", ckpt_path=last(tmp_path / "stock", "stock"))
    assert min(again.losses) == 2 * BATCHES + 1
