"""Optimizers of other packages, each at its release; where one cannot run without a GPU, a model of
the state that it makes, said to be one."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _optimizers import on_device, parameters, places, results, step
from _simulated_cuda import CUDA, SimulatedTensor, Simulation, simulated_cuda, values

from pyckpt import optim

pytestmark = pytest.mark.slow

Factory = Callable[[list[torch.Tensor]], Any]


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    with simulated_cuda() as simulation:
        yield simulation


def package(name: str) -> Any:
    """What these packages say when they are imported is not ours to fail for."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pytest.importorskip(name, exc_type=ImportError)
    finally:
        logging.disable(level)


def schedule_free(params: list[torch.Tensor]) -> Any:
    optimizer = package("schedulefree").AdamWScheduleFree(params, lr=0.01, warmup_steps=2)
    optimizer.train()
    return optimizer


def schedule_free_wrapper(params: list[torch.Tensor]) -> Any:
    wrapper = package("schedulefree").ScheduleFreeWrapper(
        torch.optim.SGD(params, lr=0.01, momentum=0.9)
    )
    wrapper.train()
    return wrapper


FACTORIES: dict[str, Factory] = {
    "Lion": lambda params: package("pytorch_optimizer").Lion(params, lr=0.01),
    "SOAP": lambda params: package("pytorch_optimizer").SOAP(params, lr=0.01),
    "Muon": lambda params: package("pytorch_optimizer").Muon(
        [{"params": params, "use_muon": True}]
    ),
    "HF Adafactor": lambda params: package("transformers.optimization").Adafactor(params),
    "schedule-free AdamW": schedule_free,
    "schedule-free wrapper": schedule_free_wrapper,
}


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FACTORIES)
def test_that_run_on_the_cpu(
    simulation: Simulation, name: str, dtype: torch.dtype, where: str
) -> None:
    params = parameters(CUDA, dtype)
    original = FACTORIES[name](params)
    for number in range(2):
        step(original, number)
    native = places(original)
    assert optim.check(original) == []
    copies = [param.detach().clone() for param in params]
    optimizer = FACTORIES[name](copies)
    optim.load_state_dict(optimizer, on_device(copy.deepcopy(original.state_dict()), where))
    assert places(optimizer) == native
    assert optim.check(optimizer) == []
    step(original, 7)
    step(optimizer, 7)
    for ours, theirs in zip(results(optimizer), results(original), strict=True):
        assert torch.equal(ours, theirs)
    optim.move(optimizer, "cpu")
    optim.move(optimizer)
    assert places(optimizer) == places(original)


def test_schedule_free_is_known_in_eval_mode(simulation: Simulation) -> None:
    """In which it does not step, and is saved and moved."""
    params = parameters(CUDA, torch.float32)
    optimizer = schedule_free(params)
    step(optimizer, 0)
    native = places(optimizer)
    optimizer.eval()
    optim.move(optimizer, "cpu")
    optim.move(optimizer)
    assert places(optimizer) == native
    assert not optimizer.param_groups[0]["train_mode"]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_counter_of_the_optimizer(simulation: Simulation, where: str) -> None:
    """MADGRAD's ``k`` is no parameter's, and read by each step."""
    params = parameters(CUDA, torch.float32)
    cls = package("pytorch_optimizer").MADGRAD
    optimizer, other = cls(params), cls(params)
    step(optimizer, 0)
    assert optim.check(optimizer) == []
    saved = on_device(copy.deepcopy(optimizer.state_dict()), where)
    optim.load_state_dict(other, saved)
    assert other.state["k"].device.type == "cpu"
    step(other, 1)
    assert (int(values(other.state["k"])), int(values(saved["state"]["k"]))) == (2, 1)

    other.load_state_dict(saved)
    found = [(m.name, m.key, m.syncs, m.param) for m in optim.check(other)]
    assert found == ([] if where == "cpu" else [("the optimizer", "k", 1, None)])
    optim.repair(other)
    assert other.state["k"].device.type == "cpu"
    assert optim.check(other) == []
    other.state["k"] = on_device(other.state["k"], CUDA)
    optim.move(other, "cpu")
    assert other.state["k"].device.type == "cpu"
    assert int(other.state["k"]) == 1


