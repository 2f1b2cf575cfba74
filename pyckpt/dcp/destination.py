"""Where a save goes: what a directory and an object store do, each in its way."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn, Protocol

from pyckpt import _C
from pyckpt.engine import Engine
from pyckpt.speaking import for_all

__all__ = ["Data", "Destination", "refuse_overwriting", "warn_of_collective"]

_logger = logging.getLogger("pyckpt")


class Data(Protocol):
    """The data file that a rank writes in one save."""

    @property
    def path(self) -> Path | str:
        """Its path, or its address."""

    def create(self, engine: Engine, expected: int) -> _C.FillJob:
        """Begin it. The job that is returned takes its items.

        Args:
            engine: the memory and threads to use.
            expected: about how many bytes there will be.
        """

    def finish(self, check: Callable[[], None]) -> bytes:
        """Wait until all of it is there, and durable.

        Args:
            check: called when all items were read; raises if they were not what is to be saved.

        Returns:
            Where the items lie in it, as the job packs them.
        """

    def discard(self) -> BaseException | None:
        """Stop, and leave nothing of it. Call it if the save fails before `finish` has returned.

        Returns:
            What made the job fail, if the job's own error does not say it.
        """

    def let_go(self) -> None:
        """Call it when the save was committed, or has failed. Idempotent."""


class Destination(Protocol):
    """Where a save goes, and how one rank saves there. For one save."""

    @property
    def path(self) -> Path | str:
        """Its path, or its address."""

    @property
    def rank(self) -> int: ...

    @property
    def each_commits(self) -> bool:
        """Whether each rank commits its own file, for itself alone."""

    @property
    def metadata_name(self) -> str:
        """The name of the file that makes the save count."""

    @property
    def identity(self) -> int | None:
        """What is the same on ranks that see one directory at different paths; None if paths are
        the same for all."""

    def __str__(self) -> str:
        """The path."""

    def prepare(self, *, commits: bool, overwrite: bool, before_sweep: Callable[[], None]) -> None:
        """Make ready for the save, before any rank of it writes.

        Args:
            commits: whether this rank commits.
            overwrite: whether a checkpoint that is there may be replaced.
            before_sweep: called before anything is removed. It may refuse by raising.

        Raises:
            FileExistsError: there is a checkpoint that may not be replaced, or one that has lost
                its ``.metadata``.
        """

    def data(self, name: str, *, shared: bool) -> Data:
        """The file that this rank writes.

        Args:
            name: of the file. No earlier save used it.
            shared: whether other ranks take part in the save.
        """

    def sizes(self, names: Collection[str]) -> dict[str, int]:
        """The bytes of those of the files that are there."""

    def commit(
        self,
        data: bytes,
        files: set[str],
        *,
        check: Callable[[], None],
        before_rename: Callable[[], None],
    ) -> bool:
        """Make the save count, and remove the files that no longer do. Returns whether these are
        gone.

        Args:
            data: the bytes of the ``.metadata`` file.
            files: the names of the data files that ``data`` names.
            check: called while no other save of this process commits or sweeps there. It raises if
                ``data`` is wrong about the files.
            before_rename: called right before what makes the save count.
        """


def refuse_overwriting(metadata: str) -> NoReturn:
    """Raise, since there is a checkpoint, which may not be replaced."""
    raise FileExistsError(
        errno.EEXIST, "a checkpoint is there already, and overwrite=False", metadata
    )


def warn_of_collective(where: str) -> None:
    """Say that what a rank saves for itself is not what DCP will load."""
    _logger.log(
        for_all(logging.WARNING),
        "%s: a checkpoint that was saved with collectives is there, and DCP loads that one "
        "rather than what each rank now saves for itself",
        where,
    )
