"""Which checkpoints go, and how they go.

``surplus`` decides, and is a function of what it is given. ``remove`` removes in an order that can
be interrupted anywhere: first the metadata gets another name, durably, and from then on nothing
takes the directory for a checkpoint; then the data goes, and the renamed metadata last, so that
what is left behind by an interruption can be told from everything else, and removed later. It goes
by descriptors of directories and follows no links, so that it removes nothing elsewhere.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyckpt.errors import Superseded
from pyckpt.format import commit
from pyckpt.format.flock import trying
from pyckpt.locks import fork_safe_lock
from pyckpt.train.arguments import whole
from pyckpt.train.store.catalog import REMOVED, Catalog, CheckpointInfo

__all__ = ["Protected", "Retention", "prune", "remove", "surplus"]

_logger = logging.getLogger("pyckpt")

Best = tuple[str, int, Literal["min", "max"]]


@dataclass(frozen=True)
class Retention:
    """What to keep. The newest valid checkpoint, final ones and protected ones stay in any case.

    Raises:
        TypeError: an argument is of the wrong type.
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
        if self.keep_last is not None:
            whole("keep_last", self.keep_last, least=0)
        if self.keep_every is not None:
            whole("keep_every", self.keep_every, least=1)
        if self.keep_best is not None:
            best = self.keep_best
            if not isinstance(best, tuple | list) or len(best) != 3 or not isinstance(best[0], str):
                raise TypeError(f"{self.keep_best = } must be (metric, n, 'min' or 'max').")
            whole("the n of keep_best", best[1], least=1)
            if best[2] not in ("min", "max"):
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
    allowed: Callable[[], AbstractContextManager[None]] = nullcontext,
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
        allowed: a block in which a removal may begin; raises `Superseded` where none may.

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

        @contextmanager
        def beginning(step: int = step) -> Iterator[bool]:
            with allowed(), protected.lock:
                # Since the directory was looked through, that may have taken long.
                yield step not in protected and step not in busy

        try:
            if remove(path, beginning=beginning, remains=step in leftover) and step in going:
                removed.append(step)
        except Superseded as error:
            _logger.warning("nothing more is pruned: %s", error)
            break
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


def remove(
    path: Path,
    *,
    beginning: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
    remains: bool = False,
) -> bool:
    """Remove a checkpoint, or go on with a removal that was interrupted.

    Args:
        beginning: a block in which the metadata gets its other name; False says that it is to stay
            after all.
        remains: whether the directory has no metadata; it is left alone if it has.

    Returns:
        False where nothing was done because someone is reading it (``catalog.reading``), because
        it is a link to a directory elsewhere, or because ``beginning`` or ``remains`` said so.

    Raises:
        OSError: something could not be removed; what is left is no valid checkpoint any more,
            unless it was the first step that failed.
    """
    with ExitStack() as opened:
        parent = opened.enter_context(_opened(path.parent))
        try:
            folder = opened.enter_context(_opened(path.name, within=parent))
        except NotADirectoryError:  # a link
            return False
        with beginning() as may:
            if not may or not _invalidate(folder, path, remains=remains):
                return False
            # What comes into the directory from here on is of a save that goes on.
            names = os.listdir(folder)
        for name in names:
            if name != REMOVED:
                _remove(name, folder)
        with suppress(FileNotFoundError):
            os.unlink(REMOVED, dir_fd=folder)
        try:
            os.rmdir(path.name, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
    return True


@contextmanager
def _opened(path: str | Path, *, within: int | None = None) -> Iterator[int]:
    """A descriptor of a directory; of one ``within`` another only if it is no link.

    Raises:
        NotADirectoryError: it is something else.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if within is not None:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags, dir_fd=within)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _invalidate(folder: int, path: Path, *, remains: bool) -> bool:
    """Give the metadata its other name; False where it is to stay."""
    name = commit.metadata_name()
    try:
        # NFS gives exclusive locks to those only who could write.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        return True
    try:
        with trying(descriptor) as mine:
            if remains or not mine:
                return False
            os.rename(name, REMOVED, src_dir_fd=folder, dst_dir_fd=folder)
            # Before any data goes: a power failure must not bring the metadata back without it.
            commit.sync_opened_directory(folder, path)
    finally:
        os.close(descriptor)
    return True


def _remove(name: str, folder: int) -> None:
    """Remove a file, a link, or a directory with all that is in it."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        with _opened(name, within=folder) as inner:
            for entry in os.listdir(inner):
                _remove(entry, inner)
        os.rmdir(name, dir_fd=folder)
