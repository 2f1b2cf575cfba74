"""DirectReader: reads DCP checkpoints with the engine, ours and stock's."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pyckpt.activity import Amount
from pyckpt.dcp.folder import Folder, LocalFolder, read_metadata
from pyckpt.dcp.parts import Seen, refuse_mixture
from pyckpt.dcp.read_items import check_part
from pyckpt.dcp.reading import Load, save_id_of
from pyckpt.engine import Engine, default_engine, engine_of
from pyckpt.format import commit
from pyckpt.private import ExtensionRegistry
from pyckpt.remote.address import place_of
from pyckpt.remote.folder import RemoteFolder
from pyckpt.statistics import ReadStatistics
from pyckpt.timeline import named

__all__ = ["DirectReader"]


class DirectReader(StorageReader):
    """A ``StorageReader`` that reads at the speed of the disk, and checks what it reads.

    Reads what ``DirectWriter`` wrote and what stock ``FileSystemWriter`` wrote, equally fast::

        dcp.load(state_dict, storage_reader=pyckpt.DirectReader("checkpoints/step-100"))

    A rank reads only the bytes that it needs, and none twice, whatever the shards in the file. The
    metadata is decoded without running code. The planner decodes objects, and stock's planner runs
    their code: use ``pyckpt.load`` or ``pyckpt.LoadPlanner`` if you do not trust the file.

    Args:
        path: directory of the checkpoint, in which ``~`` is expanded, or its URL in an object store
            (``s3://bucket/run/step-00000100``), which needs ``pip install "pyckpt[cloud]"``.
        verify: ``"items"`` checks each item that is read whole against its CRC-32. Items that are
            read in part cannot be checked; ``unverified`` lists them. ``"none"`` checks nothing.
        direct: as for ``DirectWriter``.
        engine: the memory and threads to use; by default the engine that everyone shares.
        _extension_registry: the extensions of DCP that files may be transformed with (compressed,
            say); by default the ones that DCP brings. It has the name that stock's
            ``FileSystemReader`` gives it.

    Raises:
        TypeError: ``path`` is no path, or ``engine`` no engine.
        ValueError: ``path`` is empty, or ``verify`` or ``direct`` is none of the values above.

    Loading raises these, wrapped by DCP in ``CheckpointException`` (``pyckpt.load`` unwraps it):
    ``CorruptCheckpoint`` if bytes differ from those that were saved, or, before anything is loaded,
    if a file has another size than the metadata says; ``CheckpointReplaced`` if the checkpoint was
    overwritten meanwhile; ``UnsafeCheckpoint``; ``OSError``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Literal["items", "none"] = "items",
        direct: Literal["auto", "require", "off"] = "auto",
        engine: Engine | None = None,
        _extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        if verify not in ("items", "none"):
            raise ValueError(f"{verify = } must be 'items' or 'none'.")
        if direct not in ("auto", "require", "off"):
            raise ValueError(f"{direct = } must be 'auto', 'require' or 'off'.")
        self.path = place_of(path)
        self.verify = verify
        self.direct = direct
        self._engine = engine_of(engine)
        self.extension_registry = _extension_registry
        self._load_id = str(uuid.uuid4())
        self._metadata: Metadata | None = None
        self._is_own = False  # whether the metadata is of this rank alone
        self._loads: list[Load] = []  # a program may have one plan read in parts

    def __repr__(self) -> str:
        what = str(self.statistics) if self._loads else "nothing read yet"
        return f"<{type(self).__name__} of {self.path}: {what}>"

    @property
    def checkpoint_id(self) -> Path | str:
        """Directory of the checkpoint, or its URL."""
        return self.path

    @property
    def _folder(self) -> Folder:
        if isinstance(self.path, str):
            return RemoteFolder(self.path)
        engine = default_engine() if self._engine is None else self._engine
        return LocalFolder(self.path, engine, direct=self.direct)

    @property
    def load_id(self) -> str:
        """DCP's name of this load. Each ``reset`` makes another."""
        return self._load_id

    @property
    def statistics(self) -> ReadStatistics:
        """Counts and times of this rank's part of the load that is under way, or else of the last
        one. May be read from any thread."""
        return ReadStatistics.of([job for load in self._loads for job in load.jobs])

    def _amount(self) -> Amount:
        """How far this rank's part of the load is. May be called from any thread."""
        loads = self._loads
        total = sum(load.expected_bytes for load in loads)
        done = sum(job.statistics().bytes_read for load in loads for job in load.jobs)
        return Amount(min(done, total), total)

    @property
    def unverified(self) -> list[str]:
        """Keys that the last load read and could not check, sorted."""
        return sorted({key for load in self._loads for key in load.unverified})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory that can be read, or a URL."""
        try:
            path = place_of(checkpoint_id)
        except ValueError:
            return False
        return isinstance(path, str) or path.is_dir()

    @property
    def _leaves_items(self) -> bool:
        # A class made from this one may look at them.
        return type(self) is DirectReader

    # The calls of a load, in their order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = place_of(checkpoint_id)
        self._load_id = str(uuid.uuid4())
        self._metadata = None
        self._loads = []
        self._is_own = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = commit.metadata_name(kwargs.get("rank"))
        try:
            with named("read metadata"):
                metadata = read_metadata(self._folder, name)
        except (FileNotFoundError, NotADirectoryError):
            if isinstance(self.path, Path):
                raise commit.no_checkpoint(self.path) from None
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        self._is_own = kwargs.get("rank") is not None
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._metadata = metadata
        self._loads = []

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._metadata is not None
        if self._is_own:
            return plan  # each rank saved for itself: there is no common save to compare
        return replace(plan, storage_data=Seen(os.fspath(self.path), save_id_of(self._metadata)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        refuse_mixture([plan.storage_data for plan in plans])
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        if self._is_own:
            check_part(self._metadata, plan.items, planner)
        load = Load(
            self._folder,
            self._metadata,
            planner,
            verify=self.verify,
            extension_registry=self.extension_registry,
        )
        self._loads = [*self._loads, load]  # a new list: another thread may be at the old one
        with named("read"):
            load.run(plan.items)
        future: Future[None] = Future()
        future.set_result(None)
        return future
