"""Learns which state an optimizer creates for a parameter, by a step on throw-away parameters.

The class's own ``step`` runs on a clone with fake parameters: tensors with a device and a dtype but
no memory. It needs no GPU, launches no kernels, and changes no live object. The clone gets copies
of the optimizer's plain attributes. It does not get attributes that lead to live objects (other
optimizers, modules, bound methods, process groups). A step may fail because it lacks these, or
needs a real GPU. Most optimizers have created their state by then; other state stays unknown.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pyckpt.locks import fork_safe_lock
from pyckpt.optim.tensors import Path, any_index, is_dtensor, leaves, replace

__all__ = ["Learned", "Native", "Spec", "learn", "reads_of"]

# A bound, since some optimizers keep integer counters among the options of their groups, and each
# step then makes a new entry.
_CACHE_ENTRIES = 4096
_LONGEST_OPTION = 32  # entries
_NO_OPTIONS = ("state", "param_groups", "step")
_STEPS = 2  # some state is only created by the second


@dataclass(frozen=True)
class Spec:
    """The properties of a parameter on which its state depends."""

    device_type: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool

    @staticmethod
    def of(param: Tensor, device_type: str | None = None) -> Spec:
        return Spec(
            device_type or param.device.type, param.dtype, tuple(param.shape), param.requires_grad
        )


@dataclass(frozen=True)
class Native:
    """One tensor or number as its optimizer creates it. ``dtype`` is None for a number."""

    kind: Literal["host", "device", "pinned"]
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Learned:
    """The entries created for one parameter, by path (see `any_index`), and those created for no
    parameter, by a path from the optimizer's ``state``."""

    natives: dict[Path, Native] = field(default_factory=dict)
    shared: dict[Path, Native] = field(default_factory=dict)


_lock = fork_safe_lock()
_learned: OrderedDict[Hashable, Learned] = OrderedDict()
_reads: OrderedDict[Hashable, int | None] = OrderedDict()


def learn(optimizer: Any, group: dict[str, Any], specs: Iterable[Spec]) -> dict[Spec, Learned]:
    """The entries that the optimizer creates for parameters of these specs in this group."""
    base = _signature(optimizer, group)
    results: dict[Spec, Learned] = {}
    missing = []
    for spec in dict.fromkeys(specs):
        known = _recall(_learned, (base, spec))
        if known is None:
            missing.append(spec)
        else:
            results[spec] = known
    if missing:
        # All of a group in one step. If a parameter got nothing, since the step failed before, it
        # gets a step of its own.
        fresh = _run(optimizer, group, missing)
        if len(missing) > 1:
            for spec in missing:
                if not fresh[spec].natives:
                    fresh[spec] = _run(optimizer, group, [spec])[spec]
        for spec in missing:
            _remember(_learned, (base, spec), fresh[spec])
        results.update(fresh)
    return results


def reads_of(
    optimizer: Any,
    group: dict[str, Any],
    spec: Spec,
    path: Path,
    device_type: str,
    *,
    shared: bool = False,
) -> int | None:
    """How often a step reads the tensor at ``path`` back to the host if it is on such a device;
    None if the step does not run. ``shared``: the path begins at the optimizer's ``state``."""
    if device_type == "cpu":
        return 0
    key = (_signature(optimizer, group), spec, path, device_type, shared)
    with _lock:
        if key in _reads:
            return _reads[key]
    reads = _count_reads(optimizer, group, spec, path, device_type, shared)
    _remember(_reads, key, reads)
    return reads


def _recall(cache: OrderedDict[Hashable, Any], key: Hashable) -> Any:
    with _lock:
        if key in cache:
            cache.move_to_end(key)
            return cache[key]
    return None


