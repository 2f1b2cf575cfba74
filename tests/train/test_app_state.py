"""AppState in one process: every kind of object that a training state is made of."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import sampled
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pyckpt
from pyckpt.errors import LoadError, SaveError, UnsafeCheckpoint
from pyckpt.train.state.app_state import AppState
from pyckpt.train.state.optimizers import OptimizerEntry


def save(objects: dict[str, Any], path: Path) -> None:
    dcp.save(AppState(objects).state_dict(), storage_writer=pyckpt.DirectWriter(path))


def load(objects: Any, path: Path, **options: Any) -> pyckpt.LoadReport:
    return AppState(objects).load(pyckpt.DirectReader(path), **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()
    optimizer.step()


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


# --- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adamax": {},
    "ASGD": {},
    "LBFGS": {"history_size": 3},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def make_optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=lr, **OPTIMIZERS[name])


def closure_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("name", sampled(((name,) for name in OPTIMIZERS), 2))
def test_a_fresh_optimizer_goes_on_as_the_saved_one(name: str, tmp_path: Path) -> None:
    model = net()
    optimizer = make_optimizer(name, model, lr=0.01)
    closure_step(model, optimizer)
    closure_step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)

    fresh = net(seed=1)
    other = make_optimizer(name, fresh, lr=0.5)
    initial = {id(param): param.data_ptr() for param in fresh.parameters()}
    load({"model": fresh, "optimizer": other}, tmp_path)
    assert {id(param): param.data_ptr() for param in fresh.parameters()} == initial
    assert other.param_groups[0]["lr"] == 0.01
    for _ in range(3):
        closure_step(model, optimizer)
        closure_step(fresh, other)
    assert_equal(fresh.state_dict(), model.state_dict())
    assert_equal(other.state_dict(), optimizer.state_dict())


class Wide(nn.Module):
    """With a parameter whose state is large enough that copies of it would count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(200, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] @ self.weight[:1]


def trained_wide() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    return model, optimizer


def test_loaded_state_is_not_copied_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained_wide()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    expected = optimizer.state_dict()["state"]

    made: list[int] = []
    create = OptimizerEntry.create

    def noted(*args: Any) -> Any:
        tensor = create(*args)
        if tensor is not None:
            made.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(OptimizerEntry, "create", noted)
    fresh = Wide()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    load({"model": fresh, "optimizer": other}, tmp_path)
    moments = [other.state[fresh.weight][key] for key in ("exp_avg", "exp_avg_sq")]
    assert sorted(tensor.data_ptr() for tensor in moments) == sorted(made)
    assert_equal(other.state_dict()["state"], expected)

    step(fresh, other)
    load({"model": fresh, "optimizer": other}, tmp_path)  # into what the optimizer has
    again = [other.state[fresh.weight][key] for key in ("exp_avg", "exp_avg_sq")]
    assert all(one is before for one, before in zip(again, moments, strict=True))
    assert_equal(other.state_dict()["state"], expected)


def test_a_hook_may_keep_the_state_that_it_sees(tmp_path: Path) -> None:
    model, optimizer = trained_wide()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = Wide()
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    seen: list[torch.Tensor] = []
    other.register_load_state_dict_pre_hook(
        lambda _, state: seen.append(state["state"][0]["exp_avg"])
    )
    load({"model": fresh, "optimizer": other}, tmp_path)
    assert seen[0].data_ptr() != other.state[fresh.weight]["exp_avg"].data_ptr()
    step(fresh, other)
    assert torch.equal(seen[0], optimizer.state[model.weight]["exp_avg"])


def test_flags_stay_live_and_options_are_restored(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.5, 0.6), foreach=False)
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1, fused=True)
    load({"model": fresh, "optimizer": other}, tmp_path)
    (group,) = other.param_groups
    assert (group["fused"], group["foreach"]) == (True, None)
    assert (group["lr"], group["betas"]) == (0.01, (0.5, 0.6))


