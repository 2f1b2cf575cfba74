"""The first save of ranks that hold the same: each copies only what it writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as OldShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import pyckpt
from pyckpt import Checkpointer
from pyckpt.dcp import ahead
from pyckpt.dcp.stager import PinnedStager
from pyckpt.errors import RanksLost, SaveError
from pyckpt.train import first_plan
from pyckpt.train.first_plan import replicated_bytes
from pyckpt.train.prewarmer import Prewarmer
from pyckpt.train.saver import Saver

MIB = 1 << 20
COUNT = 24


def state_of(value: float = 1.0) -> dict[str, Any]:
    """24 MiB that are the same on all ranks, a view that is not contiguous, an int and a string."""
    state: dict[str, Any] = {
        f"w{i}": torch.full((MIB // 4,), value * i, dtype=torch.float32) for i in range(COUNT)
    }
    state["view"] = torch.arange(64.0).reshape(8, 8).t() * value
    return state | {"step": int(value), "name": str(value)}


@contextmanager
def own_engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(max_pinned_bytes=128 * MIB, slot_bytes=256 << 10) as engine:
        yield engine


def restored(base: Path, step: int) -> bool:
    """Whether both pyckpt and stock find the state of that number."""
    expected, found, by_stock = state_of(step), state_of(0), state_of(0)
    with Checkpointer(base) as checkpointer:
        checkpointer.restore(found, step=step)
    dcp.load(by_stock, checkpoint_id=base / f"step-{step:08}")
    return all(
        torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
        for state in (found, by_stock)
        for key, value in expected.items()
    )


def _share(base: Path, patience: float) -> tuple[int, bool]:
    first_plan._PATIENCE_SECONDS = patience
    with own_engine() as engine, Checkpointer(base, engine=engine) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        held = engine.native.arena_held_bytes
        checkpointer.save(2, state_of(2)).wait()
    return held // MIB, restored(base, 1) and restored(base, 2)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_copies_what_it_writes(tmp_path: Path, ranks: int) -> None:
    for held, is_right in run_ranks(ranks, _share, tmp_path, 60.0):
        assert COUNT // ranks <= held <= COUNT // ranks + 4
        assert is_right


def _late(base: Path) -> tuple[int, bool]:
    """The rank that does not wait copies all, the other its share."""
    if dist.get_rank() == 0:
        make = first_plan.FirstPlan.make
        is_staged: Any = None

        def late(self: first_plan.FirstPlan, outline: Any, doing: str) -> None:
            is_staged.result(60)
            make(self, outline, doing)

        begin = PinnedStager.begin

        def begins(self: PinnedStager, *args: Any, **kwargs: Any) -> Any:
            begun = begin(self, *args, **kwargs)
            if not is_staged.done():
                is_staged.set_result(None)
            return begun

        is_staged = Future()
        first_plan.FirstPlan.make = late  # type: ignore[method-assign]
        PinnedStager.begin = begins  # type: ignore[method-assign]
    return _share(base, 0.0 if dist.get_rank() == 0 else 60.0)


def test_a_rank_that_does_not_wait_copies_all(tmp_path: Path) -> None:
    (all_, is_right), (share, is_right_too) = run_ranks(2, _late, tmp_path)
    assert all_ >= COUNT > share
    assert is_right
    assert is_right_too


def _fails(base: Path, fail: Callable[[], None]) -> tuple[int, bool]:
    fail()
    return _share(base, 60.0)


def _raise(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory to plan")


def _on_rank_1() -> None:
    if dist.get_rank() == 1:
        ahead.SavePlanner.create_local_plan = _only_once(ahead.SavePlanner.create_local_plan)


def _on_coordinator() -> None:
    ahead.SavePlanner.create_global_plan = _only_once(ahead.SavePlanner.create_global_plan)


def _only_once(method: Callable[..., Any]) -> Any:
    failures = [_raise]

    def fails(*args: Any, **kwargs: Any) -> Any:
        return failures.pop()() if failures else method(*args, **kwargs)

    return fails


@pytest.mark.parametrize("fail", [_on_rank_1, _on_coordinator])
def test_ranks_that_cannot_agree_copy_all(tmp_path: Path, fail: Callable[[], None]) -> None:
    for held, is_right in run_ranks(2, _fails, tmp_path, fail):
        assert held >= COUNT
        assert is_right


def _cannot_keep(base: Path) -> tuple[int, bool]:
    if dist.get_rank() == 1:
        ahead.SavePlanner.finish_plan = _only_once(ahead.SavePlanner.finish_plan)
    return _share(base, 60.0)


def test_a_rank_that_cannot_keep_the_plan_copies_all(tmp_path: Path) -> None:
    (share, is_right), (all_, is_right_too) = run_ranks(2, _cannot_keep, tmp_path)
    assert all_ >= COUNT > share
    assert is_right
    assert is_right_too


class Counted:
    """An object that counts how often it is copied."""

    copies = 0

    def __deepcopy__(self, memo: object) -> Counted:
        Counted.copies += 1
        return self


def _copied_once() -> int:
    tensor = torch.eye(4).to_sparse()
    stager = PinnedStager()
    outline, leaves = stager.outline({"object": Counted(), "sparse": tensor, "w": torch.ones(4)})
    assert leaves[1] is tensor
    assert outline["w"].is_meta
    assert outline["sparse"]._values().data_ptr() == tensor._values().data_ptr()
    return Counted.copies


def test_what_only_shows_its_shape_is_not_copied() -> None:
    assert _copied_once() == 0


class Breaks:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def _no_state(base: Path) -> tuple[str, bool]:
    with Checkpointer(base) as checkpointer:
        more = {"broken": Breaks()} if dist.get_rank() == 1 else {}
        failure = checkpointer.save(1, state_of(1) | more).committed.exception(60)
        with pytest.raises(SaveError):
            checkpointer.wait()
        checkpointer.save(2, state_of(2)).wait()
    return str(failure), restored(base, 2)


def test_a_rank_without_a_state_fails_the_first_save_alone(tmp_path: Path) -> None:
    for said, is_right in run_ranks(2, _no_state, tmp_path):
        assert "no state" in said
        assert is_right


def _interrupted(base: Path) -> tuple[bool, bool]:
    if dist.get_rank() == 1:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        first_plan.FirstPlan.wait = interrupt  # type: ignore[method-assign]
    was_raised = False
    with Checkpointer(base) as checkpointer:
        try:
            checkpointer.save(1, state_of(1))
        except KeyboardInterrupt:
            was_raised = True
        with pytest.raises(SaveError, match="interrupted"):
            checkpointer.wait()
        checkpointer.save(2, state_of(2)).wait()
    return was_raised, restored(base, 2)


def test_an_interrupt_while_it_waits(tmp_path: Path) -> None:
    assert run_ranks(2, _interrupted, tmp_path) == [(False, True), (True, True)]


def _interrupted_twice(base: Path) -> bool:
    """The second time while it declines the save: the thread that trains reports that itself, and
    the thread that saves is still waiting for rank 0 to plan."""
    make, in_thread, wait = first_plan.FirstPlan.make, Saver._in_thread, first_plan.FirstPlan.wait
    calls: list[object] = []
    is_declined: Any = Future()

    def late(self: first_plan.FirstPlan, outline: Any, doing: str) -> None:
        if not self.is_made:
            dist.barrier()
        make(self, outline, doing)

    def interrupted(self: first_plan.FirstPlan, leaves: Any) -> None:
        raise KeyboardInterrupt

    def interrupted_again(self: Saver, task: Any) -> None:
        calls.append(task)
        if len(calls) == 2:
            is_declined.set_result(None)
            raise KeyboardInterrupt
        in_thread(self, task)

    with Checkpointer(base) as checkpointer:
        if dist.get_rank() == 0:
            first_plan.FirstPlan.make = late  # type: ignore[method-assign]
        else:
            first_plan.FirstPlan.wait = interrupted  # type: ignore[method-assign]
            Saver._in_thread = interrupted_again  # type: ignore[method-assign]
            comes = threading.Thread(target=lambda: (is_declined.result(60), dist.barrier()))
            comes.start()
        with pytest.raises(KeyboardInterrupt) if dist.get_rank() == 1 else nullcontext():
            checkpointer.save(1, state_of(1))
        with pytest.raises(SaveError, match="interrupted"):
            checkpointer.wait()
        first_plan.FirstPlan.make, Saver._in_thread = make, in_thread
        first_plan.FirstPlan.wait = wait
        checkpointer.save(2, state_of(2)).wait()
    return restored(base, 2)


def test_one_thread_at_a_time_talks_to_the_other_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _interrupted_twice, tmp_path) == [True, True]


def _gone(base: Path) -> tuple[str, Sequence[int]]:
    logging.getLogger("pyckpt").setLevel(logging.CRITICAL)
    checkpointer = Checkpointer(base, timeout=3)
    if dist.get_rank() == 1:
        checkpointer._close(wait=False)
        return "", ()
    try:
        checkpointer.save(1, state_of(1)).wait()
    except RanksLost as error:
        return str(error), error.ranks
    finally:
        checkpointer._close(wait=False)
    raise AssertionError


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    (said, ranks), _ = run_ranks(2, _gone, tmp_path)
    assert tuple(ranks) == (1,)
    assert "step-00000001 failed: rank 1 did not come" in said


# --- what it is worth, and what is prepared ---


def _counted() -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    both = init_device_mesh("cpu", (2, 1))
    whole = torch.zeros(8)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    replicated = distribute_tensor(whole, mesh, [Replicate()])
    alone = DTensor.from_local(torch.zeros(4), both, [Shard(0), Replicate()])
    shard = OldShard.from_tensor_and_offsets(torch.zeros(4), [4 * dist.get_rank()], dist.get_rank())
    old = init_from_local_shards([shard], 8)
    return [replicated_bytes([one]) for one in (whole, sharded, replicated, alone, old, 3, None)]


def test_what_other_ranks_may_hold() -> None:
    assert run_ranks(2, _counted) == [[32, 0, 32, 0, 0, 0, 0]] * 2


def _prepared() -> list[int]:
    model = nn.Sequential(*(nn.Linear(256, 4096, bias=False) for _ in range(4)))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for one in model:
        one.weight.grad = torch.ones_like(one.weight)
    optimizer.step()
    found = []
    for objects in (
        {"model": model, "optimizer": optimizer},
        {"model": wrapped, "optimizer": optimizer},
        {"models": [wrapped], "optimizer": optimizer, "own": torch.zeros(MIB)},
    ):
        with own_engine() as engine:
            Prewarmer(engine).step_ended(objects)
            engine.native.wait_prewarmed()
            found.append(engine.native.arena_held_bytes // MIB)
    return found


def test_of_replicas_a_share_is_prepared() -> None:
    for unknown, replicas, more in run_ranks(2, _prepared):
        assert unknown >= 48
        assert 24 <= replicas <= 30
        assert 28 <= more <= 34
