"""Removes the checkpoints that are not to be kept, in a thread beside training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from pyckpt.errors import Superseded
from pyckpt.format import commit
from pyckpt.locks import fork_safe_lock
from pyckpt.train.store.catalog import Catalog, CheckpointInfo
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.store.part import pending
from pyckpt.train.store.removal import remove
from pyckpt.train.store.retention import Retention, stays_unread, surplus

__all__ = ["Protected", "Protection", "Pruner", "prune", "sweep"]

_logger = logging.getLogger("pyckpt")


class Protected:
    """Steps that are not to be pruned. Any thread may add steps. A step that was added before its
    removal began stays.

    Attributes:
        lock: held while a removal is decided. Reentrant, for signal handlers.
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


class Protection:
    """Keeps a checkpoint from being pruned, until ``release`` or the end of a ``with`` block.

    Made by ``Checkpointer.protect``.
    """

    def __init__(self, protected: Protected, step: int) -> None:
        self._protected = protected
        self._step = step
        self._held = True
        protected.add(step)

    def release(self) -> None:
        """End the protection. Idempotent."""
        if self.__dict__.pop("_held", False):  # so one thread alone gets it
            self._protected.discard(self._step)

    def __enter__(self) -> Protection:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Pruner:
    """Removes, in a thread and after each commit, the checkpoints that are not to be kept. One
    thread prunes at a time.

    If training goes on from an older checkpoint, or begins anew, newer ones are *passed*: they are
    neither counted nor removed until their step is saved again.

    Args:
        catalog: of the checkpoints.
        retention: which ones to keep.
        allowed: a block in which a removal may begin; raises `Superseded` if none may.
        busy: steps that are being written; may change.
        distrusted: steps whose checkpoints proved corrupt; they are not counted, and stay. May
            change.
        on_removed: called with the step and the path of each checkpoint that was removed.
        on_newer: called with the first step that is saved and newer steps, if training begins anew
            beside these.
        settles: whether the job calls `settled`; if so, it sweeps no earlier.

    Attributes:
        protected: steps that the program wants kept.
        removed: how many checkpoints were removed.
    """

    def __init__(
        self,
        catalog: Catalog,
        retention: Retention,
        *,
        allowed: Callable[[], AbstractContextManager[None]],
        busy: Collection[int],
        distrusted: Collection[int],
        on_removed: Callable[[int, Path], None] = lambda step, path: None,
        on_newer: Callable[[int, Collection[int]], None] = lambda step, newer: None,
        settles: bool = False,
    ) -> None:
        self._catalog = catalog
        self._retention = retention
        self._allowed = allowed
        self._busy = busy
        self._distrusted = distrusted
        self._on_removed = on_removed
        self._on_newer = on_newer
        self._settles = settles
        self._owes_sweep = False
        self._passed: set[int] = set()
        self._own: set[int] = set()  # saved since training began, or went back
        self._restored: int | None = None
        self._is_anew = False  # whether `_restored` is the first step that is saved, not restored
        self._has_begun = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pyckpt-prune")
        self.protected = Protected()
        self.removed = 0

    def committed(self, step: int) -> None:
        """A step was saved: prune, keeping it."""
        self._passed.discard(step)
        self._own.add(step)
        with suppress(RuntimeError):  # the interpreter is ending; the next run prunes
            self._thread.submit(self._prune, step)

    def again(self) -> None:
        """A checkpoint is no longer protected: prune."""
        with suppress(RuntimeError):  # this object is closed, or the interpreter is ending
            self._thread.submit(self._prune)

    def _prune(self, *committed: int) -> None:
        removed = prune(
            self._catalog,
            self._retention,
            committed=committed,
            protected=self.protected,
            distrusted={*self._distrusted, *self._passed},
            busy=self._busy,
            allowed=self._allowed,
        )
        self.removed += len(removed)
        for step in removed:
            self._on_removed(step, self._catalog.path(step))

    def restored(self, step: int) -> None:
        """Training goes on from a step."""
        self._restored, self._is_anew = step, False
        self._passed = self._newer_than(step)
        self._own.clear()

    def begins(self, step: int) -> None:
        """Training has restored nothing, and this step is the first that it saves. Checkpoints of
        later steps are of an earlier run: they are passed, as if training had gone back."""
        self._restored, self._is_anew = step, True
        if self._has_begun:
            self._pass_newer()

    def begun(self) -> None:
        """This job has begun to save, and from now on no other job does: remove what earlier ones
        left beside their checkpoints. If another job has saved since this one restored, the log
        says so."""
        self._owes_sweep = self._has_begun = True
        if not self._settles:
            self.settled()
        self._pass_newer()

    def _pass_newer(self) -> None:
        if self._restored is None:
            return
        late = self._newer_than(self._restored) - self._passed - self._own - {*self._distrusted}
        if self._is_anew:
            self._on_newer(self._restored, late)
        for step in () if self._is_anew else sorted(late):
            _logger.warning(
                "another job saved %s after this one had restored step %d; the next restore will "
                "find it first, unless its step is saved again, or it is moved away",
                self._catalog.path(step),
                self._restored,
            )
        self._passed |= late

    def settled(self) -> None:
        """What an earlier job left half committed is committed or given up: sweep, if this job has
        not."""
        if self._owes_sweep:
            self._owes_sweep = False
            with suppress(RuntimeError):  # the interpreter is ending
                self._thread.submit(sweep, self._catalog, busy=self._busy, allowed=self._allowed)

    def _newer_than(self, step: int) -> set[int]:
        try:
            newer = [found for found in self._catalog.steps() if found > step]
            return {found for found in newer if self._catalog.examine(found).checkpoint is not None}
        except OSError as error:  # do not raise: the other ranks have finished restoring
            _logger.warning("cannot tell what is newer than step %d: %s", step, error)
            return set()

    def wait(self) -> None:
        """Wait for the prunes that were begun."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Wait for the prunes that were begun; begin no more."""
        self._thread.shutdown()


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
    """Remove the checkpoints that ``retention`` does not keep, and remains of interruptions. Never
    raises.

    Interrupted removals are finished. Interrupted saves are removed if they are older than the
    newest valid checkpoint, since no job will continue them. Damaged and foreign directories stay,
    so that a person can examine them. Links stay, and are not counted; so do checkpoints in the
    directory that they lead to.

    Args:
        committed: steps that stay.
        protected: other steps that stay. May change meanwhile.
        distrusted: steps that are not counted as checkpoints, and stay.
        busy: steps that are being written; their directories are not touched. May change meanwhile.
        allowed: a block in which a removal may begin; raises `Superseded` if none may.

    Returns:
        The steps whose checkpoints were removed.
    """
    removed: list[int] = []
    protected = Protected() if protected is None else protected
    try:
        prepared = pending(catalog.directory / FOLDER)
        valid: list[CheckpointInfo] = []
        leftover: list[int] = []
        links = catalog.links()
        for step in catalog.steps():
            name = catalog.path(step).name
            if step in busy or step in distrusted or name in prepared or name in links:
                continue
            if (
                stays_unread(step, valid, retention)
                and (catalog.path(step) / commit.metadata_name()).exists()
            ):
                continue
            entry = catalog.examine(step)
            if entry.checkpoint is not None:
                valid.append(entry.checkpoint)
            elif entry.state == "removed" or (entry.state == "unfinished" and valid):
                leftover.append(step)
        linked = {step for step in links.values() if step is not None}
        going = surplus(valid, retention, protected={*committed, *protected.steps(), *linked})
    except Exception as error:
        _logger.warning("%s: nothing was pruned: %s", catalog.directory, error)
        return removed
    for step in [*leftover, *going]:
        path = catalog.path(step)

        @contextmanager
        def beginning(step: int = step) -> Iterator[bool]:
            with allowed(), protected.lock:
                # Checked again, because listing the directory may have taken long.
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


def sweep(
    catalog: Catalog,
    *,
    busy: Collection[int] = (),
    allowed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Remove what saves left beside checkpoints when they were interrupted right after their
    commit: files that were replaced, and marks. The next save of the step would, but most steps are
    not saved again. Never raises. Lists the directory of each checkpoint. A step that a node has
    prepared stays as it is: the metadata there does not name the new data files yet.

    Args:
        busy: steps that are being written; their directories are not touched. May change meanwhile.
        allowed: a block in which a removal may begin; raises `Superseded` if none may.
    """
    folder = catalog.directory / FOLDER
    try:
        steps = catalog.steps()
    except OSError as error:
        _logger.warning("%s was not swept: %s", catalog.directory, error)
        return
    for step in steps:
        path = catalog.path(step)
        try:
            if step not in busy and commit.has_remains(path):
                with allowed():
                    if step not in busy and path.name not in pending(folder):
                        commit.remove_remains(path, sync=True)
        except FileNotFoundError:
            pass  # it was removed meanwhile
        except Superseded as error:
            _logger.warning("nothing more is swept: %s", error)
            break
        except OSError as error:  # training goes on; the next job tries again
            _logger.warning("%s was not swept: %s", path, error)
