"""An object store, as the destination of a save."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from functools import cached_property

from pyckpt import _C
from pyckpt.dcp.destination import refuse_overwriting, warn_of_collective
from pyckpt.engine import Engine
from pyckpt.errors import PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.remote.objects import Objects, Version
from pyckpt.remote.upload import Upload
from pyckpt.timeline import named

__all__ = ["DataObject", "Store"]

_logger = logging.getLogger("pyckpt")


class DataObject:
    """A `Data` that is an object. It is there when all of it is, and never in part.

    Args:
        objects: those of the checkpoint.
        name: of the object.
    """

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._job: _C.StreamJob | None = None
        self._upload: Upload | None = None

    @property
    def path(self) -> str:
        return self._objects.path(self._name)

    def create(self, engine: Engine, expected: int) -> _C.FillJob:
        self._job = job = _C.StreamJob(engine.native)
        self._upload = Upload(self._objects, self._name, job, expected)
        return job

    def finish(self, check: Callable[[], None]) -> bytes:
        job, upload = self._job, self._upload
        assert job is not None
        assert upload is not None
        places = job.finish()
        check()
        upload.finish()
        return places

    def discard(self) -> BaseException | None:
        if self._job is None or self._upload is None:
            return None
        self._job.abandon()
        self._upload.stop()
        # Nothing counts before `.metadata` names it; the next save sweeps what is left.
        return self._upload.error

    def let_go(self) -> None:
        pass  # no other save sweeps what it had not begun to write


class Store:
    """A `Destination` in an object store.

    ``.metadata`` is written on the condition that it is still what it was when the save began. So
    of several saves into one place that overlap, the first that commits is the one that counts, and
    the others fail. This is why the sweep may follow the commit without asking others: all that was
    there before the commit, and that the new ``.metadata`` does not name, is of saves that can
    commit no more.

    Args:
        url: of the checkpoint.
        rank: of this process.
        each_commits: as for `Destination`.
    """

    identity = None

    def __init__(self, url: str, *, rank: int, each_commits: bool) -> None:
        self.path = url
        self.rank = rank
        self.each_commits = each_commits
        self._seen: Version | None = None
        self._listed: dict[str, int] = {}  # before the commit

    def __str__(self) -> str:
        return self.path

    @cached_property
    def _objects(self) -> Objects:
        return Objects(self.path)

    @property
    def _own_rank(self) -> int | None:
        return self.rank if self.each_commits else None

    @property
    def metadata_name(self) -> str:
        return commit.metadata_name(self._own_rank)

    def prepare(self, *, commits: bool, overwrite: bool, before_sweep: Callable[[], None]) -> None:
        if not commits:
            return
        before_sweep()
        names = self._list()
        if self.metadata_name in names:
            if not overwrite:
                refuse_overwriting(self._objects.path(self.metadata_name))
            self._seen = self._objects.version(self.metadata_name)
        elif commit.lost_metadata(names):
            raise FileExistsError(errno.EEXIST, commit.LOST_METADATA, self.path)
        if self.each_commits and commit.metadata_name() in names:
            warn_of_collective(self.path)
        if self._seen is None:
            self._objects.put(commit.mark_name(self._own_rank), b"")

    def data(self, name: str, *, shared: bool) -> DataObject:
        return DataObject(self._objects, name)

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        self._listed = self._list()
        return {name: self._listed[name] for name in names if name in self._listed}

    def _list(self) -> dict[str, int]:
        # What lies in folders below is not of this checkpoint.
        return {name: size for name, size in self._objects.list().items() if "/" not in name}

    def commit(
        self,
        data: bytes,
        files: set[str],
        *,
        check: Callable[[], None],
        before_rename: Callable[[], None],
    ) -> bool:
        with named("commit", len(data)):
            check()
            before_rename()
            try:
                self._objects.replace(self.metadata_name, data, self._seen)
            except FileExistsError as error:
                raise FileExistsError(
                    errno.EEXIST,
                    "another save was committed there after this one had begun, so this one is "
                    "not; let one job at a time save to one address",
                    self._objects.path(self.metadata_name),
                ) from error
            return self._sweep(files)

    def _sweep(self, files: set[str]) -> bool:
        """Remove what was there before the commit, and is of no checkpoint now. Returns whether it
        is gone; does not raise."""
        try:
            going = {name for name in self._listed if commit.is_data_file(name, self._own_rank)}
            going -= files
            for name in filter(commit.is_metadata, self._listed):
                if going and name != self.metadata_name:
                    going -= self._named_by(name)
            marks = filter(commit.is_mark, self._listed)
            if self.each_commits:
                marks = filter(commit.mark_name(self.rank).__eq__, marks)
            self._objects.delete(going.union(marks))
        except (OSError, PyckptError) as error:
            _logger.warning(
                "%s: what earlier saves left was not removed, or not all of it: %s", self, error
            )
            return False
        return True

    def _named_by(self, name: str) -> set[str]:
        found = self._objects.read(name)
        if found is None:
            return set()
        decoded = metadata_format.decode(found[0], path=self._objects.path(name))
        return set(metadata_format.data_files(decoded))
