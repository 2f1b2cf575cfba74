"""The step guard: nobody writes to memory that is still being copied, or gives it away.

`torch.optim` calls global hooks before every step of every optimizer. pyckpt has one, which calls
all who asked `before_steps` for it. For copies of the state it makes the step wait: on a GPU the
stream that steps waits, on a CPU the thread. The steps of all optimizers wait, and not only of
those that a stager was told of: a wrapper may step another optimizer than the program has in hand
(ZeroRedundancyOptimizer, Accelerate), and a step that waits in vain costs nothing.
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
        """Make what the calling thread does next wait for the copies. Where that fails, the copies
        must count as failed before this returns, or raises, which keeps the step from running."""


_lock = fork_safe_lock()
# Replaced, never changed, so that it is read without the lock.
_guarded: tuple[weakref.ref[Guarded], ...] = ()


Hook = Callable[[object], None]

# Replaced, never changed: torch may be on its way through the hooks of a step, in another thread.
_hooks: tuple[Hook, ...] = ()


def before_steps(hook: Hook) -> None:
    """Call ``hook(optimizer)`` before every step of every optimizer, for good."""
    global _hooks
    with _lock:
        _hooks = (*_hooks, hook)
    _hook_torch()


@functools.cache
def _hook_torch() -> None:
    """Have torch call all hooks; for good, since torch must not lose one while it goes through its
    own.

    Dynamo does not look into the hook. If it did, it would compile a step anew for everything else
    that the hook finds, and give up after a few times.
    """
    # This imports dynamo, unless there has been an optimizer: making one imports it, too.
    hidden = torch.compiler.disable(_before_step)  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(hidden)


def _before_step(optimizer: object, args: object, kwargs: object) -> None:
    for hook in _hooks:
        hook(optimizer)


@functools.cache
def watch() -> None:
    """Look at all steps from now on. Whoever has optimizers calls this before there are copies: a
    step that is captured in a CUDA graph calls the hook at its capture, and never again; and a step
    that is compiled after this is not compiled again for the first save's sake."""
    before_steps(_hold_step)


def add(copies: Guarded) -> None:
    """Hold steps back until ``copies`` are discarded, or gone."""
    global _guarded
    watch()
    with _lock:
        _guarded = (*(ref for ref in _guarded if ref() is not None), weakref.ref(copies))


_told: set[str] = set()


def tell_of_graphs(reason: str) -> None:
    """Say in the log, once a reason, what a program is to do that replays steps."""
    if reason in _told:
        return
    _told.add(reason)
    _logger.warning(
        "%s. Replaying the graph calls no hook, so that nothing keeps it from changing a state "
        "that is still being copied: call wait_staged() before each replay, outside of the graph",
        reason,
    )


def look_for_capture() -> None:
    """Tell of a CUDA graph that is being captured on the current stream."""
    # Asking for the stream would initialise CUDA.
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if initialized and torch.cuda.is_current_stream_capturing():
        tell_of_graphs("a CUDA graph is being captured that changes a state")


def discard(copies: Guarded) -> None:
    """Let steps go. Does nothing for copies that are not held."""
    global _guarded
    with _lock:
        _guarded = tuple(ref for ref in _guarded if ref() not in (copies, None))


def _forget() -> None:
    # The threads that copy are the parent's, and so is the state.
    global _guarded
    _guarded = ()


os.register_at_fork(after_in_child=_forget)


def hold() -> None:
    """Make what the calling thread does next wait for all copies under way."""
    for ref in _guarded:
        copies = ref()
        if copies is not None:
            copies.guard()


def _hold_step(optimizer: object) -> None:
    look_for_capture()
    hold()
