"""A rank that is killed is named by all others, whatever they are doing, and nobody else is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import TIMEOUT_S, Child, Pipe
from _sampling import slow

import pyckpt
from pyckpt.errors import RanksLost

_DEAD = 1


def _outcome(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _meet(store: str, rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def _one_is_killed(_: Pipe, store: str, run: Path, rank: int, where: str) -> tuple[Any, str]:
    """Rank 1 dies. Rank 2 comes to where the others meet only when rank 0 has seen that."""
    _meet(store, rank)
    seen = run.parent / "rank 0 has seen it"

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Any:
            if rank == _DEAD:
                os.kill(os.getpid(), signal.SIGKILL)
            while rank == 2 and not seen.exists():
                time.sleep(0.01)
            return call(*args, **options)

        return wait

    state = {"w": torch.full((100,), float(rank))}
    checkpointer = pyckpt.Checkpointer(run, timeout=TIMEOUT_S)
    checkpointer.save(1, state).wait(TIMEOUT_S)
    dist.barrier()
    if where == "writing":
        pyckpt.DirectWriter._write = late(pyckpt.DirectWriter._write)  # type: ignore[method-assign]
        error = checkpointer.save(2, state).committed.exception(2 * TIMEOUT_S)
    elif where == "reading":
        reader: Any = pyckpt.DirectReader
        reader.read_data = late(reader.read_data)
        error = _outcome(lambda: checkpointer.restore(state))
    else:
        late(bool)() if rank == _DEAD else None
        while checkpointer._ranks.lost is None:
            time.sleep(0.01)
        error = _outcome(lambda: checkpointer.save(2, state))
    if rank == 0:
        seen.touch()
    checkpointer._close(wait=False)
    return (error.ranks if isinstance(error, RanksLost) else error), str(error)


@pytest.mark.parametrize("where", ["reading", slow("writing"), slow("idle")])
def test_a_killed_rank_is_named_and_no_other(where: str, tmp_path: Path) -> None:
    store, run = str(tmp_path / "store"), tmp_path / "run"
    children = [Child(_one_is_killed, store, run, rank, where) for rank in range(3)]
    try:
        for rank in (0, 2):
            ranks, said = children[rank].receive()
            assert ranks == (_DEAD,), said
            assert "rank 1 (" in said
            assert "did not come" in said
    finally:
        for child in children:
            child.kill()


def _one_is_killed_after_another_has_left(
    _: Pipe, store: str, run: Path, rank: int
) -> tuple[tuple[int, ...], str]:
    """Rank 1 dies when the ``with`` block of rank 0 has raised. Rank 2 trains."""
    _meet(store, rank)
    checkpointer = pyckpt.Checkpointer(run, timeout=TIMEOUT_S)
    if rank == 0:
        checkpointer._close(wait=False)
    dist.barrier()
    (run.parent / f"ready {rank}").touch()
    while rank == _DEAD:
        if all((run.parent / f"ready {other}").exists() for other in (0, 2)):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    while checkpointer._ranks.lost is None:
        time.sleep(0.01)
    checkpointer._close(wait=False)
    return checkpointer._ranks.lost.ranks, str(checkpointer._ranks.lost)


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_named(tmp_path: Path) -> None:
    store, run = str(tmp_path / "store"), tmp_path / "run"
    function = _one_is_killed_after_another_has_left
    children = [Child(function, store, run, rank) for rank in range(3)]
    try:
        ranks, said = children[2].receive()
        assert ranks == (_DEAD,), said
    finally:
        for child in children:
            child.kill()


def _stays_in_its_own_code(
    _: Pipe, store: str, run: Path, rank: int
) -> tuple[tuple[int, ...], str]:
    """Rank 1 is alive, and hangs in the code of the program that a restore calls."""
    _meet(store, rank)
    seen = run.parent / f"seen {rank}"
    state: dict[str, Any] = {"own": _Own()}
    checkpointer = pyckpt.Checkpointer(run, timeout=3.0)
    checkpointer.save(1, state).wait(TIMEOUT_S)
    dist.barrier()
    if rank == _DEAD:
        state["own"].waits_for = [run.parent / f"seen {other}" for other in (0, 2)]
    error = _outcome(lambda: checkpointer.restore(state))
    seen.touch()
    checkpointer._close(wait=False)
    assert isinstance(error, RanksLost)
    return error.ranks, str(error)


class _Own:
    waits_for: list[Path]

    def __init__(self) -> None:
        self.waits_for = []

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        while not all(one.exists() for one in self.waits_for):
            time.sleep(0.01)


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_restore_is_named(tmp_path: Path) -> None:
    store, run = str(tmp_path / "store"), tmp_path / "run"
    children = [Child(_stays_in_its_own_code, store, run, rank) for rank in range(3)]
    try:
        for child in children:
            ranks, said = child.receive()
            assert ranks == (_DEAD,), said
    finally:
        for child in children:
            child.kill()
