"""The data files that one rank makes in one save: written, linked to earlier ones, or copied."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from pyckpt import _C
from pyckpt.dcp.destination import Data, Destination
from pyckpt.dcp.directory import Directory
from pyckpt.dcp.writing import WriteProgress
from pyckpt.engine import Engine, default_engine
from pyckpt.format import commit

__all__ = ["OwnFiles"]

_COPY_BYTES = 8 << 20


class OwnFiles:
    """The data files of a rank in one save. They are kept from others' sweeps until ``let_go``.

    Args:
        destination: where to. Links and copies are for directories alone.
        shared: whether other ranks take part in the save.
        engine: the memory and threads to use; None for those that everyone shares.
        progress: is told of each job.
    """

    def __init__(
        self,
        destination: Destination,
        *,
        shared: bool,
        engine: Engine | None,
        progress: WriteProgress,
    ) -> None:
        self._destination = destination
        self._shared = shared
        self._engine = engine
        self._progress = progress
        progress.jobs, progress.bytes_linked = [], 0  # a writer may be used for several saves
        self._written: list[Data] = []
        self.paths: list[Path | str] = []
        """The files that belong to the checkpoint, in the order in which they were made."""

    def write(
        self,
        name: str,
        expected: int,
        add: Callable[[_C.FillJob], None],
        check: Callable[[], None],
    ) -> bytes:
        """Write a file. Returns where its items lie, as the job packs them.

        Args:
            name: of the file.
            expected: about how many bytes it will have.
            add: gives all items to the job.
            check: called when all is written; raises if that is not what was to be saved.
        """
        file = self._destination.data(name, shared=self._shared)
        self._written.append(file)
        self.paths.append(file.path)
        job = file.create(default_engine() if self._engine is None else self._engine, expected)
        self._progress.jobs.append(job)
        add(job)
        return file.finish(check)

    @property
    def _directory(self) -> Directory:
        assert isinstance(self._destination, Directory)
        return self._destination

    def link(self, source: Path) -> None:
        """Have a file of an earlier checkpoint here, too, under its name. It may be here already,
        if the save replaces the checkpoint that has it.

        Raises:
            OSError: the file system does not make this link, or the file is not there.
        """
        target = self._directory.path / source.name
        try:
            os.link(source, target)
        except FileExistsError:
            if not os.path.samefile(source, target):
                raise
        self.paths.append(target)

    def copy(self, source: Path) -> None:
        """Have a copy of a file here, under its name.

        Raises:
            OSError: it cannot be read, or written.
        """
        target = self._directory.path / source.name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            open(source, "rb", buffering=0) as reader,
            open(os.open(target, flags, 0o666), "wb", buffering=0) as writer,
        ):
            try:
                self._copy(reader, writer, str(source))
            except BaseException:
                # The name may be another job's by now, which goes on where this one stands still.
                with suppress(OSError):
                    if os.path.samestat(os.fstat(writer.fileno()), os.lstat(target)):
                        target.unlink()
                raise
        self.paths.append(target)

    def _copy(self, reader: FileIO, writer: FileIO, source: str) -> None:
        size = os.fstat(reader.fileno()).st_size
        at = 0
        while at < size:
            copied = os.sendfile(writer.fileno(), reader.fileno(), at, _COPY_BYTES)
            if not copied:
                raise OSError(errno.EIO, f"it ends at {at}, and had {size} bytes", source)
            at += copied
        if self._directory.sync:
            os.fsync(writer.fileno())

    def sync_names(self) -> None:
        """Make the names of links and copies durable. A file that is written later does it, too."""
        if self._directory.sync:
            commit.sync_directory(self._directory.path)

    def remove(self) -> BaseException | None:
        """Remove all that was written, since the save has failed. Does not raise.

        Links and copies stay until `commit.remove_failed`, which the fence precedes and which
        looks at the metadata: another job may have committed a checkpoint with the same names.

        Returns:
            What made a job fail, if the job's own error does not say it.
        """
        cause = None
        for file in self._written:
            cause = file.discard() or cause
        self.paths = []
        return cause

    def let_go(self) -> None:
        """Call it when the save was committed, or has failed. Idempotent."""
        for file in self._written:
            file.let_go()
