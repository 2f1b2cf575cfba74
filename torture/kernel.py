"""System calls of a child, seen and answered by its parent: seccomp user notification, by ctypes.

A child calls `listener`, and sends the descriptor to its parent. From then on, each of the chosen
calls of all threads of the child waits until the parent has answered it: with an error, with a
count, or by letting it through. The kernel documents this in seccomp_unotify(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# x86-64, as in asm/unistd_64.h. How each says which file it is about: "fd", the first argument is a
# descriptor; "path", a path; "at", a descriptor of a directory and a path; "none", no file.
CALLS: dict[str, tuple[int, str]] = {
    "read": (0, "fd"),
    "write": (1, "fd"),
    "open": (2, "path"),
    "close": (3, "fd"),
    "stat": (4, "path"),
    "fstat": (5, "fd"),
    "lstat": (6, "path"),
    "mmap": (9, "map"),
    "ioctl": (16, "fd"),
    "pread64": (17, "fd"),
    "pwrite64": (18, "fd"),
    "readv": (19, "fd"),
    "writev": (20, "fd"),
    "sendfile": (40, "fd"),
    "clone": (56, "none"),
    "fcntl": (72, "fd"),
    "flock": (73, "fd"),
    "fsync": (74, "fd"),
    "fdatasync": (75, "fd"),
    "ftruncate": (77, "fd"),
    "rename": (82, "path"),
    "mkdir": (83, "path"),
    "rmdir": (84, "path"),
    "link": (86, "path"),
    "unlink": (87, "path"),
    "readlink": (89, "path"),
    "getdents64": (217, "fd"),
    "openat": (257, "at"),
    "mkdirat": (258, "at"),
    "newfstatat": (262, "at"),
    "unlinkat": (263, "at"),
    "renameat": (264, "at"),
    "linkat": (265, "at"),
    "fallocate": (285, "fd"),
    "preadv": (295, "fd"),
    "pwritev": (296, "fd"),
    "renameat2": (316, "at"),
    "copy_file_range": (326, "fd"),
    "statx": (332, "at"),
    "clone3": (435, "none"),
}

_NAMES = {number: name for name, (number, _) in CALLS.items()}
_AUDIT_ARCH_X86_64 = 0xC000003E
_SECCOMP, _PIDFD_GETFD = 317, 438
_SET_MODE_FILTER = 1
_ALL_THREADS = 1 << 0 | 1 << 4  # TSYNC, and an error if that cannot be
_NEW_LISTENER, _WAIT_KILLABLE = 1 << 3, 1 << 5
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _ADD_FD, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40182103, 0x40082104
_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_AT_FDCWD = -100
_NEW_MOUNTS = 0x00020000
_BIND, _RECURSIVE, _PRIVATE = 1 << 12, 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


class Notified(NamedTuple):
    """A call that waits for its answer."""

    id: int
    tid: int
    name: str
    arguments: tuple[int, ...]


def supported() -> bool:
    """Whether this machine has what the module needs."""
    return platform.machine() == "x86_64" and hasattr(os, "pidfd_open")


def _filter(numbers: Sequence[int]) -> bytes:
    """A BPF program: these calls notify, and others go on."""

    def statement(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    load, equal, give = 0x20, 0x15, 0x06
    count = len(numbers)
    program = statement(load, 4) + statement(equal, _AUDIT_ARCH_X86_64, 0, count + 1)
    program += statement(load, 0)
    for at, number in enumerate(numbers):
        program += statement(equal, number, count - at)
    return program + statement(give, _ALLOW) + statement(give, _NOTIFY)


def listener(names: Sequence[str] = tuple(CALLS)) -> int:
    """From now on, have these calls of this process wait for an answer: of all its threads, since a
    program may have some by now that do what is looked at.

    Returns:
        The descriptor from which they are received.

    Raises:
        OSError: the kernel does not have it, or does not allow it.
    """
    program = _filter([CALLS[name][0] for name in names])
    content = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(content))
    held = ctypes.create_string_buffer(header, len(header))
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which those who are not root need
    flags = _ALL_THREADS | _NEW_LISTENER | _WAIT_KILLABLE
    descriptor: int = _libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, held)
    if descriptor < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
    return descriptor


def die_with_parent() -> None:
    """End this process when its parent ends, however that does."""
    _libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL


def see_instead(at: Path, disk: Path) -> None:
    """Have this process, and the threads that it starts, see the directory ``disk`` at the path
    ``at``, which others do not, as if each were a node with a disk of its own. Needs root."""
    disk.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    flag = ctypes.c_ulong
    for result in (
        _libc.unshare(_NEW_MOUNTS),
        _libc.mount(b"none", b"/", None, flag(_RECURSIVE | _PRIVATE), None),
        _libc.mount(os.fsencode(disk), os.fsencode(at), None, flag(_BIND), None),
    ):
        if result != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"{at}: {os.strerror(error)}")


def waited_for_processors(pid: int) -> float:
    """For how many seconds the threads that a process now has were ready to run, while others had
    the processors: the second field of proc/PID/task/TID/schedstat. 0.0 for what is gone."""
    waited = 0
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as file:
                waited += int(file.read().split()[1])
    return waited / 1e9


def wake_at_once(descriptor: int) -> None:
    """Have the kernel run the other side right away; kernels before 6.6 do not know this."""
    with suppress(OSError):
        fcntl.ioctl(descriptor, _SET_FLAGS, 1)


def receive(descriptor: int) -> Notified | None:
    """The next call; None if its thread has gone."""
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(descriptor, _RECEIVE, buffer)
    except FileNotFoundError:
        return None
    identity, tid, _, number, _, _, *arguments = _NOTIFICATION.unpack(buffer)
    return Notified(identity, tid, _NAMES[number], tuple(arguments))


def let_through(descriptor: int, call: Notified) -> None:
    _send(descriptor, _ANSWER.pack(call.id, 0, 0, _CONTINUE))


def fail(descriptor: int, call: Notified, error: int) -> None:
    _send(descriptor, _ANSWER.pack(call.id, 0, -error, 0))


def give(descriptor: int, call: Notified, value: int) -> None:
    _send(descriptor, _ANSWER.pack(call.id, value, 0, 0))


def _send(descriptor: int, answer: bytes) -> None:
    with suppress(FileNotFoundError):  # killed meanwhile
        fcntl.ioctl(descriptor, _SEND, answer)


def replace_fd(descriptor: int, call: Notified, source: int, target: int) -> None:
    """Put a copy of ``source`` in the place of the descriptor ``target`` of the calling process, as
    dup2 does: what was open there is closed."""
    fcntl.ioctl(descriptor, _ADD_FD, struct.pack("=QIIII", call.id, 1, source, target, 0))


def take_fd(pidfd: int, number: int) -> int:
    """A copy of another process's descriptor, which shares its position and flags."""
    copy: int = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if copy < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return copy


