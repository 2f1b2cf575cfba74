"""A throw-away clone of an optimizer, with fake parameters, and steps of it.

The class's own ``step`` runs on the clone. Fake parameters are tensors with a device and a dtype
but no memory. A step needs no GPU, launches no kernels, and changes no live object. The clone gets
copies of the optimizer's plain attributes. It does not get attributes that lead to live objects
(other optimizers, modules, bound methods, process groups). A step may fail because it lacks these,
or needs a real GPU.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyckpt.optim.tensors import is_dtensor

__all__ = ["NO_OPTIONS", "Pretend", "Spec", "bare_step", "clone_of", "isolated", "stepped"]


_STEPS = 2  # some state is only created by the second

NO_OPTIONS = ("state", "param_groups", "step")
"""Attributes of an optimizer that are no options."""


@dataclass(frozen=True)
class Spec:
    """The properties of a parameter on which its state depends."""

    device_type: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool
    device_index: int | None = field(default=None, compare=False)
    """Which device of the type to name. The state does not depend on it. But where the first fake
    tensor on a GPU is made, torch makes a real one on that GPU: without an index, on the thread's
    current one, which may be another process's."""

    @staticmethod
    def of(param: Tensor, device: torch.device | None = None) -> Spec:
        device = device or param.device
        shape = tuple(param.shape)
        return Spec(device.type, param.dtype, shape, param.requires_grad, device.index)

    @property
    def device(self) -> torch.device:
        if self.device_index is None:
            return torch.device(self.device_type)
        return torch.device(self.device_type, self.device_index)


class _CannotRun(Exception):
    """The step needs an operation that a throw-away run must not do."""


class Pretend(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators that fake tensors do not support, and counts reads from a device."""

    _PINNED = "_pyckpt_pinned"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        kwargs = dict(kwargs or {})
        if "c10d" in func.namespace:
            raise _CannotRun(f"{func} talks to other ranks")
        if func is aten._local_scalar_dense.default:
            self.reads += args[0].device.type != "cpu"
            return _some_number(args[0].dtype)
        if func._schema.is_mutable and not func._schema.returns:
            return None  # it only writes values, and not all such operations have a fake
        if func is aten.is_pinned.default:
            return hasattr(args[0], self._PINNED)
        # Fake tensors cannot be pinned. An attribute marks those that would be.
        pinned = bool(kwargs.pop("pin_memory", False))
        if func is aten._pin_memory.default:
            result, pinned = args[0].clone(), True
        else:
            result = func(*args, **kwargs)
        self._count_copy(func, args, result)
        if pinned and isinstance(result, Tensor):
            setattr(result, self._PINNED, True)
        return result

    def _count_copy(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0], result
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1], args[0]
        else:
            return
        self.reads += source.device.type != "cpu" and target.device.type == "cpu"

    @classmethod
    def is_pinned(cls, tensor: Tensor) -> bool:
        return hasattr(tensor, cls._PINNED)


def _some_number(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return False
    # Bias corrections divide by such a float, or by 1 minus it, so it is neither 0 nor 1.
    return 0.5 if dtype.is_floating_point else 1


@contextlib.contextmanager
def isolated() -> Iterator[Pretend]:
    """Fake mode, isolated from the caller's modes, default device and gradients."""
    pretend = Pretend()
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        # An operator without a fake implementation must fail, and not run its real kernel.
        FakeTensorMode(allow_fallback_kernels=False),
        pretend,
        # Under another default device, a fresh optimizer would create its scalars there, and be
        # slow from the start.
        torch.device("cpu"),
    ):
        yield pretend


