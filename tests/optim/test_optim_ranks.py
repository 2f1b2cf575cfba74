"""Optimizer state of several ranks: ZeroRedundancyOptimizer, and FSDP2's DTensors."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _optimizers import places
from _ranks import run_ranks
from torch import Tensor, nn

from pyckpt import optim
from pyckpt.optim import buffers


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(dtype)


def train(model: nn.Module, optimizer: Any, number: int) -> None:
    torch.manual_seed(number)
    dtype = next(model.parameters()).dtype
    model(torch.randn(3, 6, dtype=dtype)).square().sum().backward()
    for param in model.parameters():
        local = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
        if not hasattr(param.grad, "to_local"):
            dist.all_reduce(local)
    optimizer.step()
    optimizer.zero_grad()


# --- ZeroRedundancyOptimizer --------------------------------------------------------------------


def zero(dtype: torch.dtype) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its neighbours use torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model = model_of(dtype)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.NAdam, lr=0.1)
    for number in range(3):
        train(model, optimizer, number)
    native = places(optimizer.optim)
    assert optim.check(optimizer) == []
    owned = [p for group in optimizer.optim.param_groups for p in group["params"]]
    learned = optim.placement(optimizer)
    assert set(map(id, learned)) == set(map(id, owned))
    saved: dict[str, Any] = {}
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            saved = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(saved)

    twin = copy.deepcopy(model)
    resumed = ZeroRedundancyOptimizer(twin.parameters(), torch.optim.NAdam, lr=0.5, foreach=True)
    optim.load_state_dict(resumed, saved)
    torch.testing.assert_close(saved, before, rtol=0, atol=0)  # its own method writes into it
    exact = [
        float(optimizer.optim.state[p]["mu_product"]) == float(resumed.optim.state[q]["mu_product"])
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
        if p in optimizer.optim.state
    ]
    flags = [group["foreach"] for group in (*resumed.param_groups, *resumed.optim.param_groups)]
    same_places = places(resumed.optim) == native
    train(model, optimizer, 9)
    train(twin, resumed, 9)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    # One steps all tensors at once, the other one by one: they may round differently.
    close = {"rtol": 0.05, "atol": 1e-3} if dtype is torch.bfloat16 else {}
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, **close)
    return {"exact": exact, "flags": flags, "same_places": same_places, "owned": len(owned)}


def zero_in_each_dtype() -> list[dict[str, Any]]:
    return [zero(dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.slow
def test_zero_redundancy_optimizer() -> None:
    for results in zip(*run_ranks(2, zero_in_each_dtype), strict=True):
        assert sum(result["owned"] for result in results) == 4
        for result in results:
            assert result["exact"]
            assert all(result["exact"])
            assert result["flags"] == [True] * len(result["flags"])
            assert result["same_places"]


# --- FSDP2 --------------------------------------------------------------------------------------


class HostBackend:
    """Copies at once; tensors with dimensions are "on the device"."""

    def __init__(self) -> None:
        self.copied = 0

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0

    def host_buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy_out(self, copies: Any) -> None:
        self.copied += len(copies)
        for host, storage in copies:
            host.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))

    def copy_in(self, copies: Any) -> None:
        for storage, host in copies:
            torch.empty(0, dtype=torch.uint8).set_(storage).copy_(host)

    def fence(self) -> None:
        return None

    def order_after(self, fence: None) -> None: ...

    wait = order_after


def sharded(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def fsdp() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    model, optimizer = sharded()
    for number in range(2):
        train(model, optimizer, number)
    learned = optim.placement(optimizer)
    assert optim.check(optimizer) == []
    weight = next(model.parameters())
    kinds = {key: str(entry.dtype) for key, entry in learned[weight].items()}

    twin, resumed = sharded()
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    saved = optimizer.state_dict()
    optim.load_state_dict(resumed, saved)
    moment = resumed.state[next(twin.parameters())]["exp_avg"]
    original = saved["state"][0]["exp_avg"]
    is_shard = (
        isinstance(moment, DTensor)
        and moment.placements == original.placements
        and moment.shape == original.shape
        and moment.to_local().data_ptr() != original.to_local().data_ptr()
    )

    backend = HostBackend()
    buffers.backend_for = lambda device: backend
    with optim.Offloader(resumed):
        freed = moment.to_local().untyped_storage().nbytes()
    train(model, optimizer, 9)
    train(twin, resumed, 9)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), theirs.to_local())

    optim.move(resumed, "meta")
    moved = resumed.state[next(twin.parameters())]
    return {
        "kinds": kinds,
        "is_shard": is_shard,
        "freed": freed,
        "copied": backend.copied,
        "local": moved["exp_avg"]._local_tensor.device.type,
        "whole": moved["exp_avg"].device.type,
        "is_dtensor": isinstance(moved["exp_avg"], DTensor),
        "step": moved["step"].device.type,
    }


@pytest.mark.slow
def test_dtensor_state() -> None:
    for result in run_ranks(2, fsdp):
        assert set(result["kinds"]) == {"step", "exp_avg", "exp_avg_sq"}
        assert result["is_shard"]
        assert result["freed"] == 0
        assert result["copied"] == 8
        assert (result["local"], result["whole"], result["is_dtensor"]) == ("meta", "meta", True)
        assert result["step"] == "cpu"


def dtypes() -> dict[str, Any]:
    """What a DTensor says of itself after its shard got another dtype."""
    model, optimizer = sharded(torch.bfloat16)
    for number in range(2):
        train(model, optimizer, number)
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].float()
    twin, resumed = sharded(torch.bfloat16)
    optim.load_state_dict(resumed, optimizer.state_dict())
    loaded = next(iter(resumed.state.values()))["exp_avg"]
    train(twin, resumed, 9)

    model, optimizer = sharded()
    train(model, optimizer, 0)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    repaired = optim.repair(optimizer)
    again = optim.check(optimizer)
    train(model, optimizer, 1)
    return {
        "loaded": [loaded.dtype, loaded._local_tensor.dtype, loaded._spec.tensor_meta.dtype],
        "repaired": len(repaired),
        "again": len(again),
    }


@pytest.mark.slow
def test_dtensor_state_of_another_dtype() -> None:
    for result in run_ranks(2, dtypes):
        assert result == {"loaded": [torch.bfloat16] * 3, "repaired": 4, "again": 0}
