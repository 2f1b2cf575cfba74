"""`Promotion`: brings committed checkpoints to the mirror, in a thread beside training."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pyckpt.errors import PyckptError, Superseded
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.locks import fork_safe_lock
from pyckpt.train.store.pruner import Protected, Protection
from pyckpt.train.store.retention import Retention
from pyckpt.train.tiers.jobs import MirrorStatistics, PromotionJob
from pyckpt.train.tiers.tier import Stopped, Throttle, Tier

__all__ = ["Promotion"]

_logger = logging.getLogger("pyckpt")

_QUEUE_MAX = 2
_FIRST_DELAY_SECONDS = 1.0
_LAST_DELAY_SECONDS = 60.0
_FIRST_POLL_SECONDS = 0.05
_LAST_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 600.0
# A rank that is slower than that counts as one that is gone.
_SLOWEST_BYTES_PER_SECOND = 1e6
_GRACE_SECONDS = 30.0
_ATTEMPTS_MIN = 3
_REMEMBERED_MAX = 16


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
        every: promote the steps that are multiples of this, and final ones.
        bytes_per_second: the most that this rank copies; None for no bound.
        protected: checkpoints that are not pruned, locally and there. Those that are being brought
            there are added.
        on_release: called when one of these is not needed any more.
        members: the ranks of this rank's node, if it prunes there and is not rank 0: it keeps a
            checkpoint until the files of all of them are there.
        token: of the job, the same on all its ranks, and of no other job.
        speaks: called with an error; whether this rank is to log it.
        on_newer: called with the first step that is saved and newer steps there, if training begins
            anew beside these.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        is_first: bool,
        retention: Retention,
        every: int,
        bytes_per_second: float | None,
        protected: Protected,
        on_release: Callable[[], None],
        members: Collection[int] = (),
        token: str = "alone",
        speaks: Callable[[str], bool] = lambda text: True,
        on_newer: Callable[[int, Collection[int]], None] = lambda step, newer: None,
    ) -> None:
        self._members = frozenset(members)
        self._token = token
        self._speaks = speaks
        self._on_newer = on_newer
        tier.join(token)
        self._has_begun = False  # whether the mirror is known to be this job's
        self.tier = tier
        self._is_first = is_first
        self._retention = retention
        self._every = every
        self._throttle = Throttle(bytes_per_second)
        self._slowest = min(bytes_per_second or math.inf, _SLOWEST_BYTES_PER_SECOND)
        self._protected = protected
        self._on_release = on_release
        self._changed = threading.Condition(fork_safe_lock())
        # Of these, the first may be under way.
        self._jobs: deque[PromotionJob] = deque()
        self._is_busy = False
        self._is_closing = False
        self._gives_up = False
        self._is_superseded = False
        self._restored: int | None = None
        self._owes_newer = False  # whether `on_newer` is to be called
        self._promoted_steps: set[int] = set()
        self._branch = 0
        self._lost: set[int] = set()  # steps that were given up, since `wait` last told
        # The data files of what was submitted last, by step: those of ranks that have dropped an
        # earlier one tell that they have.
        self._files: dict[int, set[str]] = {}
        self._thread: threading.Thread | None = None
        self._promoted = self._dropped = self._failures = self._bytes = 0
        self._seconds = 0.0
        self._last_step: int | None = None
        self._last_error = ""

    def submit(
        self,
        step: int,
        path: Path,
        file: Path | None,
        *,
        final: bool,
        overwrite: bool = True,
        frozen: tuple[Path, ...] = (),
    ) -> None:
        """A checkpoint was committed locally. Called on all ranks.

        Args:
            path: its directory.
            file: the data file that this rank wrote; None if it wrote none.
            final: whether it is to be promoted whatever its step is.
            overwrite: whether a checkpoint there of the same step may be replaced.
            frozen: this rank's files of frozen parts.
        """
        if step % self._every and not final:
            return
        with self._changed:
            if self._is_superseded:
                self._lost.add(step)
                self._dropped += 1
                return
        metadata: bytes | None = b""
        if self._is_first or self._members:
            try:
                metadata = (path / commit.metadata_name()).read_bytes()
            except OSError:
                metadata = None  # the thread tries again, and says why if it cannot
        elif file is None and not frozen and self._has_begun:
            return  # this rank has nothing to do; the first time, it learns whose the mirror is
        protection = Protection(self._protected, step)
        with self._changed:
            job = PromotionJob(
                step,
                path,
                file,
                protection,
                final,
                self._branch,
                metadata,
                overwrite=overwrite,
                frozen=frozen,
            )
            # A step that was saved again: the files of the first save are gone.
            for earlier in [one for one in self._waiting() if one.step == step]:
                self._drop(earlier, "it was saved again", is_lost=False)
            self._lost.discard(step)
            self._jobs.append(job)
            if job.metadata:
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
            self._owes_newer = False
            self._promoted_steps.clear()
            self._files.clear()
            self._branch += 1  # what is under way is of a branch that training has left
            for later in [one for one in self._waiting() if one.step > step]:
                self._drop(later, f"training has gone back to step {step}", is_lost=False)

    def begins(self, step: int) -> None:
        """Training has restored nothing, and this step is the first that it saves. What the mirror
        has of later steps is of an earlier run."""
        self.restored(step)
        self._owes_newer = True

    def _waiting(self) -> list[PromotionJob]:
        return list(self._jobs)[1 if self._is_busy else 0 :]

    def _remember(self, job: PromotionJob) -> None:
        """Note which files a checkpoint has. Called with the lock held."""
        self._files.pop(job.step, None)
        self._files[job.step] = set(self._files_of(job))
        while len(self._files) > _REMEMBERED_MAX:
            del self._files[next(iter(self._files))]

    def _drop(self, job: PromotionJob, why: str, *, is_lost: bool = True) -> None:
        """Called with the lock held."""
        self._jobs.remove(job)
        self._dropped += 1
        if is_lost:
            self._lost.add(job.step)
        job.protection.release()
        with suppress(Exception):  # a program's handler of the log may raise
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
        up since the last call that saw the end of all.

        Args:
            timeout: seconds at most; None without end.
        """
        with self._changed:
            is_over = self._changed.wait_for(lambda: not self._jobs, timeout)
            if not is_over:
                return False  # what was given up is told when all is over
            lost, self._lost = self._lost, set()
            return not lost

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
                is_there, why = False, str(error)
                with suppress(Exception):
                    _logger.exception("step %d is not brought to %s", job.step, self.tier)
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
                    others = [one for one in self._jobs if one is not job]
                    is_saved_again = any(one.step == job.step for one in others)
                    self._drop(job, why, is_lost=not is_saved_again)
                self._changed.notify_all()
            self._on_release()

    def _promote(self, job: PromotionJob) -> tuple[bool, str]:
        """Bring a checkpoint there; returns whether it is there, and why not."""
        delay = _FIRST_DELAY_SECONDS
        attempts = 0
        while True:
            attempts += 1
            try:
                if job.metadata is None:
                    self._read_metadata(job)
                if not (job.overwrite or job.is_clear):
                    self._refuse_another(job)
                self._check_job(job)
                self._copy(job)
                if self._is_first:
                    self._commit(job)
                elif job.metadata:
                    self._await(job, self._files_of(job, self._members))
                return True, ""
            except Stopped as error:
                return False, str(error)
            except Superseded as error:
                with self._changed:
                    self._is_superseded = True
                    self._last_error = str(error)
                    for later in self._waiting():
                        self._drop(later, "another job writes there")
                return False, str(error)
            except (OSError, PyckptError) as error:
                needed = [job.file, *job.frozen, job.path if job.metadata is None else None]
                if not all(file.exists() for file in needed if file is not None):
                    return False, "its file was removed"
                self._tell(job, error)
            until_newer = attempts >= _ATTEMPTS_MIN and not job.final
            if self._pause(delay, until_newer=until_newer):
                return False, "newer ones wait, and it failed"
            delay = min(2 * delay, _LAST_DELAY_SECONDS)

    def _tell(self, job: PromotionJob, error: Exception) -> None:
        with self._changed:
            is_new = str(error) != self._last_error
            self._failures += 1
            self._last_error = str(error)
            self._changed.notify_all()
        # A store that is down says the same for hours, and to all ranks.
        level = logging.ERROR if is_new and self._speaks(_without_path(error)) else logging.DEBUG
        with suppress(Exception):
            _logger.log(
                level,
                "step %d is not in %s yet, and this is tried again; saves go on: %s",
                job.step,
                self.tier,
                error,
            )

    def _read_metadata(self, job: PromotionJob) -> None:
        metadata = (job.path / commit.metadata_name()).read_bytes()
        with self._changed:
            job.metadata = metadata
            self._remember(job)

    def _refuse_another(self, job: PromotionJob) -> None:
        # Rank 0 may commit this one while a rank that brings nothing looks.
        brings = job.file is not None or job.frozen
        if (brings or self._is_first) and commit.metadata_name() in self.tier.sizes(job.step):
            raise Stopped("a checkpoint of that step is there, and overwrite=False")
        job.is_clear = True

    def _check_job(self, job: PromotionJob) -> None:
        """Raise if another job has begun to write there since this one did. Rank 0 begins; the
        other ranks wait until it has.

        Raises:
            Superseded: another job has.
            Stopped: the program ends; or a newer checkpoint waits, and rank 0 does not begin.
        """
        if self._is_first:
            self.tier.begin()
            return
        delay, since = _FIRST_POLL_SECONDS, time.monotonic()
        while (holder := self.tier.holder()) not in (self._token, ""):
            if self._has_begun and holder is not None:
                raise Superseded(
                    f"{self.tier}: another job has begun to write there since this one did, so "
                    "this rank no longer does"
                )
            # Newer ones wait as soon as saves come fast, which says nothing of the first rank.
            waited = time.monotonic() - since
            late = waited > _GRACE_SECONDS
            if self._pause(delay, until_newer=late and not job.final):
                raise Stopped("the first rank has not begun to write there, and newer ones wait")
            if waited > _PATIENCE_SECONDS:
                # Or it had begun, and another job has since.
                raise Stopped("the first rank has not begun to write there")
            delay = min(2 * delay, _LAST_POLL_SECONDS)
        self._has_begun = True

    def _copy(self, job: PromotionJob) -> None:
        for file in job.frozen:
            size = file.stat().st_size
            is_there = self.tier.sizes(job.step).get(file.name) == size
            if not is_there and not self.tier.reuse(job.step, file.name, size):
                self.tier.upload(job.step, file, self._passing)
        if job.file is None:
            return
        if self.tier.sizes(job.step).get(job.file.name) == job.file.stat().st_size:
            return  # an earlier attempt has brought it there
        self.tier.upload(job.step, job.file, self._passing)

    def _passing(self, count: int) -> None:
        self._throttle.pass_(count, self._pause)
        with self._changed:
            self._bytes += count

    def _commit(self, job: PromotionJob) -> None:
        """Commit a checkpoint once the files of all ranks are there."""
        files = self._files_of(job)
        self._await(job, files)
        assert job.metadata is not None
        self.tier.commit(job.step, job.metadata, files.keys())
        with self._changed:
            if job.branch == self._branch:
                self._promoted_steps.add(job.step)
        try:
            self._look_for_newer()
            self.tier.prune(
                self._retention,
                committed=job.step,
                staying=_Staying(lambda: self._staying(job)),
                passed=self._is_passed,
            )
        except (OSError, PyckptError) as error:
            _logger.warning("%s was not pruned: %s", self.tier, error)

    def _look_for_newer(self) -> None:
        """The first time, find what is there of an earlier run, beside which training begins."""
        begun = self._restored
        if self._owes_newer and begun is not None:
            newer = [one.step for one in self.tier.checkpoints() if self._is_passed(one.step)]
            self._owes_newer = False
            with suppress(Exception):  # a program's handler of the log may raise
                self._on_newer(begun, newer)

    def _staying(self, committed: PromotionJob) -> set[int]:
        """The steps that wait, and those that the program wants kept."""
        with self._changed:
            waiting = {one.step for one in self._waiting()}
        # A step is protected while it is brought there.
        return waiting | self._protected.steps() - {committed.step}

    def _files_of(self, job: PromotionJob, ranks: Collection[int] | None = None) -> dict[str, int]:
        """The data files of a checkpoint, or those that some ranks wrote, and the bytes of each."""
        assert job.metadata is not None
        metadata = metadata_format.decode(job.metadata, path=job.path / commit.metadata_name())
        files = metadata_format.data_files(metadata)
        return {n: size for n, size in files.items() if ranks is None or commit.rank_of(n) in ranks}

    def _await(self, job: PromotionJob, files: Mapping[str, int]) -> None:
        """Wait until these files are there.

        Raises:
            Stopped: they will not be.
        """
        delay = _FIRST_POLL_SECONDS
        missing: set[str] = set()
        since = time.monotonic()
        while True:
            sizes = self.tier.sizes(job.step)
            found = {name for name, size in files.items() if sizes.get(name) != size}
            if not found:
                return
            if found != missing:
                missing, since, delay = found, time.monotonic(), _FIRST_POLL_SECONDS
            # What a rank has sent of a file is not seen before all of it is there.
            largest = max(files[name] for name in missing)
            patience = _PATIENCE_SECONDS + largest / self._slowest
            if time.monotonic() - since > patience:
                raise Stopped(f"other ranks have not brought {sorted(missing)[:3]} there")
            if self._is_abandoned(job, missing):
                raise Stopped("a rank has given it up for a newer one")
            if self._pause(delay):
                raise Stopped("the program ends")
            delay = min(2 * delay, _LAST_POLL_SECONDS)

    def _is_passed(self, step: int) -> bool:
        """Whether training has gone back to before a checkpoint, and not saved its step again."""
        restored = self._restored
        return restored is not None and step > restored and step not in self._promoted_steps

    def _is_abandoned(self, job: PromotionJob, missing: set[str]) -> bool:
        """Whether a rank that lacks its file has brought that of a later checkpoint: it had to drop
        this one."""
        late = {name.rpartition("_")[0] for name in missing}
        own = self._files_of(job).keys()
        with self._changed:
            steps = list(self._files)
            begin = 0
            if job.step in steps:
                # A step that was saved again has the files of the later save.
                begin = steps.index(job.step) + (self._files[job.step] == own)
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


class _Staying(Collection[int]):
    """The steps that stay, at each look: more may come while a removal goes on."""

    def __init__(self, steps: Callable[[], set[int]]) -> None:
        self._steps = steps

    def __contains__(self, step: object) -> bool:
        return step in self._steps()

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps())

    def __len__(self) -> int:
        return len(self._steps())


def _without_path(error: Exception) -> str:
    """What went wrong, which ranks that wrote different files say alike."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__} {error.errno} {error.strerror}"
    return f"{type(error).__name__}: {error}"