def test_a_dtype_among_the_attributes(simulation: Simulation) -> None:
    params = parameters(CUDA, torch.float32)
    cls = package("pytorch_optimizer").FAdam
    for dtype in (torch.float32, torch.bfloat16):
        optimizer = cls(params, momentum_dtype=dtype)
        assert optim.placement(optimizer)[params[0]]["momentum"].dtype == dtype


# --- torchao --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_torchao_low_bit(simulation: Simulation, name: str) -> None:
    """Its step is compiled and so not run here; its state is its own, by its own functions."""
    torchao = package("torchao.optim")
    params = [torch.zeros(64, 64, device="cuda"), torch.zeros(5, device="cuda")]
    optimizer = getattr(torchao, name)(params)
    learned = optim.placement(optimizer)
    for param in params:
        assert {key: entry.kind for key, entry in learned[param].items()} == {
            "step": "host",
            "exp_avg": "device",
            "exp_avg_sq": "device",
        }
        optimizer.state[param] = {
            "step": torch.tensor(3.0, device="cuda"),
            "exp_avg": optimizer._new_buffer(param, True),
            "exp_avg_sq": optimizer._new_buffer(param, False),
        }
    moment = optimizer.state[params[0]]["exp_avg"]
    assert type(moment) is not SimulatedTensor
    repaired = optim.repair(optimizer)
    assert [entry.key for entry in repaired] == ["step", "step"]
    assert optimizer.state[params[0]]["exp_avg"] is moment
    assert optimizer.param_groups[0]["lr"].device.type == "cpu"


def test_torchao_low_bit_values() -> None:
    torchao = package("torchao.optim")
    params = [torch.nn.Parameter(torch.randn(64, 64))]
    optimizer = torchao.AdamW8bit(params)
    state = {"step": torch.tensor(3.0)}
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = optimizer._new_buffer(params[0], key == "exp_avg")
        state[key].codes.random_(0, 255)
        state[key].scale.uniform_()
    optimizer.state[params[0]] = state
    other = torchao.AdamW8bit(params)
    optim.load_state_dict(other, optimizer.state_dict())
    loaded = other.state[params[0]]
    for key in ("exp_avg", "exp_avg_sq"):
        assert type(loaded[key]) is type(state[key])
        assert torch.equal(loaded[key].codes, state[key].codes)
        assert torch.equal(loaded[key].scale, state[key].scale)
        assert loaded[key].codes.data_ptr() != state[key].codes.data_ptr()
    assert other.param_groups[0]["lr"].device.type == "cpu"


