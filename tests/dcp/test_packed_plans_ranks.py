"""Packed plans and results between real ranks."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _staging import blank, engine, frozen, metadata_of, same, writer_to
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

import pyckpt
from pyckpt.dcp import save_planner
from pyckpt.dcp.global_plan import PackedResults, global_plans
from pyckpt.dcp.packed_items import PackedItems
from pyckpt.errors import PyckptError


def some_state() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "replicated": {f"{i}": torch.full((40, 5), float(i)) for i in range(6)},
        "columns": torch.arange(60.0).view(6, 10)[:, ::2],
        "own": {f"{rank}": torch.full((7,), float(rank))},
        "list": [torch.ones(3), 5, {"x": "y"}],
        "step": 1,
    }


def check_loads(state: dict[str, Any], path: Path) -> None:
    """As stock reads it, and as we do."""
    dist.barrier()
    for reader in (FileSystemReader(path), pyckpt.DirectReader(path)):
        loaded = blank(state)
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert same(loaded, state), path


def save_all(state: dict[str, Any], path: Path, planner: Any, own: pyckpt.Engine) -> Any:
    return dcp.save(state, storage_writer=writer_to(path, engine=own), planner=planner)


# --- bad input ------------------------------------------------------------------------------------


def damage(block: bytes) -> bytes:
    at = len(block) // 2
    return block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]


def other_version(block: bytes) -> bytes:
    changed = block[:6] + bytes([block[6] + 1]) + block[7:-4]
    return changed + pyckpt._C.crc32(changed).to_bytes(4, "little")


def bad_plan(path: Path, change: Callable[[bytes], bytes], expected: str) -> None:
    state = some_state()
    with engine() as own:
        original = save_planner.pack
        if dist.get_rank() == 1:
            save_planner.pack = lambda *args: change(original(*args) or b"")  # type: ignore[assignment]
        with pytest.raises(CheckpointException) as caught:
            save_all(state, path, pyckpt.SavePlanner(), own)
        assert [type(error) for error, _ in caught.value.failures.values()] == [PyckptError]
        assert "rank 1" in str(caught.value)
        assert expected in str(caught.value)
        dist.barrier()
        assert not (path / ".metadata").exists()
        save_planner.pack = original
        for turn in range(2):
            save_all(state, path / str(turn), pyckpt.SavePlanner(), own)
            check_loads(state, path / str(turn))


@pytest.mark.parametrize(("change", "expected"), [(damage, "damaged"), (other_version, "version")])
def test_bad_plan(tmp_path: Path, change: Callable[[bytes], bytes], expected: str) -> None:
    """A clear error on all ranks, nothing committed, and the next save is fine."""
    run_ranks(2, bad_plan, tmp_path, change, expected)


def bad_results(path: Path, change: Callable[[bytes], bytes]) -> None:
    state = some_state()
    with engine() as own:
        original = PackedResults.__reduce__
        for turn in range(5):
            is_bad = turn in (0, 3)

            def reduced(results: PackedResults, is_bad: bool = is_bad) -> Any:
                if is_bad and dist.get_rank() == 1:
                    results.data = change(results.data)
                return original(results)

            PackedResults.__reduce__ = reduced  # type: ignore[method-assign]
            state["step"] = 10**turn
            to = path / str(turn)
            if is_bad:
                with pytest.raises(CheckpointException, match="results of rank 1"):
                    save_all(state, to, pyckpt.SavePlanner(), own)
                dist.barrier()
                assert not (to / ".metadata").exists()
            else:
                save_all(state, to, pyckpt.SavePlanner(), own)
                check_loads(state, to)


@pytest.mark.parametrize("change", [damage, other_version])
def test_bad_results(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    run_ranks(2, bad_results, tmp_path, change)


# --- ranks that are not alike ---------------------------------------------------------------------


def mixed_planners(path: Path) -> None:
    """One rank's planner is stock's: the coordinator plans with DCP's objects, and all is saved."""
    state = some_state()
    with engine() as own:
        for turn in range(4):
            state["step"] = turn
            rank = dist.get_rank()
            stock = turn > 0 and rank == 1  # the others know a plan by then
            planner = dcp.DefaultSavePlanner() if stock else pyckpt.SavePlanner()
            before = frozen(state)
            to = path / str(turn)
            writer = writer_to(to, engine=own)
            dcp.async_save(state, storage_writer=writer, planner=planner).result()
            check_loads(before, to)


