"""SavePlanner and PinnedStager on several ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _sampling import slow
from _staging import (
    RING,
    blank,
    difference,
    engine,
    frozen,
    metadata_of,
    overwrite,
    same,
    writer_to,
)
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    default_planner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import pyckpt
from pyckpt.errors import StagerBusy


def local_parts(state: Any) -> Any:
    """The state with the part of each tensor that is here in its place."""
    if isinstance(state, DTensor):
        return state.to_local().detach()
    if isinstance(state, dict):
        return {key: local_parts(value) for key, value in state.items()}
    return state


def check_all(state: dict[str, Any], before: Any, path: Path) -> None:
    """The checkpoint, loaded over a wiped state, is what each rank had."""
    dist.barrier()
    for reader in (FileSystemReader(path), pyckpt.DirectReader(path)):
        overwrite(local_parts(state))
        dcp.load(state, storage_reader=reader)
        found = difference(local_parts(state), before)
        assert not found, f"{path} as {type(reader).__name__} reads it: {found}"


def plans_counted() -> list[int]:
    """How many items each plan had that was made anew on this rank."""
    made: list[int] = []
    original = default_planner.create_default_local_save_plan

    def counted(*args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        made.append(len(plan.items))
        return plan

    default_planner.create_default_local_save_plan = counted
    return made


def staged_bytes(stager: pyckpt.PinnedStager) -> list[int]:
    """The bytes that each save stages on this rank."""
    counts: list[int] = []
    original = stager.begin

    def begin(state_dict: dict[str, Any], **options: Any) -> Any:
        staging, copies = original(state_dict, **options)
        counts.append(staging.bytes)
        return staging, copies

    stager.begin = begin  # type: ignore[method-assign]
    return counts


def described(path: Path) -> Any:
    metadata = metadata_of(path)
    assert type(metadata) is Metadata
    places = {}
    for index, info in metadata.storage_data.items():
        values = dict(vars(info))
        assert (path / values.pop("relative_path")).is_file()
        values.pop("offset")  # which rank writes what is anyone's choice
        places[index] = values
    return metadata.state_dict_metadata, metadata.planner_data, metadata.version, places


def sharded_state() -> dict[str, Any]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(6 * world + 1, 40, generator=generator)
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": {f"{i}": torch.rand(300, generator=generator) for i in range(12)},
        "strided": torch.rand(300, 3, generator=generator)[:, 1],
        "step": torch.tensor(1.0),
        "own": {f"rank {dist.get_rank()}": torch.full((5,), float(dist.get_rank()))},
    }


def several_saves(path: Path) -> Any:
    made = plans_counted()
    state = sharded_state()
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own)
        staged = staged_bytes(stager)
        for turn in range(4):
            for tensor in local_parts(state)["plain"].values():
                tensor.add_(turn)
            state["step"].add_(1)
            before = frozen(local_parts(state))
            writer = writer_to(path / f"ours-{turn}", stager=stager, engine=own)
            future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            overwrite(local_parts(state))
            future.result()
            check_all(state, before, path / f"ours-{turn}")
        planned = list(made)
        stock = writer_to(path / "stock", engine=own)
        dcp.save(state, storage_writer=stock, planner=dcp.DefaultSavePlanner())
        assert own.native.arena_used_bytes == 0
    if dist.get_rank() == 0:
        expected = described(path / "stock")
        for turn in range(4):
            found = described(path / f"ours-{turn}")
            assert found[:3] == expected[:3]
            assert found[3].keys() == expected[3].keys()
            if turn == 3:  # the same values
                assert found[3] == expected[3]
    return planned, staged


@pytest.mark.parametrize("world", [2, slow(4)])
def test_several_saves(tmp_path: Path, world: int) -> None:
    """As stock's in all but who writes what; a rank stages, from the second on, what it writes."""
    results = run_ranks(world, several_saves, tmp_path)
    totals = []
    for planned, staged in results:
        assert len(planned) == 1
        assert staged[1] == staged[2] == staged[3] < staged[0]
        totals.append(staged[1])
    replicas = (6 * world + 1) * 40 * 4 + 12 * 1200 + 1200 + 4
    shards = 2 * (6 * world + 1) * 40 * 4
    assert sum(totals) == replicas + shards + world * 20


