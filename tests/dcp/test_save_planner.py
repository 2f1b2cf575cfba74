"""SavePlanner in one process: plans as stock's, made once."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import sampled, slow
from _staging import check_saved, engine, frozen, item, metadata_of, same, writer_to
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    default_planner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan

import pyckpt
from pyckpt.dcp import plans
from pyckpt.dcp.global_plan import global_plans


@pytest.fixture(scope="module")
def small_engine() -> Any:
    with engine() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    plans.known_plans.clear()
    global_plans.clear()
    yield
    assert len(plans.known_plans) <= plans.known_plans.most


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many items each plan had that was made anew."""
    made: list[int] = []
    original = default_planner.create_default_local_save_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        made.append(len(plan.items))
        return plan

    monkeypatch.setattr(default_planner, "create_default_local_save_plan", counted)
    return made


def some_state(tensors: int = 20) -> dict[str, Any]:
    return {
        "model": {f"w{i}": torch.nn.Parameter(torch.rand(3, i + 1)) for i in range(tensors)},
        "optimizer": {"state": {i: {"step": torch.tensor(0.0)} for i in range(3)}, "groups": []},
        "columns": torch.rand(20, 21)[:, ::2],
        "large": torch.rand(40_000),
        "list": [torch.rand(2), {"x": torch.rand(3)}],
        "step": 1,
        "object": {"name": ["a"]},
        "empty": torch.empty(0, 3),
    }


def described(path: Path) -> Any:
    """What the metadata says of the state, and of the place of each item in comparable form."""
    metadata = metadata_of(path)
    assert type(metadata) is Metadata
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.checkpoint_id) == str(path)
    places = {}
    for index, info in metadata.storage_data.items():
        values = dict(vars(info))
        assert (path / values.pop("relative_path")).is_file()
        places[index] = values
    return metadata.state_dict_metadata, metadata.planner_data, metadata.version, places


def save(
    state: dict[str, Any], path: Path, planner: Any, own: pyckpt.Engine, *, sync: bool = False
) -> Metadata:
    writer = writer_to(path, engine=own)
    if sync:
        return dcp.save(state, storage_writer=writer, planner=planner)
    metadata: Metadata = dcp.async_save(state, storage_writer=writer, planner=planner).result()
    return metadata


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("reused", [False, True], ids=["new planners", "one planner"])
def test_same_as_stock_at_every_save(
    tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int], sync: bool, reused: bool
) -> None:
    state = some_state()
    planner = pyckpt.SavePlanner()
    for turn in range(4):
        state["step"] = 10 ** (turn * 40)  # its pickle grows
        state["object"]["name"].append("more" * turn)
        with torch.no_grad():
            for tensor in state["model"].values():
                tensor.add_(1)
        ours, stock = tmp_path / f"ours-{turn}-{'x' * 80 * turn}", tmp_path / f"stock-{turn}"
        returned = save(
            state, ours, planner if reused else pyckpt.SavePlanner(), small_engine, sync=sync
        )
        made = len(plans_made)
        save(state, stock, dcp.DefaultSavePlanner(), small_engine, sync=sync)
        del plans_made[made:]
        assert described(ours) == described(stock)
        assert returned.state_dict_metadata == metadata_of(ours).state_dict_metadata
        assert type(returned) is Metadata
        assert returned == metadata_of(ours)
        assert pickle.loads(pickle.dumps(returned)) == returned
        check_saved(frozen(state), ours)
    assert len(plans_made) == 1


