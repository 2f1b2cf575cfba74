"""What `placement`, `check`, `repair` and `move` promise besides the matrix: nothing live is
touched, everything travels at once, and what is not known is left alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from _optimizers import on_device, parameters, places, step
from _simulated_cuda import CUDA, Simulation, simulated_cuda, values
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import optimizer as optimizer_module

from pyckpt import optim
from pyckpt.optim import clone, learning
from pyckpt.optim import places as places_module


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_cuda() as simulation:
        yield simulation


@pytest.fixture(autouse=True)
def _nothing_learned() -> None:
    learning._learned.clear()
    learning._reads.clear()


def on_gpu(optimizer: torch.optim.Optimizer) -> None:
    """What Lightning #19955 did to it."""
    for param, state in list(optimizer.state.items()):
        optimizer.state[param] = on_device(state, CUDA)


# --- learning ---------------------------------------------------------------------------------


def test_a_fresh_optimizer_on_a_fake_gpu() -> None:
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.empty(8, 8, device="cuda", dtype=torch.bfloat16))
        optimizer = torch.optim.NAdam([param])
        native = optim.placement(optimizer)[param]
        cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
        assert native == {
            "step": optim.Placement("host", torch.float32, cpu),
            "mu_product": optim.Placement("host", torch.float32, cpu),
            "exp_avg": optim.Placement("device", torch.bfloat16, gpu),
            "exp_avg_sq": optim.Placement("device", torch.bfloat16, gpu),
        }
        assert optimizer.state == {}


def test_learning_asks_for_no_other_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first fake tensor on a GPU, torch makes a real one: without an index, on the thread's
    current GPU, which may be another rank's, and full."""
    asked: list[torch.device] = []
    monkeypatch.setattr(fake_tensor, "init_gpu_context", asked.append)
    gpu = torch.device("cuda", 3)
    with FakeTensorMode():
        params = [
            torch.nn.Parameter(torch.empty(shape, device=gpu)) for shape in ((4, 3), (5, 5), (5, 5))
        ]
        optimizers = [torch.optim.Adam(params, capturable=True), torch.optim.NAdam(params)]
        optimizers[0].param_groups[0]["lr"] = torch.empty((), device=gpu)
        asked.clear()
        for optimizer in optimizers:
            native = optim.placement(optimizer)
            assert native[params[0]]["exp_avg"].device == gpu
    assert set(asked) == {gpu}
    asked.clear()
    spec = clone.Spec.of(params[0])
    group = optimizers[1].param_groups[0]
    assert learning.reads_of(optimizers[1], group, spec, ("step",), torch.device("cuda", 1))
    assert set(asked) == {gpu}
    asked.clear()
    # Parameters on the host whose state is to go to a GPU, or is on one.
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(7))])
    resolver = places_module.Resolver(adam, device=torch.device("cuda", 2))
    assert resolver.learned(0, adam.param_groups[0]["params"][0])
    assert set(asked) == {torch.device("cuda", 2)}
    asked.clear()
    spec = clone.Spec.of(torch.zeros(7, requires_grad=True))
    group = adam.param_groups[0]
    learning.reads_of(adam, group, spec, ("step",), torch.device("cuda", 1))
    assert set(asked) == {torch.device("cuda", 1)}


def test_what_was_learned_is_for_all_devices_of_a_type() -> None:
    with FakeTensorMode():
        specs = [clone.Spec.of(torch.empty(3, device=f"cuda:{index}")) for index in range(2)]
    assert specs[0] == specs[1]
    assert len(set(specs)) == 1
    assert specs[1].device == torch.device("cuda", 1)


