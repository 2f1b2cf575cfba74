"""`optim.load_state_dict`: what it checks, keeps, converts and leaves alone, besides the matrix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _optimizers import on_device, parameters, places, step
from _simulated_cuda import CUDA, Simulation, simulated_cuda, values
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from pyckpt import optim


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_cuda() as simulation:
        yield simulation


def trained(cls: Any = torch.optim.Adam, count: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(2, 3 + index)) for index in range(count)]
    optimizer = cls(params, **options)
    step(optimizer, 0)
    return optimizer


def shapes(*sizes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(size)) for size in sizes]


# --- what does not fit --------------------------------------------------------------------------


def test_groups_that_are_missing() -> None:
    saved = trained().state_dict()
    optimizer = torch.optim.Adam([{"params": shapes((2, 3))}, {"params": shapes((2, 4))}])
    with pytest.raises(ValueError, match=r"2 parameter groups and the checkpoint 1: groups 1 are "
                       r"not in the checkpoint"):  # fmt: skip
        optim.load_state_dict(optimizer, saved)
    saved["param_groups"] *= 3
    with pytest.raises(ValueError, match="groups 2 are not in the optimizer"):
        optim.load_state_dict(optimizer, saved)


def test_parameters_that_are_missing_or_left_over() -> None:
    saved = trained().state_dict()
    with pytest.raises(ValueError, match="parameters 3 of the group are not in the checkpoint"):
        optim.load_state_dict(torch.optim.Adam(shapes((2, 3), (2, 4), (2, 5), (1,))), saved)
    optimizer = torch.optim.Adam(shapes((2, 3)))
    with pytest.raises(ValueError, match="Group 0 has 1 parameters and the checkpoint's 3: "
                       "parameters 1, 2 of the group are not in the optimizer"):  # fmt: skip
        optim.load_state_dict(optimizer, saved)
    assert optimizer.state == {}


def test_parameters_that_are_missing_by_name() -> None:
    a, b, c = shapes((2,), (3,), (4,))
    optimizer = torch.optim.Adam([("a", a), ("b", b)])
    step(optimizer, 0)
    saved = optimizer.state_dict()
    other = torch.optim.Adam([("a", a), ("b", b), ("head.c", c)])
    with pytest.raises(ValueError, match=r"'head\.c' not in the checkpoint"):
        optim.load_state_dict(other, saved)
    with pytest.raises(ValueError, match="'b' not in the optimizer"):
        optim.load_state_dict(torch.optim.Adam([("a", a)]), saved)


def test_parameters_in_another_order() -> None:
    a, b = shapes((3,), (3,))
    optimizer = torch.optim.Adam([("a", a), ("b", b)])
    step(optimizer, 0)
    other = torch.optim.Adam([("b", b), ("a", a)])
    optim.load_state_dict(other, optimizer.state_dict())
    for param in (a, b):
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
    assert other.param_groups[0]["param_names"] == ["b", "a"]


def test_parameters_of_other_names() -> None:
    a, b = shapes((3,), (3,))
    optimizer = torch.optim.Adam([("a", a), ("b", b)])
    step(optimizer, 0)
    saved = optimizer.state_dict()
    c, d = shapes((3,), (3,))
    other = torch.optim.Adam([("b", c), ("head", d)])  # as many, of the same shapes
    with pytest.raises(ValueError, match="'head' not in the checkpoint; 'a' not in the optimizer"):
        optim.load_state_dict(other, saved)
    assert other.state == {}
    prefixed = torch.optim.Adam([("module.a", c), ("module.b", d)])
    optim.load_state_dict(prefixed, saved)
    for ours, theirs in ((c, a), (d, b)):
        assert torch.equal(prefixed.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert prefixed.param_groups[0]["param_names"] == ["module.a", "module.b"]


def test_state_of_no_parameter() -> None:
    optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"][7] = saved["state"][0]
    with pytest.raises(ValueError, match="state of parameters 7, which are in none of its groups"):
        optim.load_state_dict(optimizer, saved)


def test_a_shape_that_does_not_fit() -> None:
    saved = trained().state_dict()
    optimizer = torch.optim.Adam(shapes((2, 3), (2, 5), (2, 5)))
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 1 of group 0 has the shape "
                       r"\(2, 4\) in the checkpoint, and the parameter \(2, 5\)"):  # fmt: skip
        optim.load_state_dict(optimizer, saved)
    assert optimizer.state == {}


def test_flags_are_one_of_two() -> None:
    with pytest.raises(ValueError, match="'live' or 'saved'"):
        optim.load_state_dict(trained(), {}, flags="both")  # type: ignore[arg-type]


# --- what is kept -------------------------------------------------------------------------------


def test_the_callers_dict_is_neither_changed_nor_shared() -> None:
    optimizer = trained(lr=torch.tensor(0.1), betas=(0.9, 0.99))
    saved = optimizer.state_dict()
    saved["param_groups"][0]["extra"] = {"list": [1, 2]}
    saved["state"]["global"] = {"tensor": torch.ones(2)}
    before = copy.deepcopy(saved)
    other = trained(lr=torch.tensor(0.2))
    optim.load_state_dict(other, saved)
    step(other, 1)
    for state in other.state.values():
        for tensor in state.values():
            tensor.fill_(7)
    other.param_groups[0]["lr"].fill_(7)
    other.param_groups[0]["extra"]["list"].append(3)
    torch.testing.assert_close(saved, before, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_the_callers_again() -> None:
    param = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.Adam([param])
    step(optimizer, 0)
    saved = optimizer.state_dict()
    pinned = saved["state"][0]["exp_avg"].cpu().pin_memory()
    expected = pinned.clone()
    saved["state"][0]["exp_avg"] = pinned
    torch.cuda._sleep(1 << 28)  # holds up what is queued
    optim.load_state_dict(optimizer, saved)
    pinned.fill_(7)
    assert torch.equal(optimizer.state[param]["exp_avg"].cpu(), expected)


def test_hooks_run() -> None:
    optimizer = trained()
    saved = optimizer.state_dict()
    other = torch.optim.Adam(shapes((2, 3), (2, 4), (2, 5)))
    seen = []

    def before(_: Any, state_dict: Any) -> Any:
        seen.append("pre")
        changed = dict(state_dict)
        changed["param_groups"] = [{**state_dict["param_groups"][0], "lr": 0.5}]
        return changed

    def after(loaded: Any) -> None:
        seen.append(f"post {len(loaded.state)}")

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(after)
    optim.load_state_dict(other, saved)
    assert seen == ["pre", "post 3"]
    assert other.param_groups[0]["lr"] == 0.5
    assert saved["param_groups"][0]["lr"] == 0.001


def test_options_come_from_the_checkpoint_and_flags_do_not() -> None:
    optimizer = trained(lr=0.3, weight_decay=0.1)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["eps"]  # as of a version that had no such option
    other = torch.optim.Adam(optimizer.param_groups[0]["params"], eps=0.5, foreach=True)
    optim.load_state_dict(other, saved)
    group = other.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["eps"]) == (0.3, 0.1, 0.5)
    assert group["foreach"] is True
    optim.load_state_dict(other, saved, flags="saved")
    assert other.param_groups[0]["foreach"] is None


def test_a_fused_optimizer_that_becomes_another_no_longer_unscales() -> None:
    saved = trained().state_dict()
    other = torch.optim.Adam(shapes((2, 3), (2, 4), (2, 5)), fused=True)
    optim.load_state_dict(other, saved)
    assert other._step_supports_amp_scaling
    optim.load_state_dict(other, saved, flags="saved")
    assert not other._step_supports_amp_scaling


# --- dtypes -------------------------------------------------------------------------------------


def test_float32_state_of_bfloat16_parameters_is_not_rounded() -> None:
    params = parameters("cpu", torch.bfloat16)
    optimizer = torch.optim.NAdam(params)
    for number in range(5):
        step(optimizer, number)
    other = torch.optim.NAdam(params)
    other.load_state_dict(optimizer.state_dict())
    exact = optimizer.state[params[0]]["mu_product"]
    assert other.state[params[0]]["mu_product"] != exact  # what torch does
    optim.load_state_dict(other, optimizer.state_dict())
    assert other.state[params[0]]["mu_product"] == exact
    assert other.state[params[0]]["mu_product"].dtype == torch.float32


@pytest.mark.parametrize(
    ("saved", "live"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["narrower", "wider"],
)
def test_another_precision_is_the_optimizers(saved: torch.dtype, live: torch.dtype) -> None:
    params = parameters("cpu", saved)
    optimizer = torch.optim.Adam(params)
    step(optimizer, 0)
    resumed = torch.optim.Adam([param.to(live) for param in params])
    optim.load_state_dict(resumed, optimizer.state_dict())
    state = next(iter(resumed.state.values()))
    assert state["exp_avg"].dtype == live
    assert state["step"].dtype == torch.float32
    step(resumed, 1)  # which it could not with moments of another dtype


def test_numbers_of_old_checkpoints() -> None:
    optimizer = trained()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = 5
    optim.load_state_dict(optimizer, saved)
    assert places(optimizer)[0][("step",)] == ("cpu", torch.float32)
    assert float(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) == 5.0


# --- shapes of state ------------------------------------------------------------------------------


class Nested(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state[3] = torch.zeros_like(param)
                state["inner"] = {"step": torch.tensor(0.0), "list": [torch.zeros_like(param), []]}
                state["pair"] = (torch.tensor(0.5), param.to(torch.float32) * 0)
                state["none"] = None
            state["inner"]["step"] += 1


def test_nested_state(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.bfloat16)
    optimizer = Nested(params)
    optimizer.step()
    saved = on_device(optimizer.state_dict(), CUDA)
    other = Nested(params)
    simulation.counts.clear()
    optim.load_state_dict(other, saved)
    assert simulation.counts == {"d2h": 1}
    assert places(other) == places(optimizer)
    state = other.state[params[0]]
    assert float(state["inner"]["step"]) == 1.0
    assert isinstance(state["pair"], tuple)
    assert state["inner"]["list"][1] == []
    assert state["none"] is None
    other.step()
    assert float(values(saved["state"][0]["inner"]["step"])) == 1.0


def test_shared_state_stays_shared() -> None:
    optimizer = trained(count=2)
    first, second = optimizer.param_groups[0]["params"]
    optimizer.state[second]["step"] = optimizer.state[first]["step"]
    flat = torch.arange(14.0)
    optimizer.state[first]["exp_avg"] = flat[:6].view(2, 3)
    optimizer.state[second]["exp_avg"] = flat[6:].view(2, 4)
    optim.load_state_dict(optimizer, optimizer.state_dict())
    states = optimizer.state[first], optimizer.state[second]
    assert states[0]["step"] is states[1]["step"]
    base = states[0]["exp_avg"]
    assert base.untyped_storage()._cdata == states[1]["exp_avg"].untyped_storage()._cdata
    assert base.untyped_storage()._cdata != flat.untyped_storage()._cdata
    assert torch.equal(states[1]["exp_avg"], flat[6:].view(2, 4))


# --- tensors in the groups ------------------------------------------------------------------------


@pytest.mark.parametrize("map_location", ["cpu", "cuda"])
def test_tensor_lr_and_betas_go_where_the_live_ones_are(
    simulation: Simulation, map_location: str
) -> None:
    params = parameters(CUDA, torch.float32)

    def made(lr: float) -> torch.optim.Adam:
        betas = (torch.tensor(0.9, device="cuda"), torch.tensor(0.99, device="cuda"))
        return torch.optim.Adam(
            params, lr=torch.tensor(lr, device="cuda"), betas=betas, capturable=True
        )

    optimizer, other = made(0.5), made(0.1)
    step(optimizer, 0)
    optim.load_state_dict(other, on_device(optimizer.state_dict(), map_location))
    group = other.param_groups[0]
    assert [t.device.type for t in (group["lr"], *group["betas"])] == ["cuda"] * 3
    assert float(values(group["lr"])) == 0.5
    plain = torch.optim.Adam(params, lr=0.1)
    optim.load_state_dict(plain, optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.5
    assert plain.param_groups[0]["betas"] == pytest.approx((0.9, 0.99))
    optim.load_state_dict(other, plain.state_dict())
    assert other.param_groups[0]["lr"].device.type == "cuda"
    optim.load_state_dict(plain, optimizer.state_dict(), flags="saved")
    assert plain.param_groups[0]["lr"].device.type == "cuda"


# --- optimizers that load themselves, or cannot be known ------------------------------------------


class LoadsItself(torch.optim.NAdam):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # Some keep what they were given, and write into it.
        state_dict["state"].clear()
        self.state[self.param_groups[0]["params"][0]]["extra"] = state_dict["extra"]


def test_an_optimizer_that_loads_itself(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.bfloat16)
    optimizer = LoadsItself(params)
    for number in range(3):
        step(optimizer, number)
    native = places(optimizer)
    saved = {**on_device(optimizer.state_dict(), CUDA), "extra": torch.ones(3)}
    other = LoadsItself(params, capturable=False, foreach=True)
    optim.load_state_dict(other, saved)
    assert len(saved["state"]) == 2
    assert other.param_groups[0]["foreach"] is True
    extra = other.state[params[0]].pop("extra")
    extra.fill_(0)
    assert torch.equal(saved["extra"], torch.ones(3))
    assert places(other) == native
    exact = optimizer.state[params[1]]["mu_product"]
    assert torch.equal(other.state[params[1]]["mu_product"], exact)


def test_lbfgs(simulation: Simulation) -> None:
    param = parameters(CUDA, torch.float32)[0]
    optimizer = torch.optim.LBFGS([param], max_iter=4)

    def closure() -> torch.Tensor:
        param.grad = param * 2
        return (param * param).sum()

    optimizer.step(closure)
    native = places(optimizer)
    assert len(native[0]) > 3
    assert optim.check(optimizer) == []
    other = torch.optim.LBFGS([param], max_iter=4)
    optim.load_state_dict(other, on_device(optimizer.state_dict(), "cpu"))
    assert places(other) == native
    assert optim.check(other) == []
    other.step(closure)


def test_sparse_adam() -> None:
    param = torch.nn.Parameter(torch.ones(5, 2))
    optimizer = torch.optim.SparseAdam([param])
    param.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2), check_invariants=True)
    optimizer.step()
    assert optim.placement(optimizer)[param]["exp_avg"].kind == "device"
    twin = torch.nn.Parameter(param.detach().clone())
    other = torch.optim.SparseAdam([twin])
    optim.load_state_dict(other, optimizer.state_dict())
    twin.grad = param.grad
    optimizer.step()
    other.step()
    assert torch.equal(param, twin)


def test_momentum_of_sparse_gradients() -> None:
    """Which SGD keeps as sparse as they are."""
    params = [torch.nn.Parameter(torch.ones(5, 2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params[:1], lr=0.1, momentum=0.9)
    other = torch.optim.SGD(params[1:], lr=0.1, momentum=0.9)
    gradient = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 2), (5, 2), check_invariants=True)
    params[0].grad = gradient.clone()
    optimizer.step()
    with torch.no_grad():
        params[1].copy_(params[0])
    saved = optimizer.state_dict()
    optim.load_state_dict(other, saved)
    buffer = other.state[params[1]]["momentum_buffer"]
    original = saved["state"][0]["momentum_buffer"]
    assert buffer.layout is torch.sparse_coo
    assert buffer._values().data_ptr() != original._values().data_ptr()
    assert torch.equal(buffer.to_dense(), original.to_dense())
    for param, stepping in zip(params, (optimizer, other), strict=True):
        param.grad = gradient.clone()
        stepping.step()
    assert torch.equal(*params)
    optim.move(other, "meta")
    assert other.state[params[1]]["momentum_buffer"].device.type == "meta"


# --- beside DCP's own functions -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"), [({}, {"fused": True}), ({"fused": True}, {}), ({}, {"capturable": True})]
)
def test_repair_after_dcp_has_mixed_the_flags(
    simulation: Simulation, before: dict[str, bool], after: dict[str, bool]
) -> None:
    """DCP places `step` by the new optimizer's flags, and then takes those of the checkpoint."""

    def made(flags: dict[str, bool]) -> tuple[torch.nn.Module, torch.optim.Adam]:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(parameters(CUDA, torch.float32)[0])
        return model, torch.optim.Adam(model.parameters(), **flags)

    model, optimizer = made(before)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer)
    other_model, other = made(after)
    set_optimizer_state_dict(other_model, other, saved)
    optim.repair(other)
    assert places(other) == places(optimizer)
    assert optim.check(other) == []