def test_one_path_saved_over(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    state = some_state()
    for turn in range(4):
        state["model"]["w3"] = torch.full((3, 4), float(turn), requires_grad=True)
        save(state, tmp_path, pyckpt.SavePlanner(), small_engine)
        check_saved(frozen(state), tmp_path)
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_no_python_for_single_items(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """From the third save on, functions are called as often for 2,000 tensors as for 20."""
    calls = {}
    for count in (20, 2000):
        # One key, since DCP logs a few lines for each at the top.
        state = {"model": {f"{i}": torch.rand(2) for i in range(count)}}
        for turn in range(4):
            writer = writer_to(tmp_path / f"{count}-{turn}", engine=small_engine)
            number = itertools.count()
            if turn == 3:
                sys.setprofile(lambda *_, number=number: next(number))
            try:
                dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            finally:
                sys.setprofile(None)
            calls[count] = next(number)
        check_saved(state, tmp_path / f"{count}-3")
    assert calls[2000] < calls[20] + 200
    assert calls[20] > 100  # the profiler did see it


def test_staging_takes_no_python_for_single_items(small_engine: pyckpt.Engine) -> None:
    calls = {}
    stager = pyckpt.PinnedStager(engine=small_engine)
    for count in (20, 2000):
        state = {f"{i}": torch.rand(2) for i in range(count)}
        for _ in range(3):
            number = itertools.count()
            sys.setprofile(lambda *_, number=number: next(number))
            try:
                staging, copies = stager.begin(state, direct=True)
            finally:
                sys.setprofile(None)
            calls[count] = next(number)
            staging.staged.result()
            assert same(copies, frozen(state))
            staging.release()
    assert calls[2000] < calls[20] + 200


CHANGES: dict[str, Any] = {
    "value": lambda s: s["model"]["w1"].data.add_(1),
    "new tensor": lambda s: s["model"].update(w1=torch.nn.Parameter(torch.rand(3, 2))),
    "object": lambda s: s.update(object={"name": list(range(1000))}),
    "integer": lambda s: s.update(step=12345678901234567890),
}
CHANGES_OF_PLAN: dict[str, Any] = {
    "key": lambda s: s["model"].update(w99=s["model"].pop("w1")),
    "order": lambda s: s["model"].update(w1=s["model"].pop("w1")),
    "more": lambda s: s["model"].update(more=torch.rand(2)),
    "less": lambda s: s["model"].pop("w1"),
    "shape": lambda s: s["model"].update(w1=torch.nn.Parameter(torch.rand(3, 5))),
    "same bytes, other shape": lambda s: s["model"].update(w1=torch.nn.Parameter(torch.rand(6))),
    "dtype": lambda s: s["model"].update(w1=s["model"]["w1"].detach().int()),
    "strides": lambda s: s.update(large=torch.rand(200, 200).t()),
    "container": lambda s: s.update(list={"0": torch.rand(2)}),
    "ordered": lambda s: s.update(model=OrderedDict(s["model"])),
    "object to tensor": lambda s: s.update(step=torch.tensor(3)),
    "tensor to object": lambda s: s.update(large=None),
    "type of object": lambda s: s.update(step="three"),
    "list now holds a tensor": lambda s: s["optimizer"].update(groups=[torch.rand(3)]),
    "key of other type": lambda s: s["optimizer"]["state"].update(
        {"1": s["optimizer"]["state"].pop(1)}
    ),
}


@pytest.mark.parametrize("sync", [False, slow(True)], ids=["async", "sync"])
@pytest.mark.parametrize("change", [*CHANGES, *sampled(((name,) for name in CHANGES_OF_PLAN), 3)])
def test_changes(
    tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int], change: str, sync: bool
) -> None:
    state = some_state()
    for turn in range(2):
        save(state, tmp_path / f"before-{turn}", pyckpt.SavePlanner(), small_engine, sync=sync)
    assert len(plans_made) == 1
    ({**CHANGES, **CHANGES_OF_PLAN})[change](state)
    for turn in range(3):
        ours, stock = tmp_path / f"{turn}", tmp_path / f"stock-{turn}"
        save(state, ours, pyckpt.SavePlanner(), small_engine, sync=sync)
        made = len(plans_made)
        save(state, stock, dcp.DefaultSavePlanner(), small_engine, sync=sync)
        del plans_made[made:]
        assert described(ours) == described(stock)
        check_saved(frozen(state), ours)
    if not (change == "ordered" and not sync):
        assert len(plans_made) == (1 if change in CHANGES else 2)


def test_requires_grad(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """It stands in the metadata of what is saved without staging."""
    tensor = torch.rand(5)
    for turn, requires_grad in enumerate([False, False, True, True, False]):
        tensor.requires_grad_(requires_grad)
        path = tmp_path / str(turn)
        save({"t": tensor}, path, pyckpt.SavePlanner(), small_engine, sync=True)
        properties = metadata_of(path).state_dict_metadata["t"].properties  # type: ignore[union-attr]
        assert properties.requires_grad is requires_grad


def test_state_dicts_that_take_turns(
    tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int]
) -> None:
    states = [{f"{i}": torch.rand(k + 1) for i in range(k + 1)} for k in range(5)]
    for turn in range(4):
        for k, state in enumerate(states):
            state["0"].add_(1)
            path = tmp_path / f"{turn}-{k}"
            save(state, path, pyckpt.SavePlanner(), small_engine)
            check_saved(state, path)
    assert len(plans_made) == len(states)


@pytest.mark.slow
def test_plans_least_recently_used_are_forgotten(
    tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int]
) -> None:
    count = plans.known_plans.most + 3
    states = [{"t": torch.rand(k + 1)} for k in range(count)]
    path = tmp_path / "path"
    for _ in range(2):
        for state in states:
            save(state, path, pyckpt.SavePlanner(), small_engine)
            check_saved(state, path)
    assert len(plans_made) == 2 * count
    save(states[-1], path, pyckpt.SavePlanner(), small_engine)
    assert len(plans_made) == 2 * count
    for _ in range(global_plans.most):
        states[0]["t"] = torch.rand(states[0]["t"].numel() + 1)
        save(states[0], path, pyckpt.SavePlanner(), small_engine, sync=True)
    assert len(global_plans) == global_plans.most


