"""Restores into a state whose objects share memory, or containers: each gets what was saved."""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.train.state.app_state import AppState
from pyckpt.train.state.claims import Claims, is_folded


def save(objects: dict[str, Any], path: Path) -> None:
    state = AppState(objects).state_dict()
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path), planner=pyckpt.SavePlanner())


def load(objects: Any, path: Path, **options: Any) -> pyckpt.LoadReport:
    return AppState(objects).load(pyckpt.DirectReader(path), **options)


def numbers(value: Any) -> Any:
    """A value with lists in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: numbers(sub) for key, sub in value.items()}
    return [numbers(sub) for sub in value] if isinstance(value, list | tuple) else value


def linear(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    for param in model.parameters():
        nn.init.constant_(param, value)
    return model


class Keeper:
    """Keeps the best weights, and hands out the tensors that it keeps."""

    def __init__(self, best: dict[str, Any]) -> None:
        self.best = best

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


@pytest.mark.parametrize("first", ["model", "best"])
@pytest.mark.parametrize("kind", ["dict", "object"])
def test_a_place_for_the_best_weights_may_hold_the_model_s(
    first: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """``best = {"weights": model.state_dict()}`` until there is something better."""
    make: Any = Keeper if kind == "object" else dict
    saved = {"model": linear(2), "best": make(best=copy.deepcopy(linear(1).state_dict()))}
    save(saved, tmp_path)
    model = linear(0)
    weight = model.weight
    state = {"model": model, "best": make(best=model.state_dict())}
    if first == "best":
        state = dict(reversed(list(state.items())))
    with caplog.at_level(logging.WARNING, "pyckpt"):
        load(state, tmp_path)
    best = state["best"].best if kind == "object" else state["best"]["best"]
    assert model.weight is weight
    assert numbers(model.state_dict()) == numbers(linear(2).state_dict())
    assert numbers(best) == numbers(linear(1).state_dict())
    # An object is handed what was loaded in any case.
    assert ("best.best.weight (model.weight)" in caplog.text) == (kind == "dict")


def test_equal_values_are_each_their_own(tmp_path: Path) -> None:
    """The checkpoint of the best step itself: what is trained after it is not the best."""
    save({"model": linear(1), "best": copy.deepcopy(linear(1).state_dict())}, tmp_path)
    model = linear(0)
    state = {"model": model, "best": model.state_dict()}
    load(state, tmp_path)
    nn.init.constant_(model.weight, 5)
    assert numbers(state["best"]) == numbers(linear(1).state_dict())


def same(value: Any, *keys: str) -> dict[str, Any]:
    """As ``dict.fromkeys`` makes it, with one object for all keys."""
    return dict.fromkeys(keys, value)


VALUES: dict[str, tuple[Any, Any]] = {
    "list": ([torch.ones(2) * i for i in range(3)], lambda: [torch.zeros(2)] * 3),
    "dict of dicts": (
        {"train": {"loss": 1.0}, "val": {"loss": 2.0}},
        lambda: same({"loss": 0.0}, "train", "val"),
    ),
    "dict of lists": (
        {"train": [1.0], "val": [2.0, 3.0]},
        lambda: same([0.0], "train", "val"),
    ),
    "deeper": (
        {"a": {"x": {"y": [1]}, "w": torch.ones(2)}, "b": {"x": {"y": [2]}, "w": torch.zeros(2)}},
        lambda: same({"x": {"y": []}, "w": torch.full((2,), 7.0)}, "a", "b"),
    ),
    "views": (
        {"x": torch.arange(4.0), "y": torch.arange(4.0) + 10},
        lambda: (lambda base: {"x": base[:4], "y": base[2:]})(torch.zeros(6)),
    ),
    "sparse": (
        {"x": torch.eye(2).to_sparse(), "y": 3 * torch.eye(2).to_sparse()},
        lambda: same(torch.zeros(2, 2).to_sparse(), "x", "y"),
    ),
}


def dense(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_sparse:
        return value.to_dense()
    return {key: dense(sub) for key, sub in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("wrap", ["plain", "entries", "per rank"])
def test_places_of_a_value_that_share_something(name: str, wrap: str, tmp_path: Path) -> None:
    saved, make = VALUES[name]
    live = make()
    if wrap == "entries":
        if isinstance(saved, list):
            saved, live = ({str(i): one for i, one in enumerate(v)} for v in (saved, live))
        save(saved, tmp_path)
        load(live, tmp_path)
    elif wrap == "plain":
        save({"v": saved}, tmp_path)
        load({"v": live}, tmp_path)
    else:
        save({"v": pyckpt.PerRank(saved)}, tmp_path)
        load({"v": pyckpt.PerRank(live)}, tmp_path)
    assert numbers(dense(live)) == numbers(dense(saved))


def test_a_container_that_several_ranks_states_share(tmp_path: Path) -> None:
    save({"a": pyckpt.PerRank({"n": 1}), "b": pyckpt.PerRank({"n": 2})}, tmp_path)
    shared = {"n": 0}
    state = {"a": pyckpt.PerRank(shared), "b": pyckpt.PerRank(shared)}
    load(state, tmp_path)
    assert (state["a"].value, state["b"].value) == ({"n": 1}, {"n": 2})
    assert state["a"].value is shared


def test_a_list_that_was_shared_when_it_was_saved(tmp_path: Path) -> None:
    one = [1, 2]
    save({"v": [one, one]}, tmp_path)
    live: list[int] = []
    state = {"v": [live, live]}
    load(state, tmp_path)
    assert state["v"] == [[1, 2], [1, 2]]
    assert state["v"][0] is state["v"][1] is live


def test_a_shared_dict_keeps_its_class_and_what_was_not_saved(tmp_path: Path) -> None:
    save({"a": {"n": 1, "new": 5}, "b": {"n": 2}}, tmp_path)
    shared: Any = defaultdict(list, {"n": 0, "kept": 9})
    state = {"a": shared, "b": shared}
    load(state, tmp_path, missing="keep")
    assert state["a"] is shared
    assert state["a"] == {"n": 1, "new": 5, "kept": 9}
    assert state["b"] == {"n": 2, "kept": 9}
    assert type(state["b"]) is defaultdict
    assert state["b"].default_factory is list


def test_what_is_kept_is_not_filled_through_another_name(tmp_path: Path) -> None:
    save({"model": linear(1), "best": linear(2).state_dict()}, tmp_path)
    model = linear(0)
    state = {"model": model, "best": model.state_dict()}
    load(state, tmp_path, keep=("model",))
    assert numbers(model.state_dict()) == numbers(linear(0).state_dict())
    assert numbers(state["best"]) == numbers(linear(2).state_dict())
    save({"value": torch.ones(3), "view": torch.ones(2)}, tmp_path / "shapes")
    base = torch.zeros(4)
    other = {"value": base, "view": base[:2]}
    load(other, tmp_path / "shapes", mismatched="keep")
    assert numbers(other) == {"value": [0] * 4, "view": [1, 1]}


# --- what is to share, and does -------------------------------------------------------------------


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def make(value: float) -> nn.Module:
        model = nn.ModuleDict({"a": linear(value), "b": linear(value)})
        model["b"].weight = model["a"].weight
        return model

    saved, model = make(3), make(0)
    save({"model": saved, "part": saved["b"]}, tmp_path)
    weight = model["a"].weight
    load({"model": model, "part": model["b"]}, tmp_path)
    assert model["a"].weight is model["b"].weight is weight
    assert numbers(model.state_dict()) == numbers(saved.state_dict())


def trained(value: float) -> dict[str, Any]:
    model = linear(value)
    state: dict[str, Any] = {"model": model, "params": dict(model.named_parameters())}
    leaf = torch.full((2,), float(value), requires_grad=True)
    return state | {"alone": model.weight, "leaf": {"w": leaf, "again": [leaf]}}


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("is_nested", [False, True])
def test_tied_weights_in_a_plain_state_dict_stay_tied(
    is_nested: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that a later save of the dict has what training made of both."""

    def state_of(model: nn.Module) -> dict[str, Any]:
        return {"model": model.state_dict()} if is_nested else dict(model.state_dict())

    one, other = tied(), tied()
    save(state_of(one), tmp_path)
    state = state_of(other)
    with caplog.at_level(logging.WARNING, "pyckpt"):
        load(state, tmp_path)
    weights = state["model"] if is_nested else state
    assert weights["1.weight"].data_ptr() == weights["0.weight"].data_ptr()
    assert weights["0.weight"].data_ptr() == other[0].weight.data_ptr()
    assert torch.equal(weights["1.weight"], one[0].weight)
    assert not caplog.records


