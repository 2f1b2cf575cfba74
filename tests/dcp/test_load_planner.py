"""What a load does with states and checkpoints that fit, and with those that do not."""

from __future__ import annotations

import copy
import datetime
import errno
import pickle
import threading
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import _hostile
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _load_helpers import load_stock_file, round_trip, save
from _ranks import run_ranks
from _sampling import examples, slow
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor

import pyckpt
from pyckpt.dcp.load import load
from pyckpt.dcp.planner import LoadPlanner
from pyckpt.dcp.report import Conversion, LoadReport, Replacement
from pyckpt.errors import CorruptCheckpoint, LoadError, PyckptError, UnsafeCheckpoint

ONES = torch.ones(3)
FIVE = 5


def trained_adam() -> torch.optim.Adam:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def fresh_adam() -> torch.optim.Adam:
    return torch.optim.Adam(torch.nn.Linear(2, 2).parameters())


# --- states whose parts are made late: what stock does with each is in PyTorch issue 126881 -------


def test_snippet_of_issue_126881(tmp_path: Path) -> None:
    dl_state = {"dl_state": {"data": {"a": "b"}}}
    save(dl_state, tmp_path)
    loaded = copy.deepcopy(dl_state)
    loaded["dl_state"].pop("data")
    mine = loaded["dl_state"]
    dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), planner=LoadPlanner())
    assert loaded == dl_state
    assert loaded["dl_state"] is mine


def test_missing_tensor_is_made(tmp_path: Path) -> None:
    into = {"m": {"w": torch.zeros(3)}}
    w = into["m"]["w"]
    report = round_trip({"m": {"w": ONES, "b": torch.zeros(2, dtype=torch.int8)}}, into, tmp_path)
    assert into["m"]["w"] is w
    assert torch.equal(w, ONES)
    assert into["m"]["b"].dtype == torch.int8
    assert into["m"]["b"].shape == (2,)
    assert (report.loaded, report.filled) == (["m.w"], ["m.b"])


@pytest.mark.parametrize("into", [{}, None, [], torch.zeros(0), FIVE, {"gone": {}}])
def test_whole_container_is_made(tmp_path: Path, into: Any) -> None:
    state = {"m": into}
    saved = {"w": ONES, "x": {"y": 1, "z": [1, 2]}}
    report = round_trip({"m": saved}, state, tmp_path)
    assert list(state["m"])[-2:] == ["w", "x"]
    assert torch.equal(state["m"]["w"], ONES)
    assert state["m"]["x"] == saved["x"]
    assert report.filled == ["m.w", "m.x.y", "m.x.z"]
    if isinstance(into, dict):
        assert state["m"] is into
    assert report.replaced == ([Replacement("m", "int", "dict")] if into is FIVE else [])


