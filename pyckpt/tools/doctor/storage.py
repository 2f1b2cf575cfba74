"""The file system of a directory: its kind, its room, and what it really does."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pyckpt import _C
from pyckpt.tools.doctor.finding import Finding

__all__ = ["Mount", "look", "mount_of"]

GIB = 1 << 30
NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "gpfs", "lustre", "nfs", "nfs4", "pvfs2"} | {
    *("smb3", "smbfs", "virtiofs", "wekafs")
}
IN_MEMORY = {"devtmpfs", "ramfs", "tmpfs"}


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``."""

    point: str
    kind: str
    source: str
    options: frozenset[str]


def look(directory: Path) -> Iterator[Finding]:
    """All findings of this module, of a directory that exists."""
    mount = mount_of(directory, Path("/proc/self/mountinfo").read_text())
    yield from about_mount(mount)
    yield room(directory)
    yield from try_out(directory)


def mount_of(directory: Path, mountinfo: str) -> Mount | None:
    """The mount that a directory is on, of those that the kernel lists; None if none is."""
    found = None
    real = directory.resolve()
    for line in mountinfo.splitlines():
        fields, separator, rest = line.partition(" - ")
        if not separator:
            continue
        words, (kind, source, *more) = fields.split(), rest.split(" ")
        point = Path(_unescape(words[4]))
        # Later mounts cover earlier ones of the same point.
        if (real == point or point in real.parents) and (
            found is None or len(point.parts) >= len(Path(found.point).parts)
        ):
            options = frozenset((words[5] + "," + ",".join(more)).split(","))
            found = Mount(str(point), kind, _unescape(source), options)
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def about_mount(mount: Mount | None) -> Iterator[Finding]:
    """What is known of a file system by its kind and options."""
    if mount is None:
        yield Finding("file system", "note", "not among the mounts that the kernel lists")
        return
    name = f"{mount.kind} ({mount.source} at {mount.point})"
    if mount.kind in IN_MEMORY:
        yield Finding(
            "file system",
            "warning",
            f"{name} is in memory: checkpoints are lost with the machine, and take its memory",
            "save to a disk",
        )
    elif mount.kind == "overlay":
        yield Finding(
            "file system",
            "warning",
            f"{name} is a container's own layer: checkpoints are lost with the container",
            "save to a volume that is mounted into it",
        )
    elif mount.kind in NETWORK:
        yield Finding(
            "file system",
            "warning",
            f"{name} is on a network: it may lack locks between machines, and cache directories",
            "let one job at a time save to a directory; see docs/checkpointer.md on file systems "
            "without flock",
        )
    elif mount.kind.startswith("fuse"):
        yield Finding(
            "file system",
            "warning",
            f"{name} is served by a program, which decides what is durable and how fast",
            "ask its documentation whether fsync and rename mean what they say",
        )
    else:
        yield Finding("file system", "good", name)
    slow = sorted(mount.options & {"sync", "dirsync"})
    if slow:
        yield Finding(
            "mount options",
            "warning",
            f"{', '.join(slow)}: each write waits for the disk; pyckpt syncs once, at the end",
            f"mount -o remount,async {mount.point}",
        )
    if "ro" in mount.options:
        yield Finding(
            "mount options",
            "bad",
            f"{mount.point} is mounted read-only",
            "mount it for writing, or choose another directory",
        )
    if mount.kind in ("nfs", "nfs4") and mount.options & {
        *("nolock", "local_lock=all", "local_lock=flock")
    }:
        yield Finding(
            "mount options",
            "warning",
            "locks are not shared with other machines",
            "mount it without nolock and local_lock, or keep to one job for each directory",
        )


