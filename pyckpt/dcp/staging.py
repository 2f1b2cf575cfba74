"""The copies that one save makes of the state: what it reads, and when it is over."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from typing import Protocol

from pyckpt import _C, guard
from pyckpt.collector import CollectorPause
from pyckpt.dcp.plans import KnownPlan
from pyckpt.dcp.recipes import CopyRecipe
from pyckpt.errors import EngineClosed, StagerBusy
from pyckpt.locks import Latch, fork_safe_lock
from pyckpt.timeline import named

__all__ = ["Owner", "Staging"]

_logger = logging.getLogger("pyckpt")


class Owner(Protocol):
    """The stager that a staging belongs to."""

    def keep_failure(self, error: BaseException) -> None:
        """Have the next save raise an error."""

    def raise_failure(self) -> None:
        """Raise what was kept, once."""

    def forget(self, staging: Staging) -> None:
        """No longer count a staging among those under way."""


class Staging:
    """The copies of one save.

    A save of DCP may end without a word to its writer: in planning, or on another rank. So the
    memory is given back when the writer says so (`release`); or when the thread ends that saves the
    copies; or when somebody waits, and the state dict was dropped before any thread saved it.

    Args:
        owner: the stager.
        native: the copies, which are being made.
        recipe: how the state dict was copied.
        direct: whether the writer reads what found no room from where it is, and calls `release`.
        busy: why nothing was copied: other saves hold the memory. None where all is well.
        refuses: whether a save without room fails with ``busy``; if not, it is skipped.
    """

    def __init__(
        self,
        owner: Owner,
        native: _C.Staging,
        recipe: CopyRecipe,
        *,
        direct: bool,
        busy: StagerBusy | None,
        refuses: bool,
    ) -> None:
        self.direct = direct
        self.busy = busy
        self.staged: Future[None] = Future()
        """Done when the copies are whole, or failed."""
        self.over: Future[None] = Future()
        """Done when the save is over and the memory of the copies is given back."""
        statistics = native.statistics()
        self.bytes = statistics.bytes_staged
        self._owner = owner
        self._native = native
        self._recipe = recipe
        self._refuses = refuses
        # Whether the writer reads a part of the state from where it is, and one that may change
        # before the next step.
        self._streams = direct and statistics.bytes_streamed > 0
        self._streams_volatile = direct and native.streamed_volatile_bytes > 0
        self._planning: CollectorPause | None = None
        self._lock = fork_safe_lock()
        self._ends = False
        self._end = Latch()
        self._thread: threading.Thread | None = None  # that saves the copies
        self._watch: _Watch | None = None

    @property
    def released(self) -> bool:
        """Whether the save is over."""
        return self.over.done()

    # --- for the stager ---

    def finish(self) -> None:
        """Wait for the copies; on the stager's thread."""
        try:
            with named("wait for copies", self.bytes):
                self._native.wait()
        except BaseException as error:
            self._native.release_sources()
            _logger.error("the state could not be copied, and will not be saved: %s", error)
            if not isinstance(error, EngineClosed):
                self._owner.keep_failure(error)
            self._copied()
            self.staged.set_exception(error)
        else:
            self._native.release_sources()
            self._copied()
            self.staged.set_result(None)

    def _copied(self) -> None:
        if not self._streams:
            guard.discard(self)
        if not self.direct:
            self._owner.forget(self)

    def forget_parent(self) -> None:
        """In a forked child: nothing comes of these copies here, and nobody is to wait for them."""
        # Not the parent's, whose locks another thread may have held at the fork.
        self.staged, self.over, self._end = Future(), Future(), Latch()
        self._ends = True
        self.staged.set_exception(EngineClosed("the save began in another process, before a fork"))
        self.over.set_result(None)
        self._end.set()

    # --- for the program ---

    def guard(self) -> None:
        """Make what the calling thread does next wait for the copies. Where that fails, the save
        fails: what comes next may tear the copies. The errors are for ``staged`` and `check`."""
        if self.released:
            return
        try:
            self._native.guard()
        except Exception as error:
            self._native.fail(f"a step could not be made to wait for the copies: {error}")
            _logger.debug("the copies of a save that fails hold nothing back: %s", error)
        if self._streams:
            self.wait_released()

    def wait_released(self) -> None:
        """Wait until the save is over. Returns at once in the thread that saves."""
        thread = self._thread
        if self.released or thread is threading.current_thread():
            return
        # Where no thread could be had to see that one end, this one looks. It may as well be one of
        # a pool, which saves and does not end.
        unwatched = self._watch is None and thread not in (None, threading.main_thread())
        while not self._end.wait(_LOOK_S if unwatched else None):
            if thread is not None and not thread.is_alive():
                break
        self.release()

    def release_if_left(self) -> None:
        """Give the memory back where nobody else will: the copies were dropped before a thread took
        them over; or the calling thread did, which saves one state at a time and is past it."""
        dropped = self._thread is None and self._end.is_set
        if dropped or self._thread is threading.current_thread():
            self.release()

    def wait_volatile(self) -> None:
        """Wait for the save if it reads, from where it is, a part of the state that may change
        before the next step."""
        if self._streams_volatile:
            self.wait_released()

    # --- for the writer ---

    @property
    def has_room(self) -> bool:
        """Whether there was memory for the copies; if not, nothing was copied."""
        return self.busy is None

    def raise_refusal(self) -> None:
        """Raise what keeps this save from being made at all: a failure before it that nobody was
        told of, or `StagerBusy` where the stager does not skip saves."""
        self._owner.raise_failure()
        if self._refuses:
            self.require_copies()

    def require_copies(self) -> None:
        """Raise `StagerBusy` where nothing was copied."""
        if self.busy is not None:
            raise self.busy

    def take_over(self) -> bool:
        """Say that the calling thread saves the copies; False where they are not its to save.

        From here on the memory is given back at the latest when the thread ends. The collector
        pauses until `end_planning`, or until then. In the main thread, whose end would be too late
        for either, only the writer ends a save, and the collector goes on.
        """
        thread = threading.current_thread()
        if self.released or self._thread not in (None, thread):
            # Of a save that failed before it wrote, or of the process that this one was forked of.
            self.release()
            return False
        if self._thread is None:
            # In this order: whoever sees a thread, and no watch, takes it that there is none.
            if thread is not threading.main_thread():
                self._watch = _watch(self)
            self._thread = thread
            if self._watch is not None:
                self._planning = CollectorPause()
        return True

    def end_planning(self) -> None:
        """Let the collector run again. Idempotent."""
        if self._planning is not None:
            self._planning.end()

    def settle(self) -> None:
        """Wait until the copies may be read. Raises what went wrong with them."""
        self.staged.result()

    def check(self) -> None:
        """Raise what keeps the copies from being the state at the call, as far as it is known. A
        writer asks when it has written them all, since each may have been whole when it was
        written, and not the state."""
        self._native.check()

    def learn(self, plan: KnownPlan) -> None:
        """From the next save on, copy no more than what the plan has this rank write."""
        self._recipe.plan = plan

    def fail(self, error: BaseException) -> None:
        """Have the next save raise what made this one fail; and copy everything, since what the
        ranks agreed on may be why."""
        self._owner.keep_failure(error)
        self._recipe.plan = None

    def release(self) -> None:
        """Give the memory back, whoever still has the tensors. Idempotent."""
        with self._lock:
            if self._ends:
                return
            self._ends = True
        self.end_planning()
        self._native.release()
        guard.discard(self)
        self._owner.forget(self)
        if self._watch is not None and self._watch.staging is self:
            self._watch.staging = None
        self.over.set_result(None)
        self._end.set()

    def drop(self) -> None:
        """The state dict of the copies is gone. May be called in a finalizer, which may run at any
        line of a thread that holds any lock: so it does no more than to wake who waits."""
        if self._thread is None:
            self._end.set()


