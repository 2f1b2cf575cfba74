"""The step guard: no step changes or frees memory that is still being copied.

`torch.optim` calls global hooks before every step of every optimizer. pyckpt has one, which calls
all hooks that were given to `before_steps`. While the state is being copied, it makes the step
wait: on a GPU the stream that steps waits, on a CPU the thread. The steps of all optimizers wait,
not only of those that a stager was given. A wrapper may step another optimizer than the program
holds (ZeroRedundancyOptimizer, Accelerate), and a needless wait costs nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pyckpt.locks import fork_safe_lock
from pyckpt.speaking import for_all

__all__ = [
    "Guarded",
    "add",
    "before_steps",
    "discard",
    "hold",
    "look_for_capture",
    "tell_of_graphs",
    "watch",
]

_logger = logging.getLogger("pyckpt")


class Guarded(Protocol):
    """Copies that a step must not overtake."""

    def guard(self) -> None:
        """Make the calling thread's next work wait for the copies. If that fails, the copies must
        count as failed before this returns; or this raises, which keeps the step from running."""


_lock = fork_safe_lock()
# Replaced, never changed, so that it is read without the lock.
_guarded: tuple[weakref.ref[Guarded], ...] = ()


Hook = Callable[[object], None]

# Replaced, never changed: another thread may be iterating over the hooks of a step.
_hooks: tuple[Hook, ...] = ()


def before_steps(hook: Hook) -> None:
    """Call ``hook(optimizer)`` before every step of every optimizer. It cannot be removed."""
    global _hooks
    with _lock:
        _hooks = (*_hooks, hook)
    _hook_torch()


@functools.cache
def _hook_torch() -> None:
    """Have torch call all hooks. The hook stays for good, since removing one while torch iterates
    over its hooks would fail.

    Dynamo does not trace the hook. If it did, it would compile a step again whenever the hook finds
    other copies, and give up after a few times.
    """
    # This imports dynamo, unless an optimizer was made before, which also imports it.
    hidden = torch.compiler.disable(_before_step)  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(hidden)


def _before_step(optimizer: object, args: object, kwargs: object) -> None:
    for hook in _hooks:
        hook(optimizer)


@functools.cache
def watch() -> None:
    """Hook all steps from now on. A stager calls this before there are copies, for two reasons. A
    step that is captured in a CUDA graph calls the hook at its capture, and never again. And a step
    that is compiled after this is not compiled again at the first save."""
    before_steps(_hold_step)


def add(copies: Guarded) -> None:
    """Make steps wait for ``copies`` until these are discarded or deleted."""
    global _guarded
    watch()
    with _lock:
        _guarded = (*(ref for ref in _guarded if ref() is not None), weakref.ref(copies))


_told: set[str] = set()


def tell_of_graphs(reason: str) -> None:
    """Log, once for each reason, how a program that replays steps must call `wait_staged`."""
    if reason in _told:
        return
    _told.add(reason)
    _logger.log(
        for_all(logging.WARNING),
        "%s. Replaying the graph calls no hook, so that nothing keeps it from changing a state "
        "that is still being copied: call wait_staged() before each replay, outside of the graph",
        reason,
    )


def look_for_capture() -> None:
    """Log it if a CUDA graph is being captured on the current stream."""
    # Getting the current stream would initialise CUDA.
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        tell_of_graphs("a CUDA graph is being captured that changes a state")


def discard(copies: Guarded) -> None:
    """No longer make steps wait for ``copies``. Does nothing if they do not."""
    global _guarded
    with _lock:
        _guarded = tuple(ref for ref in _guarded if ref() not in (copies, None))


def _forget() -> None:
    # The threads that copy, and the state, belong to the parent.
    global _guarded
    _guarded = ()


os.register_at_fork(after_in_child=_forget)


def hold() -> None:
    """Make the calling thread's next work wait for all copies under way."""
    for ref in _guarded:
        copies = ref()
        if copies is not None:
            copies.guard()


def _hold_step(optimizer: object) -> None:
    look_for_capture()
    hold()
