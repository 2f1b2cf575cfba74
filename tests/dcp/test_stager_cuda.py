"""PinnedStager on a GPU: ordered after the program's streams, and never a wait of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _staging import check_saved, frozen, writer_to
from torch.distributed.checkpoint.staging import DefaultStager

import pyckpt

pytestmark = pytest.mark.cuda

MIB = 1 << 20
# GPU clock cycles, some tens of milliseconds: far more than a copy that did not wait would take.
LONG = 50_000_000


@pytest.fixture(scope="module")
def gpu_engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(max_pinned_bytes=512 * MIB) as made:
        yield made


def some_state(scale: float = 1.0) -> dict[str, Any]:
    base = torch.rand(500, 600, device="cuda") * scale
    return {
        "large": torch.rand(8 * MIB, device="cuda") * scale,
        "columns": base[:, ::3],
        "permuted": base.t(),
        "many": {f"{i}": torch.rand(i + 1, device="cuda") * scale for i in range(500)},
        "zero-d": torch.tensor(2.0, device="cuda"),
        "host": torch.rand(1000),
        "bf16": torch.rand(999, device="cuda").bfloat16(),
        "step": 1,
    }


def on_host(state: Any) -> Any:
    """The state as it is once all that was queued is done."""
    torch.cuda.synchronize()
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    return state


def change(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        state.detach().mul_(-1)
    elif isinstance(state, dict):
        for value in state.values():
            change(value)


def late_writes(state: dict[str, Any]) -> None:
    """Queue a change that the GPU makes only after a while."""
    torch.cuda._sleep(LONG)
    change(state)


def expected_after(state: dict[str, Any], writes: Callable[[Any], None]) -> Any:
    expected = on_host(state)
    change(expected)
    writes(state)
    return expected


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, pyckpt.SavePlanner])
def test_late_writes_are_saved_and_later_ones_not(
    tmp_path: Path, gpu_engine: pyckpt.Engine, planner: Any
) -> None:
    state = some_state()
    for turn in range(4):
        expected = expected_after(state, late_writes)
        writer = writer_to(tmp_path / str(turn), engine=gpu_engine)
        future = dcp.async_save(state, storage_writer=writer, planner=planner())
        change(state)
        change(state)
        change(state)
        future.result()
        check_saved(expected, tmp_path / str(turn))


def test_stream_that_is_not_the_default(tmp_path: Path, gpu_engine: pyckpt.Engine) -> None:
    state = some_state()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for turn in range(3):
        with torch.cuda.stream(stream):
            expected = expected_after(state, late_writes)
            writer = writer_to(tmp_path / str(turn), engine=gpu_engine)
            future = dcp.async_save(state, storage_writer=writer)
            change(state)
        future.result()
        check_saved(expected, tmp_path / str(turn))


def test_two_streams(tmp_path: Path, gpu_engine: pyckpt.Engine) -> None:
    """Saves from two streams, each ordered after its own."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    states = [some_state(), some_state(2.0)]
    torch.cuda.synchronize()
    saves = []
    for turn in range(6):
        with torch.cuda.stream(streams[turn % 2]):
            state = states[turn % 2]
            expected = expected_after(state, late_writes)
            writer = writer_to(tmp_path / str(turn), engine=gpu_engine)
            saves.append((dcp.async_save(state, storage_writer=writer), expected))
            change(state)
    for turn, (future, expected) in enumerate(saves):
        future.result()
        check_saved(expected, tmp_path / str(turn))


@pytest.mark.parametrize("stepped_on", ["same stream", "other stream", "other thread"])
def test_step_waits_on_the_gpu(tmp_path: Path, gpu_engine: pyckpt.Engine, stepped_on: str) -> None:
    parameters = [torch.nn.Parameter(torch.rand(4 * MIB, device="cuda")) for _ in range(8)]
    parameters += [torch.nn.Parameter(torch.rand(i + 1, device="cuda")) for i in range(200)]
    optimizers = [
        torch.optim.SGD(parameters[::2], lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters[1::2], lr=0.1),
    ]
    stager = pyckpt.PinnedStager(engine=gpu_engine, optimizers=optimizers)

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    other = torch.cuda.Stream()
    for turn in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        state = {
            "model": {f"{i}": parameter for i, parameter in enumerate(parameters)},
            "optimizers": {f"{i}": o.state_dict() for i, o in enumerate(optimizers)},
        }
        expected = frozen(on_host(state))
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=gpu_engine)
        torch.cuda._sleep(LONG)
        future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        if stepped_on == "same stream":
            step()
        elif stepped_on == "other stream":
            with torch.cuda.stream(other):
                step()
        else:
            thread = threading.Thread(target=step)
            thread.start()
            thread.join()
        future.result()
        check_saved(expected, tmp_path / str(turn))