def test_fresh_adam_gets_its_moments(tmp_path: Path) -> None:
    saved, live = trained_adam(), fresh_adam()
    state = {"optim": live.state_dict()}
    inner = state["optim"]["state"]
    round_trip({"optim": saved.state_dict()}, state, tmp_path)
    assert state["optim"]["state"] is inner
    assert list(inner) == [0, 1]
    live.load_state_dict(state["optim"])
    expected = saved.state_dict()
    for number, values in live.state_dict()["state"].items():
        assert values.keys() == expected["state"][number].keys()
        for name, value in values.items():
            assert torch.equal(value, expected["state"][number][name])
    assert live.state_dict()["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("passed", [None, {}, {"state": {}, "param_groups": []}])
def test_adam_from_nothing(tmp_path: Path, passed: Any) -> None:
    saved = trained_adam().state_dict()
    state = {"optim": passed}
    round_trip({"optim": saved}, state, tmp_path)
    assert list(state["optim"]["state"]) == [0, 1]
    assert state["optim"]["param_groups"] == saved["param_groups"]
    fresh_adam().load_state_dict(state["optim"])


def test_stateful_object_is_filled(tmp_path: Path) -> None:
    saved, live = trained_adam(), fresh_adam()
    round_trip({"optim": saved}, {"optim": live}, tmp_path)
    assert torch.equal(
        live.state_dict()["state"][1]["exp_avg"], saved.state_dict()["state"][1]["exp_avg"]
    )


def test_stateful_through_dcp_load(tmp_path: Path) -> None:
    save({"optim": trained_adam()}, tmp_path)
    live = fresh_adam()
    reader = FileSystemReader(tmp_path)
    dcp.load({"optim": live}, storage_reader=reader, planner=LoadPlanner())
    assert set(live.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_key_that_was_not_saved(tmp_path: Path) -> None:
    save({"m": {"w": ONES}}, tmp_path)
    state = {"m": {"w": torch.zeros(3), "zz": 1, "yy": torch.zeros(1)}, "n": {"x": 0}}
    with pytest.raises(LoadError, match=r"\(3\): m\.zz, m\.yy, n\.x") as caught:
        load_stock_file(state, tmp_path)
    assert caught.value.missing == ("m.zz", "m.yy", "n.x")
    assert torch.equal(state["m"]["w"], torch.zeros(3))

    report = load_stock_file(state, tmp_path, missing="keep")
    assert report.kept == ["m.zz", "m.yy", "n.x"]
    assert report.loaded == ["m.w"]
    assert state["m"]["zz"] == 1
    assert torch.equal(state["m"]["w"], ONES)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def compiled(seed: int) -> Any:
    return torch.compile(net(seed), backend="eager")


def replicated(seed: int) -> nn.Module:
    """Its names are those of DDP."""
    return nn.DataParallel(net(seed))


def is_the_first(model: nn.Module) -> bool:
    return all(map(torch.equal, model.parameters(), net(0).parameters()))


@pytest.mark.parametrize("wrapped", [compiled, replicated])
def test_names_that_differ_by_a_wrapper(wrapped: Any, tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": wrapped(0)}).wait()
        path = tmp_path / "run" / "step-00000001"
        model = wrapped(1)
        said = (
            r"\(4\): model\.\w+\.0\.weight.*; the names of 4 differ by the prefix of a module's "
            r"wrapper alone, as model\.\w+\.0\.weight does from model\.0\.weight of the "
            r"checkpoint: pyckpt\.load_model and Checkpointer\.restore match them"
        )
        with pytest.raises(LoadError, match=said):
            pyckpt.load({"model": model}, path)
        # What the message says is so.
        pyckpt.load_model(model, path)
        assert is_the_first(model)
        model = wrapped(1)
        checkpointer.restore({"model": model})
        assert is_the_first(model)
    model = wrapped(1)
    prefix = next(iter(model.state_dict())).partition(".")[0]
    pyckpt.load(
        {"model": model}, path, rename=lambda key: key.replace("model.", f"model.{prefix}.")
    )
    assert is_the_first(model)


@pytest.mark.parametrize("wrapped", [compiled, replicated])
def test_saved_names_that_differ_by_a_wrapper(wrapped: Any, tmp_path: Path) -> None:
    pyckpt.save({"model": wrapped(0)}, tmp_path)
    model = net(1)
    with pytest.raises(LoadError, match="the names of 4 differ by the prefix") as raised:
        pyckpt.load({"model": model}, tmp_path)
    text = str(raised.value)
    # A saved name does not show whether "module" is a wrapper's.
    assert ("load_model" in text) == (wrapped is compiled)
    if wrapped is compiled:
        pyckpt.load_model(model, tmp_path)
        assert is_the_first(model)
    model = net(1)
    assert "rename=" in text
    drop = {"_orig_mod.": "", "module.": ""}

    def rename(key: str) -> str:
        for part, other in drop.items():
            key = key.replace(part, other)
        return key

    pyckpt.load({"model": model}, tmp_path, rename=rename)
    assert is_the_first(model)


def test_other_names_get_no_such_hint(tmp_path: Path) -> None:
    pyckpt.save({"model": net(0)}, tmp_path)
    with pytest.raises(LoadError, match=r"does not have \(2\)") as raised:
        pyckpt.load({"model": nn.ModuleDict({"body": nn.Linear(2, 2)})}, tmp_path)
    assert str(raised.value).endswith("(2): model.body.weight, model.body.bias")


def test_an_entry_that_was_not_saved(tmp_path: Path) -> None:
    pyckpt.save({"model": net(0), "epoch": 3}, tmp_path)
    with pytest.raises(LoadError, match=r"not in the checkpoint: modle; it has model, epoch$"):
        pyckpt.load({"modle": net(1), "epoch": 0}, tmp_path)


MIXED = [1, 2, 3, {"k": 5}]


@pytest.mark.parametrize(
    "local",
    [[0], [], None, [0, 0, 0, {"k": 0}], [0] * 7, [0, {"k": 0}], {}, {"a": 1}, 7, ONES, "text"],
)
def test_list_with_dicts_takes_the_length_it_had(tmp_path: Path, local: Any) -> None:
    state = {"l": copy.deepcopy(local)}
    mine = state["l"]
    round_trip({"l": MIXED}, state, tmp_path)
    assert state["l"] == MIXED
    if isinstance(local, list):
        assert state["l"] is mine


def test_longer_list_is_cut(tmp_path: Path) -> None:
    into = [0, 0, 0, {"k": 0}, 9, {"x": {"y": 1}}]
    state = {"l": into}
    report = round_trip({"l": MIXED}, state, tmp_path)
    assert into == MIXED
    assert report.dropped == ["l.4", "l.5.x.y"]
    assert report.loaded == ["l.0", "l.1", "l.2", "l.3.k"]

    into.append(9)
    report = load_stock_file(state, tmp_path, missing="keep")
    assert into == [*MIXED, 9]
    assert (report.kept, report.dropped) == (["l.4"], [])

    with pytest.raises(LoadError, match=r"l\.4"):
        load_stock_file(state, tmp_path, unexpected="ignore")


@pytest.mark.parametrize("local", [[0], [], None, [0] * 7, [{"a": 1}], {}, ONES, 3])
def test_plain_list_takes_the_length_it_had(tmp_path: Path, local: Any) -> None:
    state = {"l": copy.deepcopy(local)}
    mine = state["l"]
    round_trip({"l": [1, 2, 3]}, state, tmp_path)
    assert state["l"] == [1, 2, 3]
    if isinstance(local, list):
        assert state["l"] is mine


def test_empty_dicts_at_the_end_of_a_list_stay(tmp_path: Path) -> None:
    """DCP does not say whether they were saved: these states of layers were."""
    layers = [{"w": torch.zeros(3)}, {}]
    round_trip({"l": [{"w": ONES}, {}]}, {"l": layers}, tmp_path)
    assert len(layers) == 2
    assert torch.equal(layers[0]["w"], ONES)


def test_lists_of_tensors(tmp_path: Path) -> None:
    kept = torch.zeros(3)
    state: dict[str, Any] = {"l": [kept], "m": [[torch.zeros(1)], []]}
    saved = {"l": [ONES, ONES * 2], "m": [[ONES[:1]], [ONES * 3, ONES]]}
    round_trip(saved, state, tmp_path)
    assert state["l"][0] is kept
    assert torch.equal(state["l"][1], ONES * 2)
    assert torch.equal(state["m"][1][0], ONES * 3)
    assert [len(inner) for inner in state["m"]] == [1, 2]


def twos(value: float) -> torch.Tensor:
    return torch.full((2,), float(value))


def holds(found: Any, saved: Any) -> bool:
    """Whether all that was saved is in a state, which may have more."""
    if isinstance(saved, dict):
        is_there = isinstance(found, dict) and saved.keys() <= found.keys()
        return is_there and all(holds(found[key], part) for key, part in saved.items())
    if isinstance(saved, list):
        is_there = isinstance(found, list) and len(saved) <= len(found)
        return is_there and all(holds(*parts) for parts in zip(found, saved, strict=False))
    if isinstance(saved, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, saved)
    return type(found) is type(saved) and bool(found == saved)


@pytest.mark.parametrize("load", [pyckpt.load, load_stock_file], ids=["plain", "items"])
@pytest.mark.parametrize("local", [{"0": twos(0)}, {0: twos(0)}, {"0": twos(0), "1": twos(0)}])
def test_dict_becomes_the_list_that_was_saved(tmp_path: Path, local: Any, load: Any) -> None:
    save({"z": [twos(1), twos(2)]}, tmp_path)
    state = {"z": dict(local)}
    first = state["z"][next(iter(local))]
    report = load(state, tmp_path)
    assert type(state["z"]) is list
    assert len(state["z"]) == 2
    assert holds(state, {"z": [twos(1), twos(2)]})
    assert state["z"][0] is first
    assert report.replaced == [Replacement("z", "dict", "list")]
    # Only "fill" changes what the state is made of.
    state = {"z": dict(local)}
    load(state, tmp_path, unexpected="ignore")
    assert list(state["z"]) == list(local)


@pytest.mark.parametrize("load", [pyckpt.load, load_stock_file], ids=["plain", "items"])
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"n": {"0": [4]}}])
def test_list_becomes_the_dict_that_was_saved(tmp_path: Path, more: Any, load: Any) -> None:
    saved = {"z": {"0": twos(1), "1": 7, **more}}
    save(saved, tmp_path)
    state: dict[str, Any] = {"z": [twos(0), 0]}
    report = load(state, tmp_path)
    assert state["z"].keys() == saved["z"].keys()
    assert holds(state, saved)
    assert report.loaded == ["z.0", "z.1"]