def _signed(value: int) -> int:
    """An argument that C takes as an int."""
    return struct.unpack("=i", struct.pack("=I", value & 0xFFFFFFFF))[0]  # type: ignore[no-any-return]


def _text(tid: int, address: int) -> str:
    if address == 0:
        return ""
    with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
        # Not beyond the page, whose neighbour may not be there.
        data = os.pread(memory.fileno(), 4096 - address % 4096, address)
        if b"\0" not in data:
            data += os.pread(memory.fileno(), 4096, address + len(data))
    return os.fsdecode(data.split(b"\0", 1)[0])


def path_of(call: Notified) -> str | None:
    """The file that a call is about, as an absolute path; None if it is about none.

    Raises:
        OSError: the process has gone.
    """
    how = CALLS[call.name][1]
    first = _signed(call.arguments[0])
    if how == "none":
        return None
    if how == "map":
        first = _signed(call.arguments[4])
        if first < 0:
            return None
    if how in ("fd", "map"):
        try:
            return os.readlink(f"/proc/{call.tid}/fd/{first}")
        except FileNotFoundError:
            return None
    path = _text(call.tid, call.arguments[0 if how == "path" else 1])
    if path.startswith("/"):
        return path
    base = (
        f"/proc/{call.tid}/cwd"
        if how == "path" or first == _AT_FDCWD
        else f"/proc/{call.tid}/fd/{first}"
    )
    try:
        base = os.readlink(base)
    except FileNotFoundError:
        return None
    return os.path.join(base, path) if path else base
