"""PinnedStager: copies a state for an asynchronous save without stopping the program."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import Any, Literal

import torch

from pyckpt import _C, guard
from pyckpt.collector import CollectorPause, collector_paused
from pyckpt.dcp.leaves import Leaves, is_plain_type
from pyckpt.dcp.plans import KnownPlan
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import EngineClosed, StagerBusy
from pyckpt.locks import fork_safe_lock
from pyckpt.timeline import named

__all__ = [
    "PinnedStager",
    "StagedStateDict",
    "Staging",
    "default_stager",
    "release_at_thread_end",
]

_logger = logging.getLogger("pyckpt")

_SHAPES_MAX = 8  # of state dicts that a stager remembers


class PinnedStager:
    """An ``AsyncStager`` that copies with native threads and the GPU's copy engines, into memory
    that is allocated and registered with CUDA once.

    `DirectWriter` has one by default. Make one yourself to tell it your optimizers, or to use it
    with another writer::

        writer = pyckpt.DirectWriter(path, stager=pyckpt.PinnedStager(optimizers=[optimizer]))
        dcp.async_save(state_dict, storage_writer=writer)

        stager = pyckpt.PinnedStager(optimizers=[optimizer])
        dcp.async_save(state_dict, storage_writer=other_writer, async_stager=stager)

    What is saved is the state at the call. Parameters and state of the given optimizers may be
    copied after the call returned, until the next step of any optimizer, which waits for the rest:
    on a GPU its stream waits, on a CPU its thread. Everything else (buffers, counters, other
    tensors, objects) is copied at the call: on a GPU the current stream waits for the copies, not
    the thread; on a CPU the call does. Programs that change parameters by other means than
    ``optimizer.step()``, a replayed CUDA graph included, call ``wait_staged`` first.

    Args:
        optimizers: those whose parameters and state nothing else changes in place. Of such as have
            a ``train`` of their own, as schedule-free ones do, all is copied at the call: that
            changes parameters, too.
        when_busy: what a save with `DirectWriter` does whose state would fit the engine's memory,
            were it not for saves that are still under way: ``"wait"`` for them, ``"skip"`` this
            save (on all ranks; nothing is written, and a warning logged), or ``"error"``: fail with
            ``StagerBusy``, on all ranks. With other writers, which take copies only, what finds no
            room is copied to ordinary memory.
        shared_memory: whether the copies lie in memory that other processes can map, for
            ``async_checkpointer_type=PROCESS``: a few segments instead of a descriptor a tensor.
        use_async_staging: as of stock's ``StagingOptions``: whether ``stage`` returns a future, so
            that ``async_save`` returns an ``AsyncSaveResponse``; if not, it returns the copies once
            they are whole, and ``async_save`` one future. Of no account to `DirectWriter`.
        engine: the memory and threads to use; by default those that all share.

    Raises:
        ValueError: ``when_busy`` is none of the three.

    May be used by any number of saves, from any threads.
    """

    def __init__(
        self,
        *,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        when_busy: Literal["wait", "skip", "error"] = "wait",
        shared_memory: bool = False,
        use_async_staging: bool = True,
        engine: Engine | None = None,
    ) -> None:
        if when_busy not in ("wait", "skip", "error"):
            raise ValueError(f"{when_busy = } must be 'wait', 'skip' or 'error'.")
        self.optimizers = list(optimizers)
        self.when_busy = when_busy
        self.shared_memory = shared_memory
        self.use_async_staging = use_async_staging
        self._engine = engine
        self._lock = fork_safe_lock()
        self._shapes: list[Shape] = []
        self._in_flight: list[weakref.ref[Staging]] = []
        self._finisher: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None
        guard.watch()  # not at the first save, in the middle of training
        _stagers.add(self)

    # What DCP asks of an AsyncStager.

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> Any:  # as of the setting: a union helps nobody
        """Copy a state dict. The future has the copy, of plain dicts and lists, once it is whole;
        without ``use_async_staging`` this waits, and returns the copy.

        Raises:
            BaseException: what made an earlier save fail, once (see ``take_failure``).
        """
        self.raise_failure()
        staging, copies = self.begin(state_dict, direct=False)
        result: Future[dict[str, Any]] = Future()
        handed_out = [copies]
        del copies

        def hand_out(staged: Future[None]) -> None:
            copies = handed_out.pop()
            error = staged.exception()
            if error is None:
                result.set_result(copies)
            else:
                result.set_exception(error)

        staging.staged.add_done_callback(hand_out)
        return result if self.use_async_staging else result.result()

    def synchronize_staging(self) -> None:
        """Wait until all copies are there."""
        for staging in self._under_way():
            staging.staged.result()

    def close(self) -> None:
        """Wait for copies under way. The memory stays with the engine, for others to use."""
        with self._lock:
            finisher, self._finisher = self._finisher, None
        if finisher is not None:
            finisher.shutdown(wait=True)

    # For the program.

    def prewarm(self, state_dict: dict[str, Any]) -> None:
        """Take, and register with CUDA, the memory that saving such a state will need, and have
        the GPUs of the state ready to copy, so that the first save does not. Copies nothing. May be
        called on a thread of its own, beside the first steps.

        Raises:
            OSError: the system has not that much memory.
            CudaError: it could not be registered.
        """
        shape, leaves = self._shape_of(state_dict)
        sources = shape.leaves.sources(leaves)
        devices = {s.get_device() for s in sources if isinstance(s, torch.Tensor) and s.is_cuda}
        needed = shape.needed_bytes(leaves, None)
        self.engine.native.prewarm(needed, shared=self.shared_memory, devices=sorted(devices))

    def wait_staged(self) -> None:
        """Make what the program does next wait for all copies that need the state as it is: GPU
        work on this thread's current streams, and the thread itself for state on the CPU. For
        programs that change parameters without ``optimizer.step()``."""
        guard.look_for_capture()
        for staging in self._under_way():
            staging.guard()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """``with stager.guard():`` parameters may be changed in here; `wait_staged`, as a block."""
        self.wait_staged()
        yield

    def take_failure(self) -> BaseException | None:
        """What made an earlier save on this rank fail, if the next one has not raised it yet; the
        next one will not."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    @property
    def engine(self) -> Engine:
        """The memory and threads in use."""
        return default_engine() if self._engine is None else self._engine

    # For DirectWriter.

    def begin(self, state_dict: dict[str, Any], *, direct: bool) -> tuple[Staging, dict[str, Any]]:
        """Begin to copy; return the copies, too, as a state dict. ``direct``: the writer knows how
        to read what found no room from where it is, gives memory back when it is through, and looks
        whether the staging is ``busy``: then nothing was copied."""
        with named("stage"), collector_paused():
            shape, leaves = self._shape_of(state_dict)
            wanted = shape.wanted() if direct else None
            busy = self._busy(shape, leaves, wanted) if direct else None
            if busy is not None:
                wanted = bytes(len(leaves))
            return self._begin(shape, leaves, wanted, direct=direct, busy=busy)

    def keep_failure(self, error: BaseException) -> None:
        """Have the next save raise an error. Not with the stager that all writers share: the next
        one may have nothing to do with the one that failed."""
        with self._lock:
            if self is not self.engine.__dict__.get("_stager"):
                self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise what was kept, once."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def _begin(
        self,
        shape: Shape,
        leaves: list[Any],
        wanted: bytes | None,
        *,
        direct: bool,
        busy: StagerBusy | None,
    ) -> tuple[Staging, dict[str, Any]]:
        sources = shape.leaves.sources(leaves)
        native = _C.Staging(
            self.engine.native,
            sources,
            guarded=self._guarded_storages(),
            wanted=None if wanted is None else shape.leaves.sources_wanted(leaves, wanted),
            shared=self.shared_memory,
        )
        try:
            copies = native.take_tensors()
            if not direct and native.statistics().bytes_streamed:
                copies = self._copy_rest(sources, copies)
            staged = shape.tree.build(shape.leaves.finish(leaves, copies))
        except BaseException:
            native.release()
            raise
        staging = Staging(self, native, shape, direct=direct, busy=busy)
        with self._lock:
            self._in_flight.append(weakref.ref(staging))
        guard.add(staging)
        self._run_later(staging.finish)
        return staging, staged

    def _copy_rest(self, sources: list[Any], copies: list[Any]) -> list[Any]:
        """Copies in ordinary memory of tensors that found no room in the engine's."""
        _logger.warning(
            "the state to be staged is larger than max_pinned_bytes, and this writer takes copies "
            "only: the rest is copied to ordinary memory"
        )
        return [
            copy.detach().to("cpu", copy=True) if copy is not None and copy is source else copy
            for source, copy in zip(sources, copies, strict=True)
        ]

    def _shape_of(self, state_dict: dict[str, Any]) -> tuple[Shape, list[Any]]:
        for shape in self._shapes:
            leaves = shape.tree.match(state_dict)
            if leaves is not None:
                return shape, leaves
        tree = _C.StateTree(state_dict)
        leaves = tree.match(state_dict)
        assert leaves is not None
        shape = Shape(tree, Leaves(leaves))
        self._shapes = [shape, *self._shapes[: _SHAPES_MAX - 1]]
        return shape, leaves

    def _guarded_storages(self) -> _C.StorageSet | None:
        guarded = [o for o in self.optimizers if not _changes_outside_of_step(o)]
        if not guarded:
            return None
        storages = _C.StorageSet()
        for optimizer in guarded:
            if any(group.get("capturable") for group in optimizer.param_groups):
                guard.tell_of_graphs(
                    f"an {type(optimizer).__name__} with capturable=True is saved, whose steps may "
                    "be captured in a CUDA graph"
                )
            storages.add([group["params"] for group in optimizer.param_groups])
            # Some wrappers have no state of their own.
            storages.add(getattr(optimizer, "state", {}))
        return storages

    def _busy(self, shape: Shape, leaves: list[Any], wanted: bytes | None) -> StagerBusy | None:
        """Wait, or tell, where saves under way leave no room for this one."""
        while True:
            others = [staging for staging in self._under_way() if staging.direct]
            if not others:
                return None
            native = self.engine.native
            needed = shape.needed_bytes(leaves, wanted)
            free = native.arena_max_bytes - native.arena_used_bytes
            if needed <= free:
                return None
            if self.when_busy != "wait":
                return StagerBusy(
                    f"saves under way leave {free} bytes of max_pinned_bytes for copies; "
                    f"{needed} are needed"
                )
            others[0].wait_released()

    def _under_way(self) -> list[Staging]:
        with self._lock:
            return [staging for ref in self._in_flight if (staging := ref()) is not None]

    def _run_later(self, task: Any) -> None:
        with self._lock:
            if self._finisher is None:
                self._finisher = ThreadPoolExecutor(1, thread_name_prefix="pyckpt-staging")
            try:
                self._finisher.submit(task)
                return
            except RuntimeError:
                # The interpreter is on its way out, or no thread can be started. The task may be
                # in the pool's queue all the same, and is not to be run twice.
                self._finisher = None
        task()

    def forget_parent(self) -> None:
        """In a forked child: copies under way are the parent's, and so is the thread that waits."""
        for staging in self._in_flight:
            copies = staging()
            if copies is not None:
                copies.forget_parent()
        self._in_flight = []
        self._finisher = None

    def _forget(self, staging: Staging) -> None:
        with self._lock:
            self._in_flight = [ref for ref in self._in_flight if ref() not in (staging, None)]

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has other optimizers, other memory, and nothing to stage.
        settings = self.when_busy, self.shared_memory, self.use_async_staging, self._engine
        return _stager_of, settings


