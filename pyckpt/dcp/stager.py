"""PinnedStager: copies a state for an asynchronous save without stopping the program."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch

from pyckpt import _C, guard
from pyckpt.collector import collector_paused
from pyckpt.dcp.plans import KnownPlan
from pyckpt.dcp.recipes import CopyRecipe, Recipes
from pyckpt.dcp.staging import Staging
from pyckpt.engine import Engine, default_engine, engine_of
from pyckpt.errors import StagerBusy
from pyckpt.locks import fork_safe_lock
from pyckpt.optim.tensors import plain_parts
from pyckpt.optim.wrappers import changes_outside_of_step
from pyckpt.speaking import for_all
from pyckpt.timeline import named

__all__ = ["PinnedStager"]

_logger = logging.getLogger("pyckpt")


class PinnedStager:
    """An ``AsyncStager`` that copies with native threads and the GPU's copy engines, into memory
    that is allocated and registered with CUDA once.

    `DirectWriter` has one by default. Make one yourself to pass your optimizers to it, or to use it
    with another writer::

        writer = pyckpt.DirectWriter(path, stager=pyckpt.PinnedStager(optimizers=[optimizer]))
        dcp.async_save(state_dict, storage_writer=writer)

        stager = pyckpt.PinnedStager(optimizers=[optimizer])
        dcp.async_save(state_dict, storage_writer=other_writer, async_stager=stager)

    A checkpoint holds the state at the call.

    Parameters and state of the given optimizers may be copied after the call has returned. The next
    step of any optimizer waits for the copies that are left: on a GPU its stream waits, on a CPU
    its thread.

    Everything else (buffers, counters, other tensors, objects) is copied at the call. On a GPU the
    current stream waits for these copies, and not the thread; on a CPU the call waits. On a GPU the
    thread waits nevertheless where a state has more copies than the driver queues, about a thousand
    (docs/explanation/cuda.md).

    A program that changes parameters by other means than ``optimizer.step()`` calls ``wait_staged``
    first. Replaying a CUDA graph is such a means; so is a forward pass of
    ``nn.Embedding(max_norm=...)``. A `Checkpointer` copies the weights of such modules at the call.

    Args:
        optimizers: the optimizers whose parameters and state are changed in place by their steps
            alone. If an optimizer has a method ``train``, as schedule-free ones do, that method
            changes parameters without a step. Its parameters and state are copied at the call.
        when_busy: what a save with `DirectWriter` does when earlier saves, still under way, hold
            the memory that it needs. ``"wait"`` waits for them. ``"skip"`` writes nothing, on any
            rank, and logs a warning. ``"error"`` fails with ``StagerBusy``, on all ranks. Other
            writers take copies only: for them, tensors that find no room are copied to ordinary
            memory.
        shared_memory: whether the copies lie in memory that other processes can map. With
            ``async_checkpointer_type=PROCESS`` they then go to the other process as a few segments.
            Otherwise each tensor costs a descriptor and another copy.
        use_async_staging: as in stock's ``StagingOptions``. If true, ``stage`` returns a future,
            and ``async_save`` returns an ``AsyncSaveResponse``. If false, ``stage`` waits for the
            copies and returns them, and ``async_save`` returns one future. `DirectWriter` ignores
            this.
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
        self._engine = engine_of(engine)
        self._at_call: list[torch.Tensor] = []
        self._lock = fork_safe_lock()
        self._recipes = Recipes()
        self._in_flight: list[weakref.ref[Staging]] = []
        self._finisher: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None
        guard.watch()  # not at the first save, in the middle of training
        _stagers.add(self)

    def __repr__(self) -> str:
        optimizers = ", ".join(type(one).__name__ for one in self.optimizers) or "no optimizer"
        copies = sum(ref() is not None for ref in list(self._in_flight))
        return f"<PinnedStager for {optimizers}: {copies} under way, when_busy={self.when_busy!r}>"

    # The interface of DCP's AsyncStager.

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> Any:  # by the setting; a union helps no caller
        """Copy a state dict. Returns a future of the copy, in plain dicts and lists, which is done
        when all of it is copied. Without ``use_async_staging`` it waits, and returns the copy.

        Raises:
            BaseException: the error of an earlier save. Raised once: see ``take_failure``.
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
        """Wait until all copies are made."""
        for staging in self._under_way():
            staging.staged.result()

    def close(self) -> None:
        """Wait for copies under way. The memory stays with the engine, for others to use."""
        with self._lock:
            finisher, self._finisher = self._finisher, None
        if finisher is not None:
            finisher.shutdown(wait=True)

    # For the program.

    def prewarm(self, state_dict: dict[str, Any], *, background: bool = False) -> None:
        """Allocate the memory that saving such a state needs, register it with CUDA, and prepare
        the GPUs of the state, so that the first save does not have to. Copies nothing. May be
        called on a thread of its own, while the first steps run.

        Args:
            background: return at once, and have a native thread of low priority do it. A save that
                comes before it is done goes on from there. What cannot be made is left to that
                save, which raises the error.

        Raises:
            OSError: the system does not have that much memory.
            CudaError: the memory could not be registered.
        """
        recipe, leaves = self._recipes.of(state_dict)
        sources = recipe.leaves.sources(leaves)
        devices = {s.get_device() for s in sources if isinstance(s, torch.Tensor) and s.is_cuda}
        needed = recipe.needed_bytes(leaves, None)
        self.engine.native.prewarm(
            needed, shared=self.shared_memory, devices=sorted(devices), background=background
        )

    def wait_staged(self) -> None:
        """Make the program's next work wait for the copies that still read the state: GPU work on
        this thread's current streams waits for copies of GPU state, the thread itself for those of
        CPU state. A program that changes parameters without ``optimizer.step()`` calls this first.
        """
        guard.look_for_capture()
        for staging in self._under_way():
            staging.guard()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """`wait_staged` as a block: inside ``with stager.guard():`` parameters may be changed."""
        self.wait_staged()
        yield

    def take_failure(self) -> BaseException | None:
        """Return the error of an earlier save on this rank, and clear it, so that the next save
        does not raise it. None if no save failed, or a later save has raised the error already."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    @property
    def engine(self) -> Engine:
        """The memory and threads in use."""
        return default_engine() if self._engine is None else self._engine

    # For DirectWriter, for callers that know the modules, and for the copies of a save.

    def copy_at_call(self, tensors: Iterable[torch.Tensor]) -> None:
        """From the next save on, copy these tensors at the call, and whatever shares their memory,
        even if they are parameters of the optimizers. These replace the tensors of an earlier
        call."""
        self._at_call = list(tensors)

    def begin(
        self,
        state_dict: dict[str, Any],
        *,
        direct: bool,
        prove: Callable[[KnownPlan, Sequence[Any]], set[int]] | None = None,
    ) -> tuple[Staging, dict[str, Any]]:
        """Begin to copy; also return the copies, as a state dict.

        Args:
            direct: whether the writer reads tensors that found no room in place, releases the
                staging when it has read everything, and asks whether the staging ``has_room``. If
                it has none, nothing was copied.
            prove: called with the plan by which this rank wrote such a state before, if there is
                one, and the leaves. Returns the positions of leaves that need not be copied.
        """
        with named("stage"), collector_paused():
            recipe, leaves = self._recipes.of(state_dict)
            wanted = recipe.wanted() if direct else None
            if wanted is not None and prove is not None and recipe.plan is not None:
                proven = prove(recipe.plan, leaves)
                wanted = bytes(0 if i in proven else one for i, one in enumerate(wanted))
            busy = self._busy(recipe, leaves, wanted) if direct else None
            if busy is not None:
                wanted = bytes(len(leaves))
            return self._begin(recipe, leaves, wanted, direct=direct, busy=busy)

    def outline(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        """What copies of a state dict look like, to plan a save by: plain tensors have no memory,
        and all else is not copied. Also the leaves of the state dict."""
        with collector_paused():
            recipe, leaves = self._recipes.of(state_dict)
            native = _C.Staging(
                self.engine.native,
                sources := recipe.leaves.sources(leaves),
                wanted=bytes(len(sources)),
            )
            try:
                copies = native.take_tensors()
                return recipe.tree.build(recipe.leaves.outline(leaves, copies)), leaves
            finally:
                native.release()

    def adopt(self, state_dict: dict[str, Any], plan: KnownPlan) -> None:
        """From now on, copy of such a state dict only what this rank writes by a plan."""
        self._recipes.of(state_dict)[0].plan = plan

    def release_copies(self) -> None:
        """Give back the memory of all copies, for a caller that knows that no save is under way,
        and that none will begin with these copies."""
        for staging in self._under_way():
            staging.release()

    def keep_failure(self, error: BaseException) -> None:
        """Have the next save raise an error; the first, if there are several."""
        with self._lock:
            self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the error of `keep_failure`, once."""
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
        """Copy tensors that found no room in the engine's memory to ordinary memory."""
        _logger.log(
            for_all(logging.WARNING),
            "the state to be staged is larger than max_pinned_bytes, and this writer takes copies "
            "only: the rest is copied to ordinary memory",
        )
        return [
            copy.detach().to("cpu", copy=True) if copy is not None and copy is source else copy
            for source, copy in zip(sources, copies, strict=True)
        ]

    def _guarded_storages(self) -> _C.StorageSet | None:
        guarded = [o for o in self.optimizers if not changes_outside_of_step(o)]
        if not guarded:
            return None
        storages = _C.StorageSet()
        at_call = set().union(*map(_storages_of, self._at_call))
        for optimizer in guarded:
            if any(group.get("capturable") for group in optimizer.param_groups):
                guard.tell_of_graphs(
                    f"an {type(optimizer).__name__} with capturable=True is saved, whose steps may "
                    "be captured in a CUDA graph"
                )
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if at_call:
                params = [param for param in params if at_call.isdisjoint(_storages_of(param))]
            storages.add(params)
            # Some wrappers have no state of their own.
            storages.add(getattr(optimizer, "state", {}))
        return storages

    def _busy(
        self, recipe: CopyRecipe, leaves: list[Any], wanted: bytes | None
    ) -> StagerBusy | None:
        """If saves under way leave no room for this one, wait, or return an error."""
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
                # The interpreter is shutting down, or no thread can be started. The task may be in
                # the pool's queue nevertheless, and must not run twice.
                self._finisher = None
        task()

    def forget_parent(self) -> None:
        """In a forked child: the copies under way, and the thread that waits for them, belong to
        the parent."""
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


def _storages_of(tensor: torch.Tensor) -> set[int]:
    """The addresses of a tensor's storages; of a DTensor, of the part that is here."""
    return {part.untyped_storage()._cdata for part in plain_parts(tensor)}


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
