"""A directory, as the destination of a save."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakSet

from pyckpt import _C
from pyckpt.dcp.destination import refuse_overwriting, warn_of_collective
from pyckpt.engine import Engine
from pyckpt.format import commit
from pyckpt.format.claim import Claim, turn
from pyckpt.locks import fork_safe_lock
from pyckpt.speaking import for_node
from pyckpt.timeline import named

__all__ = ["DataFile", "Directory"]

_logger = logging.getLogger("pyckpt")

_devices_told: set[int] = set()  # the log has said that their file systems refuse direct I/O
# Commits of one process take turns, so that a commit, and the sweep after it, never see another one
# half done.
_commit_lock = fork_safe_lock()
# Data files of saves under way, which other saves of this process into the same directory must not
# remove. Saves of several ranks are not in it, since collectives keep these saves apart. Weak: an
# interrupt may end a save at any line, and then nobody says that its file is given up.
_unfinished: WeakSet[DataFile] = WeakSet()
# Claims of this process. Only the rank that commits learns how a save ended. And a program that
# keeps an error keeps the writer that raised it. So claims of other ranks may last until the next
# save.
_claims: WeakSet[Claim] = WeakSet()
_lock = fork_safe_lock()
"""Held while either of these sets changes or is read."""


class DataFile:
    """A `Data` that is a file.

    Args:
        path: of the file.
        directory: that it is in.
        shared: whether other ranks take part in the save. The file of a save without others is
            kept from the sweeps of other saves of this process, until `let_go` or this object's
            end.
    """

    def __init__(self, path: Path, directory: Directory, *, shared: bool) -> None:
        self.path = path
        self._directory = directory
        self._claim: Claim | None = None
        self._job: _C.WriteJob | None = None
        if not shared:
            with _lock:
                _unfinished.add(self)

    def create(self, engine: Engine, expected: int) -> _C.FillJob:
        with self._directory.turn(shared=True):
            self._job = job = _C.WriteJob(
                engine.native,
                os.fsencode(self.path),
                direct=self._directory.direct,
                sync=self._directory.sync,
                preallocate=expected,
            )
            # Before others sweep.
            if not self._directory.is_fenced:
                self._claim = Claim(self.path)
                with _lock:
                    _claims.add(self._claim)
        return job

    def finish(self, check: Callable[[], None]) -> bytes:
        job = self._job
        assert job is not None
        places = job.finish()
        check()
        tell_fallback(self._directory.path, job.statistics().fallback_reason)
        return places

    def discard(self) -> BaseException | None:
        if self._job is not None:
            self._job.abandon()
        self.let_go()
        # The job has removed its file, unless it had finished. An error of removing it again must
        # not hide the first one.
        with suppress(OSError):
            self.path.unlink()
        return None

    def let_go(self) -> None:
        with _lock:
            _unfinished.discard(self)
        if self._claim is not None:
            self._claim.release()


@dataclass(frozen=True)
class Directory:
    """A `Destination` in a file system."""

    path: Path
    rank: int
    each_commits: bool
    sync: bool
    """Whether all files must be durable before the commit."""
    is_fenced: bool
    """Whether a fence keeps other processes from saving there."""
    direct: Literal["auto", "require", "off"]
    """As for `DirectWriter`."""

    def __str__(self) -> str:
        return str(self.path)

    @property
    def metadata_name(self) -> str:
        """The name of the file that makes the save count."""
        return commit.metadata_name(self.rank if self.each_commits else None)

    @property
    def _own_rank(self) -> int | None:
        """The rank whose files this process may remove; None for all."""
        return self.rank if self.each_commits else None

    def turn(self, *, shared: bool = False) -> AbstractContextManager[None]:
        """Keep processes apart that save there. A process that sweeps or commits runs this block
        alone; with ``shared``, several may."""
        # If each rank commits for itself, no rank removes files of another.
        return (
            nullcontext() if self.is_fenced or self.each_commits else turn(self.path, shared=shared)
        )

    @property
    def identity(self) -> int | None:
        return os.stat(self.path).st_ino

    def prepare(self, *, commits: bool, overwrite: bool, before_sweep: Callable[[], None]) -> None:
        commit.make_directory(self.path, sync=self.sync and commits)
        self._release_claims()
        if commits:
            self._sweep_remains(before_sweep)
        metadata = self.path / self.metadata_name
        if self.each_commits and (self.path / commit.metadata_name()).exists():
            warn_of_collective(str(self))
        if not overwrite and metadata.exists():
            refuse_overwriting(str(metadata))

    def data(self, name: str, *, shared: bool) -> DataFile:
        return DataFile(self.path / name, self, shared=shared)

    def _release_claims(self) -> None:
        """Release the files there that earlier saves of this process claimed and never released."""
        here = os.path.realpath(self.path)
        with _lock:
            unfinished = {file.path for file in _unfinished}
            claims = [claim for claim in _claims if claim.path not in unfinished]
        for claim in claims:
            if os.path.realpath(claim.path.parent) == here:
                claim.release()

    def _sweep_remains(self, before: Callable[[], None]) -> None:
        """Make room: remove the files that failed saves left, those of all ranks. Call it before
        any rank of this save writes. It first calls ``before``, which may refuse by raising."""
        with _commit_lock, self.turn():
            before()
            commit.begin_save(
                self.path, self._unfinished_names(), sync=self.sync, rank=self._own_rank
            )

    def commit(
        self,
        data: bytes,
        files: set[str],
        *,
        check: Callable[[], None],
        before_rename: Callable[[], None],
    ) -> bool:
        with _commit_lock, self.turn(), named("commit", len(data)):
            check()
            name = self.metadata_name
            commit.commit_metadata(
                self.path, name, data, sync=self.sync, before_rename=before_rename
            )
            return commit.remove_unnamed(
                self.path,
                files | self._unfinished_names(),
                committed=name,
                rank=self._own_rank,
            )

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        # No cache of a network file system can answer wrongly, because this machine never looked
        # for these names before.
        found = {}
        for name in names:
            with suppress(FileNotFoundError):
                found[name] = os.stat(self.path / name).st_size
        return found

    def _unfinished_names(self) -> set[str]:
        here = os.path.realpath(self.path)
        with _lock:
            others = [file.path for file in _unfinished]
        return {path.name for path in others if os.path.realpath(path.parent) == here}


def tell_fallback(directory: Path, reason: str | None) -> None:
    """Log, once for each device, why writes to it do not bypass the page cache."""
    if not reason:
        return
    device = os.stat(directory).st_dev
    if device not in _devices_told:
        _devices_told.add(device)
        _logger.log(
            for_node(logging.WARNING),
            "%s: the file system refused direct I/O (%s); saves go through the page cache",
            directory,
            reason,
        )
