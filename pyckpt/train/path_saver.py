"""`PathSaver`: saves in the background for programs that name and remove checkpoints themselves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyckpt.dcp.report import LoadReport
from pyckpt.engine import Engine, engine_of
from pyckpt.errors import PyckptError
from pyckpt.format import commit
from pyckpt.locks import fork_safe_lock
from pyckpt.train.arguments import directory_of, state_of
from pyckpt.train.handle import SaveHandle
from pyckpt.train.restorer import LoadOptions, Restorer
from pyckpt.train.saver import Saver
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.pieces import Direct
from pyckpt.train.store.removal import remove
from pyckpt.train.sync.ranks import Ranks

__all__ = ["PathSaver", "is_checkpoint"]

_logger = logging.getLogger("pyckpt")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether there is a committed checkpoint in a directory."""
    return (Path(path) / commit.metadata_name()).is_file()


class PathSaver:
    """Saves states in the background, one at a time, each under a path of its own, and loads them.

    Frameworks name their checkpoints, and decide which to remove. They have no say in when a save
    is over, so this class defers a removal until the save before it is committed: the removed
    checkpoint may be the last valid one until then. If that save fails, the removal waits for the
    next one that is committed.

    All ranks make one, and make the same calls, except of ``remove``.

    Args:
        process_group, timeout, direct, engine: as for `Checkpointer`.
    """

    def __init__(
        self,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        direct: Direct = "auto",
        engine: Engine | None = None,
    ) -> None:
        self._direct: Direct = direct
        self._engine = engine_of(engine)
        self._ranks = Ranks(process_group, timeout)
        self._paths = _Paths()
        self._saver = Saver(
            self._paths,
            self._ranks,
            _NoFence(),
            direct=direct,
            engine=engine,
            on_commit=lambda handle: self._remove_doomed(),
        )
        self._doomed: dict[Path, Callable[[], object]] = {}
        self._lock = fork_safe_lock()

    def save(
        self, path: str | os.PathLike[str], state: Mapping[str, Any], *, step: int = 0
    ) -> SaveHandle:
        """Save now, in the background. The call first waits for a save that is under way. A
        checkpoint in the directory is replaced, and can be loaded until the new one is committed.

        When the call returns, the program may change the state: what it does next waits until all
        is copied, on a GPU the stream, on a CPU the call.

        Args:
            path: the checkpoint's directory, the same on all ranks.
            state: as for `Checkpointer.save`.
            step: a number to note in the checkpoint.

        Raises:
            OSError, PyckptError: the save before this one failed, and its error was not raised
                before. This one was not made.
        """
        self.wait()
        self._ranks.check()
        self._paths.now = directory_of(path, "path")
        with self._lock:
            self._doomed.pop(self._paths.now, None)
        handle = self._saver.start(step, state_of(state), {}, final=False, overwrite=True)
        # Frameworks change parameters between steps, too: averaged weights come and go.
        self._saver.wait_staged()
        return handle

    def load(
        self, path: str | os.PathLike[str], state: Mapping[str, Any], options: LoadOptions
    ) -> LoadReport | None:
        """Load a checkpoint into a state, in place. All ranks call it.

        Raises:
            Exception: as `Checkpointer.restore` with a ``step``.
        """
        self.wait()
        directory = directory_of(path, "path")
        restorer = Restorer(
            Catalog(directory.parent), self._ranks, direct=self._direct, engine=self._engine
        )
        restorer.load(directory, state, options)
        return restorer.report

    def remove(
        self, path: str | os.PathLike[str], *, by: Callable[[], object] | None = None
    ) -> None:
        """Remove a checkpoint once the last save is committed. Call it on one rank.

        Args:
            path: the checkpoint.
            by: what removes it, if it is not one of pyckpt's; returns False if it did not.
        """
        path = directory_of(path, "path")
        with self._lock:
            self._doomed[path] = by or (lambda: remove(path))
        if not self._saver.busy:
            self._remove_doomed()

    @property
    def busy(self) -> bool:
        """Whether a save is under way, as far as this rank knows."""
        return self._saver.busy

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        self._saver.wait()
        self._saver.raise_failure()

    def close(self) -> None:
        """Wait for the save that is under way, and end the thread. Raises as ``wait``."""
        self._end()
        self._ranks.close()
        self._saver.raise_failure()

    def abandon(self) -> None:
        """End the thread after an error, without waiting for other ranks, which may not come."""
        self._end()
        if (failure := self._saver.untold()) is not None and self._ranks.rank == 0:
            _logger.error("besides, a save failed: %s", failure)

    def _end(self) -> None:
        self._saver.wait()
        self._remove_doomed()
        if self._doomed:
            names = ", ".join(map(str, self._doomed))
            _logger.warning("not removed, since the save after it failed: %s", names)
        self._saver.close()

    def _remove_doomed(self) -> None:
        ended, failed = self._saver.counts()
        if ended and ended == failed:
            return
        with self._lock:
            doomed, self._doomed = self._doomed, {}
        for path, by in doomed.items():
            try:
                if by() is False:
                    _logger.warning("not removed, since it is a link or being read: %s", path)
            except FileNotFoundError:
                pass
            except (OSError, PyckptError) as error:
                _logger.error("cannot remove %s: %s", path, error)


class _Paths:
    """The path of the save that is started next, whatever its step."""

    def __init__(self) -> None:
        self.now = Path()

    def path(self, step: int) -> Path:
        return self.now


class _NoFence:
    """Jobs that save under names of their own may share a directory."""

    @contextmanager
    def held(self) -> Iterator[None]:
        yield
