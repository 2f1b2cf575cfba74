"""What a checkpoint holds can be loaded, by stock too, as it was; or it is refused when saving."""

from __future__ import annotations

import collections
import errno
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _filesystems import TMPFS_BYTES, free_bytes
from _ranks import RanksFailed, run_child, run_ranks
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pyckpt
from pyckpt.dcp.to_torch import write_torch
from pyckpt.errors import CorruptCheckpoint, SaveError
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store.catalog import Catalog


def save(objects: dict[str, Any], path: Path | str) -> None:
    state = AppState(objects).state_dict()
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path), planner=pyckpt.SavePlanner())


VALUES: dict[str, Any] = {
    "by number": {1: "a", 2: {"b": []}},
    "dicts": [{"start": 1.0}, {"start": 2.0, "end": [{}]}],
    "empty": {},
    "ordered": OrderedDict([(3, "c"), (1, "d")]),
    "counter": Counter("abba"),
    "mixed": {None: 1, (1, 2): "pair", 2.5: True, "text": [1, (2, {3: 4})]},
    "text": "text",
}


def onecycle() -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)


def test_stock_gets_the_true_values(tmp_path: Path) -> None:
    _, scheduler = onecycle()
    save({**VALUES, "scheduler": scheduler}, tmp_path / "saved")
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "stock.pt")
    # As it was written: with nothing in it that needs code to be loaded.
    stock = torch.load(tmp_path / "stock.pt", weights_only=True)
    assert {name: stock[name] for name in VALUES} == VALUES
    assert {name: type(stock[name]) for name in VALUES} == {n: type(v) for n, v in VALUES.items()}
    assert stock["scheduler"]["_schedule_phases"] == scheduler._schedule_phases


def test_loading_into_plain_dicts(tmp_path: Path) -> None:
    optimizer, scheduler = onecycle()
    save({**VALUES, "scheduler": scheduler}, tmp_path)
    state: dict[str, Any] = {**dict.fromkeys(VALUES), "scheduler": scheduler}
    scheduler._schedule_phases = []
    pyckpt.load(state, tmp_path)
    assert {name: state[name] for name in VALUES} == VALUES
    optimizer.step()
    scheduler.step()


def test_values_that_another_planner_saved(tmp_path: Path) -> None:
    dcp.save(AppState(dict(VALUES)).state_dict(), storage_writer=pyckpt.DirectWriter(tmp_path))
    state: dict[str, Any] = dict.fromkeys(VALUES)
    AppState(state).load(pyckpt.DirectReader(tmp_path))
    assert state == VALUES


def test_values_in_the_first_form(tmp_path: Path) -> None:
    old = {"by number": ("pyckpt.value", {1: "a"}), "array": ("pyckpt.ndarray", torch.arange(3))}
    dcp.save({"cfg": old}, storage_writer=pyckpt.DirectWriter(tmp_path))
    loaded = pyckpt.load(tmp_path)["cfg"]
    assert loaded["by number"] == {1: "a"}
    assert loaded["array"].tolist() == [0, 1, 2]
    state: dict[str, Any] = {"cfg": None}
    AppState(state).load(pyckpt.DirectReader(tmp_path))
    assert state["cfg"]["by number"] == {1: "a"}


# --- all of it ------------------------------------------------------------------------------------


def test_everything_without_a_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    _, scheduler = onecycle()
    shadow = {0: torch.ones(2), 1: {"nested": [torch.zeros(1), 5]}}
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(
            7, {**VALUES, "model": model, "scheduler": scheduler, "shadow": shadow}
        )
    found = pyckpt.load(handle.path)
    assert {name: found[name] for name in VALUES} == VALUES
    assert list(found["model"]) == ["weight", "bias"]
    assert torch.equal(found["model"]["weight"], model.weight)
    assert list(found["shadow"]) == [0, 1]
    assert found["shadow"][1]["nested"][1] == 5
    assert found["scheduler"] == scheduler.state_dict()

    pyckpt.to_torch(handle.path, tmp_path / "out.pt")
    whole = torch.load(tmp_path / "out.pt", weights_only=True)
    assert whole.keys() == found.keys()
    assert torch.equal(whole["model"]["weight"], model.weight)
    assert whole["mixed"] == VALUES["mixed"]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.pt"]
    with pytest.raises(TypeError, match="or a path alone"):
        pyckpt.load(handle.path, tmp_path)  # type: ignore[call-overload]


