"""Checkpointer: save, keep and resume, from a training loop, on any number of ranks."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import torch.distributed as dist

from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.renaming import Rename
from pyckpt.dcp.report import LoadReport
from pyckpt.engine import Engine
from pyckpt.train.advice import Advice
from pyckpt.train.announcer import Announcer, callbacks_of
from pyckpt.train.arguments import (
    metrics_of,
    mirror_limits_of,
    state_of,
    step_of,
    tell_of_no_mirror,
    timeout_of,
    whole,
)
from pyckpt.train.events import OnEvent
from pyckpt.train.finder import Finder
from pyckpt.train.frozen import FrozenParts, Periods
from pyckpt.train.handle import SaveHandle
from pyckpt.train.nodes.restoring import nodes_of
from pyckpt.train.policy import Policy
from pyckpt.train.prewarmer import Prewarmer
from pyckpt.train.restorer import First, LoadOptions, Restorer
from pyckpt.train.saver import Saver
from pyckpt.train.schedule import Schedule
from pyckpt.train.statistics import CheckpointerStatistics, Stopwatch
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.pruner import Protection, Pruner
from pyckpt.train.store.retention import Best, Retention
from pyckpt.train.sync.agreement import Agreement, Facts, GroupAgreement, LocalAgreement
from pyckpt.train.sync.ranks import Ranks
from pyckpt.train.sync.requests import Requests
from pyckpt.train.sync.signals import StopSignals
from pyckpt.train.tiers.promotion import Promotion

__all__ = ["Checkpointer"]

_logger = logging.getLogger("pyckpt")


class Checkpointer(Finder):
    """Saves a training run as it goes, removes old checkpoints, and resumes the run. ::

        with pyckpt.Checkpointer("runs/a", keep_last=3, every_steps=100,
                                 on_signals=("SIGTERM",)) as checkpointer:
            state = {"model": model, "optimizer": optimizer}
            start = checkpointer.restore(state)
            for step in range((start or 0) + 1, steps + 1):
                train_step()
                checkpointer.step(step, state)
                if checkpointer.stop_requested:
                    break

    Each checkpoint is a directory ``step-00000100`` that stock ``dcp.load`` reads.

    If `torch.distributed` is initialised, every rank makes a Checkpointer. All ranks make the
    same calls of ``restore``, ``step``, ``save``, ``wait`` and ``close``, in the same order and
    with the same steps. Each rank may call the other methods for itself.

    Args:
        directory: of the checkpoints; ``~`` is expanded. It is the same on all ranks, on a file
            system that they share; if they do not, see ``node_local``. Once another job begins to
            save there, saves of this job fail with ``errors.Superseded``. Jobs that restore,
            inspect or export do not disturb it.
        keep_last: how many of the newest checkpoints to keep, besides those saved with
            ``final=True``. None keeps all, whatever the next two say. 0 keeps the newest, to resume
            from, until a final one is committed.
        keep_every: with ``keep_last``, also keep those whose step is a multiple of this.
        keep_best: ``(metric, n, mode)``: with ``keep_last``, also keep the n with the smallest
            (mode "min") or largest ("max") value of a metric that was passed when they were saved.
        every_steps: ``step`` saves if the step is a multiple of this.
        every_minutes: ``step`` saves if the last save began so many minutes ago, by the clock of
            rank 0.
        save_when: called with each step; ``step`` saves if it returns true. Each rank calls its
            own, so it must depend on the step alone. Use ``request_save`` for other conditions.
        on_signals: a signal, or several, such as "SIGTERM", that ask for a save and a stop; see
            ``stop_requested``. Only the main thread can handle signals.
        when_busy: what ``step`` does if a save is due and the one before it is not committed yet.
            "skip" leaves the new one out and logs that, so training never waits for the disk.
            "wait" waits. If the last save that was due was left out, ``close`` saves the state of
            the last ``step``.
        process_group: the ranks that train together, default all, with any backend. The ranks talk
            over gloo groups that are made here.
        timeout: how long a rank may keep the others waiting, in a save or a restore, in seconds or
            as a timedelta; by default half an hour, as for torch's gloo groups. After that the
            others raise ``RanksLost``, which names the rank, and this Checkpointer no longer saves
            or restores. The last checkpoint stays. Ranks wait for the one that writes last, so
            allow for slow disks.
        overwrite: whether saving a step replaces a checkpoint of that step, which can be loaded
            until the new one is committed. If this is False, such a save fails with
            ``FileExistsError`` on all ranks, and the checkpoint stays. Training that goes on from
            an older checkpoint comes to the steps of newer ones again.
        mirror: where checkpoints are also brought in the background, once they are committed: the
            URL of an object store (``s3://bucket/run``; needs ``pip install "pyckpt[cloud]"``), or
            a directory on another file system. Each rank copies its own file, and training does
            not wait. ``restore`` looks there, too. See docs/tiers.md.
        mirror_keep_last: how many of the newest checkpoints to keep there, besides final ones.
            None keeps all.
        mirror_every: bring there only checkpoints whose step is a multiple of this, and final ones.
        mirror_max_mbps: how many megabytes (10^6 bytes) a second each rank may copy there.
        mirror_wait: how many seconds ``close`` waits until all is there. The checkpoints that are
            not there by then stay in the local directory alone; the log names them.
        node_local: whether the directory may be one that each node has for itself, such as
            ``/local_nvme/run``. The ranks then find out which of them see the same directory. Each
            such group of ranks keeps its own files, and the metadata of the whole checkpoint.
            ``restore`` gets what a node lacks from the others, or from the mirror. All ranks must
            agree. See docs/tiers.md.
        frozen: True if parameters that require no gradient are written once, and *linked* into the
            checkpoints after that; or patterns of the keys of what else is
            (``"model.*.running_*"``). Only what has the same hash as before is linked. Needs
            ``pip install "pyckpt[frozen]"``, as does ``unchanged``. See docs/howto/frozen.md.
        watch_frozen: whether frozen host memory that the kernel knows to be unwritten since its
            last hash (Linux 6.13) is not hashed again, but once in ``verify_linked_every`` saves.
            See docs/howto/frozen.md for what the kernel does not notice.
        unchanged: "detect" also links other tensors that have not changed, which it finds by hash.
        verify_linked_every: a file is linked only if its checksums were read from the disk within
            so many saves.
        fresh_copy_every: a file of frozen parts is written anew for every so many-th checkpoint.
        save_last: whether ``close`` saves the state of the last ``step`` if no save has it. So the
            steps after the last save that was due are not lost. A ``with`` block that raises does
            not save it.
        naming: the names of the checkpoints' directories, with ``{}`` in the place of the step:
            ``"checkpoint-{}"`` finds, restores and saves what other programs call so. ``{:08d}``
            fills the number up with zeros. The default is ``"step-{:08d}"``. Directories with
            other names are left alone. A mirror has the same names.
        direct: whether saving, restoring, verifying and exporting bypass the page cache, as for
            `DirectWriter`.
        prewarm: whether the first ``step`` has the memory of the first save made in the background,
            by a native thread of low priority. Otherwise that save makes it, while training waits.
            Nothing is made if ``step`` saves by request alone, nor by a program that only restores.
        engine: the memory and threads to use; by default those that everyone shares.
        on_event: called with each `pyckpt.events.Event`, or several such callables. They are called
            one event at a time, in the order of the events, in a thread of their own. So they delay
            neither training nor a save; ``close`` waits until they have had all. An error that one
            raises is logged, and changes nothing else. They may call ``request_save`` and
            ``request_stop``, but no method that waits.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of range, or ``directory`` is a URL.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        save_when: Callable[[int], bool] | None = None,
        on_signals: str | signal.Signals | Sequence[str | signal.Signals] = (),
        when_busy: Literal["skip", "wait"] = "skip",
        process_group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        overwrite: bool = True,
        mirror: str | os.PathLike[str] | None = None,
        mirror_keep_last: int | None = None,
        mirror_every: int = 1,
        mirror_max_mbps: float | None = None,
        mirror_wait: float = 600.0,
        node_local: bool = False,
        frozen: bool | str | Sequence[str] = False,
        watch_frozen: bool = False,
        unchanged: Literal["write", "detect"] = "write",
        verify_linked_every: int = 10,
        fresh_copy_every: int = 50,
        save_last: bool = False,
        naming: str | None = None,
        direct: Literal["auto", "require", "off"] = "auto",
        prewarm: bool = True,
        engine: Engine | None = None,
        on_event: OnEvent | Sequence[OnEvent] | None = None,
    ) -> None:
        if when_busy not in ("skip", "wait"):
            raise ValueError(f"{when_busy = } must be 'skip' or 'wait'.")
        super().__init__(directory, direct, engine, mirror, naming)
        whole("mirror_every", mirror_every, least=1)
        mirror_retention = Retention(mirror_keep_last)
        self._mirror_wait, mirror_rate = mirror_limits_of(mirror_wait, mirror_max_mbps)
        wait_at_most = timeout_of(timeout)
        retention = Retention(keep_last, keep_every, keep_best)
        policy = Policy(every_steps, every_minutes, save_when)
        callbacks = callbacks_of(on_event)
        self._stopwatch = Stopwatch()
        self._saves_by_itself = policy.ever_due
        self._prewarmer = Prewarmer(engine, enabled=prewarm)
        self._closed = False
        self._restore_seconds = 0.0
        self._signals = StopSignals(on_signals)
        try:
            self._ranks = Ranks(process_group, wait_at_most)
            self._announcer = Announcer(
                self._ranks,
                callbacks,
                engine=engine,
                names_steps=True,
                lost_seconds=lambda: self._stopwatch.lost_seconds,
            )
            self._fence = Fence(self.directory, taken=lambda: self._pruner.begun())
            nodes = nodes_of(
                node_local,
                self._catalog,
                self._ranks,
                self._mirror,
                self._fence,
                on_settled=lambda: self._pruner.settled(),
            )
            # The rank that makes a directory ready, and prunes there.
            self._leads = nodes.leads
            periods = Periods(verify_linked_every, fresh_copy_every)
            self._saver = Saver(
                self._catalog,
                self._ranks,
                self._fence,
                direct=direct,
                engine=engine,
                on_commit=self._commit,
                announcer=self._announcer,
                nodes=nodes.commits,
                frozen=FrozenParts(
                    frozen,
                    unchanged,
                    periods,
                    self._ranks.rank,
                    self.latest,
                    direct,
                    engine,
                    watches=watch_frozen,
                ),
            )
            self._restorer = Restorer(
                self._catalog,
                self._ranks,
                direct=direct,
                engine=engine,
                mirror=self._mirror,
                announcer=self._announcer,
                nodes=nodes.restores,
            )
            self._pruner = Pruner(
                self._catalog,
                retention,
                allowed=self._fence.held,
                busy=self._saver.writing,
                distrusted=self._restorer.distrusted,
                on_removed=self._announcer.pruned,
                on_newer=lambda step, newer: self._tell_of_earlier_run(step, self.directory, newer),
                settles=nodes.commits is not None,
            )
            is_first = self._ranks.rank == 0
            self._promotion: Promotion | None = None
            if self._mirror is not None:
                self._promotion = Promotion(
                    self._mirror,
                    is_first=is_first,
                    retention=mirror_retention,
                    every=mirror_every,
                    bytes_per_second=mirror_rate,
                    protected=self._pruner.protected,
                    on_release=self._pruner.again if self._leads else lambda: None,
                    members=nodes.members,
                    token=f"{self._ranks.largest(secrets.randbits(62)):016x}",
                    speaks=self._ranks.is_first_to_say,
                    on_newer=lambda step, newer: self._tell_of_earlier_run(
                        step, self._mirror, newer
                    ),
                )
            self._requests = Requests(self._signals, policy.due_after if is_first else None)
            self._agreement: Agreement = (
                LocalAgreement(self._facts)
                if self._ranks.size == 1
                else GroupAgreement(self._facts, self._ranks.take_talk(), on_lost=self._lost)
            )
        except BaseException:
            self._signals.close()
            raise
        self._schedule = Schedule(
            policy,
            when_busy=when_busy,
            overwrite=overwrite,
            save_last=save_last,
            best_by=None if keep_best is None else keep_best[0],
            saver=self._saver,
            requests=self._requests,
            agreement=self._agreement,
            ranks=self._ranks,
            stopwatch=self._stopwatch,
            on_skip=lambda step, busy: self._announcer.skipped(
                step, self._catalog.path(step), busy
            ),
            on_begin=self._begin_anew,
        )
        if is_first:
            retention.tell_of_contradiction()
            if mirror is None:
                tell_of_no_mirror(
                    mirror_keep_last=mirror_keep_last,
                    mirror_every=mirror_every,
                    mirror_max_mbps=mirror_max_mbps,
                )

    def __repr__(self) -> str:
        state = "closed" if self._closed else self._saver.state
        ranks = f", rank {self._ranks.rank} of {self._ranks.size}" if self._ranks.size > 1 else ""
        return f"<Checkpointer of {self.directory}{ranks}: {self._saver.saves}, {state}>"

    # --- saving -----------------------------------------------------------------------------------

    def step(
        self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None
    ) -> SaveHandle | None:
        """Save if a save is due. Call it after each step of training.

        A save is due by ``every_steps``, ``every_minutes`` and ``save_when``, by ``request_save``,
        and by a signal. The call waits for the disk only with ``when_busy="wait"``, and when
        training is asked to stop.

        Args:
            step: larger than in the call before. After a restore, larger than the step that was
                restored.
            state: as for ``save``. It is looked at only if a save is due.
            metrics: as for ``save``.

        Returns:
            The save, or None if none was due.

        Raises:
            OSError, PyckptError: an earlier save failed. The last committed checkpoint stays, and
                training may go on. This call has not made the save that was due at this step. To
                make it, all ranks repeat the call.
            TypeError: an argument is of the wrong type. Nothing was done, as for ``ValueError``.
            ValueError: the step is not larger.
        """
        self._check_open()
        self._saver.refuse_within_start("step()")
        handle = self._schedule.step(step_of(step), state_of(state), metrics_of(metrics))
        # Other mappings may make what they are asked for.
        if self._saves_by_itself and type(state) is dict:
            self._step_ended(state)
        return handle

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
        overwrite: bool | None = None,
    ) -> SaveHandle:
        """Save now, in the background. The call first waits for a save that is under way.

        Args:
            step: 0 or more.
            state: objects by name: modules, optimizers, objects with ``state_dict`` and
                ``load_state_dict``, tensors and plain values.
            metrics: numbers to save with the checkpoint, for ``keep_best`` and ``checkpoints``.
                Those of rank 0 are saved. A GPU tensor makes the call wait for the GPU.
            final: whether to keep the checkpoint for good. It is never pruned, and the call returns
                when it is committed.
            overwrite: whether a checkpoint of that step is replaced; by default the setting of the
                Checkpointer.

        Raises:
            OSError, PyckptError: an earlier save failed, or this one, if it is final.
            RuntimeError: a signal handler, a finalizer or an object of the state called it while
                this thread was beginning another save. Nothing was done. If it is not caught there,
                the other save fails as well. For signals, there are
                ``on_signals`` and ``request_stop``.
            TypeError: an argument is of the wrong type. Nothing was done, as for ``ValueError``.
            ValueError: the step is negative.
        """
        self._check_open()
        self._saver.refuse_within_start("save()")
        return self._schedule.save(
            step_of(step), state_of(state), metrics_of(metrics), final=final, overwrite=overwrite
        )

    def wait(self) -> None:
        """Wait until no save is under way. All ranks call it.

        It does not end the Checkpointer: training may go on, and save again.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before. The last
                committed checkpoint stays.
            RuntimeError: as for ``save``.
        """
        begun = time.perf_counter()
        self._saver.wait()
        self._stopwatch.waited(time.perf_counter() - begun)
        self._stopwatch.pause()
        self._saver.raise_failure()

    def wait_mirrored(self, timeout: float | None = None) -> bool:
        """Wait until the mirror has all checkpoints that this rank is to bring there. Each rank may
        call it for itself.

        Args:
            timeout: seconds at most; None without end.

        Returns:
            Whether they are there; True without a mirror. False also if one was given up since the
            last call that did not time out. On rank 0 they are committed there.
        """
        return self._promotion is None or self._promotion.wait(timeout)

    def _step_ended(self, objects: Mapping[str, Any]) -> None:
        """Prepare for the first save of these objects, which will come, if none has begun."""
        if self._saver.started > 0:
            self._prewarmer.saving()
        else:
            self._prewarmer.step_ended(objects)

    def request_save(self) -> None:
        """Ask for a save at one of the next steps, on all ranks. Any rank and thread may."""
        self._requests.ask_save()

    def request_stop(self) -> None:
        """Ask for a save and a stop, as a signal does. Any rank and thread may."""
        self._requests.ask_stop()

    def wait_staged(self) -> None:
        """Make the program's next work wait until the state of the last save is copied.

        Steps of optimizers wait by themselves. Call this before the program changes parameters by
        other means, such as replaying a CUDA graph.
        """
        self._saver.wait_staged()

    @property
    def stop_requested(self) -> bool:
        """Whether training is asked to stop, and its state was saved. It only changes in ``step``,
        at the same step on all ranks."""
        return self._schedule.stop_requested

    def _facts(self) -> Facts:
        """The counts of this rank; called by the thread that talks to the other ranks."""
        return self._requests.facts(*self._saver.counts())

    def _lost(self, error: BaseException) -> None:
        """Called by the thread that talks to the other ranks, when it cannot reach them."""
        self._ranks.lose(error, "agreeing on what to save")

    def _commit(self, handle: SaveHandle) -> None:
        """Called by the thread that committed a save."""
        self._restorer.trust(handle.step)
        self._stopwatch.committed(handle.seconds)
        if self._promotion is not None:
            # Before the pruner, which would not know that the checkpoint is still needed.
            file, frozen = self._saver.own_files
            self._promotion.submit(
                handle.step,
                handle.path,
                file,
                final=handle.final,
                overwrite=self._saver.overwrites,
                frozen=frozen,
            )
        if self._leads:
            self._pruner.committed(handle.step)

    # --- finding and restoring --------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        required: bool = False,
        missing: Literal["error", "keep"] = "error",
        keep: Sequence[str] = (),
        unexpected: Literal["error", "ignore"] = "error",
        mismatched: Literal["error", "keep"] = "error",
        rename: Rename | Mapping[str, str] | None = None,
        allow: Sequence[Allowed] = (),
        share_reads: bool | None = None,
    ) -> int | None:
        """Load the newest checkpoint that is valid for all ranks into ``state``, in place.

        If it turns out to be corrupt on any rank, the first rank logs an error, and all load the
        next older one instead. ``load_report`` lists what was loaded.

        Training may go on with the step after it. Newer checkpoints stay, and the log names them.
        Each is replaced when its step is saved again. Until then this Checkpointer neither counts
        nor removes them when it prunes. ``latest``, ``restore`` without ``step``, and the next
        Checkpointer still find them, so move away those that you no longer want.

        Args:
            state: as for ``save``.
            step: load the checkpoint of this step, and no other.
            required: whether to raise if there is no checkpoint. Otherwise the log says what the
                directory holds instead.
            missing: what to do about objects, parameters, metrics, and keys of plain dicts that
                the checkpoint does not have: raise a `LoadError`, or "keep" them as they are.
            keep: names of objects, and of values in plain dicts ("config.total_epochs"), that stay
                as they are in the state. Saved values replace all others. ``load_report.differing``
                and the log at level INFO list the plain values that differed.
            unexpected: what to do about parameters, optimizer state and metrics that the
                checkpoint has and the objects lack: raise a `LoadError`, or "ignore" them.
            mismatched: what to do about parameters and buffers that have another shape in the
                checkpoint: raise a `LoadError`, or "keep" them and their optimizer state. The same
                holds for tensors in plain values that require gradients, or are DTensors. Other
                tensors there become what was saved, unless this is "keep".
            rename: called with each key of the checkpoint (``"model.head.weight"``), returns the
                key that it has in the state, which may be the same. Or a mapping of the keys that
                change. A new name of a module's parameter also applies to its optimizer state.
            allow: classes and functions that objects in the checkpoint may use, as for
                `pyckpt.load`.
            share_reads: whether ranks that want the same bytes read them once, as for
                `pyckpt.load`; by default those of one host, if that is worth it. All ranks must
                agree.

        Returns:
            The step of the checkpoint; None if there is no checkpoint, so that training begins.

        Raises:
            FileNotFoundError: there is no valid checkpoint of ``step``; or there is none at all,
                and one is ``required``.
            ValueError: an argument is out of range, or ``keep`` has a name that the state lacks.
            TypeError: an object in ``state`` could not be saved. This is raised even if there is no
                checkpoint.
            LoadError: the checkpoint does not fit the state. Or some ranks see checkpoints and
                others see none, because they look at different directories.
            CorruptCheckpoint: there are checkpoints, and none can be read. ``state`` may have been
                changed.
            OSError: some rank cannot list the directory, or cannot read a checkpoint that may be
                the newest, for another reason than damage: permissions, a server that does not
                answer, a lack of memory or descriptors. Transient errors (EINTR, EAGAIN, ESTALE,
                ETIMEDOUT, EIO) were retried for a second or two. Raised on all ranks.
        """
        self._check_open()
        state = state_of(state)
        step = None if step is None else step_of(step)
        options = LoadOptions(missing, keep, unexpected, mismatched, rename, allow, share_reads)
        return self._restore(state, options, step=step, required=required)

    def _restore(
        self,
        state: Mapping[str, Any],
        options: LoadOptions,
        *,
        step: int | None = None,
        required: bool = False,
        first: First | None = None,
    ) -> int | None:
        """``restore``; of each checkpoint that it tries, it loads ``first`` before the state."""
        self._saver.wait()
        self._ranks.check()
        start = time.perf_counter()
        restored = self._restorer.restore(state, step, options, required=required, first=first)
        if restored is not None:
            self._restore_seconds = time.perf_counter() - start
            self._schedule.go_back(restored)
            if self._leads:
                self._pruner.restored(restored)
            if self._promotion is not None:
                self._promotion.restored(restored)
        self._stopwatch.pause()
        return restored

    def _begin_at(self, step: int) -> list[int]:
        """Training begins at a step whose state is from elsewhere, not restored by this object.
        Newer checkpoints belong to a branch that it leaves: until they are saved again they do not
        count for what is kept, and this names them."""
        newer = self._newer_than(step)
        if self._ranks.rank == 0:
            self._tell_newer(step, self.directory, newer)
        self._schedule.go_back(step)
        if self._promotion is not None:
            self._promotion.restored(step)
        if self._leads:
            self._pruner.restored(step)
        return newer

    def _begin_anew(self, step: int) -> None:
        """This object has restored nothing, and this step is the first that it saves."""
        if self._promotion is not None:
            self._promotion.begins(step)
        if self._leads:
            self._pruner.begins(step)

    def _tell_of_earlier_run(self, step: int, place: object, newer: Collection[int]) -> None:
        if self._ranks.rank == 0:
            # The first step that is saved need not be the first of training.
            self._tell_newer(f"{step} or before", place, newer)

    @property
    def load_report(self) -> LoadReport | None:
        """The report of the last ``restore`` on this rank; None before the first."""
        return self._restorer.report

    # --- keeping ----------------------------------------------------------------------------------

    def protect(self, step: int) -> Protection:
        """Keep the checkpoint of a step from being pruned, in the directory and the mirror.

        It is kept until ``release`` of the `Protection` is called, until the end of the ``with``
        block that uses it, or until this Checkpointer ends. Call it on rank 0, which prunes; with
        ``node_local``, on the first rank of each node. If the checkpoint is there after the call,
        it is complete.
        """
        return Protection(self._pruner.protected, step_of(step))

    @property
    def statistics(self) -> CheckpointerStatistics:
        """The cost of saving on this rank, as measured so far. Its text ends with the advice for
        one failure a day."""
        return self._stopwatch.statistics(
            saves=self._saver.started,
            failed=self._saver.failures,
            skipped=self._schedule.skipped,
            pruned=self._pruner.removed,
            restore_seconds=self._restore_seconds,
            mirror=None if self._promotion is None else self._promotion.statistics,
        )

    def advice(self, mtbf_hours: float) -> Advice | None:
        """How often to save so that the least time is lost, from times measured on this rank.

        Args:
            mtbf_hours: the mean time between failures of the whole job: that of one node divided
                by the number of nodes.

        Returns:
            None before a save was committed and a step without one was measured.

        Raises:
            ValueError: ``mtbf_hours`` is not positive.
        """
        return self.statistics.advice(mtbf_hours)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save that is under way and for the other ranks, and restore the previous
        signal handlers. Idempotent.

        If the last save that was due was left out because another one was under way, and nothing
        was saved since, this saves the state that the last ``step`` was given, as it is now, under
        that step. With ``save_last`` it does so whenever the last ``step`` was not saved. A
        ``with`` block that raises does not save it, because the state may be in the middle of a
        step.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
            RuntimeError: as for ``save``. Nothing was closed.
        """
        if not self._closed:
            self._saver.refuse_within_start("close()")
            self._schedule.save_unsaved()
            self._close(wait=True)
            self._saver.raise_failure()

    def _close(self, *, wait: bool) -> None:
        self._saver.refuse_within_start("close()")  # before anything is closed
        self._closed = True
        try:
            self._saver.wait()
            self._saver.close()
            if self._promotion is not None:
                self._promotion.close(self._mirror_wait)
            self._pruner.close()
            self._announcer.close()
        finally:
            self._signals.close()
            self._agreement.close(wait=wait)
            if wait:
                self._ranks.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this Checkpointer is closed")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            # The other ranks may still train, and not come here, so do not wait for them. All ranks
            # must finish the save under way, because the next job will resume from it.
            self._close(wait=False)
            if (failure := self._saver.untold()) is not None and self._ranks.rank == 0:
                _logger.error("besides, a save failed: %s", failure)
