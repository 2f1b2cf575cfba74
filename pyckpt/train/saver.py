"""`Saver`: makes saves in the background, one at a time."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException

from pyckpt.activity import begin, end
from pyckpt.dcp.failures import error_of, said
from pyckpt.dcp.frozen import FrozenSave
from pyckpt.dcp.save import save_with_dcp
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.stager import PinnedStager
from pyckpt.engine import Engine
from pyckpt.errors import NotDurable, PyckptError, SaveError
from pyckpt.format import commit
from pyckpt.locks import fork_safe_lock
from pyckpt.train.announcer import Announcer
from pyckpt.train.first_plan import FirstPlan
from pyckpt.train.frozen import FrozenParts
from pyckpt.train.handle import Permission, ReportingWriter, SaveHandle
from pyckpt.train.nodes.committing import NodeCommit
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store.catalog import NOTE_KEY, note
from pyckpt.train.store.pieces import Direct
from pyckpt.train.sync.ranks import Ranks

__all__ = ["Places", "Saver"]

_logger = logging.getLogger("pyckpt")


class Places(Protocol):
    """Says where a step is saved."""

    def path(self, step: int) -> Path: ...


class Saver:
    """Starts saves, and records how they ended. All ranks start the same saves.

    A rank takes part in every save that it is called for, even if only to report that it fails.
    Otherwise the others would wait for it, and take its next save for this one. So the thread that
    saves is started at the beginning.

    For one thread, except for the counts, which any thread may read.

    Args:
        catalog: of the directory to save into, or what else names the places of saves.
        ranks: the ranks that save together.
        fence: says which job may save there.
        direct: whether writing bypasses the page cache, as for `DirectWriter`.
        engine: the memory and threads to use; by default those that everyone shares.
        announcer: tells of the saves; by default one that only logs, and names them by their paths.
        frozen: finds what need not be written again; by default everything is.
        on_commit: called with each save that was committed, by the thread that committed it.
        nodes: commits on each node, where each has a directory of its own; None where all ranks
            share one.

    Attributes:
        started, ended: how many saves have started, and how many have ended or failed.
        failed: the number of the last save that failed; the first save has the number 1.
        failures: how many failed.
        writing: steps whose directories are being written.
        handle: the last save.
        overwrites: whether it may replace a checkpoint of the same step.
    """

    def __init__(
        self,
        catalog: Places,
        ranks: Ranks,
        fence: Permission,
        *,
        direct: Direct,
        engine: Engine | None,
        on_commit: Callable[[SaveHandle], None],
        announcer: Announcer | None = None,
        nodes: NodeCommit | None = None,
        frozen: FrozenParts | None = None,
    ) -> None:
        self._nodes = nodes
        self._metrics: Mapping[str, float] = {}  # of the save that was started last; on rank 0
        self._frozen = frozen
        self._frozen_save: FrozenSave | None = None  # of the save that was started last
        self._catalog = catalog
        self._ranks = ranks
        self._fence = fence
        self._direct: Direct = direct
        self._engine = engine
        self._on_commit = on_commit
        self._announcer = announcer or Announcer(ranks, engine=engine)
        # Kept from save to save, since both remember properties of the state.
        self._planner = SavePlanner()
        self._stager = PinnedStager(engine=engine)
        self._first = FirstPlan(ranks) if ranks.size > 1 else None
        self._thread = self._new_thread()
        self.overwrites = True
        # Directories of saves that failed, and the data files that they may have left there; and of
        # saves that could not remove what they replaced. Kept by the rank that commits.
        self._remains: dict[Path, set[str]] = {}
        # Directories whose last save was committed, and failed after that: saving there again
        # repeats the save, and replaces no checkpoint of the program.
        self._in_place: set[Path] = set()
        self._told = 0  # number of the last failed save whose error was raised
        self._failure: BaseException | None = None
        self._lock = fork_safe_lock()
        self.started = 0
        self.ended = 0
        self.failed = 0
        self.failures = 0
        self.writing: set[int] = set()
        self.handle: SaveHandle | None = None
        self._current: ReportingWriter | None = None  # the writer of the last save
        self._refused: RuntimeError | None = None  # by the last call of `refuse_within_start`

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as far as this rank knows."""
        return self.handle is not None and not self.handle.committed.done()

    @property
    def own_files(self) -> tuple[Path | None, tuple[Path, ...]]:
        """The data file that this rank wrote in the last save, if it wrote one; and its files of
        frozen parts."""
        own = () if self._current is None else self._current.own_files
        frozen = tuple(file for file in own if commit.is_frozen_file(file.name))
        return next((file for file in own if file not in frozen), None), frozen

    @property
    def saves(self) -> str:
        """How many saves there were, in words."""
        return f"{self.started} saves" + (f" ({self.failures} failed)" if self.failures else "")

    @property
    def state(self) -> str:
        """What is under way, in words."""
        return f"saving step {self.handle.step}" if self.busy and self.handle else "idle"

    def counts(self) -> tuple[int, int]:
        """How many saves ended, and the number of the last that failed, read under the lock."""
        with self._lock:
            return self.ended, self.failed

    def refuse_within_start(self, what: str) -> None:
        """Refuse a call that comes from within `start`, by a signal handler, a finalizer or an
        object of the state: what it would wait for, only the interrupted `start` can do.

        Args:
            what: is called, for the error.

        Raises:
            RuntimeError: it does. If nobody catches it, `start` raises it, too.
        """
        # Looked up, not noted by `start`: an interrupt may end that at any line, so that the note
        # stays.
        frame = sys._getframe(1).f_back  # the caller may be `start` itself
        while frame is not None:
            if frame.f_code is _START and frame.f_locals.get("self") is self:
                self._refused = RuntimeError(
                    f"{what} was called within a call that begins a save, by a signal handler, a "
                    "finalizer or a state_dict(), and would wait for ever. Handle signals by "
                    "on_signals=, or call request_stop() or request_save(), which do not wait"
                )
                raise self._refused
            frame = frame.f_back

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            RuntimeError: see `refuse_within_start`.
        """
        self.refuse_within_start("wait()")
        self._wait()

    def _wait(self) -> None:
        if self.handle is not None:
            wait_for([self.handle.committed])

    def wait_staged(self) -> None:
        """Make the program's next work wait until it may change the state."""
        if self._current is not None:
            self._current.wait_staged()

    def close(self) -> None:
        """Release the memory of staging, and remove the files that failed saves left. Call it when
        no save is under way.

        Raises:
            RuntimeError: see `refuse_within_start`.
        """
        self.refuse_within_start("close()")
        if self._frozen is not None:
            self._frozen.close()
        self._thread.shutdown()
        if self._remains:
            try:
                with self._fence.held():
                    self._remove_remains()
            except (OSError, PyckptError) as error:
                _logger.warning("what failed saves left was not removed: %s", error)
        self._stager.close()

    def raise_failure(self, failed: int | None = None) -> None:
        """Raise the error of a failed save, by number; by default of the last. Once for each."""
        failed = self.failed if failed is None else failed
        if failed > self._told:
            self._told = failed
            raise self._failure or SaveError("a save failed on another rank")

    def untold(self) -> BaseException | None:
        """The last error, if it was not raised yet."""
        return self._failure if self.failed > self._told else None

    def start(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        final: bool,
        overwrite: bool,
    ) -> SaveHandle:
        """Start to save. Waits for a save that is under way. Errors go to the handle; only
        interrupts are raised here.

        Raises:
            RuntimeError: see `refuse_within_start`.
        """
        self.refuse_within_start("save()")
        begun = time.perf_counter()
        self._refused = None
        self._wait()
        path = self._catalog.path(step)
        self.overwrites = overwrite or path in self._in_place
        handle = SaveHandle(step, path, self._announcer.reached, final=final, begun=begun)
        number = self.started + 1
        saving = self._announcer.activity_of(handle)
        done: Future[None] = Future()
        done.add_done_callback(lambda _: end(saving))
        done.add_done_callback(lambda done: self._end(number, handle, done))
        # An interrupt may come at any line, and those who wait for the save must see it end.
        turn = threading.Lock()
        try:
            self.started = number
            self.writing.add(step)
            self.handle = handle
            begin(saving)
            self._announcer.saving(handle)
            tree = self._tree(step, state, metrics, final)
            self._plan_first(handle, tree)
            self._launch(handle, done, turn, tree)
        except BaseException as error:
            self._decline(handle, done, turn, error)
            if not isinstance(error, Exception):
                raise
            refused, self._refused = self._refused, None
            if refused is not None and _comes_of(error, refused):
                # What a signal asked for was not done, and the handle would not say so in time.
                raise refused from None
        handle.called()
        return handle

    def _plan_first(self, handle: SaveHandle, tree: dict[str, Any]) -> None:
        """Before the first copies: find out what this rank writes, if other ranks have the same."""
        first = self._first
        if first is None or first.is_made:
            return
        outline, leaves = self._stager.outline(tree)
        self._in_thread(lambda: first.make(outline, f"saving {handle.path}"))
        plan = first.wait(leaves)
        if plan is not None:
            self._stager.adopt(tree, plan)

    def _decline(
        self, handle: SaveHandle, done: Future[None], turn: threading.Lock, error: BaseException
    ) -> None:
        """Take part in a save only to report that it fails, unless its thread has begun it."""
        failure = error if isinstance(error, Exception) else SaveError(f"interrupted: {error!r}")

        def fail() -> None:
            if turn.acquire(blocking=False):
                try:
                    # No thread will save what was staged. Its state dict may live on: an exception
                    # holds the call that made it.
                    self._stager.release_copies()
                finally:
                    self._save(handle, done, {}, self._writer(handle, failure=failure))

        try:
            self._in_thread(fail)
        except BaseException:  # another interrupt
            fail()
            raise

    def _in_thread(self, task: Callable[[], None]) -> None:
        """Run a task in the thread that saves, or in this thread if that cannot be started. A task
        takes its turn first, so giving it to both threads does no harm."""
        if self._pid != os.getpid():  # a forked process does not have its parent's thread
            self._thread = self._new_thread()
        try:
            self._thread.submit(task)
        except Exception as error:
            _logger.warning("training waits for a save, which has no thread: %s", error)
            task()

    def _new_thread(self) -> ThreadPoolExecutor:
        self._pid = os.getpid()
        thread = ThreadPoolExecutor(1, thread_name_prefix="pyckpt-save")
        try:
            thread.submit(bool).result()
        except RuntimeError as error:
            _logger.warning("no thread to save with; every save will try again: %s", error)
        return thread

    def _tree(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], final: bool
    ) -> dict[str, Any]:
        """The state dict to save on this rank."""
        if NOTE_KEY in state:
            raise ValueError(f"the name {NOTE_KEY!r} is taken, by what a checkpoint says of itself")
        objects = AppState(state, process_group=self._ranks.work)
        tree = objects.state_dict()
        # Only these optimizers change their parameters and state, so those are copied during
        # training. What forward passes change as well is copied at the call.
        if objects.optimizers != self._stager.optimizers:
            self._stager.close()
            self._stager = PinnedStager(optimizers=objects.optimizers, engine=self._engine)
        self._stager.copy_at_call(objects.written_in_forward)
        if self._frozen is not None:
            self._frozen_save = self._frozen.begin(tree, objects.parameters)
        if self._ranks.rank == 0:
            numbers = {name: _number(name, value) for name, value in metrics.items()}
            self._metrics = numbers
            tree[NOTE_KEY] = note(step, final=final, metrics=numbers)
        return tree

    def _writer(self, handle: SaveHandle, failure: Exception | None = None) -> ReportingWriter:
        self._current = writer = ReportingWriter(
            handle.path,
            number=self.started,
            fence=self._fence,
            failure=failure,
            first_of_node=None if self._nodes is None else self._nodes.acts,
            on_written=lambda: self._written(handle),
            on_sweep=lambda: self._remove_remains(handle.path),
            arrive=self._ranks.arrive,
            frozen=None if failure is not None else self._frozen_save,
            stager=self._stager,
            overwrite=self.overwrites,
            direct=self._direct,
            engine=self._engine,
        )
        handle.follow(writer.progress)
        return writer

    def _launch(
        self, handle: SaveHandle, done: Future[None], turn: threading.Lock, tree: dict[str, Any]
    ) -> None:
        """Stage a state, and save it in a thread.

        This does what ``async_save`` does, and can be interrupted: the thread only begins if it is
        the first to take ``turn``. If another thread takes the turn before, the save never begins.
        """
        writer = self._writer(handle)
        staged_tree = writer.stage(tree)

        def staged(future: Future[None]) -> None:
            if not future.cancelled() and future.exception() is None:
                handle.reached("staged")

        writer.staged.add_done_callback(staged)

        frozen_save = self._frozen_save

        def run() -> None:
            if turn.acquire(blocking=False):
                self._save(handle, done, staged_tree, writer)
                if self._frozen is not None and frozen_save is not None:
                    self._frozen.verify(frozen_save)

        self._in_thread(run)
        writer.synchronize_staging()

    def _save(
        self,
        handle: SaveHandle,
        done: Future[None],
        tree: dict[str, Any],
        writer: ReportingWriter,
    ) -> None:
        failure: BaseException | None = None
        try:
            if self._first is not None:
                # Made by now, unless this rank has no state.
                self._first.make(None, f"saving {handle.path}")
            with self._ranks.meetings(2 if self._nodes is None else 2 + NodeCommit.MEETINGS):
                if self._nodes is not None:
                    self._nodes.begin()
                self._ranks.arrive()
                save_with_dcp(
                    tree,
                    writer=writer,
                    planner=self._planner,
                    process_group=self._ranks.work,
                    alone=self._ranks.work is None,
                )
                if self._nodes is not None:
                    self._nodes.commit(
                        handle.path, writer.described, final=handle.final, metrics=self._metrics
                    )
        except CheckpointException as error:
            failure = error
        except BaseException as error:
            # The error is not one rank's, which DCP would send to all: the collective failed.
            failure = error
            if self._ranks.size > 1:
                failure = self._ranks.lose(error, f"saving {handle.path}")
            if not isinstance(error, Exception):
                raise
        finally:
            writer.close_save()
            if failure is None:
                done.set_result(None)
            else:
                done.set_exception(failure)

    def _remove_remains(self, begun: Path | None = None) -> None:
        """Remove the files that this Checkpointer's failed saves left, to make room on a full disk,
        and what committed ones could not remove. Called at the end, and before a save writes, whose
        own directory (``begun``) was swept already. Does not raise."""
        while self._remains:
            path, files = self._remains.popitem()
            if self._nodes is not None:
                files = self._nodes.remains(path)
            if path == begun:
                continue
            commit.remove_failed(path, files, sync=True)
            if self._nodes is None:  # which may be about to commit what metadata does not name yet
                try:
                    # Of a checkpoint: the save may have failed after its commit.
                    commit.remove_remains(path, sync=True)
                except FileNotFoundError:
                    pass  # there is nothing
                except OSError as error:
                    _logger.warning("%s was not swept: %s", path, error)

    def _written(self, handle: SaveHandle) -> None:
        handle.reached("staged")
        handle.reached("written", handle.statistics.write)

    def _end(self, number: int, handle: SaveHandle, done: Future[None]) -> None:
        """A save ended. Called by the thread that made it."""
        failure = done.exception()
        if failure is not None:
            failure = self._failure_of(failure, handle)
        self.writing.discard(handle.step)
        if isinstance(failure, NotDurable):
            self._in_place.add(handle.path)
        elif failure is None:
            self._in_place.discard(handle.path)
        with self._lock:
            if failure is not None:
                self._failure = failure  # before `failed`, by which others see that it is there
                self.failed = number
                self.failures += 1
            self.ended = number
        if failure is not None:
            sweeps = self._ranks.rank == 0 if self._nodes is None else self._nodes.acts
            if sweeps and self._current is not None:
                files = self._remains.setdefault(handle.path, set())
                files |= self._current.files
            self._stager.take_failure()  # otherwise the next save would raise this error again
            try:
                self._announcer.failed(handle, failure)
            finally:  # a handler of the log may raise, and those who wait must see the end
                handle.fail(failure)
            return
        try:
            if self._frozen is not None and self._frozen_save is not None:
                self._frozen.committed(handle.path, self._frozen_save)
            if self._current is not None and not self._current.is_swept:
                self._remains.setdefault(handle.path, set())
            self._written(handle)  # a rank that had nothing to write has not reported it
            handle.mark("committed")
            self._on_commit(handle)
        except Exception:
            _logger.exception("%s is committed; what comes after that failed", handle.path)
        finally:
            handle.reached("committed", handle.path)

    def _failure_of(self, error: BaseException, handle: SaveHandle) -> BaseException:
        """The error to report for an error that DCP raised."""
        doing = f"saving {handle.path}"
        if isinstance(error, CheckpointException):
            alone = self._ranks.size == 1
            try:
                return error_of(error, alone=alone, kind=SaveError, doing=doing)
            except Exception as other:  # foreign errors may raise when they are shown
                error = other
        if isinstance(error, OSError | PyckptError) or not isinstance(error, Exception):
            return error
        failure = SaveError(f"{doing} failed: {said(error)}")
        failure.__cause__ = error
        return failure


_START = Saver.start.__code__


def _comes_of(error: BaseException, first: BaseException) -> bool:
    """Whether an error is another one, or was raised because of it."""
    seen: BaseException | None = error
    while seen is not None and seen is not first:
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _number(name: str, metric: Any) -> float:
    try:
        # Arrays of one number that have dimensions are no numbers to numpy.
        return float(metric.item() if hasattr(metric, "item") else metric)
    except Exception as error:
        raise TypeError(f"the metric {name!r} cannot be read as a number: {error}") from error