def test_an_object_is_handed_its_tied_tensors(tmp_path: Path) -> None:
    first = tied()
    save({"keeper": Keeper(dict(first.state_dict()))}, tmp_path)
    keeper = Keeper(dict(tied().state_dict()))
    load({"keeper": keeper}, tmp_path)
    assert keeper.best["0.weight"].data_ptr() == keeper.best["1.weight"].data_ptr()
    assert torch.equal(keeper.best["1.weight"], first[0].weight)


def test_a_list_in_two_places_stays_one_while_both_are_the_same(tmp_path: Path) -> None:
    history = [1.0, float("nan"), torch.ones(2)]
    save({"losses": history, "log": {"losses": history}}, tmp_path)
    live: list[Any] = []
    state: dict[str, Any] = {"losses": live, "log": {"losses": live}}
    load(state, tmp_path)
    assert state["log"]["losses"] is live
    assert state["losses"] is live
    assert live[0] == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(0, 3), torch.zeros(0, 5)),
        (torch.zeros(0), torch.zeros(0, dtype=torch.int8)),
        (0.0, -0.0),
        (1, True),
    ],
)
def test_a_list_in_two_places_is_parted_by_the_least_difference(
    one: Any, other: Any, tmp_path: Path
) -> None:
    save({"a": [one], "b": [other]}, tmp_path)
    live: list[Any] = []
    state = {"a": live, "b": live}
    load(state, tmp_path)
    assert [repr(state[key]) for key in "ab"] == [repr([one]), repr([other])]


