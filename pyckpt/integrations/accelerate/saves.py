"""The saves of an Accelerator, and the names that Accelerate gives to checkpoints."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyckpt.train.handle import SaveHandle
from pyckpt.train.saver import Saver
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.pruner import prune
from pyckpt.train.store.retention import Retention
from pyckpt.train.sync.ranks import Ranks

__all__ = ["Numbered", "Places", "Saves"]

_logger = logging.getLogger("pyckpt")


class Saves:
    """The saves of one Accelerator, one at a time, each at a path of its own."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._places = Places({})
        self._limits: dict[int, int] = {}  # how many numbered checkpoints to keep, by save
        self._saver = Saver(
            self._places,
            self._ranks,
            _Unfenced(Path()),
            direct="auto",
            engine=None,
            on_commit=self._committed,
        )

    def start(self, path: Path, state: Mapping[str, Any], limit: int | None) -> SaveHandle:
        number = self._saver.started + 1
        self._places.paths = {number: path}
        self._limits = {} if limit is None else {number: limit}
        handle = self._saver.start(number, state, {}, final=False, overwrite=True)
        handle.committed.add_done_callback(self._tell)
        self._saver.wait_staged()  # programs change parameters between steps, too
        return handle

    def _committed(self, handle: SaveHandle) -> None:
        limit = self._limits.get(handle.step)
        if limit is not None and self._ranks.rank == 0:
            number = int(handle.path.name.rpartition("_")[2])
            numbered = Numbered(handle.path.parent)
            prune(numbered, Retention(keep_last=max(1, limit)), committed=(number,))

    def _tell(self, committed: Future[Path]) -> None:
        error = committed.exception()
        if error is not None and self._ranks.rank == 0:
            _logger.error("save_state failed, and the next one will say so: %s", error)

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error of one that failed."""
        self._saver.wait()
        self._saver.raise_failure()

    def close(self) -> None:
        self._saver.wait()
        self._saver.close()
        self._ranks.close()
        self._saver.raise_failure()


class Places(Catalog):
    """Checkpoints at paths that the program chose, by number."""

    def __init__(self, paths: dict[int, Path]) -> None:
        super().__init__(Path())
        self.paths = paths

    def path(self, step: int) -> Path:
        return self.paths[step]

    def steps(self) -> list[int]:
        return sorted(self.paths, reverse=True)


class Numbered(Catalog):
    """Checkpoints under the names that Accelerate numbers."""

    def path(self, step: int) -> Path:
        return self.directory / f"checkpoint_{step}"

    def steps(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        found = [match for name in names if (match := re.fullmatch(r"checkpoint_(\d+)", name))]
        return sorted((int(match[1]) for match in found), reverse=True)


class _Unfenced(Fence):
    """Whoever saves may: the program chose the directory."""

    @contextmanager
    def held(self) -> Iterator[None]:
        yield
