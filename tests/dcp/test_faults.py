"""Disks that are full, broken, read-only or slow to say so: errors arrive, nothing is torn, and
the next save leaves no trace of it."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _crash_child import pwrite_range, run_traced, traced
from _filesystems import MIB, free_bytes, remount
from _ranks import Pipe, run_child, run_ranks
from _sampling import sampled, slow
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import pyckpt
from pyckpt.errors import NotDurable
from pyckpt.format import commit

A, B, C = 1, 2, 3
HOW = ["save", "async_save"]


def on(*kinds: str) -> pytest.MarkDecorator:
    params = [pytest.param(kind, marks=pytest.mark.root) for kind in kinds]
    return pytest.mark.parametrize("filesystem", params, indirect=True)


def state(value: int) -> dict[str, Any]:
    """A MiB of tensors, a small one and an object; all tell which save they are of."""
    large = {f"large/{i}": torch.full((65536,), float(value)) for i in range(4)}
    return {**large, "small": torch.full((), value), "object": {"value": value}}


def loaded_value(directory: Path) -> int:
    """Of which save the checkpoint is that stock finds; all of it."""
    target = state(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    value = target["object"]["value"]
    for key, tensor in target.items():
        if key != "object":
            assert torch.equal(tensor, torch.full_like(tensor, value)), key
    return value


def save(
    how: str, content: dict[str, Any], writer: dcp.StorageWriter | None = None, **options: Any
) -> None:
    if how == "async_save":
        dcp.async_save(content, storage_writer=writer, **options).result()
    else:
        dcp.save(content, storage_writer=writer, **options)


def assert_clean(directory: Path, ranks: int = 1) -> None:
    """Nothing but one checkpoint of so many ranks is there."""
    names = sorted(name for name in os.listdir(directory) if name != "lost+found")
    assert names[0] == ".metadata"
    assert [re.sub("[0-9a-f]{32}", "ID", name) for name in names[1:]] == [
        f"__{rank}_ID.distcp" for rank in range(ranks)
    ]


class Failure(NamedTuple):
    """What reached the caller of a save, by rank."""

    errors: dict[int, BaseException]

    @property
    def error(self) -> OSError:
        (error,) = self.errors.values()
        assert isinstance(error, OSError)
        return error


def failing_save(
    how: str, content: dict[str, Any], writer: dcp.StorageWriter, **options: Any
) -> Failure:
    with pytest.raises(CheckpointException) as info:
        save(how, content, writer, **options)
    return Failure({rank: error for rank, (error, _) in info.value.failures.items()})


# Places that cannot be written to


@pytest.mark.parametrize("how", HOW)
def test_missing_parents_are_made(how: str, tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b" / "c"
    save(how, state(A), pyckpt.DirectWriter(directory))
    assert loaded_value(directory) == A
    assert_clean(directory)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
def test_path_is_or_lies_below_a_file(how: str, below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"precious")
    error = failing_save(how, state(A), pyckpt.DirectWriter(file / below)).error
    assert isinstance(error, NotADirectoryError)
    assert error.errno == errno.ENOTDIR
    assert error.filename == str(file)
    assert file.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("how", HOW)
def test_overwrite_false_keeps_what_is_there(how: str, tmp_path: Path) -> None:
    save(how, state(A), pyckpt.DirectWriter(tmp_path, overwrite=False))
    before = sorted(os.listdir(tmp_path))
    error = failing_save(how, state(B), pyckpt.DirectWriter(tmp_path, overwrite=False)).error
    assert isinstance(error, FileExistsError)
    assert error.filename == str(tmp_path / ".metadata")
    assert "overwrite=False" in str(error)
    assert sorted(os.listdir(tmp_path)) == before
    assert loaded_value(tmp_path) == A


@pytest.mark.parametrize("how", HOW)
def test_urls_of_no_store_are_refused(how: str) -> None:
    with pytest.raises(ValueError, match="no address of an object store"):
        pyckpt.DirectWriter("other://bucket/checkpoint")
    with pytest.raises(ValueError, match="no address of an object store"):
        save(how, state(A), pyckpt.DirectWriter(), checkpoint_id="other://bucket/checkpoint")


@pytest.mark.parametrize("how", HOW)
@on("tmpfs")
def test_read_only_file_system(how: str, filesystem: Path) -> None:
    directory = filesystem / "checkpoint"
    save(how, state(A), pyckpt.DirectWriter(directory))
    before = sorted(os.listdir(directory))
    remount(filesystem, read_only=True)
    try:
        over = failing_save(how, state(B), pyckpt.DirectWriter(directory)).error
        new = failing_save(how, state(B), pyckpt.DirectWriter(filesystem / "new" / "sub")).error
    finally:
        remount(filesystem, read_only=False)
    assert over.errno == new.errno == errno.EROFS
    assert re.fullmatch(rf"{directory}/__0_\w+\.distcp", over.filename)
    assert new.filename == str(filesystem / "new")
    assert sorted(os.listdir(directory)) == before
    assert loaded_value(directory) == A
    assert not (filesystem / "new").exists()
    save(how, state(C), pyckpt.DirectWriter(directory))
    assert loaded_value(directory) == C
    assert_clean(directory)


# Full disks


@pytest.mark.parametrize("how", [HOW[0], *map(slow, HOW[1:])])
def test_disk_full_at_preallocation(how: str, filesystem: Path) -> None:
    directory = filesystem / "checkpoint"
    too_much = {"w": torch.empty(free_bytes(filesystem) + 8 * MIB, dtype=torch.uint8)}
    first = failing_save("save", too_much, pyckpt.DirectWriter(directory)).error
    assert os.listdir(directory) == [".saving"]
    save(how, state(A), pyckpt.DirectWriter(directory))
    before = sorted(os.listdir(directory))
    error = failing_save(how, too_much, pyckpt.DirectWriter(directory)).error
    for e in (first, error):
        assert e.errno == errno.ENOSPC
        assert re.fullmatch(rf"{directory}/__0_\w+\.distcp", e.filename)
        assert re.search(r"fallocate failed: .*\(\d+ bytes at offset 0\)", str(e))
    assert sorted(os.listdir(directory)) == before
    assert loaded_value(directory) == A
    save(how, state(C), pyckpt.DirectWriter(directory))
    assert loaded_value(directory) == C
    assert_clean(directory)


@pytest.mark.parametrize("how", [slow(HOW[0]), HOW[1]])
@on("ext4", "tmpfs")
def test_disk_full_in_the_middle(how: str, filesystem: Path) -> None:
    directory = filesystem / "checkpoint"
    save(how, state(A), pyckpt.DirectWriter(directory))
    before = sorted(os.listdir(directory))
    free = free_bytes(filesystem)
    # What an object will take is not known beforehand, so nothing is reserved for it.
    content = {**state(B), "object": bytes(free)}
    # One thread, so that the disk fills from the beginning of the file.
    with pyckpt.Engine(io_threads=1) as engine:
        writer = pyckpt.DirectWriter(directory, engine=engine)
        error = failing_save(how, content, writer).error
        assert error.errno == errno.ENOSPC
        assert re.fullmatch(rf"{directory}/__0_\w+\.distcp", error.filename)
        found = re.search(r"pwrite failed: .*\(\d+ bytes at offset (\d+)\)", str(error))
        assert found is not None, error
        assert 0 < int(found[1]) <= free
        assert sorted(os.listdir(directory)) == before
        assert loaded_value(directory) == A
        # The disk has its room again while the writer and the error are still around.
        assert free_bytes(filesystem) > free - MIB
        save(how, state(C), writer)
    assert loaded_value(directory) == C
    assert_clean(directory)


def _beyond_the_size_limit(_pipe: Pipe, directory: Path) -> tuple[Failure, int]:
    save("save", state(A), pyckpt.DirectWriter(directory))
    limit = 300 << 10
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    failure = failing_save("save", {"object": bytes(MIB)}, pyckpt.DirectWriter(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert loaded_value(directory) == A
    save("save", state(C), pyckpt.DirectWriter(directory))
    return failure, limit


def test_a_short_write_is_continued_up_to_the_error(tmp_path: Path) -> None:
    failure, limit = run_child(_beyond_the_size_limit, tmp_path)
    # The kernel wrote what was below the limit, and refused the rest of the same write.
    assert failure.error.errno == errno.EFBIG
    assert f"at offset {limit})" in str(failure.error)
    assert loaded_value(tmp_path) == C
    assert_clean(tmp_path)


# Calls that fail, by strace


class Outcome(NamedTuple):
    failure: Failure | None  # of the save that was tampered with
    names: list[str]  # in the directory after it
    loaded: int | None  # what it is a checkpoint of, after it
    log: list[str]
    direct: bool | None
    fallback_reason: str | None


def _tampered(
    pipe: Pipe,
    directory: Path,
    how: str,
    first: bool,
    direct: Literal["auto", "require"],
    times: int,
    same_writer: bool,
) -> Outcome:
    """Save A, unless it is to be the first save; B, tampered with; and C."""
    log: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyckpt").addHandler(handler)
    failure = None
    # One thread and small slots: the calls come in one order, and the file takes several writes.
    # How many directories are above this one is not known, so they are not opened.
    with (
        pyckpt.Engine(io_threads=1, slot_bytes=256 << 10) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(commit, "_identity", _identity)
        # Even then, so that nothing is imported or started under the eyes of strace.
        save(how, state(A), pyckpt.DirectWriter(directory / "other" if first else directory))
        target = directory / "first" if first else directory
        writer = pyckpt.DirectWriter(target, engine=engine, direct=direct)
        with traced(pipe):
            for _ in range(times):
                try:
                    save(how, state(B), writer)
                except CheckpointException as error:
                    failure = Failure({r: e for r, (e, _) in error.failures.items()})
        names = sorted(os.listdir(target)) if target.exists() else []
        statistics = writer.statistics
        loaded = loaded_value(target) if ".metadata" in names else None
        retrying = writer if same_writer else pyckpt.DirectWriter(target, engine=engine)
        save(how, state(C), retrying)
    assert loaded_value(target) == C
    return Outcome(
        failure,
        names,
        loaded,
        log,
        statistics.direct if statistics else None,
        statistics.fallback_reason if statistics else None,
    )


def _identity(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, 0


def tampered(
    directory: Path,
    inject: str,
    *,
    how: str = "save",
    first: bool = False,
    direct: str = "auto",
    times: int = 1,
    same_writer: bool = False,
) -> Outcome:
    done = run_traced(_tampered, directory, how, first, direct, times, same_writer, inject=inject)
    assert done.injected, f"{inject} never came to pass"
    result: Outcome = done.result
    return result


class Fault(NamedTuple):
    inject: str
    number: int
    file: str  # that the error names, as a pattern below the directory
    says: str


DATA = r"/__0_\w+\.distcp"

# The directory is opened, and closed, twice to take a turn in it and to look for remains; and then
# for a turn in which the data file is made.
_TEMPORARY = r"/\.metadata\.[0-9a-f]{32}\.tmp"

FAULTS = {
    "open-turn": Fault("openat:error=EMFILE:when=3", errno.EMFILE, "", ""),
    "open-claim": Fault("openat:error=EMFILE:when=5", errno.EMFILE, DATA, ""),
    "open-commit": Fault("openat:error=EMFILE:when=7", errno.EMFILE, "", ""),
    "open-data": Fault("openat:error=EMFILE:when=4", errno.EMFILE, DATA, "open failed"),
    "fcntl": Fault("fcntl:error=EIO:when=2", errno.EIO, DATA, "fcntl failed"),
    "fallocate": Fault(
        "fallocate:error=ENOSPC:when=1", errno.ENOSPC, DATA, r"fallocate failed: .* at offset 0\)"
    ),
    "first-write": Fault(
        "pwrite64:error=EIO:when=1", errno.EIO, DATA, r"pwrite failed: .*262144 bytes at offset 0\)"
    ),
    "third-write": Fault(
        "pwrite64:error=EIO:when=3",
        errno.EIO,
        DATA,
        r"pwrite failed: .*262144 bytes at offset 524288\)",
    ),
    "write-of-nothing": Fault(
        "pwrite64:retval=0:when=2", errno.EIO, DATA, "at offset 262144, wrote none"
    ),
    "truncate": Fault(
        "ftruncate:error=EIO:when=1", errno.EIO, DATA, r"ftruncate failed: .*to \d+ bytes"
    ),
    "sync-data": Fault("fsync:error=EIO:when=1", errno.EIO, DATA, "fsync failed"),
    "close-data": Fault("close:error=ENOSPC:when=4", errno.ENOSPC, DATA, "close failed"),
    "open-directory": Fault("openat:error=EMFILE:when=6", errno.EMFILE, "", "open failed"),
    "sync-directory": Fault("fsync:error=EIO:when=2", errno.EIO, "", "fsync failed"),
    "open-what-to-sync": Fault("openat:error=EMFILE:when=8", errno.EMFILE, "", ""),
    "open-metadata": Fault("openat:error=ENOSPC:when=9", errno.ENOSPC, _TEMPORARY, ""),
    "write-metadata": Fault("write:error=ENOSPC:when=1", errno.ENOSPC, _TEMPORARY, ""),
    "sync-metadata": Fault("fsync:error=EIO:when=3", errno.EIO, _TEMPORARY, ""),
    "close-metadata": Fault("close:error=EDQUOT:when=6", errno.EDQUOT, _TEMPORARY, ""),
    "rename": Fault("rename:error=EIO:when=1", errno.EIO, _TEMPORARY, ""),
}


# Of these calls, what a first save makes besides: it syncs the directory above its own, makes its
# mark, and syncs its directory.
MORE = {"openat": 3, "fsync": 2, "close": 3}


def in_order(inject: str, *, first: bool) -> str:
    match = re.fullmatch(r"(openat|fsync|close):(.*):when=(\d)", inject)
    if not match or not first:
        return inject
    return f"{match[1]}:{match[2]}:when={int(match[3]) + MORE[match[1]]}"


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("how", [HOW[0], *map(slow, HOW[1:])])
@pytest.mark.parametrize("first", [False, slow(True)], ids=["over-another", "first-save"])
@pytest.mark.parametrize("fault", sampled(((fault,) for fault in FAULTS), 2))
def test_a_call_fails(fault: str, first: bool, how: str, tmp_path: Path) -> None:
    inject, number, file, says = FAULTS[fault]
    outcome = tampered(tmp_path, in_order(inject, first=first), how=how, first=first)
    directory = tmp_path / "first" if first else tmp_path
    assert outcome.failure is not None
    error = outcome.failure.error
    assert error.errno == number
    assert re.search(says, str(error)), error
    # All or nothing: what was there is there, and what was not is not.
    assert outcome.loaded == (None if first else A)
    assert ".metadata" in outcome.names or first
    assert error.filename is not None
    assert re.fullmatch(re.escape(str(directory)) + file, error.filename), error.filename
    # The next save, of the same process, left no trace of the failed one.
    assert_clean(directory)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("fault", ["third-write", "sync-data", "rename"])
def test_a_writer_may_be_used_again_after_a_failure(fault: str, tmp_path: Path) -> None:
    outcome = tampered(tmp_path, FAULTS[fault].inject, same_writer=True)
    assert outcome.failure is not None
    assert outcome.loaded == A
    assert_clean(tmp_path)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("how", HOW)
def test_syncing_the_commit_fails(how: str, tmp_path: Path) -> None:
    # The new checkpoint is in place, and it is not known whether it will survive a power failure:
    # the caller hears so.
    outcome = tampered(tmp_path, "fsync:error=EIO:when=4", how=how)
    assert outcome.failure is not None
    assert outcome.failure.error.errno == errno.EIO
    assert isinstance(outcome.failure.error, NotDurable)
    assert outcome.loaded == B
    assert_clean(tmp_path)
    assert outcome.failure.error.filename == str(tmp_path)


FIRST_FAULTS = {
    "open-first-turn": Fault("openat:error=EMFILE:when=2", errno.EMFILE, "", ""),
    "sync-above": Fault("fsync:error=EIO:when=1", errno.EIO, "/..", ""),
    "make-mark": Fault("openat:error=ENOSPC:when=4", errno.ENOSPC, r"/\.saving", ""),
    "sync-mark": Fault("fsync:error=EIO:when=2", errno.EIO, "", ""),
}


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("fault", FIRST_FAULTS)
def test_a_call_before_the_first_save_fails(fault: str, tmp_path: Path) -> None:
    inject, number, file, _ = FIRST_FAULTS[fault]
    outcome = tampered(tmp_path, inject, first=True)
    assert outcome.failure is not None
    error = outcome.failure.error
    assert error.errno == number
    wanted = tmp_path if file == "/.." else tmp_path / "first"
    assert re.fullmatch(re.escape(str(wanted)) + file.removeprefix("/.."), error.filename)
    assert not [name for name in outcome.names if name.endswith(".distcp")]
    assert_clean(tmp_path / "first")


@pytest.mark.usefixtures("strace")
def test_directory_cannot_be_made(tmp_path: Path) -> None:
    outcome = tampered(tmp_path, "mkdir:error=EACCES:when=1", first=True)
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, PermissionError)
    assert outcome.failure.error.filename == str(tmp_path / "first")
    assert outcome.loaded is None
    assert_clean(tmp_path / "first")


# Calls whose failure a save survives


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(
    "inject",
    [
        "fallocate:error=EOPNOTSUPP:when=1",
        "fallocate:error=ENOSYS:when=1",
        "fallocate:error=EINTR:when=1",
        "pwrite64:error=EINTR:when=1..2",
        "pwrite64:retval=1:when=2",  # less than a block, so the whole is written again
        "ftruncate:error=EINTR:when=1",
        "fsync:error=EINVAL:when=2",  # what some network file systems say of directories
        "fsync:error=EINVAL:when=4",
        "close:error=EINTR:when=1",
    ],
)
@on("ext4")
def test_harmless_failures(inject: str, filesystem: Path) -> None:
    directory = filesystem / "checkpoint"
    outcome = tampered(directory, inject)
    assert outcome.failure is None
    assert outcome.loaded == B
    assert outcome.direct
    assert outcome.fallback_reason == ""
    assert outcome.log == []
    assert len(outcome.names) == 2
    assert_clean(directory)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("direct", "advance"), [("auto", 4096), ("off", 4100)])
@on("ext4")
def test_short_writes_are_continued(direct: str, advance: int, filesystem: Path) -> None:
    # strace claims that 4100 bytes were written, though none were: so look at the calls. A direct
    # write goes on at a block, a buffered one where the last ended.
    done = run_traced(
        _tampered_short, filesystem / "checkpoint", direct, inject="pwrite64:retval=4100:when=2"
    )
    writes = [pwrite_range(call) for call in done.calls if call.name == "pwrite64"]
    size, offset = writes[1]
    assert (size, offset) == (256 << 10, 256 << 10)
    assert writes[2] == (size - advance, offset + advance)
    assert writes[3][1] == offset + size


def _tampered_short(pipe: Pipe, directory: Path, direct: Any) -> None:
    with pyckpt.Engine(io_threads=1, slot_bytes=256 << 10) as engine:
        save("save", state(A), pyckpt.DirectWriter(directory, engine=engine, direct=direct))
        with traced(pipe):
            save("save", state(B), pyckpt.DirectWriter(directory, engine=engine, direct=direct))


@pytest.mark.usefixtures("strace")
def test_unlink_of_the_old_file_fails(tmp_path: Path) -> None:
    outcome = tampered(tmp_path, "unlink:error=EACCES:when=1")
    assert outcome.failure is None
    assert outcome.loaded == B
    (line,) = outcome.log
    assert "was not removed" in line
    assert len(outcome.names) == 3  # the old file is a nuisance until the next save
    assert_clean(tmp_path)


# The first refusal, and how many calls later that of the next save comes.
REFUSALS = {
    "fcntl": ("fcntl:error=EINVAL:when=2", 4),
    "pwrite-EINVAL": ("pwrite64:error=EINVAL:when=1", 6),
    "pwrite-EOPNOTSUPP": ("pwrite64:error=EOPNOTSUPP:when=1", 6),
}


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("refusal", REFUSALS)
@on("ext4")
def test_direct_io_refused(refusal: str, filesystem: Path) -> None:
    inject, step = REFUSALS[refusal]
    directory = filesystem / "checkpoint"
    outcome = tampered(directory, f"{inject}+{step}", times=2)
    assert outcome.failure is None
    assert outcome.loaded == B
    assert outcome.direct is False
    assert outcome.fallback_reason is not None
    assert refusal.split("-")[0] in outcome.fallback_reason
    (line,) = outcome.log  # for both saves
    assert str(directory) in line
    assert outcome.fallback_reason in line
    assert_clean(directory)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("refusal", REFUSALS)
@on("ext4")
def test_direct_io_required_and_refused(refusal: str, filesystem: Path) -> None:
    inject, _ = REFUSALS[refusal]
    call = refusal.split("-")[0]
    directory = filesystem / "checkpoint"
    outcome = tampered(directory, inject, direct="require")
    assert outcome.failure is not None
    error = outcome.failure.error
    assert error.errno == (errno.EOPNOTSUPP if "EOPNOTSUPP" in inject else errno.EINVAL)
    assert re.fullmatch(re.escape(str(directory)) + DATA, error.filename)
    assert f"{call} failed" in str(error)
    assert outcome.loaded == A
    assert outcome.log == []
    assert_clean(directory)


# Every file system


@pytest.mark.parametrize("how", [slow(HOW[0]), HOW[1]])
def test_every_file_system(how: str, filesystem: Path) -> None:
    writer = pyckpt.DirectWriter(filesystem)
    save(how, state(A), writer)
    statistics = writer.statistics
    assert statistics is not None
    # Linux has direct I/O on tmpfs since 6.6 only.
    assert statistics.direct or filesystem.name == "tmpfs"
    assert statistics.direct == (statistics.fallback_reason == "")
    assert loaded_value(filesystem) == A
    (data,) = filesystem.glob("*.distcp")
    assert data.stat().st_size == statistics.bytes == statistics.bytes_written
    # The preallocation was given back: at most a block beyond the end is kept.
    assert data.stat().st_blocks * 512 < statistics.bytes + 8192
    save(how, state(B), pyckpt.DirectWriter(filesystem, direct="off"))
    assert loaded_value(filesystem) == B
    assert_clean(filesystem)


# Stock, for comparison


class _WaitForWorker(dcp.DefaultSavePlanner):
    """Holds the main thread until the writer's other threads are through, so that these get one of
    the two files."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if threading.current_thread() is threading.main_thread():
            for thread in threading.enumerate():
                if "_write_files_from_queue" in thread.name:
                    thread.join(60)
        return super().resolve_data(write_item)


