"""Locks in forked children."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _forks import status_of_child

import pyckpt
from pyckpt import locks
from pyckpt.locks import fork_safe_lock
from pyckpt.profiling import count_syncs

PACKAGE = Path(pyckpt.__file__).parent


@contextmanager
def all_held_elsewhere() -> Iterator[None]:
    """Another thread holds every lock of this kind that there is."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in list(locks._locks):
                stack.enter_context(lock)
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        yield
    finally:
        release.set()
        thread.join()


def save(path: Path) -> None:
    writer = pyckpt.DirectWriter(path / "checkpoint", sync_files=False)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=pyckpt.SavePlanner())


def save_in_background(path: Path) -> None:
    writer = pyckpt.DirectWriter(path / "checkpoint", sync_files=False)
    state = {"a": torch.ones(3)}
    dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner()).result()


def load(path: Path) -> None:
    save(path)
    pyckpt.load({"a": torch.zeros(3)}, path / "checkpoint", allow=[set])


def learn(path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    pyckpt.optim.placement(torch.optim.Adam([parameter]))


def count(path: Path) -> None:
    with count_syncs():
        torch.ones(3).add_(1)


def use_checkpointer(path: Path) -> None:
    with pyckpt.Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).wait()


@pytest.mark.parametrize(
    "use",
    [save, save_in_background, load, learn, count, use_checkpointer],
    ids=lambda f: f.__name__,
)
def test_a_child_waits_for_no_thread_of_its_parent(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    with all_held_elsewhere():
        assert status_of_child(lambda: use(tmp_path)) == 0


def test_what_the_forking_thread_holds_stays_held() -> None:
    lock = fork_safe_lock()

    def check() -> None:
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert taken == [False]
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    with lock:
        assert status_of_child(check) == 0


def _makes_a_lock(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "threading"
        and (
            node.func.attr in ("Lock", "RLock", "Semaphore", "BoundedSemaphore")
            # Makes a lock of its own unless it is given one.
            or (node.func.attr == "Condition" and not node.args)
        )
    )


def _lasting(tree: ast.AST) -> Iterator[Any]:
    """Assignments to names of a module and to attributes, which outlive a call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module):
            yield from (one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Attribute) for target in targets):
                yield node


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_lasting_locks_survive_a_fork(path: Path) -> None:
    made = [
        node.lineno
        for node in _lasting(ast.parse(path.read_text()))
        if node.value is not None and any(_makes_a_lock(part) for part in ast.walk(node.value))
    ]
    assert not made, f"{path.name} makes locks in lines {made}: use fork_safe_lock"


def test_a_latch_wakes_all_who_wait() -> None:
    latch = locks.Latch()
    waiting = [threading.Thread(target=latch.wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    latch.set()
    for thread in waiting:
        thread.join(60)
        assert not thread.is_alive()
    latch.set()
    latch.wait()
