"""The copies of the state that one save makes and writes, and when that save has ended."""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
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

    DCP does not tell the writer of a save that fails in planning, or on another rank. So the memory
    is given back in one of four cases: the writer calls `release`; or the thread that saves the
    copies ends; or somebody waits for the end of a save whose state dict was dropped before any
    thread saved it; or somebody waits for minutes, and no thread saves it.

    Args:
        owner: the stager.
        native: the copies, which are being made.
        recipe: how the state dict was copied.
        direct: whether the writer reads tensors that found no room from the program's own memory,
            and calls `release`.
        busy: the error that says why nothing was copied: other saves hold the memory. None if the
            copies are being made.
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
        self.ended: Future[None] = Future()
        """Done when the save has ended and the memory of the copies is given back."""
        statistics = native.statistics()
        self.bytes = statistics.bytes_staged
        self.given_up: StagerBusy | None = None
        """The error of a save that begins after it was given up; None if it was not."""
        self._owner = owner
        self._native = native
        self._recipe = recipe
        self._refuses = refuses
        # Whether the writer reads a part of the state from the program's own memory; and whether
        # such a part may change before the next step.
        self._streams = direct and statistics.bytes_streamed > 0
        self._streams_volatile = direct and native.streamed_volatile_bytes > 0
        self._planning: CollectorPause | None = None
        self._lock = fork_safe_lock()
        self._is_begun = False  # whether a thread has taken the copies over
        self._release_began = False
        self._wake = Latch()  # set when those who wait for the end should look again
        self._thread: threading.Thread | None = None  # the one that saves the copies
        self._watch: _Watch | None = None

    @property
    def released(self) -> bool:
        """Whether the save has ended."""
        return self.ended.done()

    # --- for the stager ---

    def finish(self) -> None:
        """Wait for the copies; on the stager's thread."""
        failure: BaseException | None = None
        try:
            with named("wait for copies", self.bytes):
                self._native.wait()
        except BaseException as error:
            failure = error
        try:
            self._native.release_sources()
            if failure is not None:
                if not isinstance(failure, EngineClosed):
                    self._owner.keep_failure(failure)
                with suppress(Exception):  # a program's handler of the log may raise
                    _logger.error(
                        "the state could not be copied, and will not be saved: %s", failure
                    )
        finally:  # those who wait must see the end
            self._copied()
            if failure is None:
                self.staged.set_result(None)
            else:
                self.staged.set_exception(failure)

    def _copied(self) -> None:
        if not self._streams:
            guard.discard(self)
        if not self.direct:
            self._owner.forget(self)

    def forget_parent(self) -> None:
        """In a forked child: these copies are never made here, so nobody may wait for them."""
        # New ones, since another thread may have held the locks of the parent's at the fork.
        self.staged, self.ended, self._wake = Future(), Future(), Latch()
        self._release_began = True
        self.staged.set_exception(EngineClosed("the save began in another process, before a fork"))
        self.ended.set_result(None)
        self._wake.set()

    # --- for the program ---

    def guard(self) -> None:
        """Make what the calling thread does next wait for the copies. If that fails, the save
        fails, because what comes next may change tensors while they are copied. ``staged`` and
        `check` raise the error."""
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
        """Wait until the save has ended. Returns at once in the thread that saves.

        If no thread begins the save for minutes, it is given up. Nobody may be about to begin it,
        while something still holds its state dict: an exception, for example, by its traceback."""
        if self.released or self._thread is threading.current_thread():
            return
        since = time.monotonic()
        while True:
            thread = self._thread
            # If no thread could be started to watch the one that saves, this thread looks from time
            # to time. It may look for long: a thread of a pool saves, and does not end.
            unwatched = self._watch is None and thread is not threading.main_thread()
            if self._wake.wait(_LOOK_S if unwatched else None):
                break
            if thread is None:
                if time.monotonic() - since >= _BEGINS_S and self.give_up():
                    return
            elif not thread.is_alive():
                break
        self.release()

    def give_up(self) -> bool:
        """Give the memory back if no thread has begun the save. If one begins it later, the save
        fails. Returns whether this gave it back."""
        with self._lock:
            if self._is_begun or self._release_began:
                return False
            self._release_began = True
            self.given_up = StagerBusy(
                "the save began so late that it was given up: another save, or a step, needed "
                "its memory"
            )
        try:
            with suppress(Exception):  # a program's handler of the log may raise
                _logger.error(
                    "a save that was staged did not begin, and is given up: another save or a step "
                    "needs its memory, and its state dict still exists; an exception may hold it"
                )
        finally:
            self._give_back()
        return True

    def release_if_left(self) -> None:
        """Give the memory back if nobody else will. That is so if the copies were dropped before a
        thread took them over. It is also so if the calling thread took them over: a thread saves
        one state at a time, and this one has begun another save."""
        dropped = self._thread is None and self._wake.is_set
        if dropped or self._thread is threading.current_thread():
            self.release()

    def wait_volatile(self) -> None:
        """Wait for the save if it reads, from the program's own memory, a part of the state that
        may change before the next step."""
        if self._streams_volatile:
            self.wait_released()

    # --- for the writer ---

    @property
    def has_room(self) -> bool:
        """Whether there was memory for the copies; if not, nothing was copied."""
        return self.busy is None

    def raise_refusal(self) -> None:
        """Raise the error that keeps this save from being made at all: the failure of an earlier
        save that nobody was told of, or `StagerBusy` if the stager does not skip saves."""
        self._owner.raise_failure()
        if self._refuses:
            self.require_copies()

    def require_copies(self) -> None:
        """Raise `StagerBusy` if nothing was copied."""
        if self.busy is not None:
            raise self.busy

    def take_over(self) -> bool:
        """Say that the calling thread saves the copies. Returns False if it may not save them.

        From here on the memory is given back when the thread ends, if not before. The collector
        pauses until `end_planning`, or until the thread ends. The main thread ends too late for
        both: if it saves, only the writer ends the save, and the collector does not pause.
        """
        thread = threading.current_thread()
        with self._lock:
            is_ours = not self._release_began and self._thread in (None, thread)
            self._is_begun = self._is_begun or is_ours
        if not is_ours:
            # The save failed before it wrote, or the parent process made these copies.
            self.release()
            return False
        if self._thread is None:
            # In this order: whoever sees a thread but no watch assumes that the thread has none.
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
        """Wait until the copies may be read. Raises the error if they could not be made."""
        self.staged.result()

    def check(self) -> None:
        """Raise the error because of which the copies are not the state at the call, if one is
        known by now. A writer calls this when it has written all copies. Each may have been whole
        when it was written, and all together may still not be one state."""
        self._native.check()

    def learn(self, plan: KnownPlan) -> None:
        """From the next save on, copy only what this rank writes by the plan."""
        self._recipe.plan = plan

    def fail(self, error: BaseException) -> None:
        """Have the next save raise the error of this one. It also copies everything, since the plan
        that the ranks agreed on may be the cause."""
        self._owner.keep_failure(error)
        self._recipe.plan = None

    def release(self) -> None:
        """Give the memory back, even if somebody still has the tensors. Idempotent."""
        with self._lock:
            if self._release_began:
                return
            self._release_began = True
        self._give_back()

    def _give_back(self) -> None:
        try:
            self.end_planning()
            self._native.release()
        finally:  # those who wait must see the end
            guard.discard(self)
            self._owner.forget(self)
            if self._watch is not None and self._watch.staging is self:
                self._watch.staging = None
            self.ended.set_result(None)
            self._wake.set()

    def drop(self) -> None:
        """The state dict of the copies is gone. A finalizer calls this, which may run at any line
        of a thread that holds any lock. So this only wakes those who wait for the end."""
        if self._thread is None:
            self._wake.set()