def trees() -> st.SearchStrategy[Any]:
    leaves = st.integers(0, 9) | st.text("ab", max_size=2) | st.integers(0, 9).map(twos)
    return st.recursive(
        leaves,
        lambda parts: (
            st.lists(parts, min_size=1, max_size=3)
            | st.dictionaries(st.sampled_from("012a"), parts, min_size=1, max_size=3)
        ),
        max_leaves=8,
    )


@given(saved=trees(), local=trees() | st.sampled_from([None, {}, []]))
@settings(max_examples=examples(60), deadline=None)
def test_any_state_comes_to_hold_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, saved: Any, local: Any
) -> None:
    path = tmp_path_factory.mktemp("trees")
    pyckpt.save({"z": saved}, path / "a")
    state = {"z": copy.deepcopy(local)}
    load(state, path / "a", missing="keep")
    assert holds(state["z"], saved)


def test_gap_in_a_list_was_an_empty_dict(tmp_path: Path) -> None:
    state: dict[str, Any] = {"l": None}
    round_trip({"l": [{}, {"a": 1}]}, state, tmp_path)
    assert state["l"] == [{}, {"a": 1}]


def test_shapes_that_differ(tmp_path: Path) -> None:
    save({"a": torch.ones(5), "b": torch.ones(2, 2), "c": ONES}, tmp_path)
    state = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(3)}
    with pytest.raises(LoadError, match=r"a: \(5,\) is not \(3,\), b: \(2, 2\) is not \(4,\)") as e:
        load_stock_file(state, tmp_path)
    assert e.value.mismatched == ("a", "b")
    assert torch.equal(state["c"], torch.zeros(3))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_empty_tensor_grows(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"b": torch.zeros(shape)}
    report = round_trip({"b": torch.ones(5, dtype=torch.int64)}, state, tmp_path)
    assert torch.equal(state["b"], torch.ones(5, dtype=torch.int64))
    assert report.filled == ["b"]


@pytest.mark.parametrize("shape", [(0,), (0, 5), ()])
def test_saved_without_elements_or_dimensions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"new": {}, "old": torch.full(shape, 3.0)}
    round_trip({"new": {"t": torch.ones(shape)}, "old": torch.ones(shape)}, state, tmp_path)
    assert torch.equal(state["new"]["t"], torch.ones(shape))
    assert torch.equal(state["old"], torch.ones(shape))


@pytest.mark.parametrize(
    ("saved", "local", "kinds"),
    [
        (ONES, None, None),
        (ONES, 3, ("int", "tensor")),
        (ONES, {"a": 1}, ("dict", "tensor")),
        (ONES, [1, 2], ("list", "tensor")),
        (ONES, [torch.zeros(1)], ("list", "tensor")),
        (None, ONES, ("tensor", "NoneType")),
        (7, torch.tensor(0.0), ("tensor", "int")),
        ("s", {"a": {"b": 1}}, ("dict", "str")),
        ((1, 2), None, None),
        (3.5, 1, None),
    ],
)
def test_other_kind_than_saved(tmp_path: Path, saved: Any, local: Any, kinds: Any) -> None:
    state = {"b": copy.deepcopy(local)}
    report = round_trip({"b": saved}, state, tmp_path)
    assert type(state["b"]) is type(saved)
    assert torch.equal(state["b"], saved) if saved is ONES else state["b"] == saved
    assert report.replaced == ([Replacement("b", *kinds)] if kinds else [])
    assert not report.kept


