"""Nodes that have a directory of their own each, at the same path. Each rank here is a node."""

from __future__ import annotations

import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _lora import LoraRun, frozen_files
from _nodes import enter_node, lay_over
from _ranks import RanksFailed, run_ranks
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import pyckpt
from pyckpt import Checkpointer
from pyckpt.dcp import sharing
from pyckpt.dcp.reader import DirectReader
from pyckpt.errors import LoadError, PyckptError, SaveError
from pyckpt.tools.listing import listing
from pyckpt.train.nodes import reading
from pyckpt.train.nodes.committing import NodeCommit
from pyckpt.train.store.catalog import Catalog

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount directories")

HALF = 40_000


def state(value: int) -> dict[str, Any]:
    """A tensor of which each rank has a part, one that all have, and a number that rank 0 saves."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(2.0 * HALF) + value
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "same": torch.full((HALF,), float(value)),
        "step": value,
    }


def same(found: dict[str, Any], value: int) -> bool:
    expected = state(value)
    return (
        torch.equal(found["sharded"].to_local(), expected["sharded"].to_local())
        and torch.equal(found["same"], expected["same"])
        and found["step"] == value
    )


def enter(base: Path, disks: str) -> Path:
    """Have this rank see the disk of its node; returns the path, the same on all nodes."""
    at = base / "nvme"
    enter_node(at, base / f"disk-{disks[dist.get_rank()]}")
    return at / "run"


def save(base: Path, disks: str, steps: list[int], options: dict[str, Any]) -> list[str]:
    """Save steps; returns what is in the directory of the last."""
    directory = enter(base, disks)
    with Checkpointer(directory, node_local=True, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), metrics={"loss": 0.5}).wait()
            if checkpointer._promotion is not None:
                assert checkpointer.wait_mirrored(60)
                dist.barrier()
    return sorted(os.listdir(directory / f"step-{steps[-1]:08d}"))


def restore(
    base: Path, disks: str, options: dict[str, Any], step: int | None = None
) -> tuple[int | None, bool]:
    directory = enter(base, disks)
    found = state(0)
    sharing.WORTH_BYTES = 1  # what ranks of one host would share, nodes fetch once each
    with Checkpointer(directory, node_local=True, **options) as checkpointer:
        restored = checkpointer.restore(found, step=step)
    left = [name for name in os.listdir(directory / ".pyckpt") if name[:4] in ("view", "prob")]
    assert not left
    return restored, restored is not None and same(found, restored)


def look(base: Path, disk: int) -> list[Any]:
    return Catalog(base / f"disk-{disk}" / "run").entries()


def test_each_node_keeps_its_part_and_gets_the_rest_from_the_others(tmp_path):
    names = run_ranks(2, save, tmp_path, "01", [1, 2, 3], {"keep_last": 2})
    assert not (tmp_path / "nvme" / "run").exists(), "the nodes are no nodes"
    for rank, of_node in enumerate(names):
        assert ".metadata" in of_node
        assert [name[:3] for name in of_node if name.endswith(".distcp")] == [f"__{rank}"]
        (two, three) = look(tmp_path, rank)[:2]
        assert (two.state, three.state) == ("valid", "valid")
        checkpoint = three.checkpoint
        assert (checkpoint.step, checkpoint.metrics) == (3, {"loss": 0.5})
        assert [name[:3] for name in checkpoint.elsewhere] == [f"__{1 - rank}"]
        listed = listing(tmp_path / f"disk-{rank}" / "run")
        assert [(one.ranks, one.elsewhere) for one in listed if one.step] == [(2, 1)] * 2
    metadata = [(tmp_path / f"disk-{i}/run/step-00000003/.metadata").read_bytes() for i in (0, 1)]
    assert metadata[0] == metadata[1]
    assert run_ranks(2, restore, tmp_path, "01", {}) == [(3, True)] * 2
    # Ranks that came to other nodes, and one more that has a new node.
    assert run_ranks(3, restore, tmp_path, "210", {}) == [(3, True)] * 3


def _restore_in_pieces(base: Path, disks: str) -> tuple[int | None, bool]:
    reading._PIECE_BYTES = 10_000
    return restore(base, disks, {})


@pytest.mark.slow
def test_pieces_travel_side_by_side(tmp_path):
    """Each node sends to others, and receives what it lacks, more pieces than are under way."""
    run_ranks(3, save, tmp_path, "012", [1], {})
    assert run_ranks(3, _restore_in_pieces, tmp_path, "120") == [(1, True)] * 3


def _restore_and_lose(base: Path, disks: str) -> str:
    directory = enter(base, disks)
    original = DirectReader.read_data

    def lose(self: Any, *args: Any) -> Any:
        shutil.rmtree(self._view)
        return original(self, *args)

    DirectReader.read_data = lose  # type: ignore[method-assign]
    with Checkpointer(directory, node_local=True) as checkpointer:
        with pytest.raises(LoadError, match="somebody has removed what this restore made"):
            checkpointer.restore(state(0))
        DirectReader.read_data = original  # type: ignore[method-assign]
        return str(checkpointer.restore(state(0)))


def test_a_view_that_was_removed_is_no_damage(tmp_path):
    """Otherwise the restore would give the checkpoint up for an older one."""
    run_ranks(2, save, tmp_path, "01", [1, 2], {})
    assert run_ranks(2, _restore_and_lose, tmp_path, "10") == ["2", "2"]


def _sees_one_way(base: Path) -> str:
    at = base / "nvme"
    enter_node(at, base / "disk")
    if dist.get_rank() == 1:
        lay_over(at, base / "disk", base / "scratch")
    dist.barrier()
    with pytest.raises(PyckptError) as error:
        Checkpointer(at / "run", node_local=True)
    return str(error.value)


def test_a_node_that_sees_another_which_does_not_see_it_is_refused(tmp_path):
    (tmp_path / "disk" / "run" / ".pyckpt").mkdir(parents=True)
    (tmp_path / "nvme").mkdir()
    for told in run_ranks(2, _sees_one_way, tmp_path):
        assert "same for all who see it" in told


def _save_frozen(base: Path, disks: str) -> int:
    directory = enter(base, disks)
    run = LoraRun()
    inodes = []
    with Checkpointer(directory, node_local=True, frozen=True) as checkpointer:
        for step in (1, 2, 3):
            run.train(step)
            path = checkpointer.save(step, {**run.state, **state(step)}).wait()
            inodes.append(frozen_files(path))
    assert inodes[0] == inodes[1] == inodes[2]
    return len(inodes[0])


def _restore_frozen(base: Path, disks: str) -> bool:
    directory = enter(base, disks)
    expected, found = LoraRun(), LoraRun()
    for step in (1, 2, 3):
        expected.train(step)
    for one in found.model.parameters():
        one.data.zero_()
    tensors = state(0)
    with Checkpointer(directory, node_local=True, frozen=True) as checkpointer:
        assert checkpointer.restore({**found.state, **tensors}) == 3
        path = checkpointer.save(4, {**found.state, **tensors}).wait()
        second = checkpointer.save(5, {**found.state, **tensors}).wait()
    assert frozen_files(path) == frozen_files(second)
    model = expected.copy()
    return all(torch.equal(value, model[name]) for name, value in found.copy().items())


@pytest.mark.slow
def test_nodes_link_what_is_frozen(tmp_path):
    assert sum(run_ranks(2, _save_frozen, tmp_path, "01")) > 0
    assert run_ranks(2, _restore_frozen, tmp_path, "10") == [True, True]


@pytest.mark.slow
def test_what_is_on_no_node_is_told(tmp_path):
    run_ranks(2, save, tmp_path, "01", [1], {})
    with pytest.raises(RanksFailed, match=r"the data that rank 1 saved is on no node"):
        run_ranks(2, restore, tmp_path, "02", {})
    with pytest.raises(RanksFailed, match=r"the data that rank 1 saved is on no node"):
        run_ranks(1, restore, tmp_path, "0", {}, 1)


def damage(file: Path) -> None:
    """Change an element of the tensor that all have, or of the part of the other one."""
    content = file.read_bytes()
    whole = struct.pack("16f", *[2.0] * 16)
    part = struct.pack("16f", *range(1002, 1018))
    assert whole in content or part in content
    changed = content.replace(whole, bytes(64), 1).replace(part, bytes(64), 1)
    file.write_bytes(changed)


def test_a_node_that_lost_its_disk_reads_the_mirror_and_the_others_do_not(tmp_path):
    mirror = tmp_path / "mirror"
    options = {"mirror": str(mirror), "keep_last": 1}
    run_ranks(2, save, tmp_path, "01", [1, 2], options)
    shutil.rmtree(tmp_path / "disk-1")
    assert run_ranks(2, restore, tmp_path, "01", options) == [(2, True)] * 2
    # What the first node has is read there: nobody notices that the mirror's copy is damaged.
    (own,) = (tmp_path / "disk-0/run/step-00000002").glob("__0_*")
    kept = (mirror / "step-00000002" / own.name).read_bytes()
    damage(mirror / "step-00000002" / own.name)
    shutil.rmtree(tmp_path / "disk-1")
    (tmp_path / "disk-1/run/step-00000002").mkdir(parents=True)
    for name in (".metadata",):
        shutil.copy(mirror / "step-00000002" / name, tmp_path / "disk-1/run/step-00000002" / name)
    assert run_ranks(2, restore, tmp_path, "01", options) == [(2, True)] * 2
    # A part that is damaged on its node is read in the mirror, by all.
    (mirror / "step-00000002" / own.name).write_bytes(kept)
    damage(own)
    assert run_ranks(2, restore, tmp_path, "01", options) == [(2, True)] * 2


@pytest.mark.slow
def test_all_disks_are_lost_and_a_newer_checkpoint_is_in_the_mirror(tmp_path):
    options = {"mirror": str(tmp_path / "mirror")}
    run_ranks(2, save, tmp_path, "01", [1, 2], options)
    shutil.rmtree(tmp_path / "disk-0/run/step-00000002")
    shutil.rmtree(tmp_path / "disk-1/run/step-00000002")
    assert run_ranks(2, restore, tmp_path, "01", options) == [(2, True)] * 2
    shutil.rmtree(tmp_path / "disk-0")
    shutil.rmtree(tmp_path / "disk-1")
    assert run_ranks(3, restore, tmp_path, "012", options) == [(2, True)] * 3


# --- kept apart, and together ---


def _shared(base: Path) -> list[int]:
    with Checkpointer(base / "run", node_local=True) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        found = state(0)
        assert checkpointer.restore(found) == 1
        assert same(found, 1)
        return [len(one.elsewhere) for one in checkpointer.checkpoints()]


def test_a_directory_that_all_share_is_one_node(tmp_path):
    assert run_ranks(2, _shared, tmp_path) == [[0], [0]]
    assert len(list((tmp_path / "run/step-00000001").glob("*.distcp"))) == 2


def _mistaken(base: Path) -> None:
    with Checkpointer(enter(base, "01")) as checkpointer:
        checkpointer.save(1, state(1)).wait()


def _mistaken_restore(base: Path) -> None:
    with Checkpointer(enter(base, "01")) as checkpointer:
        checkpointer.restore(state(0))


@pytest.mark.slow
def test_directories_of_nodes_are_not_taken_for_a_shared_one(tmp_path):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _mistaken, tmp_path)
    assert isinstance(failed.value.__cause__, SaveError)
    assert "node_local=True" in str(failed.value)
    assert not list(tmp_path.glob("disk-*/run/*/.metadata"))
    run_ranks(2, save, tmp_path, "01", [2], {})
    with pytest.raises(RanksFailed, match="node_local=True"):
        run_ranks(2, _mistaken_restore, tmp_path)


# --- killed ---


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail(*_: object, **__: object) -> None:
    raise OSError(5, "the disk of this node failed")


def _after(function: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        function(*arguments)
        then()

    return both


def _save_and_break(base: Path, where: str, then: Callable[..., None], value: int) -> None:
    """Save a step over, while something happens to the ranks on the way."""
    directory = enter(base, "01")
    is_second = dist.get_rank() == 1
    with Checkpointer(directory, node_local=True) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        if (where == "second prepares") == is_second and "prepares" in where:
            NodeCommit._prepare = then
        elif where == ("second commits" if is_second else "before the commit"):
            NodeCommit._rename = then
        elif where == "after the commit" and not is_second:
            NodeCommit._rename = _after(NodeCommit._rename, then)
        checkpointer.save(1, {**state(2), "step": value}).wait()


OLD = ["first prepares", "second prepares", "before the commit"]
NEW = ["after the commit", "second commits"]


def _restore_either(base: Path, disks: str) -> tuple[int, bool]:
    found = state(0)
    with Checkpointer(enter(base, disks), node_local=True) as checkpointer:
        assert checkpointer.restore(found) == 1
        value = found["step"]
        is_whole = same(found, value)
        # And goes on: the next save is not disturbed by what was left.
        checkpointer.save(2, state(5)).wait()
        again = state(0)
        assert checkpointer.restore(again) == 2
        assert same(again, 5)
    left = os.listdir(base / "nvme/run/.pyckpt")
    assert not [name for name in left if name.startswith("pending")]
    return value, is_whole


@pytest.mark.parametrize(
    ("where", "then"),
    [
        pytest.param(where, then, marks=() if (where, then) == (NEW[1], _die) else pytest.mark.slow)
        for where in [*OLD, *NEW]
        for then in (_die, _fail)
    ],
)
def test_a_save_over_that_is_interrupted_leaves_the_old_or_the_new(tmp_path, where, then):
    with pytest.raises(RanksFailed):
        run_ranks(2, _save_and_break, tmp_path, where, then, 2)
    expected = 1 if where in OLD else 2
    assert run_ranks(2, _restore_either, tmp_path, "01") == [(expected, True)] * 2


@pytest.mark.slow
def test_a_save_over_that_is_not_restored_first_keeps_what_was_committed(tmp_path):
    with pytest.raises(RanksFailed):
        run_ranks(2, _save_and_break, tmp_path, NEW[1], _die, 2)
    # The next job does not restore; its save of the same step fails before it commits.
    with pytest.raises(RanksFailed):
        run_ranks(2, _save_and_break_only, tmp_path)
    assert run_ranks(2, _restore_either, tmp_path, "01") == [(2, True)] * 2


def _save_and_break_only(base: Path) -> None:
    with Checkpointer(enter(base, "01"), node_local=True) as checkpointer:
        if dist.get_rank() == 1:
            NodeCommit._prepare = _fail
        checkpointer.save(1, state(9)).wait()


def _replaced(base: Path) -> None:
    directory = enter(base, "01")
    with Checkpointer(directory, node_local=True) as old:
        old.save(1, state(1)).wait()
        with Checkpointer(directory, node_local=True) as new:
            new.save(2, state(2)).wait()
            with pytest.raises(pyckpt.errors.Superseded):
                old.save(3, state(3)).wait()
            found = state(0)
            assert new.restore(found) == 2
        with pytest.raises(pyckpt.errors.Superseded):
            old.wait()


@pytest.mark.slow
def test_a_job_that_was_replaced_saves_on_no_node(tmp_path):
    run_ranks(2, _replaced, tmp_path)
    for rank in (0, 1):
        assert [one.step for one in look(tmp_path, rank) if one.state == "valid"] == [1, 2]