_LOOK_S = 0.1
# DCP may start a process before it begins a save, and that process imports torch.
_BEGINS_S = 300.0


class _Watch:
    """Releases the staging that a thread saves when that thread ends. One watch serves all saves of
    a thread, one after another.

    Raises:
        RuntimeError: no thread can be started to wait for the other one.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.staging: Staging | None = None
        # When Python ends, it waits for this thread if it waits for the thread that saves.
        threading.Thread(
            target=self._run, args=(thread,), name="pyckpt-save-end", daemon=thread.daemon
        ).start()

    def _run(self, thread: threading.Thread) -> None:
        try:
            thread.join()
        except (RuntimeError, AssertionError):
            return  # Python did not start that thread, so it cannot tell when the thread ends
        staging = self.staging
        if staging is not None:
            staging.release()


_watches = threading.local()


def _watch(staging: Staging) -> _Watch | None:
    """Have a staging released when the calling thread ends; None if no thread can be started."""
    watch: _Watch | None = getattr(_watches, "own", None)
    if watch is None:
        try:
            watch = _watches.own = _Watch(threading.current_thread())
        except RuntimeError:
            return None
    before = watch.staging
    if before is not None:
        before.release()  # a thread saves one state at a time, so that save has ended
    watch.staging = staging
    return watch


def _after_fork() -> None:
    global _watches
    _watches = threading.local()  # the threads that watch are the parent's


os.register_at_fork(after_in_child=_after_fork)