def test_what_is_kept_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"model": linear(1), "best": {"weight": torch.zeros(2, 3)}}, tmp_path)
    model = linear(0)
    best = {"weight": model.weight.detach()}
    with caplog.at_level(logging.WARNING, "pyckpt"):
        load({"model": model, "best": best}, tmp_path, keep=["best.weight"])
    assert not caplog.records


def test_parameters_stay_those_that_the_optimizer_has(tmp_path: Path) -> None:
    save(trained(float("nan")), tmp_path)
    live = trained(0)
    before = copy.copy(live["params"])
    leaf, alone = live["leaf"]["w"], live["alone"]
    report = load(live, tmp_path)
    assert live["params"]["weight"] is before["weight"] is live["model"].weight
    assert live["alone"] is alone
    assert live["leaf"]["w"] is live["leaf"]["again"][0] is leaf
    assert all(torch.isnan(one).all() for one in (*live["params"].values(), leaf, alone))
    assert {"params.weight", "alone", "leaf.again.0"} <= set(report.loaded)


def test_parameters_that_were_others_when_they_were_saved(tmp_path: Path) -> None:
    save({"model": linear(1), "params": dict(linear(2).named_parameters())}, tmp_path)
    model = linear(0)
    with pytest.raises(LoadError, match=r"params\.weight and model\.weight") as info:
        load({"model": model, "params": dict(model.named_parameters())}, tmp_path)
    assert info.value.mismatched == ("params.weight", "params.bias")


