"""`count_syncs` without a GPU: operators on fake CUDA tensors, and torch's reports played back.

Torch calls back from the place where it would wait; `fire` does what torch does there. That torch
really calls is what tests/profiling/test_profiling_cuda.py shows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace
from torch.testing._internal.two_tensor import TwoTensor

from pyckpt.profiling import CopyCounts, SyncCounts, count_syncs, fake_cuda, trace

DEVICE = "cuda:0"


def fire(kind: str) -> None:
    if kind == "device":
        _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()
    elif kind == "event":
        _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(0x1234)
    else:
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(0x1234)


# --- operators on fake tensors ----------------------------------------------------------------


def test_reading_a_scalar() -> None:
    with fake_cuda(), count_syncs() as counts:
        scalar = torch.zeros((), device=DEVICE)
        assert scalar.item() == 10.0
        scalar.add(1).item()
        torch.is_nonzero(scalar)
    assert counts.items == 3
    assert counts.total == 3
    assert counts.copies == (CopyCounts("d2h", "unknown", True, 3, 12),)
    assert (counts.stream_syncs, counts.blocking_copies, counts.h2d_copies) == (0, 0, 0)


def test_a_scalar_counts_its_own_bytes() -> None:
    with fake_cuda(), count_syncs() as counts:
        torch.zeros((), device=DEVICE, dtype=torch.float64).item()
    assert counts.d2h_bytes == 8


@pytest.mark.parametrize(
    ("dtype", "answer"), [(torch.float64, 2.5), (torch.int64, 2), (torch.bool, True)]
)
def test_fakes_answer_in_kind(dtype: torch.dtype, answer: float) -> None:
    with fake_cuda(answer=2.5):
        found = torch.zeros((), device=DEVICE, dtype=dtype).item()
    assert (type(found), found) == (type(answer), answer)


def test_fakes_move_as_tensors_do() -> None:
    """A torch that finds no GPU takes a way of its own for these."""
    with fake_cuda():
        host = torch.zeros(2, 3)
        device = host.to("cuda")
        assert device.device == torch.device("cuda", 0)
        assert device.to("cuda:0") is device
        assert device.to(torch.float32) is device
        assert device.to("cuda:0", copy=True) is not device
        assert device.to("cuda:0", torch.float32, False, True) is not device
        assert device.to(torch.float64).dtype == torch.float64
        assert host.to(device).device == device.device
        assert host.to(device="cuda:0", dtype=torch.int32).dtype == torch.int32
        assert device.copy_(host) is device
        assert device.to(memory_format=torch.contiguous_format).shape == (2, 3)


def test_what_stays_on_the_host_is_not_counted() -> None:
    with fake_cuda(), count_syncs() as counts:
        x = torch.zeros(3)
        x.sum().item()
        x.to(torch.float64)
        torch.zeros(3).copy_(x)
        torch.zeros(3, device=DEVICE).clone()
        torch.zeros(3, device="meta").to(DEVICE)
    assert counts.total == 0
    assert counts.copies == ()
    assert counts.by_thread == ()


@pytest.mark.parametrize(
    ("copy", "expected"),
    [
        (lambda d, h: d.cpu(), CopyCounts("d2h", "unknown", True, 1, 24)),
        (lambda d, h: h.copy_(d), CopyCounts("d2h", "unknown", True, 1, 24)),
        (lambda d, h: h.copy_(d, True), CopyCounts("d2h", "unknown", False, 1, 24)),
        (lambda d, h: torch._foreach_copy_([h], [d]), CopyCounts("d2h", "unknown", True, 1, 24)),
        (
            lambda d, h: torch._foreach_copy_([h, h], [d, d], non_blocking=True),
            CopyCounts("d2h", "unknown", False, 2, 48),
        ),
        (
            lambda d, h: d.to("cpu", non_blocking=True),
            CopyCounts("d2h", "unknown", False, 1, 24),
        ),
        (
            lambda d, h: torch.tensor([1.0, 2.0], device=DEVICE),
            CopyCounts("h2d", "unknown", True, 1, 8),
        ),
        (lambda d, h: d.copy_(h), CopyCounts("h2d", "unknown", True, 1, 24)),
        (lambda d, h: d.copy_(h, True), CopyCounts("h2d", "unknown", False, 1, 24)),
        (lambda d, h: h.to(DEVICE), CopyCounts("h2d", "unknown", True, 1, 24)),
        (lambda d, h: h.to(DEVICE, None, True), CopyCounts("h2d", "unknown", False, 1, 24)),
        # Converted on the host, after a blocking copy; on the device, before one that is not.
        (lambda d, h: d.to("cpu", torch.float64), CopyCounts("d2h", "unknown", True, 1, 24)),
        (
            lambda d, h: d.to("cpu", torch.float64, non_blocking=True),
            CopyCounts("d2h", "unknown", False, 1, 48),
        ),
        (lambda d, h: h.to(DEVICE, torch.float64), CopyCounts("h2d", "unknown", True, 1, 48)),
        (
            lambda d, h: h.to(DEVICE, torch.float64, non_blocking=True),
            CopyCounts("h2d", "unknown", False, 1, 24),
        ),
    ],
)
def test_copies(copy: Callable[[torch.Tensor, torch.Tensor], Any], expected: CopyCounts) -> None:
    with fake_cuda():
        device, host = torch.zeros(2, 3, device=DEVICE), torch.zeros(2, 3)
        with count_syncs() as counts:
            copy(device, host)
    assert counts.copies == (expected,)
    assert counts.blocking_copies == (expected.count if expected.blocking else 0)
    assert counts.total == counts.blocking_copies


def test_a_copy_of_nothing_is_none() -> None:
    with fake_cuda(), count_syncs() as counts:
        torch.zeros(0, 3, device=DEVICE).cpu()
    assert counts.copies == ()


def test_wrapped_tensors_count_what_they_wrap() -> None:
    with fake_cuda():
        wrapped = TwoTensor(torch.zeros(5, device=DEVICE), torch.zeros(5, device=DEVICE))
        with count_syncs() as counts:
            wrapped.cpu()
    assert counts.copies == (CopyCounts("d2h", "unknown", True, 2, 40),)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: torch.equal(x, x),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x),
        lambda x: torch.ops.aten.nonzero.default(x),
        lambda x: torch.ops.aten.index.Tensor(x, [x > 0]),
    ],
)
def test_results_that_the_host_must_read(operator: Callable[[torch.Tensor], Any]) -> None:
    with fake_cuda():
        x = torch.zeros(4, device=DEVICE)
        # Fake tensors do not know the result either, and masks take a device, for which a torch
        # without CUDA, and one that finds no driver, have words of their own; the question counts.
        says = r"aten|not linked with|CUDA error"
        with count_syncs() as counts, pytest.raises(Exception, match=says):
            operator(x)
    assert counts.data_dependent == 1
    assert counts.total == 1


def test_indexing_with_numbers_reads_nothing() -> None:
    with fake_cuda():
        x, index = torch.zeros(4, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
        with count_syncs() as counts:
            torch.ops.aten.index.Tensor(x, [index])
            torch.ops.aten.repeat_interleave.Tensor(index, output_size=6)
    assert counts.total == 0


@pytest.mark.parametrize("put", ["index_put_", "index_put", "_index_put_impl_"])
def test_masks_that_are_written_through(put: str) -> None:
    operator = getattr(torch.ops.aten, put).default
    with fake_cuda():
        x, values = torch.zeros(4, device=DEVICE), torch.zeros(2, device=DEVICE)
        mask, index = x > 0, torch.zeros(2, dtype=torch.int64, device=DEVICE)
        with count_syncs() as counts:
            operator(x, [mask], values)
            operator(x, [mask.to(torch.uint8)], values)
            operator(x, [mask], torch.zeros(1, device=DEVICE))  # one, but the device has it
            operator(x, [mask], torch.zeros(()), True)
        assert (counts.data_dependent, counts.total) == (4, 4)
        with count_syncs() as counts:
            operator(x, [index], values)
            operator(x, [mask], torch.zeros(()))  # filled in by the device
        assert counts.total == 0


@pytest.mark.parametrize(
    ("optimizer", "foreach", "reads"),
    [
        (torch.optim.Adam, False, 1),
        (torch.optim.Adam, True, 2),
        (torch.optim.NAdam, False, 3),
        (torch.optim.NAdam, True, 5),
        (torch.optim.RAdam, False, 1),
        (torch.optim.RAdam, True, 5),
        (torch.optim.RMSprop, True, 0),
    ],
)
def test_misplaced_state_of_optimizers(optimizer: Any, foreach: bool, reads: int) -> None:
    """What each costs was found by reading torch.optim."""
    with fake_cuda():
        parameters = [torch.nn.Parameter(torch.zeros(4, device=DEVICE)) for _ in range(10)]
        stepper = optimizer(parameters, foreach=foreach)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with count_syncs() as fresh:
            stepper.step()
        for state in stepper.state.values():
            for key, value in state.items():
                state[key] = torch.zeros(value.shape, device=DEVICE)
        with count_syncs(stacks=True) as moved:
            stepper.step()
    assert fresh.total == 0
    assert moved.items == moved.total == 10 * reads
    if reads:
        assert any("torch/optim" in frame.filename for frame in moved.stacks["item"])


# --- torch's reports --------------------------------------------------------------------------


def test_each_synchronisation_counts_by_its_kind() -> None:
    with count_syncs() as counts:
        for kind, times in (("stream", 3), ("device", 2), ("event", 1)):
            for _ in range(times):
                fire(kind)
        live = counts.total
    fire("stream")
    assert counts.reported
    assert (counts.stream_syncs, counts.device_syncs, counts.event_syncs) == (3, 2, 1)
    assert counts.total == live == 6


def test_callbacks_are_registered_once() -> None:
    with count_syncs():
        pass
    before = len(_gpu_trace.StreamSynchronizationCallbacks.callback_list)
    for _ in range(5):
        with count_syncs(), count_syncs():
            pass
    assert len(_gpu_trace.StreamSynchronizationCallbacks.callback_list) == before
    assert trace._listeners == ()


def test_counters_nest() -> None:
    with fake_cuda():
        scalar = torch.zeros((), device=DEVICE)
        with count_syncs() as outer:
            scalar.item()
            fire("stream")
            with count_syncs() as inner:
                scalar.item()
                fire("event")
            scalar.item()
    assert (outer.items, outer.stream_syncs, outer.event_syncs, outer.total) == (3, 1, 1, 5)
    assert (inner.items, inner.stream_syncs, inner.event_syncs, inner.total) == (1, 0, 1, 2)


def test_an_exception_ends_the_counting_too() -> None:
    def fail() -> None:
        fire("stream")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), count_syncs() as counts:
        fail()
    fire("stream")
    assert counts.total == 1
    assert trace._listeners == ()


def in_threads(number: int, work: Callable[[], None]) -> None:
    """Start ``number`` threads that do the work at the same time."""
    barrier = threading.Barrier(number)

    def run() -> None:
        barrier.wait()
        work()

    threads = [threading.Thread(target=run, name=f"worker {i}") for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_reports_of_all_threads_are_counted() -> None:
    with count_syncs() as counts:
        in_threads(8, lambda: [fire("stream") for _ in range(500)] and None)
        fire("device")
    assert counts.stream_syncs == 4000
    by_name = {thread.name: thread.total for thread in counts.by_thread}
    main = threading.current_thread().name
    assert by_name == {**{f"worker {i}": 500 for i in range(8)}, main: 1}
    assert "500 in thread worker 3" in str(counts)


def test_threads_that_follow_one_another_are_kept_apart() -> None:
    with count_syncs() as counts:
        for _ in range(3):
            in_threads(1, lambda: fire("stream"))
    assert [(thread.name, thread.total) for thread in counts.by_thread] == [("worker 0", 1)] * 3


def test_a_thread_that_python_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    # As a native thread: it is not in threading, and comes with new thread-locals each time.
    monkeypatch.setattr(threading, "enumerate", list)
    with count_syncs() as counts:
        fire("stream")
        fire("stream")
    (thread,) = counts.by_thread
    assert thread.name == f"native-{threading.get_ident()}"
    assert thread.total == 2


def test_the_current_thread_alone() -> None:
    with count_syncs(threads="current") as counts:
        in_threads(2, lambda: fire("stream"))
        fire("event")
    assert (counts.stream_syncs, counts.event_syncs) == (0, 1)


def test_operators_of_other_threads_are_not_seen() -> None:
    """As documented: dispatch modes belong to a thread."""

    def read() -> None:
        with fake_cuda():
            torch.zeros((), device=DEVICE).item()

    with count_syncs() as counts:
        in_threads(1, read)
    assert counts.items == 0


def test_without_operators_reports_alone() -> None:
    with fake_cuda(), count_syncs(operators=False) as counts:
        torch.zeros((), device=DEVICE).item()
        fire("stream")
    assert (counts.items, counts.stream_syncs, counts.total) == (0, 1, 1)


def test_a_torch_without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_available", None)
    monkeypatch.delattr(torch._C, "_activate_gpu_trace")
    with fake_cuda(), count_syncs() as counts:
        torch.zeros((), device=DEVICE).item()
    assert not counts.reported
    assert counts.total == 1


# --- stacks and the rest ----------------------------------------------------------------------


def read_twice(scalar: torch.Tensor) -> None:
    scalar.item()
    scalar.item()


def test_stacks_begin_at_the_block_and_end_at_the_call() -> None:
    with fake_cuda():
        scalar = torch.zeros((), device=DEVICE)
        with count_syncs(stacks=True) as counts:
            read_twice(scalar)
            fire("stream")
            scalar.cpu()
    stack = counts.stacks["item"]
    assert [frame.name for frame in stack] == [
        "test_stacks_begin_at_the_block_and_end_at_the_call",
        "read_twice",
    ]
    assert stack[-1].line == "scalar.item()"
    assert stack[-1].lineno == read_twice.__code__.co_firstlineno + 1
    assert counts.stacks["stream_sync"][-1].name == "fire"
    assert counts.stacks["blocking_copy"][-1].line == "scalar.cpu()"
    assert "device_sync" not in counts.stacks


def test_the_stack_of_another_thread_is_its_own() -> None:
    with count_syncs(stacks=True) as counts:
        in_threads(1, lambda: fire("stream"))
    names = [frame.name for frame in counts.stacks["stream_sync"]]
    assert names[-1] == "fire"
    assert "run" in names
    assert "test_the_stack_of_another_thread_is_its_own" not in names


def test_stacks_only_on_request() -> None:
    with count_syncs() as counts:
        fire("stream")
    assert counts.stacks == {}


def test_counts_as_text_and_json() -> None:
    with fake_cuda(), count_syncs() as counts:
        torch.zeros((), device=DEVICE).item()
        torch.zeros(3, device=DEVICE).to("cpu", non_blocking=True)
        fire("event")
    assert str(counts).splitlines() == [
        "the host waited 2 times for the device",
        "       1 event synchronisations",
        "       1 reads of a scalar (.item())",
        "       1 copies device to host, non-blocking: 12 bytes",
        "       1 copies device to host, blocking: 4 bytes",
    ]
    content = json.loads(json.dumps(counts.as_dict()))
    assert content["total"] == 2
    assert content["items"] == 1
    assert {copy["bytes"] for copy in content["copies"]} == {4, 12}


def test_arguments() -> None:
    with pytest.raises(ValueError, match="'all' or 'current', not 'both'"):
        count_syncs(threads="both")  # type: ignore[arg-type]


def test_a_counter_counts_once() -> None:
    counter = count_syncs()
    with counter as counts:
        assert isinstance(counts, SyncCounts)
    with pytest.raises(RuntimeError, match="used before"), counter:
        pass


@pytest.mark.slow
def test_nothing_initialises_cuda() -> None:
    """In a process of its own, where importing and counting are all that happens."""
    code = (
        "import torch\n"
        "def never(*a): raise AssertionError('CUDA was initialised')\n"
        "torch.cuda._lazy_init = torch._C._cuda_init = torch.cuda.is_available = never\n"
        "from pyckpt.profiling import count_syncs\n"
        "with count_syncs(stacks=True) as c: torch.zeros(3).sum().item()\n"
        "assert not torch.cuda.is_initialized() and c.total == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
