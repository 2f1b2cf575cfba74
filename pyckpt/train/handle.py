"""One save, from the call to its commit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt.dcp.failures import portable_errors
from pyckpt.dcp.writer import DirectWriter
from pyckpt.dcp.writing import WriteProgress
from pyckpt.errors import SaveError
from pyckpt.statistics import WriteStatistics
from pyckpt.train.store.fence import Fence

__all__ = ["ReportingWriter", "SaveHandle", "SaveStatistics"]


@dataclass(frozen=True)
class SaveStatistics:
    """What a save took on this rank so far. Times are in seconds since the call; NaN for what has
    not been reached."""

    step: int
    blocked_seconds: float
    """How long the call took, during which training stood still."""
    staged_seconds: float
    written_seconds: float
    committed_seconds: float
    write: WriteStatistics | None
    """What was written, and how fast; None before writing began."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: blocked {1e3 * self.blocked_seconds:.1f} ms, "
            f"staged after {self.staged_seconds:.3f} s, "
            f"written after {self.written_seconds:.3f} s, "
            f"committed after {self.committed_seconds:.3f} s; {self.write}"
        )


class SaveHandle:
    """A save that is under way, or over. Made by ``Checkpointer.save`` and ``Checkpointer.step``.

    The three futures resolve in their order, from background threads. A save that fails fails all
    that have not resolved yet, with the same error: ``OSError``, or a class of ``pyckpt.errors``.

    Attributes:
        step: the step that is saved.
        path: directory of the checkpoint.
        staged: the state has been copied; what it was saved from may change.
        written: this rank's data is on disk, with ``WriteStatistics`` (None where another rank had
            all there was to write). It does not count yet.
        committed: the checkpoint is whole and durable, on all ranks; with its directory.
    """

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path
        self.staged: Future[None] = Future()
        self.written: Future[WriteStatistics | None] = Future()
        self.committed: Future[Path] = Future()
        self._rank = WriteProgress()
        self._start = time.perf_counter()
        self._blocked = math.nan
        self._times: dict[str, float] = {}

    def __repr__(self) -> str:
        if self.committed.done():
            state = "failed" if self.committed.exception() else "committed"
        else:
            state = "written" if self.written.done() else f"{self.progress:.0%} written"
        return f"<SaveHandle of step {self.step}: {state}>"

    @property
    def progress(self) -> float:
        """How much of this rank's data has been written, from 0 to 1; 1 when it is committed."""
        if self.committed.done() and self.committed.exception() is None:
            return 1.0
        return self._rank.fraction

    @property
    def statistics(self) -> SaveStatistics:
        """What it took so far. May be read from any thread."""
        return SaveStatistics(
            step=self.step,
            blocked_seconds=self._blocked,
            staged_seconds=self._times.get("staged", math.nan),
            written_seconds=self._times.get("written", math.nan),
            committed_seconds=self._times.get("committed", math.nan),
            write=self._rank.statistics,
        )

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until it is committed, ``timeout`` seconds at most; return its directory.

        Raises:
            TimeoutError: it is not committed yet.
            OSError, PyckptError: it failed. The Checkpointer's next call raises this as well: only
                there all ranks come by.
        """
        try:
            return self.committed.result(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            # concurrent.futures' own class is not the built-in one before Python 3.11.
            if not self.committed.done():
                raise TimeoutError(f"step {self.step} is not committed yet") from error
            raise

    # --- for those who save ---

    @property
    def seconds(self) -> float:
        """Since the call."""
        return time.perf_counter() - self._start

    def follow(self, progress: WriteProgress) -> None:
        """Tell of this progress, of the rank's writer, from now on."""
        self._rank = progress

    def called(self) -> None:
        """Note that the call which started the save is over."""
        self._blocked = time.perf_counter() - self._start

    def reached(self, what: str, value: Any = None) -> None:
        """Resolve "staged", "written" or "committed"."""
        future: Future[Any] = getattr(self, what)
        if not future.done():
            self._times[what] = time.perf_counter() - self._start
            future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Fail what has not been reached."""
        for future in (self.staged, self.written, self.committed):
            if not future.done():
                future.set_exception(error)


class ReportingWriter(DirectWriter):
    """A DirectWriter that says when its data is on disk, and whose errors reach the other ranks.

    Args:
        path: directory of the checkpoint.
        number: which save this is, the same on all ranks.
        fence: who may commit there.
        on_written: called when this rank's data is on disk.
        on_sweep: called by the rank that commits, before any rank writes.
        arrive: called when this rank has written, or failed to.
        failure: makes the save fail, on all ranks. Where a rank cannot even begin, the others have
            begun, and wait for it in a collective.
        options: as for DirectWriter.
    """

    _is_fenced = True

    def __init__(
        self,
        path: Path,
        *,
        number: int,
        fence: Fence,
        on_written: Callable[[], None],
        on_sweep: Callable[[], None],
        arrive: Callable[[], None],
        failure: Exception | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self._number = number - 1
        self._fence = fence
        self._fenced = ExitStack()
        self._on_written = on_written
        self._on_sweep = on_sweep
        self._arrive = arrive
        self._failure = failure

    @property
    def progress(self) -> WriteProgress:
        """How far this rank is."""
        return self._progress

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with portable_errors():
            if self._failure is not None:
                raise self._failure
            if self._is_coordinator:
                with self._fence.held():
                    pass  # before anything is made there
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
                # Files that another job has removed are its doing, and not the disk's.
                with self._fence.held():
                    raise

    def _before_sweep(self) -> None:
        self._fenced.enter_context(self._fence.held())
        self._on_sweep()

    def _before_commit(self) -> None:
        # Until `finish` ends: what is swept out after the commit may be another job's otherwise.
        self._fenced.enter_context(self._fence.held())
