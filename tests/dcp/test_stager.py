"""PinnedStager: what is saved is the state at the call, whatever the program does next."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import threading
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _sampling import sampled, slow
from _staging import (
    PAGE,
    RING,
    SLOT,
    blank,
    check_saved,
    engine,
    frozen,
    item,
    overwrite,
    same,
    slowed,
    writer_to,
)
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

import pyckpt
from pyckpt.dcp.staging import Staging

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, SLOT + 1, 65535, 65536, 7919, 1 << 20, (1 << 20) + 13]


@pytest.fixture(scope="module")
def small_engine() -> Any:
    with engine() as made:
        yield made


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def some_state() -> dict[str, Any]:
    base = torch.rand(40, 50, 6)
    weight = torch.nn.Parameter(torch.rand(300, 200))
    return {
        "sizes": {size: random_bytes(size) for size in SIZES},
        "dtypes": OrderedDict(
            (str(dtype), random_bytes(48).view(dtype) if dtype != torch.bool else torch.ones(9) > 0)
            for dtype in DTYPES
        ),
        "layouts": {
            "columns": base[:, ::7],
            "rows": base[3:9],
            "permuted": base.permute(2, 0, 1),
            "channels_last": torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
            "expanded": torch.rand(5, 1).expand(5, 3000),
            "large columns": torch.rand(700, 300)[:, 1::3],
            "zero-d": torch.tensor(3.25),
            "empty": torch.empty(3, 0),
        },
        "tied": [weight, weight, weight.data, {"transposed": weight.t()}],
        "many": [random_bytes(i * 37 % 5000) for i in range(300)],
        "step": 7,
        "name": "state",
        "nothing": None,
        "flags": [1, 2, [3, {"a": 4}], "five"],
        "keys": {True: torch.arange(5), "x": {-3: torch.rand(2)}},
    }


@pytest.fixture(params=["its own", "one with optimizers"])
def writer_options(request: pytest.FixtureRequest, small_engine: pyckpt.Engine) -> dict[str, Any]:
    if request.param == "its own":
        return {"engine": small_engine}
    other = torch.optim.SGD([torch.nn.Parameter(torch.rand(3))])
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[other])
    return {"engine": small_engine, "stager": stager}


def test_overwritten_after_the_call(tmp_path: Path, writer_options: dict[str, Any]) -> None:
    state = some_state()
    for turn in range(3):
        before = frozen(state)
        path = tmp_path / str(turn)
        future = dcp.async_save(state, storage_writer=writer_to(path, **writer_options))
        overwrite(state)
        future.result()
        check_saved(before, path)


@pytest.mark.parametrize("planner", [slow(dcp.DefaultSavePlanner), pyckpt.SavePlanner])
def test_memory_is_given_back(tmp_path: Path, planner: Any) -> None:
    state = some_state()
    with engine() as own:
        for turn in range(4):
            future = dcp.async_save(
                state,
                storage_writer=writer_to(tmp_path, engine=own),
                planner=planner(),
            )
            future.result()
            assert own.native.arena_used_bytes == 0
            held = own.native.arena_held_bytes
            if turn == 0:
                first = held
        assert held == first
        check_saved(state, tmp_path)


def test_shared_memory_is_staged_once() -> None:
    tensor = random_bytes(1 << 20)
    state = {
        "a": tensor,
        "b": tensor.view(1024, 1024),
        "c": tensor.view(torch.float32),
        "d": torch.nn.Parameter(tensor.view(torch.float64)),
        "e": [tensor.detach()],
    }
    with engine() as own:
        staged = pyckpt.PinnedStager(engine=own).stage(state).result()
        assert own.native.arena_used_bytes == 1 << 20
        tensor.zero_()
        assert same(staged["a"], staged["e"][0])
        assert not staged["a"].eq(0).all()
        assert staged["b"].shape == (1024, 1024)
        assert staged["c"].dtype == torch.float32
        assert staged["d"].untyped_storage().data_ptr() == staged["a"].untyped_storage().data_ptr()
        del staged
    # Threads of the engine may let go of a job a little after it is done; not after they ended.
    assert own.native.arena_used_bytes == 0


def test_copies_live_as_long_as_their_tensors() -> None:
    tensor = random_bytes(3 * PAGE)
    large = random_bytes(100_000)
    before = tensor.clone()
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)
        staged = stager.stage({"a": tensor, "b": large}).result()
        view = staged["a"][PAGE : 2 * PAGE]
        del staged
        gc.collect()
        tensor.zero_()
        for _ in range(5):  # other states must not get that memory
            stager.stage({"a": tensor, "b": large}).result()
        stager.close()
        assert same(view, before[PAGE : 2 * PAGE])
    assert own.native.arena_used_bytes == 3 * PAGE
    assert same(view, before[PAGE : 2 * PAGE])
    del view
    assert own.native.arena_used_bytes == 0


def test_tensors_freed_after_the_call(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.rand(2))])
    for turn in range(4):
        state = {f"t{i}": torch.nn.Parameter(torch.rand(20_000)) for i in range(30)}
        optimizer.param_groups[0]["params"] = list(state.values())
        stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
        before = frozen(state)
        path = tmp_path / str(turn)
        writer = writer_to(path, stager=stager, engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer)
        optimizer.param_groups[0]["params"] = []
        state.clear()
        gc.collect()
        junk = [torch.full((20_000,), float("nan")) for _ in range(30)]
        future.result()
        check_saved(before, path)
        assert len(junk) == 30


def test_data_replaced_after_the_call(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    model = torch.nn.Linear(700, 300)
    stager = pyckpt.PinnedStager(
        engine=small_engine, optimizers=[torch.optim.SGD(model.parameters())]
    )
    before = frozen(model.state_dict())
    writer = writer_to(tmp_path, stager=stager, engine=small_engine)
    future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    future.result()
    check_saved(dict(before), tmp_path)


class Counter:
    """A Stateful, and an object of the program's own."""

    def __init__(self) -> None:
        self.values = [torch.ones(4), {"deep": (torch.arange(3.0), "text")}]
        self.count = 1

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counter) and same(self.state_dict(), other.state_dict())

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, pyckpt.SavePlanner])
def test_objects_changed_after_the_call(
    tmp_path: Path, small_engine: pyckpt.Engine, planner: Any
) -> None:
    for turn in range(3):
        counter = Counter()
        array = np.arange(10.0)
        state = {
            "stateful": counter,
            "objects": {
                "tuple": (torch.rand(3), [torch.rand(2)], {"set": {1, 2}}),
                "array": array,
                "object": counter,
                "scalar": np.float32(2.5),
                "bytes": bytearray(b"bytes"),
                "list": [1, 2, 3],
            },
        }
        before = frozen(state["objects"])
        before_stateful = frozen(counter.state_dict())
        path = tmp_path / str(turn)
        writer = writer_to(path, engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer, planner=planner())
        overwrite([state["objects"]["tuple"][:2], counter.values[0]])  # type: ignore[index]
        array[:] = 0
        counter.count = 2
        counter.values.append("more")
        state["objects"]["bytes"][:] = b"other"  # type: ignore[index]
        state["objects"]["list"].append(4)  # type: ignore[index]
        state["objects"]["tuple"][2]["set"].clear()  # type: ignore[index]
        state.clear()
        future.result()
        assert same(item(path, "objects.tuple"), before["tuple"])
        assert np.array_equal(item(path, "objects.array"), before["array"])
        assert item(path, "objects.object") == before["object"]
        assert item(path, "objects.scalar") == before["scalar"]
        assert item(path, "objects.bytes") == b"bytes"
        assert item(path, "objects.list") == [1, 2, 3]
        assert item(path, "stateful.count") == 1
        assert same(item(path, "stateful.values.0"), before_stateful["values"][0])