class ModelOfCpuOffload:
    """A model of torchao 0.18's CPUOffloadOptimizer, whose constructor asks for a GPU: an object
    without ``state``, with an optimizer of CPU copies for each parameter and one for the rest."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        copies = [torch.zeros(tuple(param.shape)) for param in params[:-1]]
        self.optim_dict = {
            param: torch.optim.AdamW([copied])
            for param, copied in zip(params[:-1], copies, strict=True)
        }
        self.d_opt = torch.optim.AdamW(params[-1:])
        for inner in (*self.optim_dict.values(), self.d_opt):
            step(inner, 0)

    def state_dict(self) -> Any:
        return {
            "offloaded": [inner.state_dict() for inner in self.optim_dict.values()],
            "on-device": self.d_opt.state_dict(),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        # As it has it, not strictly.
        for inner, state in zip(self.optim_dict.values(), state_dict["offloaded"]):  # noqa: B905
            inner.load_state_dict(state)
        self.d_opt.load_state_dict(state_dict["on-device"])


def test_torchao_cpu_offload(simulation: Simulation) -> None:
    module = {"__module__": "torchao.optim.cpu_offload"}
    cls = type("CPUOffloadOptimizer", (ModelOfCpuOffload,), module)
    params = [torch.zeros(3, device="cuda"), torch.zeros(4, device="cuda")]
    optimizer = cls(params)
    inner = next(iter(optimizer.optim_dict.values()))
    native = places(inner), places(optimizer.d_opt)
    optim.load_state_dict(optimizer, on_device(optimizer.state_dict(), CUDA))
    assert (places(inner), places(optimizer.d_opt)) == native
    optim.move(optimizer)
    assert (places(inner), places(optimizer.d_opt)) == native
    assert optim.check(optimizer) == []
    more = cls([torch.zeros(2, device="cuda"), *params])
    before = results(inner)
    for ours, theirs in ((optimizer, more), (more, optimizer)):
        with pytest.raises(ValueError, match=r"has \d offloaded parameters and the checkpoint \d"):
            optim.load_state_dict(ours, theirs.state_dict())
    offloaded = {"offloaded": optimizer.state_dict()["offloaded"]}
    with pytest.raises(ValueError, match="Only the optimizer has parameters that are not"):
        optim.load_state_dict(optimizer, offloaded)
    assert all(map(torch.equal, results(inner), before))


def test_torchao_cpu_offload_is_what_its_model_says() -> None:
    package("torchao.optim")
    from torchao.optim.cpu_offload import CPUOffloadOptimizer

    assert not issubclass(CPUOffloadOptimizer, torch.optim.Optimizer) or not hasattr(
        CPUOffloadOptimizer, "state"
    )
    source = inspect.getsource(CPUOffloadOptimizer)
    for said in ("self.optim_dict", "self.d_opt", '"offloaded"', '"on-device"'):
        assert said in source


# --- bitsandbytes ---------------------------------------------------------------------------------


def initialised_bnb(name: str, params: list[torch.Tensor], **options: Any) -> Any:
    """The state as its own ``init_state`` makes it; its kernels need a GPU."""
    bitsandbytes = package("bitsandbytes")
    optimizer = getattr(bitsandbytes.optim, name)(params, **options)
    optimizer.check_overrides()
    for index, param in enumerate(params):
        param.grad = torch.zeros_like(param)
        optimizer.init_state(optimizer.param_groups[0], param, 0, index)
    return optimizer


def test_bitsandbytes_8_bit(simulation: Simulation) -> None:
    params = [torch.zeros(64, 64, device="cuda"), torch.zeros(8, device="cuda")]
    optimizer = initialised_bnb("Adam8bit", params)
    native = places(optimizer)
    assert native[0][("state1",)] == ("cuda", torch.uint8)
    assert optim.check(optimizer) == []
    saved = on_device(copy.deepcopy(optimizer.state_dict()), "cpu")
    other = initialised_bnb("Adam8bit", params)
    optim.load_state_dict(other, saved)
    assert places(other) == native
    optim.move(other, "cpu")
    assert {place for state in places(other) for place, _ in state.values()} == {"cpu"}
    optim.repair(other)
    assert places(other) == native


def test_bitsandbytes_keeps_float32_state_of_bfloat16_parameters(simulation: Simulation) -> None:
    params = [torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)]
    optimizer = initialised_bnb("Adam", params)
    native = places(optimizer)
    assert native[0][("state1",)][1] == torch.float32
    other = initialised_bnb("Adam", params)
    optim.load_state_dict(other, on_device(copy.deepcopy(optimizer.state_dict()), "cpu"))
    assert places(other) == native


def test_bitsandbytes_paged(simulation: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """``get_paged`` allocates unified memory, which takes CUDA; a CPU tensor with the attributes
    that it sets stands for it, as `bitsandbytes.functional.get_paged` of 0.50 makes it."""
    functional = package("bitsandbytes.functional")
    allocated = []

    def get_paged(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = torch.zeros(shape, dtype=dtype)
        buffer.is_paged = True  # type: ignore[attr-defined]
        buffer.page_deviceid = device.index  # type: ignore[attr-defined]
        allocated.append(buffer)
        return buffer

    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(functional, "fill", lambda tensor, value, *_: tensor.fill_(value))
    params = [torch.zeros(400, 300, device="cuda"), torch.zeros(8, device="cuda")]
    optimizer = initialised_bnb("PagedAdamW", params)
    state = optimizer.state[params[0]]
    assert optim.check(optimizer) == []
    optim.move(optimizer)
    optim.move(optimizer, "cuda")
    assert optimizer.state[params[0]]["state1"] is allocated[0]
    assert optim.placement(optimizer)[params[0]]["state1"].kind == "paged"
    assert optim.placement(optimizer)[params[1]]["state1"].kind == "device"
    state["state1"].fill_(2.5)
    saved = copy.deepcopy(optimizer.state_dict())
    other = initialised_bnb("PagedAdamW", params)
    optim.load_state_dict(other, saved)  # its own method takes it out of paged memory
    loaded = other.state[params[0]]["state1"]
    assert loaded.is_paged
    assert any(loaded is buffer for buffer in allocated)
    assert any(loaded is buffer for buffer in other.page_mng.paged_tensors)
    assert torch.equal(loaded, state["state1"])
    assert optim.check(other) == []


# --- models of what takes a GPU, or a compiler, to have at all -----------------------------------


def model(name: str) -> type[torch.optim.Optimizer]:
    """A class by another's name, that cannot step."""

    def cannot_step(self: Any, closure: Any = None) -> None:
        raise AssertionError("needs its native extension")

    module, _, cls = name.rpartition(".")
    return type(cls, (torch.optim.Optimizer,), {"__module__": module, "step": cannot_step})