def _stock_worker_fails(pipe: Pipe, directory: Path) -> tuple[list[str], list[str], str]:
    died: list[str] = []
    threading.excepthook = lambda args: died.append(str(args.exc_value))
    tensors = {f"w{i}": torch.full((65536,), float(i)) for i in range(4)}
    writer = dcp.FileSystemWriter(directory, thread_count=2)
    with traced(pipe):
        # strace counts the calls of each thread: the main thread has its first one here.
        with (directory / "scratch").open("wb") as file, pytest.raises(OSError, match="output"):
            os.fsync(file.fileno())
        dcp.save(tensors, storage_writer=writer, planner=_WaitForWorker())
    target = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    with pytest.raises(CheckpointException) as info:
        dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    ((error, _),) = info.value.failures.values()
    return died, os.listdir(directory), repr(error)


def _our_sync_fails(pipe: Pipe, directory: Path) -> tuple[Failure, list[str]]:
    tensors = {f"w{i}": torch.full((65536,), float(i)) for i in range(4)}
    directory.mkdir()
    with traced(pipe), pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "_sync_name", lambda path: None)  # it is not meant here
        failure = failing_save("save", tensors, pyckpt.DirectWriter(directory))
    return failure, os.listdir(directory)


@pytest.mark.usefixtures("strace")
def test_stock_commits_what_it_did_not_write_and_ours_does_not(tmp_path: Path) -> None:
    """Should the first half fail, then stock has been mended: drop it."""
    fault = "fsync:error=EIO:when=1"
    died, names, load_error = run_traced(_stock_worker_fails, tmp_path, inject=fault).result
    assert died == ["[Errno 5] Input/output error"]
    assert ".metadata" in names  # the save returned as if all was well
    assert "KeyError" in load_error

    # The first sync of ours is that of the mark.
    fault = "fsync:error=EIO:when=2"
    failure, names = run_traced(_our_sync_fails, tmp_path / "ours", inject=fault).result
    assert failure.error.errno == errno.EIO
    assert names == [".saving"]