_LOOK_S = 0.1


class _Watch:
    """Ends what a thread saves when that thread ends. One serves all saves of a thread in turn.

    Raises:
        RuntimeError: no thread can be started to wait for the other one.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.staging: Staging | None = None
        # Python's end waits for it where it waits for the thread that saves.
        threading.Thread(
            target=self._run, args=(thread,), name="pyckpt-save-end", daemon=thread.daemon
        ).start()

    def _run(self, thread: threading.Thread) -> None:
        try:
            thread.join()
        except (RuntimeError, AssertionError):
            return  # not a thread of Python's making: it says nothing when it ends
        staging = self.staging
        if staging is not None:
            staging.release()


_watches = threading.local()


def _watch(staging: Staging) -> _Watch | None:
    """See to it that a staging ends with the calling thread; None where no thread can be had."""
    watch: _Watch | None = getattr(_watches, "own", None)
    if watch is None:
        try:
            watch = _watches.own = _Watch(threading.current_thread())
        except RuntimeError:
            return None
    before = watch.staging
    if before is not None:
        before.release()  # a thread saves one state at a time, so that save is over
    watch.staging = staging
    return watch


def _after_fork() -> None:
    global _watches
    _watches = threading.local()  # the threads that watch are the parent's


os.register_at_fork(after_in_child=_after_fork)
