"""Ways to save asynchronously, and the training time that each takes away."""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _common import MIB, Sample, State, Variant, must_equal, remove, zeros_like
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

import pyckpt

_SAVE_SECONDS_MAX = 300.0


# --- the ways ---------------------------------------------------------------------------------


@dataclass
class Pending:
    """A save under way."""

    future: Future[Any]
    staged: Future[Any] | None = None
    """Done when the state may be changed, where the program must wait for that itself."""

    def before_change(self) -> None:
        """What the peer has its users do before they change the state."""
        if self.staged is not None:
            self.staged.result()

    def done(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()


class Saver(ABC):
    """One way to save asynchronously, again and again. Used from one thread."""

    name: str

    def prewarm(self, state: Any) -> None:  # noqa: B027
        """Take the memory that saves of such a state will need, where there is such a call."""

    def let_go(self) -> None:  # noqa: B027
        """Give back what only the last save needed, and have ready what the next one needs. Called
        when a save is through, outside of any timing."""

    @abstractmethod
    def start(self, state: Any, path: Path) -> Pending: ...

    def changing(self) -> AbstractContextManager[Any]:
        """What the peer has its users put around a change of the state."""
        return nullcontext()

    def load(self, into: Any, path: Path) -> None:
        """By stock's loader, unless the peer has a format of its own."""
        dcp_load(into, storage_reader=FileSystemReader(path), no_dist=True)

    def close(self) -> None:  # noqa: B027
        """Give back memory and processes."""


class Ours(Saver):
    """DirectWriter and PinnedStager. ``cached_plans``: with `pyckpt.SavePlanner`, or stock's."""

    def __init__(
        self,
        *,
        engine: pyckpt.Engine,
        optimizers: list[torch.optim.Optimizer] | None = None,
        cached_plans: bool = True,
        name: str = "DirectWriter, PinnedStager",
    ) -> None:
        self.name = name
        self.engine = engine
        self.stager = pyckpt.PinnedStager(optimizers=optimizers or [], engine=engine)
        self._cached_plans = cached_plans
        self.writer: pyckpt.DirectWriter | None = None

    def prewarm(self, state: Any) -> None:
        self.stager.prewarm(state)

    def start(self, state: Any, path: Path) -> Pending:
        self.writer = pyckpt.DirectWriter(path, stager=self.stager, engine=self.engine)
        planner = pyckpt.SavePlanner() if self._cached_plans else None
        future = async_save(state, storage_writer=self.writer, planner=planner, no_dist=True)
        assert isinstance(future, Future)
        return Pending(future)

    def close(self) -> None:
        self.stager.close()


class Stock(Saver):
    """``dcp.async_save`` as it is: FileSystemWriter, and the stager that it makes by itself."""

    name = "FileSystemWriter (stock)"

    def start(self, state: Any, path: Path) -> Pending:
        future = async_save(state, storage_writer=FileSystemWriter(path), no_dist=True)
        assert isinstance(future, Future)
        return Pending(future)


@functools.cache
def stagers_serve_once() -> bool:
    """Whether DefaultStager fails at its second call, as it does in torch 2.11, whose `stage` ends
    with what belongs into `close`."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        for _ in range(2):
            stager.stage({"weight": torch.zeros(1)})
    except KeyError:
        return True
    finally:
        stager.close()
    return False


class DefaultStagers:
    """DefaultStager, kept from save to save; or, where it serves once, another for each save, which
    takes its memory anew, as it does in a program."""

    def __init__(self, options: StagingOptions) -> None:
        self._options = options
        self._stager: DefaultStager | None = None
        self._taken = False

    def take(self) -> DefaultStager:
        if self._taken and stagers_serve_once():
            self.let_go()
        self._taken = True
        if self._stager is None:
            self._stager = DefaultStager(self._options)
        return self._stager

    def stage(self, state: Any) -> Any:
        return self.take().stage(state)

    def let_go(self) -> None:
        """Where it serves once: of the stager that has served, which keeps its copy, so that no
        later call has to unpin and free that; and make the next one."""
        if stagers_serve_once():
            if self._taken:
                self.close()
            if self._stager is None:
                self._stager = DefaultStager(self._options)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        self._stager, self._taken = None, False


class StockDefaultStager(Saver):
    """FileSystemWriter, and DefaultStager with all options that the device offers."""

    name = "FileSystemWriter, DefaultStager"

    def __init__(self, *, cuda: bool = False, shared_memory: bool = True) -> None:
        self._stagers = DefaultStagers(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=shared_memory,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )

    def start(self, state: Any, path: Path) -> Pending:
        response: Any = async_save(
            state,
            storage_writer=FileSystemWriter(path),
            async_stager=self._stagers.take(),
            no_dist=True,
        )
        return Pending(response.upload_completion, response.staging_completion)

    def let_go(self) -> None:
        self._stagers.let_go()

    def close(self) -> None:
        self._stagers.close()


class TorchCheckpointing(Saver):
    """``CheckpointManager.save`` of the package torch_checkpointing, which has a format of its own.
    Without direct I/O, with which 0.1.1 cannot write to ext4; without a GPU, without what takes
    one."""

    name = "torch_checkpointing"

    def __init__(self, *, cuda: bool = False) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(
                    staging_config=CheckpointStagerConfig(
                        use_pinned_memory=cuda,
                        use_shared_memory=True,
                        use_async_staging=True,
                        use_non_blocking_copy=cuda,
                    ),
                    # Its process imports torch; on a busy machine that takes more than its 30 s.
                    process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=120),
                ),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    @classmethod
    def where_it_runs(
        cls, directory: Path, *, cuda: bool = False
    ) -> tuple[TorchCheckpointing | None, str]:
        """One that has saved something, so that its process is there; or None, and why."""
        if importlib.util.find_spec("torch_checkpointing") is None:
            return None, "torch_checkpointing is not installed (pip: torch_checkpointing==0.1.1)"
        path = directory / "torch_checkpointing"
        try:
            saver = cls(cuda=cuda)
            saver.start({"model": {"weight": torch.zeros(1024)}}, path).wait()
        except Exception as error:
            return None, f"torch_checkpointing cannot save here: {error!r}"
        finally:
            remove(path)
        return saver, ""

    def prewarm(self, state: Any) -> None:
        self._manager.prewarm_staging(state)

    def start(self, state: Any, path: Path) -> Pending:
        future = self._manager.save(str(path), state)
        assert future is not None
        return Pending(future)

    def changing(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = self._manager.lock()
        return guard

    def load(self, into: Any, path: Path) -> None:
        # What it returns is what it was given, filled in place; what it was not given, too.
        loaded = self._manager.load(str(path), into=into)
        for group, tensors in loaded.items():
            for name, tensor in tensors.items():
                if into[group][name] is not tensor:
                    into[group][name].copy_(tensor)

    def close(self) -> None:
        self._manager.close()


class BareWriter(Saver):
    """The limit: a process of its own that writes as many bytes with direct I/O, from memory that
    it has, and syncs. Knows nothing of the state, so that what is beside it loses no more than the
    disk's work itself takes."""

    name = "bare direct I/O, in another process"

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_write_directly, args=(theirs, size), daemon=True)
        self._process.start()
        theirs.close()
        self._pipe.recv()  # it is ready

    def start(self, state: Any, path: Path) -> Pending:
        self._pipe.send(path)
        return _Elsewhere(self._pipe)

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


