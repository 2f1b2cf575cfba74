"""DirectWriter: writes DCP checkpoints with the engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
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

from pyckpt.activity import Amount
from pyckpt.collector import collector_paused
from pyckpt.dcp.commit import describe, look_for_files
from pyckpt.dcp.committed import refer_to_file
from pyckpt.dcp.default_stager import default_stager
from pyckpt.dcp.destination import Destination
from pyckpt.dcp.directory import Directory
from pyckpt.dcp.frozen import FrozenSave
from pyckpt.dcp.frozen_writing import FrozenWriting
from pyckpt.dcp.global_plan import GlobalPlan, global_plan_of
from pyckpt.dcp.known_planners import planner_is_known
from pyckpt.dcp.own_files import OwnFiles
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
from pyckpt.dcp.store import Store
from pyckpt.dcp.writing import PlannedItems, WriteProgress
from pyckpt.engine import Engine, abandoned, engine_of
from pyckpt.format import commit
from pyckpt.remote.address import open_store, place_of
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
        path: directory of the checkpoint; ``~`` is expanded. A save makes it, and the directories
            above it, if they are missing. Or a URL of an object store
            (``s3://bucket/run/step-100``; needs ``pip install "pyckpt[cloud]"``): the bytes go
            there as they are, with no file in between. May be left out if ``checkpoint_id`` is
            given to ``dcp.save``.
        overwrite: whether a save may replace a checkpoint that is in the directory. If not, such a
            save raises ``FileExistsError``.
        sync_files: whether a save ends only when everything is durable (fsync). If not, a power
            failure may leave a checkpoint that looks complete and is not. A store is always waited
            for.
        direct: whether writes bypass the page cache. ``"auto"``: if the file system can; if not,
            the log says so. ``"require"``: a save raises ``OSError`` if the file system cannot.
            ``"off"``: never. A store has no page cache.
        stager: copies the state for asynchronous saves. The default one knows of no optimizers, so
            it copies everything before ``async_save`` returns.
        engine: the memory and threads to use; by default the engine that all writers share.

    Raises:
        TypeError: ``path`` is no path, or ``engine`` no engine.
        ValueError: ``path`` is empty, or a URL that names no object store, or ``direct`` is none of
            the three.
        ImportError: ``path`` is a URL, and obstore is not installed.

    Of saves into one address of a store that overlap, the first that commits counts, and the others
    raise ``FileExistsError``.

    A save raises ``OSError`` with errno and path, or a class of ``pyckpt.errors``, wrapped by DCP
    in ``CheckpointException``. An instance may be reused, for one save at a time.

    It writes everything, also what has not changed. Only a `Checkpointer` links that from earlier
    checkpoints (``frozen=``), since it keeps other jobs from its directory.
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
        self._engine = engine_of(engine)
        self._path = None if path is None else _place(path)
        self._rank = 0
        self._use_collectives = True
        self._alone = False
        self._is_coordinator = False
        self._save_id = commit.new_save_id()
        self._number = 0  # of the save; every call for a save counts
        self._is_counted = False
        self._parts: dict[int, Part] = {}  # of the ranks; only the coordinator knows them
        self._progress = WriteProgress()
        self._own: OwnFiles | None = None
        self._destination: Destination | None = None  # of the save
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

    _frozen: FrozenSave | None = None
    """What is known of the frozen parts of the state. Only for a subclass that is fenced: nothing
    else keeps linked files from other processes' sweeps."""

    @property
    def path(self) -> Path | str:
        """Directory of the checkpoint; or its URL, without a slash at the end."""
        if self._path is None:
            raise ValueError("DirectWriter needs a path, or a checkpoint_id given to dcp.save.")
        return self._path

    @property
    def checkpoint_id(self) -> Path | str | None:
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
        """Whether this could be a directory to write to, or an address in a store."""
        try:
            path = place_of(checkpoint_id)
        except ValueError:
            return False
        if isinstance(path, str):
            return True
        return any(parent.exists() and os.access(parent, os.W_OK) for parent in path.parents)

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
        self.staged = Future()
        self.written = Future()
        left, self._staging = self._staging, None
        if left is not None:
            left.give_up()  # a writer makes one save at a time, so no thread will begin that one
        try:
            staging, copies = self._begin_staging(state_dict)
        except BaseException:
            self.staged.cancel()
            self.written.cancel()
            raise
        self._staging = staging
        staging.staged.add_done_callback(partial(_pass_on, self.staged))
        # If the file is not written by then, the save failed, or another process makes it.
        staging.ended.add_done_callback(partial(_cancel, self.written))
        return StagedStateDict(copies, staging)

    def _begin_staging(self, state_dict: dict[str, Any]) -> tuple[Staging, dict[str, Any]]:
        stager = default_stager(self._engine) if self._stager is None else self._stager
        if not _has_company():
            stager.raise_failure()
        prove = None if self._frozen is None else self._frozen.prove
        staging, copies = stager.begin(state_dict, direct=True, prove=prove)
        if not _has_company():
            try:
                staging.raise_refusal()
            except BaseException:
                staging.release()
                raise
        return staging, copies

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
        staging = self._staging
        if staging is not None and staging.given_up is not None:
            self._staging = None
            raise staging.given_up
        # A planner sees the tensors before this writer does, and may read them. The planners that
        # pyckpt knows do not.
        if staging is not None and not planner_is_known(self):
            staging.settle()
        # A string: paths pickle under a name that differs between versions of Python.
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._take_over()
        if checkpoint_id is None:
            return
        try:
            self._path = _place(checkpoint_id)
        except (ImportError, ValueError):
            if self._staging is None:
                # Torch 2.9 says where to write before it has the state copied.
                self.staged.cancel()
                self.written.cancel()
            raise

    def _take_over(self) -> None:
        """Called in the first calls of the thread that saves."""
        staging = self._staging
        # If it was given up, the save fails in `storage_meta`, which DCP calls where all ranks
        # learn of errors.
        if staging is not None and not staging.take_over() and staging.given_up is None:
            self._staging = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)
        # DCP calls `reset` for some saves only, and a name must never come twice.
        self._save_id = commit.new_save_id()
        if self._own is not None:
            self._own.let_go()
        self._own = None
        self._destination = None
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
        self._destination = destination = self._open()
        destination.prepare(
            commits=self._prepares_directory,
            overwrite=self.overwrite,
            before_sweep=self._before_sweep,
        )
        if staging is not None and not self._is_coordinator:
            staging.end_planning()  # this rank waits for the coordinator now
        part = Part(
            rank=self._rank,
            host=host_name(),
            path=str(self.path),
            identity=destination.identity,
            number=self._number,
            save_id=self._save_id,
            has_room=staging is None or staging.has_room,
            others=self._frozen.names(self._rank, self._save_id) if self._frozen else (),
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
        destination, own = self._destination, self._own
        assert destination is not None
        progress = self._progress
        plan, self._plan = self._plan, None
        if plan is not None and not plan.is_plan_of(metadata):
            plan = None  # the planner has replaced the metadata

        def check() -> None:
            progress.checkpoint_bytes = look_for_files(
                destination, results, self._parts, [] if own is None else own.paths
            )

        try:
            with named("describe"), collector_paused():
                data, files = describe(
                    metadata, results, plan, path=str(self.path), save_id=self._save_id
                )
            self._commit(data, files, check)
        finally:
            if own is not None:
                own.let_go()
        if plan is not None:
            refer_to_file(metadata, f"{self.path}/{destination.metadata_name}")

    def _commit(self, data: bytes, files: set[str], check: Callable[[], None]) -> bool:
        """Make a save count; see `Destination.commit`."""
        assert self._destination is not None
        return self._destination.commit(data, files, check=check, before_rename=self._before_commit)

    @property
    def _prepares_directory(self) -> bool:
        """Whether this rank makes the directory ready for all ranks that write there."""
        return self._is_coordinator or not self._use_collectives

    def _open(self) -> Destination:
        path, each_commits = self.path, not self._use_collectives
        if isinstance(path, str):
            return Store(path, rank=self._rank, each_commits=each_commits)
        return Directory(
            path=path,
            rank=self._rank,
            each_commits=each_commits,
            sync=self.sync_files,
            is_fenced=self._is_fenced,
            direct=self.direct,
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
        if self._own is not None:
            self._own.let_go()
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    @property
    def own_files(self) -> tuple[Path, ...]:
        """The data files of this rank in the last save: none if it has nothing to save or saves
        into a store, and more than one if some parts are frozen."""
        own = self._own
        return () if own is None else tuple(path for path in own.paths if isinstance(path, Path))

    @property
    def files(self) -> set[str]:
        """Names of the data files that the ranks may have written; known to the rank that
        commits."""
        named = {commit.data_file_name(rank, part.save_id) for rank, part in self._parts.items()}
        return named.union(*(part.others for part in self._parts.values()))

    def _write(self, plan: SavePlan, planner: StockSavePlanner) -> Sequence[WriteResult]:
        if not plan.items:
            self._check_copies()  # this rank writes nothing, and fails if its copies failed
            return []
        assert self._destination is not None
        self._own = own = OwnFiles(
            self._destination,
            shared=not self._alone,
            engine=self._engine,
            progress=self._progress,
        )
        try:
            return self._write_files(own, plan, planner)
        except BaseException as error:
            cause = own.remove()
            if cause is not None and cause is not error:
                raise cause from None
            raise

    def _write_files(
        self, own: OwnFiles, plan: SavePlan, planner: StockSavePlanner
    ) -> Sequence[WriteResult]:
        if self._frozen is not None:
            writing = FrozenWriting(plan, planner, self._staging, self._frozen, own, self._progress)
            if writing.is_needed:
                return writing.write(self._rank, self._save_id, self._check_copies)
            self._frozen.is_written = True
        self._progress.items = plan.items
        name = commit.data_file_name(self._rank, self._save_id)
        items = PlannedItems(plan, planner, self._staging)
        places = own.write(name, items.expected_size, items.add_to, self._check_copies)
        learns = self._use_collectives and not self._alone
        return items.results(name, places, learn=learns)

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
            "_own": None,
            "_frozen": None,
            "_destination": None,
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


def _place(path: str | os.PathLike[str]) -> Path | str:
    """A directory, or the URL of an object store.

    Raises:
        ImportError, ValueError: see `open_store` and `place_of`.
    """
    path = place_of(path)
    if isinstance(path, str):
        open_store(path)  # which refuses what is no address of one
        return path
    # Absolute, so that a change of the working directory during a background save does no harm.
    return Path(os.path.abspath(path))
