"""Host memory for offloaded state, and the copies to and from it. Only this module calls CUDA."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

__all__ = ["Backend", "CudaBackend", "backend_for"]


class Backend(Protocol):
    """The calls of a device that the Offloader needs. Copies run in the order of their calls, and
    fences mark points in that order."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""

    def host_buffer(self, nbytes: int) -> Tensor:
        """New host memory to copy to and from, 1-D uint8, kept until it is dropped."""

    def copy_out(self, copies: Sequence[tuple[Tensor, UntypedStorage]]) -> None:
        """Queue copies of whole storages to host memory, behind the work of the caller's stream.
        When this returns, their memory may be freed. It is reused only after the copies."""

    def copy_in(self, copies: Sequence[tuple[UntypedStorage, Tensor]]) -> None:
        """Queue copies of host memory to whole storages that were just allocated."""

    def fence(self) -> Any:
        """A mark behind all copies queued so far."""

    def order_after(self, fence: Any) -> None:
        """Let the caller's stream wait for a fence; the caller itself does not."""

    def wait(self, fence: Any) -> None:
        """Let the caller wait for a fence."""


class CudaBackend:
    """Copies on a stream of their own, from and to page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def host_buffer(self, nbytes: int) -> Tensor:
        # Registered rather than allocated pinned: torch's pinned allocator rounds up to a power of
        # two, and keeps freed memory.
        with torch.inference_mode(False):  # a tensor made in that mode is writable in it alone
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        address = buffer.data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
        weakref.finalize(buffer.untyped_storage(), self._release, runtime, address)
        return buffer

    def _release(self, runtime: Any, address: int) -> None:
        self._stream.synchronize()  # a copy may still use it: steps wait on the GPU alone
        runtime.cudaHostUnregister(address)

    def copy_out(self, copies: Sequence[tuple[Tensor, UntypedStorage]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for host, storage in copies:
                source = _bytes_of(storage)
                host.copy_(source, non_blocking=True)
                # If it is freed during the copy, the allocator must not reuse it before its end.
                source.record_stream(self._stream)

    def copy_in(self, copies: Sequence[tuple[UntypedStorage, Tensor]]) -> None:
        # The allocator may have returned memory that the caller's stream still uses.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for storage, host in copies:
                target = _bytes_of(storage)
                target.copy_(host, non_blocking=True)
                target.record_stream(self._stream)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def order_after(self, fence: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(fence)

    def wait(self, fence: torch.cuda.Event) -> None:
        fence.synchronize()


def backend_for(device: torch.device) -> Backend | None:
    """The backend for state on a device; None where the state stays."""
    return CudaBackend(device) if device.type == "cuda" else None


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