def strided_only(path: Path) -> Any:
    """Tensors with gaps have other strides once they are staged; and where they are not, too."""
    made = plans_counted()
    state = {f"{i}": torch.rand(300, 3)[:, 1] for i in range(6)}
    for tensor in state.values():
        dist.broadcast(whole := tensor.contiguous(), 0)
        tensor.copy_(whole)
    with engine() as own:
        for turn in range(4):
            before = frozen(state)
            writer = writer_to(path / str(turn), engine=own)
            future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            future.result()
            check_all(state, before, path / str(turn))
    return made


def test_strided_replicas(tmp_path: Path) -> None:
    assert [len(made) for made in run_ranks(2, strided_only, tmp_path)] == [1, 1]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "own key": lambda s: s["own"].update(more=torch.rand(3)),
    "own shape": lambda s: s.update(own={k: torch.rand(9) for k in s["own"]}),
    "own dtype": lambda s: s.update(own={k: t.double() for k, t in s["own"].items()}),
    "own key less": lambda s: s["own"].clear(),
    "object": lambda s: s.update(alone=[1, 2]),
    "tensor to object": lambda s: s.update(own=dict.fromkeys(s["own"], 5)),
}


def changes_on_one_rank(path: Path, names: list[str]) -> None:
    made = plans_counted()
    with engine() as own:
        for name in names:
            state = sharded_state()
            del made[:]
            for turn in range(4):
                if turn == 2 and dist.get_rank() == dist.get_world_size() - 1:
                    CHANGES[name](state)
                if turn == 3:
                    state["plain"]["0"].add_(1)
                before = frozen(local_parts(state))
                to = path / f"{name}-{turn}"
                writer = writer_to(to, engine=own)
                future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                overwrite(local_parts(state))
                future.result()
                check_all(state, before, to)
            changed = dist.get_rank() == dist.get_world_size() - 1
            # The other ranks are not even asked again. The first turn's plan may be known already.
            assert len(made) <= 1 + changed, name


@pytest.mark.parametrize("names", [["own key", "object"], slow([*CHANGES])], ids=["some", "all"])
def test_changes_on_one_rank(tmp_path: Path, names: list[str]) -> None:
    run_ranks(2, changes_on_one_rank, tmp_path, names)


def placement_changes(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48.0).view(8, 6)
    with engine() as own:
        for sync in (True, False):
            for turn, placement in enumerate(
                [Shard(0), Shard(0), Shard(1), Shard(1), Replicate(), Shard(0)]
            ):
                state = {"t": distribute_tensor(whole + turn, mesh, [placement])}
                state["t"].requires_grad_(turn % 2 == 1)
                before = frozen(local_parts(state))
                to = path / f"{sync}-{turn}"
                writer = writer_to(to, engine=own)
                if sync:
                    dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                else:
                    dcp.async_save(
                        state, storage_writer=writer, planner=pyckpt.SavePlanner()
                    ).result()
                dist.barrier()
                properties = metadata_of(to).state_dict_metadata["t"].properties
                assert properties.requires_grad is (sync and turn % 2 == 1)
                state["t"].requires_grad_(False)
                check_all(state, before, to)


@pytest.mark.slow
def test_placement_changes(tmp_path: Path) -> None:
    run_ranks(2, placement_changes, tmp_path)


def a_replica_goes(path: Path) -> None:
    """What a rank wrote for others, too, is no more there: it must be said, and then go on."""
    with engine() as own:
        names = [f"{i}" for i in range(8)]
        state = {"plain": {name: torch.full((100,), 7.0) for name in names}}
        outcomes = []
        for turn in range(7):
            if turn == 3 and dist.get_rank() == 1:
                state["plain"] = {}
            writer = writer_to(path / str(turn), engine=own)
            try:
                future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                future.result()
                outcomes.append(True)
            except BaseException:
                outcomes.append(False)
            dist.barrier()
            assert (path / str(turn) / ".metadata").exists() is outcomes[-1]
            if outcomes[-1]:
                loaded = {"plain": blank({name: torch.ones(100) for name in names})}
                dcp.load(loaded, storage_reader=pyckpt.DirectReader(path / str(turn)))
                assert all(tensor.eq(7).all() for tensor in loaded["plain"].values())
        # The save that finds out fails, if any does.
        assert outcomes in ([True] * 7, [True] * 3 + [False, True, True, True])
        assert own.native.arena_used_bytes == 0


def test_a_replica_goes(tmp_path: Path) -> None:
    run_ranks(2, a_replica_goes, tmp_path)