class Tagged(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:TypedStorage", "ignore:torch.quantize")
@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, pyckpt.SavePlanner])
def test_tensors_that_are_more_than_memory(
    tmp_path: Path, small_engine: pyckpt.Engine, planner: Any
) -> None:
    for turn in range(2):
        sparse = torch.eye(40).to_sparse()
        quantized = torch.quantize_per_tensor(torch.rand(500), 0.1, 3, torch.qint8)
        base = torch.rand(300, dtype=torch.complex64)
        real = torch.rand(30, dtype=torch.complex64)
        tagged = torch.rand(3).as_subclass(Tagged)
        state = {
            "sparse": sparse,
            "conjugate": base.conj(),
            "negative": real.conj().imag,
            "tagged": tagged,
            "transposed": base.conj().view(30, 10).t(),
            "tensor": torch.rand(5),
        }
        before = frozen(state)
        codes = quantized.int_repr().clone()
        state["quantized"] = quantized
        path = tmp_path / str(turn)
        writer = writer_to(path, engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer, planner=planner())
        sparse._values().zero_()
        quantized.copy_(torch.zeros(500))
        base.zero_()
        real.zero_()
        tagged.zero_()
        state["tensor"].zero_()
        future.result()
        assert same(item(path, "sparse").to_dense(), before["sparse"].to_dense())
        assert torch.equal(item(path, "quantized").int_repr(), codes)
        for key in ("conjugate", "negative", "transposed", "tensor", "tagged"):
            assert same(item(path, key).as_subclass(torch.Tensor), before[key]), key


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:TypedStorage", "ignore:torch.quantize")
def test_overlapping_saves_of_tensors_that_are_more_than_memory(
    tmp_path: Path, small_engine: pyckpt.Engine
) -> None:
    """What such a save will need is asked while another is under way."""
    sparse = torch.eye(40).to_sparse()
    futures = []
    for turn in range(3):
        writer = writer_to(tmp_path / str(turn), engine=small_engine)
        futures.append(dcp.async_save({"sparse": sparse}, storage_writer=writer))
    for turn, future in enumerate(futures):
        future.result()
        assert same(item(tmp_path / str(turn), "sparse").to_dense(), torch.eye(40))


