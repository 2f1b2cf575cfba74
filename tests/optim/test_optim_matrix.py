"""Every optimizer of torch.optim, its flags, and the ways its state comes back.

On simulated CUDA: where state natively lies is asked of a fresh optimizer that really steps there,
not of what pyckpt has learned; values are compared after the next step, and so is how often that
step reads a GPU value back.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _optimizers import (
    CASES,
    FLAGS,
    SOURCES,
    accepts,
    on_device,
    optimizer_for,
    parameters,
    places,
    results,
    step,
    through_torch_load,
)
from _sampling import sampled
from _simulated_cuda import CUDA, Simulation, simulated_cuda

from pyckpt import optim

DTYPES = [torch.float32, torch.bfloat16]
# These six differ in what their state is and where it lies; the others take the same paths.
DIFFERENT = ("Adam-amsgrad", "AdamW", "Adagrad", "NAdam", "ASGD", "RMSprop-centered")
# Each optimizer with each of its flags; the six in each dtype and from each source, the others in
# one dtype and from one source, which take turns.
LOADS = [
    (name, flags, dtype, source)
    for number, (name, flags) in enumerate(CASES)
    for i, dtype in enumerate(DTYPES)
    for j, source in enumerate(SOURCES)
    if name in DIFFERENT or (number % len(DTYPES) == i and number % len(SOURCES) == j)
]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_cuda() as simulation:
        yield simulation


def trained(
    name: str, flags: str, dtype: torch.dtype, steps: int = 2
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    params = parameters(CUDA, dtype)
    optimizer = optimizer_for(params, name, flags)
    for number in range(steps):
        step(optimizer, number)
    return params, optimizer


def resumed(
    name: str, flags: str, params: list[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """A new optimizer, of new parameters of the same values, that has not stepped."""
    copies = [param.detach().clone() for param in params]
    return copies, optimizer_for(copies, name, flags)


def counted_step(simulation: Simulation, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    simulation.counts.clear()
    optimizer.step()
    return dict(simulation.counts)


def give_gradients(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.full_like(param, 0.25)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "flags"), sampled(CASES, 7))
def test_learned_is_what_the_optimizer_creates(
    simulation: Simulation, name: str, flags: str, dtype: torch.dtype
) -> None:
    params = parameters(CUDA, dtype)
    optimizer = optimizer_for(params, name, flags)
    learned = optim.placement(optimizer)
    assert places(optimizer) == places(optimizer_for(params, name, flags))  # nothing has changed
    step(optimizer, 0)
    for param, native in zip(params, places(optimizer), strict=True):
        said = {
            (key,): ("cpu" if entry.kind == "host" else "cuda", entry.dtype)
            for key, entry in learned[param].items()
        }
        assert said == native
    assert optim.check(optimizer) == []


@pytest.mark.parametrize(("name", "flags", "dtype", "source"), sampled(LOADS, 13))
def test_load_state_dict(
    simulation: Simulation, name: str, flags: str, dtype: torch.dtype, source: str, tmp_path: Path
) -> None:
    params, original = trained(name, flags, dtype)
    _, fresh = trained(name, flags, dtype, steps=1)
    copies, optimizer = resumed(name, flags, params)
    optim.load_state_dict(optimizer, SOURCES[source](original.state_dict(), tmp_path))
    assert places(optimizer) == places(fresh)
    assert optim.check(optimizer) == []
    give_gradients(original, optimizer)
    assert counted_step(simulation, optimizer) == counted_step(simulation, original)
    for ours, theirs in zip(results(optimizer), results(original), strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(copies, params, strict=True))


CHANGES = [
    (name, before, after)
    for name, before in CASES
    for after in FLAGS
    if before != after and accepts(name, after) and name in DIFFERENT
]


@pytest.mark.parametrize("keep", ["live", "saved"])
@pytest.mark.parametrize(("name", "before", "after"), sampled(CHANGES, 11))
def test_flags_that_differ(
    simulation: Simulation, name: str, before: str, after: str, keep: str, tmp_path: Path
) -> None:
    params, original = trained(name, before, torch.float32)
    copies, optimizer = resumed(name, after, params)
    state_dict = through_torch_load(original.state_dict(), tmp_path, CUDA)
    optim.load_state_dict(optimizer, state_dict, flags=keep)
    flags = after if keep == "live" else before
    _, fresh = trained(name, flags, torch.float32, steps=1)
    for key in ("fused", "foreach", "capturable", "differentiable"):
        assert optimizer.param_groups[0].get(key) == fresh.param_groups[0].get(key)
    assert places(optimizer) == places(fresh)
    assert optim.check(optimizer) == []
    give_gradients(original, optimizer, fresh)
    assert counted_step(simulation, optimizer) == counted_step(simulation, fresh)
    original.step()
    for ours, theirs in zip(copies, params, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu())


@pytest.mark.parametrize("map_location", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "flags"), sampled(CASES, 7))
def test_repair_after_a_stock_load(
    simulation: Simulation, name: str, flags: str, map_location: str, tmp_path: Path
) -> None:
    params, original = trained(name, flags, torch.float32)
    _, optimizer = resumed(name, flags, params)
    optimizer.load_state_dict(through_torch_load(original.state_dict(), tmp_path, map_location))
    wrong = optim.check(optimizer)
    simulation.counts.clear()
    repaired = optim.repair(optimizer)
    assert simulation.counts["d2h"] + simulation.counts["h2d"] <= 1
    assert simulation.counts["read"] == 0
    assert [(m.name, m.key) for m in repaired] == [(m.name, m.key) for m in wrong]
    assert places(optimizer) == places(original)
    assert optim.check(optimizer) == []
    give_gradients(original, optimizer)
    assert counted_step(simulation, optimizer) == counted_step(simulation, original)
    for ours, theirs in zip(results(optimizer), results(original), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "flags"), sampled(CASES, 7))
def test_move_to_the_host_and_back(simulation: Simulation, name: str, flags: str) -> None:
    _, optimizer = trained(name, flags, torch.bfloat16)
    native, before = places(optimizer), results(optimizer)
    optim.move(optimizer, "cpu")
    assert all(place == "cpu" for state in places(optimizer) for place, _ in state.values())
    optim.move(optimizer)
    assert places(optimizer) == native
    assert all(torch.equal(a, b) for a, b in zip(results(optimizer), before, strict=True))


@pytest.mark.parametrize(("name", "flags"), sampled(CASES, 7))
def test_move_keeps_host_keys_on_the_host(simulation: Simulation, name: str, flags: str) -> None:
    """Lightning #19955: everything has been moved to the GPU."""
    _, optimizer = trained(name, flags, torch.float32)
    native = places(optimizer)
    for param, state in list(optimizer.state.items()):
        optimizer.state[param] = on_device(state, CUDA)
    optim.move(optimizer, "cuda")
    assert places(optimizer) == native