def test_columns_of_one_matrix_are_filled_in_place(tmp_path: Path) -> None:
    save({"x": torch.ones(3), "y": torch.full((3,), 2.0), "z": torch.zeros(2, 2)}, tmp_path)
    matrix = torch.zeros(3, 2)
    state = {"x": matrix[:, 0], "y": matrix[:, 1], "z": torch.ones(2, 4)[:, ::2]}
    load(state, tmp_path)
    assert matrix.tolist() == [[1, 2]] * 3


def test_an_optimizer_s_state_is_not_a_parameter(tmp_path: Path) -> None:
    """As that of a lookahead that begins with the weights themselves."""

    def make(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = linear(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer

    model, optimizer = make(1)
    shared = torch.tensor(4.0)
    for param in model.parameters():
        optimizer.state[param] = {"slow": param.detach() * 7, "step": shared}
    save({"model": model, "optimizer": optimizer}, tmp_path)
    model, optimizer = make(0)
    step = torch.tensor(0.0)
    for param in model.parameters():
        optimizer.state[param] = {"slow": param.detach(), "step": step}
    load({"model": model, "optimizer": optimizer}, tmp_path)
    assert numbers(model.state_dict()) == numbers(linear(1).state_dict())
    for param in model.parameters():
        assert optimizer.state[param]["slow"].unique().tolist() == [7]
        assert optimizer.state[param]["step"].item() == 4


def test_a_tensor_needs_a_place_to_be_put_to(tmp_path: Path) -> None:
    save({"x": torch.zeros(2), "y": torch.ones(2)}, tmp_path)
    shared = torch.zeros(2)
    with pytest.raises(TypeError, match="y can only be restored into a dict"):
        load(MappingProxyType({"x": shared, "y": shared}), tmp_path)


def sharded(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def make(value: float) -> nn.Module:
        model = nn.Linear(4, 4, bias=False)
        nn.init.constant_(model.weight, value)
        return fully_shard(model, mesh=mesh)

    other = make(2)
    save({"model": make(1), "best": other.state_dict(), "params": {}}, Path(path))
    model = make(0)
    state = {"model": model, "best": model.state_dict(), "params": {}}
    load(state, Path(path))
    assert model.weight.to_local().unique().tolist() == [1]
    assert state["best"]["weight"].to_local().unique().tolist() == [2]
    assert state["best"]["weight"].placements == model.weight.placements
    model = make(3)
    save({"model": model, "params": dict(model.named_parameters())}, Path(path) / "tied")
    model = make(0)
    params = dict(model.named_parameters())
    load({"model": model, "params": params}, Path(path) / "tied")
    assert params["weight"] is model.weight
    assert model.weight.to_local().unique().tolist() == [3]


def test_sharded_tensors(tmp_path: Path) -> None:
    run_ranks(2, sharded, str(tmp_path))


class Meets:
    """Its ranks restore it together."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dist.barrier()


def refused_on_one_rank(path: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh)
    other = model.weight.detach().clone()
    if dist.get_rank() == 1:
        other.to_local().add_(1)
    save({"params": {"weight": other}, "model": model, "meets": Meets()}, Path(path))
    state = {"params": dict(model.named_parameters()), "model": model, "meets": Meets()}
    with pytest.raises(LoadError) as caught:
        load(state, Path(path))
    dist.barrier()
    return str(caught.value)


def test_what_one_rank_refuses_no_rank_restores(tmp_path: Path) -> None:
    for message in run_ranks(2, refused_on_one_rank, str(tmp_path)):
        assert "params.weight and model.weight" in message


# --- elements that share memory -------------------------------------------------------------------


def test_an_expanded_value_gives_way(tmp_path: Path) -> None:
    save({"x": torch.arange(4.0), "w": {"y": torch.ones(2, 3)}, "alike": torch.ones(4)}, tmp_path)
    zero = torch.zeros(1)
    live = {"x": zero.expand(4), "w": {"y": zero.expand(2, 3)}, "alike": zero.expand(4)}
    load(live, tmp_path)
    expected = {"x": [0, 1, 2, 3], "w": {"y": [[1] * 3] * 2}, "alike": [1] * 4}
    assert numbers(live) == expected
    assert zero.item() == 0


class Expanded(nn.Module):
    def __init__(self, value: float, *, apart: bool = False) -> None:
        super().__init__()
        one = torch.full((1,), value)
        row = torch.arange(5.0) + value
        for name, tensor in {
            "same": one.expand(3, 4),
            "row": row.expand(2, 5),
            "steps": row.unfold(0, 3, 1),
            "number": one.half()[0].expand(2),
            "integers": torch.tensor([[int(value)], [7]]).expand(2, 3),
        }.items():
            self.register_buffer(name, tensor.clone() if apart else tensor)


@pytest.mark.parametrize("apart", [False, True])
def test_an_expanded_buffer_is_filled(apart: bool, tmp_path: Path) -> None:
    saved = Expanded(3, apart=apart)
    save({"m": saved}, tmp_path)
    model = Expanded(0)
    places = [one.data_ptr() for one in model.buffers()]
    load({"m": model}, tmp_path)
    assert numbers(model.state_dict()) == numbers(saved.state_dict())
    assert [one.data_ptr() for one in model.buffers()] == places
    assert model.same.stride() == (0, 0)


def test_an_expanded_buffer_that_had_different_values(tmp_path: Path) -> None:
    saved = Expanded(3, apart=True)
    saved.get_buffer("same")[1, 2] = 9
    save({"m": saved}, tmp_path)
    model = Expanded(0)
    with pytest.raises(LoadError, match=r"m\.same: its elements share memory") as info:
        load({"m": model}, tmp_path)
    assert info.value.mismatched == ("m.same",)
    assert numbers(model.get_buffer("same")) == [[0] * 4] * 3


# --- claims ---------------------------------------------------------------------------------------


def test_claims() -> None:
    claims = Claims()
    base = torch.zeros(10, 10)
    claims.add(base[2:4], "rows")
    claims.add(base[:, 7], "column", "owner")
    claims.add(torch.zeros(0), "empty")
    claims.add(torch.zeros(3, device="meta"), "meta")
    assert claims.taken(base[3:5]) == "rows"
    assert claims.taken(base[5, 5:]) == "column"
    assert claims.taken(base[5, 5:], but="owner") is None
    assert claims.taken(base[4:, :7]) is None
    assert claims.taken(base[::3, 6:8]) in ("rows", "column")
    assert claims.taken(base.view(torch.uint8)[4:, 27]) is None
    assert claims.taken(base.view(torch.uint8)[5:, 28]) == "column"
    assert claims.taken(torch.zeros(3)) is None
    assert claims.taken(torch.zeros(0)) is None
    assert claims.taken(base[4].expand(3, 10)) == "column"
    assert claims.taken(base[4, 6].expand(3)) is None


def test_claims_find_what_overlaps_as_sets_of_elements_do() -> None:
    torch.manual_seed(0)
    base = torch.arange(60.0)
    tried = 0
    for _ in range(300):
        made = []
        for _ in range(4):
            shape = torch.randint(1, 4, (2,)).tolist()
            stride = torch.randint(1, 12, (2,)).tolist()
            made.append(base.as_strided(shape, stride, int(torch.randint(0, 20, ()))))
        if any(map(is_folded, made)):
            continue
        tried += 1
        claims = Claims()
        for number, one in enumerate(made[:-1]):
            claims.add(one, str(number))
        wanted = set(made[-1].reshape(-1).tolist())
        found = claims.taken(made[-1])
        true = [str(i) for i, one in enumerate(made[:-1]) if wanted & set(one.reshape(-1).tolist())]
        assert found in true if true else found is None
    assert tried > 20
