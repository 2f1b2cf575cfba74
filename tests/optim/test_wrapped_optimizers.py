"""Optimizers behind wrappers: the one that steps gets what was saved, or there is an error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import AdamW, Optimizer

import pyckpt
from pyckpt import optim
from pyckpt.errors import LoadError
from pyckpt.train.state.app_state import AppState

pytestmark = pytest.mark.slow

# --- look-alikes ----------------------------------------------------------------------------------


class Imitating:
    """As Lightning's: of the class of what it wraps, whose attributes it shows as its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._inner = optimizer
        self.__class__ = type("Imitation", (type(self), type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._inner.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Forwarding(Optimizer):
    """As Accelerate's: an optimizer whose properties are those of another."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.defaults = optimizer.defaults

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Sharing:
    """Is no optimizer, and has references of its own to what another has."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.wrapped = optimizer
        self.state = optimizer.state
        self.param_groups = optimizer.param_groups

    def state_dict(self) -> Any:
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.wrapped.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step(closure)


class Apart(AdamW):
    """Keeps a state of its own, and so passes nothing on when it is loaded."""

    def __init__(self, optimizer: AdamW) -> None:
        super().__init__(optimizer.param_groups)
        self.steps = [optimizer]

    def step(self, closure: Any = None) -> Any:
        result = self.steps[0].step(closure)
        self.state = self.steps[0].state
        return result


class Ascending(Optimizer):
    """As the well-known implementation of SAM: its state is beside that of the one it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["before"] = param.clone()
        return self.base.step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


class Slow(Optimizer):
    """As Lookahead: both states are in its own layout."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.inner = optimizer
        self.state: Any = defaultdict(dict)
        self.defaults: Any = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def _keys(self) -> dict[tuple[int, int], torch.Tensor]:
        return {
            (g, p): param
            for g, group in enumerate(self.param_groups)
            for p, param in enumerate(group["params"])
        }

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        for param in self._keys().values():
            self.state[param]["slow"] = param.detach().clone()
        return result

    def state_dict(self) -> Any:
        own = {key: dict(self.state[p]) for key, p in self._keys().items() if p in self.state}
        return {"slow": own, "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        params = self._keys()
        self.state = defaultdict(
            dict, {params[key]: entries for key, entries in state_dict["slow"].items()}
        )


def fabric(package: str) -> Callable[[nn.Module, Optimizer], tuple[nn.Module, Any]]:
    def wrap(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        cls = pytest.importorskip(package).Fabric
        return cls(accelerator="cpu", devices=1).setup(model, optimizer)

    return wrap


def lightning(package: str) -> Callable[[nn.Module, Optimizer], tuple[nn.Module, Any]]:
    def wrap(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        return model, pytest.importorskip(package).LightningOptimizer(optimizer)

    return wrap


def accelerate(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer


Wrap = Callable[[nn.Module, Optimizer], tuple[nn.Module, Any]]
WRAPPERS: dict[str, Wrap] = {
    "Imitating": lambda model, optimizer: (model, Imitating(optimizer)),
    "Forwarding": lambda model, optimizer: (model, Forwarding(optimizer)),
    "Sharing": lambda model, optimizer: (model, Sharing(optimizer)),
    "two": lambda model, optimizer: (model, Imitating(Forwarding(optimizer))),
    "Lookahead": lambda model, optimizer: (model, Slow(optimizer)),
    "lightning.fabric": fabric("lightning.fabric"),
    "lightning_fabric": fabric("lightning_fabric"),
    "lightning.pytorch": lightning("lightning.pytorch.core.optimizer"),
    "pytorch_lightning": lightning("pytorch_lightning.core.optimizer"),
    "accelerate": accelerate,
}


def made(wrap: Wrap, seed: int) -> tuple[nn.Module, Any, AdamW]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    inner = AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model, optimizer = wrap(model, inner)
    return model, optimizer, inner


def step(model: nn.Module, optimizer: Any) -> None:
    model.zero_grad()
    model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().sum().backward()
    # Lightning's own asks the strategy of a Trainer.
    getattr(optimizer, "_optimizer", optimizer).step()


def moments(inner: Optimizer) -> list[Any]:
    params = [param for group in inner.param_groups for param in group["params"]]
    return [[inner.state[p][k].tolist() for k in ("step", "exp_avg", "exp_avg_sq")] for p in params]


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_steps_has_what_was_saved(name: str, tmp_path: Path) -> None:
    model, optimizer, inner = made(WRAPPERS[name], 0)
    for _ in range(2):
        step(model, optimizer)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, {"model": model, "optimizer": optimizer})
        fresh, wrapper, other = made(WRAPPERS[name], 1)
        assert checkpointer.restore({"model": fresh, "optimizer": wrapper}) == 2
    assert moments(other) == moments(inner)
    assert wrapper.param_groups[0]["lr"] == 0.1
    for _ in range(2):
        step(model, optimizer)
        step(fresh, wrapper)
    assert moments(other) == moments(inner)
    assert [p.tolist() for p in fresh.parameters()] == [p.tolist() for p in model.parameters()]
    if hasattr(wrapper, "state"):
        assert wrapper.state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.parametrize("name", ["Imitating", "Sharing", "lightning.fabric"])
def test_saved_with_a_wrapper_and_restored_without_and_back(name: str, tmp_path: Path) -> None:
    model, optimizer, inner = made(WRAPPERS[name], 0)
    step(model, optimizer)
    bare, plain, _ = made(lambda model, optimizer: (model, optimizer), 1)
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        checkpointer.restore({"model": bare, "optimizer": plain})
        assert moments(plain) == moments(inner)
        step(bare, plain)
        checkpointer.save(2, {"model": bare, "optimizer": plain})
        checkpointer.restore({"model": model, "optimizer": optimizer})
    assert moments(inner) == moments(plain)


@pytest.mark.parametrize("name", ["Imitating", "Sharing", "two", "accelerate"])
def test_loading_a_wrapper_by_itself(name: str) -> None:
    model, optimizer, inner = made(WRAPPERS[name], 0)
    step(model, optimizer)
    _, wrapper, other = made(WRAPPERS[name], 1)
    optim.load_state_dict(wrapper, inner.state_dict())
    assert moments(other) == moments(inner)
    assert wrapper.state is other.state
    assert wrapper.param_groups is other.param_groups
    assert list(optim.placement(wrapper)) == other.param_groups[0]["params"]


def test_a_wrapper_that_keeps_the_state_to_itself(tmp_path: Path) -> None:
    def wrap(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        return model, Apart(optimizer)

    model, optimizer, inner = made(wrap, 0)
    step(model, optimizer)
    fresh, wrapper, _ = made(wrap, 1)
    said = r"Apart has loaded 'exp_avg', .*, and the AdamW that it steps, in its attribute steps\[0"
    with pytest.raises(ValueError, match=said):
        optim.load_state_dict(wrapper, inner.state_dict())
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer})
        fresh, wrapper, _ = made(wrap, 1)
        with pytest.raises(LoadError, match=said):
            checkpointer.restore({"model": fresh, "optimizer": wrapper})


def test_state_that_a_wrapper_leaves_out_is_refused(tmp_path: Path) -> None:
    def wrap(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        return model, Ascending(optimizer)

    model, optimizer, inner = made(wrap, 0)
    step(model, optimizer)
    said = r"leaves out the state of the AdamW in its attribute base, which it steps; put that one"
    with pytest.raises(TypeError, match=said):
        AppState({"model": model, "optimizer": optimizer}).state_dict()
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        state = {"model": model, "optimizer": optimizer, "base": optimizer.base}
        checkpointer.save(1, state)
        fresh, wrapper, other = made(wrap, 1)
        checkpointer.restore({"model": fresh, "optimizer": wrapper, "base": wrapper.base})
    assert moments(other) == moments(inner)


def test_names_with_the_prefix_of_fabric(tmp_path: Path) -> None:
    """As older checkpoints have them, and as raw states of wrapped modules do."""
    model, optimizer, inner = made(lambda model, optimizer: (model, optimizer), 0)
    step(model, optimizer)
    state = AppState({"model": model, "optimizer": optimizer}).state_dict()
    state["model"] = {f"_forward_module.{key}": value for key, value in state["model"].items()}
    saved = state["optimizer"]
    saved["state"] = {f"_forward_module.{key}": sub for key, sub in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [f"_forward_module.{key}" for key in group["params"]]
    dcp.save(state, storage_writer=pyckpt.DirectWriter(tmp_path))
    fresh, wrapper, other = made(WRAPPERS["lightning.fabric"], 1)
    AppState({"model": fresh, "optimizer": wrapper}).load(pyckpt.DirectReader(tmp_path))
    assert moments(other) == moments(inner)
    assert [p.tolist() for p in fresh.parameters()] == [p.tolist() for p in model.parameters()]
