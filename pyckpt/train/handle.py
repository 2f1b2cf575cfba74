"""`SaveHandle`: one save, from the call to its commit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt.activity import Amount
from pyckpt.dcp.failures import portable_errors
from pyckpt.dcp.frozen import FrozenSave
from pyckpt.dcp.writer import DirectWriter
from pyckpt.dcp.writing import WriteProgress
from pyckpt.errors import SaveError
from pyckpt.locks import fork_safe_lock
from pyckpt.printable import seconds_text
from pyckpt.statistics import WriteStatistics

__all__ = ["Permission", "ReportingWriter", "SaveHandle", "SaveStatistics"]

_logger = logging.getLogger("pyckpt")


@dataclass(frozen=True)
class SaveStatistics:
    """Times of a save on this rank so far, in seconds since the call. NaN for phases that have not
    been reached."""

    step: int
    blocked_seconds: float
    """How long the call took. Training waits for it."""
    staged_seconds: float
    written_seconds: float
    committed_seconds: float
    write: WriteStatistics | None
    """Bytes and times of writing; None before it began."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: blocked {1e3 * self.blocked_seconds:.1f} ms, "
            f"staged after {self.staged_seconds:.3f} s, "
            f"written after {self.written_seconds:.3f} s, "
            f"committed after {self.committed_seconds:.3f} s; {self.write}"
        )


