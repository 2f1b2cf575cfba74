"""CUDA tensors without CUDA, for tests of how often code would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["fake_cuda"]


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a number to whoever reads a scalar; fake tensors have none, and would raise."""

    def __init__(self, answer: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if dtype is torch.bool:
                return bool(self._answer)
            return self._answer if dtype.is_floating_point else int(self._answer)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda(*, answer: float = 10.0) -> Iterator[None]:
    """Inside, tensors are fake: they have a device, ``"cuda:0"`` too, and no values.

    No GPU is needed, and no CUDA; torch's `FakeTensorMode` does it. Every ``.item()`` returns
    ``answer``, in the tensor's kind of number, so that code that reads the state of an optimizer
    runs as if ``answer`` steps were behind it. Name devices with their index: a torch without CUDA
    cannot tell which GPU is the current one, nor copy *to* a device in all of the ways there are.
    """
    with FakeTensorMode(), _Answers(answer):
        yield
