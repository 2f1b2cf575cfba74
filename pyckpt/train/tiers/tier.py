"""What a mirror must be able to do, whatever holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from pyckpt.errors import PyckptError
from pyckpt.locks import fork_safe_lock
from pyckpt.train.store.catalog import CheckpointInfo
from pyckpt.train.store.retention import Retention

__all__ = ["PIECE_BYTES", "REUSE_STEPS", "Stopped", "Throttle", "Tier"]

PIECE_BYTES = 8 << 20
"""An upload reads so much at a time; with few uploads at a time this bounds their memory."""

REUSE_STEPS = 8
"""In so many of the newest checkpoints there a tier looks for a file that it may use again."""


class Stopped(PyckptError):
    """An upload was given up, because its result is not wanted any more."""


class Throttle:
    """Lets bytes pass at a bounded rate. Any thread may use it.

    Args:
        bytes_per_second: the rate; None for no bound.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = fork_safe_lock()
        self._free_at = 0.0

    def pass_(self, count: int, wait: Callable[[float], bool]) -> None:
        """Wait until ``count`` more bytes may go.

        Args:
            wait: sleeps for some seconds; returns whether to give up instead.

        Raises:
            Stopped: ``wait`` said so.
        """
        delay = 0.0
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                delay = max(0.0, self._free_at - now)
                self._free_at = max(self._free_at, now) + count / self._rate
        if wait(delay):
            raise Stopped("the upload was given up")


class Tier(Protocol):
    """Checkpoints somewhere else, under the names that they have in the Checkpointer's directory.

    Any thread may call the methods. All raise ``OSError``.
    """

    def __str__(self) -> str:
        """Its address."""

    def place(self, step: int) -> Path | str:
        """Where a step's checkpoint is, or would be: what ``pyckpt.load`` takes."""

    def join(self, token: str) -> None:
        """Take the token by which the ranks of this job know each other. Call it before `begin`."""

    def begin(self) -> None:
        """Have this job be the one that writes there. The first time, end the right of others.

        Raises:
            Superseded: another job has begun to write there since.
        """

    def holder(self) -> str | None:
        """The token of the job that was the last to begin; None if none has."""

    def upload(self, step: int, file: Path, passing: Callable[[int], None]) -> None:
        """Copy a data file there. Until all is copied, it has no such name there.

        Args:
            passing: called with a number of bytes, before these are copied. It may raise.
        """

    def reuse(self, step: int, name: str, size: int) -> bool:
        """Have a data file there that another checkpoint there has, without an upload.

        Args:
            step: of the checkpoint that needs it.
            name, size: of the file. A name stands for the same bytes in all checkpoints.

        Returns:
            Whether it could; False if no other has it, or what is there makes no copies of it.
        """

    def sizes(self, step: int) -> dict[str, int]:
        """Names and bytes of what is there of a step; none if nothing is."""

    def commit(self, step: int, metadata: bytes, files: Collection[str]) -> None:
        """Make a step count, and remove the data files of the checkpoint that it replaces. Other
        data files may be those of its next save.

        Args:
            metadata: the bytes of its ``.metadata``.
            files: the names of the data files that it names.

        Raises:
            Superseded: another job has begun to write there.
        """

    def newest(
        self, limit: int | None = None, without: Collection[int] = ()
    ) -> CheckpointInfo | None:
        """The newest valid checkpoint there, of those up to step ``limit``.

        Args:
            without: steps to pass over.
        """

    def damaged(self) -> list[int]:
        """The steps that were committed there, and are not valid."""

    def checkpoints(self) -> list[CheckpointInfo]:
        """The valid checkpoints there, oldest first."""

    def prune(
        self,
        retention: Retention,
        *,
        committed: int,
        staying: Collection[int],
        passed: Callable[[int], bool],
    ) -> list[int]:
        """Remove the checkpoints that need not be kept, and what interrupted uploads left.

        Args:
            committed: the step that was just committed. It stays, even if there are newer ones, of
                an earlier run, say.
            staying: steps that stay and are not counted: they are not there yet, or not all of
                them, or the program wants them kept. May change.
            passed: whether the checkpoint of a step is not counted, and stays.

        Returns:
            The steps whose checkpoints were removed.
        """