class SaveHandle:
    """A save that is under way, or over. Made by ``Checkpointer.save`` and ``Checkpointer.step``.

    Background threads resolve the three futures in their order. If the save fails, all that are not
    resolved yet get the same error: ``OSError``, or a class of ``pyckpt.errors``.

    Attributes:
        step: the step that is saved.
        final: whether the checkpoint is kept for good.
        path: directory of the checkpoint.
        staged: the state has been copied, and may change.
        written: this rank's data is on disk. The result is its ``WriteStatistics``, or None if this
            rank had nothing to write. The checkpoint is not valid yet.
        committed: the checkpoint is whole and durable, on all ranks. The result is its directory.
    """

    def __init__(
        self,
        step: int,
        path: Path,
        on_reached: Callable[[SaveHandle, str, float], None] = lambda handle, what, seconds: None,
        *,
        final: bool = False,
        begun: float | None = None,
    ) -> None:
        self.step = step
        self.final = final
        self.path = path
        self.staged: Future[None] = Future()
        self.written: Future[WriteStatistics | None] = Future()
        self.committed: Future[Path] = Future()
        for future in (self.staged, self.written, self.committed):
            # Nobody may cancel them: who waits for a save would wait for ever.
            future.set_running_or_notify_cancel()
        self._rank = WriteProgress()
        # Of the call, which may first have waited for another save.
        self._start = time.perf_counter() if begun is None else begun
        self._blocked = math.nan
        self._times: dict[str, float] = {}
        self._on_reached = on_reached
        self._lock = fork_safe_lock()  # held while ``on_reached`` runs, so that it is told in order

    def __repr__(self) -> str:
        if not self.committed.done():
            state = "written" if self.written.done() else f"{self.progress:.0%} written"
        elif (error := self.committed.exception()) is not None:
            state = f"failed: {type(error).__name__}: {error}"
        else:
            state = f"committed in {seconds_text(self._times['committed'])}"
        return f"<SaveHandle of step {self.step}: {state}>"

    @property
    def progress(self) -> float:
        """The share of this rank's data that has been written, from 0 to 1; 1 once committed."""
        if self.committed.done() and self.committed.exception() is None:
            return 1.0
        return self._rank.fraction

    @property
    def statistics(self) -> SaveStatistics:
        """Times and bytes so far. May be read from any thread."""
        return SaveStatistics(
            step=self.step,
            blocked_seconds=self._blocked,
            staged_seconds=self._times.get("staged", math.nan),
            written_seconds=self._times.get("written", math.nan),
            committed_seconds=self._times.get("committed", math.nan),
            write=self._rank.statistics,
        )

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the save is committed, ``timeout`` seconds at most; return its directory.

        Raises:
            TimeoutError: it is not committed yet.
            OSError, PyckptError: the save failed. The Checkpointer's next call also raises this,
                because all ranks make that call.
        """
        try:
            return self.committed.result(timeout)
        except Exception as error:
            if isinstance(error, TimeoutError) and self.committed.done():
                # The save failed so. A TimeoutError from here says that it is not over.
                raise SaveError(f"step {self.step} was not saved: {error}") from error
            # concurrent.futures' own class is not the built-in one before Python 3.11.
            if not self.committed.done():
                raise TimeoutError(f"step {self.step} is not committed yet") from error
            raise

    # --- for the Saver ---

    @property
    def seconds(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._start

    def follow(self, progress: WriteProgress) -> None:
        """Report the progress of the rank's writer from now on."""
        self._rank = progress

    def called(self) -> None:
        """Note that the call which started the save is over."""
        self._blocked = time.perf_counter() - self._start

    @property
    def _amount(self) -> Amount:
        """How far this rank is."""
        return self._rank.amount

    @property
    def checkpoint_bytes(self) -> int | None:
        """Of all ranks, once it is committed; None on ranks that do not commit."""
        return self._rank.checkpoint_bytes

    def mark(self, what: str) -> None:
        """Note that "staged", "written" or "committed" is reached, and tell of it. Only the first
        call of each counts."""
        with self._lock:
            if what in self._times:
                return
            seconds = self._times[what] = self.seconds
            try:
                self._on_reached(self, what, seconds)
            except Exception:  # which must not fail the save
                _logger.exception("step %d is %s, and telling of it failed", self.step, what)

    def reached(self, what: str, value: Any = None) -> None:
        """`mark`, and resolve the future of that name."""
        self.mark(what)
        future: Future[Any] = getattr(self, what)
        # Two threads may find a state to be staged.
        with suppress(InvalidStateError):
            future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Fail the futures that are not resolved yet."""
        for future in (self.staged, self.written, self.committed):
            with suppress(InvalidStateError):  # resolved, perhaps by another thread just now
                future.set_exception(error)


class Permission(Protocol):
    """Says whether this job may save, as a `Fence` does."""

    def held(self) -> AbstractContextManager[None]: ...


class ReportingWriter(DirectWriter):
    """A DirectWriter that reports when its data is on disk, and whose errors reach other ranks.

    Args:
        path: directory of the checkpoint.
        number: which save this is, the same on all ranks.
        fence: says which job may commit there.
        on_written: called when this rank's data is on disk.
        on_sweep: called by the rank that commits, before any rank writes.
        arrive: called when this rank has written, or failed to.
        failure: the error with which the save fails, on all ranks. A rank that cannot begin a save
            gives it, because the other ranks have begun and wait for it in a collective.
        first_of_node: whether this rank makes the directory of its node ready, where each node has
            a directory of its own. ``described`` is then to be committed by the caller. None where
            all ranks share a directory, and this writer commits.
        frozen: what is known of the frozen parts of the state; None if nothing may be frozen.
        options: as for DirectWriter.
    """

    _is_fenced = True

    def __init__(
        self,
        path: Path,
        *,
        number: int,
        fence: Permission,
        on_written: Callable[[], None],
        on_sweep: Callable[[], None],
        arrive: Callable[[], None],
        failure: Exception | None = None,
        first_of_node: bool | None = None,
        frozen: FrozenSave | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self._first_of_node = first_of_node
        self.described: tuple[bytes, set[str]] | None = None
        """On the rank that coordinates: the bytes of ``.metadata`` that are to be committed on each
        node, and the names of the data files."""
        self.is_swept = True
        """Whether what this save has replaced is gone; False only on the rank that commits."""
        self._frozen = frozen
        self._number = number - 1
        self._fence = fence
        self._fenced = ExitStack()
        self._on_written = on_written
        self._on_sweep = on_sweep
        self._arrive = arrive
        self._failure = failure

    @property
    def progress(self) -> WriteProgress:
        """The progress of this rank."""
        return self._progress

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with portable_errors():
            if self._failure is not None:
                raise self._failure
            if self._prepares_directory:
                with self._fence.held():
                    pass  # raises before anything is made in the directory
            with self._fenced:
                return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with portable_errors():
            return super().prepare_global_plan(plans)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        try:
            with portable_errors():
                future = super().write_data(plan, planner)
                self._on_written()
            return future
        finally:
            self._arrive()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with portable_errors():
            try:
                with self._fenced:
                    super().finish(metadata, results)
            except (OSError, SaveError):
                # If another job removed the files, the fence raises `Superseded` instead.
                with self._fence.held():
                    raise

    @property
    def _prepares_directory(self) -> bool:
        return super()._prepares_directory if self._first_of_node is None else self._first_of_node

    def _commit(self, data: bytes, files: set[str], check: Callable[[], None]) -> bool:
        if self._first_of_node is None:
            self.is_swept = super()._commit(data, files, check)
        else:
            self.described = data, files
        return self.is_swept

    def _before_sweep(self) -> None:
        self._fenced.enter_context(self._fence.held())
        self._on_sweep()

    def _before_commit(self) -> None:
        # Held until `finish` ends, or else the sweep after the commit might remove the files of
        # another job.
        self._fenced.enter_context(self._fence.held())