def _changes_outside_of_step(optimizer: Any) -> bool:
    """Schedule-free optimizers change parameters in ``train`` and ``eval``, too, between which
    programs save; those calls have no hooks."""
    inner = getattr(optimizer, "optimizer", None)  # Accelerate gives any optimizer these methods
    if isinstance(inner, torch.optim.Optimizer):
        return _changes_outside_of_step(inner)
    return callable(getattr(optimizer, "train", None))


def _stager_of(
    when_busy: Any, shared_memory: bool, use_async_staging: bool, engine: Engine | None
) -> PinnedStager:
    return PinnedStager(
        when_busy=when_busy,
        shared_memory=shared_memory,
        use_async_staging=use_async_staging,
        engine=engine,
    )


_REGION_GRAIN = _C.page_bytes


class Shape:
    """What a stager remembers of state dicts of one shape."""

    def __init__(self, tree: _C.StateTree, leaves: Leaves) -> None:
        self.tree = tree
        self.leaves = leaves
        self.plan: KnownPlan | None = None
        """What the ranks agreed on to write of it, once they did."""

    def wanted(self) -> bytes | None:
        """Which leaves this rank will write, a byte each; None for all."""
        plan = self.plan
        return plan.wanted() if plan is not None and plan.is_remembered() else None

    def needed_bytes(self, leaves: list[Any], wanted: bytes | None) -> int:
        """Bytes of the copies of the leaves that are wanted, at most."""
        sources = self.leaves.sources(leaves)
        mask = repeat(1) if wanted is None else self.leaves.sources_wanted(leaves, wanted)
        # Row-major tensors that are the same memory are copied once.
        sizes = {
            (source.data_ptr(), source.nbytes)
            if source.is_contiguous()
            else id(source): source.nbytes
            for source, is_wanted in zip(sources, mask, strict=False)
            if is_wanted
            and isinstance(source, torch.Tensor)
            and is_plain_type(source)
            and source.layout is torch.strided
        }
        small = sum(size + _SMALL_GRAIN for size in sizes.values() if size < _SMALL)
        large = sum(size + _REGION_GRAIN for size in sizes.values() if size >= _SMALL)
        return small + large + 2 * _REGION_GRAIN  # the small ones in two regions: guarded, and not


