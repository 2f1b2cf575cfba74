"""What is kept, and that what goes is gone at once, or unmistakably going."""

from __future__ import annotations

import fcntl
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import Child, Pipe, run_child
from hypothesis import given
from hypothesis import strategies as st

import pyckpt
from pyckpt.format import commit
from pyckpt.format.claim import Claim
from pyckpt.train.store.catalog import NOTE_KEY, Catalog, CheckpointInfo, note, reading
from pyckpt.train.store.pruner import Protected, Pruner, prune
from pyckpt.train.store.removal import remove
from pyckpt.train.store.retention import Retention, surplus


def checkpoint(step: int, final: bool = False, **metrics: float) -> CheckpointInfo:
    return CheckpointInfo(step=step, path=Path(f"step-{step:08d}"), final=final, metrics=metrics)


checkpoints = st.lists(
    st.builds(
        checkpoint,
        st.integers(0, 200),
        st.booleans(),
        loss=st.floats(allow_infinity=True, allow_nan=True),
    ),
    unique_by=lambda c: c.step,
)
retentions = st.builds(
    Retention,
    st.none() | st.integers(0, 5),
    st.none() | st.integers(1, 50),
    st.none() | st.tuples(st.just("loss"), st.integers(1, 4), st.sampled_from(["min", "max"])),
)


@given(checkpoints, retentions, st.sets(st.integers(0, 200)))
def test_what_must_stay_stays_and_no_more(
    found: list[CheckpointInfo], retention: Retention, protected: set[int]
) -> None:
    going = surplus(found, retention, protected=protected)
    assert going == sorted(set(going))
    assert set(going) <= {c.step for c in found}
    if retention.keep_last is None:
        assert going == []
        return
    normal = sorted((c.step for c in found if not c.final), reverse=True)
    for c in found:
        best = False
        if retention.keep_best is not None and not math.isnan(c.metrics["loss"]):
            _, count, mode = retention.keep_best
            sign = 1 if mode == "min" else -1
            mine = (sign * c.metrics["loss"], -c.step)
            better = [
                o
                for o in found
                if not math.isnan(o.metrics["loss"]) and (sign * o.metrics["loss"], -o.step) < mine
            ]
            best = len(better) < count
        stays = (
            c.final
            or c.step in protected
            or best
            or c.step == max(o.step for o in found)
            or c.step in normal[: retention.keep_last]
            or (retention.keep_every is not None and c.step % retention.keep_every == 0)
        )
        assert (c.step in going) != stays, c


@given(checkpoints, retentions)
def test_a_second_time_there_is_nothing_to_do(
    found: list[CheckpointInfo], retention: Retention
) -> None:
    going = surplus(found, retention)
    assert surplus([c for c in found if c.step not in going], retention) == []


def test_no_intermediate_ones() -> None:
    found = [checkpoint(10), checkpoint(20)]
    assert surplus(found, Retention(keep_last=0)) == [10]
    assert surplus([*found, checkpoint(30, final=True)], Retention(keep_last=0)) == [10, 20]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep_last": -1}, "keep_last"),
        ({"keep_every": 0}, "keep_every"),
        ({"keep_best": ("loss", 0, "min")}, "1 or more"),
        ({"keep_best": ("loss", 1, "least")}, "'min' or 'max'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Retention(**arguments)


# --- on disk --------------------------------------------------------------------------------------


def write(directory: Path, step: int, final: bool = False, **metrics: float) -> Path:
    path = Catalog(directory).path(step)
    state = {"x": torch.full((4,), float(step)), NOTE_KEY: note(step, final=final, metrics=metrics)}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(path, sync_files=False))
    return path


def write_all(directory: Path, *steps: int) -> None:
    for step in steps:
        write(directory, step)


def states(directory: Path) -> dict[int | None, str]:
    return {entry.step: entry.state for entry in Catalog(directory).entries()}


