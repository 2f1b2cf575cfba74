"""PinnedStager: copies a state for an asynchronous save without stopping the program."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch

from pyckpt import _C, guard
from pyckpt.collector import collector_paused
from pyckpt.dcp.leaves import Leaves
from pyckpt.dcp.staging import CopyRecipe, Staging
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import EngineClosed, StagerBusy
from pyckpt.locks import fork_safe_lock
from pyckpt.optim.wrappers import changes_outside_of_step
from pyckpt.timeline import named

__all__ = ["PinnedStager", "default_stager"]

_logger = logging.getLogger("pyckpt")

_RECIPES_MAX = 8  # that a stager remembers, for as many shapes of state dicts


class PinnedStager:
    """An ``AsyncStager`` that copies with native threads and the GPU's copy engines, into memory
    that is allocated and registered with CUDA once.

    `DirectWriter` has one by default. Make one yourself to tell it your optimizers, or to use it
    with another writer::

        writer = pyckpt.DirectWriter(path, stager=pyckpt.PinnedStager(optimizers=[optimizer]))
        dcp.async_save(state_dict, storage_writer=writer)

        stager = pyckpt.PinnedStager(optimizers=[optimizer])
        dcp.async_save(state_dict, storage_writer=other_writer, async_stager=stager)

    What is saved is the state at the call.

    Parameters and state of the given optimizers may be copied after the call has returned. The next
    step of any optimizer waits for what is left to copy: on a GPU its stream waits, on a CPU its
    thread.

    Everything else (buffers, counters, other tensors, objects) is copied at the call. On a GPU the
    current stream waits for these copies, and not the thread; on a CPU the call waits.

    A program that changes parameters by other means than ``optimizer.step()`` calls ``wait_staged``
    first. Replaying a CUDA graph is such a means.

    Args:
        optimizers: the optimizers whose parameters and state are changed in place by their steps
            alone. An optimizer that has a method ``train`` may be given, too; schedule-free ones
            have it. That method changes parameters without a step, so all that belongs to such an
            optimizer is copied at the call.
        when_busy: what a save with `DirectWriter` does when earlier saves, still under way, hold
            the memory that it needs. ``"wait"`` waits for them. ``"skip"`` writes nothing, on any
            rank, and logs a warning. ``"error"`` fails with ``StagerBusy``, on all ranks. Other
            writers take copies only: for them, what finds no room is copied to ordinary memory.
        shared_memory: whether the copies lie in memory that other processes can map. With
            ``async_checkpointer_type=PROCESS`` they then cross as a few segments; without, as one
            descriptor a tensor.
        use_async_staging: as in stock's ``StagingOptions``. If true, ``stage`` returns a future,
            and so ``async_save`` returns an ``AsyncSaveResponse``. If false, ``stage`` waits for
            the copies and returns them, and ``async_save`` returns one future. `DirectWriter` does
            not look at this.
        engine: the memory and threads to use; by default the engine that everyone shares.

    Raises:
        ValueError: ``when_busy`` is none of the three.

    One stager serves any number of saves, from any threads.
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
        self._recipes: list[CopyRecipe] = []
        self._in_flight: list[weakref.ref[Staging]] = []
        self._finisher: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None
        guard.watch()  # not at the first save, in the middle of training
        _stagers.add(self)

    # What DCP asks of an AsyncStager.

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> Any:  # as of the setting: a union helps nobody
        """Copy a state dict. Returns a future, which has the copy, in plain dicts and lists, once
        it is whole. Without ``use_async_staging`` it waits for the copy and returns that.

        Raises:
            BaseException: what made an earlier save fail. Raised once: see ``take_failure``.
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
        """Take the memory that saving such a state will need, register it with CUDA, and make the
        GPUs of the state ready to copy, so that the first save has not to. Copies nothing. May be
        called on a thread of its own, while the first steps run.

        Raises:
            OSError: the system does not have that much memory.
            CudaError: the memory could not be registered.
        """
        recipe, leaves = self._recipe_of(state_dict)
        sources = recipe.leaves.sources(leaves)
        devices = {s.get_device() for s in sources if isinstance(s, torch.Tensor) and s.is_cuda}
        needed = recipe.needed_bytes(leaves, None)
        self.engine.native.prewarm(needed, shared=self.shared_memory, devices=sorted(devices))

    def wait_staged(self) -> None:
        """Make what the program does next wait for the copies that still need the state as it is:
        GPU work on this thread's current streams waits for copies of GPU state, the thread itself
        for those of CPU state. A program that changes parameters without ``optimizer.step()`` calls
        this first."""
        guard.look_for_capture()
        for staging in self._under_way():
            staging.guard()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """``with stager.guard():`` parameters may be changed in here; `wait_staged`, as a block."""
        self.wait_staged()
        yield

    def take_failure(self) -> BaseException | None:
        """Return what made an earlier save on this rank fail, so that the next save does not raise
        it. None where no save failed, or the next one has raised it already."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    @property
    def engine(self) -> Engine:
        """The memory and threads in use."""
        return default_engine() if self._engine is None else self._engine

    # For DirectWriter, and for the copies of a save.

    def begin(self, state_dict: dict[str, Any], *, direct: bool) -> tuple[Staging, dict[str, Any]]:
        """Begin to copy; return the copies, too, as a state dict.

        Args:
            direct: whether the writer reads what found no room from where it is, releases the
                staging when it has read it all, and looks whether the staging ``has_room``: where
                it has not, nothing was copied.
        """
        with named("stage"), collector_paused():
            recipe, leaves = self._recipe_of(state_dict)
            wanted = recipe.wanted() if direct else None
            busy = self._busy(recipe, leaves, wanted) if direct else None
            if busy is not None:
                wanted = bytes(len(leaves))
            return self._begin(recipe, leaves, wanted, direct=direct, busy=busy)

    def keep_failure(self, error: BaseException) -> None:
        """Have the next save raise an error; of several the first."""
        with self._lock:
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise what was kept, once."""
        failure = self.take_failure()
        if failure is not None:
            raise failure

    def forget(self, staging: Staging) -> None:
        """No longer count the copies of a save among those under way."""
        with self._lock:
            self._in_flight = [ref for ref in self._in_flight if ref() not in (staging, None)]

    def _begin(
        self,
        recipe: CopyRecipe,
        leaves: list[Any],
        wanted: bytes | None,
        *,
        direct: bool,
        busy: StagerBusy | None,
    ) -> tuple[Staging, dict[str, Any]]:
        sources = recipe.leaves.sources(leaves)
        native = _C.Staging(
            self.engine.native,
            sources,
            guarded=self._guarded_storages(),
            wanted=None if wanted is None else recipe.leaves.sources_wanted(leaves, wanted),
            shared=self.shared_memory,
        )
        try:
            copies = native.take_tensors()
            if not direct and native.statistics().bytes_streamed:
                copies = self._copy_rest(sources, copies)
            staged = recipe.tree.build(recipe.leaves.finish(leaves, copies))
        except BaseException:
            native.release()
            raise
        staging = Staging(
            self,
            native,
            recipe,
            direct=direct,
            busy=busy,
            refuses=self.when_busy == "error",
        )
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

    def _recipe_of(self, state_dict: dict[str, Any]) -> tuple[CopyRecipe, list[Any]]:
        for recipe in self._recipes:
            leaves = recipe.tree.match(state_dict)
            if leaves is not None:
                return recipe, leaves
        tree = _C.StateTree(state_dict)
        leaves = tree.match(state_dict)
        assert leaves is not None
        recipe = CopyRecipe(tree, Leaves(leaves))
        self._recipes = [recipe, *self._recipes[: _RECIPES_MAX - 1]]
        return recipe, leaves

    def _guarded_storages(self) -> _C.StorageSet | None:
        guarded = [o for o in self.optimizers if not changes_outside_of_step(o)]
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

    def _busy(
        self, recipe: CopyRecipe, leaves: list[Any], wanted: bytes | None
    ) -> StagerBusy | None:
        """Wait, or tell, where saves under way leave no room for this one."""
        while True:
            for staging in self._under_way():
                staging.release_if_left()
            others = [staging for staging in self._under_way() if staging.direct]
            if not others:
                return None
            native = self.engine.native
            needed = recipe.needed_bytes(leaves, wanted)
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

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has other optimizers, other memory, and nothing to stage.
        settings = self.when_busy, self.shared_memory, self.use_async_staging, self._engine
        return _stager_of, settings


def _stager_of(
    when_busy: Any, shared_memory: bool, use_async_staging: bool, engine: Engine | None
) -> PinnedStager:
    return PinnedStager(
        when_busy=when_busy,
        shared_memory=shared_memory,
        use_async_staging=use_async_staging,
        engine=engine,
    )


_stagers: weakref.WeakSet[PinnedStager] = weakref.WeakSet()


def _after_fork() -> None:
    for stager in list(_stagers):
        stager.forget_parent()


os.register_at_fork(after_in_child=_after_fork)


class _SharedStager(PinnedStager):
    """What writers share that were given none. It knows of no optimizers, does not keep its engine
    alive, and keeps no failures, since the next save may have nothing to do with one that failed.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._shared_engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        engine = self._shared_engine()
        if engine is None:
            raise EngineClosed("the engine that this stager copied with is gone")
        return engine

    def keep_failure(self, error: BaseException) -> None:
        pass


_shared_lock = fork_safe_lock()
# By the native half, since engines of equal settings are equal, and not the same.
_shared: weakref.WeakKeyDictionary[_C.Engine, PinnedStager] = weakref.WeakKeyDictionary()


def default_stager(engine: Engine | None) -> PinnedStager:
    """The stager of writers that were not given one; one an engine."""
    engine = default_engine() if engine is None else engine
    with _shared_lock:
        stager = _shared.get(engine.native)
        if stager is None:
            stager = _shared[engine.native] = _SharedStager(engine)
        return stager
