"""Observes the operators that a thread dispatches: copies between host and device, and reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from pyckpt.profiling.counts import Direction, HostMemory

aten = torch.ops.aten

_ITEM = aten._local_scalar_dense.default
# Operator -> where its destination is among the arguments; None: it is the result.
_COPIES = {
    aten._to_copy.default: None,
    aten.copy.default: None,
    aten.copy_.default: 0,
}
_FOREACH_COPY = aten._foreach_copy_.default
_INDEX_PUTS = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
}
_READ_BACK = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Observer(Protocol):
    """Receives the observations. ``real`` is False for fake tensors, where nothing waits."""

    def item(self, size: int, *, real: bool) -> None: ...

    def copy(
        self, direction: Direction, memory: HostMemory, size: int, *, blocking: bool, real: bool
    ) -> None: ...

    def data_dependent(self, *, real: bool) -> None: ...


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports to an observer the operators that this thread, and its backward pass, dispatches."""

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Otherwise torch.compile would not compile, and other code would run than without counting.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(cls) for cls in types):
            # The subclass runs the operator on the tensors that it wraps (a DTensor's local shard,
            # the parts of a quantised tensor). Those calls come here again, and are counted.
            return NotImplemented
        # Counted before the call, which may raise on fake tensors.
        if func is _ITEM:
            if _on_device(args[0]):
                self._observer.item(args[0].element_size(), real=_real(args[0]))
        elif _reads_back(func, args, kwargs):
            tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if _on_device(x)]
            if tensors:
                self._observer.data_dependent(real=all(map(_real, tensors)))
        result = func(*args, **kwargs)
        for destination, source in _pairs(func, args, kwargs, result):
            self._observe_copy(destination, source, _non_blocking(func, args, kwargs))
        return result

    def _observe_copy(
        self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> None:
        to_device, from_device = _on_device(destination), _on_device(source)
        if to_device == from_device or "meta" in (destination.device.type, source.device.type):
            return
        elements = destination.numel()
        if elements == 0:
            return
        # copy_kernel_cuda (ATen/native/cuda/Copy.cu) converts types on the host if the copy blocks,
        # and on the device otherwise. This is the number of bytes that cross the bus.
        on_host = destination if from_device else source
        on_device = source if from_device else destination
        size = elements * (on_host if non_blocking else on_device).element_size()
        real = _real(source) and _real(destination)
        memory: HostMemory = "unknown"
        if real:
            memory = "pinned" if on_host.is_pinned() else "pageable"
        self._observer.copy(
            "d2h" if from_device else "h2d", memory, size, blocking=not non_blocking, real=real
        )


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def _real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor)


def _pairs(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of destination and source, if ``func`` copies."""
    if func is _FOREACH_COPY:
        # Lists on different devices are copied one by one, where a mode does not see it.
        return zip(args[0], args[1], strict=True)
    if func not in _COPIES:
        return ()
    if func is aten._to_copy.default:
        return ((result, args[0]),)
    source = args[1] if len(args) > 1 else kwargs["src"]
    return ((result if _COPIES[func] is None else args[0], source),)


def _non_blocking(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    # For _to_copy it can only be given by name.
    return func is not aten._to_copy.default and len(args) > 2 and bool(args[2])


def _reads_back(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if func in _INDEX_PUTS:
        return _puts_where_it_finds(*args, **kwargs)
    tags = getattr(func, "tags", ())
    if not any(tag in tags for tag in _READ_BACK):
        return False
    if func is aten.index.Tensor:
        return any(map(_is_mask, _tensors(args[1])))
    # With output_size, the caller gives the size of the result.
    return kwargs.get("output_size") is None


def _puts_where_it_finds(
    self: torch.Tensor,
    indices: Iterable[Any],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> bool:
    """Whether an ``index_put`` must read a mask back. A single value of the host is filled in
    without that (canDispatchToMaskedFill, ATen/native/TensorAdvancedIndexingUtils.h)."""
    given = list(_tensors(indices))
    if not any(map(_is_mask, given)):
        return False
    fills = len(given) == 1 and given[0].device == self.device and not accumulate
    return not (fills and values.numel() == 1 and values.device.type == "cpu")


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    return (value for value in values if isinstance(value, torch.Tensor))