def test_the_calling_thread_waits_for_nothing(tmp_path: Path, gpu_engine: pyckpt.Engine) -> None:
    state = some_state()
    del state["host"]
    parameter = torch.nn.Parameter(state["large"])
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)
    parameter.grad = torch.ones_like(parameter)
    stager = pyckpt.PinnedStager(engine=gpu_engine, optimizers=[optimizer])
    for turn in range(4):
        expected = on_host(state)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=gpu_engine)
        event = torch.cuda.Event()
        torch.cuda._sleep(10 * LONG)
        event.record()
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            optimizer.step()
            still_busy = not event.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if turn == 3:  # warm
            assert still_busy
        future.result()
        check_saved(expected, tmp_path / str(turn))


def test_freed_tensors_are_not_used_again_too_soon(
    tmp_path: Path, gpu_engine: pyckpt.Engine
) -> None:
    parameters = [torch.nn.Parameter(torch.rand(2 * MIB, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    stager = pyckpt.PinnedStager(engine=gpu_engine, optimizers=[optimizer])
    state = {f"{i}": parameter for i, parameter in enumerate(parameters)}
    expected = on_host(state)
    torch.cuda._sleep(LONG)
    writer = writer_to(tmp_path, stager=stager, engine=gpu_engine)
    future = dcp.async_save(state, storage_writer=writer)
    state.clear()
    parameters.clear()
    optimizer.param_groups.clear()
    junk = [torch.full((2 * MIB,), float("nan"), device="cuda") for _ in range(16)]
    future.result()
    check_saved(expected, tmp_path)
    assert len(junk) == 16


def test_storages_that_are_resized_before_they_are_copied(
    tmp_path: Path, gpu_engine: pyckpt.Engine
) -> None:
    """As FSDP does between a save and the step. The allocator hands the memory out again at once,
    but for what we told it."""
    parameters = [torch.nn.Parameter(torch.rand(8 * MIB, device="cuda")) for _ in range(16)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    stager = pyckpt.PinnedStager(engine=gpu_engine, optimizers=[optimizer])
    state = {f"{i}": parameter for i, parameter in enumerate(parameters)}
    expected = on_host(state)
    writer = writer_to(tmp_path, stager=stager, engine=gpu_engine)
    future = dcp.async_save(state, storage_writer=writer)
    for parameter in parameters:
        storage = parameter.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        parameter.data.fill_(float("nan"))
    future.result()
    check_saved(expected, tmp_path)


def test_memory_that_a_save_used_outlives_its_engine(tmp_path: Path) -> None:
    """Torch asks the streams that used it when it is freed."""
    parameters = [torch.nn.Parameter(torch.rand(MIB, device="cuda")) for _ in range(4)]
    columns = torch.nn.Parameter(torch.rand(500, 500, device="cuda")[:, ::3])
    optimizer = torch.optim.SGD([*parameters, columns], lr=0.1)
    state = {f"{i}": parameter for i, parameter in enumerate([*parameters, columns])}
    expected = on_host(state)
    with pyckpt.Engine(max_pinned_bytes=64 * MIB) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        dcp.async_save(
            state, storage_writer=writer_to(tmp_path, stager=stager, engine=own)
        ).result()
    del own, stager
    state.clear()
    parameters.clear()
    optimizer.param_groups.clear()
    del columns
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    check_saved(expected, tmp_path)


def test_beyond_the_budget(tmp_path: Path) -> None:
    state = some_state()
    with pyckpt.Engine(max_pinned_bytes=20 * MIB) as own:
        for turn in range(2):
            expected = expected_after(state, late_writes)
            writer = writer_to(tmp_path / str(turn), engine=own)
            future = dcp.async_save(state, storage_writer=writer)
            change(state)
            future.result()
            check_saved(expected, tmp_path / str(turn))
            assert own.native.arena_used_bytes == 0


def test_stock_stager(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Whether stock's stager orders its copies after late writes, for the record."""
    state = {"large": torch.rand(32 * MIB, device="cuda")}
    expected = expected_after(state, late_writes)
    stager = DefaultStager()
    staged: Any = stager.stage(state)
    staged = staged.result() if hasattr(staged, "result") else staged
    torch.cuda.synchronize()
    torn = not torch.equal(staged["large"].cpu(), expected["large"])
    stager.close()
    record_property("stock DefaultStager misses late writes", torn)
    assert expected["large"].lt(0).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_sizes_and_alignments(
    tmp_path: Path, gpu_engine: pyckpt.Engine, dtype: torch.dtype
) -> None:
    """What is copied one by one, cut into chunks, and read less wide than it is written."""
    state: dict[str, Any] = {}
    for size in [1, 3, 17, 4095, 32767, 32768, 32769, 262145, MIB + 3, 2 * MIB, 2 * MIB + 1]:
        for skew in [0, 1, 2, 3, 4, 8, 15]:
            base = torch.randint(0, 250, (size + skew,), device="cuda").to(dtype)
            state[f"{size} from {skew}"] = base[skew:]
    expected = on_host(state)
    with pyckpt.Engine(max_pinned_bytes=512 * MIB) as own:
        pyckpt.PinnedStager(engine=own).prewarm(state)
        for turn, used in enumerate([own, gpu_engine]):
            path = tmp_path / str(turn)
            dcp.async_save(state, storage_writer=writer_to(path, engine=used)).result()
            check_saved(expected, path)


def capture(while_captured: Callable[[], None]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that adds 2 to a tensor, captured in the mode that is torch's default: in that, most
    calls of any thread are refused, and end the capture."""
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(10, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        counter += 1
        while_captured()
        counter += 1
    return graph, counter


def must_work(graph: torch.cuda.CUDAGraph, counter: torch.Tensor) -> None:
    for _ in range(3):
        graph.replay()
    assert counter.tolist() == [6] * 10


def test_prewarms_and_saves_beside_a_capture(tmp_path: Path) -> None:
    """By an engine that has all still to do: registering, streams, loading its kernels."""
    state = some_state()
    expected = on_host(state)
    errors: list[BaseException] = []

    def save() -> None:
        try:
            with pyckpt.Engine(max_pinned_bytes=512 * MIB) as own:
                for turn in range(2):
                    stager = pyckpt.PinnedStager(engine=own)
                    writer = writer_to(tmp_path / str(turn), stager=stager, engine=own)
                    dcp.async_save(state, storage_writer=writer).result()
                    stager.prewarm(state)
        except BaseException as error:
            errors.append(error)

    def beside() -> None:
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()

    must_work(*capture(beside))
    assert not errors
    for turn in range(2):
        check_saved(expected, tmp_path / str(turn))


def test_a_save_within_a_capture_is_an_error(gpu_engine: pyckpt.Engine) -> None:
    state = {"a": torch.ones(1000, device="cuda")}
    stager = pyckpt.PinnedStager(engine=gpu_engine)

    def save() -> None:
        with pytest.raises(pyckpt.errors.CudaError, match="before the capture, or after it"):
            stager.stage(state)

    must_work(*capture(save))
    assert torch.equal(stager.stage(state).result()["a"], torch.ones(1000))


def test_a_step_is_captured_while_a_save_is_under_way(
    tmp_path: Path, gpu_engine: pyckpt.Engine
) -> None:
    parameter = torch.nn.Parameter(torch.ones(8 * MIB, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], lr=0.1, capturable=True)
    optimizer.step()
    stager = pyckpt.PinnedStager(engine=gpu_engine, optimizers=[optimizer])
    state = {"model": {"a": parameter}, "optimizer": optimizer.state_dict()}
    graph = None
    for turn in range(3):
        expected = frozen(on_host(state))
        torch.cuda._sleep(LONG)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=gpu_engine)
        future = dcp.async_save(state, storage_writer=writer)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        stager.wait_staged()
        graph.replay()
        future.result()
        check_saved(expected, tmp_path / str(turn))