def test_dtype_that_differs(tmp_path: Path) -> None:
    state = {"b": torch.zeros(3, dtype=torch.float16)}
    report = round_trip({"b": ONES}, state, tmp_path)
    assert state["b"].dtype == torch.float16
    assert torch.equal(state["b"], torch.ones(3, dtype=torch.float16))
    assert report.converted == [Conversion("b", torch.float32, torch.float16)]


# --- what is left out -----------------------------------------------------------------------------


def test_partial_load_is_quiet(tmp_path: Path) -> None:
    state = {"a": torch.zeros(3)}
    report = round_trip({"a": ONES, "b": {"c": ONES, "d": 1}, "e": 2}, state, tmp_path)
    assert list(state) == ["a"]
    assert report.left_out == ["b.c", "b.d", "e"]
    assert not report.unexpected


def test_unexpected_reported_or_refused(tmp_path: Path) -> None:
    save({"m": {"a": ONES, "b": {"c": 1}, "n": {"x": 1}, "l": MIXED}, "top": 1}, tmp_path)

    def template() -> dict[str, Any]:
        return {"m": {"a": torch.zeros(3), "n": None, "l": []}}

    state = template()
    report = load_stock_file(state, tmp_path, unexpected="ignore")
    assert torch.equal(state["m"].pop("a"), ONES)
    assert state == {"m": {"n": None, "l": []}}
    names = ["m.b.c", "m.n.x", "m.l.0", "m.l.1", "m.l.2", "m.l.3.k"]
    assert sorted(report.unexpected) == sorted(names)
    assert sorted(report.kept) == ["m.l", "m.n"]
    assert report.left_out == ["top"]
    assert report.filled == []

    state = template()
    with pytest.raises(LoadError) as caught:
        load_stock_file(state, tmp_path, unexpected="error")
    assert sorted(caught.value.unexpected) == sorted(names)
    assert all(name in str(caught.value) for name in names)
    assert torch.equal(state["m"]["a"], torch.zeros(3))