def clone_of(
    optimizer: Any, group: dict[str, Any], specs: list[Spec], *, resolve_foreach: bool = False
) -> tuple[Any, list[Tensor]]:
    # One device of each type, so that steps which take no others run.
    devices: dict[str, torch.device] = {}
    for spec in specs:
        devices.setdefault(spec.device_type, spec.device)
    params: list[Tensor] = []
    for spec in specs:
        memory = torch.empty(spec.shape, dtype=spec.dtype, device=devices[spec.device_type])
        param = torch.nn.Parameter(memory, requires_grad=spec.requires_grad)
        param.grad = torch.zeros_like(memory)
        params.append(param)
    options = {
        key: _harmless(value, devices)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }
    if resolve_foreach and options.get("foreach", 0) is None and not options.get("fused"):
        # torch decides by the class of the parameters, and fake tensors have another class.
        options["foreach"] = specs[0].device_type in ("cuda", "xpu") and not options.get(
            "differentiable"
        )
    cls: Any = type(optimizer)
    clone: Any = object.__new__(_unhooked_class(cls))
    attributes = {
        name: _harmless(value, devices)
        for name, value in vars(optimizer).items()
        if name not in NO_OPTIONS and not name.endswith("_hooks")
    }
    clone.__dict__.update({k: v for k, v in attributes.items() if v is not _WITHHELD})
    for name in vars(optimizer):
        if name.endswith("_hooks"):
            clone.__dict__[name] = OrderedDict()
    clone.__dict__["_warned_capturable_if_run_uncaptured"] = True
    if isinstance(clone.__dict__.get("defaults"), dict):
        # With gradients through the step, it could not change its parameters in place.
        clone.defaults["differentiable"] = False
    clone.state = defaultdict(dict)
    clone.param_groups = [
        {"params": params, **{k: v for k, v in options.items() if v is not _WITHHELD}}
    ]
    return clone, params


def _constructed(clone: Any) -> Any:
    """The optimizer as its own constructor makes it from the clone's group."""
    cls = type(clone)
    # A constructor may look at the name of its class, so call the class from which ours was made.
    own = cls.__mro__[1] if cls.__dict__.get("_pyckpt_unhooked") else cls
    fresh: Any = own(clone.param_groups)
    fresh.__class__ = cls
    return fresh


_WITHHELD = object()


def _harmless(value: Any, devices: dict[str, torch.device]) -> Any:
    """A copy through which nothing live can be reached, or ``_WITHHELD``. Tensors are on the device
    of their type, or of a type that is not there, on their own."""
    if isinstance(value, Tensor):
        if is_dtensor(value):
            return _WITHHELD
        device = devices.get(value.device.type, value.device)
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.Size | type):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        return value if owner is None or isinstance(owner, types.ModuleType) else _WITHHELD
    if type(value) in (dict, OrderedDict):
        copies = {
            key: _harmless(entry, devices) for key, entry in value.items() if not _is_live(key)
        }
        return type(value)((k, v) for k, v in copies.items() if v is not _WITHHELD)
    if type(value) in (list, tuple, set):
        entries = [_harmless(entry, devices) for entry in value]
        return _WITHHELD if any(e is _WITHHELD for e in entries) else type(value)(entries)
    return _WITHHELD


def _is_live(key: Any) -> bool:
    return isinstance(key, Tensor | torch.nn.Module)


def stepped(clone: Any) -> Any:
    """The clone after the steps, or after those that succeed."""
    _to_train(clone)
    for _ in range(_STEPS):
        try:
            bare_step(clone)
        except KeyError:
            # Some create their state in the constructor, and the step expects it.
            if any(not isinstance(state, dict) or state for state in clone.state.values()):
                break
            try:
                clone = _constructed(clone)
                _to_train(clone)
                bare_step(clone)
            except Exception:
                break
        except Exception:
            break
    return clone


def _to_train(clone: Any) -> None:
    """Schedule-free optimizers, and others with modes, step in train mode only."""
    with contextlib.suppress(Exception):
        type(clone).train(clone)


def bare_step(clone: Any) -> None:
    _unhooked(type(clone).step)(clone)


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step`` without the wrapper through which torch runs hooks and records profiles."""
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


@functools.cache
def _unhooked_class(cls: Any) -> Any:
    """A subclass in which ``super().step()`` runs no hooks either.

    Each base whose ``step`` torch has wrapped gets a subclass with the bare ``step``, right before
    it in the method resolution order.
    """
    wrapped = [
        base
        for base in cls.__mro__
        if base is not cls and getattr(base.__dict__.get("step"), "hooked", False)
    ]
    if not wrapped or "step" not in cls.__dict__:
        return cls
    bare = [_subclass((base,), {"step": _unhooked(base.__dict__["step"])}) for base in wrapped]
    own = {"step": _unhooked(cls.__dict__["step"]), "_pyckpt_unhooked": True}
    return _subclass((cls, *bare), own)


def _subclass(bases: tuple[type, ...], attributes: dict[str, Any]) -> type:
    def fill(body: dict[str, Any]) -> None:
        body.update(attributes)

    return types.new_class(bases[0].__name__, bases, exec_body=fill)