def test_other_writers(tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int]) -> None:
    """Ours and stock's in turns."""
    state = some_state()
    for turn in range(6):
        state["step"] = turn
        path = tmp_path / str(turn)
        writer = writer_to(path, engine=small_engine) if turn % 3 == 1 else FileSystemWriter(path)
        dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        check_saved(frozen(state), path)
    assert len(plans_made) == 1


def test_writers_of_several_classes(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """A class made from DirectWriter, and other settings, share what was remembered."""

    class Mine(pyckpt.DirectWriter):
        pass

    state = some_state()
    for turn in range(8):
        state["step"] = turn**turn
        path = tmp_path / str(turn)
        cls = (Mine, pyckpt.DirectWriter)[turn % 2]
        writer = cls(path, engine=small_engine, direct=("auto", "off")[turn // 2 % 2])
        dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner()).result()
        check_saved(frozen(state), path)


def without(plan: SavePlan, key: str) -> SavePlan:
    items = [item for item in plan.items if item.index.fqn != key]
    return dataclasses.replace(plan, items=items)


@pytest.mark.parametrize("base", [FileSystemWriter, pyckpt.DirectWriter])
def test_a_writer_that_leaves_items_out_of_a_known_plan(tmp_path: Path, base: Any) -> None:
    class Leaves(base):  # type: ignore[misc]
        def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
            return without(super().prepare_local_plan(plan), "b")

    for turn in range(5):
        state: dict[str, Any] = {"a": torch.full((3,), float(turn)), "b": torch.ones(4), "c": turn}
        path = tmp_path / str(turn)
        left_out = turn in (1, 3)
        writer = (Leaves if left_out else base)(path)
        dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        metadata = metadata_of(path)
        assert ("b" in metadata.state_dict_metadata) is not left_out
        assert any(index.fqn == "b" for index in metadata.storage_data) is not left_out
        if left_out:
            del state["b"]
        check_saved(state, path)


@pytest.mark.parametrize("base", [FileSystemWriter, pyckpt.DirectWriter])
@pytest.mark.parametrize("first", [True, False])
def test_a_writer_that_leaves_items_out_of_the_plan_of_all(
    tmp_path: Path, base: Any, first: bool
) -> None:
    """As stock does, it does not write them; and `DirectWriter` does not write of them either."""

    class Leaves(base):  # type: ignore[misc]
        def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
            return [without(plan, "b") for plan in super().prepare_global_plan(plans)]

    state: dict[str, Any] = {"a": torch.ones(3), "b": torch.ones(4), "c": 1}
    if not first:
        dcp.save(state, storage_writer=base(tmp_path / "0"), planner=pyckpt.SavePlanner())
    path = tmp_path / "1"
    if base is pyckpt.DirectWriter:
        with pytest.raises(CheckpointException, match="b is in the plan, and nobody wrote"):
            dcp.save(state, storage_writer=Leaves(path), planner=pyckpt.SavePlanner())
        assert not (path / ".metadata").exists()
    else:
        dcp.save(state, storage_writer=Leaves(path), planner=pyckpt.SavePlanner())
        found = {"a": torch.zeros(3), "c": 0}
        dcp.load(found, storage_reader=FileSystemReader(path))
        assert found["a"].eq(1).all()
        places = FileSystemReader(path).read_metadata().storage_data
        assert {index.fqn for index in places} == {"a", "c"}
    dcp.save(state, storage_writer=base(tmp_path / "2"), planner=pyckpt.SavePlanner())
    check_saved(state, tmp_path / "2")


@pytest.mark.parametrize("base", [FileSystemWriter, pyckpt.DirectWriter])
def test_what_a_writer_changes_in_the_metadata_is_written(tmp_path: Path, base: Any) -> None:
    """In that save, and in no other of the plan."""

    class Edits(base):  # type: ignore[misc]
        def finish(self, metadata: Metadata, results: Any) -> None:
            of_a: Any = metadata.state_dict_metadata["a"]
            assert len(of_a.chunks) == 1
            if self.edits:
                of_a.properties.requires_grad = True
                paths: Any = metadata.planner_data
                paths["more"] = ("more",)
                of_a.chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
                of_a.size = torch.Size([3])
            super().finish(metadata, results)

    state = {"a": torch.ones(5)}
    for turn in range(4):
        writer = Edits(tmp_path / str(turn))
        writer.edits = turn == 1
        dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        metadata = metadata_of(tmp_path / str(turn))
        written: Any = metadata.state_dict_metadata["a"]
        assert written.properties.requires_grad is writer.edits
        assert ("more" in metadata.planner_data) is writer.edits
        assert written.size == written.chunks[0].sizes == (3 if writer.edits else 5,)


def test_a_failed_save_is_not_remembered_wrongly(
    tmp_path: Path, small_engine: pyckpt.Engine
) -> None:
    """The first, second, third save of a plan fails at its end, or in between."""

    class Fails(pyckpt.DirectWriter):
        at = ""

        def prepare_global_plan(self, plans: Any) -> Any:
            if self.at == "plan":
                raise OSError("made to fail")
            return super().prepare_global_plan(plans)

        def finish(self, metadata: Any, results: Any) -> None:
            if self.at == "finish":
                raise OSError("made to fail")
            super().finish(metadata, results)

    state = some_state()
    for turn, at in enumerate(["finish", "plan", "", "finish", "", "plan", "", "", "finish", ""]):
        state["step"] = turn
        path = tmp_path / str(turn)
        writer = Fails(path, engine=small_engine, sync_files=False)
        writer.at = at
        future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        if at:
            with pytest.raises(BaseException, match="made to fail"):
                future.result()
            assert not (path / ".metadata").exists()
        else:
            future.result()
            check_saved(frozen(state), path)


def test_tensors_that_are_more_than_memory_are_planned_anew(
    tmp_path: Path, small_engine: pyckpt.Engine, plans_made: list[int]
) -> None:
    """What stands behind their type is not compared."""

    class Tagged(torch.Tensor):
        pass

    for turn in range(3):
        path = tmp_path / str(turn)
        state = {"tagged": torch.rand(turn + 1).as_subclass(Tagged), "t": torch.rand(3)}
        before = state["tagged"].clone()
        save(state, path, pyckpt.SavePlanner(), small_engine)
        assert same(
            item(path, "tagged").as_subclass(torch.Tensor), before.as_subclass(torch.Tensor)
        )
    assert len(plans_made) == 3


def test_pickles_as_its_class() -> None:
    planner = pyckpt.SavePlanner()
    planner.leaves = [torch.rand(3)]
    assert pickle.loads(pickle.dumps(planner)).leaves == []
