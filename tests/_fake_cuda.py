"""CUDA tensors without CUDA: fake ones, and an answer where the host reads one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

ANSWER = 10.0
"""Of every ``.item()``. As the number of steps it is late enough for RAdam to be rectified."""


class _Answers(TorchDispatchMode):
    """Fake tensors have no values: without this ``.item()`` raises."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return ANSWER
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), _Answers():
        yield