_SMALL = _C.small_source_bytes  # smaller ones lie beside each other in one region
_SMALL_GRAIN = _C.small_alignment_bytes


class Staging:
    """The copies of one save. ``staged`` is done when they are whole, or failed."""

    def __init__(
        self,
        stager: PinnedStager,
        native: _C.Staging,
        shape: Shape,
        *,
        direct: bool,
        busy: StagerBusy | None,
    ) -> None:
        self.stager = stager
        self.shape = shape
        self.direct = direct
        self.busy = busy
        """Why nothing was copied: the save is to be skipped, or to fail with this."""
        self.staged: Future[None] = Future()
        statistics = native.statistics()
        self.bytes = statistics.bytes_staged
        self.streams = direct and statistics.bytes_streamed > 0
        """Whether the writer reads a part of the state from where it is."""
        self.streams_volatile = direct and native.streamed_volatile_bytes > 0
        """The same of what may change before the next step."""
        self.save_thread: threading.Thread | None = None
        self.dropped = False
        """Whether the state dict of the copies is gone, as after an ``async_save`` that raised."""
        self.on_release: Callable[[], object] = bool
        """Called when the save is over, however it ended."""
        self.planning: CollectorPause | None = None
        """While the save is planned: DCP makes a dozen objects for each tensor, and a coordinator
        as many again, with which the collector takes longer than they do."""
        self._native = native
        self._released = threading.Event()

    @property
    def released(self) -> bool:
        """Whether the save is over."""
        return self._released.is_set()

    def finish(self) -> None:
        """Wait for the copies; on the stager's thread."""
        try:
            with named("wait for copies", self.bytes):
                self._native.wait()
        except BaseException as error:
            self._native.release_sources()
            _logger.error("the state could not be copied, and will not be saved: %s", error)
            if not isinstance(error, EngineClosed):
                self.stager.keep_failure(error)
            self._done()
            self.staged.set_exception(error)
        else:
            self._native.release_sources()
            self._done()
            self.staged.set_result(None)

    def _done(self) -> None:
        if not self.streams:
            guard.discard(self)
        if not self.direct:
            self.stager._forget(self)

    def guard(self) -> None:
        """Make what the calling thread does next wait for the copies; or else fail the save, since
        what comes next may tear them. Errors are for ``staged``, and for the writer."""
        if self.released:
            return
        try:
            self._native.guard()
        except Exception as error:
            self._native.fail(f"a step could not be made to wait for the copies: {error}")
            _logger.debug("the copies of a save that fails hold nothing back: %s", error)
        if self.streams:
            self.wait_released()

    def check(self) -> None:
        """Raise what keeps the copies from being the state at the call, as far as it is known. A
        writer asks when it has written them all, since each may have been whole when it was
        written, and not the state."""
        self._native.check()

    def wait_released(self) -> None:
        """Wait until the save is through with the state, or has ended."""
        while not self._released.is_set() and self.save_thread is not threading.current_thread():
            thread = self.save_thread
            # A save that fails before it writes tells nobody but its future: its thread ends. One
            # that finds no thread has not even that.
            if self.dropped if thread is None else not thread.is_alive():
                self.release()
            self._released.wait(_THREAD_LOOK_SECONDS)

    def release(self) -> None:
        """Give the memory back, whoever still has the tensors. Idempotent."""
        if self.released:
            return
        self.end_planning()
        self._native.release()
        guard.discard(self)
        self.stager._forget(self)
        self._released.set()
        self.on_release()

    def end_planning(self) -> None:
        """Idempotent."""
        if self.planning is not None:
            self.planning.end()

    def forget_parent(self) -> None:
        """In a forked child: nothing comes of these copies here, and nobody is to wait for them."""
        # Not the parent's, whose locks another thread may have held at the fork.
        self.staged, self._released = Future(), threading.Event()
        self.staged.set_exception(EngineClosed("the save began in another process, before a fork"))
        self._released.set()


