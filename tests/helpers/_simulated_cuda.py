"""CUDA tensors with values, on a machine without a GPU.

Inside `simulated_cuda` tensors on "cuda" are CPU memory in disguise: they say that they are on
cuda:0, every operation runs on the CPU, one that mixes devices fails as CUDA's would, and what
would make the host wait for a GPU is counted. What it does not show: streams, and speed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_aten = torch.ops.aten
# These take CPU tensors beside CUDA ones, besides scalars (0-d tensors), which all do.
_MIXING = {_aten.copy_.default, _aten._foreach_copy_.default, _aten._to_copy.default}


class SimulatedTensor(torch.Tensor):
    """CPU memory that says it is on cuda:0."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> SimulatedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=CUDA,
        )

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.memory})"

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedTensor:
        return memo.setdefault(id(self), SimulatedTensor(self.memory.clone()))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of simulated_cuda()")


class Simulation(TorchDispatchMode):
    """``counts`` has the number of "d2h" and "h2d" copies, and of "read"s of a value (`item`)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        on_cuda = [tensor for tensor in flat if isinstance(tensor, SimulatedTensor)]
        target = CUDA if on_cuda else CPU
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            kwargs["device"] = CPU
        if func is _aten._local_scalar_dense.default and on_cuda:
            self.counts["read"] += 1
        elif func is _aten._to_copy.default:
            self._count_copy(args[0], target)
        elif func is _aten.copy_.default:
            self._count_copy(args[1], CUDA if isinstance(args[0], SimulatedTensor) else CPU)
            target = CUDA
        self._check_devices(func, flat, on_cuda)
        with _disable_current_modes():
            plain_args, plain_kwargs = tree_map(_memory, (args, kwargs))
            result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and result is not None and args:
            before = {id(_memory(tensor)): tensor for tensor in flat}
            return tree_map(lambda value: before.get(id(value), value), result)
        return tree_map(_disguised, result) if target.type == "cuda" else result

    def _count_copy(self, source: torch.Tensor, target: torch.device) -> None:
        if isinstance(source, SimulatedTensor) != (target.type == "cuda"):
            self.counts["h2d" if target.type == "cuda" else "d2h"] += 1

    def _check_devices(self, func: Any, flat: list[Any], on_cuda: list[Any]) -> None:
        if func in _MIXING or not on_cuda:
            return
        wrong = [t for t in flat if not isinstance(t, SimulatedTensor) and t.dim() > 0]
        fused = "_fused" in str(func)
        wrong += [t for t in flat if fused and not isinstance(t, SimulatedTensor)]
        if wrong:
            raise RuntimeError(f"{func}: all tensors must be on the same device")


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, SimulatedTensor) else value


def _disguised(value: Any) -> Any:
    return SimulatedTensor(value) if type(value) is torch.Tensor else value


class _WithoutGuards(TorchFunctionMode):
    """The few methods that ask a CUDA build for a device guard before anything can intercept them,
    by the operations that they come down to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor_class = torch.Tensor
        if func is tensor_class.copy_:
            source, *blocking = args[1:]
            return _aten.copy_.default(args[0], source, *blocking, **kwargs)
        if func in (tensor_class.to, tensor_class.cuda):
            return self._to(func, *args, **kwargs)
        if func in (tensor_class.__float__, tensor_class.__int__, tensor_class.__bool__):
            kind = {"__float__": float, "__int__": int, "__bool__": bool}[func.__name__]
            return kind(_aten._local_scalar_dense.default(args[0]))
        if func is tensor_class.__setitem__ and isinstance(args[1], torch.Tensor):
            args[0].masked_fill_(args[1], args[2])
            return None
        if func is tensor_class.__getitem__ and type(args[1]) is slice:
            return _aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        if func is tensor_class.__getitem__ and type(args[1]) is int:
            return _aten.select.int(args[0], 0, args[1])
        return func(*args, **kwargs)

    def _to(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if func is torch.Tensor.cuda:
            args = ("cuda",)
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = tensor.device if device is None else device
        device = CUDA if device.type == "cuda" else device
        dtype = dtype or tensor.dtype
        if (device, dtype) == (tensor.device, tensor.dtype) and not copy:
            return tensor
        return _aten._to_copy.default(
            tensor, dtype=dtype, device=device, non_blocking=bool(non_blocking)
        )


@contextlib.contextmanager
def simulated_cuda() -> Iterator[Simulation]:
    # Torch initialises CUDA for a device="cuda" argument unless there is a fake mode; this one
    # never gets to see an operation.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Simulation() as simulation, _WithoutGuards():
        yield simulation


def values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values on the CPU, not counted as a copy."""
    if isinstance(tensor, SimulatedTensor):
        return tensor.memory
    with _disable_current_modes():
        return tensor.detach()


@contextlib.contextmanager
def real_world() -> Iterator[None]:
    """For what must not see the simulation, files for one."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield
