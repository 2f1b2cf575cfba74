"""Host memory for offloaded state, and the copies to and from it. Only this module calls CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from pyckpt import _C
from pyckpt.errors import CudaError

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
        _register(self._device, address, nbytes)
        # A copy may still use it then: steps wait on the GPU alone.
        weakref.finalize(buffer.untyped_storage(), _unregister, self._stream, address)
        return buffer

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


def _register(device: torch.device, address: int, nbytes: int) -> None:
    """Raises RuntimeError."""
    if _C.cuda:
        try:
            _C.register_host_memory(device.index, address, nbytes)
        except CudaError as error:
            raise RuntimeError(str(error)) from error
        return
    with _harmless(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(runtime.cudaHostRegister(address, nbytes, 0))
        if status != 0:
            _clear_error()
    torch.cuda.check_error(status)


def _unregister(stream: torch.cuda.Stream, address: int) -> None:
    """Once the stream's copies are over."""
    if _C.cuda:
        _C.unregister_host_memory(stream.device.index, address, stream.cuda_stream)
        return
    with _harmless(stream.device):
        stream.synchronize()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostUnregister(address)) != 0:
            _clear_error()


# What follows is for builds of pyckpt without CUDA, beside a torch that has it.

_RELAXED = 2  # cudaStreamCaptureModeRelaxed


@contextlib.contextmanager
def _harmless(device: torch.device) -> Iterator[None]:
    """The device is the current one, or CUDA would make a context on another. And where torch's
    runtime can be found, calls end no capture of a graph by another thread."""
    runtime = _loaded_runtime()
    mode = ctypes.c_int(_RELAXED)
    with torch.cuda.device(device):
        if runtime is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            if runtime is not None:
                runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _clear_error() -> None:
    """Of the calling thread. Otherwise torch raises it from the next operator that launches a
    kernel."""
    runtime = _loaded_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()


@functools.cache
def _loaded_runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch uses, which torch's binding of it does not offer in full; None if
    it is not a library of its own, or has another name."""
    if torch.version.cuda is None:
        return None
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        # Never another one: it would have errors and modes of its own.
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
    except OSError:
        return None


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