_THREAD_LOOK_SECONDS = 0.1

_ends = threading.local()


class _AtEnd:
    """Releases a staging when it goes, as all that is local to a thread does at its end."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging

    def __del__(self) -> None:
        self.staging.release()


def release_at_thread_end(staging: Staging) -> None:
    """Have the memory given back when the calling thread, which saves it, ends: DCP has a thread
    for each save, and does not tell a writer that one failed before or after it wrote. For the same
    reason it is here that a pause of the collector begins, which ``end_planning`` ends.
    Idempotent."""
    thread = threading.current_thread()
    if staging.save_thread is thread:
        return
    staging.save_thread = thread
    if thread is not threading.main_thread():
        _ends.save = _AtEnd(staging)  # in the place of one of a save before, which is over
        staging.planning = CollectorPause()


class StagedStateDict(dict[str, Any]):
    """A staged state dict on its way to DCP; to another process it goes once it is whole."""

    def __init__(self, values: dict[str, Any], staging: Staging) -> None:
        super().__init__(values)
        self.staging = staging

    def __del__(self) -> None:
        # No more than that: it may come at any line of a thread that holds the stager's lock.
        self.staging.dropped = True

    def __reduce__(self) -> Any:
        from pyckpt.dcp.shared import share

        return share(self)


_default_lock = fork_safe_lock()
_stagers: weakref.WeakSet[PinnedStager] = weakref.WeakSet()


def _after_fork() -> None:
    for stager in list(_stagers):
        stager.forget_parent()


os.register_at_fork(after_in_child=_after_fork)


def default_stager(engine: Engine | None) -> PinnedStager:
    """The stager of writers that were not given one; it knows no optimizers. One an engine."""
    engine = default_engine() if engine is None else engine
    with _default_lock:
        stager: PinnedStager | None = engine.__dict__.get("_stager")
        if stager is None:
            stager = engine.__dict__["_stager"] = PinnedStager(engine=engine)
        return stager