@pytest.mark.parametrize("option", [{"missing": "fill"}, {"unexpected": "keep"}])
def test_wrong_options(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        LoadPlanner(**option)


# --- names and containers -------------------------------------------------------------------------


def test_keys_are_matched_by_dotted_name_as_in_stock(tmp_path: Path) -> None:
    flat = {"m.w": torch.zeros(3), "m.n.x": 0}
    round_trip({"m": {"w": ONES, "n": {"x": 1}, "more": 2}}, flat, tmp_path)
    assert torch.equal(flat["m.w"], ONES)
    assert flat["m.n.x"] == 1
    assert "m.more" not in flat


def test_int_keys_stay_int_keys(tmp_path: Path) -> None:
    state: dict[str, Any] = {"some": {1: 0}, "none": {}, "text": {"1": 0}}
    saved = {"some": {1: "a", 2: "b"}, "none": {1: "c"}, "text": {"1": "d", "2": "e"}}
    round_trip(saved, state, tmp_path)
    assert state["some"] == saved["some"]
    assert state["text"] == saved["text"]
    assert state["none"] == {"1": "c"}  # nothing tells that it was not a string


def test_containers_are_filled_in_place(tmp_path: Path) -> None:
    inner: dict[str, Any] = defaultdict(dict)
    outer: OrderedDict[str, Any] = OrderedDict(inner=inner, list=[{"a": 0}])
    items = outer["list"]
    first = items[0]
    state = {"s": outer}
    round_trip({"s": {"inner": {"p": {"q": 1}}, "list": [{"a": 1}, {"b": 2}]}}, state, tmp_path)
    assert state["s"] is outer
    assert outer["inner"] is inner
    assert inner == {"p": {"q": 1}}
    assert outer["list"] is items
    assert items[0] is first
    assert items == [{"a": 1}, {"b": 2}]


def test_one_container_in_two_places_is_two_states(tmp_path: Path) -> None:
    saved = {"a": [1], "b": [2], "c": {"x": 1}, "d": {"x": 2}}
    items: list[int] = []
    names: dict[str, int] = {}
    state: dict[str, Any] = {"a": items, "b": items, "c": names, "d": names}
    round_trip(saved, state, tmp_path)
    assert state == saved


def test_dict_saved_as_one_value(tmp_path: Path) -> None:
    """As planners do that do not flatten, and as DCP did before torch 2.4."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = dcp.FileSystemWriter(tmp_path)
    dcp.save({"d": {"x": 1, "y": {"z": 2}}}, storage_writer=writer, planner=planner)
    mine = {"x": 0, "other": {"k": 1}}
    state = {"d": mine}
    report = load_stock_file(state, tmp_path)
    assert mine == {"x": 1, "y": {"z": 2}}
    assert state["d"] is mine
    assert report.dropped == ["d.x", "d.other.k"]


def test_two_values_of_one_name(tmp_path: Path) -> None:
    save({"a": {"b": 1}}, tmp_path)
    with pytest.raises(LoadError, match=r"a\.b"):
        load_stock_file({"a": {"b": 1}, "a.b": 1}, tmp_path)


# --- tensors that are made ------------------------------------------------------------------------


def test_meta_tensors_get_memory(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3, device="meta", dtype=torch.float64)}
    report = round_trip({"w": ONES}, state, tmp_path)
    assert torch.equal(state["w"], ONES.double())
    assert report.converted == [Conversion("w", torch.float32, torch.float64)]


def test_device_of_made_tensors(tmp_path: Path) -> None:
    save({"w": {"x": ONES}}, tmp_path)
    planner = LoadPlanner(device="meta")
    planner.set_up_planner({"w": {}}, FileSystemReader(tmp_path).read_metadata())
    (item,) = planner.create_local_plan().items
    assert planner.resolve_tensor(item).is_meta


def test_create_makes_tensors(tmp_path: Path) -> None:
    asked: list[tuple[str, torch.Size, torch.dtype]] = []

    def create(key: str, metadata: TensorStorageMetadata) -> torch.Tensor | None:
        asked.append((key, metadata.size, metadata.properties.dtype))
        return torch.zeros(3, dtype=torch.float64) if key == "m.a" else None

    save({"m": {"a": ONES, "b": ONES}}, tmp_path)
    state: dict[str, Any] = {"m": None}
    report = load_stock_file(state, tmp_path, create=create)
    size = torch.Size((3,))
    assert asked == [("m.a", size, torch.float32), ("m.b", size, torch.float32)]
    assert torch.equal(state["m"]["a"], ONES.double())
    assert torch.equal(state["m"]["b"], ONES)
    assert report.converted == [Conversion("m.a", torch.float32, torch.float64)]
    with pytest.raises(LoadError, match=r"create\('m.a'\)"):
        load_stock_file({"m": None}, tmp_path, create=lambda key, metadata: torch.zeros(4))


def test_parameters_are_loaded_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    save({"m": dict(torch.nn.Linear(3, 2).state_dict())}, tmp_path)
    before = model.weight
    load_stock_file({"m": dict(model.named_parameters())}, tmp_path)
    assert model.weight is before
    assert model.weight.requires_grad


def test_failed_load_leaves_no_uninitialised_tensors(tmp_path: Path) -> None:
    save({"m": {"a": ONES, "b": ONES}}, tmp_path)

    class Failing(FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            raise OSError(errno.EIO, "no", "file")

    state: dict[str, Any] = {"m": {"a": None}}
    with pytest.raises(OSError, match="no"):
        load(state, reader=Failing(tmp_path), trust_metadata=True)
    assert state == {"m": {"a": None}}


GROWN: dict[str, Any] = {
    "dict": {"a": 1, "b": [2, {"c": 3}], "t": ONES},
    "list": [{"a": 1}],
    "plain": [1, 2],
    "kind": [ONES],
    "none": {"x": ONES},
    "one": (1, 2),
}


def outgrown() -> dict[str, Any]:
    """A state that fits no checkpoint of `GROWN` before it has changed."""
    shared: list[Any] = []
    return {
        "dict": {"t": 0, "b": shared},
        "list": [{"a": 0}, {"b": 0}, 7],
        "plain": [5, 6, 7],
        "kind": {"0": ONES, "more": 1},
        "none": None,
        "one": {"y": {"z": 1}},
        "copy": shared,
    }


@pytest.mark.parametrize("damaged", ["a tensor", "an object"])
def test_failed_load_leaves_the_structure_of_the_state(tmp_path: Path, damaged: str) -> None:
    last = {"copy": [4]} if damaged == "a tensor" else {"copy": {"end": datetime.timedelta(1)}}
    save({**GROWN, **last}, tmp_path)
    if damaged == "a tensor":
        (file,) = tmp_path.glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.index(ONES.numpy().tobytes()) + 4] ^= 1
        file.write_bytes(data)
    state = outgrown()
    parts = dict(state)
    with pytest.raises((CorruptCheckpoint, UnsafeCheckpoint)):
        pyckpt.load(state, tmp_path)
    assert repr(state) == repr(outgrown())
    assert all(state[name] is part for name, part in parts.items())
    pyckpt.save({"dict": {"t": 1, "b": [8]}, "copy": [ONES]}, tmp_path / "other")
    parts = {name: state[name] for name in ("dict", "copy")}
    pyckpt.load(parts, tmp_path / "other")
    assert repr(parts) == repr({"dict": {"t": 1, "b": [8]}, "copy": [ONES]})


def test_checkpoint_that_is_saved_over_with_other_names(tmp_path: Path) -> None:
    pyckpt.save({"x": {"b": torch.zeros(3), "l": [ONES] * 2}}, tmp_path)

    class SavedOver(pyckpt.DirectReader):
        reads = 0

        def read_data(self, plan: Any, planner: Any) -> Any:
            self.reads += 1
            if self.reads == 1:
                pyckpt.save({"x": {"a": ONES, "l": [ONES] * 3}}, tmp_path, overwrite=True)
            return super().read_data(plan, planner)

    state: dict[str, Any] = {"x": {"l": [torch.zeros(3)] * 4}}
    load(state, reader=SavedOver(tmp_path))
    assert repr(state) == repr({"x": {"l": [ONES] * 3, "a": ONES}})


# --- objects --------------------------------------------------------------------------------------


class Bad:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


class Plain:
    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_run_no_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    save({"a": {"evil": Bad(witness)}}, tmp_path / "c")
    state = {"a": {"evil": 1}}
    with pytest.raises(UnsafeCheckpoint, match=r"a\.evil.*io\.open.*allow=") as caught:
        load_stock_file(state, tmp_path / "c")
    assert caught.value.key == "a.evil"
    assert caught.value.refused == (f"{open.__module__}.open",)
    assert not witness.exists()
    assert state == {"a": {"evil": 1}}


def test_allow_admits_classes(tmp_path: Path) -> None:
    save({"a": Plain(3), "t": datetime.timedelta(1)}, tmp_path)
    name = f"{Plain.__module__}.Plain"
    with pytest.raises(UnsafeCheckpoint, match=rf"pass allow=\[{name}\]"):
        load_stock_file({"a": None}, tmp_path)
    state: dict[str, Any] = {"a": None, "t": None}
    load_stock_file(state, tmp_path, allow=[Plain, datetime.timedelta])
    assert state["a"].value == 3
    assert state["t"] == datetime.timedelta(1)
    assert Plain not in torch.serialization.get_safe_globals()

    with torch.serialization.safe_globals([Plain]):
        load_stock_file(state, tmp_path, allow=[Plain, datetime.timedelta])
        assert Plain in torch.serialization.get_safe_globals()


def test_allow_from_several_threads(tmp_path: Path) -> None:
    save({"a": [Plain(i) for i in range(20)]}, tmp_path)
    barrier = threading.Barrier(4)
    states: list[dict[str, Any]] = [{"a": None} for _ in range(4)]

    def one(state: dict[str, Any]) -> None:
        barrier.wait()
        load_stock_file(state, tmp_path, allow=[Plain], no_dist=True)

    threads = [threading.Thread(target=one, args=(state,)) for state in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for state in states:
        assert [item.value for item in state["a"]] == list(range(20))


def test_damaged_object(tmp_path: Path) -> None:
    save({"a": list(range(50))}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(CorruptCheckpoint, match="a: ") as caught:
        load_stock_file({"a": None}, tmp_path)
    assert caught.value.key == "a"


# --- metadata that does not add up ----------------------------------------------------------------


def planned(metadata: Any, state: dict[str, Any]) -> Any:
    planner = LoadPlanner()
    planner.set_up_planner(state, metadata)
    return planner.create_local_plan()


def test_part_of_a_tensor_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    save({"a": torch.ones(4)}, tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size((3,))
    with pytest.raises(CorruptCheckpoint, match="3 of the 4 elements"):
        planned(metadata, {"a": torch.zeros(4)})


@pytest.mark.parametrize(
    "path", [("l", 1 << 40), ("l", -1), ("l", "x"), ("l", 0), ("l", 0, "y"), ("l", 1, "y")]
)
def test_impossible_paths(tmp_path: Path, path: tuple[Any, ...]) -> None:
    save({"l": [ONES, ONES]}, tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    metadata.planner_data["l.1"] = path
    if path == ("l", 1, "y"):
        metadata.planner_data["l.0"] = ("l", 1)
    with pytest.raises(CorruptCheckpoint):
        planned(metadata, {"l": None})


def test_metadata_without_paths(tmp_path: Path) -> None:
    save({"a.b": ONES, "c": 1}, tmp_path)
    metadata = FileSystemReader(tmp_path).read_metadata()
    for paths in (None, {}, {"a.b": 3}, 3):
        metadata.planner_data = paths
        plan = planned(metadata, {"a.b": torch.zeros(3), "c": 0})
        assert {item.storage_index for item in plan.items} == {
            MetadataIndex("a.b", torch.Size((0,))),
            MetadataIndex("c"),
        }


# --- the report, the errors, the call -------------------------------------------------------------


def test_report_reads_well() -> None:
    report = LoadReport(
        loaded=["a"] * 10,
        filled=["m.b"],
        converted=[Conversion("w", torch.float32, torch.bfloat16)],
        replaced=[Replacement("x", "int", "tensor")],
        kept=["k"],
        left_out=["c", "d", "e", "f"],
        bytes=3_000_000_000,
        seconds=2.0,
    )
    assert report.gigabytes_per_second == 1.5
    assert str(report).splitlines() == [
        "loaded 11 keys, 3 GB in 2 s (1.50 GB/s)",
        "  1 created: m.b",
        "  1 converted to the state's dtype: w (float32 -> bfloat16)",
        "  1 replaced by what was saved: x (int -> tensor)",
        "  1 kept as they were: k",
        "  4 in the checkpoint, not asked for: c, d, e and 1 more",
    ]
    assert str(LoadReport(loaded=["a"])) == "loaded 1 key, 0 bytes in 0 s (0.00 GB/s)"


@pytest.mark.parametrize("into", [None, {}, {3: torch.zeros(2), (1, 2): torch.zeros(3)}])
def test_report_has_the_programs_keys_alone(tmp_path: Path, into: Any) -> None:
    """Beside dicts whose keys are no strings, a list of the true ones is saved."""
    saved = {"d": {3: torch.ones(2), (1, 2): ONES}, "e": {7: ONES}}
    pyckpt.save(saved, tmp_path, overwrite=True)
    assert "d.pyckpt.keys" in FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    state = {"d": into}
    report = pyckpt.load(state, tmp_path)
    assert state["d"].keys() == saved["d"].keys()
    assert sorted([*report.loaded, *report.filled]) == ["d.(1, 2)", "d.3"]
    assert report.left_out == ["e.7"]
    assert report.summary.startswith("loaded 2 keys")


def test_report_has_a_programs_key_of_that_name(tmp_path: Path) -> None:
    state = {"pyckpt": {"keys": 1}, "own.pyckpt.keys": 2}
    report = round_trip(state, {"pyckpt": {"keys": 0}, "own.pyckpt.keys": 0}, tmp_path)
    assert sorted(report.loaded) == ["own.pyckpt.keys", "pyckpt.keys"]


def test_report_takes_the_readers_word(tmp_path: Path) -> None:
    save({"a": ONES, "b": 1}, tmp_path)
    report = load_stock_file({"a": torch.zeros(3), "b": 0}, tmp_path)
    assert report.bytes == 12
    assert report.not_verified == ["a", "b"]
    assert report.seconds > 0

    class Counting(FileSystemReader):
        class statistics:
            bytes = 4096
            seconds = 1.0

        unverified = ("a",)

    report = load({"a": torch.zeros(3)}, reader=Counting(tmp_path), trust_metadata=True)
    assert (report.bytes, report.not_verified) == (4096, ["a"])


def test_load_warns_of_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save({"a": 1}, tmp_path)
    load({"a": 0}, tmp_path, reader=FileSystemReader("elsewhere"), trust_metadata=True)
    assert not recwarn.list


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")], ids=["fewer", "more"])
def test_all_is_one_save_though_another_comes_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    """The names are those of the save whose values are loaded, no more and no fewer."""
    pyckpt.save({"a": 1, "b": 1}, tmp_path)
    read = pyckpt.DirectReader.read_metadata
    reads = 0

    def saved_over(self: pyckpt.DirectReader, *args: Any, **kwargs: Any) -> Any:
        nonlocal reads
        found = read(self, *args, **kwargs)
        reads += 1
        if reads == 1:
            pyckpt.save(dict.fromkeys(names, 2), tmp_path, overwrite=True)
        return found

    monkeypatch.setattr(pyckpt.DirectReader, "read_metadata", saved_over)
    assert load(tmp_path) == dict.fromkeys(names, 2)


def test_load_needs_somewhere_to_load_from() -> None:
    with pytest.raises(ValueError, match="path"):
        load({})


def test_load_says_what_it_takes(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"dict of objects by name.*not a value of type Linear"):
        load(nn.Linear(1, 1), tmp_path)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="takes no unexpected, rename"):
        load(tmp_path, rename=str, unexpected="error")  # type: ignore[call-overload]


def test_a_directory_that_is_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save({"a": torch.zeros(1)}, tmp_path / f"step-{step}")
    says = "this is no checkpoint, but it holds some, such as step-2"
    for call in (
        lambda: load({"a": torch.zeros(1)}, tmp_path),
        lambda: load(tmp_path),
        lambda: pyckpt.to_torch(tmp_path, tmp_path / "x.pt"),
        lambda: pyckpt.export(tmp_path, tmp_path / "out"),
    ):
        with pytest.raises(FileNotFoundError, match=says) as caught:
            call()
        assert caught.value.filename == str(tmp_path)
    assert not caplog.records
    with pytest.raises(FileNotFoundError) as caught:
        load({"a": 0}, tmp_path / "none")
    assert caught.value.filename == str(tmp_path / "none" / ".metadata")


def test_a_file_is_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1)}, file)
    for call in (
        lambda: load({"a": torch.zeros(1)}, file),
        lambda: load(file),
        lambda: pyckpt.DirectReader(file).read_metadata(),
        lambda: pyckpt.to_torch(file, tmp_path / "x.pt"),
        lambda: pyckpt.export(file, tmp_path / "out"),
    ):
        with pytest.raises(NotADirectoryError, match=r"this is a file.*load_model.*import") as info:
            call()
        assert info.value.filename == str(file)
    assert not caplog.records
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        load({"a": 0}, file / "step-1")


def test_absent_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load({"a": 0}, reader=FileSystemReader(tmp_path / "none"), trust_metadata=True)
    assert caught.value.filename == str(tmp_path / "none" / ".metadata")


def test_errors_of_the_metadata_keep_their_class(tmp_path: Path) -> None:
    class Damaged(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            raise CorruptCheckpoint("damaged", path="p")

    class WithoutRankFiles(FileSystemReader):
        def read_metadata(self) -> Any:
            raise FileNotFoundError(errno.ENOENT, "gone", "p")

    with pytest.raises(CorruptCheckpoint, match="damaged"):
        load({"a": 0}, reader=Damaged(tmp_path), trust_metadata=True)
    with pytest.raises(FileNotFoundError, match="gone"):
        load({"a": 0}, reader=WithoutRankFiles(tmp_path), trust_metadata=True)


def test_any_failure_is_an_exception(tmp_path: Path) -> None:
    save({"a": torch.zeros(300)}, tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(b"")
    with pytest.raises(LoadError, match="loading failed") as caught:
        load_stock_file({"a": torch.zeros(300)}, tmp_path)
    assert caught.value.__cause__ is not None
    assert list(caught.value.failures) == [0]


def test_interrupts_are_not_swallowed(tmp_path: Path) -> None:
    class Interrupted(FileSystemReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            raise KeyboardInterrupt

    save({"a": 1}, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load({"a": 0}, reader=Interrupted(tmp_path), trust_metadata=True)


@pytest.mark.parametrize(
    "error",
    [
        CorruptCheckpoint("m", path="p", key="k", offset=1, expected=2, found=3),
        UnsafeCheckpoint("m", path="p", key="k", refused=("a.b",)),
        LoadError("m", missing=("a",), unexpected=("b",), mismatched=("c",), failures={1: "x"}),
    ],
)
def test_errors_travel_between_ranks(error: PyckptError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == "m"
    assert vars(copied) == vars(error)


# --- several ranks --------------------------------------------------------------------------------


def save_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2)
    save({"m": {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": 1}}, path)


def load_sharded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2)

    def create(key: str, metadata: TensorStorageMetadata) -> DTensor:
        return empty_dtensor(
            metadata.size,
            dtype=metadata.properties.dtype,
            device_mesh=mesh,
            placements=placements,
        )

    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        made: dict[str, Any] = {"m": {}}
        report = load_stock_file(made, path, create=create)
        assert isinstance(made["m"]["w"], DTensor)
        assert torch.equal(made["m"]["w"].full_tensor(), whole)
        assert sorted(report.filled) == ["m.n", "m.w"]
        assert report.bytes == made["m"]["w"].to_local().nbytes
        there = {"m": {"w": distribute_tensor(torch.zeros(5, 2), mesh, placements), "n": 0}}
        load_stock_file(there, path)
        assert torch.equal(there["m"]["w"].full_tensor(), whole)  # type: ignore[attr-defined]
        unmade = {"m": {"w": there["m"]["w"].to("meta")}}  # type: ignore[attr-defined]
        load_stock_file(unmade, path)
        assert torch.equal(unmade["m"]["w"].full_tensor(), whole)
    plain: dict[str, Any] = {"m": None}
    load_stock_file(plain, path)
    assert torch.equal(plain["m"]["w"], whole)


def test_two_ranks_load_what_two_ranks_saved(tmp_path: Path) -> None:
    run_ranks(2, save_sharded, tmp_path)
    run_ranks(2, load_sharded, tmp_path)
    # One process alone puts the shards together.
    state: dict[str, Any] = {"m": None}
    load_stock_file(state, tmp_path)
    assert torch.equal(state["m"]["w"], torch.arange(10.0).reshape(5, 2))


class Breaks(FileSystemReader):
    """Fails on the ranks that it is told, in the way it is told."""

    def __init__(self, path: Path, errors: dict[int, Exception]) -> None:
        super().__init__(path)
        self.errors = errors

    def read_data(self, plan: Any, planner: Any) -> Any:
        error = self.errors.get(torch.distributed.get_rank())
        if error is not None:
            raise error
        return super().read_data(plan, planner)


def fail_on_ranks(path: Path) -> None:
    def failure(errors: dict[int, Exception]) -> Exception:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            load({"a": torch.zeros(3)}, reader=Breaks(path / "c", errors), trust_metadata=True)
        return caught.value

    one = failure({1: CorruptCheckpoint("bad", key="a")})
    assert isinstance(one, CorruptCheckpoint)
    assert str(one) == "rank 1: bad"
    assert one.key == "a"
    assert isinstance(one.__cause__, CorruptCheckpoint)

    full = failure({r: OSError(errno.EIO, "broken", f"f{r}") for r in range(2)})
    assert isinstance(full, OSError)
    assert (full.errno, full.filename) == (errno.EIO, "f0")
    assert "ranks 0, 1" in str(full)
    assert full.__cause__ is not None
    assert str(full.__cause__.__cause__) == "[Errno 5] broken: 'f1'"

    mixed = failure({0: OSError(errno.EIO, "broken", "f"), 1: CorruptCheckpoint("bad")})
    assert isinstance(mixed, LoadError)
    assert list(mixed.failures) == [0, 1]
    assert "rank 1: CorruptCheckpoint: bad" in str(mixed)

    state = {"a": torch.zeros(3), **({"zz": 1} if torch.distributed.get_rank() else {})}
    with pytest.raises(LoadError, match=r"^rank 1: .*zz") as missing:
        load(state, reader=FileSystemReader(path / "c"), trust_metadata=True)
    assert missing.value.missing == ("zz",)
    with pytest.raises(FileNotFoundError, match="ranks 0, 1"):
        load({"a": torch.zeros(3)}, reader=FileSystemReader(path / "none"), trust_metadata=True)


class FailsOn:
    """An object whose method fails on rank 1."""

    def __init__(self, method: str) -> None:
        self.method = method

    def state_dict(self) -> dict[str, Any]:
        return self._return("state_dict", {"x": 0})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._return("load_state_dict", state)

    def _return(self, method: str, value: dict[str, Any]) -> dict[str, Any]:
        if method == self.method and torch.distributed.get_rank():
            raise ValueError("no state")
        return value


def fail_in_an_object(path: Path, method: str, options: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match=r"^loading failed: rank 1: ValueError: no state$"):
        load({"o": FailsOn(method)}, path, **options)
    load({"o": FailsOn("neither")}, path, **options)
    if torch.distributed.get_rank():  # alone, it is its own error, and nobody waits
        with pytest.raises(ValueError, match=r"^no state$"):
            load({"o": FailsOn(method)}, path, no_dist=True)


@pytest.mark.parametrize("share_reads", [True, slow(False), slow(None)])
@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_an_object_that_fails_on_one_rank(
    tmp_path: Path, method: str, share_reads: bool | None
) -> None:
    save({"o": {"x": 1}}, tmp_path)
    run_ranks(2, fail_in_an_object, tmp_path, method, {"share_reads": share_reads})


class Picky(Exception):
    """Pickle cannot make it again."""

    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")


def fail_with_an_own_class(path: Path) -> None:
    for errors in ({0: Picky("f", 1)}, {1: Picky("f", 1)}):
        with pytest.raises(LoadError, match="Picky: f:1"):
            load(
                {"a": torch.zeros(3)}, reader=Breaks(path / "c", dict(errors)), trust_metadata=True
            )


def test_errors_that_do_not_pickle_reach_all_ranks(tmp_path: Path) -> None:
    save({"a": ONES}, tmp_path / "c")
    run_ranks(2, fail_with_an_own_class, tmp_path)


@pytest.mark.slow
def test_failures_of_ranks(tmp_path: Path) -> None:
    save({"a": ONES}, tmp_path / "c")
    run_ranks(2, fail_on_ranks, tmp_path)


@pytest.mark.parametrize("into", ["loaded", "created"])
def test_complex_values_are_not_made_real(tmp_path: Path, into: str) -> None:
    save({"w": torch.tensor([1 + 2j, 3]), "v": ONES}, tmp_path)
    state = {"w": torch.zeros(2) if into == "loaded" else None, "v": torch.zeros(3)}
    with pytest.raises(LoadError, match="imaginary parts in w") as caught:
        load(state, tmp_path, create=lambda key, of: torch.zeros(of.size))
    assert caught.value.mismatched == ("w",)
    assert not state["v"].any()
    report = load({"v": torch.zeros(3, dtype=torch.complex64)}, tmp_path)
    assert [one.key for one in report.converted] == ["v"]


def test_a_complex_tensor_that_the_metadata_calls_real(tmp_path: Path) -> None:
    item = _hostile.saved(torch.tensor([1 + 2j, 3]))
    places = {_hostile.at("w", 0): _hostile.place(0, len(item))}
    _hostile.write(tmp_path, {"w": _hostile.described((2,))}, places, item)
    with pytest.raises(CorruptCheckpoint, match="complex64 is stored there"):
        load({"w": torch.zeros(2)}, tmp_path)