def test_buffers_that_forward_changes(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    for turn in range(5):
        before = dict(frozen(model.state_dict()))
        path = tmp_path / str(turn)
        writer = writer_to(path, stager=stager, engine=small_engine)
        future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
        model(torch.rand(32, 64)).sum().backward()
        optimizer.step()
        future.result()
        check_saved(before, path)


def test_save_twice_without_waiting(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    state = {"a": random_bytes(3 << 20), "b": [random_bytes(100) for _ in range(50)]}
    saves = []
    for turn in range(5):
        before = frozen(state)
        writer = writer_to(tmp_path / str(turn), engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        saves.append((before, future))
        overwrite(state)
    for turn, (before, future) in enumerate(saves):
        future.result()
        check_saved(before, tmp_path / str(turn))


def test_saves_from_threads(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """Three writers at once, of one stager, with state dicts of three shapes."""
    stager = pyckpt.PinnedStager(engine=small_engine)
    start = threading.Barrier(3)
    errors: list[BaseException] = []

    def save(number: int) -> None:
        try:
            state = {f"{i}": random_bytes(20_000 * (number + 1)) for i in range(20)}
            start.wait()
            for turn in range(6):
                before = frozen(state)
                path = tmp_path / f"{number}-{turn}"
                writer = writer_to(path, stager=stager, engine=small_engine)
                future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                overwrite(state)
                future.result()
                check_saved(before, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert small_engine.native.arena_used_bytes == 0


@pytest.mark.parametrize(
    ("foreign", "budget"),
    sampled(
        itertools.product(
            [FileSystemWriter, HuggingFaceStorageWriter], [64 << 20, RING + (2 << 20)]
        ),
        3,
    ),
)
def test_other_writers(
    tmp_path: Path, foreign: Any, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the copies find no room in the engine's memory they take ordinary memory."""
    state = {
        "small": torch.rand(3),
        "large": torch.rand(1 << 20),
        "columns": torch.rand(1000, 700)[:, ::2],
        "parameter": torch.nn.Parameter(torch.rand(11, 9)),
    }
    with engine(max_pinned_bytes=budget) as own:
        optimizer = torch.optim.SGD([state["parameter"]])
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        for turn in range(3):
            path = tmp_path / f"{foreign.__name__}-{turn}"
            path.mkdir()
            before = frozen(state)
            response = dcp.async_save(
                dict(state), storage_writer=foreign(path), async_stager=stager
            )
            with stager.guard():
                overwrite(state)
            response.staging_completion.result()
            response.upload_completion.result()
            loaded = blank(before)
            if foreign is FileSystemWriter:
                dcp.load(loaded, storage_reader=FileSystemReader(path))
                assert same(loaded, before)
            else:
                from safetensors.torch import load_file

                [file] = path.glob("*.safetensors")
                assert same(dict(sorted(load_file(file).items())), dict(sorted(before.items())))
            del response
            stager.synchronize_staging()
        assert own.native.arena_held_bytes <= budget
    gc.collect()
    assert own.native.arena_used_bytes == 0
    assert ("larger than max_pinned_bytes" in caplog.text) == (budget < 64 << 20)


class CastInResolve(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) else data


class CastInSetUp(dcp.DefaultSavePlanner):
    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        state_dict = {key: value.to(torch.bfloat16) for key, value in state_dict.items()}
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class CastOurs(pyckpt.SavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        return data.to(torch.bfloat16) if isinstance(data, torch.Tensor) else data


@pytest.mark.parametrize("planner", [CastInResolve, CastInSetUp, CastOurs])
def test_planners_that_change_tensors(tmp_path: Path, planner: Any) -> None:
    """They are shown copies that are whole."""
    parameters = [torch.nn.Parameter(torch.rand(100_000)) for _ in range(6)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        for turn in range(3):
            overwrite(parameters)
            state = {f"{i}": parameter for i, parameter in enumerate(parameters)}
            path = tmp_path / str(turn)
            writer = writer_to(path, stager=stager, engine=own)
            with slowed(own):
                dcp.async_save(state, storage_writer=writer, planner=planner()).result()
            for key, value in state.items():
                assert same(item(path, key), value.detach().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("planner", "waits"),
    [
        (None, 0),
        (dcp.DefaultSavePlanner, 0),
        (pyckpt.SavePlanner, 0),
        (CastInResolve, 2),  # before it plans, and before it resolves
        (CastInSetUp, 2),
        (CastOurs, 2),
    ],
)
def test_planning_waits_for_copies_where_the_planner_may_need_them(
    tmp_path: Path,
    planner: Any,
    waits: int,
    small_engine: pyckpt.Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planner of this save: the classes above exist in any case."""
    settle = Staging.settle
    waited: list[Staging] = []

    def watched(self: Staging) -> None:
        waited.append(self)
        settle(self)

    monkeypatch.setattr(Staging, "settle", watched)
    state = {"a": torch.rand(30_000), "b": torch.tensor(1.0)}
    writer = pyckpt.DirectWriter(tmp_path, engine=small_engine, sync_files=False)
    made = None if planner is None else planner()
    dcp.async_save(state, storage_writer=writer, planner=made).result()
    assert len(waited) == waits
    # Whoever calls a writer without DCP may have any planner.
    staged = writer.stage(state)
    writer.storage_meta()
    assert len(waited) == waits + 1
    staged.staging.release()


def test_stage_waits_for_its_copies_if_asked_to(
    tmp_path: Path, small_engine: pyckpt.Engine
) -> None:
    """Then ``async_save`` returns one future, as with stock's stager of that setting."""
    stager = pyckpt.PinnedStager(use_async_staging=False, engine=small_engine)
    state = {"a": torch.rand(30_000), "b": [torch.tensor(1.0)]}
    before = frozen(state)
    copies = stager.stage(state)
    overwrite(state)
    assert same(copies, before)
    before = frozen(state)
    writer = FileSystemWriter(tmp_path)
    future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    assert isinstance(future, Future)
    overwrite(state)
    future.result()
    check_saved(before, tmp_path)
    assert not pickle.loads(pickle.dumps(stager)).use_async_staging


def test_prewarm(tmp_path: Path) -> None:
    state = some_state()
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)
        stager.prewarm(state)
        held = own.native.arena_held_bytes
        assert held > 0
        assert own.native.arena_used_bytes == 0
        writer = writer_to(tmp_path, stager=stager, engine=own)
        future = dcp.async_save(state, storage_writer=writer)
        assert own.native.arena_held_bytes == held
        future.result()
        check_saved(state, tmp_path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_many_small_saves(tmp_path: Path) -> None:
    """Nothing grows: neither memory nor threads nor descriptors."""
    state = {"w": torch.rand(300), "n": {"step": 1, "list": [torch.rand(2), 3]}}
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)

        def save(turn: int) -> None:
            writer = writer_to(tmp_path, stager=stager, engine=own)
            planner = pyckpt.SavePlanner() if turn % 2 else None
            dcp.async_save(state, storage_writer=writer, planner=planner).result()

        def counts() -> tuple[int, ...]:
            gc.collect()
            return threading.active_count(), descriptors(), own.native.arena_held_bytes

        for turn in range(20):
            save(turn)
        before = counts()
        for turn in range(300):
            save(turn)
        after = counts()
        assert after[2] == before[2]
        # The thread of the last save, and the one that sees it end, may still be on their way out.
        assert after[0] <= before[0] + 2
        assert after[1] <= before[1] + 1
        assert own.native.arena_used_bytes == 0
    check_saved(state, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("make_stager", [False, True])
def test_many_small_stagings(make_stager: bool) -> None:
    state = {"w": torch.rand(300), "columns": torch.rand(30, 30)[:, ::2], "object": {"a": [1, {2}]}}
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)

        def stage(count: int) -> None:
            nonlocal stager
            for _ in range(count):
                if make_stager:
                    stager = pyckpt.PinnedStager(engine=own)
                assert same(stager.stage(state).result(), frozen(state))

        stage(200)
        gc.collect()
        before = (descriptors(), own.native.arena_held_bytes)
        threads, resident = threading.active_count(), resident_bytes()
        stage(2000)
        gc.collect()
        stager.close()
        assert (descriptors(), own.native.arena_held_bytes) == before
        assert threading.active_count() <= threads + 1
        assert resident_bytes() < resident + (32 << 20)
    assert own.native.arena_used_bytes == 0


def test_arguments() -> None:
    with pytest.raises(ValueError, match="when_busy"):
        pyckpt.PinnedStager(when_busy="never")  # type: ignore[arg-type]


@pytest.mark.parametrize("planner", [slow(None), pyckpt.SavePlanner])
def test_the_path_may_come_as_checkpoint_id(tmp_path: Path, planner: Any) -> None:
    """Then DCP calls the writer once more before it plans. The copies are there until it writes."""

    class Looks(pyckpt.DirectWriter):
        released: bool | None = None

        def write_data(self, plan: Any, planner: Any) -> Any:
            assert self._staging is not None
            self.released = self._staging.released
            return super().write_data(plan, planner)

    state = some_state()
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)
        writer = Looks(stager=stager, engine=own, sync_files=False)
        for turn in range(3):
            before = frozen(state)
            path = tmp_path / str(turn)
            future = dcp.async_save(
                state,
                checkpoint_id=path,
                storage_writer=writer,
                planner=None if planner is None else planner(),
            )
            overwrite(state)
            future.result()
            assert writer.released is False
            assert writer.written.result(0) is None
            check_saved(before, path)
        assert own.native.arena_used_bytes == 0
