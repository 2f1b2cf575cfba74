"""DirectWriter: writes DCP checkpoints with the engine."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from pyckpt import _C
from pyckpt.activity import Amount
from pyckpt.collector import collector_paused
from pyckpt.dcp.commit import DataFile, Destination, describe
from pyckpt.dcp.committed import refer_to_file
from pyckpt.dcp.default_stager import default_stager
from pyckpt.dcp.global_plan import GlobalPlan, global_plan_of
from pyckpt.dcp.known_planners import planner_is_known
from pyckpt.dcp.parts import (
    Part,
    Skipped,
    host_name,
    parts_by_rank,
    refuse_mismatch,
    skipped,
    with_part,
)
from pyckpt.dcp.shared import StagedStateDict
from pyckpt.dcp.stager import PinnedStager
from pyckpt.dcp.staging import Staging
from pyckpt.dcp.writing import PlannedItems, WriteProgress, tell_fallback
from pyckpt.engine import Engine, abandoned, default_engine
from pyckpt.format import commit
from pyckpt.speaking import for_all
from pyckpt.statistics import WriteStatistics
from pyckpt.timeline import named

__all__ = ["DirectWriter"]

_logger = logging.getLogger("pyckpt")


class DirectWriter(StorageWriter):
    """A ``StorageWriter`` that writes, at the speed of the disk, files that stock PyTorch reads.

    Use it wherever DCP takes one::

        dcp.save(state_dict, storage_writer=pyckpt.DirectWriter("checkpoints/step-100"))
        future = dcp.async_save(state_dict, storage_writer=pyckpt.DirectWriter(path))

    A save is all or nothing: however it ends, the directory holds the previous checkpoint or the
    new one. Saving into a directory that has a checkpoint keeps that readable until the new one is
    committed. Each rank writes one file; all bytes are checksummed.

    Args:
        path: directory of the checkpoint. A save makes it, and the directories above it, if they
            are missing. May be left out if ``checkpoint_id`` is given to ``dcp.save``.
        overwrite: whether a save may replace a checkpoint that is in the directory. If not, such a
            save raises ``FileExistsError``.
        sync_files: whether a save ends only when everything is durable (fsync). If not, a power
            failure may leave a checkpoint that looks complete and is not.
        direct: whether writes bypass the page cache. ``"auto"``: if the file system can; if not,
            the log says so. ``"require"``: a save raises ``OSError`` if the file system cannot.
            ``"off"``: never.
        stager: copies the state for asynchronous saves. The default one knows of no optimizers, so
            it copies everything before ``async_save`` returns.
        engine: the memory and threads to use; by default the engine that all writers share.

    Raises:
        ValueError: ``path`` is a URL, or ``direct`` is none of the three.

    A save raises ``OSError`` with errno and path, or a class of ``pyckpt.errors``, wrapped by DCP
    in ``CheckpointException``. An instance may be reused, for one save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        sync_files: bool = True,
        direct: Literal["auto", "require", "off"] = "auto",
        stager: PinnedStager | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__()
        if direct not in ("auto", "require", "off"):
            raise ValueError(f"{direct = } must be 'auto', 'require' or 'off'.")
        self.overwrite = overwrite
        self.sync_files = sync_files
        self.direct = direct
        self._engine = engine
        self._path = None if path is None else _directory(path)
        self._rank = 0
        self._use_collectives = True
        self._alone = False
        self._is_coordinator = False
        self._save_id = commit.new_save_id()
        self._number = 0  # of the save; every call for a save counts
        self._is_counted = False
        self._parts: dict[int, Part] = {}  # of the ranks; only the coordinator knows them
        self._progress = WriteProgress()
        self._data_file: DataFile | None = None
        self._stager = stager
        self._staging: Staging | None = None
        self._skips = False
        self._plan: GlobalPlan | None = None  # of all ranks; only the rank that commits has it
        self.staged: Future[None] = Future()
        """Done when the state of the last asynchronous save is copied. Cancelled if the save failed
        before that began."""
        self.written: Future[None] = Future()
        """Done when this rank's file of the last asynchronous save is complete, and durable.
        Cancelled if the save failed before this rank wrote, or if another process makes the save.
        (The future that DCP returns is done when the checkpoint is committed.)"""

    def __repr__(self) -> str:
        where = "a path that is not known yet" if self._path is None else str(self._path)
        return f"<{type(self).__name__} of {where}: {self.statistics or 'nothing written yet'}>"

    _is_fenced = False
    """Whether a subclass keeps other processes from saving into the directory. If so, no save waits
    for another process's lock, which may hang."""

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        if self._path is None:
            raise ValueError("DirectWriter needs a path, or a checkpoint_id given to dcp.save.")
        return self._path

    @property
    def checkpoint_id(self) -> Path | None:
        """The ``path``, by DCP's name; None until it is known."""
        return self._path

    @property
    def save_id(self) -> str:
        """The id of the save that is under way, or of the last one if none is. Each rank has an id
        of its own, which is in the name of its file."""
        return self._save_id

    @property
    def statistics(self) -> WriteStatistics | None:
        """Counts and times of this rank's part of the save that is under way, or of the last one if
        none is; None before the first. May be read from any thread."""
        return self._progress.statistics

    def _amount(self) -> Amount:
        return self._progress.amount

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes of the files of all ranks. Known to the rank that commits, once it has looked at
        them; None before, and on other ranks."""
        return self._progress.checkpoint_bytes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a directory to write to."""
        if "://" in os.fspath(checkpoint_id):
            return False
        return any(
            parent.exists() and os.access(parent, os.W_OK) for parent in Path(checkpoint_id).parents
        )

    # The calls that stage an asynchronous save: DCP uses a writer that has these methods as the
    # AsyncStager.

    _synchronize_after_execute = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Begin to copy a state; see `PinnedStager`. Only this writer may use the result: its
        memory fills while DCP plans.

        Raises:
            StagerBusy: see ``when_busy`` of `PinnedStager`.
            BaseException: the error of an earlier save, once.

        If there are several ranks, `prepare_local_plan` raises these errors instead, so that DCP's
        collectives bring them to all ranks.
        """
        # Counted first, so that a rank that fails to begin this save counts it, too. The next save
        # then has the same number on all ranks.
        self._number += 1
        self._is_counted = True
        stager = default_stager(self._engine) if self._stager is None else self._stager
        if not _has_company():
            stager.raise_failure()
        self.staged = Future()
        self.written = Future()
        staging, copies = stager.begin(state_dict, direct=True)
        if not _has_company():
            try:
                staging.raise_refusal()
            except BaseException:
                staging.release()
                raise
        self._staging = staging
        staging.staged.add_done_callback(partial(_pass_on, self.staged))
        # If the file is not written by then, the save failed, or another process makes it.
        staging.ended.add_done_callback(partial(_cancel, self.written))
        return StagedStateDict(copies, staging)

    def synchronize_staging(self) -> None:
        """Wait for the save if it reads some tensors in place, because the engine's memory has no
        room for them, and something other than an optimizer's step may change these tensors."""
        staging = self._staging
        if staging is not None:
            staging.wait_volatile()

    def wait_staged(self) -> None:
        """Make the program's next work wait until it may change the state. For programs that change
        parameters without ``optimizer.step()``; see ``PinnedStager.wait_staged``."""
        staging = self._staging  # the thread that saves may set the attribute to None meanwhile
        if staging is not None:
            staging.guard()

    def close(self) -> None:
        """For DCP, which closes its stagers. There is nothing to close."""

    # The calls of a save, in their order.

    def storage_meta(self) -> StorageMeta:
        self._take_over()
        # A planner sees the tensors before this writer does, and may read them. The planners that
        # pyckpt knows do not.
        if self._staging is not None and not planner_is_known(self):
            self._staging.settle()
        # A string: paths pickle under a name that differs between versions of Python.
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._take_over()
        if checkpoint_id is None:
            return
        try:
            self._path = _directory(checkpoint_id)
        except ValueError:
            if self._staging is None:
                # Torch 2.9 says where to write before it has the state copied.
                self.staged.cancel()
                self.written.cancel()
            raise

    def _take_over(self) -> None:
        """Called in the first calls of the thread that saves."""
        if self._staging is not None and not self._staging.take_over():
            self._staging = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)
        # DCP calls `reset` for some saves only, and a name must never come twice.
        self._save_id = commit.new_save_id()
        if self._data_file is not None:
            self._data_file.let_go()
        self._data_file = None
        self._alone = False
        self._is_coordinator = is_coordinator
        self._number += not self._is_counted
        self._is_counted = False
        self._parts = {}
        self._plan = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        staging = self._staging
        if staging is not None:
            staging.raise_refusal()
        destination = self._destination
        commits = self._is_coordinator or not self._use_collectives
        commit.make_directory(self.path, sync=self.sync_files and commits)
        destination.release_claims()
        if commits:
            destination.sweep_remains(self._before_sweep)
        metadata = self.path / destination.metadata_name
        if not self._use_collectives and (self.path / commit.metadata_name()).exists():
            _logger.log(
                for_all(logging.WARNING),
                "%s: a checkpoint that was saved with collectives is there, and DCP loads that one "
                "rather than what each rank now saves for itself",
                self.path,
            )
        if not self.overwrite and metadata.exists():
            raise FileExistsError(
                errno.EEXIST, "a checkpoint is there already, and overwrite=False", str(metadata)
            )
        if staging is not None and not self._is_coordinator:
            staging.end_planning()  # this rank waits for the coordinator now
        part = Part(
            rank=self._rank,
            host=host_name(),
            path=str(self.path),
            inode=os.stat(self.path).st_ino,
            number=self._number,
            save_id=self._save_id,
            has_room=staging is None or staging.has_room,
        )
        return with_part(plan, part)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._alone = len(plans) == 1
        self._parts = parts_by_rank(plans)
        if self._parts:
            refuse_mismatch(list(self._parts.values()))
        self._plan = global_plan_of(plans)
        self._skips = not all(part.has_room for part in self._parts.values())
        # If one rank has no memory for a save, none of them saves.
        return skipped(plans) if self._skips else plans

    def _is_skipped(self, plan: SavePlan) -> bool:
        # A planner may have kept the answer to another save.
        if plan.storage_data == Skipped(self._save_id):
            return True
        if self._staging is not None:
            self._staging.require_copies()  # the planner may have lost the coordinator's answer
        return False

    def write_data(
        self, plan: SavePlan, planner: StockSavePlanner
    ) -> TorchFuture[list[WriteResult]]:
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        staging = self._staging
        if staging is not None:
            # Not earlier: the collector begins by visiting all objects that were made during its
            # pause. By now, the objects that DCP made for the global plan alone are freed.
            staging.end_planning()
        try:
            if self._is_skipped(plan):
                level = for_all(logging.WARNING)
                _logger.log(level, "%s: not saved, since earlier saves hold the memory", self.path)
                future.set_result([])
            else:
                # A rank that has nothing to write makes no file.
                with named("write"):
                    results: Any = self._write(plan, planner)
                    future.set_result(results)
        except BaseException as error:
            if abandoned():
                level = for_all(logging.ERROR)
                _logger.log(level, "%s: this save was lost: the program ended before it", self.path)
            self._end_staging(error)
            raise
        self._end_staging(None)
        return future

    def _end_staging(self, error: BaseException | None) -> None:
        """This rank has read its copies, or failed."""
        staging, self._staging = self._staging, None
        if staging is None:
            return
        try:
            with suppress(InvalidStateError):  # the program cancelled it
                if error is None:
                    self.written.set_result(None)
                else:
                    staging.fail(error)
                    self.written.set_exception(error)
        finally:
            staging.release()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self._skips:
            return
        destination, own = self._destination, self._data_file
        progress = self._progress
        plan, self._plan = self._plan, None
        if plan is not None and not plan.is_plan_of(metadata):
            plan = None  # the planner has replaced the metadata

        def check() -> None:
            progress.checkpoint_bytes = destination.look_for_files(results, self._parts, own)

        try:
            with collector_paused():
                data, files = describe(
                    metadata, results, plan, path=self.path, save_id=self._save_id
                )
            destination.commit(
                data,
                files,
                check=check,
                before_rename=self._before_commit,
            )
        finally:
            if own is not None:
                own.let_go()
        if plan is not None:
            refer_to_file(metadata, self.path / destination.metadata_name)

    @property
    def _destination(self) -> Destination:
        return Destination(
            path=self.path,
            rank=self._rank,
            each_commits=not self._use_collectives,
            sync=self.sync_files,
            is_fenced=self._is_fenced,
        )

    def _before_commit(self) -> None:
        """For subclasses. Called on the rank that commits, right before the rename that commits the
        save, while no other commit of this process is under way. If it raises, the save fails on
        all ranks, and the checkpoint that was there stays."""

    def _before_sweep(self) -> None:
        """For subclasses. Called on the rank that commits, before it removes the files that failed
        saves left. If it raises, the save fails on all ranks."""

    # For callers that save without DCP's `async_save`.

    def close_save(self) -> None:
        """Release the memory and files of the save. Call it when the save is over, if the thread
        that saved goes on. (DCP has a thread for each save, and its end releases them.)"""
        if self._data_file is not None:
            self._data_file.let_go()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    @property
    def file(self) -> Path | None:
        """The data file that this rank wrote in the last save; None if it wrote none."""
        return None if self._data_file is None else self._data_file.path

    @property
    def files(self) -> set[str]:
        """Names of the data files that the ranks may have written; known to the rank that
        commits."""
        return {commit.data_file_name(rank, part.save_id) for rank, part in self._parts.items()}

    def _write(self, plan: SavePlan, planner: StockSavePlanner) -> Sequence[WriteResult]:
        if not plan.items:
            self._check_copies()  # this rank writes nothing, and fails if its copies failed
            return []
        name = commit.data_file_name(self._rank, self._save_id)
        self._data_file = file = DataFile(self.path / name, shared=not self._alone)
        self._progress.items = plan.items
        items = PlannedItems(plan, planner, self._staging)
        try:
            job = self._create(file, items.expected_size)
            try:
                items.add_to(job)
                places = job.finish()
                self._check_copies()
            finally:
                job.abandon()
        except BaseException:
            file.let_go()
            # The job has removed its file, unless it had finished. An error of removing it again
            # must not hide the first one.
            with suppress(OSError):
                file.path.unlink()
            raise
        tell_fallback(self.path, job.statistics().fallback_reason)
        return items.results(name, places, learn=self._use_collectives and not self._alone)

    def _create(self, file: DataFile, expected: int) -> _C.WriteJob:
        """Make the file, with room for that many bytes, and claim it before others sweep."""
        engine = default_engine() if self._engine is None else self._engine
        with self._destination.turn(shared=True):
            self._progress.job = job = _C.WriteJob(
                engine.native,
                os.fsencode(file.path),
                direct=self.direct,
                sync=self.sync_files,
                preallocate=expected,
            )
            try:
                if not self._is_fenced:
                    file.claim()
            except BaseException:
                job.abandon()
                raise
        return job

    def _check_copies(self) -> None:
        """Raise if the copies are not the state at the call."""
        if self._staging is not None:
            self._staging.check()

    def __getstate__(self) -> dict[str, Any]:
        # DCP's background process gets the writer's settings alone.
        futures = {"staged": None, "written": None}
        return {
            **self.__dict__,
            **futures,
            "_progress": WriteProgress(),
            "_data_file": None,
            "_staging": None,
            "_plan": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, staged=Future(), written=Future())


def _has_company() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _pass_on(to: Future[None], done: Future[None]) -> None:
    error = done.exception()
    if error is None:
        to.set_result(None)
    else:
        to.set_exception(error)


def _cancel(written: Future[None], over: Future[None]) -> None:
    written.cancel()


def _directory(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(
            f"{os.fspath(path)!r} is a URL, and DirectWriter writes to file systems. For remote "
            "storage use torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter."
        )
    # Absolute, so that a change of the working directory during a background save does no harm.
    return Path(os.path.abspath(path))
