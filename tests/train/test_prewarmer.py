"""The memory of the first save is made while the first steps run, if a save will come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _forks import status_of_child
from torch import nn

import pyckpt
from pyckpt import Checkpointer
from pyckpt.dcp.stager import PinnedStager
from pyckpt.train.prewarmer import Prewarmer

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(max_pinned_bytes=64 * MIB, slot_bytes=64 << 10) as own:
        yield own


def trained(size: int = MIB) -> dict[str, Any]:
    """A model with so many bytes of parameters, and its AdamW after a step."""
    model = nn.Linear(size // 4 // 64, 64, bias=False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), fused=True)}
    step(state)
    return state


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def held(engine: pyckpt.Engine) -> int:
    engine.native.wait_prewarmed()
    assert engine.native.arena_used_bytes == 0
    return engine.native.arena_held_bytes


def test_the_first_step_prepares_for_the_first_save(tmp_path: Path, engine: pyckpt.Engine) -> None:
    state = trained()
    with Checkpointer(tmp_path, every_steps=3, engine=engine) as checkpointer:
        checkpointer.step(1, state)
        prepared = held(engine)
        assert 3 * MIB <= prepared <= 6 * MIB
        for i in (2, 3):
            step(state)
            checkpointer.step(i, state)
        checkpointer.wait()
        assert engine.native.arena_held_bytes == prepared
        other = trained()
        assert checkpointer.restore(other) == 3
    assert torch.equal(other["model"].weight, state["model"].weight)


class Lazy(Mapping[str, Any]):
    """A state that is made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError

    def __iter__(self) -> Iterator[str]:
        return iter(["model"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("options", "state"),
    [
        pytest.param({}, None, id="no rule, so that no save may come"),
        pytest.param({"every_steps": 100, "prewarm": False}, None, id="switched off"),
        pytest.param({"every_steps": 100}, Lazy(), id="a lazy state"),
    ],
)
def test_nothing_is_prepared(
    tmp_path: Path, engine: pyckpt.Engine, options: Any, state: Any
) -> None:
    with Checkpointer(tmp_path, engine=engine, **options) as checkpointer:
        checkpointer.step(1, trained() if state is None else state)
        assert held(engine) == 0


def test_a_program_that_only_restores_takes_no_memory(
    tmp_path: Path, engine: pyckpt.Engine
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, trained())
    with Checkpointer(tmp_path, every_steps=1, engine=engine) as checkpointer:
        assert checkpointer.restore(trained()) == 1
        assert held(engine) == 0


def test_it_waits_for_the_state_of_the_optimizer(tmp_path: Path, engine: pyckpt.Engine) -> None:
    model = nn.Linear(MIB // 4 // 64, 64, bias=False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Checkpointer(tmp_path, every_steps=100, engine=engine) as checkpointer:
        checkpointer.step(1, state)
        assert held(engine) == 0
        step(state)
        checkpointer.step(2, state)
        assert held(engine) >= 3 * MIB


def test_an_optimizer_without_state_is_not_waited_for_for_ever(engine: pyckpt.Engine) -> None:
    model = nn.Linear(MIB // 4 // 64, 64, bias=False)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    prewarmer = Prewarmer(engine)
    for _ in range(100):
        prewarmer.step_ended(state)
    assert MIB <= held(engine) <= 4 * MIB


def test_what_a_state_shows_is_counted(engine: pyckpt.Engine) -> None:
    """Each memory once, of whatever object."""
    model = nn.Linear(MIB // 4 // 64, 64, bias=False)
    frozen = nn.Linear(4 * MIB // 64 // 4, 64, bias=False).requires_grad_(False)
    twice = torch.zeros(MIB // 4)
    Prewarmer(engine).step_ended(
        {
            "model": model,
            "same": nn.ModuleList([model]),
            "adapter": pyckpt.Trainable(nn.ModuleList([model, frozen])),
            "tensors": [twice, {"again": (twice,)}],
            "number": 1,
            "rng": pyckpt.RngState(),
        }
    )
    assert 2 * MIB <= held(engine) <= 4 * MIB


def test_it_is_bounded_by_the_budget(tmp_path: Path) -> None:
    state = trained(8 * MIB)
    with (
        pyckpt.Engine(max_pinned_bytes=8 * MIB, slot_bytes=64 << 10) as engine,
        Checkpointer(tmp_path, every_steps=2, engine=engine) as checkpointer,
    ):
        checkpointer.step(1, state)
        assert 0 < held(engine) <= engine.native.arena_max_bytes < 8 * MIB
        step(state)
        checkpointer.step(2, state)


def test_a_save_comes_meanwhile(tmp_path: Path, engine: pyckpt.Engine) -> None:
    """It needs no more memory, and holds the right state."""
    state = trained(8 * MIB)
    with Checkpointer(tmp_path, every_steps=2, engine=engine) as checkpointer:
        checkpointer.step(1, state)
        step(state)
        checkpointer.step(2, state)
        weights = state["model"].weight.detach().clone()
        prepared = engine.native.arena_held_bytes
        step(state)
        checkpointer.wait()
        assert held(engine) == prepared < 32 * MIB
        other = trained(8 * MIB)
        checkpointer.restore(other)
    assert torch.equal(other["model"].weight, weights)


def test_the_end_does_not_wait_for_it(tmp_path: Path) -> None:
    """The engine is closed while it prewarms, and its thread goes."""
    engine = pyckpt.Engine(max_pinned_bytes=64 * MIB, slot_bytes=64 << 10)
    Prewarmer(engine).step_ended(trained(8 * MIB))
    engine.close()
    engine.native.wait_prewarmed()
    Prewarmer(engine).step_ended(trained())  # on a closed engine: left to the save


def test_an_error_is_left_to_the_save(
    tmp_path: Path, engine: pyckpt.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(PinnedStager, "prewarm", fail)
    state = trained()
    with Checkpointer(tmp_path, every_steps=2, engine=engine) as checkpointer:
        for i in (1, 2):
            checkpointer.step(i, state)
        checkpointer.wait()
        assert checkpointer.latest().step == 2  # type: ignore[union-attr]


def test_a_fork_meanwhile(tmp_path: Path) -> None:
    """Parent and child both save, each with memory of its own."""
    state = trained(8 * MIB)

    def save(name: str) -> None:
        with Checkpointer(tmp_path / name, every_steps=2) as checkpointer:
            for i in (1, 2):
                checkpointer.step(i, state)
            checkpointer.wait()
            assert checkpointer.latest().step == 2  # type: ignore[union-attr]

    with Checkpointer(tmp_path / "before", every_steps=100) as checkpointer:
        checkpointer.step(1, state)
        assert status_of_child(lambda: save("child")) == 0
    save("parent")