def test_learning_touches_nothing(simulation: Simulation) -> None:
    calls: list[str] = []
    params = parameters(CUDA, torch.float32)
    lr = torch.tensor(0.01)
    optimizer = torch.optim.Adam(params, lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handles = [
        optimizer_module.register_optimizer_step_pre_hook(lambda *_: calls.append("all pre")),
        optimizer_module.register_optimizer_step_post_hook(lambda *_: calls.append("all post")),
    ]
    attributes = {key: repr(value) for key, value in vars(optimizer).items()}
    group = dict(optimizer.param_groups[0])
    generators = torch.get_rng_state(), random.getstate()
    simulation.counts.clear()
    try:
        optim.placement(optimizer)
        optim.check(optimizer)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == []
    assert {key: repr(value) for key, value in vars(optimizer).items()} == attributes
    assert optimizer.param_groups[0].keys() == group.keys()
    assert all(optimizer.param_groups[0][key] is value for key, value in group.items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert [p.grad for p in params] == [None, None]
    assert simulation.counts == {}
    assert scheduler.last_epoch == 0


class Inheriting(torch.optim.Adam):
    """Calls the ``step`` of a class that torch has wrapped too."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_hooks_stay_silent_through_super(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.float32)
    torch.optim.Adam(params)  # so that Adam.step is wrapped
    optimizer = Inheriting(params)
    calls: list[Any] = []
    handle = optimizer_module.register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    try:
        native = optim.placement(optimizer)
    finally:
        handle.remove()
    assert calls == []
    assert native[params[0]]["step"].kind == "host"
    step(optimizer, 0)
    assert type(optimizer) is Inheriting
    assert optim.check(optimizer) == []


def test_learned_once(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = learning._run
    monkeypatch.setattr(learning, "_run", lambda *args: runs.append(len(args[2])) or run(*args))
    params = [torch.zeros(shape, device="cuda") for shape in ((3,), (4,), (3,), (3, 3))]
    optimizer = torch.optim.Adam(params)
    optim.placement(optimizer)
    assert runs == [3]  # all shapes in one step
    optimizer.param_groups[0]["lr"] = 0.5
    optim.placement(optimizer)
    optim.placement(torch.optim.Adam(params))
    assert runs == [3]
    optim.placement(torch.optim.Adam(params, capturable=True))
    assert runs == [3, 3]


class Configured(torch.optim.Optimizer):
    """Decides about its state by attributes of its own."""

    def __init__(self, params: Any, **attributes: Any) -> None:
        super().__init__(params, {})
        self.dtype, self.where, self.like = torch.float32, {"moment": [torch.float32]}, zeros_like
        self.scale, self.record = 0.0, list(range(100))
        vars(self).update(attributes)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["a"] = torch.zeros_like(param, dtype=self.dtype)
            state["b"] = torch.zeros_like(param, dtype=self.where["moment"][0])
            state["c"] = self.like(param)
            if self.scale:
                state["d"] = torch.zeros(())


def zeros_like(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros(param.shape)


def test_attributes_decide_too(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    run = learning._run
    monkeypatch.setattr(learning, "_run", lambda *args: runs.append(len(args[2])) or run(*args))
    param = torch.zeros(3, device="cuda")
    different: list[tuple[dict[str, Any], str]] = [
        ({}, "{'a': cuda:0 float32, 'b': cuda:0 float32, 'c': host float32}"),
        (
            {"dtype": torch.bfloat16},
            "{'a': cuda:0 bfloat16, 'b': cuda:0 float32, 'c': host float32}",
        ),
        (
            {"where": {"moment": [torch.bfloat16]}},
            "{'a': cuda:0 float32, 'b': cuda:0 bfloat16, 'c': host float32}",
        ),
        (
            {"like": torch.zeros_like},
            "{'a': cuda:0 float32, 'b': cuda:0 float32, 'c': cuda:0 float32}",
        ),
        (
            {"scale": 0.5},
            "{'a': cuda:0 float32, 'b': cuda:0 float32, 'c': host float32, 'd': host float32}",
        ),
    ]
    for attributes, expected in different:
        native = optim.placement(Configured([param], **attributes))[param]
        said = ", ".join(f"{key!r}: {entry}" for key, entry in native.items())
        assert f"{{{said}}}" == expected
    assert len(runs) == len(different)
    optim.placement(Configured([param], scale=0.25, record=[0]))  # as before, and a record
    optim.placement(Configured([param], record=[0] * 1000))
    assert len(runs) == len(different) + 1


def test_a_default_device_on_the_gpu_is_not_native(simulation: Simulation) -> None:
    """NAdam then makes its scalars there itself, and pays for them."""
    params = parameters(CUDA, torch.float32)
    optimizer = torch.optim.NAdam(params)
    with torch.device("cuda"):
        step(optimizer, 0)
        wrong = optim.check(optimizer)
    assert {entry.key for entry in wrong} >= {"step", "mu_product"}
    assert all(entry.wanted.kind == "host" for entry in wrong)


# --- costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "flags", "costs"),
    [
        ("Adam", {"foreach": False}, {"step": 1}),
        ("Adam", {}, {"step": 2}),  # foreach is CUDA's default
        ("AdamW", {"foreach": True}, {"step": 2}),
        ("NAdam", {"foreach": False}, {"step": 1, "mu_product": 2}),
        ("NAdam", {}, {"step": 3, "mu_product": 2}),
        ("RAdam", {"foreach": False}, {"step": 1}),
        ("RAdam", {}, {"step": 5}),
        ("Adamax", {}, {"step": 1}),
        ("Adagrad", {}, {"step": 1}),
        ("Adadelta", {"foreach": False}, {"step": 0}),
        ("RMSprop", {}, {"step": 0}),
    ],
)
def test_what_a_misplaced_scalar_costs(
    simulation: Simulation, cls: str, flags: dict[str, Any], costs: dict[str, int]
) -> None:
    """Counted by reading the optimizers of torch 2.13; Adam's 2 is Lightning #19955."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("counted for torch 2.13")
    params = parameters(CUDA, torch.float32)[:1]
    optimizer = getattr(torch.optim, cls)(params, **flags)
    step(optimizer, 0)
    on_gpu(optimizer)
    found = {entry.key: entry.syncs for entry in optim.check(optimizer)}
    assert found == costs
    if flags.get("foreach") is False:
        step(optimizer, 1)
        simulation.counts.clear()
        optimizer.step()
        assert simulation.counts["read"] == sum(costs.values())


def test_what_check_says(simulation: Simulation) -> None:
    weight, bias = parameters(CUDA, torch.float32)
    optimizer = torch.optim.Adam([("weight", weight), ("bias", bias)])
    step(optimizer, 0)
    optimizer.state[bias]["step"] = optimizer.state[bias]["step"].to("cuda")
    optimizer.state[weight]["exp_avg"] = optimizer.state[weight]["exp_avg"].to("cpu")
    moment, scalar = optim.check(optimizer)
    assert (moment.name, moment.key, moment.param is weight) == ("weight", "exp_avg", True)
    assert moment.syncs is None
    assert str(moment) == "exp_avg of weight: host float32, belongs on cuda:0 float32"
    assert str(scalar) == (
        "step of bias: cuda:0 float32, belongs on host float32, 2 synchronisations a step"
    )
    unnamed = torch.optim.Adam([weight])
    step(unnamed, 0)
    on_gpu(unnamed)
    assert optim.check(unnamed)[0].name == "parameter 0 of group 0"


# --- repair -----------------------------------------------------------------------------------


class Odd(torch.optim.Optimizer):
    """Scalars of several dtypes on the host, in nested containers, and one that is on the GPU."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["count"] = torch.tensor(3, dtype=torch.int64)
                state["flag"] = torch.tensor(True)
                state["inner"] = {"step": torch.tensor([1.5], dtype=torch.float64), 7: [param * 2]}
                state["pair"] = (torch.tensor(2.5), torch.zeros(3, device=param.device))
                state["scale"] = torch.ones((), device=param.device)


def test_one_copy_for_scalars_of_any_kind_and_number(simulation: Simulation) -> None:
    params = [torch.zeros(2, 2, device="cuda") for _ in range(50)]
    optimizer = Odd(params)
    optimizer.step()
    native = places(optimizer)
    before = [values(optimizer.state[p]["inner"]["step"]).clone() for p in params]
    on_gpu(optimizer)
    inner = optimizer.state[params[0]]["inner"]
    simulation.counts.clear()
    repaired = optim.repair(optimizer)
    assert simulation.counts == {"d2h": 1}
    assert len(repaired) == 4 * 50
    assert repaired[2].key == ("inner", "step")
    assert places(optimizer) == native
    assert optimizer.state[params[0]]["inner"] is inner
    for param, expected in zip(params, before, strict=True):
        state = optimizer.state[param]
        assert torch.equal(state["inner"]["step"], expected)
        assert (int(state["count"]), bool(state["flag"]), float(state["pair"][0])) == (3, True, 2.5)
    for param in params:
        optimizer.state[param]["scale"] = optimizer.state[param]["scale"].to("cpu")
    simulation.counts.clear()
    optim.repair(optimizer)
    assert simulation.counts == {"h2d": 1}
    assert places(optimizer) == native
    assert optim.repair(optimizer) == []


def test_state_of_a_parameter_that_has_gone(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.float32)
    optimizer = torch.optim.Adam(params)
    step(optimizer, 0)
    del optimizer.param_groups[0]["params"][1]
    on_gpu(optimizer)
    found = [(entry.name, entry.key) for entry in optim.repair(optimizer)]
    assert found == [("parameter 0 of group 0", "step"), ("the optimizer", "step")]
    assert optimizer.state[params[1]]["step"].device.type == "cpu"


def test_each_scalar_owns_its_memory(simulation: Simulation) -> None:
    params = [torch.zeros(2, device="cuda") for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    step(optimizer, 0)
    on_gpu(optimizer)
    optim.repair(optimizer)
    steps = [optimizer.state[param]["step"] for param in params]
    assert [t.untyped_storage().nbytes() for t in steps] == [4, 4, 4]
    versions = [t._version for t in steps]
    steps[0].add_(1)
    assert [t._version for t in steps] == [versions[0] + 1, *versions[1:]]
    assert [float(t) for t in steps] == [2.0, 1.0, 1.0]


def test_one_tensor_of_many_parameters_stays_one(simulation: Simulation) -> None:
    params = [torch.zeros(2, device="cuda") for _ in range(3)]
    optimizer = torch.optim.Adam(params)
    step(optimizer, 0)
    shared = torch.tensor(4.0, device="cuda")
    for param in params:
        optimizer.state[param]["step"] = shared
    optim.repair(optimizer)
    assert len({id(optimizer.state[param]["step"]) for param in params}) == 1


def test_rounded_scalars_get_their_dtype_back(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.bfloat16)
    optimizer = torch.optim.ASGD(params)
    step(optimizer, 0)
    state = optimizer.state[params[0]]
    state["eta"] = state["eta"].to(torch.bfloat16)
    state["step"] = state["step"].to(torch.float64)  # wider than native: may be meant
    (entry,) = optim.repair(optimizer)
    assert (entry.key, entry.found.dtype) == ("eta", torch.bfloat16)
    assert state["eta"].dtype == torch.float32
    assert state["step"].dtype == torch.float64


# --- what is not known --------------------------------------------------------------------------


class Unrunnable(torch.optim.Optimizer):
    """Needs what a throw-away run cannot give it."""

    ran: ClassVar[int] = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any) -> None:
        Unrunnable.ran += 1
        for param in self.param_groups[0]["params"]:
            self.state[param] = {
                "host": torch.zeros(4),
                "gpu": torch.zeros(4, device=param.device),
            }


def test_what_is_not_known_stays(simulation: Simulation) -> None:
    param = torch.zeros(2, device="cuda")
    optimizer = Unrunnable([param])
    assert optim.placement(optimizer) == {param: {}}
    optimizer.step(None)
    native = places(optimizer)
    assert optim.placement(optimizer)[param]["host"] == optim.Placement("unknown")
    assert optim.check(optimizer) == []
    assert optim.repair(optimizer) == []
    optim.move(optimizer)
    assert places(optimizer) == native
    optim.move(optimizer, "cpu")
    assert set(places(optimizer)[0].values()) == {("cpu", torch.float32)}


def test_a_rule(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "_rules", {})
    seen = []

    def rule(
        optimizer: Any, group: Any, param: Any, path: Any, value: Any
    ) -> optim.Placement | None:
        seen.append((optimizer, group is optimizer.param_groups[0], param is None, path))
        return optim.Placement("host") if path == ("gpu",) else None

    param = torch.zeros(2, device="cuda")
    optimizer = Unrunnable([param])
    optimizer.step(None)
    before = Unrunnable.ran
    optim.register_placement(f"{__name__}.Unrunnable", rule)
    (entry,) = optim.repair(optimizer)
    assert Unrunnable.ran == before
    assert entry.key == "gpu"
    assert set(places(optimizer)[0].values()) == {("cpu", torch.float32)}
    assert seen[0] == (optimizer, True, False, ("host",))
    optim.register_placement(Unrunnable, lambda *_: None)
    assert optim.check(optimizer) == []


class Talkative(torch.optim.SGD):
    """Would talk to other ranks, and to a live optimizer behind it."""

    def __init__(self, params: Any, inner: Any) -> None:
        super().__init__(params)
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            self.state[param]["early"] = torch.zeros(())
            torch.ops.c10d.barrier(param, None, [], False, 0)
            self.inner.step()
            self.state[param]["late"] = torch.zeros(())


def test_learning_does_not_reach_what_is_live(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.float32)
    inner = torch.optim.Adam(params)
    optimizer = Talkative(params, inner)
    native = optim.placement(optimizer)[params[0]]
    assert {key: entry.kind for key, entry in native.items()} == {
        "early": "host",
        "step": "host",
        "exp_avg": "device",
        "exp_avg_sq": "device",
    }
    assert inner.state == {}


@pytest.mark.parametrize(
    "function", [optim.placement, optim.check, optim.repair, optim.move, optim.Offloader]
)
def test_something_else_than_an_optimizer(function: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(TypeError, match=r"builtins\.list is no optimizer"):
        function([optimizer])
    with pytest.raises(TypeError, match=r"Wrapping is no optimizer"):
        function(Wrapping(optimizer))


class Wrapping:
    """Has an optimizer, and nobody knows."""

    def __init__(self, inner: Any) -> None:
        self.inner = lambda: inner

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner().load_state_dict(state_dict)


def test_loading_something_else_than_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    saved = optimizer.state_dict()
    with pytest.raises(TypeError, match=r"builtins\.list is no optimizer"):
        optim.load_state_dict([optimizer], saved)
    optimizer.param_groups[0]["lr"] = 0.1
    optim.load_state_dict(Wrapping(optimizer), saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


# --- move ---------------------------------------------------------------------------------------


def test_shared_memory_stays_shared() -> None:
    """On real devices: from the CPU to "meta", which every machine has."""
    params = [torch.nn.Parameter(torch.zeros(6)) for _ in range(2)]
    optimizer = torch.optim.Adam(params)
    step(optimizer, 0)
    flat = torch.arange(12.0)
    for index, param in enumerate(params):
        optimizer.state[param]["exp_avg"] = flat[index * 6 : index * 6 + 6]
    optimizer.state[params[0]]["columns"] = flat.view(3, 4).t()
    optim.move(optimizer, "meta")
    first, second = (optimizer.state[param]["exp_avg"] for param in params)
    columns = optimizer.state[params[0]]["columns"]
    assert first.device.type == "meta"
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    assert second.storage_offset() == 6
    assert columns.untyped_storage()._cdata != 0
    assert columns.device.type == "cpu" or columns.stride() == (1, 4)
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}


def test_tensors_in_the_groups_and_in_int_keyed_state(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.float32)
    betas = (torch.tensor(0.9, device="cuda"), torch.tensor(0.99, device="cuda"))
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.1), betas=betas, capturable=True)
    step(optimizer, 0)
    optimizer.state[0] = {"exp_avg": torch.zeros(3, device="cuda"), "other": torch.zeros(3)}
    optimizer.state["alone"] = torch.zeros(3, device="cuda")
    optim.move(optimizer, "cpu")
    group = optimizer.param_groups[0]
    assert optimizer.state["alone"].device.type == "cpu"
    assert [beta.device.type for beta in group["betas"]] == ["cpu", "cpu"]
    assert optimizer.state[0]["exp_avg"].device.type == "cpu"
    optim.move(optimizer)
    assert optimizer.state[0]["exp_avg"].device.type == "cuda"
    assert optimizer.state[0]["other"].device.type == "cpu"
    assert group["lr"].device.type == "cpu"
    assert group["params"] is optimizer.param_groups[0]["params"]
