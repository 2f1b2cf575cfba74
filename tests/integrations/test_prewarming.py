"""Each framework's saves find their memory ready, if there will be saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import pyckpt
from pyckpt.engine import held_bytes


@pytest.fixture(autouse=True)
def engine() -> Iterator[pyckpt.Engine]:
    """A default engine that holds nothing yet."""
    yield pyckpt.configure(max_pinned_bytes=256 << 20)
    pyckpt.configure()


def train_lightning(root: Path, saves: bool, *, by_strategy: bool = False) -> None:
    pytest.importorskip("lightning")
    from _lightning import Module, trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from pyckpt.integrations.lightning import Checkpoints, SingleDeviceStrategy

    seen = []

    class Look(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(held_bytes(None))

    callback: Any = (
        ModelCheckpoint(root / "c") if by_strategy else Checkpoints(root / "c", prewarm=saves)
    )
    strategy = SingleDeviceStrategy(torch.device("cpu"), prewarm=saves) if by_strategy else "auto"
    trainer(root, callback, epochs=1, strategy=strategy).fit(Look())
    assert (seen[-1] > 0) == saves


def train_lightning_by_strategy(root: Path, saves: bool) -> None:
    train_lightning(root, saves, by_strategy=True)


def train_transformers(root: Path, saves: bool) -> None:
    pytest.importorskip("transformers")
    from _huggingface import At, make_trainer

    seen: list[int] = []
    look = At(4, lambda: seen.append(held_bytes(None)))
    options = {"save_steps": 100} if saves else {"save_strategy": "no"}
    make_trainer(root, callbacks=[look], max_steps=5, **options).train()
    assert (seen[0] > 0) == saves


def train_accelerate(root: Path, saves: bool) -> None:
    pytest.importorskip("accelerate")
    from pyckpt.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prewarm = saves
    inner = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    seen = []
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
        seen.append(held_bytes(None))
    assert seen[0] == 0
    assert (seen[-1] > 0) == saves
    accelerator.save_state(root / "c")
    accelerator.end_training()


def train_fabric(root: Path, saves: bool) -> None:
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric

    from pyckpt.integrations.lightning.fabric import SingleDeviceStrategy

    strategy = SingleDeviceStrategy(torch.device("cpu"), prewarm=saves)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.setup(torch.nn.Linear(8, 8).requires_grad_(False))  # a teacher, which is not saved
    model = torch.nn.Linear(8, 8)
    both = torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias])
    model, *optimizers = fabric.setup(model, *both)
    seen = []
    for optimizer in (*optimizers, *optimizers):
        fabric.backward(model(torch.ones(2, 8)).sum())
        seen.append(held_bytes(None))
        optimizer.step()
    assert seen[:2] == [0, 0]  # the second one has no state yet
    assert (held_bytes(None) > 0) == saves
    fabric.save(root / "c", {"model": model, "one": optimizers[0], "other": optimizers[1]})
    fabric.strategy.wait()  # type: ignore[attr-defined]


def train_torchtitan(root: Path, saves: bool) -> None:
    pytest.importorskip("torchtitan")
    import torch.distributed as dist
    from test_torchtitan import Job

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = Job(root, interval=100, async_mode="async", prewarm=saves)
        job.run(to=3)
        assert (held_bytes(None) > 0) == saves
        job.checkpointer.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("saves", [True, False], ids=["saves", "does not"])
@pytest.mark.parametrize(
    "train",
    [
        train_lightning,
        train_lightning_by_strategy,
        train_transformers,
        train_accelerate,
        train_fabric,
        train_torchtitan,
    ],
)
def test_memory_is_made_before_the_first_save(
    train: Callable[[Path, bool], None], saves: bool, tmp_path: Path
) -> None:
    train(tmp_path, saves)


def test_a_resumed_run_has_its_memory_made_too(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    train_accelerate(tmp_path, saves=False)
    pyckpt.configure(max_pinned_bytes=256 << 20)
    from pyckpt.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    inner = torch.nn.Linear(8, 8)
    model, _ = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters()))
    accelerator.load_state(tmp_path / "c")
    assert held_bytes(None) == 0
    accelerator.backward(model(torch.ones(2, 8)).sum())
    assert held_bytes(None) > 0
    accelerator.end_training()
