"""DirectWriter: writes DCP checkpoints with the engine."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.engine import Engine, default_engine
from pyckpt.format import commit
from pyckpt.format.envelope import envelope_of
from pyckpt.format.metadata import encode, storage_info
from pyckpt.statistics import WriteStatistics

__all__ = ["DirectWriter"]

_logger = logging.getLogger("pyckpt")

# What the bytes around a tensor, and the gap before an aligned one, take at most (docs/format.md);
# for the preallocation, where a little too much is given back at the end.
_ENVELOPE_BYTES_MAX = 2048
_GAP_BYTES_MAX = 4096
_ALIGNED_PAYLOAD_MIN = 64 << 10


# Commits of one process take turns: a commit and the sweep after it must see no half of another.
_commit_lock = threading.Lock()
# Data files of saves under way that other saves of this process, into the same directory, must not
# sweep out. Ranks need no such thing, since their collectives keep their saves apart.
_unfinished: set[Path] = set()
_devices_told: set[int] = set()  # of which the log said that they do not do direct I/O


class DirectWriter(StorageWriter):
    """A ``StorageWriter`` that writes at the speed of the disk what stock ``dcp.load`` reads.

    Use it wherever DCP takes one::

        dcp.save(state_dict, storage_writer=pyckpt.DirectWriter("checkpoints/step-100"))
        future = dcp.async_save(state_dict, storage_writer=pyckpt.DirectWriter(path))

    A save is all or nothing: however it ends, the directory holds the previous checkpoint or the
    new one. Saving into a directory that has a checkpoint keeps that readable until the new one is
    committed. Each rank writes one file; all bytes are checksummed.

    Args:
        path: directory of the checkpoint; it and those above it are made where missing. May be left
            out where ``checkpoint_id`` is given to ``dcp.save``.
        overwrite: whether a checkpoint in the directory may be replaced; if not, saving raises
            ``FileExistsError``.
        sync_files: wait until everything is durable (fsync) before a save counts as done. Without,
            a power failure may leave a checkpoint that looks complete and is not.
        direct: ``"auto"`` bypasses the page cache where the file system can and says so in the log
            where it cannot; ``"require"`` raises ``OSError`` there; ``"off"`` never bypasses it.
        engine: the memory and threads to use; by default those that all writers share.

    Raises:
        ValueError: ``path`` is a URL, or ``direct`` none of the three.

    Errors of a save are ``OSError`` with errno and path, wrapped by DCP in ``CheckpointException``.
    An instance may be reused, for one save at a time.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        overwrite: bool = True,
        sync_files: bool = True,
        direct: Literal["auto", "require", "off"] = "auto",
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
        self._job: _C.WriteJob | None = None
        self._data_file: Path | None = None

    @property
    def path(self) -> Path:
        """Directory of the checkpoint."""
        if self._path is None:
            raise ValueError("DirectWriter needs a path, or a checkpoint_id given to dcp.save.")
        return self._path

    @property
    def checkpoint_id(self) -> Path:
        """The same, by DCP's name."""
        return self.path

    @property
    def statistics(self) -> WriteStatistics | None:
        """Of this rank's part of the save that runs, or ran last; None before the first. May be
        read from any thread."""
        job = self._job
        return None if job is None else WriteStatistics.of(job.statistics())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this could be a directory to write to."""
        if "://" in os.fspath(checkpoint_id):
            return False
        return any(
            parent.exists() and os.access(parent, os.W_OK) for parent in Path(checkpoint_id).parents
        )

    def storage_meta(self) -> StorageMeta:
        # A string: paths pickle under a name that differs between versions of Python.
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    # The calls of a save, in their order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._path = _directory(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank") or 0
        self._use_collectives = kwargs.get("use_collectives", True)
        # DCP calls `reset` for some saves only, and a name must never come twice.
        self._save_id = commit.new_save_id()
        self._forget_data_file()
        self._data_file = None
        self._alone = False
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        commit.make_directory(self.path, sync=self.sync_files)
        self._sweep_remains()
        metadata = self.path / self._metadata_name()
        if not self._use_collectives and (self.path / commit.metadata_name()).exists():
            _logger.warning(
                "%s: a checkpoint that was saved with collectives is there, and DCP loads that one "
                "rather than what each rank now saves for itself",
                self.path,
            )
        if not self.overwrite and metadata.exists():
            raise FileExistsError(
                errno.EEXIST, "a checkpoint is there already, and overwrite=False", str(metadata)
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._alone = len(plans) == 1
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        # A rank that has nothing to write makes no file.
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {
            result.index: result.storage_data for of_rank in results for result in of_rank
        }
        metadata.storage_meta = self.storage_meta()
        data = encode(metadata)
        named = {info.relative_path for info in metadata.storage_data.values()}
        try:
            with _commit_lock:
                self._commit(data, named)
        finally:
            self._forget_data_file()

    def _sweep_remains(self) -> None:
        """Make room: remove what earlier saves that failed left, of all ranks, before any rank of
        this save writes."""
        if self._is_coordinator or not self._use_collectives:
            with _commit_lock:
                commit.remove_remains(self.path, self._unfinished_names(), rank=self._own_rank())

    def _own_rank(self) -> int | None:
        """The rank whose files this process may remove; None for all."""
        return None if self._use_collectives else self._rank

    def _unfinished_names(self) -> set[str]:
        here = os.path.realpath(self.path)
        others = tuple(_unfinished)
        return {path.name for path in others if os.path.realpath(path.parent) == here}

    def _commit(self, data: bytes, named: set[str]) -> None:
        if self._data_file is not None and not self._data_file.exists():
            raise FileNotFoundError(
                errno.ENOENT, "removed before its save was committed", str(self._data_file)
            )
        name = self._metadata_name()
        commit.commit_metadata(self.path, name, data, sync=self.sync_files)
        commit.remove_unnamed(
            self.path,
            named | self._unfinished_names(),
            committed=name,
            rank=self._own_rank(),
        )

    def _forget_data_file(self) -> None:
        if self._data_file is not None:
            _unfinished.discard(self._data_file)

    def _metadata_name(self) -> str:
        return commit.metadata_name(None if self._use_collectives else self._rank)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        engine = default_engine() if self._engine is None else self._engine
        name = commit.data_file_name(self._rank, self._save_id)
        self._data_file = self.path / name
        if self._alone:
            _unfinished.add(self._data_file)
        try:
            self._job = job = _C.WriteJob(
                engine.native,
                os.fsencode(self._data_file),
                direct=self.direct,
                sync=self.sync_files,
                preallocate=_expected_size(plan),
            )
            try:
                added = [_add(job, planner, item) for item in plan.items]
                places = job.finish()
            finally:
                job.abandon()
        except BaseException:
            self._forget_data_file()
            # The job removes its file, unless it was through with it. The first error counts.
            with suppress(OSError):
                self._data_file.unlink()
            raise
        self._tell_fallback(job)
        with collector_paused():
            return [
                WriteResult(item.index, place[1], _info(name, raw, place))
                for item, raw, place in zip(plan.items, added, places, strict=True)
            ]

    def _tell_fallback(self, job: _C.WriteJob) -> None:
        reason = job.statistics().fallback_reason
        if not reason:
            return
        device = os.stat(self.path).st_dev
        if device not in _devices_told:
            _devices_told.add(device)
            _logger.warning(
                "%s: the file system refused direct I/O (%s); saves go through the page cache",
                self.path,
                reason,
            )

    def __getstate__(self) -> dict[str, Any]:
        # A writer crosses to DCP's background process as its settings.
        return {**self.__dict__, "_job": None, "_data_file": None}


def _renew_lock() -> None:
    # A fork while another thread held it would leave it locked in the child for ever.
    global _commit_lock
    _commit_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _info(name: str, raw: _Raw, place: tuple[int, int, int, int, int]) -> _StorageInfo:
    offset, length, crc32, payload_offset, payload_length = place
    if not raw.as_planned:
        # A planner changed the tensor on its way and left the plan as it was. The item itself, like
        # any that torch.save writes, tells readers what it is.
        return _StorageInfo(name, offset, length)
    return storage_info(
        name,
        offset,
        length,
        crc32=crc32,
        payload_offset=payload_offset,
        payload_length=payload_length,
        payload_stride=raw.stride,
    )


def _directory(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise ValueError(
            f"{os.fspath(path)!r} is a URL, and DirectWriter writes to file systems. For remote "
            "storage use torch.distributed.checkpoint._fsspec_filesystem.FsspecWriter."
        )
    # Absolute, so that a change of the working directory during a background save does no harm.
    return Path(os.path.abspath(path))


def _expected_size(plan: SavePlan) -> int:
    """Bytes of the file that a plan makes, and a little more; objects are not counted."""
    total = 0
    for item in plan.items:
        data = item.tensor_data
        if data is not None:
            size = data.properties.dtype.itemsize * math.prod(data.chunk.sizes)
            total += size + _ENVELOPE_BYTES_MAX
            if size >= _ALIGNED_PAYLOAD_MIN:
                total += _GAP_BYTES_MAX
    return total


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class _Raw(NamedTuple):
    """A tensor that was given to the engine as its memory."""

    stride: tuple[int, ...] | None
    """Strides of the payload where they are not row-major."""
    as_planned: bool
    """Whether the plan, and so the metadata, has the tensor's true dtype and size."""


_OPAQUE = _Raw(None, True)


def _add(job: _C.WriteJob, planner: SavePlanner, item: WriteItem) -> _Raw:
    """Give an item to the job."""
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        job.add_bytes(data.getbuffer())
        return _OPAQUE
    if type(data) not in _PLAIN_TYPES:
        data = data.detach()
    if type(data) in _PLAIN_TYPES and data.layout is torch.strided:
        shape = data.shape
        layout = envelope_of(data.dtype, shape, data.stride())
        if layout is not None and layout.order is not None:
            data = data.permute(layout.order)
        if layout is not None and (
            job.add_tensor(data, layout.envelope)
            # Gathering strided memory is for the GPU itself to do.
            or (data.is_cuda and job.add_tensor(data.contiguous(), layout.envelope))
        ):
            plan = item.tensor_data
            as_planned = (
                plan is not None
                and plan.properties.dtype == data.dtype
                and plan.chunk.sizes == shape
            )
            return _Raw(layout.stride, as_planned)
    job.add_bytes(_serialize(data))
    return _OPAQUE


def _serialize(tensor: torch.Tensor) -> memoryview:
    """A tensor that is more than its memory, as stock ``FileSystemWriter`` writes it."""
    tensor = tensor.detach().cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getbuffer()