def test_a_model_of_deepspeed_cpu_adam(simulation: Simulation) -> None:
    """DeepSpeedCPUAdam: float32 moments on the host whatever the parameters are; ``step_subgroup``
    keys them by the subgroup's number."""
    cls = model("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam")
    param = torch.zeros(4, device="cuda", dtype=torch.bfloat16)
    optimizer = cls([param], {"lr": 0.1})
    optimizer.state[param] = {"step": 3, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    optimizer.state[0] = {"step": 3, "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}
    optim.move(optimizer)
    optim.move(optimizer, "cuda")
    assert optim.check(optimizer) == []
    for state in optimizer.state.values():
        assert (state["exp_avg"].device.type, state["exp_avg"].dtype) == ("cpu", torch.float32)
    optimizer.state[param] = on_device(optimizer.state[param], CUDA)
    optimizer.state[0] = on_device(optimizer.state[0], CUDA)
    assert len(optim.repair(optimizer)) == 4
    del optimizer.state[0]
    other = cls([param], {"lr": 0.1})
    optim.load_state_dict(other, on_device(optimizer.state_dict(), CUDA))
    state = other.state[param]
    assert (state["exp_avg"].device.type, state["exp_avg"].dtype) == ("cpu", torch.float32)
    assert state["step"] == 3


@pytest.mark.parametrize("capturable", [False, True])
def test_a_model_of_apex_fused_adam(simulation: Simulation, capturable: bool) -> None:
    """apex's FusedAdam: float32 moments; ``step`` in the group, an int, or with ``capturable`` an
    int32 tensor beside the parameters, as ``lr`` is then too."""
    cls = model("apex.optimizers.fused_adam.FusedAdam")
    param = torch.zeros(4, device="cuda", dtype=torch.bfloat16)

    def made() -> Any:
        lr = torch.tensor(0.1, device="cuda") if capturable else 0.1
        optimizer = cls([param], {"lr": lr})
        optimizer.capturable = capturable
        return optimizer

    optimizer = made()
    moments = {key: torch.ones(4, device="cuda") for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[param] = moments
    count = torch.tensor([5], dtype=torch.int32, device="cuda") if capturable else 5
    optimizer.param_groups[0]["step"] = count
    native = places(optimizer)
    assert optim.check(optimizer) == []
    other = made()
    optim.load_state_dict(other, on_device(optimizer.state_dict(), "cpu"))
    assert places(other) == native
    loaded = other.param_groups[0]["step"]
    if capturable:
        assert (loaded.device.type, loaded.dtype) == ("cuda", torch.int32)
        assert other.param_groups[0]["lr"].device.type == "cuda"
        optim.move(other, "cpu")
        assert other.param_groups[0]["step"].device.type == "cpu"
        optim.move(other)
        assert other.param_groups[0]["step"].device.type == "cuda"
        other.param_groups[0]["step"] = other.param_groups[0]["step"].to("cpu")
        (entry,) = optim.repair(other)
        assert str(entry) == "step of group 0: host int32, belongs on cuda:0 int32"
        assert other.param_groups[0]["step"].device.type == "cuda"
    else:
        assert loaded == 5
