"""Run functions in child processes: one, or one a rank of a process group.

Children are forked from a server that has imported torch and pyckpt once, so that one costs
milliseconds and starts from a clean state. What they run, and its arguments, cross by pickle: it
must be a function at the top of a module.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_preloaded = [
    "pyckpt.train.checkpointer",  # which imports nearly all of it
    "pytest",
    "torch._dynamo",  # which DTensor imports at its first use
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torchmetrics",
]
_CONTEXT.set_forkserver_preload(_preloaded)

TIMEOUT_S = 120.0  # far more than anything here takes: it only turns a hang into a failure


def preload(*modules: str) -> None:
    """Have the children start with these modules imported, too. For the top of a test module, since
    it has no effect once there was a child."""
    _preloaded.extend(modules)
    _CONTEXT.set_forkserver_preload(_preloaded)


class ChildFailed(Exception):
    """A function raised in a child, or its process died. ``cause`` is what it raised, or None where
    that does not pickle."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RanksFailed(Exception):
    """A function raised on some ranks; ``failures`` has each one's ChildFailed. Its own cause is
    the exception of the first of them."""

    def __init__(self, failures: dict[int, ChildFailed]) -> None:
        super().__init__("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        self.failures = failures


class Child:
    """A process that runs one function. The function's first argument is its end of a pipe to
    ``connection``, for what the two have to say to each other meanwhile."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, deadline: float | None = None) -> Any:
        """The next thing that the function sends.

        Raises:
            ChildFailed: the function raised.
            EOFError: its process died.
            TimeoutError: it is silent; the process is killed.
        """
        deadline = time.monotonic() + TIMEOUT_S if deadline is None else deadline
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            self.kill()
            raise TimeoutError(f"a child said nothing for {TIMEOUT_S:.0f} s and was killed")
        kind, value = self.connection.recv()
        if kind == "error":
            self.join()
            raise ChildFailed(*value)
        return value

    def join(self) -> int:
        """The exit code, of a process that is about to end."""
        self.process.join(TIMEOUT_S)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError("a child did not end and was killed")
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Pipe:
    """A function's end of the pipe to its ``Child``."""

    def __init__(self, pipe: connection.Connection) -> None:
        self._pipe = pipe

    def send(self, value: Any) -> None:
        self._pipe.send(("value", value))

    def wait(self) -> Any:
        return self._pipe.recv()


def _run(pipe: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    # Ignored, should the tests run as a job in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # what the server has imported: to collect it would copy its pages to this child
    torch.set_num_threads(1)  # the tests run several of these on few cores
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unin")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # stock's, in torch 2.9
    try:
        answer = ("value", function(Pipe(pipe), *args))
    except BaseException as error:
        message = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            pipe.send(("error", (message, None)))
        else:
            pipe.send(("error", (message, error)))
    else:
        pipe.send(answer)


def run_child(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(pipe, *args)`` returns in a child.

    Raises:
        ChildFailed: it raised, or its process died.
    """
    child = Child(function, *args)
    try:
        result = child.receive()
    except EOFError:
        raise ChildFailed(f"a child died with exit code {child.join()}") from None
    child.join()
    return result


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns on each rank of a gloo process group of this size.

    Raises:
        RanksFailed: it raised on some ranks.
        TimeoutError: some rank is stuck; all are killed.
    """
    store = tempfile.mkdtemp(prefix="pyckpt-ranks-")
    deadline = time.monotonic() + TIMEOUT_S
    children = [
        Child(_in_group, os.path.join(store, "store"), rank, world_size, function, args)
        for rank in range(world_size)
    ]
    results: list[Any] = [None] * world_size
    failures: dict[int, ChildFailed] = {}
    try:
        for rank, child in enumerate(children):
            try:
                results[rank] = child.receive(deadline)
            except ChildFailed as error:
                failures[rank] = error
            except EOFError:
                failures[rank] = ChildFailed(f"its process died with exit code {child.join()}")
        if failures:
            raise RanksFailed(failures) from failures[min(failures)].cause
        for child in children:
            child.join()
    finally:
        for child in children:
            child.kill()
        shutil.rmtree(store)
    return results


def _in_group(
    _pipe: Pipe,
    store: str,
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    args: Sequence[Any],
) -> Any:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the name of the machine resolves to
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S / 2),  # a stuck rank then says where
    )
    try:
        return function(*args)
    finally:
        if dist.is_initialized():  # the end of a framework's training destroys it
            dist.destroy_process_group()
