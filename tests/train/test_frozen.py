"""What is frozen is written once, and linked into the checkpoints after that."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from _crash_child import is_in, run_traced, traced
from _lora import LoraRun, disk_bytes, frozen_files, stock_reads
from _ranks import Pipe, run_ranks
from _sampling import slow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pyckpt
from pyckpt import _C
from pyckpt.dcp.frozen import Frozen
from pyckpt.dcp.hashing import hash_tensors
from pyckpt.errors import CorruptCheckpoint, PyckptError, SaveError
from pyckpt.tools.listing import listing
from pyckpt.train.finder import Finder

pytest.importorskip("xxhash", reason='frozen parts need pip install "pyckpt[frozen]"')


def saved(checkpointer: pyckpt.Checkpointer, step: int, run: Any) -> Path:
    return checkpointer.save(step, run.state).wait()


def is_whole(directory: Path) -> bool:
    entries = Finder(directory, "auto", None).inspect(verify=True)
    return bool(entries) and all(entry.state == "valid" for entry in entries)


@pytest.mark.parametrize("oldest_first", [True, False])
def test_checkpoints_share_the_file_of_what_is_frozen(tmp_path: Path, oldest_first: bool) -> None:
    run = LoraRun()
    models = {}
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        for step in (1, 2, 3):
            run.train(step)
            models[step] = run.copy()
            path = saved(checkpointer, step, run)
            statistics = checkpointer._saver.handle.statistics.write
            assert (statistics.bytes_linked > 4 * 64 * 64) == (step > 1)
    files = [frozen_files(tmp_path / f"step-{step:08d}") for step in models]
    assert len(files[0]) == 1
    assert files[0] == files[1] == files[2]
    assert (path / next(iter(files[0]))).stat().st_nlink == 3
    assert is_whole(tmp_path)
    steps = sorted(models, reverse=not oldest_first)
    for i, step in enumerate(steps):
        for left in steps[i:]:
            stock_reads(tmp_path / f"step-{left:08d}", models[left])
        shutil.rmtree(tmp_path / f"step-{step:08d}")


def test_a_copy_of_a_checkpoint_without_its_links_is_whole(tmp_path: Path) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path / "run", frozen=True) as checkpointer:
        saved(checkpointer, 1, run)
        path = saved(checkpointer, 2, run)
    copy = shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    stock_reads(copy, run.copy())
    state = LoraRun()
    torch.nn.init.zeros_(state.base)
    pyckpt.load({"model": state.model.state_dict()}, copy)
    assert torch.equal(state.base, run.base)


def test_pruning_leaves_what_newer_checkpoints_have(tmp_path: Path) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True, keep_last=1) as checkpointer:
        for step in (1, 2, 3):
            saved(checkpointer, step, run)
    assert os.listdir(tmp_path / "step-00000003")
    assert not (tmp_path / "step-00000001").exists()
    stock_reads(tmp_path / "step-00000003", run.copy())


def test_named_buffers_are_frozen_too(tmp_path: Path) -> None:
    run = LoraRun(layers=1)
    with pyckpt.Checkpointer(tmp_path, frozen="model.*.scale") as checkpointer:
        saved(checkpointer, 1, run)
        path = saved(checkpointer, 2, run)
    found = pyckpt.DirectReader(path).read_metadata().storage_data
    frozen = {i.fqn for i, info in found.items() if info.relative_path.endswith(".frozen.distcp")}
    assert frozen == {"model.0.base_layer.weight", "model.0.base_layer.bias", "model.0.scale"}
    hashes = {index.fqn for index, info in found.items() if "xxh3" in vars(info)}
    assert hashes == frozen


@pytest.mark.parametrize(
    "how",
    [slow("in place"), "behind autograd", slow("replaced"), slow("another dtype")],
)
def test_what_has_changed_is_written_at_once(tmp_path: Path, caplog: Any, how: str) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        saved(checkpointer, 1, run)
        before = saved(checkpointer, 2, run)
        layer: Any = run.model[0]
        with torch.no_grad():
            if how == "in place":
                run.base.add_(1)
            elif how == "behind autograd":
                run.base.data.add_(1)
            elif how == "replaced":
                changed = torch.nn.Parameter(run.base + 1, requires_grad=False)
                layer.base_layer.weight = changed
            else:
                layer.base_layer.to(torch.float64)
        path = saved(checkpointer, 3, run)
        again = saved(checkpointer, 4, run)
    stock_reads(before, LoraRun().copy())
    stock_reads(path, run.copy())
    stock_reads(again, run.copy())
    told = [record.getMessage() for record in caplog.records if "have changed" in record.message]
    assert (len(told) == 1 and "model.0.base_layer.weight" in told[0]) or how == "another dtype"
    assert is_whole(tmp_path)


@pytest.mark.parametrize("watches", [True, False])
def test_memory_that_was_not_written_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watches: bool
) -> None:
    try:
        _C.PageWatch().close()
    except OSError as error:
        pytest.skip(f"this kernel says nothing of written pages: {error}")
    hashed = []

    def counting(tensors: Any) -> list[str]:
        hashed.append(sum(one.nbytes for one in tensors))
        return hash_tensors(tensors)

    monkeypatch.setattr("pyckpt.dcp.hashed_memory.hash_tensors", counting)
    run = LoraRun(size=512, layers=1)
    with pyckpt.Checkpointer(tmp_path, frozen=True, watch_frozen=watches) as checkpointer:
        for step in range(1, 5):
            run.train(step)
            path = saved(checkpointer, step, run)
        assert [size > 512 * 512 * 4 for size in hashed] == [True, not watches, not watches]
        stock_reads(path, run.copy())
        run.base.data[3, 4] += 1
        stock_reads(saved(checkpointer, 5, run), run.copy())
        for step in (6, 7):
            stock_reads(saved(checkpointer, step, run), run.copy())
    assert is_whole(tmp_path)


def test_a_file_whose_last_tensor_has_changed_is_not_linked(tmp_path: Path) -> None:
    """Readers would find it longer than what the checkpoint has in it."""
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        saved(checkpointer, 1, run)
        second = saved(checkpointer, 2, run)
        last: Any = run.model[-1]
        last.base_layer.bias.data.add_(1)
        third = saved(checkpointer, 3, run)
        fourth = saved(checkpointer, 4, run)
    assert not frozen_files(second).keys() & frozen_files(third).keys()
    assert frozen_files(third).items() <= frozen_files(fourth).items()
    stock_reads(fourth, run.copy())
    assert is_whole(tmp_path)


def test_the_checkpoint_is_the_state_at_the_call(tmp_path: Path) -> None:
    """Adapters that are merged at the call are taken out while the save is under way."""
    run = LoraRun()
    run.train(1)
    layer: Any = run.model[0]
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        saved(checkpointer, 1, run)
        saved(checkpointer, 2, run)
        layer.merge(+1)
        merged = run.copy()
        handle = checkpointer.save(3, run.state)
        layer.merge(-1)
        stock_reads(handle.wait(), merged)
        # And where nothing had changed at the call.
        unmerged = run.copy()
        saved(checkpointer, 4, run)
        handle = checkpointer.save(5, run.state)
        layer.merge(+1)
        stock_reads(handle.wait(), unmerged)


def damage(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(5000)
        byte = opened.read(1)
        opened.seek(5000)
        opened.write(bytes([byte[0] ^ 1]))


def test_a_damaged_file_is_not_linked_by_the_next_job(tmp_path: Path, caplog: Any) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, run)
    damage(next(path.glob("*.frozen.distcp")))
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 2, run)
    assert "cannot be used again" in caplog.text
    stock_reads(path, run.copy())
    states = {one.step: one.state for one in checkpointer.inspect(verify=True)}
    assert states == {1: "damaged", 2: "valid"}


def test_damage_that_comes_while_training_ends_at_the_next_look(
    tmp_path: Path, caplog: Any
) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True, verify_linked_every=1) as checkpointer:
        first = saved(checkpointer, 1, run)
        damage(next(first.glob("*.frozen.distcp")))
        saved(checkpointer, 2, run)  # may have it
        last = saved(checkpointer, 3, run)
    assert frozen_files(last) != frozen_files(first)
    assert "is damaged" in caplog.text or "cannot be used again" in caplog.text
    stock_reads(last, run.copy())
    assert [one.state for one in checkpointer.inspect(verify=True)][-1] == "valid"


@pytest.mark.parametrize("changes", [False, True])
def test_what_was_not_copied_and_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: bool
) -> None:
    """It is written from the live tensors if they are as they were; or else the save fails."""
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        saved(checkpointer, 1, run)
        saved(checkpointer, 2, run)

        def lose(self: Frozen, directory: Path, name: str) -> None:
            if changes:
                run.base.data.add_(1)
            raise OSError(errno.EIO, "Input/output error", name)

        with monkeypatch.context() as patch:
            patch.setattr(Frozen, "ensure_verified", lose)
            handle = checkpointer.save(3, run.state)
            if changes:
                with pytest.raises(SaveError, match=r"model\.0\.base_layer\.weight had not"):
                    handle.wait()
                with pytest.raises(SaveError):
                    checkpointer.wait()
            else:
                path = handle.wait()
                stock_reads(path, run.copy())
                assert frozen_files(path) != frozen_files(tmp_path / "step-00000002")
        stock_reads(saved(checkpointer, 4, run), run.copy())
    assert is_whole(tmp_path)


@pytest.mark.slow
def test_a_file_is_written_anew_after_so_many_checkpoints(tmp_path: Path) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True, fresh_copy_every=2) as checkpointer:
        paths = [saved(checkpointer, step, run) for step in range(1, 6)]
    files = [frozen_files(path) for path in paths]
    assert files[0] == files[1] != files[2] == files[3] != files[4]
    with pyckpt.Checkpointer(tmp_path, frozen=True, fresh_copy_every=2) as checkpointer:
        sixth, seventh = (saved(checkpointer, step, run) for step in (6, 7))
    assert files[4] == frozen_files(sixth) != frozen_files(seventh)


@pytest.mark.slow
def test_files_are_verified_as_often_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyckpt.train import frozen

    looked: list[str] = []
    verify = frozen.verify_items

    def look(directory: Path, items: Any, **options: Any) -> Any:
        looked.append(directory.name)
        return verify(directory, items, **options)

    monkeypatch.setattr(frozen, "verify_items", look)
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True, verify_linked_every=3) as checkpointer:
        for step in range(1, 9):
            saved(checkpointer, step, run)
            checkpointer._saver._thread.submit(bool).result()
    assert looked == ["step-00000001", "step-00000004", "step-00000007"]


def test_a_resumed_run_links(tmp_path: Path) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        run.train(1)
        first = saved(checkpointer, 1, run)
    resumed = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        assert checkpointer.restore(resumed.state) == 1
        resumed.train(2)
        second = saved(checkpointer, 2, resumed)
        third = saved(checkpointer, 3, resumed)
    assert frozen_files(first) == frozen_files(second) == frozen_files(third)
    stock_reads(second, resumed.copy())
    assert is_whole(tmp_path)


def test_a_step_is_saved_again_over_the_file_that_it_links(tmp_path: Path) -> None:
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        first = frozen_files(saved(checkpointer, 1, run))
        for step in (2, 3):
            run.train(step)
            path = saved(checkpointer, 1, run)
            assert frozen_files(path) == first
            stock_reads(path, run.copy())
    assert len(os.listdir(path)) == 3


def test_unchanged_tensors_are_detected(tmp_path: Path) -> None:
    """Nobody declared them; they are put into a file of their own once they have stood still."""
    run = LoraRun(layers=1)
    state = {"still": torch.arange(5000), "moving": torch.zeros(5000), **run.state}
    with pyckpt.Checkpointer(tmp_path, unchanged="detect") as checkpointer:
        paths = []
        for step in range(1, 6):
            run.train(step)
            state["moving"] += 1
            paths.append(checkpointer.save(step, state).wait())
    files = [frozen_files(path) for path in paths]
    assert files[0] == {}
    assert files[1] != {}
    assert files[1] == files[2] == files[3] == files[4]
    places = pyckpt.DirectReader(paths[-1]).read_metadata().storage_data
    frozen = {i.fqn for i, info in places.items() if info.relative_path in files[-1]}
    assert frozen >= {"still", "model.0.base_layer.weight", "model.0.scale"}
    assert not frozen & {"moving", "model.0.lora_A.weight"}
    stock_reads(paths[-1], run.copy())
    assert is_whole(tmp_path)


def test_bytes_on_disk_are_those_of_one_base(tmp_path: Path) -> None:
    run = LoraRun(size=512, layers=1)
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        for step in range(1, 6):
            saved(checkpointer, step, run)
        found = checkpointer.checkpoints()
    base = 4 * 512 * 513
    assert disk_bytes(tmp_path) < 1.1 * base + 5 * 60_000
    assert all(one.bytes > base for one in found)
    listed = listing(tmp_path)
    assert [one.bytes_shared > base for one in listed] == [False, True, True, True, True]
    of_data = sum(one.bytes - one.bytes_shared for one in listed)
    assert of_data == disk_bytes(tmp_path, ".distcp")


# --- links that cannot be made --------------------------------------------------------------------


def _link_traced(pipe: Pipe, directory: Path) -> list[str]:
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyckpt").addHandler(handler)
    run = LoraRun()
    with pyckpt.Checkpointer(directory, frozen=True) as checkpointer:
        for step in (1, 2):
            saved(checkpointer, step, run)
        with traced(pipe):
            for step in (3, 4):
                saved(checkpointer, step, run)
            checkpointer._saver._thread.submit(bool).result()
    return [line for line in log if "link" in line or "again" in line]


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("error", ["EXDEV", slow("EMLINK"), slow("EPERM"), slow("EIO")])
def test_a_link_that_is_refused(tmp_path: Path, error: str) -> None:
    told = run_traced(_link_traced, tmp_path, inject=f"link,linkat:error={error}")
    assert len(told.injected) == 2
    steps = [tmp_path / f"step-{step:08d}" for step in (1, 2, 3, 4)]
    for path in steps:
        stock_reads(path, LoraRun().copy())
    files = [frozen_files(path) for path in steps]
    inodes = {inode for of_step in files for inode in of_step.values()}
    assert len(inodes) == 3  # the one that two steps share, and one for each that has no link
    names = {name for of_step in files for name in of_step}
    if error == "EIO":  # not a refusal, but a failure: written from what is in memory
        assert len(names) == 3
        assert len([line for line in told.result if "cannot be used again" in line]) == 2
    else:
        assert len(names) == 1
        assert len([line for line in told.result if "are copied" in line]) == 1  # said once
    assert is_whole(tmp_path)


# --- kills ----------------------------------------------------------------------------------------


def _save_linking(pipe: Pipe, directory: Path) -> None:
    run = LoraRun()
    # One thread: the calls come in one order.
    with (
        pyckpt.Engine(io_threads=1, slot_bytes=256 << 10) as engine,
        pyckpt.Checkpointer(directory, frozen=True, keep_last=2, engine=engine) as checkpointer,
    ):
        for step in (1, 2):
            run.train(step)
            saved(checkpointer, step, run)
        checkpointer._saver._thread.submit(bool).result()
        run.train(3)
        with traced(pipe):
            saved(checkpointer, 3, run)
            checkpointer._saver._thread.submit(bool).result()


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("each", [False, slow(True)], ids=["around-the-link", "each"])
def test_killed_while_it_links(tmp_path: Path, each: bool) -> None:
    plan = run_traced(_save_linking, tmp_path / "plan", inject="link,linkat:delay_enter=1")
    inside = [call for call in plan.calls if is_in(call, tmp_path / "plan")]
    calls = [call for call in inside if call.name not in ("fcntl", "close")]
    (link,) = [i for i, call in enumerate(calls) if call.name in ("link", "linkat")]
    commit = max(i for i, call in enumerate(calls) if call.name == "rename" and ".tmp" in call.text)
    assert link < commit
    synced = [i for i, call in enumerate(calls) if call.name == "fsync"]
    assert any(link < i < commit for i in synced)
    run = LoraRun()
    models = {}
    for step in (1, 2, 3):
        run.train(step)
        models[step] = run.copy()
    for i, call in enumerate(calls):
        if not each and i not in (link, link + 1, commit):
            continue
        directory = tmp_path / f"{i}-{call.name}"
        how = f"{call.name}:signal=KILL:when={call.nth}"
        killed = run_traced(_save_linking, directory, inject=how)
        assert killed.killed, call
        found = [one.step for one in Finder(directory, "auto", None).checkpoints(verify=True)]
        assert found[-1] in (2, 3)
        for step in found:
            stock_reads(directory / f"step-{step:08d}", models[step])
        # The next job goes on, links, and leaves nothing of it.
        resumed = LoraRun()
        with pyckpt.Checkpointer(directory, frozen=True) as checkpointer:
            assert checkpointer.restore(resumed.state) == found[-1]
            before = frozen_files(directory / f"step-{found[-1]:08d}")
            path = saved(checkpointer, 3, resumed)
        assert frozen_files(path) == before, call
        stock_reads(path, models[found[-1]])
        assert len(os.listdir(path)) == 3


# --- ranks ----------------------------------------------------------------------------------------


class _Sharded:
    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        self.base = torch.randn(64, 64)
        self.copied = torch.randn(300, 20)
        self.moving = torch.zeros(8)
        self.state = {
            "sharded": distribute_tensor(self.base, mesh, [Shard(0)]),
            "replicated": distribute_tensor(self.copied, mesh, [Replicate()]),
            "plain": torch.arange(10_000),
            "moving": self.moving,
        }


def _on_ranks(directory: Path, steps: list[int]) -> list[dict[str, int]]:
    run = _Sharded()
    names = ("sharded", "replicated", "plain")
    with pyckpt.Checkpointer(directory, frozen=names) as checkpointer:
        paths = []
        for step in steps:
            run.moving += 1
            paths.append(checkpointer.save(step, run.state).wait())
            checkpointer.wait()
        return [frozen_files(path) for path in paths]


@pytest.mark.slow
def test_each_rank_links_its_own(tmp_path: Path) -> None:
    first, other = run_ranks(2, _on_ranks, tmp_path, [1, 2, 3])
    assert first == other
    assert {name.split("_")[2] for name in first[0]} == {"0", "1"}
    assert first[0] == first[1] == first[2]
    again, _ = run_ranks(2, _on_ranks, tmp_path, [4, 5])
    assert again[0] == again[1] == first[0]
    assert is_whole(tmp_path)
    torch.manual_seed(0)
    state = {"sharded": torch.zeros(64, 64), "plain": torch.zeros(10_000, dtype=torch.long)}
    torch.distributed.checkpoint.load(state, checkpoint_id=str(tmp_path / "step-00000005"))
    assert torch.equal(state["sharded"], torch.randn(64, 64))
    assert torch.equal(state["plain"], torch.arange(10_000))


# --- the mirror -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mounted", "bucket"])
def test_the_mirror_copies_what_it_has(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from obstore.store import LocalStore

    from pyckpt.remote import folder, objects
    from pyckpt.train.tiers import promotion

    def store(url: str) -> Any:
        return LocalStore(str(tmp_path / "mirror") + url.removeprefix("s3://bucket"), mkdir=True)

    for module in (folder, objects):
        monkeypatch.setattr(module, "open_store", store)
    monkeypatch.setattr(promotion, "_FIRST_POLL_SECONDS", 0.01)
    address = str(tmp_path / "mirror") if kind == "mounted" else "s3://bucket"
    run = LoraRun(size=256)
    with pyckpt.Checkpointer(
        tmp_path / "run", frozen=True, mirror=address, mirror_keep_last=2
    ) as checkpointer:
        copied = []
        for step in (1, 2, 3, 4):
            run.train(step)
            saved(checkpointer, step, run)
            assert checkpointer.wait_mirrored(60)
            copied.append(checkpointer.statistics.mirror.bytes)
    assert copied[0] > 2 * 4 * 256 * 256
    assert copied[3] - copied[2] < copied[0] / 2
    for step in (3, 4):
        path = tmp_path / "mirror" / f"step-{step:08d}"
        assert frozen_files(path)
        if kind == "mounted":
            assert next(path.glob("*.frozen.distcp")).stat().st_nlink == 2
    stock_reads(tmp_path / "mirror" / "step-00000004", run.copy())
    assert not (tmp_path / "mirror" / "step-00000001" / ".metadata").exists()


# --- jobs, damage and errors ----------------------------------------------------------------------


def test_a_superseded_save_leaves_the_next_jobs_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyckpt.dcp.own_files import OwnFiles

    run, write, met = LoraRun(), OwnFiles.write, []
    late = pyckpt.Checkpointer(tmp_path, frozen=True)
    saved(late, 1, run)

    def stall(self: OwnFiles, name: str, *rest: Any) -> bytes:
        if met or ".frozen." in name:
            return write(self, name, *rest)
        met.append(name)  # it has linked; its host stalls, and the next job goes on
        with pyckpt.Checkpointer(tmp_path, frozen=True) as following:
            saved(following, 2, LoraRun())
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(OwnFiles, "write", stall)
    with pytest.raises(OSError, match="Stale"):
        saved(late, 2, run)
    with pytest.raises((OSError, PyckptError)):
        late.close()
    assert frozen_files(tmp_path / "step-00000002") == frozen_files(tmp_path / "step-00000001")
    assert is_whole(tmp_path)


def test_links_of_a_failed_save_are_removed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyckpt.dcp.own_files import OwnFiles

    run = LoraRun()

    def fail(self: OwnFiles, *rest: Any) -> bytes:
        raise OSError(errno.ENOSPC, "full")

    checkpointer = pyckpt.Checkpointer(tmp_path, frozen=True)
    saved(checkpointer, 1, run)
    monkeypatch.setattr(OwnFiles, "write", fail)
    with pytest.raises(OSError, match="full"):
        saved(checkpointer, 2, run)
    with pytest.raises(OSError, match="full"):
        checkpointer.close()
    assert not (tmp_path / "step-00000002").exists()
    assert is_whole(tmp_path)


def test_restarted_jobs_count_checkpoints_that_were_pruned(tmp_path: Path) -> None:
    run, names = LoraRun(), []
    for step in range(1, 5):
        with pyckpt.Checkpointer(
            tmp_path, frozen=True, keep_last=1, fresh_copy_every=3
        ) as checkpointer:
            names.append(list(frozen_files(saved(checkpointer, step, run))))
    assert names[0] == names[1] == names[2] != names[3]


def test_verifying_compares_hashes(tmp_path: Path) -> None:
    from pyckpt.train.store.links import frozen_items, verify_items

    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, LoraRun())
    items = frozen_items(path, 0)
    found = [one for one in verify_items(path, items, direct="off", engine=None) if one]
    assert {one.index for one in found} == {one.index for one in items}
    wrong = [dataclasses.replace(one, hash="0" * 32) for one in items]
    with pytest.raises(CorruptCheckpoint, match="XXH3"):
        list(verify_items(path, wrong, direct="off", engine=None))


def test_the_command_compares_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which find what a checksum of 32 bits does not."""
    from pyckpt.tools.verifying import verify
    from pyckpt.train.store.links import frozen_items

    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, LoraRun(size=300))
    good = verify(path)
    assert good.good
    assert good.hashed == 4
    (file,) = path.glob("*.frozen.distcp")
    content = bytearray(file.read_bytes())
    # A multiple of the polynomial of CRC-32: its bits may be flipped anywhere.
    bits = 1 | int(f"{0x04C11DB7:032b}"[::-1], 2) << 1
    items = sorted(frozen_items(path, 0), key=lambda one: one.info.length)
    for item in (items[0], items[-1]):
        at = item.info.offset + vars(item.info)["payload_offset"] + 50
        before = zlib.crc32(content)
        part = int.from_bytes(content[at : at + 5], "little") ^ bits
        content[at : at + 5] = part.to_bytes(5, "little")
        assert zlib.crc32(content) == before
    file.write_bytes(content)
    found = verify(path)
    assert [one.what[:8] for one in found.damages] == ["XXH3-128"] * 2
    assert found.hashed == 2
    monkeypatch.setitem(sys.modules, "xxhash", None)
    found = verify(path)
    assert (found.good, found.hashed) == (True, 0)


