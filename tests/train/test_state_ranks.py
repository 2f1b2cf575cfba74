"""Training states saved on one number of ranks and restored on another, sharded in another way or
not at all: training goes on as if nothing had happened."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _sampling import slow
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import pyckpt
from pyckpt.train.state.app_state import AppState

SAMPLES = 12  # a multiple of every number of ranks
BEFORE, AFTER = 3, 2


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 7)  # what DDP calls what it wraps, too
        self.scale = nn.Parameter(torch.rand(7))
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)
        self.head = nn.Linear(7, 5, bias=False)
        self.back = nn.Linear(7, 5, bias=False)
        self.back.weight = self.head.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = torch.tanh(self.module(x)) * self.scale + self.frozen
        return self.head(hidden) + 0.5 * self.back(hidden)


def make(kind: str, optimizer: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Net().double()
    world = dist.get_world_size()
    if kind.startswith("fsdp2"):
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
        if kind == "fsdp2-kept-whole":
            options["reshard_after_forward"] = False
        fully_shard(model.module, **options)
        fully_shard(model, **options)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "compiled-ddp":
        model = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        assert kind == "plain"
        assert world == 1
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    if kind == "fsdp1":  # whose pieces of parameters are all of one dimension
        groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    # Another learning rate than saved, to be replaced.
    optim = getattr(torch.optim, optimizer)(groups, lr=0.01 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optim, step_size=2, gamma=0.5)
    return {"model": model, "optimizer": optim, "scheduler": scheduler, "step": 0}


def train(state: dict[str, Any], steps: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state["step"])
        x = torch.rand(SAMPLES, 5, dtype=torch.float64, generator=generator)
        mine = x[rank * SAMPLES // world : (rank + 1) * SAMPLES // world]
        state["optimizer"].zero_grad()
        (state["model"](mine) - mine).square().mean().backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1


def whole(state: dict[str, Any]) -> bytes:
    """All of a state, as one process would have it; in a form that outlives this process."""

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(sub) for key, sub in value.items()}
        if isinstance(value, torch.distributed.tensor.DTensor):
            return full(value.full_tensor())
        return value

    file = io.BytesIO()
    torch.save(full(AppState(state).state_dict()), file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def save_and_go_on(path: str, kind: str, optimizer: str, seed: int = 0) -> Any:
    state = make(kind, optimizer, seed)
    train(state, BEFORE)
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    train(state, AFTER)
    return whole(state)


def save_evaluated(path: str, kind: str) -> Any:
    """As save_and_go_on, with an evaluation before the save; and what was saved by which names."""
    state = make(kind, "AdamW", 0)
    train(state, BEFORE)
    with torch.no_grad():
        state["model"](torch.zeros(1, 5, dtype=torch.float64))
    saved = AppState(state).state_dict()
    names = list(saved["optimizer"]["state"])
    dcp.save(saved, storage_writer=pyckpt.DirectWriter(path))
    train(state, AFTER)
    return whole(state), names


def restore_and_go_on(path: str, kind: str, optimizer: str) -> Any:
    state = make(kind, optimizer, seed=1)
    model = state["model"]
    report = AppState(state).load(pyckpt.DirectReader(path))
    assert state["model"] is model
    assert state["step"] == BEFORE
    assert not report.kept
    train(state, AFTER)
    return whole(state)


def assert_same(found: Any, expected: Any, name: str = "state", *, exact: bool) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_same(found[key], expected[key], f"{name}.{key}", exact=exact)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{name}.{i}", exact=exact)
    elif isinstance(expected, torch.Tensor):
        # Sums over ranks are made in another order on another number of ranks.
        tolerance = 0.0 if exact else 1e-12
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert found == expected, name


@pytest.mark.parametrize(
    ("optimizer", "saved", "restored"),
    [
        slow("AdamW", ("ddp", 1), ("ddp", 2)),
        ("AdamW", ("ddp", 2), ("fsdp2", 2)),
        slow("AdamW", ("ddp", 3), ("ddp", 3)),
        ("AdamW", ("fsdp2", 4), ("plain", 1)),
        slow("AdamW", ("plain", 1), ("fsdp2", 4)),
        slow("AdamW", ("fsdp2", 2), ("fsdp2", 3)),
        slow("AdamW", ("compiled-ddp", 2), ("fsdp2", 1)),
        slow("NAdam", ("ddp", 4), ("fsdp2", 3)),
        ("NAdam", ("fsdp2", 2), ("fsdp2", 2)),
        slow("NAdam", ("fsdp2", 3), ("ddp", 2)),
        slow("NAdam", ("fsdp2", 1), ("compiled-ddp", 2)),
    ],
)
def test_training_goes_on(
    tmp_path: Path, optimizer: str, saved: tuple[str, int], restored: tuple[str, int]
) -> None:
    expected = unpacked(run_ranks(saved[1], save_and_go_on, str(tmp_path), saved[0], optimizer)[0])
    found = run_ranks(restored[1], restore_and_go_on, str(tmp_path), restored[0], optimizer)
    # DDP reduces its first gradients after a restart in other buckets, so in another order.
    exact = saved == restored and saved[0] != "ddp"
    for one in found:
        assert_same(unpacked(one), expected, exact=exact)
    names = set(expected["model"])
    assert names == {
        "module.weight", "module.bias", "scale", "frozen", "head.weight", "back.weight", "seen",
    }  # fmt: skip
    assert set(expected["optimizer"]["state"]) == names - {"frozen", "back.weight", "seen"}


@pytest.mark.parametrize("kind", ["fsdp2", slow("fsdp2-kept-whole")])
def test_an_evaluation_before_the_save(tmp_path: Path, kind: str) -> None:
    """It leaves the parameters whole in FSDP2's modules, and those are not the optimizer's."""
    expected, names = run_ranks(2, save_evaluated, str(tmp_path), kind)[0]
    assert set(names) == {"module.weight", "module.bias", "scale", "head.weight"}
    for found in run_ranks(2, restore_and_go_on, str(tmp_path), kind, "AdamW"):
        assert_same(unpacked(found), unpacked(expected), exact=True)


def fsdp1(path: str) -> dict[str, Any]:
    """Saves, goes on, and goes on again from what was saved; returns the parameters."""
    state = make("fsdp1", "AdamW", seed=0)
    train(state, BEFORE)
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    train(state, AFTER)
    restored = make("fsdp1", "AdamW", seed=1)
    AppState(restored).load(pyckpt.DirectReader(path))
    train(restored, AFTER)
    found, expected = (
        {name.removeprefix("_fsdp_wrapped_module."): p.tolist() for name, p in named(one["model"])}
        for one in (restored, state)
    )
    assert found == expected
    return found


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    with FullyShardedDataParallel.summon_full_params(model):
        return [(name, param.detach().clone()) for name, param in model.named_parameters()]


def test_fsdp1(tmp_path: Path) -> None:
    expected, other = run_ranks(2, fsdp1, str(tmp_path))
    assert other == expected
    (found,) = run_ranks(1, restore_and_go_on, str(tmp_path), "plain", "AdamW")
    model = unpacked(found)["model"]
    for name, value in expected.items():
        assert_same(model[name], torch.tensor(value, dtype=torch.float64), name, exact=False)


def written_in_forward(kind: str) -> tuple[int, int, int]:
    """How many storages may be copied late before and after it is known what forward changes, and
    how many parameters that are."""
    model: nn.Module = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 4))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    objects = AppState({"model": model, "optimizer": optimizer})
    model(torch.arange(6))
    objects.state_dict()
    stager = pyckpt.PinnedStager(optimizers=[optimizer])
    before = len(stager._guarded_storages() or ())
    stager.copy_at_call(objects.written_in_forward)
    return before, len(stager._guarded_storages() or ()), len(objects.written_in_forward)


@pytest.mark.parametrize("kind", ["fsdp2", slow("ddp")])
def test_parameters_that_forward_changes_in_wrapped_modules(kind: str) -> None:
    assert run_ranks(1, written_in_forward, kind) == [(3, 2, 1)]


def own_keys(path: str) -> None:
    """An optimizer of FSDP1, with state under keys of its own."""
    world = dist.get_world_size()

    def make(own: dict[str, Any]) -> tuple[Any, Any]:
        model = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.state.update(own)
        return model, optimizer

    own = {"global": {"n": 3, "best": torch.ones(2)}, "number": 4, "zero": 0, "none": None}
    model, optimizer = make(own)
    model(torch.ones(world, 4)).sum().backward()
    optimizer.step()
    saved = AppState({"model": model, "optimizer": optimizer}).state_dict()
    dcp.save(saved, storage_writer=pyckpt.DirectWriter(path), planner=pyckpt.SavePlanner())
    for begun in ({}, {"zero": 5, "global": {"n": 0, "best": torch.zeros(2)}}):
        model, optimizer = make(begun)
        AppState({"model": model, "optimizer": optimizer}).load(pyckpt.DirectReader(path))
        found = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
        best = found["global"].pop("best")
        assert best.tolist() == [1, 1]
        assert found == {"global": {"n": 3}, "number": 4, "zero": 0, "none": None}
        assert len(optimizer.state) > len(found)


def test_state_of_no_parameter_in_fsdp1(tmp_path: Path) -> None:
    run_ranks(2, own_keys, str(tmp_path))
