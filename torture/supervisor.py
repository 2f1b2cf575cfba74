"""Ranks whose system calls fail when a plan says so.

The process that uses this has imported torch and pyckpt, and has no threads. It forks one child a
rank, which costs milliseconds, and answers the calls of all of them, so that one plan covers all
ranks. Calls on files outside the case's directory go through, and do not count.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torture import kernel

__all__ = ["STARVED_MAX_S", "TRANSFERS", "Fault", "Group", "Key", "Link", "Planned", "Seen"]

STARVED_MAX_S = 240.0
"""What a deadline gives, at most, for the time in which ranks waited for a processor. A rank that
runs for ever on a busy machine waits for ever, too, and must be found."""

_LARGE = 1 << 20  # a mapping of this many bytes counts as memory that a system may refuse
_IDENTITY = re.compile("[0-9a-f]{32}")
_O_DIRECT = 0o40000
_BLOCK = 4096
_TCGETS = 0x5401  # whether it is a terminal, which Python asks of each file that it opens
_READS, _WRITES = ("read", "pread64"), ("write", "pwrite64")
TRANSFERS = (*_READS, *_WRITES, "sendfile")
"""Calls that may transfer less than they were asked for."""


class Key(NamedTuple):
    """A call in a run: the n-th of its name that a rank makes on a file. Runs agree on these, as
    far as the ranks' threads let them."""

    rank: int
    name: str
    path: str
    n: int

    def __str__(self) -> str:
        return f"{self.rank}:{self.name}:{self.path}:{self.n}"


class Fault(NamedTuple):
    """What happens to a call.

    kind:
        "kill": the rank is killed before the call happens.
        "error": the call fails with the errno ``value``, and has no effect (but ``close`` closes).
        "stays": the same, and so do all later calls of its name on this rank.
        "short": the call transfers only this part of the bytes that it would have: at least one
            byte, or, where the page cache is bypassed, whole blocks, and at least one.
        "delay": the call happens after this many seconds.
    """

    kind: str
    value: float = 0

    def __str__(self) -> str:
        if self.kind in ("error", "stays"):
            return f"{self.kind}={errno.errorcode[int(self.value)]}"
        return self.kind if self.kind == "kill" else f"{self.kind}={self.value:g}"


@dataclass
class Planned:
    """A fault, and when it happens: at a call with this key, or at the n-th call that ``rank``
    makes after the first fault of the case."""

    fault: Fault
    key: Key | None = None
    after: tuple[int, int] | None = None
    hit: str = ""  # the call that it happened to

    def __str__(self) -> str:
        rank, n = self.after or (0, 0)
        where = f"+{rank}:{n}" if self.key is None else f"{self.key}"
        return f"{where}={self.fault}"


class Seen(NamedTuple):
    """What a rank said: a value, an error, or that it was killed; or nothing, in time ("hung")."""

    kind: str
    value: Any = None