def test_verifying_stops_for_a_save_and_goes_on_after_it(tmp_path: Path) -> None:
    from pyckpt.train.store.links import frozen_items

    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, LoraRun())
    read: list[Any] = []

    def check(directory: Path, items: Any) -> Any:
        for item in items:
            read.append(item.index)
            if len(read) == 1:
                state.begin((), detects=False)
            yield item

    state = Frozen(check, verify_every=10, fresh_every=50, room=lambda: 0)
    state.adopt(path, frozen_items(path, 0))
    assert state.verify_next(state.begin((), detects=False)) == []
    assert len(read) == 1
    assert state.verify_next(state.begin((), detects=False)) == []
    assert len(read) == len(set(read)) == 4
    state.close()


def test_an_error_of_reading_is_not_damage(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyckpt.train import frozen

    def fail(*rest: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, "no memory")
        yield

    run = LoraRun()
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "verify_items", fail)
        with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
            saved(checkpointer, 1, run)
            checkpointer._saver._thread.submit(bool).result()
            state: Any = checkpointer._saver._frozen._state  # type: ignore[union-attr]
            assert all(one.is_usable for one in state._files.values())
    assert "could not be read; verified again" in caplog.text
    assert "damaged" not in caplog.text


def test_late_copies_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyckpt.train import frozen

    monkeypatch.setattr(frozen, "_room", lambda engine: 1000)
    run = LoraRun()
    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, run)
        checkpointer._saver._thread.submit(bool).result()
        next(path.glob("*.frozen.distcp")).unlink()
        with pytest.raises(SaveError, match="do not fit"):
            saved(checkpointer, 2, run)
        with pytest.raises(SaveError):
            checkpointer.wait()
        stock_reads(saved(checkpointer, 3, run), run.copy())