def test_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    """And one that has, which takes back a state from before its first step."""
    model = net()
    save({"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.25)}, tmp_path)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer)
    load({"model": model, "optimizer": optimizer}, tmp_path)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_partly_initialised(tmp_path: Path) -> None:
    """DCP's own functions fake a step to make state, or take what there is for all of it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    other = torch.optim.Adam(fresh.parameters(), lr=0.01)
    load({"model": fresh, "optimizer": other}, tmp_path)
    assert set(other.state) == {fresh[0].weight}
    step(model, optimizer)
    step(fresh, other)
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_parameters_in_another_order_and_groups(tmp_path: Path) -> None:
    model = net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.5}, {"params": others, "lr": 0.125}], lr=0.01
    )
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    other = torch.optim.AdamW(
        [
            {"params": [p for p in reversed(list(fresh.parameters())) if p.dim() == 1]},
            {"params": [p for p in fresh.parameters() if p.dim() > 1]},
        ]
    )
    load({"model": fresh, "optimizer": other}, tmp_path)
    assert [g["lr"] for g in other.param_groups] == [0.125, 0.01]
    assert other.param_groups[1]["weight_decay"] == 0.5
    step(model, optimizer)
    step(fresh, other)
    assert_equal(fresh.state_dict(), model.state_dict())


def test_groups_that_do_not_fit(tmp_path: Path) -> None:
    model = net()
    save({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, tmp_path)
    bigger = nn.Sequential(*model, nn.Linear(4, 4))
    optimizer = torch.optim.SGD(bigger.parameters(), lr=0.1)
    with pytest.raises(LoadError, match=r"4\.weight"):
        load({"model": bigger, "optimizer": optimizer}, tmp_path)
    report = load({"model": bigger, "optimizer": optimizer}, tmp_path, missing="keep")
    assert report.kept == [
        "model.4.weight",
        "model.4.bias",
        "optimizer.4.weight",
        "optimizer.4.bias",
    ]


def test_state_of_parameters_that_are_gone(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    before = copy.deepcopy(fresh.state_dict())
    other = torch.optim.Adam(fresh[0].parameters(), lr=0.1)
    with pytest.raises(LoadError, match=r"optimizer.*does not have.*3\.weight"):
        load({"model": fresh, "optimizer": other}, tmp_path)
    assert_equal(fresh.state_dict(), before)


class Counting(torch.optim.SGD):
    """Keeps state of its own under keys that are no parameters."""

    def __init__(self, params: Any, own: dict[str, Any]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state.update(own)


OWN: dict[str, Any] = {
    "global": {"evals": 3, "best": torch.ones(2), "deep": {"w": torch.zeros(1), 5: "five"}},
    "plain": {"n": 1, "of": {"m": [2]}},
    "tensor": torch.arange(3),
    "list": [torch.ones(1), 2],
    "number": 4,
    "zero": 0,
    "none": None,
    "false": False,
    "empty": {},
}


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_state_of_no_parameter(fresh: bool, stepped: bool, tmp_path: Path) -> None:
    model = net()
    optimizer: Any = Counting(model.parameters(), copy.deepcopy(OWN))
    if stepped:
        step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)
    other = net(1)
    begun = {"global": {"evals": 0, "best": torch.zeros(2)}, "number": 0, "zero": 7, "none": 7}
    live: Any = Counting(other.parameters(), {} if fresh else begun)
    load({"model": other, "optimizer": live}, tmp_path)
    assert_equal(live.state_dict()["state"], optimizer.state_dict()["state"])
    # What is a parameter's that is gone is still told from it.
    if stepped:
        part = Counting(other[0].parameters(), {})
        with pytest.raises(LoadError, match=r"does not have \(4\): 1\.weight, 1\.bias"):
            load({"model": other, "optimizer": part}, tmp_path)
        load({"model": other, "optimizer": part}, tmp_path, unexpected="ignore")
        assert part.state["global"]["evals"] == 3


def test_state_of_no_parameter_in_earlier_checkpoints(tmp_path: Path) -> None:
    """It was taken apart as that of a parameter, and what is false was not saved."""
    model = net()
    own = {"global": OWN["global"]["best"], "counts": {"evals": 3, "best": torch.ones(2)}}
    optimizer: Any = Counting(model.parameters(), own)
    step(model, optimizer)
    state = AppState({"model": model, "optimizer": optimizer}).state_dict()
    state["optimizer"]["state"]["counts"].pop("pyckpt.keys")
    dcp.save(state, storage_writer=pyckpt.DirectWriter(tmp_path))
    counts = {"evals": 0, "best": torch.zeros(2)}
    live: Any = Counting(model.parameters(), {"counts": counts, "zero": 0})
    load({"model": model, "optimizer": live}, tmp_path)
    assert_equal(live.state["counts"], own["counts"])
    assert live.state["zero"] == 0
    # torch's own layout, by number
    pyckpt.save({"optimizer": optimizer}, tmp_path / "numbered")
    live = Counting(model.parameters(), {"counts": counts, "zero": 0})
    load({"optimizer": live}, tmp_path / "numbered")
    assert_equal(live.state["counts"], own["counts"])
    assert_equal(live.state_dict()["state"][0], optimizer.state_dict()["state"][0])


def test_gan(tmp_path: Path) -> None:
    """Two models, whose parameters have the same names, with an optimizer each and one of both."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        generator, critic = nn.Linear(4, 4), nn.Linear(4, 4)
        both = [*generator.parameters(), *critic.parameters()]
        return {
            "generator_optimizer": torch.optim.Adam(generator.parameters(), lr=0.1),
            "critic_optimizer": torch.optim.NAdam(critic.parameters(), lr=0.1),
            "both": torch.optim.RMSprop(both, lr=0.1),
            "generator": generator,
            "critic": critic,
        }

    def train(state: dict[str, Any]) -> None:
        for name in ("generator_optimizer", "critic_optimizer", "both"):
            step(nn.Sequential(state["generator"], state["critic"]), state[name])

    saved, restored = make(0), make(1)
    train(saved)
    save(saved, tmp_path)
    load(restored, tmp_path)
    train(saved)
    train(restored)
    assert_equal(AppState(restored).state_dict(), AppState(saved).state_dict())
    assert set(AppState(saved).state_dict()["both"]["state"]) == {
        "generator.weight", "generator.bias", "critic.weight", "critic.bias",
    }  # fmt: skip
    assert AppState(saved).optimizers == [saved[n] for n in saved if "optim" in n or n == "both"]


def test_an_optimizer_without_its_module(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    save({"optimizer": optimizer}, tmp_path)
    other = torch.optim.Adam(net(1).parameters(), lr=0.5)
    load({"optimizer": other}, tmp_path)
    assert_equal(other.state_dict(), optimizer.state_dict())


def test_stock_reads_the_layout(tmp_path: Path) -> None:
    """What `torch.distributed.checkpoint.state_dict` makes is what is saved."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    save({"model": model, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    other = torch.optim.Adam(fresh.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(fresh, other)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        fresh, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert_equal(fresh.state_dict(), model.state_dict())
    assert_equal(other.state_dict(), optimizer.state_dict())


# --- modules ------------------------------------------------------------------------------------


class Extra(nn.Module):
    """A module with a state that is no tensor, one shared submodule, and a hook on its state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.again = self.inner
        self.extra: Any = None
        self.register_buffer("transient", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.inner(x))


@pytest.mark.parametrize("extra", [{"scale": torch.ones(2), 3: 4}, {}, None, [1, 2], "text"])
def test_extra_state_and_shared_submodules(extra: Any, tmp_path: Path) -> None:
    model = Extra()
    model.extra = extra
    save({"model": model}, tmp_path)
    fresh = Extra()
    fresh.extra = "something else"
    load({"model": fresh}, tmp_path)
    assert_equal(fresh.extra, extra)
    assert_equal(fresh.inner.state_dict(), model.inner.state_dict())


def test_compiled_and_not(tmp_path: Path) -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(compiled.parameters(), lr=0.1)
    step(compiled, optimizer)
    assert set(AppState({"m": compiled}).state_dict()["m"]) == set(model.state_dict())
    save({"model": compiled, "optimizer": optimizer}, tmp_path)
    fresh = net(1)
    fresh[3] = torch.compile(fresh[3], backend="eager")
    other = torch.optim.Adam(fresh.parameters(), lr=0.1)
    load({"model": fresh, "optimizer": other}, tmp_path)
    assert_equal(list(fresh.state_dict().values()), list(model.state_dict().values()))
    assert_equal(other.state_dict(), optimizer.state_dict())


class Holder:
    """An object of the program's own around its modules."""

    def __init__(self, *modules: nn.Module) -> None:
        self.modules = list(modules)
        self.rows = [0, 1]

    def state_dict(self) -> dict[str, Any]:
        return {str(i): module.state_dict() for i, module in enumerate(self.modules)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def written(module: nn.Module) -> Any:
    """Names of the parameters that its forward pass changes, as far as that is known."""
    ids = {id(tensor) for tensor in AppState({"m": module}).written_in_forward}
    return {name for name, parameter in module.named_parameters() if id(parameter) in ids}


def test_parameters_that_forward_changes() -> None:
    changed = nn.Embedding(5, 4, max_norm=0.1)
    model = nn.Sequential(nn.Sequential(changed), nn.Linear(4, 4))
    assert written(model) == {"0.0.weight"}
    assert written(nn.Embedding(5, 4)) == set()
    assert written(nn.EmbeddingBag(5, 4, max_norm=1.0)) == {"weight"}
    assert written(torch.compile(model, backend="eager")) == {"_orig_mod.0.0.weight"}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.arange(5))
    after = model.state_dict()
    assert {name for name in before if not before[name].equal(after[name])} == {"0.0.weight"}
    for held in (pyckpt.Trainable(model), Holder(net(), model), {"a": model}, {"a": {"b": model}}):
        (found,) = AppState({"m": held}).written_in_forward
        assert found is changed.weight


def test_quantizers_that_learn_change_their_scale() -> None:
    quantization = pytest.importorskip("torch.ao.quantization._learnable_fake_quantize")
    observer = torch.ao.quantization.MovingAverageMinMaxObserver
    quantizer = quantization._LearnableFakeQuantize(observer, 0, 255, scale=1e-12)
    quantizer.enable_param_learning()
    assert written(nn.Sequential(quantizer)) == {"0.scale", "0.zero_point"}
    before = quantizer.scale.detach().clone()
    quantizer(torch.ones(3))
    assert not quantizer.scale.equal(before)


def test_a_module_without_state(tmp_path: Path) -> None:
    save({"activation": nn.ReLU()}, tmp_path)
    load({"activation": nn.ReLU()}, tmp_path)


SAVED_ALONE: dict[str, Any] = {"none": None, "tensor": torch.ones(2), "empty": nn.ReLU()}


@pytest.mark.parametrize("saved", SAVED_ALONE)
def test_a_module_for_which_one_value_was_saved(saved: str, tmp_path: Path) -> None:
    save({"ema": SAVED_ALONE[saved], "other": 1}, tmp_path)
    ema = net()
    before = copy.deepcopy(ema.state_dict())
    names = {f"ema.{name}" for name in before}
    with pytest.raises(LoadError, match="ema: it was not saved as a module") as info:
        load({"ema": ema}, tmp_path)
    assert set(info.value.missing) == names
    report = load({"ema": ema, "other": 2}, tmp_path, missing="keep")
    assert (report.loaded, set(report.kept)) == (["other"], names)
    assert_equal(ema.state_dict(), before)


def adam() -> torch.optim.Optimizer:
    return torch.optim.Adam(net().parameters())


@pytest.mark.parametrize(
    "make",
    [adam, lambda: torch.optim.lr_scheduler.StepLR(adam(), 1), lambda: torch.amp.GradScaler("cpu")],
    ids=["optimizer", "scheduler", "scaler"],
)
def test_an_object_for_which_none_was_saved(make: Any, tmp_path: Path) -> None:
    save({"it": None, "other": 1}, tmp_path)
    it = make()
    before = copy.deepcopy(it.state_dict())
    with pytest.raises(LoadError, match="it: it was not saved as a") as info:
        load({"it": it}, tmp_path)
    assert info.value.missing == ("it",)
    report = load({"it": it, "other": 2}, tmp_path, missing="keep")
    assert (report.loaded, report.kept) == (["other"], ["it"])
    assert it.state_dict() == before


def test_what_a_module_has_not(tmp_path: Path) -> None:
    save({"model": net()}, tmp_path)
    smaller = net(1)[:1]
    before = copy.deepcopy(smaller.state_dict())
    with pytest.raises(LoadError, match=r"model.*3\.weight") as info:
        load({"model": smaller}, tmp_path)
    assert "model.3.weight" in info.value.unexpected
    assert_equal(smaller.state_dict(), before)


def meta_ones() -> torch.Tensor:
    return torch.ones(1, device="meta")


def test_a_meta_module_is_refused(tmp_path: Path) -> None:
    save({"model": net()}, tmp_path)
    with pytest.raises(LoadError, match="materialize"):
        load({"model": net().to("meta")}, tmp_path)
    for value in (net().to("meta"), {"l": [meta_ones()]}, Box({"a": meta_ones()})):
        with pytest.raises(TypeError, match=r"value\.\S+ is on the meta device; materialize"):
            AppState({"value": value}).state_dict()


def test_averaged_model(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model = net(seed)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        return {"ema": ema, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}

    def train(state: dict[str, Any]) -> None:
        step(state["model"], state["optimizer"])
        state["ema"].update_parameters(state["model"])

    saved, restored = make(0), make(1)
    train(saved)
    train(saved)
    save(saved, tmp_path)
    load(restored, tmp_path)
    assert restored["ema"].n_averaged == 2
    train(saved)
    train(restored)
    assert_equal(restored["ema"].state_dict(), saved["ema"].state_dict())


# --- schedulers, scalers, stateful objects ------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
            ],
            [2],
        ),
    ],
)
def test_schedulers(make: Any, tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return {"optimizer": optimizer, "scheduler": make(optimizer), "model": model}

    def train(state: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            step(state["model"], state["optimizer"])
            with warnings.catch_warnings():
                # SequentialLR calls deprecated code of torch's own.
                warnings.simplefilter("ignore")
                state["scheduler"].step()
            rates += [group["lr"] for group in state["optimizer"].param_groups]
        return rates

    saved, restored = build(), build()
    train(saved, 3)
    save(saved, tmp_path)
    load(restored, tmp_path)
    assert_equal(restored["scheduler"].state_dict(), saved["scheduler"].state_dict())
    assert train(restored, 5) == train(saved, 5)


def test_plateau_scheduler(tmp_path: Path) -> None:
    def build() -> Any:
        optimizer = torch.optim.SGD(net().parameters(), lr=1.0)
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    saved, restored = build(), build()
    save({"scheduler": saved}, tmp_path / "none yet")
    for loss in (3.0, 3.0, np.float64(3.0)):
        saved.step(loss)
    save({"scheduler": saved}, tmp_path / "some")
    load({"scheduler": restored}, tmp_path / "some")
    assert restored.state_dict() == saved.state_dict()
    load({"scheduler": restored}, tmp_path / "none yet")
    assert restored.best == float("inf")


def test_grad_scaler(tmp_path: Path) -> None:
    """Its scale is a tensor, which on a GPU costs a synchronisation to read."""

    def build(**options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", **options)

    saved = build(init_scale=1024.0)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    saved.scale(weight.sum() * float("inf")).backward()
    saved.step(optimizer)
    saved.update()
    state = AppState({"scaler": saved}).state_dict()
    assert isinstance(state["scaler"]["scale"], torch.Tensor)
    for name, scaler in (("used", saved), ("fresh", build(init_scale=8.0))):
        save({"scaler": scaler}, tmp_path / name)
        restored = build()
        load({"scaler": restored}, tmp_path / name)
        assert restored.state_dict() == scaler.state_dict()
    assert restored.get_scale() == 8.0
    save({"scaler": build(enabled=False)}, tmp_path / "off")
    load({"scaler": build(enabled=False)}, tmp_path / "off")


class Box:
    """Some object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Noisy(Box):
    """Draws random numbers whenever it is saved and restored."""

    def state_dict(self) -> Any:
        draw()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        draw()
        super().load_state_dict(state)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize("names", [("rng", "noisy", "data"), ("noisy", "data", "rng")])
def test_random_numbers_go_on_whatever_objects_draw(names: Any, tmp_path: Path) -> None:
    objects = {"rng": pyckpt.RngState(), "noisy": Noisy(1), "data": pyckpt.PerRank(Noisy(2))}
    state = {name: objects[name] for name in names}
    save(state, tmp_path)
    expected = draw()
    for fresh in (state, dict(reversed(state.items()))):
        load(fresh, tmp_path)
        assert draw() == expected
    assert tuple(AppState(state).state_dict()) == names


VALUES = {
    "nothing": {},
    "numbers": {"a": 1, "b": 2.5, "c": 1j, "d": True, "e": None, "f": "text", "g": b"bytes"},
    "keys": {1: "one", (2, "x"): "two", "three": 3},
    "nested": {"a": {"b": {"c": []}}, "d": [{}, {"e": {}}, [], [[{"f": 1}]]]},
    "tensors": {"t": torch.arange(3), "l": [torch.ones(2), {"x": torch.zeros(1)}, 3], "n": {}},
    "tuples": {"t": (1, (2, [3])), "s": {1, 2}, "size": torch.Size([2, 3]), "d": torch.bfloat16},
    "tensors in tuples": {"t": (torch.ones(2), 1)},
    "counter": {"c": Counter("hello"), "o": OrderedDict({2: 1, 1: 2})},
    "numpy": {"a": np.arange(3, dtype=np.uint32), "deep": {1: np.ones((2, 2), np.float32)}},
}


@pytest.mark.parametrize("name", VALUES)
def test_states_of_objects_come_back_alike(name: str, tmp_path: Path) -> None:
    save({"box": Box(copy.deepcopy(VALUES[name]))}, tmp_path)
    for box in (Box({}), Box({"t": torch.zeros(3, dtype=torch.int64), "a": 3, "unknown": 1})):
        load({"box": box}, tmp_path)
        assert_equal(box.state, VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back_alike(name: str, tmp_path: Path) -> None:
    state = {"value": copy.deepcopy(VALUES[name]), "other": 1}
    save(state, tmp_path)
    for template in ({"value": None}, {"value": {}}, {"value": {9: 1}}, {"value": [1]}):
        load(template, tmp_path)
        assert_equal(template, {"value": VALUES[name]})


def test_plain_values_are_filled_in_place(tmp_path: Path) -> None:
    save(
        {"step": 7, "history": {"loss": [3.0, 2.0]}, "best": None, "weights": torch.ones(3)},
        tmp_path,
    )
    history: dict[str, Any] = {"loss": []}
    losses, weights = history["loss"], torch.zeros(3)
    state = {"step": 0, "history": history, "best": 1.5, "weights": weights}
    report = load(state, tmp_path)
    assert state == {"step": 7, "history": history, "best": None, "weights": weights}
    assert history == {"loss": [3.0, 2.0]}
    assert history["loss"] is losses
    assert weights.tolist() == [1, 1, 1]
    assert "weights" in report.loaded
    assert not report.left_out


def sgd(tensor: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor], lr=0.1, momentum=0.9)


def parameters(size: int, rows: int) -> dict[str, Any]:
    torch.manual_seed(size)
    leaf = torch.rand(size, requires_grad=True)
    state = {
        "params": {"w": leaf, "by number": {3: torch.rand(size, requires_grad=True)}},
        "list": [torch.rand(2), nn.Parameter(torch.rand(size))],
        "lists": {"l": [[torch.rand(size, requires_grad=True)], 1]},
        "alone": nn.Parameter(torch.rand(size)),
        "model": nn.Linear(size, 1),
        "buffer": torch.rand(rows),
        "optimizer": sgd(leaf),
    }
    leaf.sum().backward()
    state["optimizer"].step()
    return state


TRAINED = ("params.w", "params.by number.3", "list.1", "lists.l.0.0", "alone")


def test_trained_tensors_of_another_shape(tmp_path: Path) -> None:
    saved = parameters(4, rows=4)
    save(saved, tmp_path)
    live = parameters(5, rows=4)
    before = copy.deepcopy(live)
    with pytest.raises(LoadError, match="tensors of another shape") as info:
        load(live, tmp_path)
    assert set(info.value.mismatched) == {*TRAINED, "model.weight"}
    assert_equal(live["params"], before["params"])
    assert_equal(live["list"], before["list"])

    leaf, alone = live["params"]["w"], live["alone"]
    report = load(live, tmp_path, mismatched="keep")
    assert {*TRAINED, "model.weight"} <= set(report.kept)
    assert not set(report.kept) & set(report.loaded)
    assert live["params"]["w"] is leaf
    assert live["alone"] is alone
    assert_equal(live["params"], before["params"])
    assert_equal(live["list"], [saved["list"][0], before["list"][1]])
    assert_equal(live["lists"], before["lists"])
    assert_equal(live["buffer"], saved["buffer"])
    assert_equal(live["optimizer"].state[leaf], before["optimizer"].state[before["params"]["w"]])


def test_untrained_tensors_of_another_shape_are_data(tmp_path: Path) -> None:
    save({"buffer": torch.ones(4), "more": {"empty": torch.ones(3)}}, tmp_path)
    buffer = torch.zeros(5)
    live = {"buffer": buffer, "more": {"empty": torch.zeros(0)}}
    report = load(live, tmp_path, mismatched="keep")
    assert live["buffer"] is buffer
    assert buffer.tolist() == [0] * 5
    assert report.kept == ["buffer", "more.empty"]
    load(live, tmp_path)
    assert live["buffer"].tolist() == [1] * 4
    assert live["more"]["empty"].tolist() == [1] * 3


def test_an_empty_parameter_stays_the_one_that_is_trained(tmp_path: Path) -> None:
    save({"value": {"w": nn.Parameter(torch.zeros(0))}, "other": torch.ones(2)}, tmp_path)
    param = nn.Parameter(torch.zeros(0))
    live = {"value": {"w": param}}
    load(live, tmp_path)
    assert live["value"]["w"] is param
    with pytest.raises(LoadError, match=r"other: \(2,\) is not \(0,\)") as info:
        load({"other": param}, tmp_path)
    assert info.value.mismatched == ("other",)


ADDED = [  # what was saved, what the program has now, what it adds, and the two together
    ({"a": 1}, {"a": 0, "new": 2}, "value.new", {"a": 1, "new": 2}),
    ({}, {"new": 2}, "value.new", {"new": 2}),
    ({"a": {"b": 1}}, {"a": {"b": 0, "c": {}}}, "value.a.c", {"a": {"b": 1, "c": {}}}),
    ({"a": {}, "b": [1]}, {"a": {"b": 0}, "b": []}, "value.a.b", {"a": {"b": 0}, "b": [1]}),
]


@pytest.mark.parametrize(("saved", "live", "added", "both"), ADDED)
def test_keys_that_were_added_since_the_save(
    saved: Any, live: Any, added: str, both: Any, tmp_path: Path
) -> None:
    save({"value": saved, "weights": torch.ones(3)}, tmp_path)
    value = copy.deepcopy(live)
    state = {"value": value, "weights": torch.zeros(3)}
    with pytest.raises(LoadError, match=f"{added}; pass missing='keep'") as info:
        load(state, tmp_path)
    assert info.value.missing == (added,)
    assert value == live
    report = load(state, tmp_path, missing="keep")
    assert report.kept == [added]
    assert state["value"] is value
    assert value == both


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({1: "a"}, {1: "b", 2: "c"}),
        (Counter("a"), Counter("ab")),
        ([{"a": 1}], [{"a": 2, "b": 3}, 4]),
        (3, {"a": 1}),
        (None, {"a": 1}),
    ],
)
def test_what_is_data_comes_back_as_it_was(saved: Any, live: Any, tmp_path: Path) -> None:
    save({"value": saved}, tmp_path)
    for missing in ("error", "keep"):
        state = {"value": copy.deepcopy(live)}
        assert not load(state, tmp_path, missing=missing).kept
        assert_equal(state["value"], saved)


def test_numbers_of_numpy_become_python_s(tmp_path: Path) -> None:
    save({"loss": np.float32(0.5)}, tmp_path)
    state = {"loss": None}
    load(state, tmp_path)
    assert_equal(state["loss"], 0.5)


def test_an_array_of_no_parameter(tmp_path: Path) -> None:
    model = net()
    save({"optimizer": Counting(model.parameters(), {"hist": np.arange(3)})}, tmp_path)
    live: Any = Counting(model.parameters(), {"hist": np.zeros(3, dtype=np.int64)})
    load({"optimizer": live}, tmp_path)
    assert_equal(live.state["hist"], np.arange(3))


@pytest.mark.parametrize(
    "value", [np.datetime64("2020-01-01", "ns"), np.timedelta64(5, "s"), np.datetime64("NaT")]
)
def test_times_of_numpy_are_refused(value: Any) -> None:
    """Python's have no nanoseconds, and loading would run code to make them."""
    with pytest.raises(TypeError, match=r"when\.0 is or contains a numpy\.(datetime|timedelta)64"):
        AppState({"when": [value]}).state_dict()


def test_scalars_of_numpy(tmp_path: Path) -> None:
    scalars = [np.bool_(True), np.int8(-3), np.complex64(1j), np.str_("s"), np.bytes_(b"b")]
    save({"v": scalars}, tmp_path)
    state = {"v": None}
    load(state, tmp_path)
    assert_equal(state["v"], [True, -3, 1j, "s", b"b"])


def test_values_that_could_not_be_loaded_are_refused_when_saving() -> None:
    with pytest.raises(TypeError, match=r"config\.path.*PosixPath"):
        AppState({"config": {"path": Path("/")}}).state_dict()
    with pytest.raises(TypeError, match="RngState"):
        AppState({"nested": {"rng": pyckpt.RngState()}}).state_dict()


@pytest.mark.parametrize(
    "make",
    [lambda: {"g": net()}, lambda: [adam()], lambda: {"g": (Box({}),)}, lambda: {1: {2: Box({})}}],
    ids=["module", "optimizer", "other", "without tensors"],
)
def test_objects_with_a_state_must_be_entries(make: Any) -> None:
    allowed = [nn.Sequential, torch.optim.Adam, Box]
    with (
        torch.serialization.safe_globals(allowed),
        pytest.raises(TypeError, match="must be entries of the state itself"),
    ):
        AppState({"nets": make()}).state_dict()


def test_allowed_classes(tmp_path: Path) -> None:
    state = {"path": Path("/somewhere")}
    classes = [type(state["path"])]
    with torch.serialization.safe_globals(classes):
        save(state, tmp_path)
    with pytest.raises(UnsafeCheckpoint):
        load({"path": None}, tmp_path)
    restored = {"path": None}
    load(restored, tmp_path, allow=classes)
    assert restored == state


def test_values_need_a_mapping_to_go_to(tmp_path: Path) -> None:
    model = net()
    save({"model": model, "step": 3, "history": [1]}, tmp_path)
    fresh, history = net(1), [5]
    load(MappingProxyType({"model": fresh, "history": history}), tmp_path)
    assert history == [1]
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(TypeError, match="step"):
        load(MappingProxyType({"model": fresh, "step": 0}), tmp_path)
    assert_equal(fresh.state_dict(), before)


def test_what_the_checkpoint_has_not(tmp_path: Path) -> None:
    save({"model": net()}, tmp_path)
    state = {"model": net(1), "step": 3, "optimizer": torch.optim.SGD(net().parameters(), 0.5)}
    with pytest.raises(LoadError, match="step, optimizer") as info:
        load(state, tmp_path)
    assert info.value.missing == ("step", "optimizer")
    report = load(state, tmp_path, missing="keep")
    assert report.kept == ["step", "optimizer"]
    assert state["step"] == 3
    assert_equal(state["model"].state_dict(), net().state_dict())


def test_what_was_not_asked_for(tmp_path: Path) -> None:
    save({"model": net(), "step": 3, "rng": pyckpt.RngState()}, tmp_path)
    report = load({"model": net(1)}, tmp_path)
    assert "step" in report.left_out


def test_nothing_is_copied() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    values = {"t": torch.ones(2)}
    state = AppState({"model": model, "optimizer": optimizer, "values": values}).state_dict()
    assert state["model"]["0.weight"].data_ptr() == model[0].weight.data_ptr()
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert state["optimizer"]["state"]["0.weight"]["exp_avg"].data_ptr() == moments.data_ptr()
    assert state["values"]["t"].data_ptr() == values["t"].data_ptr()


class Unready:
    """An object whose state is not there yet, as of a loader that was not asked for a batch."""

    def state_dict(self) -> dict[str, Any]:
        return self.position  # type: ignore[attr-defined,no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class UnreadyLoader(torch.utils.data.DataLoader[int], Unready):
    """As Accelerate prepares loaders: it has the method, and no state."""


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Unready(), "this Unready raised AttributeError: .*'position'"),
        (pyckpt.PerRank(Unready()), "this Unready raised AttributeError: .*'position'"),
        (UnreadyLoader([1, 2]), "this UnreadyLoader raised .*only torchdata's StatefulDataLoader"),
    ],
)
def test_an_object_that_cannot_tell_its_state_is_named(value: Any, what: str) -> None:
    with pytest.raises(SaveError, match=rf"^data: state_dict\(\) of {what}") as error:
        AppState({"data": value}).state_dict()
    assert isinstance(error.value.__cause__, AttributeError)


class Views(nn.Module):
    """Buffers that are views of one memory: the first of them alone, or all."""

    def __init__(self, *views: torch.Tensor) -> None:
        super().__init__()
        for i, view in enumerate(views):
            self.register_buffer(f"b{i}", view)


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[::2],
        lambda memory: memory.view(torch.int16)[:4],
        lambda memory: memory[:1].expand(4),
    ],
)
def test_views_that_only_begin_alike_are_not_tied(tmp_path: Path, view: Any) -> None:
    save({"model": Views(torch.ones(8)[:4])}, tmp_path)
    memory = torch.arange(8.0)
    with pytest.raises(LoadError, match="b1"):
        load({"model": Views(memory[:4], view(memory))}, tmp_path)


def test_a_tied_tensor_that_was_saved_under_one_name_is_reported(tmp_path: Path) -> None:
    save({"model": Views(torch.ones(1, 4))}, tmp_path)
    memory = torch.zeros(1, 4)
    report = load({"model": Views(memory, memory.as_strided((1, 4), (9, 1)))}, tmp_path)
    assert torch.equal(memory, torch.ones(1, 4))
    assert report.loaded == ["model.b0", "model.b1"]
    assert report.kept == []