class Link:
    """A child's end of the conversation with the supervisor."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def arm(self) -> None:
        """From here on, calls are seen. Returns when all ranks have come here."""
        descriptor = kernel.listener()
        socket.send_fds(self._sock, [b"arm."], [descriptor])
        os.close(descriptor)
        self._sock.recv(1)

    def say(self, kind: str, value: Any = None) -> None:
        data = pickle.dumps((kind, value))
        self._sock.sendall(b"say." + struct.pack("=I", len(data)) + data)

    def wait(self) -> bool:
        """Wait to be told to go on. False: there is nothing more to do."""
        return self._sock.recv(1) == b"g"


@dataclass
class _Child:
    rank: int
    pid: int
    pidfd: int
    sock: socket.socket
    listener: int = -1
    ready: bool = False
    said: list[Seen] = field(default_factory=list)
    gone: bool = False
    status: int = 0
    buffer: bytearray = field(default_factory=bytearray)


class Group:
    """The ranks of one case.

    Args:
        size: how many.
        body: what each runs: ``body(link, rank)``. It calls ``link.arm()`` once, and ``link.say``
            for each phase.
        root: the directory whose files count.
        plan: faults. The attribute ``hit`` of each tells afterwards what it happened to.
        record: whether to keep the keys of all calls, in ``self.calls``.
    """

    def __init__(
        self,
        size: int,
        body: Callable[[Link, int], None],
        *,
        root: str,
        plan: Sequence[Planned] = (),
        record: bool = False,
        quiet: bool = True,
    ) -> None:
        self.root = os.path.realpath(root)
        self.plan = list(plan)
        self.calls: list[Key] = []
        self.total: Counter[int] = Counter()  # calls of each rank
        self._record = record
        self._by_key = {p.key: p for p in self.plan if p.key is not None}
        self._by_after = {p.after: p for p in self.plan if p.after is not None}
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._since: Counter[int] = Counter()
        self._begun = False  # the first fault has happened
        self._stays: dict[tuple[int, str], int] = {}
        self._late: list[tuple[float, _Child, kernel.Notified]] = []
        self.armed = True
        self._poll = select.poll()
        self._at: dict[int, tuple[_Child, str]] = {}
        self._quiet = quiet
        self.children = [self._fork(rank, size, body) for rank in range(size)]

    def _fork(self, rank: int, size: int, body: Callable[[Link, int], None]) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                kernel.die_with_parent()
                ours.close()
                for other in self._at.values():
                    with suppress(OSError):
                        other[0].sock.close()
                if self._quiet:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                    os.dup2(1, 2)
                link = Link(theirs)
                try:
                    body(link, rank)
                except BaseException:
                    link.say("harness", traceback.format_exc())
            finally:
                os._exit(0)
        theirs.close()
        child = _Child(rank, pid, os.pidfd_open(pid), ours)
        self._watch(child.sock.fileno(), child, "sock")
        self._watch(child.pidfd, child, "pidfd")
        return child

    def _watch(self, descriptor: int, child: _Child, what: str) -> None:
        self._at[descriptor] = (child, what)
        self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> None:
        del self._at[descriptor]
        self._poll.unregister(descriptor)

    def phase(self, number: int, deadline: float) -> list[Seen]:
        """What each rank says in a phase (0 is the first), or that it died, or hung: a rank that
        has said nothing by the deadline (of time.monotonic) is killed. While a rank waits for a
        processor that others use, the deadline waits, too, for up to ``STARVED_MAX_S``."""
        waited = self._waited_for_processors()
        until = deadline
        while any(not c.gone and len(c.said) <= number for c in self.children):
            if not self._serve(until):
                starved = self._waited_for_processors() - waited
                until = deadline + min(max(starved, 0.0), STARVED_MAX_S)
                if time.monotonic() < until:
                    continue
                for child in self.children:
                    if not child.gone and len(child.said) <= number:
                        child.said += [Seen("hung")] * (number + 1 - len(child.said))
                self.kill()
                break
        return [
            c.said[number]
            if len(c.said) > number
            else Seen("killed" if c.status == signal.SIGKILL else "died", c.status)
            for c in self.children
        ]

    def _waited_for_processors(self) -> float:
        """For how many seconds the threads of the ranks, and this one, were ready to run and did
        not: of all together, since ranks wait for each other."""
        pids = [os.getpid(), *(child.pid for child in self.children if not child.gone)]
        return sum(kernel.waited_for_processors(pid) for pid in pids)

    def go_on(self) -> None:
        """Tell the ranks that have said something to go on. Their calls are let through."""
        self.armed = False
        for child in self.children:
            if not child.gone:
                with suppress(OSError):
                    child.sock.send(b"g")

    def kill(self) -> None:
        for child in self.children:
            if not child.gone:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End all ranks."""
        self.kill()
        for child in self.children:
            if not child.gone:
                os.waitpid(child.pid, 0)
                child.gone = True
            for descriptor in (child.pidfd, child.listener):
                if descriptor >= 0:
                    os.close(descriptor)
            child.sock.close()

    # What the ranks send

    def _serve(self, deadline: float) -> bool:
        """Answer what has come. False: nothing came until the deadline."""
        now = time.monotonic()
        if now >= deadline:
            return False
        until = min([deadline, *(due for due, _, _ in self._late)])
        events = self._poll.poll(max(0.0, 1000 * (until - now)))
        self._answer_late()
        for descriptor, _ in events:
            entry = self._at.get(descriptor)
            if entry is None:
                continue
            child, what = entry
            if what == "listener":
                self._call(child)
            elif what == "sock":
                self._message(child)
            elif what == "pidfd":
                self._end(child)
        return True

    def _answer_late(self) -> None:
        now = time.monotonic()
        for entry in [entry for entry in self._late if entry[0] <= now]:
            self._late.remove(entry)
            kernel.let_through(entry[1].listener, entry[2])

    def _end(self, child: _Child) -> None:
        self._receive(child)  # what it said before
        _, status = os.waitpid(child.pid, 0)
        child.gone = True
        child.status = os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)
        for descriptor in [d for d, (c, _) in self._at.items() if c is child]:
            self._forget(descriptor)
        self._late = [entry for entry in self._late if entry[1] is not child]

    def _message(self, child: _Child) -> None:
        if not self._receive(child) and child.sock.fileno() in self._at:
            self._forget(child.sock.fileno())

    def _receive(self, child: _Child) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(child.sock, 1 << 16, 1, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            return True
        if fds:
            child.listener = fds[0]
            kernel.wake_at_once(child.listener)
            self._watch(child.listener, child, "listener")
            child.ready = True
            if all(c.ready or c.gone for c in self.children):
                for c in self.children:
                    with suppress(OSError):
                        c.sock.send(b"g")
        child.buffer += data
        while len(child.buffer) >= 4:
            if child.buffer[:4] == b"arm.":
                del child.buffer[:4]
                continue
            if len(child.buffer) < 8:
                break
            (length,) = struct.unpack_from("=I", child.buffer, 4)
            if len(child.buffer) < 8 + length:
                break
            child.said.append(Seen(*pickle.loads(child.buffer[8 : 8 + length])))
            del child.buffer[: 8 + length]
        return bool(data)

    # The calls

    def _call(self, child: _Child) -> None:
        call = kernel.receive(child.listener) if child.listener >= 0 else None
        if call is None:
            if child.listener >= 0 and child.listener in self._at and not self._alive(child):
                self._forget(child.listener)
            return
        if not self.armed:
            kernel.let_through(child.listener, call)
            return
        try:
            key = self._key(child, call)
        except OSError:
            key = None  # it was killed meanwhile
        if key is None:
            kernel.let_through(child.listener, call)
            return
        self.total[child.rank] += 1
        if self._record:
            self.calls.append(key)
        planned = self._by_key.get(key)
        if planned is None and self._begun and self._by_after:
            self._since[child.rank] += 1
            planned = self._by_after.get((child.rank, self._since[child.rank]))
        if planned is not None and not planned.hit:
            try:
                hit = self._inflict(child, call, planned.fault)
            except OSError:
                hit = False
                kernel.let_through(child.listener, call)
            if hit:
                planned.hit = str(key)
                self._begun = True
            return
        stays = self._stays.get((child.rank, call.name))
        if stays is not None:
            with suppress(OSError):
                self._fail(child.listener, call, stays)
        else:
            kernel.let_through(child.listener, call)

    def _alive(self, child: _Child) -> bool:
        return not select.select([child.pidfd], [], [], 0)[0]

    def _key(self, child: _Child, call: kernel.Notified) -> Key | None:
        if call.name in ("clone", "clone3"):
            path = "(thread)"
        elif (call.name == "mmap" and call.arguments[1] < _LARGE) or (
            call.name == "ioctl" and call.arguments[1] == _TCGETS
        ):
            return None
        else:
            found = kernel.path_of(call)
            if found is None:
                if call.name != "mmap":
                    return None
                path = "(memory)"
            elif found == self.root or found.startswith(self.root + "/"):
                path = _IDENTITY.sub("ID", found[len(self.root) + 1 :].removesuffix(" (deleted)"))
            else:
                return None
        self._counts[child.rank, call.name, path] += 1
        return Key(child.rank, call.name, path, self._counts[child.rank, call.name, path])

    def _inflict(self, child: _Child, call: kernel.Notified, fault: Fault) -> bool:
        """Do to a call what a fault says. False: it cannot happen to this call, which is let
        through."""
        listener = child.listener
        if fault.kind == "kill":
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            return True
        if fault.kind == "delay":
            self._late.append((time.monotonic() + fault.value, child, call))
            return True
        if fault.kind == "short":
            done = self._short(child, call, fault.value)
            if done is None:
                kernel.let_through(listener, call)
                return False
            kernel.give(listener, call, done)
            return True
        error = int(fault.value)
        if call.name in ("clone", "clone3", "mmap") and error not in (errno.EAGAIN, errno.ENOMEM):
            kernel.let_through(listener, call)
            return False
        # Of a lock, EAGAIN says that somebody holds it; if it stays, callers wait for a minute.
        if fault.kind == "stays" and (call.name, error) != ("flock", errno.EAGAIN):
            self._stays[child.rank, call.name] = error
        self._fail(listener, call, error)
        return True

    def _fail(self, listener: int, call: kernel.Notified, error: int) -> None:
        if call.name == "close":
            # Linux closes whatever it returns; the number stays taken, which does no harm here.
            kernel.replace_fd(listener, call, _devnull(), call.arguments[0])
        kernel.fail(listener, call, error)

    def _short(self, child: _Child, call: kernel.Notified, part: float) -> int | None:
        """Do a part of a transfer in the place of the child. None: it has no part that is less than
        the whole, or is no transfer."""
        if call.name not in TRANSFERS:
            return None
        number = call.arguments[1 if call.name == "sendfile" else 0]
        with open(f"/proc/{call.tid}/fdinfo/{number}") as info:
            fields = dict(line.split(":", 1) for line in info if ":" in line)
        descriptor = kernel.take_fd(child.pidfd, number)
        try:
            count = _count(call, descriptor, int(fields["pos"]))
            want = max(1, int(count * part))
            if int(fields["flags"], 8) & _O_DIRECT:
                want = max(_BLOCK, want - want % _BLOCK)
            if not 0 < want < count:
                return None
            if call.name != "sendfile":
                return _transfer(descriptor, call, want)
            target = kernel.take_fd(child.pidfd, call.arguments[0])
            try:
                # Whoever passes an offset goes on by what is returned.
                return os.sendfile(target, descriptor, _offset(call), want)
            finally:
                os.close(target)
        finally:
            os.close(descriptor)


def _offset(call: kernel.Notified) -> int | None:
    """From where sendfile reads; None: from where its file stands."""
    address = call.arguments[2]
    if address == 0:
        return None
    with open(f"/proc/{call.tid}/mem", "rb", buffering=0) as memory:
        return int.from_bytes(os.pread(memory.fileno(), 8, address), sys.byteorder)


def _count(call: kernel.Notified, descriptor: int, position: int) -> int:
    """How many bytes a call would transfer: who reads may ask for more than the file has."""
    count = call.arguments[3 if call.name == "sendfile" else 2]
    if call.name in _WRITES:
        return count
    if call.name == "pread64":
        position = call.arguments[3]
    elif call.name == "sendfile":
        offset = _offset(call)
        position = position if offset is None else offset
    status = os.fstat(descriptor)
    return min(count, status.st_size - position) if stat.S_ISREG(status.st_mode) else count


_descriptors: list[int] = []


def _devnull() -> int:
    if not _descriptors:
        _descriptors.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    return _descriptors[0]


def _transfer(descriptor: int, call: kernel.Notified, count: int) -> int:
    import mmap

    address, offset = call.arguments[1], call.arguments[3]
    with (
        open(f"/proc/{call.tid}/mem", "r+b", buffering=0) as memory,
        mmap.mmap(-1, count) as aligned,
        memoryview(aligned) as whole,
    ):
        if call.name in _WRITES:
            whole[:] = os.pread(memory.fileno(), count, address)
            if call.name == "write":
                return os.write(descriptor, whole)
            return os.pwritev(descriptor, [whole], offset)
        got = (
            os.readv(descriptor, [whole])
            if call.name == "read"
            else os.preadv(descriptor, [whole], offset)
        )
        with whole[:got] as part:
            os.pwrite(memory.fileno(), part, address)
        return got


def parse(text: str) -> Planned:
    """What ``str`` made of a Planned."""
    where, _, what = text.partition("=")
    kind, _, value = what.partition("=")
    number = float(getattr(errno, value)) if kind in ("error", "stays") else float(value or 0)
    fault = Fault(kind, number)
    if where.startswith("+"):
        rank, n = where[1:].split(":")
        return Planned(fault, after=(int(rank), int(n)))
    rank, name, *path, n = where.split(":")
    return Planned(fault, key=Key(int(rank), name, ":".join(path), int(n)))


if not kernel.supported():  # pragma: no cover
    print("needs Linux on x86-64", file=sys.stderr)