def groups_take_turns(path: Path) -> None:
    """The same state is saved by all ranks, by one alone, and by a group of two of three."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    state = {f"{i}": torch.full((50,), float(i)) for i in range(6)}
    with engine() as own:
        for turn in range(3):
            for name in ("all", "alone", "pair"):
                if rank in {"all": (0, 1, 2), "alone": (0,), "pair": (0, 2)}[name]:
                    dcp.save(
                        state,
                        storage_writer=writer_to(path / f"{name}-{turn}", engine=own),
                        planner=pyckpt.SavePlanner(),
                        no_dist=name == "alone",
                        process_group=pair if name == "pair" else None,
                    )
                dist.barrier()
            for name in ("all", "alone", "pair"):
                loaded = blank(state)
                reader = pyckpt.DirectReader(path / f"{name}-{turn}")
                dcp.load(loaded, storage_reader=reader, no_dist=True)
                assert same(loaded, state)
            dist.barrier()


def test_groups_take_turns(tmp_path: Path) -> None:
    run_ranks(3, groups_take_turns, tmp_path)


def forgotten_by_coordinator(path: Path) -> None:
    """One save fails, and the next plans anew."""
    from pyckpt.dcp.global_plan import global_plans

    state = {"t": torch.rand(3), "own": {f"{dist.get_rank()}": torch.rand(2)}}
    with engine() as own:
        outcomes: list[bool | None] = []  # whether it failed for that reason
        for turn in range(4):
            if turn == 1 and dist.get_rank() == 0:
                global_plans.clear()
            writer = writer_to(path / str(turn), engine=own)
            try:
                dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                outcomes.append(None)
            except BaseException as error:
                outcomes.append("does not have" in str(error))
        assert outcomes == [None, True, None, None]


def test_forgotten_by_coordinator(tmp_path: Path) -> None:
    run_ranks(2, forgotten_by_coordinator, tmp_path)


def forgotten_to_make_room(path: Path, limit: str) -> int:
    """The coordinator has room for one plan; what it forgets is planned anew, and nothing fails."""
    from pyckpt.dcp.global_plan import global_plans

    made = plans_counted()
    setattr(global_plans, limit, 1)
    rank = dist.get_rank()
    states = [
        {"t": torch.rand(3 + k), "own": {f"{rank}": torch.rand(2)}, "same": torch.ones(5)}
        for k in range(3)
    ]
    with engine() as own:
        for turn, k in enumerate([0, 0, 1, 0, 0, 1, 2, 1, 1]):
            writer = writer_to(path / str(turn), engine=own)
            dcp.save(states[k], storage_writer=writer, planner=pyckpt.SavePlanner())
            if rank == 0:
                assert len(global_plans) == 1
    return len(made)


@pytest.mark.parametrize("limit", ["most", "most_bytes"])
def test_forgotten_to_make_room(tmp_path: Path, limit: str) -> None:
    assert run_ranks(2, forgotten_to_make_room, tmp_path, limit) == [6, 6]


class Tagged(torch.Tensor):
    """What stands behind such a tensor is not known, so it is planned at each save."""


def never_named(path: Path, tagged: set[int]) -> int:
    from pyckpt.dcp.global_plan import global_plans

    rank = dist.get_rank()
    state: dict[str, Any] = {"t": torch.ones(3), "own": {f"{rank}": torch.ones(2)}}
    if rank in tagged:
        state["own"][f"tagged-{rank}"] = torch.ones(2).as_subclass(Tagged)
    with engine() as own:
        for turn in range(4):
            writer = writer_to(path / str(turn), engine=own)
            dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            check_all({"t": state["t"]}, {"t": torch.ones(3)}, path / str(turn))
    return len(global_plans)


@pytest.mark.parametrize(("tagged", "kept"), [({0}, 1), ({1}, 1), ({0, 1}, 0), (set(), 1)])
def test_plans_that_no_rank_will_name_are_not_kept(
    tmp_path: Path, tagged: set[int], kept: int
) -> None:
    assert run_ranks(2, never_named, tmp_path, tagged) == [kept, 0]


def kept_for_one_rank(path: Path) -> None:
    """A rank's state changes and changes back: by then no other rank goes by its plan."""
    rank = dist.get_rank()
    states = [{"t": torch.ones(3), "own": {f"{rank}": torch.ones(2 + k)}} for k in range(2)]
    with engine() as own:
        for turn, k in enumerate([0, 0, 1, 1, 0, 0, 1]):
            state = states[k if rank == 1 else 0]
            writer = writer_to(path / str(turn), engine=own)
            dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            check_all(state, frozen(state), path / str(turn))


