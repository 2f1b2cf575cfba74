"""Checkpoints that are not quite of the state: other names, another head, layouts of other
programs, parameters without a module, a part of a module."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import RanksFailed, run_ranks
from torch import nn
from torch.optim import AdamW

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.train.state.app_state import AppState


def save(objects: dict[str, Any], path: Path | str) -> None:
    state = AppState(objects).state_dict()
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path), planner=pyckpt.SavePlanner())


def load(objects: Any, path: Path | str, **options: Any) -> pyckpt.LoadReport:
    return AppState(objects).load(pyckpt.DirectReader(path), **options)


class Net(nn.Module):
    def __init__(self, classes: int = 3, body: str = "body") -> None:
        super().__init__()
        self.body_name = body
        self.add_module(body, nn.Linear(4, 5))
        self.head = nn.Linear(5, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.tanh(getattr(self, self.body_name)(x)))
        return result


def trained(seed: int = 0, steps: int = 2, **options: Any) -> tuple[Net, AdamW]:
    torch.manual_seed(seed)
    model = Net(**options)
    optimizer = AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
    optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        {key: value.tolist() for key, value in optimizer.state.get(param, {}).items()}
        for param in params
    ]


def weights(model: nn.Module) -> list[Any]:
    return [param.tolist() for param in model.parameters()]


# --- raw layouts ----------------------------------------------------------------------------------


def saved_by_stock(model: nn.Module, optimizer: AdamW, path: Path) -> None:
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)


def saved_as_values(model: nn.Module, optimizer: AdamW, path: Path) -> None:
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def saved_in_the_first_form(model: nn.Module, optimizer: AdamW, path: Path) -> None:
    raw = {key: ("pyckpt.value", value) for key, value in optimizer.state_dict().items()}
    state = {"model": model.state_dict(), "optimizer": raw}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    "saved", [saved_by_stock, saved_as_values, saved_in_the_first_form], ids=lambda f: f.__name__
)
def test_raw_states_of_optimizers(saved: Any, fresh: bool, tmp_path: Path) -> None:
    model, optimizer = trained()
    saved(model, optimizer, tmp_path)
    other, others = trained(1, steps=0 if fresh else 1)
    load({"model": other, "optimizer": others}, tmp_path)
    assert moments(others) == moments(optimizer)
    assert others.param_groups[0]["lr"] == 0.1
    step(model, optimizer)
    step(other, others)
    assert weights(other) == weights(model)


def test_raw_states_with_names_in_another_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = AdamW(list(model.named_parameters()), lr=0.1)
    step(model, optimizer)
    saved_by_stock(model, optimizer, tmp_path)
    other, _ = trained(1)
    others = AdamW([*other.head.parameters(), *other.body.parameters()])
    load({"model": other, "optimizer": others}, tmp_path)
    for name, param in other.named_parameters():
        saved = optimizer.state[model.get_parameter(name)]["exp_avg"]
        assert torch.equal(others.state[param]["exp_avg"], saved)


def test_raw_states_of_other_parameters(tmp_path: Path) -> None:
    model, optimizer = trained()
    saved_by_stock(model, optimizer, tmp_path)
    with pytest.raises(LoadError, match=r"optimizer: .* does not have \(2\): 2, 3"):
        load({"model": model, "optimizer": AdamW(model.head.parameters())}, tmp_path)


# --- extra keys, another head, other names --------------------------------------------------------


def test_what_the_state_has_no_more(tmp_path: Path) -> None:
    model, optimizer = trained()
    model.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": list(model.extra.parameters())})
    model.extra(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    other, others = trained(1)
    with pytest.raises(LoadError, match=r"model: .* has not \(2\): extra.* unexpected='ignore'"):
        load({"model": other, "optimizer": others}, tmp_path)
    report = load({"model": other, "optimizer": others}, tmp_path, unexpected="ignore")
    assert {"model.extra.weight", "optimizer.state.extra.bias"} <= set(report.unexpected)
    assert weights(other) == weights(model)[:4]
    assert moments(others) == moments(optimizer)[:4]


def test_another_head(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    other, others = trained(1, classes=7)
    before = weights(other.head), moments(others)[2:]
    with pytest.raises(LoadError, match=r"another shape .*model\.head\.weight"):
        load({"model": other, "optimizer": others}, tmp_path)
    report = load({"model": other, "optimizer": others}, tmp_path, mismatched="keep")
    assert set(report.kept) == {
        "model.head.weight",
        "model.head.bias",
        "optimizer.state.head.weight",
        "optimizer.state.head.bias",
    }
    assert (weights(other.head), moments(others)[2:]) == before
    assert weights(other.body) == weights(model.body)
    assert moments(others)[:2] == moments(optimizer)[:2]
    step(other, others)


def test_a_new_part(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"model": model, "optimizer": optimizer}, tmp_path)
    other, others = trained(1)
    other.extra = nn.Linear(2, 2)
    others.add_param_group({"params": list(other.extra.parameters()), "lr": 7.0})
    report = load({"model": other, "optimizer": others}, tmp_path, missing="keep")
    assert {"model.extra.weight", "optimizer.extra.weight"} <= set(report.kept)
    assert moments(others)[:4] == moments(optimizer)
    assert [group["lr"] for group in others.param_groups] == [0.1, 7.0]


def test_other_names(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"net": model, "optimizer": optimizer}, tmp_path)
    other, others = trained(1, body="backbone")
    asked = []

    def rename(key: str) -> str:
        asked.append(key)
        key = key.replace("net.", "model.", 1) if key.startswith("net.") else key
        return key.replace("model.body.", "model.backbone.")

    load({"model": other, "optimizer": others}, tmp_path, rename=rename)
    assert weights(other) == weights(model)
    assert moments(others) == moments(optimizer)
    assert {"net.body.weight", "optimizer.state.body.weight.exp_avg"} <= set(asked)


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        (lambda key: "model.head.weight", "would both be model.head.weight"),
        (lambda key: None, "which is no key"),
    ],
)
def test_names_that_cannot_be(rename: Any, said: str, tmp_path: Path) -> None:
    model, _ = trained()
    save({"model": model}, tmp_path)
    with pytest.raises((LoadError, TypeError), match=said):
        load({"model": model}, tmp_path, rename=rename)


@pytest.mark.parametrize("name", ["missing", "unexpected", "mismatched"])
def test_a_policy_that_there_is_not(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be 'error' or '(keep|ignore)', not 'warn'"):
        load({}, tmp_path, **{name: "warn"})


def test_plain_states_with_another_head_and_other_names(tmp_path: Path) -> None:
    model, _ = trained()
    dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path)
    other, _ = trained(1, classes=7, body="backbone")
    head = other.head.weight.clone()
    state = {"model": other.state_dict()}
    with pytest.raises(LoadError, match=r"head\.weight"):
        pyckpt.load(state, tmp_path, rename=renamed)
    report = pyckpt.load(state, tmp_path, rename=renamed, mismatched="keep")
    assert report.kept == ["model.head.weight", "model.head.bias"]
    assert torch.equal(other.head.weight, head)
    assert torch.equal(other.get_parameter("backbone.weight"), model.get_parameter("body.weight"))
    with pytest.raises(ValueError, match="mismatched must be 'error' or 'keep'"):
        pyckpt.load(state, tmp_path, mismatched="warn")  # type: ignore[call-overload]


def renamed(key: str) -> str:
    return key.replace("net.", "model.").replace(".body.", ".backbone.")


# --- parameters without a module ------------------------------------------------------------------


def of_dict(order: list[str], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    tensors = {name: nn.Parameter(torch.randn(3)) for name in order}
    optimizer = AdamW([tensors[name] for name in order], lr=0.1)
    return {"params": tensors, "optimizer": optimizer}


def step_dict(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    for i, name in enumerate(sorted(state["params"])):
        (state["params"][name] * (i + 1)).sum().backward()
    state["optimizer"].step()


def test_parameters_in_a_dict_go_by_their_keys(tmp_path: Path) -> None:
    state = of_dict(["w", "a", "b"], 0)
    step_dict(state)
    save(state, tmp_path)
    other = of_dict(["b", "w", "a"], 1)
    before = dict(other["params"])
    load(other, tmp_path)
    for name, param in other["params"].items():
        assert param is before[name]  # still what the optimizer has
        mine = state["optimizer"].state[state["params"][name]]
        assert torch.equal(other["optimizer"].state[param]["exp_avg"], mine["exp_avg"])
        assert torch.equal(param, state["params"][name])
    step_dict(state)
    step_dict(other)
    assert all(torch.equal(other["params"][k], state["params"][k]) for k in before)


def test_names_that_the_optimizer_was_given(tmp_path: Path) -> None:
    params = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = AdamW(list(params.items()))
    sum(param.sum() * i for i, param in enumerate(params.values(), 1)).backward()  # type: ignore[union-attr]
    optimizer.step()
    save({"optimizer": optimizer}, tmp_path)
    other = AdamW(list(reversed(params.items())))
    load({"optimizer": other}, tmp_path)
    for param in params.values():
        assert torch.equal(other.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_parameters_without_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = of_dict(["w", "a"], 0)
    step_dict(state)
    with caplog.at_level("WARNING", logger="pyckpt"):
        for _ in range(2):
            AppState({"optimizer": state["optimizer"]}).state_dict()
    assert caplog.text.count("2 of its parameters are in no module and no dict of the state") == 1
    # A checkpoint of before, when nothing else had names either.
    save({"optimizer": state["optimizer"]}, tmp_path)
    other = of_dict(["w", "a"], 1)
    load({"params": other["params"], "optimizer": other["optimizer"]}, tmp_path, missing="keep")
    assert moments(other["optimizer"]) == moments(state["optimizer"])


# --- what is trained of a module ------------------------------------------------------------------


def adapted(seed: int) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(seed)
    model = nn.ModuleDict(
        {"base": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "adapter": nn.Linear(4, 4)}
    )
    model["norm"] = nn.BatchNorm1d(4)
    model["base"].requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    model["norm"](model["base"](x) + model["adapter"](x)).square().sum().backward()
    optimizer.step()
    return model, optimizer


KEPT = {
    "adapter.weight",
    "adapter.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
}


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_trained(whole: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = adapted(0)
    view = pyckpt.Trainable(model)
    with caplog.at_level(logging.INFO, logger="pyckpt"):
        save({"model": model if whole else view, "optimizer": optimizer}, tmp_path)
    if not whole:
        assert set(pyckpt.load(tmp_path)["model"]) == KEPT
        assert "model: 7 parameters and buffers are not trained and not saved: base." in caplog.text
    assert view.left_out == [name for name in model.state_dict() if name.startswith("base.")]
    other, others = adapted(1)
    base = {name: value.clone() for name, value in other["base"].state_dict().items()}
    load({"model": pyckpt.Trainable(other), "optimizer": others}, tmp_path)
    for name, value in other.state_dict().items():
        expected = model.state_dict()[name] if name in KEPT else base[name.removeprefix("base.")]
        assert torch.equal(value, expected)
    assert moments(others) == moments(optimizer)


def test_trainable_takes_modules() -> None:
    with pytest.raises(TypeError, match="takes a module, not dict"):
        pyckpt.Trainable({})  # type: ignore[arg-type]


# --- what each rank has its own of ----------------------------------------------------------------


def save_own(path: str) -> None:
    rank = dist.get_rank()
    own = {"samples": torch.arange(3) + 3 * rank, "names": [f"{rank}.{i}" for i in range(2)]}
    loader = {"batches": 7}
    save({"buffer": pyckpt.PerRank(own), "data": pyckpt.PerRank(loader)}, path)


def load_own(path: str, merging: bool) -> Any:
    merges = pyckpt.merges
    buffer = pyckpt.PerRank({}, merge=merges.share if merging else None)
    data = pyckpt.PerRank({}, merge=merges.first)
    load({"buffer": buffer, "data": data}, path)
    return buffer.value["samples"].tolist(), buffer.value["names"], data.value["batches"]


def test_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_own, str(tmp_path))
    assert run_ranks(1, load_own, str(tmp_path), True) == [
        ([0, 1, 2, 3, 4, 5], ["0.0", "0.1", "1.0", "1.1"], 7)
    ]
    assert run_ranks(3, load_own, str(tmp_path), True) == [
        ([0, 1], ["0.0", "0.1"], 7),
        ([2, 3], ["1.0"], 7),
        ([4, 5], ["1.1"], 7),
    ]
    with pytest.raises(
        RanksFailed, match=r"buffer: saved on 2 .*pyckpt\.PerRank\(it, merge=\.\.\."
    ):
        run_ranks(1, load_own, str(tmp_path), False)


@pytest.mark.parametrize("states", [[1, 2], [[1], {}], [{"a": []}, {"b": []}]])
def test_what_cannot_be_shared_out(states: list[Any]) -> None:
    with pytest.raises(LoadError, match=r"cannot be shared|different"):
        pyckpt.merges.share(states, 0, 1)
