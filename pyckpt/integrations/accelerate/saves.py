"""The saves of an Accelerator, and the names that Accelerate gives to checkpoints."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyckpt.errors import RanksLost
from pyckpt.train.handle import SaveHandle
from pyckpt.train.path_saver import PathSaver
from pyckpt.train.restorer import LoadOptions
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.sync.roll_call import RollCall

__all__ = ["Numbered", "Saves", "is_stock"]

_logger = logging.getLogger("pyckpt")

_LATE_SECONDS = 10.0
_numbers = itertools.count()  # the same on all ranks, which make their Accelerators in one order


class Saves:
    """The saves and loads of one Accelerator, one at a time."""

    def __init__(self) -> None:
        self._saver: PathSaver | None = None  # making it is collective
        self._roll_call: RollCall | None = None
        self._lost: RanksLost | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            name = f"accelerate-{next(_numbers)}"
            rank, size = dist.get_rank(), dist.get_world_size()
            self._roll_call = RollCall(name, rank, size, may_be_left=True)

    def assemble(self, method: str, patience: timedelta) -> None:
        """Wait until all processes have called a method, before anything that they do together.

        Raises:
            RanksLost: one has not, after a time, or has called another; or it was so before.
        """
        if self._lost is not None:
            raise self._lost
        if self._roll_call is None:
            return
        try:
            missing = self._roll_call.assemble(
                method,
                late=_LATE_SECONDS,
                limit=patience.total_seconds(),
                tell=lambda ranks: self._warn(method, ranks),
            )
        except RanksLost as error:
            self._lost = error
            raise
        if missing:
            self._lost = RanksLost(
                f"{method} was not called by {_named(missing)} within "
                f"{patience.total_seconds():g} s. All processes have to call it, since each "
                "of them writes its part. If it is under 'if accelerator.is_main_process', take "
                "that away. If a process is only slow, set accelerator.patience to a longer time",
                ranks=tuple(missing),
            )
            raise self._lost

    def _warn(self, method: str, missing: list[int]) -> None:
        waiting = set(range(dist.get_world_size())) - {*missing}
        if dist.get_rank() == min(waiting):  # one of them says it
            text = "%s waits for %s, and all processes have to call it"
            _logger.warning(text, method, _named(missing))

    @property
    def _opened(self) -> PathSaver:
        if self._saver is None:
            self._saver = PathSaver()
        return self._saver

    def start(self, path: Path, state: Mapping[str, Any], limit: int | None) -> SaveHandle:
        """Save a numbered checkpoint, of which ``limit`` stay, or one at any path."""
        saver = self._opened
        handle = saver.save(path, state)
        handle.committed.add_done_callback(_tell)
        if limit is not None and _is_first():
            for surplus in Numbered(path.parent).surplus(path, limit):
                saver.remove(surplus)
        return handle

    def load(self, path: Path, state: Mapping[str, Any], options: LoadOptions) -> None:
        self._opened.load(path, state, options)

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error of one that failed."""
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


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

    def surplus(self, saved: Path, limit: int) -> list[Path]:
        """What need not stay once the checkpoint at ``saved`` is whole: older checkpoints beyond
        ``limit``, those of Accelerate's own format too, and what interruptions left. Directories of
        another content stay."""
        found = []
        valid = 1
        for number in self.steps():
            path = self.path(number)
            if path == saved:
                continue
            state = self.examine(number).state
            if state == "valid" or (state == "foreign" and is_stock(path)):
                valid += 1
                if valid > limit:
                    found.append(path)
            elif state in ("unfinished", "removed") and valid > 1:
                found.append(path)
        return found


def is_stock(path: Path) -> bool:
    """Whether a directory holds a checkpoint of Accelerate's own format."""
    return any(path.glob("random_states_*.pkl"))


def _is_first() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def _tell(committed: Future[Path]) -> None:
    error = committed.exception()
    if error is not None and _is_first():
        _logger.error("save_state failed, and the next one will say so: %s", error)


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"