def test_a_plan_is_kept_while_one_rank_may_name_it(tmp_path: Path) -> None:
    run_ranks(2, kept_for_one_rank, tmp_path)


def bytes_sent(path: Path) -> list[list[int]]:
    """What each save gives the collectives to carry, as pickles."""
    sent: list[list[int]] = []
    for name in ("gather_object", "scatter_object_list", "broadcast_object_list"):
        original = getattr(dist, name)

        def carried(*args: Any, original: Any = original, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, dist.ProcessGroup) or value is None:
                    continue
                sent[-1].append(len(pickle.dumps(value)))
            return original(*args, **kwargs)

        setattr(dist, name, carried)
    state = {"model": {f"{i}": torch.rand(2) for i in range(1000)}}
    with engine() as own:
        for turn in range(4):
            sent.append([])
            writer = writer_to(path / str(turn), engine=own)
            dcp.save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
    return sent


def test_collectives_carry_little(tmp_path: Path) -> None:
    for sent in run_ranks(2, bytes_sent, tmp_path):
        # A block of 1,000 items, and where 500 of them lie; where stock sends 100,000 and more.
        assert 10_000 < sum(sent[0]) < 50_000
        # Only the checksums of 500 items; what the coordinator gathers counts as well.
        assert sum(sent[2]) == pytest.approx(sum(sent[3]), rel=0.1)
        assert 2_000 < sum(sent[3]) < 8_000


def stock_writer(path: Path) -> None:
    state = sharded_state()
    for turn in range(3):
        before = frozen(local_parts(state))
        to = path / str(turn)
        dcp.save(state, storage_writer=FileSystemWriter(to), planner=pyckpt.SavePlanner())
        check_all(state, before, to)


def test_stock_writer(tmp_path: Path) -> None:
    run_ranks(2, stock_writer, tmp_path)


def blocks() -> dict[str, torch.Tensor]:
    """Which leave less than a MiB of eight; in parts, since memory is had in segments."""
    return {f"{i}": torch.rand(100_000) for i in range(19)}


def sharded_tensors(path: Path) -> None:
    rank = dist.get_rank()
    local = torch.full((2, 5), float(rank))
    from torch.distributed._shard.metadata import ShardMetadata

    shard = LocalShard(local, ShardMetadata([2 * rank, 0], [2, 5], placement=f"rank:{rank}/cpu"))
    tensor = init_from_local_shards([shard], [4, 5])
    with engine(max_pinned_bytes=(8 << 20) + RING) as own:
        stager = pyckpt.PinnedStager(engine=own, when_busy="skip")
        for turn in range(3):
            writer = writer_to(path / str(turn), stager=stager, engine=own)
            state = {"st": tensor, "plain": torch.ones(3)}
            future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            local.add_(10)
            future.result()
            dist.barrier()
            loaded = {"st": torch.zeros(4, 5)}
            dcp.load(loaded, storage_reader=pyckpt.DirectReader(path / str(turn)))
            assert loaded["st"][:, 0].tolist() == [10.0 * turn] * 2 + [10.0 * turn + 1] * 2
        # And where there is no memory for them.
        holder, _ = stager.begin(blocks(), direct=True)
        writer = writer_to(path / "skipped", stager=stager, engine=own)
        state["more"] = torch.rand(300_000)
        dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner()).result()
        dist.barrier()
        assert not (path / "skipped" / ".metadata").exists()
        holder.release()


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors(tmp_path: Path) -> None:
    run_ranks(2, sharded_tensors, tmp_path)


