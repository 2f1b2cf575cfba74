"""A mirror in a directory: a shared file system, or what is mounted like one."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pyckpt.errors import PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.store.catalog import Catalog, CheckpointInfo
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.names import DEFAULT, Naming
from pyckpt.train.store.pruner import prune, sweep
from pyckpt.train.store.retention import Retention
from pyckpt.train.tiers.tier import PIECE_BYTES, REUSE_STEPS

__all__ = ["MountedTier"]


class MountedTier:
    """A `Tier` in a directory. It is like the directory of a Checkpointer: the same names, the same
    commit, the same fence between jobs.

    Args:
        directory: of the mirror.
        root: the directory that it mirrors.
        naming: the names of the checkpoints in both.
    """

    def __init__(self, directory: Path, root: Path, naming: Naming = DEFAULT) -> None:
        self._directory = directory
        self._root = root
        self._catalog = Catalog(directory, naming=naming)
        self._fence = Fence(directory)
        self._is_swept = False

    def __str__(self) -> str:
        return str(self._directory)

    def place(self, step: int) -> Path:
        return self._catalog.path(step)

    def join(self, token: str) -> None:
        self._fence = Fence(self._directory, token=token)

    def begin(self) -> None:
        with self._fence.held():
            pass

    def holder(self) -> str | None:
        return self._fence.holder()

    def upload(self, step: int, file: Path, passing: Callable[[int], None]) -> None:
        directory = self._begun(step)
        target = directory / file.name
        # The name of a data file, so that whoever sweeps removes what a kill leaves.
        temporary = directory / f"{file.stem}.{uuid.uuid4().hex}.distcp"
        try:
            _copy(file, temporary, passing)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        commit.sync_directory(directory)

    def _begun(self, step: int) -> Path:
        """The directory of a step, in which data files without metadata are those of an upload."""
        directory = self._catalog.path(step)
        commit.make_directory(directory, sync=True)
        if not (directory / commit.metadata_name()).exists():
            if commit.lost_metadata(os.listdir(directory)):
                raise FileExistsError(errno.EEXIST, commit.LOST_METADATA, str(directory))
            commit.make_mark(directory, sync=True)
        return directory

    def reuse(self, step: int, name: str, size: int) -> bool:
        others = [one for one in self._catalog.steps() if one != step]
        for other in others[:REUSE_STEPS]:
            source = self._catalog.path(other) / name
            with suppress(OSError):  # it is uploaded again
                if source.stat().st_size == size:
                    directory = self._begun(step)
                    os.link(source, directory / name)
                    commit.sync_directory(directory)
                    return True
        return False

    def sizes(self, step: int) -> dict[str, int]:
        try:
            with os.scandir(self._catalog.path(step)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except FileNotFoundError:
            return {}

    def commit(self, step: int, metadata: bytes, files: Collection[str]) -> None:
        directory = self._catalog.path(step)
        name = commit.metadata_name()
        with self._fence.held():
            try:
                replaced = set(metadata_format.data_files(metadata_format.read(directory / name)))
            except (FileNotFoundError, PyckptError):
                replaced = set()
            commit.commit_metadata(directory, name, metadata, sync=True)
            commit.remove_failed(directory, replaced - set(files), sync=True)
            (directory / commit.mark_name()).unlink(missing_ok=True)

    def newest(
        self, limit: int | None = None, without: Collection[int] = ()
    ) -> CheckpointInfo | None:
        found = self._catalog.newest_first(limit)
        return next((self._mirrored(one) for one in found if one.step not in without), None)

    def damaged(self) -> list[int]:
        entries = self._catalog.entries()
        return [one.step for one in entries if one.state == "damaged" and one.step is not None]

    def checkpoints(self) -> list[CheckpointInfo]:
        found = (one.checkpoint for one in self._catalog.entries())
        return [self._mirrored(one) for one in found if one is not None]

    def _mirrored(self, found: CheckpointInfo) -> CheckpointInfo:
        path = self._root / found.path.name
        return replace(found, path=path, mirror=str(found.path), is_local=False)

    def prune(
        self,
        retention: Retention,
        *,
        committed: int,
        staying: Collection[int],
        passed: Callable[[int], bool],
    ) -> list[int]:
        if not self._is_swept:
            self._is_swept = True
            sweep(self._catalog, busy=staying, allowed=self._fence.held)
        return prune(
            self._catalog,
            retention,
            committed=(committed,),
            distrusted=[step for step in self._catalog.steps() if passed(step)],
            busy=staying,
            allowed=self._fence.held,
        )


def _copy(source: Path, target: Path, passing: Callable[[int], None]) -> None:
    """Copy a file, durably, without filling the page cache with it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        open(source, "rb", buffering=0) as reader,
        open(os.open(target, flags, 0o666), "wb", buffering=0) as writer,
    ):
        size = os.fstat(reader.fileno()).st_size
        at = 0
        while at < size:
            count = min(PIECE_BYTES, size - at)
            passing(count)
            copied = os.sendfile(writer.fileno(), reader.fileno(), at, count)
            if not copied:
                why = f"{size} bytes were expected, and it ends at {at}"
                raise OSError(errno.EIO, why, str(source))
            at += copied
        os.fsync(writer.fileno())
        for file in (reader, writer):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