def test_prune_counts_valid_ones_only(tmp_path: Path) -> None:
    write_all(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-00000004" / ".metadata").write_bytes(b"no metadata")
    (tmp_path / "step-00000006").mkdir()  # is being written, perhaps
    foreign = tmp_path / "step-00000000"
    foreign.mkdir()
    (foreign / "model.pt").touch()
    assert prune(Catalog(tmp_path), Retention(keep_last=2)) == [1, 2]
    assert states(tmp_path) == {
        0: "foreign",
        3: "valid",
        4: "damaged",
        5: "valid",
        6: "unfinished",
    }


def test_remains_of_interrupted_saves_go_once_a_newer_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "__0_ab.distcp").touch()
    (tmp_path / "step-00000001" / ".saving").touch()
    assert prune(Catalog(tmp_path), Retention()) == []
    assert states(tmp_path) == {1: "unfinished"}
    write(tmp_path, 2)
    assert prune(Catalog(tmp_path), Retention(), busy={1}) == []
    assert states(tmp_path) == {1: "unfinished", 2: "valid"}
    assert prune(Catalog(tmp_path), Retention()) == []
    assert states(tmp_path) == {2: "valid"}


def test_a_checkpoint_without_its_metadata_stays(tmp_path: Path) -> None:
    write_all(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000001" / ".metadata").unlink()
    assert prune(Catalog(tmp_path), Retention(keep_last=1)) == [2]
    assert states(tmp_path) == {1: "damaged", 3: "valid"}
    assert len(os.listdir(tmp_path / "step-00000001")) == 1


def test_what_is_wanted_while_others_go_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, 1, 2, 3, 4, 5)
    protected, busy = Protected(), set[int]()
    rmdir = os.rmdir

    def removed(path: str, *, dir_fd: int) -> None:
        rmdir(path, dir_fd=dir_fd)
        protected.add(2)
        protected.add(2)
        protected.discard(2)
        busy.add(3)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", removed)
        retention = Retention(keep_last=1)
        assert prune(Catalog(tmp_path), retention, protected=protected, busy=busy) == [1, 4]
    assert states(tmp_path) == {2: "valid", 3: "valid", 5: "valid"}
    protected.discard(2)
    protected.discard(2)
    assert prune(Catalog(tmp_path), retention, protected=protected) == [2, 3]


def test_distrusted_ones_neither_count_nor_go(tmp_path: Path) -> None:
    write_all(tmp_path, 1, 2, 3)
    assert prune(Catalog(tmp_path), Retention(keep_last=1), distrusted={3}) == [1]
    assert states(tmp_path) == {2: "valid", 3: "valid"}


def test_metrics_and_final_are_read_from_disk(tmp_path: Path) -> None:
    write(tmp_path, 1, loss=0.5)
    write(tmp_path, 2, loss=0.1)
    write(tmp_path, 3, final=True)
    write(tmp_path, 4, loss=0.9)
    write(tmp_path, 5)
    retention = Retention(keep_last=1, keep_best=("loss", 1, "min"))
    assert prune(Catalog(tmp_path), retention) == [1, 4]


def test_a_job_may_begin_to_save_before_it_is_known_where_training_begins(tmp_path: Path) -> None:
    """A restore that finds nothing may finish what an earlier job left half committed."""
    write(tmp_path, 8)
    told: list[tuple[int, list[int]]] = []
    pruner = Pruner(
        Catalog(tmp_path),
        Retention(1),
        allowed=nullcontext,
        busy=(),
        distrusted=(),
        on_newer=lambda step, newer: told.append((step, sorted(newer))),
    )
    pruner.begun()
    assert told == []
    write(tmp_path, 1)
    pruner.begins(1)
    assert told == [(1, [8])]
    write(tmp_path, 2)
    pruner.committed(2)
    pruner.close()
    assert Catalog(tmp_path).steps() == [8, 2]


def test_what_stays_anyway_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, *range(10, 100, 10))
    catalog = Catalog(tmp_path)
    looked_at: list[int] = []
    examine = catalog.examine
    monkeypatch.setattr(catalog, "examine", lambda step: (looked_at.append(step), examine(step))[1])
    assert prune(catalog, Retention(keep_last=2, keep_every=20)) == [10, 30, 50, 70]
    assert looked_at == [90, 80, 70, 50, 30, 10]
    looked_at.clear()
    assert prune(catalog, Retention()) == []
    assert looked_at == [90]


def _read(pipe: Pipe, path: Path) -> None:
    with reading(path):
        pipe.send("reading")
        pipe.wait()