@pytest.mark.parametrize("nothing", [[], (), ""])
def test_no_patterns_freeze_nothing(tmp_path: Path, nothing: Any) -> None:
    with pyckpt.Checkpointer(tmp_path, frozen=nothing) as checkpointer:
        path = saved(checkpointer, 1, LoraRun(layers=1))
    assert not frozen_files(path)


def test_a_pattern_without_a_match_is_named_once(tmp_path: Path, caplog: Any) -> None:
    with pyckpt.Checkpointer(tmp_path, frozen=("modle.*", "model.*.scale")) as checkpointer:
        for step in (1, 2):
            saved(checkpointer, step, LoraRun(layers=1))
    (told,) = [one.getMessage() for one in caplog.records if "match no key" in one.message]
    assert "modle" in told
    assert "scale" not in told


def test_frozen_remains_of_a_kill_are_seen(tmp_path: Path) -> None:
    from pyckpt.format import commit

    with pyckpt.Checkpointer(tmp_path, frozen=True) as checkpointer:
        path = saved(checkpointer, 1, LoraRun())
    assert not commit.has_remains(path)
    with pyckpt.Checkpointer(tmp_path / "plain") as checkpointer:
        plain = saved(checkpointer, 1, LoraRun())
    for each in (path, plain):
        _leave(each)


def _leave(path: Path) -> None:
    from pyckpt.format import commit

    left = path / commit.frozen_file_name(0, commit.new_save_id())
    left.write_bytes(b"left")
    assert commit.has_remains(path)
    commit.remove_remains(path, sync=False)
    assert not left.exists()


# --- arguments ------------------------------------------------------------------------------------


def test_without_xxhash_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    for options in ({"frozen": True}, {"unchanged": "detect"}):
        with pytest.raises(ImportError, match=r'pip install "pyckpt\[frozen\]"'):
            pyckpt.Checkpointer(tmp_path, **options)  # type: ignore[arg-type]
    pyckpt.Checkpointer(tmp_path).close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"unchanged": "guess"}, ValueError),
        ({"frozen": 3}, TypeError),
        ({"frozen": [3]}, TypeError),
        ({"verify_linked_every": 0}, ValueError),
        ({"fresh_copy_every": 0.5}, TypeError),
    ],
)
def test_arguments_are_checked(tmp_path: Path, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        pyckpt.Checkpointer(tmp_path, **options)
