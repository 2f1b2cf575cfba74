"""Which checkpoints go, and how they go.

``surplus`` decides, and is a function of what it is given. ``remove`` removes in an order that can
be interrupted anywhere: first the metadata gets another name, durably, and from then on nothing
takes the directory for a checkpoint; then the data goes, and the renamed metadata last, so that
what is left behind by an interruption can be told from everything else, and removed later.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyckpt.format import commit
from pyckpt.locks import fork_safe_lock
from pyckpt.train.catalog import REMOVED, Catalog, CheckpointInfo, lock

__all__ = ["Protected", "Retention", "prune", "remove", "surplus"]

_logger = logging.getLogger("pyckpt")

Best = tuple[str, int, Literal["min", "max"]]


@dataclass(frozen=True)
class Retention:
    """What to keep. The newest valid checkpoint, final ones and protected ones stay in any case.

    Raises:
        ValueError: a number is out of range, or the mode none of the two.
    """

    keep_last: int | None = None
    """How many of the newest; None keeps all, whatever the others say; 0 keeps none once a newer or
    final one is there."""
    keep_every: int | None = None
    """Those whose step is a multiple of this."""
    keep_best: Best | None = None
    """``(metric, n, mode)``: the n of the smallest ("min") or largest ("max") value."""

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 0:
            raise ValueError(f"{self.keep_last = } must be None, or 0 or more.")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"{self.keep_every = } must be None, or 1 or more.")
        if self.keep_best is not None:
            _, count, mode = self.keep_best
            if count < 1:
                raise ValueError(f"{self.keep_best = } must keep 1 or more.")
            if mode not in ("min", "max"):
                raise ValueError(f"{self.keep_best = } must end with 'min' or 'max'.")


class Protected:
    """Steps that are not to be pruned. Any thread may add to them; what was added before its
    removal began stays.

    Attributes:
        lock: held while it is decided that a checkpoint goes. Reentrant, for handlers of signals.
    """

    def __init__(self) -> None:
        self.lock = fork_safe_lock()
        self._counts: dict[int, int] = {}  # how often each step was added

    def add(self, step: int) -> None:
        with self.lock:
            self._counts[step] = self._counts.get(step, 0) + 1

    def discard(self, step: int) -> None:
        """Undo one ``add``."""
        with self.lock:
            self._counts[step] -= 1
            if not self._counts[step]:
                del self._counts[step]

    def __contains__(self, step: int) -> bool:
        return step in self._counts

    def steps(self) -> set[int]:
        with self.lock:
            return set(self._counts)


def surplus(
    checkpoints: Sequence[CheckpointInfo],
    retention: Retention,
    *,
    protected: Collection[int] = (),
) -> list[int]:
    """Steps that need not be kept, oldest first.

    Args:
        checkpoints: the valid ones, in any order, each step once.
        retention: what to keep.
        protected: steps to keep besides.
    """
    if retention.keep_last is None or not checkpoints:
        return []
    keep = {checkpoint.step for checkpoint in checkpoints if checkpoint.final}
    # Final ones do not count among the last ones: those are for going back to.
    newest = sorted((c.step for c in checkpoints if not c.final), reverse=True)
    keep.update(newest[: retention.keep_last])
    keep.add(max(checkpoint.step for checkpoint in checkpoints))
    keep.update(protected)
    if retention.keep_every is not None:
        keep.update(step for step in newest if step % retention.keep_every == 0)
    if retention.keep_best is not None:
        keep.update(_best(checkpoints, retention.keep_best))
    return [step for step in reversed(newest) if step not in keep]


def _best(checkpoints: Sequence[CheckpointInfo], best: Best) -> list[int]:
    metric, count, mode = best
    # Of equal ones the newer. What has no number to compare is not among the best.
    ranked = sorted(
        (checkpoint.metrics[metric] * (1 if mode == "min" else -1), -checkpoint.step)
        for checkpoint in checkpoints
        if not math.isnan(checkpoint.metrics.get(metric, math.nan))
    )
    return [-step for _, step in ranked[:count]]


def prune(
    catalog: Catalog,
    retention: Retention,
    *,
    committed: Collection[int] = (),
    protected: Protected | None = None,
    distrusted: Collection[int] = (),
    busy: Collection[int] = (),
) -> list[int]:
    """Remove what ``retention`` does not keep, and what interruptions left. Never raises.

    Removals that were interrupted are finished. Saves that were interrupted are cleared away where
    they are older than the newest valid checkpoint, since nothing will go on with them; damaged
    and foreign directories are left for people to look at.

    Args:
        committed: steps that stay.
        protected: the same, and may change meanwhile.
        distrusted: steps that do not count as checkpoints, and stay.
        busy: steps that are being written; their directories are not touched. May change, too.

    Returns:
        The steps whose checkpoints were removed.
    """
    removed: list[int] = []
    protected = Protected() if protected is None else protected
    try:
        valid: list[CheckpointInfo] = []
        leftover: list[int] = []
        for step in catalog.steps():
            if step in busy or step in distrusted:
                continue
            if (
                _stays(step, valid, retention)
                and (catalog.path(step) / commit.metadata_name()).exists()
            ):
                continue
            entry = catalog.examine(step)
            if entry.checkpoint is not None:
                valid.append(entry.checkpoint)
            elif entry.state == "removed" or (entry.state == "unfinished" and valid):
                leftover.append(step)
        going = surplus(valid, retention, protected={*committed, *protected.steps()})
    except Exception as error:
        _logger.warning("%s: nothing was pruned: %s", catalog.directory, error)
        return removed
    for step in [*leftover, *going]:
        path = catalog.path(step)

        def rename(step: int = step, path: Path = path) -> bool:
            # Since the directory was looked through, that may have taken long.
            with protected.lock:
                if step in protected or step in busy:
                    return False
                _rename(path)
            return True

        try:
            if step not in busy and remove(path, rename=rename) and step in going:
                removed.append(step)
        except Exception as error:  # training goes on; the next prune tries again
            _logger.warning("%s was not removed, or not all of it: %s", path, error)
    return removed


def _stays(step: int, newer: Sequence[CheckpointInfo], retention: Retention) -> bool:
    """Whether a checkpoint is kept whatever it holds, so that its metadata, of which there may be
    thousands, need not be read."""
    if retention.keep_last is None:
        return bool(newer)
    if retention.keep_every is None or retention.keep_best is not None:
        return False
    enough = sum(not checkpoint.final for checkpoint in newer) >= max(1, retention.keep_last)
    return enough and step % retention.keep_every == 0


def _rename(path: Path) -> bool:
    (path / commit.metadata_name()).rename(path / REMOVED)
    return True


def remove(path: Path, *, rename: Callable[[], bool] | None = None) -> bool:
    """Remove a checkpoint, or go on with a removal that was interrupted.

    Args:
        rename: gives the metadata its other name, or returns False where it is to stay after all.

    Returns:
        False where nothing was done because someone is reading it (``catalog.reading``), because
        it is a link to a directory elsewhere, or because ``rename`` said so.

    Raises:
        OSError: something could not be removed; what is left is no valid checkpoint any more,
            unless it was the first step that failed.
    """
    if path.is_symlink():
        return False
    if not _invalidate(path, rename or (lambda: _rename(path))):
        return False
    for name in os.listdir(path):
        if name != REMOVED:
            _unlink(path / name)
    with suppress(FileNotFoundError):
        os.unlink(path / REMOVED)
    os.rmdir(path)
    return True


def _invalidate(path: Path, rename: Callable[[], bool]) -> bool:
    metadata = path / commit.metadata_name()
    try:
        # NFS gives exclusive locks to those only who could write.
        descriptor = os.open(metadata, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        if not lock(descriptor, fcntl.LOCK_EX) or not rename():
            return False
        # Before any data goes: a power failure must not bring the metadata back without the data.
        commit.sync_directory(path)
    finally:
        os.close(descriptor)
    return True


def _unlink(path: Path) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        shutil.rmtree(path)