def _remember(cache: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    with _lock:
        cache[key] = value
        while len(cache) > _CACHE_ENTRIES:
            cache.popitem(last=False)


def _signature(optimizer: Any, group: dict[str, Any]) -> Hashable:
    """All that the state depends on, except for the parameter.

    A float enters only as zero or not, which may decide whether there is a buffer. Its value is a
    learning rate or the like, and changes with every step.
    """
    options = tuple(
        sorted(
            (str(key), _token(value))
            for key, value in group.items()
            if key not in ("params", "param_names")
        )
    )
    attributes = tuple(
        sorted(
            (name, _token(value))
            for name, value in vars(optimizer).items()
            if name not in _NO_OPTIONS and not name.startswith("_")
        )
    )
    return type(optimizer), options, attributes, torch.get_default_dtype()


def _token(value: Any, depth: int = 3) -> str:
    if isinstance(value, Tensor):
        return f"tensor {value.device.type} {value.dtype} {tuple(value.shape)}"
    if isinstance(value, float):
        return f"float {value != 0.0}"
    if isinstance(value, bool | int | str | None | torch.dtype | torch.device | Enum):
        return repr(value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    name = type(value).__qualname__
    # Long containers are records of steps or parameters, and no options.
    if isinstance(value, list | tuple | dict) and len(value) <= _LONGEST_OPTION and depth:
        entries = value.items() if isinstance(value, dict) else value
        return f"{name} {[_token(entry, depth - 1) for entry in entries]}"
    return name


# --- the run ----------------------------------------------------------------------------------


class _CannotRun(Exception):
    """The step needs an operation that a throw-away run must not do."""


class _Pretend(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
def _isolated() -> Iterator[_Pretend]:
    """Fake mode, isolated from the caller's modes, default device and gradients."""
    pretend = _Pretend()
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


def _run(optimizer: Any, group: dict[str, Any], specs: list[Spec]) -> dict[Spec, Learned]:
    learned = {spec: Learned() for spec in specs}
    with _isolated():
        try:
            clone, params = _clone(optimizer, group, specs)
        except Exception:
            return learned
        clone = _stepped(clone)
        shared = {key: state for key, state in clone.state.items() if not isinstance(key, Tensor)}
        natives = {
            path: native
            for path, native in _natives(shared).items()
            if not any(isinstance(key, Tensor) for key in path)
        }
        for spec, param in zip(specs, params, strict=True):
            state = clone.state.get(param, {})
            learned[spec] = Learned(_natives(state) if isinstance(state, dict) else {}, natives)
    return learned


def _stepped(clone: Any) -> Any:
    """The clone after the steps, or after those that succeed."""
    _to_train(clone)
    for _ in range(_STEPS):
        try:
            _bare_step(clone)
        except KeyError:
            # Some create their state in the constructor, and the step expects it.
            if any(not isinstance(state, dict) or state for state in clone.state.values()):
                break
            try:
                clone = _constructed(clone)
                _to_train(clone)
                _bare_step(clone)
            except Exception:
                break
        except Exception:
            break
    return clone


def _to_train(clone: Any) -> None:
    """Schedule-free optimizers, and others with modes, step in train mode only."""
    with contextlib.suppress(Exception):
        type(clone).train(clone)


def _natives(state: dict[Any, Any]) -> dict[Path, Native]:
    natives: dict[Path, Native] = {
        (key,): Native("host", None, None)
        for key, value in state.items()
        if isinstance(value, int | float)
    }
    alike: dict[Path, dict[Path, Native]] = defaultdict(dict)
    for path, tensor in leaves(state):
        on_host = tensor.device.type == "cpu"
        pinned = on_host and _Pretend.is_pinned(tensor)
        alike[any_index(state, path)][path] = Native(
            "pinned" if pinned else "host" if on_host else "device",
            tensor.dtype,
            tuple(tensor.shape),
        )
    for generic, entries in alike.items():
        if len({(native.kind, native.dtype) for native in entries.values()}) == 1:
            natives[generic] = next(iter(entries.values()))
        else:
            natives.update(entries)  # entries of the list differ, so each index has its own
    return natives


def _count_reads(
    optimizer: Any,
    group: dict[str, Any],
    spec: Spec,
    path: Path,
    device_type: str,
    shared: bool,
) -> int | None:
    with _isolated() as pretend:
        try:
            clone, params = _clone(optimizer, group, [spec], resolve_foreach=True)
            clone = _stepped(clone)
            pretend.reads = 0
            _bare_step(clone)
            usual, pretend.reads = pretend.reads, 0
            state = clone.state if shared else clone.state[params[0]]
            tensor = functools.reduce(lambda entry, key: entry[key], path, state)
            elsewhere = torch.empty(tensor.shape, dtype=tensor.dtype, device=device_type)
            replace(state, path, elsewhere)
            _bare_step(clone)
        except Exception:
            return None
        return pretend.reads - usual


def _bare_step(clone: Any) -> None:
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


def _clone(
    optimizer: Any, group: dict[str, Any], specs: list[Spec], *, resolve_foreach: bool = False
) -> tuple[Any, list[Tensor]]:
    params: list[Tensor] = []
    for spec in specs:
        memory = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device_type)
        param = torch.nn.Parameter(memory, requires_grad=spec.requires_grad)
        param.grad = torch.zeros_like(memory)
        params.append(param)
    options = {
        key: _harmless(value)
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
        name: _harmless(value)
        for name, value in vars(optimizer).items()
        if name not in _NO_OPTIONS and not name.endswith("_hooks")
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


def _harmless(value: Any) -> Any:
    """A copy through which nothing live can be reached, or ``_WITHHELD``."""
    if isinstance(value, Tensor):
        if is_dtensor(value):
            return _WITHHELD
        device = value.device.type
        return torch.empty(tuple(value.shape), dtype=value.dtype, device=device)
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return value
    if isinstance(value, torch.dtype | torch.device | torch.Size | type):
        return value
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        owner = getattr(value, "__self__", None)
        return value if owner is None or isinstance(owner, types.ModuleType) else _WITHHELD
    if type(value) in (dict, OrderedDict):
        copies = {key: _harmless(entry) for key, entry in value.items() if not _is_live(key)}
        return type(value)((k, v) for k, v in copies.items() if v is not _WITHHELD)
    if type(value) in (list, tuple, set):
        entries = [_harmless(entry) for entry in value]
        return _WITHHELD if any(e is _WITHHELD for e in entries) else type(value)(entries)
    return _WITHHELD


def _is_live(key: Any) -> bool:
    return isinstance(key, Tensor | torch.nn.Module)