def test_mixed_planners(tmp_path: Path) -> None:
    run_ranks(3, mixed_planners, tmp_path)


def stock_coordinator(path: Path) -> None:
    """A rank that sends the name of a plan, to a planner that cannot look it up."""
    state = some_state()
    with engine() as own:
        save_all(state, path / "0", pyckpt.SavePlanner(), own)
        planner = pyckpt.SavePlanner() if dist.get_rank() else dcp.DefaultSavePlanner()
        with pytest.raises(CheckpointException, match="same planner"):
            save_all(state, path / "1", planner, own)
        dist.barrier()
        assert not (path / "1" / ".metadata").exists()
        # Where it sends its items, they are DCP's.
        planner = pyckpt.SavePlanner() if dist.get_rank() else dcp.DefaultSavePlanner()
        save_all(state, path / "2", planner, own)
        check_loads(state, path / "2")


def test_stock_coordinator(tmp_path: Path) -> None:
    run_ranks(2, stock_coordinator, tmp_path)


def foreign_writer(path: Path) -> None:
    """It sees DCP's objects: items in the global plan, dicts in the metadata, results."""
    seen: dict[str, Any] = {}

    class Writer(FileSystemWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            seen["items"] = [len(list(plan.items)) for plan in plans]
            return super().prepare_global_plan(plans)

        def finish(self, metadata: Any, results: Any) -> None:
            seen["type"] = type(metadata.state_dict_metadata), type(metadata.planner_data)
            seen["results"] = [len(of_rank) for of_rank in results]
            super().finish(metadata, results)

    state = some_state()
    for turn in range(3):
        state["step"] = turn
        to = path / str(turn)
        dcp.save(state, storage_writer=Writer(to), planner=pyckpt.SavePlanner())
        check_loads(state, to)
        if dist.get_rank() == 0:
            assert seen["type"] == (dict, dict)
            assert seen["items"] == seen["results"]
            # Stock looks for a chunk where its number says that it is.
            indices = metadata_of(to).storage_data
            assert all(i.index is not None for i in indices if i.offset is not None)


def test_foreign_writer(tmp_path: Path) -> None:
    run_ranks(2, foreign_writer, tmp_path)


def leaves_out_on_one_rank(path: Path) -> None:
    """Of a plan that all ranks know."""
    rank = dist.get_rank()

    class Leaves(pyckpt.DirectWriter):
        def prepare_local_plan(self, plan: Any) -> Any:
            plan = super().prepare_local_plan(plan)
            items = [item for item in plan.items if item.index.fqn != "own.1"]
            return dataclasses.replace(plan, items=items) if rank == 1 else plan

    state = some_state()
    for turn in range(5):
        state["step"] = turn
        writer = (Leaves if turn in (1, 3) else pyckpt.DirectWriter)(path / str(turn))
        dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        dist.barrier()
        keys = metadata_of(path / str(turn)).state_dict_metadata.keys()
        assert ("own.1" in keys) is (turn not in (1, 3))
        expected = {**state, "own": {} if rank == 1 and turn in (1, 3) else state["own"]}
        check_loads(expected, path / str(turn))


def test_a_writer_that_leaves_items_out_on_one_rank(tmp_path: Path) -> None:
    run_ranks(2, leaves_out_on_one_rank, tmp_path)


# --- what is sent ---------------------------------------------------------------------------------


def results_sent(path: Path) -> list[tuple[bool, int]]:
    """Of each save whether the rank said all of where its items lie, and how many bytes."""
    sent: list[tuple[bool, int]] = []
    state: dict[str, Any] = {f"{i}": torch.full((3, 5), float(i)) for i in range(400)}
    state["columns"] = torch.arange(420.0).view(20, 21)[:, ::2]
    state["object"] = "x"
    kept: list[Any] = []

    class Writer(pyckpt.DirectWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            future = super().write_data(plan, planner)
            results = future.value()
            assert isinstance(results, PackedResults)
            sent.append((results.against is None, len(pickle.dumps(results))))
            kept[:] = results
            return future

        def finish(self, metadata: Any, results: Any) -> None:
            # What the rank would have said, made of what it did say, and of what it said before.
            assert list(results[0]) == kept
            assert [vars(r.storage_data) for r in results[0]] == [
                vars(r.storage_data) for r in kept
            ]
            assert all(len(of_rank) for of_rank in results)
            super().finish(metadata, results)

    with engine() as own:
        for turn in range(7):
            if turn == 2:
                state["object"] = "longer" * 500
            if turn == 4:
                global_plans.clear()  # or any failure
            state["7"].add_(1)
            writer = Writer(path / str(turn), engine=own, sync_files=False)
            try:
                dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            except CheckpointException:
                assert turn == 4
                continue
            check_loads(state, path / str(turn))
    return sent


@pytest.mark.slow
def test_results_that_are_sent(tmp_path: Path) -> None:
    """All at first, and whenever lengths change; else four bytes an item."""
    outcomes = run_ranks(2, results_sent, tmp_path)
    for sent in outcomes:
        items = 220
        assert sent[0][0]
        assert sent[0][1] < 24 * items
        assert not sent[1][0]
        assert sent[1][1] < 4 * items + 600
        assert not sent[3][0]
        assert [full for full, _ in sent[4:]] == [True, False]  # a plan of another name
    # The object is written by one of them.
    assert sorted(sent[2][0] for sent in outcomes) == [False, True]


def overlapping(path: Path) -> None:
    """Saves of one plan that are under way together: each builds on what was told before it."""
    state: dict[str, Any] = {"w": torch.rand(5), "object": ""}
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)
        futures = []
        for turn in range(12):
            state["object"] = "x" * (turn % 3 * 100)
            state["w"].fill_(turn)
            writer = writer_to(path / str(turn), stager=stager, engine=own)
            futures.append(
                dcp.async_save(
                    state, storage_writer=writer, planner=pyckpt.SavePlanner(), no_dist=True
                )
            )
        for turn, future in enumerate(futures):
            future.result()
            loaded = {"w": torch.zeros(5), "object": None}
            dcp.load(loaded, checkpoint_id=path / str(turn), no_dist=True)
            assert loaded["w"].tolist() == [turn] * 5
            assert loaded["object"] == "x" * (turn % 3 * 100)


def test_saves_that_overlap(tmp_path: Path) -> None:
    run_ranks(1, overlapping, tmp_path)


def replanned(path: Path) -> list[list[str]]:
    """Which replicas each rank writes, when only the last rank's state changes in between."""
    wrote: list[list[str]] = []
    state = some_state()
    with engine() as own:
        for turn in range(4):
            if turn == 2 and dist.get_rank() == dist.get_world_size() - 1:
                state["own"]["more"] = torch.rand(500)
            planner = pyckpt.SavePlanner()
            save_all(state, path / str(turn), planner, own)
            check_loads(state, path / str(turn))
            wrote.append(sorted(item.index.fqn for item in planner.plan.items))
            assert not isinstance(planner.plan.items, PackedItems)
    return wrote


def test_who_wrote_a_replica_goes_on(tmp_path: Path) -> None:
    for wrote in run_ranks(3, replanned, tmp_path):
        assert wrote[0] == wrote[1]
        assert wrote[2] == wrote[3]
        assert [key for key in wrote[2] if key != "own.more"] == wrote[1]
