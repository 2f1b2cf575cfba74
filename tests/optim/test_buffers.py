"""Host memory for the Offloader, without a GPU: how CUDA is asked to register it and let it go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyckpt.errors import CudaError
from pyckpt.optim import buffers

GPU = torch.device("cuda", 3)
STREAM = 77


@pytest.fixture
def calls() -> list[Any]:
    return []


@pytest.fixture
def backend(calls: list[Any]) -> buffers.CudaBackend:
    """One whose stream is none, since there is no GPU to make one on."""
    backend = object.__new__(buffers.CudaBackend)
    backend._device = GPU
    backend._stream = SimpleNamespace(  # type: ignore[assignment]
        device=GPU, cuda_stream=STREAM, synchronize=lambda: calls.append("synchronize")
    )
    return backend


def native(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Let the native module be one that was built with CUDA."""
    monkeypatch.setattr(buffers, "_C", SimpleNamespace(cuda=True, **functions))


def test_a_build_with_cuda_registers_by_itself(
    monkeypatch: pytest.MonkeyPatch, backend: buffers.CudaBackend, calls: list[Any]
) -> None:
    """It leaves no error behind, ends no capture, and knows the device."""
    native(
        monkeypatch,
        register_host_memory=lambda *args: calls.append(("register", *args)),
        unregister_host_memory=lambda *args: calls.append(("unregister", *args)),
    )
    buffer = backend.host_buffer(4096)
    address = buffer.data_ptr()
    view = buffer[100:200]
    del buffer
    assert calls == [("register", 3, address, 4096)]
    del view
    assert calls[1:] == [("unregister", 3, address, STREAM)]


def test_memory_that_cannot_be_registered_is_an_error(
    monkeypatch: pytest.MonkeyPatch, backend: buffers.CudaBackend, calls: list[Any]
) -> None:
    def refuse(*_args: Any) -> None:
        raise CudaError("cudaHostRegister failed: out of memory")

    native(
        monkeypatch,
        register_host_memory=refuse,
        unregister_host_memory=lambda *_args: calls.append(1),
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        backend.host_buffer(4096)
    assert calls == []


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize("status", [0, 2])
def test_another_build_asks_by_torch(
    monkeypatch: pytest.MonkeyPatch,
    backend: buffers.CudaBackend,
    calls: list[Any],
    status: int,
    found: bool,
) -> None:
    """On the device, in a mode in which it ends no capture; and takes the error that it made."""

    @contextlib.contextmanager
    def device(one: torch.device) -> Iterator[None]:
        calls.append(one)
        yield
        calls.append("device of before")

    def exchange(mode: Any) -> None:
        calls.append(("mode", mode._obj.value))
        mode._obj.value = 0 if mode._obj.value == buffers._RELAXED else buffers._RELAXED

    def check(result: int) -> None:
        if result != 0:
            raise RuntimeError("refused")

    torchs = SimpleNamespace(
        cudaHostRegister=lambda *_args: calls.append("register") or status,
        cudaHostUnregister=lambda *_args: calls.append("unregister") or status,
    )
    loaded = SimpleNamespace(
        cudaThreadExchangeStreamCaptureMode=exchange,
        cudaGetLastError=lambda: calls.append("clear"),
    )
    monkeypatch.setattr(buffers, "_C", SimpleNamespace(cuda=False))
    monkeypatch.setattr(buffers, "_loaded_runtime", lambda: loaded if found else None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: torchs)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "device", device)

    def expected(*what: str) -> list[Any]:
        last = ["clear"] if status != 0 else []
        if found:
            return [GPU, ("mode", 2), *what, *last, ("mode", 0), "device of before"]
        return [GPU, *what, "device of before"]

    if status != 0:
        with pytest.raises(RuntimeError, match="refused"):
            backend.host_buffer(4096)
    else:
        backend.host_buffer(4096)
        assert calls[-len(expected("synchronize", "unregister")) :] == expected(
            "synchronize", "unregister"
        )
        del calls[-len(expected("synchronize", "unregister")) :]
    assert calls == expected("register")


def test_only_the_runtime_that_torch_uses_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is loaded for it."""
    find = buffers._loaded_runtime.__wrapped__
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find() is None
    monkeypatch.setattr(torch.version, "cuda", "999.1")
    assert find() is None