def busy_on_one_rank(path: Path, planner: Any) -> None:
    rank = dist.get_rank()
    with engine(max_pinned_bytes=(8 << 20) + RING) as own:
        stager = pyckpt.PinnedStager(engine=own, when_busy="skip")
        state = {"t": torch.rand(300_000), "own": {f"{rank}": torch.rand(300_000)}}
        before = frozen(state)

        def save() -> pyckpt.DirectWriter:
            writer = writer_to(path, stager=stager, engine=own)
            dcp.async_save(state, storage_writer=writer, planner=planner()).result()
            dist.barrier()
            return writer

        save()
        names = sorted(file.name for file in path.iterdir())
        holder = None
        if rank == 1:
            holder, _ = stager.begin(blocks(), direct=True)
        for _ in range(2):
            overwrite(state)
            skipped = save()
            assert skipped.staged.result(60) is None
            assert skipped.written.result(60) is None
            assert sorted(file.name for file in path.iterdir()) == names
            check_all(state, before, path)
        if holder is not None:
            holder.release()
        dist.barrier()
        for _ in range(2):
            overwrite(state)
            before = frozen(state)
            save()
            check_all(state, before, path)
        assert own.native.arena_used_bytes == 0


@pytest.mark.parametrize("planner", [slow(dcp.DefaultSavePlanner), pyckpt.SavePlanner])
def test_busy_on_one_rank(tmp_path: Path, planner: Any) -> None:
    """No rank saves, the checkpoint before stays, nobody waits for anybody."""
    run_ranks(2, busy_on_one_rank, tmp_path, planner)


def busy_error_on_one_rank(path: Path, planner: Any) -> None:
    """Its error reaches all ranks, at the save's end."""
    with engine(max_pinned_bytes=(8 << 20) + RING) as own:
        stager = pyckpt.PinnedStager(engine=own, when_busy="error")
        state = {"t": torch.rand(300_000), "own": {f"{dist.get_rank()}": torch.rand(300_000)}}
        before = frozen(state)
        writer = writer_to(path, stager=stager, engine=own)
        dcp.async_save(state, storage_writer=writer, planner=planner()).result()
        holder = None
        if dist.get_rank() == 1:
            holder, _ = stager.begin(blocks(), direct=True)
        overwrite(state)
        future = dcp.async_save(state, storage_writer=writer, planner=planner())
        with pytest.raises(CheckpointException, match="max_pinned_bytes") as caught:
            future.result()
        assert {rank: type(e) for rank, (e, _) in caught.value.failures.items()} == {1: StagerBusy}
        dist.barrier()
        check_all(state, before, path)
        if holder is not None:
            holder.release()
        dist.barrier()
        before = frozen(state)
        dcp.async_save(state, storage_writer=writer, planner=planner()).result()
        dist.barrier()
        check_all(state, before, path)
        assert own.native.arena_used_bytes == 0


@pytest.mark.parametrize("planner", [slow(dcp.DefaultSavePlanner), pyckpt.SavePlanner])
def test_busy_error_on_one_rank(tmp_path: Path, planner: Any) -> None:
    run_ranks(2, busy_error_on_one_rank, tmp_path, planner)


def not_enough_for_global_sizes(path: Path) -> None:
    """A DTensor takes the memory of the part that is here."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"t": distribute_tensor(torch.rand(1_000_000), mesh, [Shard(0)])}  # 2 MB here
    with engine(max_pinned_bytes=(6 << 20) + 3 * 4 * 4096) as own:
        stager = pyckpt.PinnedStager(engine=own, when_busy="error")
        holder, _ = stager.begin({"block": torch.rand(500_000)}, direct=True)
        staging, _ = stager.begin(state, direct=True)
        assert staging.bytes == 2_000_000
        refused, _ = stager.begin({"block": torch.rand(1_200_000)}, direct=True)
        assert isinstance(refused.busy, StagerBusy)
        assert "are needed" in str(refused.busy)
        for of_save in (staging, refused):
            of_save.release()
        holder.release()
        assert own.native.arena_used_bytes == 0


def test_dtensors_need_their_local_part(tmp_path: Path) -> None:
    run_ranks(2, not_enough_for_global_sizes, tmp_path)


def without_collectives(path: Path) -> None:
    rank = dist.get_rank()
    with engine() as own:
        state = {"t": torch.rand(3000), "own": {f"{rank}": torch.rand(30)}}
        for turn in range(3):
            before = frozen(state)
            to = path / str(turn)
            writer = writer_to(to, engine=own)
            future = dcp.async_save(
                state, storage_writer=writer, planner=pyckpt.SavePlanner(), use_collectives=False
            )
            overwrite(state)
            future.result()
            loaded = blank(before)
            dcp.load(loaded, storage_reader=FileSystemReader(to))
            assert same(loaded, before)


def test_without_collectives(tmp_path: Path) -> None:
    run_ranks(2, without_collectives, tmp_path)
