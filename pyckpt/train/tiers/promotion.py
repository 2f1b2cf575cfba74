"""`Promotion`: brings committed checkpoints to the mirror, in a thread beside training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyckpt.errors import PyckptError, Superseded
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.locks import fork_safe_lock
from pyckpt.train.store.pruner import Protected, Protection
from pyckpt.train.store.retention import Retention
from pyckpt.train.tiers.tier import Stopped, Throttle, Tier

__all__ = ["MirrorStatistics", "Promotion"]

_logger = logging.getLogger("pyckpt")

_QUEUE_MAX = 2
_FIRST_DELAY_SECONDS = 1.0
_LAST_DELAY_SECONDS = 60.0
_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 600.0
_ATTEMPTS_MIN = 3
_REMEMBERED_MAX = 16


@dataclass(frozen=True)
class MirrorStatistics:
    """What this rank has brought to the mirror so far."""

    promoted: int = 0
    """Checkpoints that are there: on rank 0 the committed ones, on others those of which this rank
    has brought its file there."""
    dropped: int = 0
    """Checkpoints that were given up, since newer ones waited or their files were gone."""
    failures: int = 0
    """Attempts that failed."""
    queued: tuple[int, ...] = ()
    """Steps that are not there yet, oldest first."""
    bytes: int = 0
    """Bytes of this rank's files that were copied, failed attempts included."""
    seconds: float = 0.0
    """From the local commits of the promoted checkpoints to their commits in the mirror, summed."""
    last_step: int | None = None
    """The newest step that was promoted."""
    last_error: str = ""
    """The last error; empty once an attempt has succeeded."""


@dataclass
class _Job:
    """A checkpoint on its way."""

    step: int
    path: Path
    file: Path | None
    """This rank's data file, if it wrote one."""
    protection: Protection
    final: bool
    branch: int
    """How often training had gone back before it was saved."""
    metadata: bytes
    """Of the checkpoint; on the rank that commits."""
    since: float = field(default_factory=time.monotonic)