# One rank of four


class _FailingPlanner(dcp.DefaultSavePlanner):
    """Cannot provide the data of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._failing = rank == dist.get_rank()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if self._failing:
            raise OSError(errno.EIO, "the memory is broken", "somewhere")
        return super().resolve_data(write_item)


def _sharded(value: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.full((64, 2048), float(value))
    return {"w": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}


def _sharded_value(directory: Path) -> float:
    target = _sharded(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(directory))
    values = target["w"].full_tensor().unique()
    return values.item()


def _one_rank_fails(
    how: str, directory: Path, failing: int, previous: bool
) -> tuple[Failure, list[str], float | None]:
    if previous:
        save(how, _sharded(A), pyckpt.DirectWriter(directory))
    failure = failing_save(
        how,
        _sharded(B),
        pyckpt.DirectWriter(directory),
        planner=_FailingPlanner(failing),
    )
    dist.barrier()
    names = os.listdir(directory)
    loaded = _sharded_value(directory) if previous else None
    dist.barrier()
    save(how, _sharded(C), pyckpt.DirectWriter(directory))
    assert _sharded_value(directory) == C
    return failure, names, loaded


@pytest.mark.parametrize("how", [slow(HOW[0]), HOW[1]])
@pytest.mark.parametrize("failing", [slow(0), 2])
@pytest.mark.parametrize("previous", [True, slow(False)], ids=["over-another", "first-save"])
def test_one_rank_of_four_fails(how: str, failing: int, previous: bool, tmp_path: Path) -> None:
    results = run_ranks(4, _one_rank_fails, how, tmp_path, failing, previous)
    for failure, names, loaded in results:
        assert list(failure.errors) == [failing]
        assert failure.error.filename == "somewhere"
        assert (".metadata" in names) == previous
        assert loaded == (A if previous else None)
    assert_clean(tmp_path, ranks=4)


def _one_disk_refuses(directory: Path) -> tuple[Failure, float]:
    save("save", _sharded(A), pyckpt.DirectWriter(directory))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    failure = failing_save("save", _sharded(B), pyckpt.DirectWriter(directory))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    loaded = _sharded_value(directory)
    dist.barrier()
    save("save", _sharded(C), pyckpt.DirectWriter(directory))
    return failure, loaded


def test_the_kernel_refuses_one_rank_of_four(tmp_path: Path) -> None:
    for failure, loaded in run_ranks(4, _one_disk_refuses, tmp_path):
        assert list(failure.errors) == [3]
        assert failure.error.errno == errno.EFBIG
        assert re.fullmatch(rf"{tmp_path}/__3_\w+\.distcp", failure.error.filename)
        assert loaded == A
    assert_clean(tmp_path, ranks=4)