def test_to_torch_leaves_nothing_where_it_fails(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="pickle"):
        write_torch({"a": lambda: None}, tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []


def test_to_torch_replaces_files_and_nothing_else(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    before = sorted(tmp_path.iterdir())
    for name, kind in (
        ("pipe", FileExistsError),
        ("link", FileExistsError),
        ("folder", IsADirectoryError),
    ):
        # Before it looks for the checkpoint, of which there is none.
        with pytest.raises(kind, match="no regular file") as caught:
            pyckpt.to_torch(tmp_path / "saved", tmp_path / name)
        assert caught.value.filename == str(tmp_path / name)
        with pytest.raises(kind, match="no regular file"):
            write_torch({"a": 1}, tmp_path / name)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()

    save({"a": 1}, tmp_path / "saved")
    (tmp_path / "file").touch()
    (tmp_path / "to file").symlink_to("file")
    (tmp_path / "to nothing").symlink_to("none")
    for name in ("file", "to file", "to nothing"):
        pyckpt.to_torch(tmp_path / "saved", tmp_path / name)
        assert torch.load(tmp_path / name, weights_only=True) == {"a": 1}


@pytest.mark.root
@pytest.mark.parametrize("filesystem", ["tmpfs"], indirect=True)
@pytest.mark.parametrize("left", [0, 64 << 10, 8 << 20])
def test_to_torch_names_a_full_disk(left: int, filesystem: Path, tmp_path: Path) -> None:
    save({"w": torch.ones(TMPFS_BYTES // 4), "n": list(range(99))}, tmp_path / "saved")
    with (filesystem / "others").open("wb") as others:
        os.posix_fallocate(others.fileno(), 0, free_bytes(filesystem) - left)
    with pytest.raises(OSError, match="No space left") as raised:
        pyckpt.to_torch(tmp_path / "saved", filesystem / "out.pt")
    assert raised.value.errno == errno.ENOSPC
    assert raised.value.filename == str(filesystem / "out.pt")
    assert os.listdir(filesystem) == ["others"]


# --- dicts of other classes -----------------------------------------------------------------------


class Settings(dict[str, Any]):
    """Without attributes of its own."""


class Shown(dict[str, Any]):
    """Shows its entries as attributes."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Ema(dict[str, Any]):
    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.decay = 0.9


class Held(dict[str, Any]):
    """Has a state beside its entries."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def by_default(*entries: tuple[Any, Any]) -> collections.defaultdict[Any, Any]:
    return collections.defaultdict(list, entries)


DICTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "defaultdict, empty": (by_default, by_default()),
    "defaultdict": (by_default, by_default(("a", [1]))),
    "defaultdict, numbers": (by_default, by_default((3, [1]))),
    "defaultdict, tensors": (by_default, by_default((3, [torch.ones(2)]))),
    "ordered, empty": (OrderedDict, OrderedDict()),
    "ordered": (OrderedDict, OrderedDict(b=1, a=2)),
    "counter, empty": (Counter, Counter()),
    "counter": (Counter, Counter("abba")),
    "own, empty": (Settings, Settings()),
    "own": (Settings, Settings(a=1, b={"c": torch.ones(2)})),
    "shown, empty": (Shown, Shown()),
    "shown": (Shown, Shown(a=1)),
    "module": (OrderedDict, nn.Linear(2, 2).state_dict()),
    "module, empty": (OrderedDict, nn.ReLU().state_dict()),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", DICTS)
def test_a_dict_that_is_in_the_state_is_filled(name: str, nested: bool, tmp_path: Path) -> None:
    make, value = DICTS[name]

    def state_of(value: Any) -> dict[str, Any]:
        return {"d": {"in": value} if nested else value}

    def check(state: dict[str, Any], live: Any) -> None:
        found = state["d"]["in"] if nested else state["d"]
        assert found is live
        assert str(found) == str(value)

    pyckpt.save(state_of(value), tmp_path / "saved")
    live = make()
    state = state_of(live)
    pyckpt.load(state, tmp_path / "saved")
    check(state, live)

    with pyckpt.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state_of(value)).wait()
        live = make()
        state = state_of(live)
        checkpointer.restore(state)
        check(state, live)
    # Where there was none, a dict.
    found = pyckpt.load(tmp_path / "saved")["d"]
    found = found["in"] if nested else found
    assert type(found) in (dict, OrderedDict, Counter)
    assert str(dict(found)) == str(dict(value))


@pytest.mark.parametrize("value", [Ema(), Ema(a=1), Ema(a=torch.ones(2))], ids=str)
@pytest.mark.parametrize("where", ["top", "dict", "list", "tuple", "state of an object"])
def test_a_dict_with_attributes_of_its_own_is_refused(
    value: Ema, where: str, tmp_path: Path
) -> None:
    class Object:
        def state_dict(self) -> Any:
            return {"in": value}

        def load_state_dict(self, state: Any) -> None: ...

    states = {
        "top": value,
        "dict": {"in": value},
        "list": [value],
        "tuple": (value,),
        "state of an object": Object(),
    }
    said = r"^saved.* is or contains a \S+Ema, which loading, running no code from files"
    with pytest.raises(TypeError, match=said):
        pyckpt.save({"saved": states[where]}, tmp_path / "saved")
    with pytest.raises(TypeError, match=said):
        AppState({"saved": states[where]}).check()


@pytest.mark.parametrize("value", [Held(), Held(a=1)], ids=str)
def test_a_dict_with_a_state_is_refused_in_others(value: Held) -> None:
    with pytest.raises(TypeError, match=r"must be entries of the state itself.*\{'d\.in': "):
        AppState({"d": {"in": value}}).check()


def allowed_dicts(_: Any, path: str) -> None:
    torch.serialization.add_safe_globals([Ema, Settings])
    with pytest.raises(TypeError, match=r"^d is or contains a \S+Ema, which is allowed, and yet"):
        AppState({"d": Ema(a=1)}).check()
    for i, value in enumerate((Settings(), Settings(a=1))):
        pyckpt.save({"in": [value]}, f"{path}/{i}")
        (found,) = pyckpt.load(f"{path}/{i}")["in"]
        assert (type(found), found) == (dict, value)


def test_dicts_of_classes_that_are_allowed(tmp_path: Path) -> None:
    run_child(allowed_dicts, str(tmp_path))


def test_an_array_in_a_counter(tmp_path: Path) -> None:
    pyckpt.save({"c": Counter(a=np.arange(3))}, tmp_path)  # type: ignore[arg-type]
    assert isinstance(pyckpt.load(tmp_path)["c"]["a"], np.ndarray)


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_place_of_an_object_with_a_state_is_named(kind: Any, tmp_path: Path) -> None:
    models = kind([1, nn.Linear(1, 1)])
    with pytest.raises(TypeError, match=r"such as \{'models\.1': \.\.\.\}"):
        pyckpt.save({"models": models}, tmp_path / "saved")
    with pytest.raises(TypeError, match=r"such as \{'all\.models\.0\.1': \.\.\.\}"):
        AppState({"all": {"models": [models]}}).check()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("where", ["n", "n.in", "n.0"])
def test_a_nested_tensor_is_refused(layout: torch.layout, where: str, tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    value = {"n": nested, "n.in": {"in": nested}, "n.0": (nested,)}[where]
    said = rf"\b{where} is a nested tensor, which cannot be saved"
    with pytest.raises(TypeError, match=said):
        pyckpt.save({"n": value}, tmp_path / "saved")
    with (
        pytest.raises(SaveError, match=said),
        pyckpt.Checkpointer(tmp_path / "run") as checkpointer,
    ):
        checkpointer.save(1, {"n": value})


# --- tensors under other keys than strings --------------------------------------------------------


class PerParameter:
    """As wrappers for optimizers that step in the backward pass: a raw state of each."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {
            name: torch.optim.Adam([param], lr=0.1) for name, param in model.named_parameters()
        }

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, state in state_dict.items():
            self.optimizers[name].load_state_dict(state)


def sharded(seed: int) -> tuple[nn.Module, PerParameter]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, PerParameter(model)


def moments(optimizers: PerParameter) -> dict[tuple[str, str], Any]:
    return {
        (name, key): value.full_tensor().tolist() if key != "step" else value.tolist()
        for name, one in optimizers.optimizers.items()
        for state in one.state.values()
        for key, value in state.items()
    }


def in_backward(path: str) -> None:
    model, optimizers = sharded(0)
    model(torch.ones(2, 5)).sum().backward()
    optimizers.step()
    save({"model": model, "optimizers": optimizers}, path)
    fresh, others = sharded(1)
    AppState({"model": fresh, "optimizers": others}).load(pyckpt.DirectReader(path))
    assert len(moments(others)) == 6
    assert moments(others) == moments(optimizers)
    for one, optimizer in ((model, optimizers), (fresh, others)):
        one.zero_grad()
        one(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    assert moments(others) == moments(optimizers)


def test_optimizers_in_the_backward_under_fsdp2(tmp_path: Path) -> None:
    run_ranks(2, in_backward, str(tmp_path))
    whole = pyckpt.load(tmp_path)["optimizers"]
    assert whole["weight"]["state"][0]["exp_avg"].shape == (3, 5)
    assert list(whole["bias"]["state"]) == [0]


def dtensor_in_a_tuple(path: str) -> None:
    model, _ = sharded(0)
    save({"pair": (1, model.weight)}, path)


def test_a_sharded_tensor_in_a_tuple_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"pair\.1 is or contains a DTensor in a tuple or set"):
        run_ranks(2, dtensor_in_a_tuple, str(tmp_path))


def test_keys_that_are_the_same_as_strings_are_refused() -> None:
    with pytest.raises(TypeError, match=r"shadow has tensors under keys that are the same as str"):
        AppState({"shadow": {1: torch.ones(1), "1": torch.ones(1)}}).state_dict()


# --- special tensors ------------------------------------------------------------------------------

SPECIAL = ("coo", "csr", "quantised")


def special(kind: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beta, and on its way out
        if kind == "quantised":
            return torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)
        return torch.eye(4).to_sparse() if kind == "coo" else torch.eye(4).to_sparse_csr()


def dense(tensor: torch.Tensor) -> Any:
    return (tensor.dequantize() if tensor.is_quantized else tensor.to_dense()).tolist()


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*quantize", "ignore:TypedStorage", "ignore:Sparse invariant"
)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors(kind: str, tmp_path: Path) -> None:
    value = special(kind)
    save({"buffer": value, "more": {"inner": value}}, tmp_path / "saved")
    live = value.clone()
    state: dict[str, Any] = {"buffer": live, "more": None}
    AppState(state).load(pyckpt.DirectReader(tmp_path / "saved"))
    assert state["buffer"] is live
    for found in (live, state["more"]["inner"], pyckpt.load(tmp_path / "saved")["buffer"]):
        assert (found.layout, found.dtype, found.is_quantized) == (
            value.layout,
            value.dtype,
            value.is_quantized,
        )
        assert dense(found) == dense(value)
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "stock.pt")


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR", "ignore:.*quantize", "ignore:TypedStorage", "ignore:Sparse invariant"
)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors_that_were_saved_as_tensors(kind: str, tmp_path: Path) -> None:
    value = special(kind)
    dcp.save({"buffer": value}, storage_writer=pyckpt.DirectWriter(tmp_path))
    found = pyckpt.load(tmp_path)["buffer"]
    assert found.layout == value.layout
    assert dense(found) == dense(value)


# --- what is allowed, and cannot be loaded --------------------------------------------------------


def deques(_: Any) -> None:
    torch.serialization.add_safe_globals([collections.deque])
    AppState({"history": collections.deque(maxlen=5)}).check()
    for value in (collections.deque([1.0]), {"in": [collections.deque([1.0])]}):
        with pytest.raises(TypeError, match=r"^history.* is or contains a collections.deque, whi"):
            AppState({"history": value}).state_dict()


def test_a_class_that_is_allowed_and_cannot_be_loaded() -> None:
    run_child(deques)


# --- ranks ----------------------------------------------------------------------------------------


def save_own(path: str, values: list[Any]) -> None:
    save({"metric": {"value": values[dist.get_rank()]}}, path)


CONFLICTS = {
    r"metric.value is an object on rank 0 and a list on 1": [[], [torch.ones(2)]],
    r"metric.value has 1 entries on rank 0 and 2 on 1": [[torch.ones(2)], [torch.ones(2)] * 2],
    r"metric.value is a tensor of shape \(2,\) on rank 0 and a tensor of shape \(3,\) on 1": [
        torch.ones(2),
        torch.ones(3),
    ],
    r"metric.value is an object on rank 0 and a dict on 1": [{}, {"a": 1}],
}


@pytest.mark.parametrize("said", CONFLICTS)
def test_ranks_that_contradict_each_other(said: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=rf"{said}; .*pyckpt.MetricState"):
        run_ranks(2, save_own, str(tmp_path), CONFLICTS[said])
    assert not (tmp_path / ".metadata").exists()


def differing(path: str) -> Any:
    rank = dist.get_rank()
    history: list[int] = [] if rank == 0 else [rank]
    own = list(history)
    state = {"history": history, "by_name": {str(rank): rank}, "own": pyckpt.PerRank(own)}
    with pyckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, state).wait()
        found = {"history": [], "by_name": {}, "own": pyckpt.PerRank([])}
        checkpointer.restore(found)
    assert found["own"].value == own
    return found["history"], found["by_name"]


def test_of_lists_of_plain_values_one_ranks_is_saved(tmp_path: Path) -> None:
    """As docs/state.md says: only what is in a PerRank is each rank's own."""
    (one, names), (other, same) = run_ranks(2, differing, str(tmp_path))
    assert one == other
    assert one in ([], [1])
    assert names == same == {"0": 0, "1": 1}


# --- verifying ------------------------------------------------------------------------------------


class Unknown:
    pass


def contradiction(path: str) -> None:
    """As two ranks saved it before that was an error: with stock's planner."""
    value: Any = [[], [torch.ones(2)]][dist.get_rank()]
    dcp.save({"metric": {"value": value}}, storage_writer=pyckpt.DirectWriter(path))


def test_verifying_tries_what_restoring_would_do(tmp_path: Path) -> None:
    def verified(step: int) -> str:
        with pyckpt.Checkpointer(tmp_path) as checkpointer:
            entries = {entry.step: entry for entry in checkpointer.inspect(verify=True)}
        assert Catalog(tmp_path).examine(step).state == "valid"
        return str(entries[step])

    run_ranks(2, contradiction, str(tmp_path / "step-00000001"))
    assert "damaged (metric.value.0 is in the checkpoint as a value and more)" in verified(1)
    writer = pyckpt.DirectWriter(tmp_path / "step-00000002")
    dcp.save({"object": Unknown()}, storage_writer=writer)
    assert "damaged (object: the saved object contains" in verified(2)
    lone = {"rng": {"rank-00001-of-00002": 5}}
    dcp.save(lone, storage_writer=pyckpt.DirectWriter(tmp_path / "step-00000003"))
    assert "damaged (rng: the checkpoint does not have the state of each of 2" in verified(3)
    save({**VALUES, **{kind: special(kind) for kind in SPECIAL}}, tmp_path / "step-00000004")
    assert verified(4) == "step-00000004: valid"
    with pytest.raises(CorruptCheckpoint):
        AppState({"metric": None}).load(pyckpt.DirectReader(tmp_path / "step-00000001"))


def doubled(times: int) -> list[Any]:
    """What has as many lists in it as 2 to this power, which are ``times`` lists."""
    value: list[Any] = ["x"]
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize("kind", ["list", "dict", "in a dict with tensors"])
def test_one_list_that_is_met_again_and_again(kind: str, tmp_path: Path) -> None:
    value: Any = doubled(60)
    if kind == "dict":
        value = {1: value, 2: value}
    elif kind == "in a dict with tensors":
        value = {"w": torch.ones(2), "of": value}
    save({"value": value}, tmp_path)
    state = {"value": None}
    pyckpt.load(state, tmp_path)
    found: Any = state["value"]
    if kind == "in a dict with tensors":
        found = found["of"]
    for _ in range(60):
        found = found[1]
    assert "x" in found if kind != "dict" else True


def test_what_contains_itself_is_refused(tmp_path: Path) -> None:
    value: list[Any] = [1]
    value.append(value)
    with_tensor: dict[str, Any] = {"x": torch.ones(1)}
    with_tensor["again"] = with_tensor
    for one in (value, with_tensor, {"again": [with_tensor]}):
        with pytest.raises(TypeError, match=r"value.*contains itself"):
            save({"value": one}, tmp_path)


@pytest.mark.parametrize("dtype", ["datetime64[D]", "<U1", "object", ">i4", "longdouble"])
def test_arrays_that_torch_has_not(dtype: str) -> None:
    array = np.array([1]).astype(dtype)
    with pytest.raises(TypeError, match=r"value\.a is or contains a numpy") as info:
        AppState({"value": {"a": array}}).state_dict()
    assert array.dtype.str in str(info.value) or str(array.dtype) in str(info.value)


def test_two_values_of_one_name(tmp_path: Path) -> None:
    tensor = torch.ones(1)
    with pytest.raises(pyckpt.errors.SaveError, match=r"named 'v\.a\.b'.*; rename one"):
        pyckpt.save({"v": {"a.b": tensor, "a": {"b": tensor}}}, tmp_path)
