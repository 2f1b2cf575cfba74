"""The harness itself: calls fail as a plan says, and only what has happened counts."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from _ranks import Pipe, run_child

from torture import kernel
from torture.supervisor import Fault, Group, Key, Link, Planned, Seen, parse

pytestmark = pytest.mark.skipif(not kernel.supported(), reason="needs Linux on x86-64")

_GET_VERSION = 0x80087601  # FS_IOC_GETVERSION
CONTENT = b"0123456789abcdef"


def write_and_read(root: Path) -> Any:
    """What a rank does: each call once, and what came of it."""
    path = root / "file"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        written = os.write(descriptor, CONTENT)
        got = os.pread(descriptor, 100, 0)
        os.fsync(descriptor)
        os.close(descriptor)
    except OSError as error:
        return "error", error.errno
    return "ok", (written, got)


def run(pipe: Pipe, root: Path, plan: list[Planned], size: int = 1) -> tuple[list[Seen], list[str]]:
    """What the ranks said, and which faults happened."""

    def body(link: Link, rank: int) -> None:
        place = root / str(rank)
        place.mkdir()
        link.arm()
        link.say("said", write_and_read(place))

    group = Group(size, body, root=str(root), plan=plan, record=True)
    seen = group.phase(0, time.monotonic() + 60)
    group.close()
    return seen, [planned.hit for planned in plan]


def run_in_an_earlier_thread(pipe: Pipe, root: Path) -> list[Seen]:
    def body(link: Link, rank: int) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(bool).result()
            link.arm()
            link.say("said", thread.submit(write_and_read, root).result())

    plan = [parse("0:fsync:file:1=error=EIO")]
    group = Group(1, body, root=str(root), plan=plan)
    seen = group.phase(0, time.monotonic() + 60)
    group.close()
    return seen


def outcome(tmp_path: Path, text: str, size: int = 1) -> tuple[list[Seen], list[str]]:
    found: tuple[list[Seen], list[str]] = run_child(
        run, tmp_path, [parse(one) for one in text.split(";")], size
    )
    return found


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("0:openat:0/file:1=error=EMFILE", ("error", errno.EMFILE)),
        ("0:write:0/file:1=error=ENOSPC", ("error", errno.ENOSPC)),
        ("0:fsync:0/file:1=error=EIO", ("error", errno.EIO)),
        ("0:close:0/file:1=error=EDQUOT", ("error", errno.EDQUOT)),
        ("0:write:0/file:1=short=0.5", ("ok", (8, CONTENT[:8]))),
        # Of the 100 bytes that it asks for there are 16.
        ("0:pread64:0/file:1=short=0.25", ("ok", (16, CONTENT[:4]))),
        ("0:write:0/file:1=error=EINTR", ("ok", (16, CONTENT))),  # Python repeats it
        ("0:fsync:0/file:1=delay=0.01", ("ok", (16, CONTENT))),
    ],
)
def test_a_fault_happens(fault: str, said: Any, tmp_path: Path) -> None:
    (seen,), (hit,) = outcome(tmp_path, fault)
    assert seen == Seen("said", said)
    assert fault.startswith(hit)


def test_a_kill_comes_before_its_call(tmp_path: Path) -> None:
    (seen,), (hit,) = outcome(tmp_path, "0:write:0/file:1=kill")
    assert seen.kind == "killed"
    assert hit == "0:write:0/file:1"
    assert (tmp_path / "0" / "file").read_bytes() == b""


def test_a_second_fault_on_another_rank(tmp_path: Path) -> None:
    seen, hits = outcome(tmp_path, "0:openat:0/file:1=delay=0.2;+1:1=kill", size=2)
    # Rank 1 may have come to its end before the first fault; what did not happen is not said to.
    assert seen[0] == Seen("said", ("ok", (16, CONTENT)))
    assert (seen[1].kind == "killed") == bool(hits[1])


def test_what_does_not_happen_does_not_count(tmp_path: Path) -> None:
    (seen,), hits = outcome(tmp_path, "0:write:0/file:2=kill;0:fsync:elsewhere:1=error=EIO")
    assert seen == Seen("said", ("ok", (16, CONTENT)))
    assert hits == ["", ""]


def transfer(pipe: Pipe, root: Path, how: str, fault: str) -> tuple[Any, str]:
    """What a call was told, and the call to which the fault happened."""

    def body(link: Link, rank: int) -> None:
        source = os.open(root / "source", os.O_RDWR | os.O_CREAT)
        os.write(source, CONTENT)
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if how == "direct" else 0)
        target = os.open(root / "target", flags)
        blocks = mmap.mmap(-1, 3 * 4096)
        link.arm()
        try:
            if how == "sendfile":
                count = os.sendfile(target, source, 1, 100)
                link.say("said", (count, os.pread(target, 100, 0)))
            elif how == "ioctl":
                link.say("said", fcntl.ioctl(target, _GET_VERSION, bytes(8)))
            else:
                link.say("said", os.pwrite(target, blocks, 0))
        except OSError as error:
            link.say("said", error.errno)

    plan = parse(fault)
    group = Group(1, body, root=str(root), plan=[plan])
    (seen,) = group.phase(0, time.monotonic() + 60)
    group.close()
    return seen.value, plan.hit


@pytest.mark.parametrize(
    ("how", "fault", "said"),
    [
        ("direct", "0:pwrite64:target:1=short=0", 4096),
        ("direct", "0:pwrite64:target:1=short=0.5", 4096),
        ("through the page cache", "0:pwrite64:target:1=short=0", 1),
        ("through the page cache", "0:pwrite64:target:1=short=0.5", 6144),
        ("sendfile", "0:sendfile:target:1=short=0.5", (7, CONTENT[1:8])),
        ("ioctl", "0:ioctl:target:1=error=EIO", errno.EIO),
    ],
)
def test_a_part_is_transferred(how: str, fault: str, said: Any, tmp_path: Path) -> None:
    found, hit = run_child(transfer, tmp_path, how, fault)
    assert found == said
    assert fault.startswith(hit)
    assert hit


def hang(pipe: Pipe, root: Path) -> list[Seen]:
    def body(link: Link, rank: int) -> None:
        link.arm()
        os.read(os.pipe()[0], 1)

    group = Group(1, body, root=str(root))
    seen = group.phase(0, time.monotonic() + 0.2)
    group.close()
    return seen


def test_a_hang_ends(tmp_path: Path) -> None:
    assert run_child(hang, tmp_path) == [Seen("hung")]


def share_a_processor(pipe: Pipe, root: Path) -> tuple[list[Seen], bool]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    begun = time.monotonic()

    def body(link: Link, rank: int) -> None:
        link.arm()
        while time.process_time() < 0.5:
            pass
        link.say("said", "done")

    group = Group(4, body, root=str(root))
    seen = group.phase(0, begun + 0.5)
    group.close()
    return seen, time.monotonic() - begun > 1.0


def test_who_waits_for_a_processor_does_not_hang(tmp_path: Path) -> None:
    seen, late = run_child(share_a_processor, tmp_path)
    assert seen == [Seen("said", "done")] * 4
    assert late  # four times half a second on one processor: beyond what it was given


@pytest.mark.parametrize(
    "planned",
    [
        Planned(Fault("kill"), Key(1, "rename", "a/.metadata.ID.tmp", 2)),
        Planned(Fault("stays", errno.ENOSPC), Key(0, "openat", "", 1)),
        Planned(Fault("short", 0.5), after=(3, 7)),
        Planned(Fault("delay", 0.25), Key(0, "mmap", "(memory)", 1)),
    ],
)
def test_a_plan_can_be_read_again(planned: Planned) -> None:
    assert parse(str(planned)) == planned


def test_calls_of_threads_that_were_there_before_are_seen(tmp_path: Path) -> None:
    seen = run_child(run_in_an_earlier_thread, tmp_path)
    assert seen == [Seen("said", ("error", errno.EIO))]