class _Elsewhere(Pending):
    def __init__(self, pipe: Connection) -> None:
        super().__init__(Future())
        self._pipe = pipe

    def done(self) -> bool:
        if not self.future.done() and self._pipe.poll():
            self.future.set_result(self._pipe.recv())
        return self.future.done()

    def wait(self) -> None:
        while not self.done():
            self._pipe.poll(None)


_BLOCK = 8 * MIB
_WRITES_AT_ONCE = 4


def _write_directly(pipe: Connection, size: int) -> None:
    memory = mmap.mmap(-1, _BLOCK)
    memory[:] = os.urandom(_BLOCK)
    size = -(-size // _BLOCK) * _BLOCK
    with ThreadPoolExecutor(_WRITES_AT_ONCE) as threads, suppress(EOFError):
        pipe.send("ready")
        while True:
            path = pipe.recv()
            path.mkdir()
            file = os.open(path / "bytes", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            os.posix_fallocate(file, 0, size)
            writes = [threads.submit(os.pwrite, file, memory, at) for at in range(0, size, _BLOCK)]
            if any(write.result() != _BLOCK for write in writes):
                raise OSError("a short write")
            os.fsync(file)
            os.close(file)
            pipe.send("done")


# --- the time ---------------------------------------------------------------------------------


@dataclass
class Loop:
    """A training loop that saves are set against."""

    compute: Callable[[], object]
    """A step, up to where it changes the state."""
    change: Callable[[], object] = bool
    """The rest of the step."""
    steps_min: int = 1
    """At least so many steps are compared."""
    synchronize: Callable[[], object] = bool
    """Waits for the device, before the clock is read at both ends of a window."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the last window."""

    def step(self, saver: Saver, pending: Pending) -> None:
        start = time.perf_counter()
        self.compute()
        pending.before_change()
        with saver.changing():
            self.change()
        self.step_seconds.append(time.perf_counter() - start)

    def run(self, steps: int) -> float:
        """Seconds of so many steps without a save. Python does the same at each of them as beside a
        save, so that short steps can be compared."""
        nothing, pending = _Nothing(), Pending(Future())
        self.step_seconds = []
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            if pending.done() or time.perf_counter() - start > math.inf:
                break
            self.step(nothing, pending)
        self.synchronize()
        return time.perf_counter() - start


class _Nothing(Saver):
    name = "no save"

    def start(self, state: Any, path: Path) -> Pending:
        return Pending(Future())


def run_with_save(loop: Loop, saver: Saver, state: Any, path: Path) -> Sample:
    """Save once, and step until the checkpoint is there and a tenth longer, since what a save
    leaves behind goes after it."""
    loop.step_seconds = []
    loop.synchronize()
    start = time.perf_counter()
    pending = saver.start(state, path)
    blocked = time.perf_counter() - start
    while not pending.done():
        if time.perf_counter() - start > _SAVE_SECONDS_MAX:
            raise TimeoutError(f"{saver.name}: a save took more than {_SAVE_SECONDS_MAX:.0f} s")
        loop.step(saver, pending)
    until_done = time.perf_counter() - start
    steps_during = len(loop.step_seconds)
    while len(loop.step_seconds) < max(loop.steps_min, steps_during + 1 + steps_during // 10):
        loop.step(saver, pending)
    loop.synchronize()
    seconds = time.perf_counter() - start
    pending.wait()
    return {
        "with_seconds": seconds,
        "steps": len(loop.step_seconds),
        "blocked_seconds": blocked,
        "save_seconds": until_done,
        "steps_during": steps_during,
        "worst_step_seconds": max(loop.step_seconds),
    }


def measure_loss(loop: Loop, saver: Saver, state: Any, path: Path) -> Sample:
    """The training time that one save takes: that of K steps with the save, from the call on, less
    that of K steps without, right after it. K is how many steps the save lasted."""
    sample = run_with_save(loop, saver, state, path)
    steps = int(sample["steps"])
    without = loop.run(steps)
    step = without / steps
    during = sample["save_seconds"] - sample["blocked_seconds"]
    return {
        "seconds": sample["with_seconds"] - without,
        **sample,
        "step_seconds": step,
        "worst_idle_step_seconds": max(loop.step_seconds),
        # How fast the loop runs while the save does, blocked time apart.
        "rate_during": sample["steps_during"] * step / during if sample["steps_during"] else 1.0,
    }


def loss_variant(
    saver: Saver, loop: Loop, state_of: Callable[[], State], path: Path, name: str | None = None
) -> Variant:
    """For `interleave`. ``state_of`` gives the state to save, anew for each save."""

    def check() -> None:
        # The third save is the first for which everything is known and in place.
        remove(path)
        measure_loss(loop, saver, state_of(), path)
        remove(path)
        state = state_of()
        expected = {
            group: {key: tensor.detach().clone() for key, tensor in tensors.items()}
            for group, tensors in state.items()
        }
        run_with_save(loop, saver, state, path)
        found = zeros_like(expected)
        saver.load(found, path)
        must_equal(found, expected, saver.name)

    return Variant(
        name or saver.name,
        run=lambda: measure_loss(loop, saver, state_of(), path),
        check=check,
        clean=lambda: remove(path),
    )


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Parameters and buffers, and the tensors of the optimizer's state, in place."""
    state: State = {"model": {**dict(model.named_parameters()), **dict(model.named_buffers())}}
    names: dict[torch.Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    for parameter, entries in optimizer.state.items():
        for key, tensor in entries.items():
            if isinstance(tensor, torch.Tensor):
                state.setdefault(key, {})[names[parameter]] = tensor
    return state
