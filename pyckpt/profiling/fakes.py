"""CUDA tensors without CUDA, for tests of how often code would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["fake_cuda"]


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a number to code that reads a scalar. Fake tensors have no values, and would raise."""

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


class _WithoutGuards(TorchFunctionMode):  # type: ignore[no-untyped-call]
    """Calls operators without the bindings that first make a device current.

    A torch that was built without CUDA, or that finds no driver, cannot make a device current, even
    if every tensor is fake.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args, **kwargs)
        if func is torch.Tensor.to and not any(isinstance(x, torch.Tensor) for x in args[1:]):
            return _to(*args, **kwargs)
        return func(*args, **kwargs)


def _to(tensor: torch.Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
    # `to` also takes `copy` by position, after dtype, device and non_blocking.
    places = [x for x in args if isinstance(x, bool)]
    if len(places) == 2:
        copy = places[1]
        args = args[:-1]
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    device = tensor.device if device is None else device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    dtype = tensor.dtype if dtype is None else dtype
    if not copy and (device, dtype) == (tensor.device, tensor.dtype) and memory_format is None:
        return tensor
    moved: torch.Tensor = torch.ops.aten._to_copy.default(
        tensor, dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
    )
    return moved


@contextmanager
def fake_cuda(*, answer: float = 10.0) -> Iterator[None]:
    """Make tensors in the block fake: they have a device, such as ``"cuda:0"``, and no values.

    It uses torch's `FakeTensorMode`, and needs neither a GPU nor CUDA. Every ``.item()`` returns
    ``answer``, in the tensor's kind of number, so that code that reads the state of an optimizer
    runs as after ``answer`` steps. Without a GPU, some operators that need a current device raise
    RuntimeError: indexing, ``float(t)``, random numbers.
    """
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(_Answers(answer))
        if not torch.cuda.is_available():
            stack.enter_context(_WithoutGuards())
        yield