class Promotion:
    """Copies the files of committed checkpoints to a `Tier`, and commits them there.

    Each rank copies the file that it wrote. Rank 0 knows from the metadata which files there must
    be, and looks until all are there. Then it puts the metadata there, which is the commit. So the
    ranks need not talk to each other, and training never waits for the mirror.

    A failed attempt is repeated, after growing delays. At most two checkpoints wait; if there are
    more, the oldest that is not being copied is dropped.

    Args:
        tier: where to.
        is_first: whether this is rank 0.
        retention: what rank 0 keeps there.
        overwrite: whether a checkpoint there may be replaced by one of the same step.
        every: promote the steps that are multiples of this, and final ones.
        bytes_per_second: the most that this rank copies; None for no bound.
        protected: checkpoints that are not pruned locally, because they are still needed.
        on_release: called when one of these is not needed any more.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        is_first: bool,
        retention: Retention,
        overwrite: bool,
        every: int,
        bytes_per_second: float | None,
        protected: Protected,
        on_release: Callable[[], None],
    ) -> None:
        self.tier = tier
        self._is_first = is_first
        self._retention = retention
        self._overwrite = overwrite
        self._every = every
        self._throttle = Throttle(bytes_per_second)
        self._protected = protected
        self._on_release = on_release
        self._changed = threading.Condition(fork_safe_lock())
        # Of these, the first may be under way.
        self._jobs: deque[_Job] = deque()
        self._is_busy = False
        self._is_closing = False
        self._gives_up = False
        self._is_superseded = False
        self._restored: int | None = None
        self._promoted_steps: set[int] = set()
        self._branch = 0
        self._has_lost = False
        # The data files of what was submitted last, by step: those of ranks that have dropped an
        # earlier one tell that they have.
        self._files: dict[int, set[str]] = {}
        self._thread: threading.Thread | None = None
        self._promoted = self._dropped = self._failures = self._bytes = 0
        self._seconds = 0.0
        self._last_step: int | None = None
        self._last_error = ""

    def submit(self, step: int, path: Path, file: Path | None, *, final: bool) -> None:
        """A checkpoint was committed locally. Called on all ranks.

        Args:
            path: its directory.
            file: the data file that this rank wrote; None if it wrote none.
            final: whether it is to be promoted whatever its step is.
        """
        if (step % self._every and not final) or self._is_superseded:
            return
        metadata = b""
        if self._is_first:
            metadata = (path / commit.metadata_name()).read_bytes()
        elif file is None:
            return  # this rank has nothing to do
        protection = Protection(self._protected, step)
        with self._changed:
            job = _Job(step, path, file, protection, final, self._branch, metadata)
            # A step that was saved again: the files of the first save are gone.
            for earlier in [one for one in self._waiting() if one.step == step]:
                self._drop(earlier, "it was saved again", is_lost=False)
            self._jobs.append(job)
            if self._is_first:
                self._remember(job)
            droppable = [one for one in self._waiting() if not one.final]
            if len(self._waiting()) > _QUEUE_MAX and droppable:
                self._drop(droppable[0], "the mirror does not keep up with the saves")
            if self._thread is None:
                # A store that never answers must not keep the program from ending.
                thread = threading.Thread(target=self._run, name="pyckpt-mirror", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def restored(self, step: int) -> None:
        """Training goes on from a step. Checkpoints of later steps are neither counted nor removed
        there, until they are saved again."""
        with self._changed:
            self._restored = step
            self._promoted_steps.clear()
            self._files.clear()
            self._branch += 1  # what is under way is of a branch that training has left
            for later in [one for one in self._waiting() if one.step > step]:
                self._drop(later, f"training has gone back to step {step}", is_lost=False)

    def _waiting(self) -> list[_Job]:
        return list(self._jobs)[1 if self._is_busy else 0 :]

    def _remember(self, job: _Job) -> None:
        """Note which files a checkpoint has. Called with the lock held."""
        metadata = metadata_format.decode(job.metadata, path=job.path / commit.metadata_name())
        self._files.pop(job.step, None)
        self._files[job.step] = set(metadata_format.data_files(metadata))
        while len(self._files) > _REMEMBERED_MAX:
            del self._files[next(iter(self._files))]

    def _drop(self, job: _Job, why: str, *, is_lost: bool = True) -> None:
        """Called with the lock held."""
        self._jobs.remove(job)
        self._dropped += 1
        self._has_lost |= is_lost
        job.protection.release()
        _logger.warning("step %d is not brought to %s: %s", job.step, self.tier, why)

    @property
    def statistics(self) -> MirrorStatistics:
        with self._changed:
            return MirrorStatistics(
                promoted=self._promoted,
                dropped=self._dropped,
                failures=self._failures,
                queued=tuple(job.step for job in self._jobs),
                bytes=self._bytes,
                seconds=self._seconds,
                last_step=self._last_step,
                last_error=self._last_error,
            )

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing waits or is under way; returns whether that is so, and none was given
        up since the last call.

        Args:
            timeout: seconds at most; None without end.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: not self._jobs, timeout)
            has_lost, self._has_lost = self._has_lost, False
            return is_over and not has_lost

    def close(self, timeout: float | None) -> None:
        """Wait as ``wait`` does, and end the thread. What is not there by then is not brought there
        by this program; a log entry names it."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._jobs, timeout)
            self._is_closing = True
            if not done:
                self._gives_up = True
                steps = [job.step for job in self._jobs]
                _logger.error(
                    "%s: not all is there after %s s: steps %s stay in the local directory alone%s",
                    self.tier,
                    timeout,
                    steps,
                    f" ({self._last_error})" if self._last_error else "",
                )
            self._changed.notify_all()
        if self._thread is not None and done:
            self._thread.join()

    # --- in the thread ---

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if self._gives_up or not self._jobs:
                    return
                job = self._jobs[0]
                self._is_busy = True
            try:
                is_there, why = self._promote(job)
            except Exception as error:
                _logger.exception("step %d is not brought to %s", job.step, self.tier)
                is_there, why = False, str(error)
            with self._changed:
                self._is_busy = False
                if is_there:
                    self._jobs.remove(job)
                    self._promoted += 1
                    if job.branch == self._branch:
                        self._promoted_steps.add(job.step)
                    self._seconds += time.monotonic() - job.since
                    self._last_step = job.step
                    self._last_error = ""
                    job.protection.release()
                else:
                    self._drop(job, why)
                self._changed.notify_all()
            self._on_release()

    def _promote(self, job: _Job) -> tuple[bool, str]:
        """Bring a checkpoint there; returns whether it is there, and why not."""
        delay = _FIRST_DELAY_SECONDS
        attempts = 0
        while True:
            attempts += 1
            try:
                if attempts == 1 and not self._overwrite:
                    self._refuse_another(job)
                self._copy(job)
                if self._is_first:
                    self._commit(job)
                return True, ""
            except Stopped as error:
                return False, str(error)
            except Superseded as error:
                self._is_superseded = True
                return False, str(error)
            except (OSError, PyckptError) as error:
                if job.file is not None and not job.file.exists():
                    return False, "its file was removed"
                self._tell(job, error)
            until_newer = attempts >= _ATTEMPTS_MIN and not job.final
            if self._pause(delay, until_newer=until_newer):
                return False, "newer ones wait, and it failed"
            delay = min(2 * delay, _LAST_DELAY_SECONDS)

    def _tell(self, job: _Job, error: Exception) -> None:
        with self._changed:
            is_new = str(error) != self._last_error
            self._failures += 1
            self._last_error = str(error)
        # A store that is down says the same for hours.
        level = logging.ERROR if is_new else logging.DEBUG
        _logger.log(
            level,
            "step %d is not in %s yet, and this is tried again; saves go on: %s",
            job.step,
            self.tier,
            error,
        )

    def _refuse_another(self, job: _Job) -> None:
        if commit.metadata_name() in self.tier.sizes(job.step):
            raise Stopped("a checkpoint of that step is there, and overwrite=False")

    def _copy(self, job: _Job) -> None:
        if job.file is None:
            return
        if self.tier.sizes(job.step).get(job.file.name) == job.file.stat().st_size:
            return  # an earlier attempt has brought it there
        self.tier.upload(job.step, job.file, self._passing)

    def _passing(self, count: int) -> None:
        self._throttle.pass_(count, self._pause)
        with self._changed:
            self._bytes += count

    def _commit(self, job: _Job) -> None:
        """Commit a checkpoint once the files of all ranks are there."""
        metadata = metadata_format.decode(job.metadata, path=job.path / commit.metadata_name())
        files = metadata_format.data_files(metadata)
        delay = _FIRST_POLL_SECONDS
        missing: set[str] = set()
        since = time.monotonic()
        while True:
            sizes = self.tier.sizes(job.step)
            found = {name for name, size in files.items() if sizes.get(name) != size}
            if not found:
                break
            if found != missing:
                missing, since, delay = found, time.monotonic(), _FIRST_POLL_SECONDS
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise Stopped(f"other ranks have not brought {sorted(missing)[:3]} there")
            if self._is_abandoned(job, missing):
                raise Stopped("a rank has given it up for a newer one")
            if self._pause(delay):
                raise Stopped("the program ends")
            delay = min(2 * delay, _LAST_POLL_SECONDS)
        self.tier.commit(job.step, job.metadata, files.keys())
        with self._changed:
            if job.branch == self._branch:
                self._promoted_steps.add(job.step)
            coming = {one.step for one in self._waiting()}
        try:
            self.tier.prune(
                self._retention, committed=job.step, coming=coming, passed=self._is_passed
            )
        except (OSError, PyckptError) as error:
            _logger.warning("%s was not pruned: %s", self.tier, error)

    def _is_passed(self, step: int) -> bool:
        """Whether training has gone back to before a checkpoint, and not saved its step again."""
        restored = self._restored
        return restored is not None and step > restored and step not in self._promoted_steps

    def _is_abandoned(self, job: _Job, missing: set[str]) -> bool:
        """Whether a rank that lacks its file has brought that of a later checkpoint: it had to drop
        this one."""
        late = {name.rpartition("_")[0] for name in missing}
        with self._changed:
            steps = list(self._files)
            begin = steps.index(job.step) + 1 if job.step in steps else 0
            later = {
                step: {name for name in self._files[step] if name.rpartition("_")[0] in late}
                for step in steps[begin:]
            }
        return any(names & self.tier.sizes(step).keys() for step, names in later.items())

    def _pause(self, seconds: float, *, until_newer: bool = False) -> bool:
        """Sleep. Returns whether to give the job up: the program ends; or, with ``until_newer``, a
        newer one waits."""

        def ends() -> bool:
            return self._gives_up or (until_newer and len(self._jobs) > 1)

        with self._changed:
            if seconds > 0 or self._gives_up:
                self._changed.wait_for(ends, seconds)
            return ends()
