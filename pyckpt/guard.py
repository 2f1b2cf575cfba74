"""The step guard: nobody writes to memory that is still being copied, or gives it away.

`torch.optim` calls global hooks before every step of every optimizer. Ours makes the step wait for
the copies that need it: on a GPU the stream that steps waits, on a CPU the thread does. All
optimizers wait, not only those that a stager was told of, since wrappers step others than they
were given (ZeroRedundancyOptimizer, Accelerate), and a step that waits in vain costs nothing.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Guarded", "add", "before_steps", "discard", "hold", "prepare"]


class Guarded(Protocol):
    """Copies that a step must not overtake."""

    def guard(self) -> None:
        """Make what the calling thread does next wait for the copies. Must not raise."""


_lock = threading.Lock()
# Replaced, never changed, so that it is read without the lock.
_guarded: tuple[weakref.ref[Guarded], ...] = ()


def before_steps(hook: Callable[[object, object, object], None]) -> None:
    """Call ``hook(optimizer, args, kwargs)`` before every step of every optimizer, for good: torch
    may be on its way through the hooks of a step, in another thread, and then none may be removed.

    Dynamo does not look into the hook. Or else it would compile steps for what the hook finds at
    that moment, again for each other thing that it finds, and give them up after a few.
    """
    # This imports dynamo, unless there has been an optimizer: making one imports it, too.
    hidden = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(hidden)


@functools.cache
def prepare() -> None:
    """Have steps call the hook from now on. A step that is compiled after this is not compiled
    again for the first save's sake."""
    before_steps(_before_step)


def add(copies: Guarded) -> None:
    """Hold steps back until ``copies`` are discarded, or gone."""
    global _guarded
    prepare()
    with _lock:
        _guarded = (*(ref for ref in _guarded if ref() is not None), weakref.ref(copies))


def discard(copies: Guarded) -> None:
    """Let steps go. Does nothing for copies that are not held."""
    global _guarded
    with _lock:
        _guarded = tuple(ref for ref in _guarded if ref() not in (copies, None))


def _forget() -> None:
    # The threads that copy are the parent's, and so is the state.
    global _guarded, _lock
    _guarded, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_forget)


def hold() -> None:
    """Make what the calling thread does next wait for all copies under way."""
    for ref in _guarded:
        copies = ref()
        if copies is not None:
            copies.guard()


def _before_step(optimizer: object, args: object, kwargs: object) -> None:
    hold()