@pytest.mark.parametrize("where", ["here", "in another process"])
def test_what_is_being_read_stays(where: str, tmp_path: Path) -> None:
    write_all(tmp_path, 1, 2)
    catalog, retention = Catalog(tmp_path), Retention(keep_last=1)
    if where == "here":
        with reading(catalog.path(1)):
            assert prune(catalog, retention) == []
    else:
        child = Child(_read, catalog.path(1))
        assert child.receive() == "reading"
        assert prune(catalog, retention) == []
        child.connection.send("go on")
        child.receive()
        child.join()
    assert states(tmp_path) == {1: "valid", 2: "valid"}
    assert prune(catalog, retention) == [1]
    with pytest.raises(FileNotFoundError), reading(catalog.path(1)):
        pass


def test_a_reader_that_comes_second_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyckpt.train.store.catalog._PATIENCE_SECONDS", 0.05)
    path = write(tmp_path, 1)
    descriptor = os.open(path / ".metadata", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError, match="is being removed"), reading(path):
            pass
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("removes", [True, False])
def test_a_reader_waits_for_what_a_removal_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """A removal that may not remove it lets go of its lock, and the checkpoint is there still."""
    path = write(tmp_path, 1)
    descriptor = os.open(path / ".metadata", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def end(_: float) -> None:
        if removes:
            os.rename(path / ".metadata", path / commit.REMOVED)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    try:
        monkeypatch.setattr("pyckpt.train.store.catalog.time.sleep", end)
        expected = pytest.raises(FileNotFoundError, match="removed") if removes else nullcontext()
        with expected, reading(path):
            assert not removes
    finally:
        os.close(descriptor)


def _remove_until(_pipe: Pipe, path: Path, call: str, after: int) -> None:
    """Remove a checkpoint, and die at the n-th call of a function of os."""
    real = getattr(os, call)
    count = 0

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        if count == after:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return real(*arguments, **options)

    setattr(os, call, deadly)
    remove(path)


@pytest.mark.parametrize(
    ("call", "after"),
    [("rename", 0), ("fsync", 0), ("unlink", 0), ("unlink", 1), ("unlink", 2), ("rmdir", 0)],
)
def test_killed_while_it_removes(call: str, after: int, tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "__1_cd.distcp").touch()  # so that there are three files to unlink
    write(tmp_path, 2)
    child = Child(_remove_until, path, call, after)
    with pytest.raises(EOFError):
        child.receive()
    assert child.join() == -signal.SIGKILL
    entry = Catalog(tmp_path).examine(1)
    if call == "rename":
        assert entry.state == "valid"
        assert prune(Catalog(tmp_path), Retention(keep_last=1)) == [1]
    else:
        assert entry.state == ("unfinished" if call == "rmdir" else "removed")
        prune(Catalog(tmp_path), Retention())
    assert states(tmp_path) == {2: "valid"}


def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are unlinked from here on, and the directories that are synced."""
    called: list[str] = []
    unlink, fsync = os.unlink, os.fsync

    def unlinked(path: str, **options: Any) -> None:
        called.append(os.path.basename(path))
        unlink(path, **options)

    def synced(descriptor: int) -> None:
        called.append("sync")
        fsync(descriptor)

    monkeypatch.setattr(os, "unlink", unlinked)
    monkeypatch.setattr(os, "fsync", synced)
    return called


@pytest.mark.parametrize("unfinished", [False, True])
def test_what_tells_of_a_removal_goes_after_the_data(
    unfinished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure may bring the data back without it: a checkpoint that has lost its
    metadata, which nobody removes, and which refuses to be saved again."""
    path = write(tmp_path, 1)
    if unfinished:
        (path / ".metadata").rename(path / ".saving")
    called = disk_calls(monkeypatch)
    assert remove(path)
    synced = len(called) - called[::-1].index("sync")
    assert (".saving" if unfinished else commit.REMOVED) in called[synced:]
    assert [name for name in called if name.endswith(".distcp")]
    assert not [name for name in called[synced:] if name.endswith(".distcp")]


def test_a_file_system_that_lists_what_was_there_when_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As btrfs does: the metadata's new name is not in the list."""
    path = write(tmp_path, 1)
    listed = os.listdir

    def earlier(where: Any = ".") -> list[str]:
        return [name for name in listed(where) if name != commit.REMOVED]

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", earlier)
        assert remove(path)
    assert not path.exists()


def test_the_mark_of_a_failed_save_goes_after_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step" / "__0_ab.distcp").parent.mkdir()
    (tmp_path / "step" / "__0_ab.distcp").touch()
    commit.make_mark(tmp_path / "step", sync=False)
    called = disk_calls(monkeypatch)
    commit.remove_failed(tmp_path / "step", {"__0_ab.distcp"}, sync=True)
    assert called == ["__0_ab.distcp", "sync", ".saving"]
    assert not (tmp_path / "step").exists()


def leave_remains(path: Path) -> None:
    """What is in a directory if the power fails after a commit, and before the sweep."""
    (data,) = (one.name for one in path.glob("*.distcp"))
    assert data.startswith("__0_")
    for name in (f"__0_{'0' * 32}.distcp", ".saving", f".metadata.{'0' * 32}.tmp", commit.REMOVED):
        (path / name).write_bytes(b"remains")


@pytest.mark.parametrize("where", ["run", "mirror"])
def test_a_sweep_that_was_interrupted_is_made_up_for(where: str, tmp_path: Path) -> None:
    """Of a step that is not saved again: its own next save would sweep."""
    for step in (1, 2):
        with pyckpt.Checkpointer(tmp_path / "run", mirror=tmp_path / "mirror") as checkpointer:
            assert checkpointer.restore({"x": torch.zeros(4)}) == (None if step == 1 else 1)
            checkpointer.save(step, {"x": torch.zeros(4)}).wait()
            assert checkpointer.wait_mirrored(60)
        if step == 1:
            leave_remains(tmp_path / where / "step-00000001")
    for step in (1, 2):
        found = sorted(os.listdir(tmp_path / where / f"step-{step:08d}"))
        assert found[0] == ".metadata", found
        assert len(found) == 2, found
    assert states(tmp_path / where) == {1: "valid", 2: "valid"}


class Failing:
    """A function of os that fails once, for a name that ends so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, ending: str) -> None:
        self._original = getattr(os, name)
        self._ending = ending
        self.failed = 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, path: Any, *rest: Any, **options: Any) -> Any:
        if not self.failed and str(path).endswith(self._ending):
            self.failed += 1
            raise OSError(5, "Input/output error", str(path))
        return self._original(path, *rest, **options)


def test_what_another_save_claimed_at_the_commit_goes_with_the_next_save(tmp_path: Path) -> None:
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(4)}).wait()
        (replaced,) = (tmp_path / "step-00000001").glob("*.distcp")
        claim = Claim(replaced)
        checkpointer.save(1, {"x": torch.ones(4)}).wait()
        assert replaced.exists()
        claim.release()
        checkpointer.save(2, {"x": torch.zeros(4)}).wait()
        assert not replaced.exists()


@pytest.mark.parametrize("call", ["unlink", "listdir"])
def test_what_a_commit_could_not_remove_goes_with_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "step-00000001"
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(4)}).wait()
        (replaced,) = path.glob("*.distcp")
        begun = commit.commit_metadata

        def fails_from_now_on(*arguments: Any, **options: Any) -> None:
            begun(*arguments, **options)
            failing.append(Failing(monkeypatch, call, replaced.name if call == "unlink" else ""))

        failing: list[Failing] = []
        with monkeypatch.context() as patch:
            patch.setattr(commit, "commit_metadata", fails_from_now_on)
            checkpointer.save(1, {"x": torch.ones(4)}).wait()
        assert failing[0].failed
        assert replaced.exists()
        checkpointer.save(2, {"x": torch.ones(4)}).wait()
        assert not replaced.exists()
    assert states(tmp_path) == {1: "valid", 2: "valid"}


def test_a_save_that_fails_after_its_commit_leaves_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-00000002"
    with pyckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(4)}).wait()
        sync = commit.sync_opened_directory

        def fails(descriptor: int, directory: Path) -> None:
            if (directory / ".metadata").exists() and not failures:
                failures.append(OSError(5, "Input/output error", str(directory)))
                raise failures[0]
            sync(descriptor, directory)

        failures: list[OSError] = []
        monkeypatch.setattr(commit, "sync_opened_directory", fails)
        with pytest.raises(OSError, match="Input/output error"):
            checkpointer.save(2, {"x": torch.ones(4)}).wait()
        assert {".metadata", ".saving"} <= set(os.listdir(path))
        with pytest.raises(OSError, match="Input/output error"):
            checkpointer.save(3, {"x": torch.ones(4)})  # tells of it, too
        checkpointer.save(3, {"x": torch.ones(4)}).wait()
        assert ".saving" not in os.listdir(path)
    assert states(tmp_path) == {1: "valid", 2: "valid", 3: "valid"}


def test_the_mark_stays_where_the_metadata_may_not_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1)
    commit.make_mark(path, sync=False)

    def fails(directory: Path) -> None:
        raise OSError(5, "Input/output error", str(directory))

    monkeypatch.setattr(commit, "sync_directory", fails)
    commit.remove_remains(path, sync=True)
    assert ".saving" in os.listdir(path)


def test_a_save_into_what_was_half_removed(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / ".metadata").rename(path / commit.REMOVED)
    assert states(tmp_path) == {1: "removed"}
    write(tmp_path, 1)
    assert states(tmp_path) == {1: "valid"}
    assert commit.REMOVED not in os.listdir(path)
    assert prune(Catalog(tmp_path), Retention(keep_last=1)) == []
    assert states(tmp_path) == {1: "valid"}


def test_a_removal_that_fails_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_all(tmp_path, 1, 2, 3)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert prune(Catalog(tmp_path), Retention(keep_last=1)) == []
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        str(tmp_path / "step-00000001"),
        str(tmp_path / "step-00000002"),
    ]
    assert states(tmp_path) == {1: "removed", 2: "removed", 3: "valid"}
    assert prune(Catalog(tmp_path), Retention(keep_last=1)) == []
    assert states(tmp_path) == {3: "valid"}


def test_files_that_people_put_there_go_too(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "notes").mkdir()
    (path / "notes" / "a.txt").touch()
    assert remove(path)
    assert not path.exists()


def test_a_link_is_left_alone(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere", 1)
    here = tmp_path / "here"
    write(here, 2)
    (here / "step-00000001").symlink_to(elsewhere)
    assert prune(Catalog(here), Retention(keep_last=1)) == []
    assert states(here) == {1: "valid", 2: "valid"}


@pytest.mark.parametrize("name", ["step-00000009", "best"])
def test_what_a_link_leads_to_stays_and_the_link_is_not_counted(tmp_path: Path, name: str) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / name).symlink_to("step-00000001")
    assert prune(Catalog(tmp_path), Retention(keep_last=2)) == [2]
    assert (tmp_path / name / ".metadata").exists()
    assert prune(Catalog(tmp_path), Retention(keep_last=2)) == []


def test_nothing_is_removed_through_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "sub").mkdir(parents=True)
    (elsewhere / "file").touch()
    path = write(tmp_path, 1)
    (path / "link").symlink_to(elsewhere)
    (path / "__9_x.distcp").symlink_to(elsewhere / "file")
    (path / "below").mkdir()
    (path / "below" / "link").symlink_to(elsewhere)
    assert remove(path)
    assert not path.exists()
    assert sorted(os.listdir(elsewhere)) == ["file", "sub"]


def test_a_directory_that_becomes_a_link_meanwhile(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    elsewhere = write(tmp_path / "elsewhere", 1)

    @contextmanager
    def swapped() -> Iterator[bool]:
        path.rename(tmp_path / "moved")
        path.symlink_to(elsewhere)
        yield True

    before = sorted(os.listdir(elsewhere))
    with pytest.raises(NotADirectoryError):
        remove(path, beginning=swapped)
    assert sorted(os.listdir(elsewhere)) == before
    assert os.listdir(tmp_path / "moved") == []


def test_remains_that_became_a_checkpoint_stay(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    assert not remove(path, remains=True)
    assert states(tmp_path) == {1: "valid"}


def test_what_comes_while_it_removes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 1)
    unlink, to_write = os.unlink, [1]

    def late(name: str, **options: Any) -> None:
        while to_write:
            write(tmp_path, to_write.pop())
        unlink(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", late)
        assert remove(path)
    assert states(tmp_path) == {1: "valid"}


def _no_locks(_pipe: Pipe, path: Path) -> bool:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    fcntl.flock = unsupported  # type: ignore[assignment]
    with reading(path):
        pass
    return remove(path)


def test_file_systems_without_locks(tmp_path: Path) -> None:
    assert run_child(_no_locks, write(tmp_path, 1))
