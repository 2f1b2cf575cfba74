"""``Offloader``: moves optimizer state to the host and back, while other work needs the GPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.optim import Optimizer

from pyckpt import guard
from pyckpt.optim import buffers
from pyckpt.optim.tensors import leaves, plain_parts
from pyckpt.optim.wrappers import layers, members
from pyckpt.printable import size_text

__all__ = ["Offloader"]

_ALIGNMENT = 512  # of each storage's place in a buffer, in bytes; enough for any copy engine


@dataclass
class _Away:
    """One storage whose bytes are in host memory. Its tensors keep it alive, and this does as well,
    so that the bytes return to the same storage."""

    storage: UntypedStorage
    nbytes: int
    host: Tensor
    backend: buffers.Backend


class Offloader:
    """Takes an optimizer's state out of GPU memory and brings it back into the same tensors.

    ::

        offloader = Offloader(optimizer)  # once: it keeps its host memory
        for batch in loop:
            with offloader:
                generate(batch)  # the state's GPU memory is free
            train(batch)

    Both ways are asynchronous, on a stream of their own and through page-locked memory. That memory
    is allocated in the first round, or when the state has grown, and kept. GPU work queued before
    `offload`, and a save that still copies, read the state as it was. After `reload`, the next
    ``step``, ``state_dict``, ``train`` or ``eval`` of the optimizer waits for the copies on the
    GPU, and not on the CPU. A program that reads the state directly calls `wait` first. An
    Offloader whose state is out, or on its way back, lives as long as its optimizer.

    Each storage is copied once, however many tensors share it. DTensors are copied by their local
    shards. State on the host stays there, as does memory that parameters or gradients also use.
    The memory returns to PyTorch's allocator: for other processes, call `wait` and then
    ``torch.cuda.empty_cache()``. Addresses change, so a captured CUDA graph of the step must be
    captured again. For one thread at a time.

    Args:
        optimizer: the optimizer, or a wrapper of optimizers.

    Raises:
        TypeError: ``optimizer`` is neither.
    """

    def __init__(self, optimizer: Any) -> None:
        members(optimizer)
        self._optimizer = optimizer
        self._backends: dict[torch.device, buffers.Backend | None] = {}
        self._buffers: dict[torch.device, list[Tensor]] = {}
        self._away: list[_Away] = []
        self._fences: list[tuple[buffers.Backend, Any]] = []
        # Through these the optimizer keeps this object alive, while its state is out.
        self._hooks: list[Any] = []
        self._guarded: set[int] = set()
        _hook_steps()

    def __repr__(self) -> str:
        where = "out" if self._away else "in place"
        kept = size_text(self.host_bytes)
        return f"<Offloader of {type(self._optimizer).__name__}: state {where}, {kept} on the host>"

    @property
    def offloaded(self) -> bool:
        """Whether the state is out."""
        return bool(self._away)

    @property
    def host_bytes(self) -> int:
        """Bytes of page-locked memory that are kept for the state."""
        return sum(b.numel() for some in self._buffers.values() for b in some)

    def offload(self) -> None:
        """Queue the copies to the host and free the GPU memory behind them. Does nothing if the
        state is out already.

        Raises:
            MemoryError, RuntimeError: no host memory; the state is where it was.
        """
        if self._away:
            return
        self._order()
        away = self._planned()
        if away:
            guard.hold()  # a save under way must not copy from freed memory
        by_backend: dict[int, list[_Away]] = {}
        for entry in away:
            by_backend.setdefault(id(entry.backend), []).append(entry)
        for entries in by_backend.values():
            backend = entries[0].backend
            backend.copy_out([(entry.host, entry.storage) for entry in entries])
            self._fences.append((backend, backend.fence()))
        for entry in away:
            entry.storage.resize_(0)
        self._away = away
        if away:
            self._guard()

    def reload(self) -> None:
        """Allocate the GPU memory again and queue the copies back. Does nothing if the state is not
        out.

        Raises:
            torch.OutOfMemoryError: there is no room; the state is still out, and this may be
                called again.
        """
        grown: list[_Away] = []
        try:
            for entry in self._away:
                grown.append(entry)
                entry.storage.resize_(entry.nbytes)
        except BaseException:
            for entry in grown:
                entry.storage.resize_(0)
            raise
        by_backend: dict[int, list[_Away]] = {}
        for entry in self._away:
            by_backend.setdefault(id(entry.backend), []).append(entry)
        self._fences.clear()  # of the copies out: the copies in run after them anyway
        for entries in by_backend.values():
            backend = entries[0].backend
            backend.copy_in([(entry.storage, entry.host) for entry in entries])
            self._fences.append((backend, backend.fence()))
        self._away = []

    def wait(self) -> None:
        """Block until all copies are done, so that the memory is free or the state is there."""
        for backend, fence in self._fences:
            backend.wait(fence)
        self._order()

    def close(self) -> None:
        """Bring the state back and free the host memory. Idempotent; the Offloader stays usable."""
        self.reload()
        self.wait()
        self._buffers.clear()

    def __enter__(self) -> Offloader:
        self.offload()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.reload()

    # --- what goes where ----------------------------------------------------------------------

    def _planned(self) -> list[_Away]:
        """Every storage to take out, with its place in host memory. The plan is made anew each
        time, so state may come, go and be replaced between rounds; the same state gets the same
        places."""
        found: dict[int, tuple[UntypedStorage, torch.device]] = {}
        kept = set()
        for member in members(self._optimizer):
            for group in member.param_groups:
                for param in group["params"]:
                    for tensor in (param, param.grad):
                        if tensor is not None:
                            kept |= {p.untyped_storage()._cdata for p in plain_parts(tensor)}
            for state in member.state.values():
                for _, tensor in leaves(state):
                    for part in plain_parts(tensor):
                        backend = self._backend(part.device)
                        if backend is not None and backend.holds(part):
                            storage = part.untyped_storage()
                            found.setdefault(storage._cdata, (storage, part.device))
        return [
            entry
            for device in dict.fromkeys(device for _, device in found.values())
            for entry in self._placed(
                device,
                [
                    storage
                    for identity, (storage, where) in found.items()
                    if where == device
                    and identity not in kept
                    and storage.nbytes()
                    and storage.resizable()  # not where another library owns the memory
                ],
            )
        ]

    def _placed(self, device: torch.device, storages: list[UntypedStorage]) -> list[_Away]:
        """A place in the device's host buffers for each storage, in a new buffer for those that
        find no room. Largest first, so that the order in which state was made does not matter."""
        backend = self._backend(device)
        assert backend is not None
        kept = self._buffers.setdefault(device, [])
        storages = sorted(storages, key=lambda storage: -storage.nbytes())
        sizes = [storage.nbytes() for storage in storages]
        away = []
        which = offset = 0
        for index, (storage, size) in enumerate(zip(storages, sizes, strict=True)):
            while which < len(kept) and offset + size > kept[which].numel():
                which, offset = which + 1, 0
            if which == len(kept):
                kept.append(backend.host_buffer(sum(map(_aligned, sizes[index:]))))
            away.append(_Away(storage, size, kept[which][offset : offset + size], backend))
            offset += _aligned(size)
        return away

    def _backend(self, device: torch.device) -> buffers.Backend | None:
        if device not in self._backends:
            self._backends[device] = buffers.backend_for(device)
        return self._backends[device]

    # --- the guard ----------------------------------------------------------------------------

    def _order(self) -> None:
        """Make the caller's streams wait for all copies. No method needs guarding after that."""
        for backend, fence in self._fences:
            backend.order_after(fence)
        self._fences.clear()
        if not self._away:
            self._unguard()

    def _guard(self) -> None:
        self._unguard()
        holders = list({id(holder): holder for holder in layers(self._optimizer)}.values())
        self._guarded = {id(holder) for holder in holders}
        for holder in holders:
            if isinstance(holder, Optimizer):
                self._hooks += [
                    holder.register_state_dict_pre_hook(self._before_state_dict),
                    holder.register_load_state_dict_pre_hook(self._before_load),
                ]
            # Schedule-free optimizers use their state in `train` and `eval`. A wrapper may use its
            # state before it steps the inner optimizer, whose step torch hooks.
            hooked = getattr(getattr(type(holder), "step", None), "hooked", False)
            self._hooks += [
                _Instead(holder, name, self._before_method)
                for name in ("train", "eval", *(() if hooked else ("step",)))
                if callable(getattr(holder, name, None))
            ]
        _guarding[id(self)] = self

    def _unguard(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        _guarding.pop(id(self), None)

    def _before_step(self, optimizer: Any) -> None:
        if id(optimizer) in self._guarded:
            self._refuse_while_away("step")
            self._order()

    def _before_method(self, name: str) -> None:
        self._refuse_while_away(name)
        self._order_for_now()

    def _before_state_dict(self, _optimizer: Any) -> None:
        self._refuse_while_away("state_dict")
        self._order_for_now()

    def _before_load(self, _optimizer: Any, _state_dict: Any) -> None:
        self._refuse_while_away("load_state_dict")

    def _order_for_now(self) -> None:
        # The fences stay: the step may run on another stream, which must wait as well.
        for backend, fence in self._fences:
            backend.order_after(fence)

    def _refuse_while_away(self, what: str) -> None:
        if self._away:
            raise RuntimeError(f"{what}: the optimizer's state is offloaded. Call reload() first.")


class _Instead:
    """Replaces a method of one object, until removed: calls ``before`` with its name first."""

    def __init__(self, holder: Any, name: str, before: Callable[[str], None]) -> None:
        self._holder, self._name, self._before = holder, name, before
        self._own = vars(holder).get(name)
        self._method = getattr(holder, name)
        functools.update_wrapper(self, self._method)  # schedulers mark the steps they know
        setattr(holder, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(self._name)
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._holder, self._name)  # a copy of the object has its own method

    def remove(self) -> None:
        attributes = vars(self._holder)
        if attributes.get(self._name) is not self:
            return  # other code has replaced it, and calls it
        if self._own is None:
            del attributes[self._name]
        else:
            attributes[self._name] = self._own


# Those for whose copies no step has waited yet. Only their optimizers own them.
_guarding: weakref.WeakValueDictionary[int, Offloader] = weakref.WeakValueDictionary()


@functools.cache
def _hook_steps() -> None:
    guard.before_steps(_before_step)


def _before_step(optimizer: object) -> None:
    for ref in _guarding.valuerefs():
        offloader = ref()
        if offloader is not None:
            offloader._before_step(optimizer)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
