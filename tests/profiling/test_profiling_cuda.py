"""`count_syncs` on a real GPU, where torch itself reports: exact numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from pyckpt.profiling import CopyCounts, count_syncs

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _warm() -> None:
    """First uses load kernels and allocate, which may synchronise."""
    tensor = torch.ones(1024, device="cuda")
    tensor.sum().item()
    tensor.cpu()
    tensor.copy_(torch.ones(1024, pin_memory=True), non_blocking=True)
    torch.cuda.synchronize()


def test_item_is_one_stream_synchronisation_and_one_copy_of_four_bytes() -> None:
    scalar = torch.ones((), device="cuda")
    with count_syncs(stacks=True) as counts:
        assert scalar.item() == 1.0
    assert counts.reported
    assert (counts.stream_syncs, counts.device_syncs, counts.event_syncs) == (1, 0, 0)
    assert (counts.items, counts.d2h_copies, counts.d2h_bytes) == (1, 1, 4)
    assert counts.total == 1
    for kind in ("stream_sync", "item"):
        assert counts.stacks[kind][-1].line == "assert scalar.item() == 1.0"


def test_blocking_copies() -> None:
    device, host = torch.ones(256, device="cuda"), torch.ones(256)
    with count_syncs() as counts:
        device.cpu()
        device.copy_(host)
        host.pin_memory().copy_(device)
    assert counts.stream_syncs == counts.blocking_copies == counts.total == 3
    assert set(counts.copies) == {
        CopyCounts("d2h", "pageable", True, 1, 1024),
        CopyCounts("d2h", "pinned", True, 1, 1024),
        CopyCounts("h2d", "pageable", True, 1, 1024),
    }


def test_copies_of_pinned_memory_need_not_wait() -> None:
    device, pinned = torch.ones(256, device="cuda"), torch.ones(256, pin_memory=True)
    with count_syncs() as counts:
        device.copy_(pinned, non_blocking=True)
        pinned.copy_(device, non_blocking=True)
        result = device.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert result.is_pinned()
    assert counts.total == 0
    assert set(counts.copies) == {
        CopyCounts("d2h", "pinned", False, 2, 2048),
        CopyCounts("h2d", "pinned", False, 1, 1024),
    }


@pytest.mark.parametrize(
    ("wait", "kind"),
    [
        (torch.cuda.synchronize, "device_sync"),
        (lambda: torch.cuda.current_stream().synchronize(), "stream_sync"),
        (lambda: torch.cuda.Stream().synchronize(), "stream_sync"),
    ],
)
def test_explicit_synchronisation(wait: Callable[[], None], kind: str) -> None:
    with count_syncs() as counts:
        wait()
    assert counts.total == 1
    assert counts.count(kind) == 1  # type: ignore[arg-type]


def test_events() -> None:
    event = torch.cuda.Event()
    event.record()
    with count_syncs() as counts:
        event.wait()  # the stream waits, not the host
        event.query()
    assert counts.total == 0
    with count_syncs() as counts:
        event.synchronize()
    assert (counts.event_syncs, counts.total) == (1, 1)


def test_what_runs_on_the_device_alone() -> None:
    tensor = torch.ones(256, device="cuda")
    with count_syncs() as counts:
        tensor.mul_(2).add_(tensor)
        tensor[3] = 1.0
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert counts.total == 0
    assert counts.copies == ()


def test_operators_that_read_back() -> None:
    tensor = torch.ones(256, device="cuda")
    with count_syncs() as counts:
        tensor.nonzero()
    assert counts.data_dependent == 1
    assert counts.items == 0
    assert counts.total == counts.stream_syncs >= 1


def test_masks_that_are_written_through() -> None:
    tensor, values = torch.ones(256, device="cuda"), torch.zeros(256, device="cuda")
    mask = tensor > 0
    with count_syncs() as counts:
        tensor[mask] = 1.0
    assert (counts.data_dependent, counts.total) == (0, 0)
    with count_syncs() as counts:
        tensor[mask] = values
    assert counts.data_dependent == 1
    assert counts.total == counts.stream_syncs >= 1


def test_two_threads() -> None:
    scalar = torch.ones((), device="cuda")
    barrier = threading.Barrier(2)

    def read() -> None:
        barrier.wait()
        for _ in range(100):
            scalar.item()

    threads = [threading.Thread(target=read, name=f"reader {i}") for i in range(2)]
    with count_syncs() as everyone, count_syncs(threads="current") as own:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scalar.item()
    assert everyone.stream_syncs == everyone.total == 201
    totals = {thread.name: thread.total for thread in everyone.by_thread}
    assert totals["reader 0"] == totals["reader 1"] == 100
    assert everyone.items == 1  # of the thread that counts alone
    assert own.total == own.stream_syncs == 1


def test_fake_tensors_beside_real_ones() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.ones((), device="cuda")
    with FakeTensorMode():
        fake = torch.zeros(3, device="cuda")
    with count_syncs() as counts:
        real.item()
        fake.cpu()
    assert counts.stream_syncs == 1
    assert counts.total == 2


def test_synchronisations_of_a_backward_pass() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * grad.sum().item()

    x = torch.ones(4, device="cuda", requires_grad=True)
    loss = Reads.apply(x).sum()
    with count_syncs() as counts:
        loss.backward()
    assert counts.stream_syncs == 1
    assert counts.items == 1  # autograd's threads have the modes of the caller