def room(directory: Path) -> Finding:
    """Free space and files."""
    stat = os.statvfs(directory)
    free, size = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    found = f"{free / GIB:.1f} of {size / GIB:.1f} GiB free"
    if free == 0 or (stat.f_files and stat.f_favail == 0):
        what = "no space" if free == 0 else "no room for another file"
        return Finding("free space", "bad", f"{what}: {found}", "remove something")
    if free < max(GIB, size // 50):
        return Finding(
            "free space",
            "warning",
            found,
            "a save needs the space of two checkpoints, the old and the new; see pyckpt prune",
        )
    return Finding("free space", "good", found)


def try_out(directory: Path) -> Iterator[Finding]:
    """What a save does to the disk, on a file of a few pages."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".pyckpt-doctor-", dir=directory)
    except OSError as error:
        yield Finding(
            "writing",
            "bad",
            f"no file can be made: {_text(error)}",
            "look at the permissions of the directory, and at quotas",
        )
        return
    try:
        yield direct_io(descriptor)
        yield from _commit(descriptor, Path(name), directory)
    finally:
        os.close(descriptor)
        for left in (name, f"{name}.renamed"):
            with suppress(FileNotFoundError):
                os.unlink(left)


def direct_io(descriptor: int) -> Finding:
    """Tries writes and reads that bypass the page cache, of ever larger blocks."""
    advice = (
        "saves and loads go through the page cache, which costs memory and time; a local ext4 or "
        "xfs has direct I/O"
    )
    said = _said_alignment(descriptor)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError as error:
        return Finding("direct I/O", "warning", f"O_DIRECT is refused: {_text(error)}", advice)
    try:
        refusal: OSError | None = None
        for block in (512, 1024, 2048, _C.page_bytes):
            try:
                _write_and_read(descriptor, block)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    return Finding("direct I/O", "bad", f"{block} bytes: {_text(error)}", advice)
                refusal = error
            else:
                known = (
                    f"; the kernel says {said[1]} of the file, {said[0]} of memory" if said else ""
                )
                return Finding("direct I/O", "good", f"blocks of {block} bytes{known}")
        assert refusal is not None
        return Finding(
            "direct I/O",
            "warning",
            f"O_DIRECT is taken, and {_C.page_bytes} bytes are refused: {_text(refusal)}",
            advice,
        )
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)


def _write_and_read(descriptor: int, block: int) -> None:
    page = _C.page_bytes
    # Released in this order, also after an error: memory that is looked at cannot be unmapped.
    with (
        mmap.mmap(-1, 2 * page) as memory,  # begins on a page
        memoryview(memory) as view,
        view[:block] as out,
        view[page : page + block] as back,
    ):
        out[:] = os.urandom(block)
        # At an odd block of the file, so that its size is what counts.
        wrote = os.pwrite(descriptor, out, block)
        got = os.preadv(descriptor, [back], block)
        same = out == back
    if (wrote, got, same) != (block, block, True):
        raise OSError(errno.EIO, "direct I/O gave back other bytes than were written")


def _said_alignment(descriptor: int) -> tuple[int, int] | None:
    """What direct I/O asks of memory and of offsets, in bytes, if the kernel says (csrc/file.cpp
    reads the same fields)."""
    mask_dioalign, at_empty_path = 0x2000, 0x1000
    buffer = (ctypes.c_uint32 * 64)()
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return None
    if statx(descriptor, b"", at_empty_path, mask_dioalign, buffer) != 0:
        return None
    if not buffer[0] & mask_dioalign:
        return None
    memory, offset = buffer[0x98 // 4], buffer[0x9C // 4]
    return (memory, offset) if memory and offset else None


def _commit(descriptor: int, path: Path, directory: Path) -> Iterator[Finding]:
    """What makes a checkpoint durable and whole: fsync, rename, and locks."""
    try:
        os.fsync(descriptor)
        os.rename(path, f"{path}.renamed")
    except OSError as error:
        yield Finding(
            "committing",
            "bad",
            f"fsync or rename fails: {_text(error)}",
            "no save can be made durable here; choose another file system",
        )
        return
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
        yield Finding("committing", "good", "fsync and rename work, and fsync of the directory")
    except OSError as error:
        if error.errno == errno.EINVAL:
            yield Finding(
                "committing",
                "note",
                "fsync and rename work; a directory cannot be synced, as on some network file "
                "systems, whose servers decide when a rename is durable",
            )
        else:
            yield Finding(
                "committing",
                "bad",
                f"fsync of the directory fails: {_text(error)}",
                "no save can be made durable here; choose another file system",
            )
    finally:
        os.close(opened)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Finding("locks", "good", "flock works")
    except OSError as error:
        yield Finding(
            "locks",
            "warning",
            f"flock fails: {_text(error)}; two jobs that save here could disturb each other",
            "let one job at a time save to a directory",
        )


def _text(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "?")
    return f"{error.strerror} ({name})"
