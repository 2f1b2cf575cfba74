"""One job at a time saves into a directory: the one that was the last to begin.

An old job may still run beside its replacement, because it hangs or nobody ended it. It must
neither overwrite nor prune the checkpoints of the new job. So a job that begins to save takes the
next *generation*: it makes a file ``.pyckpt/generation-00000007`` exclusively, and removes those
before it. An older job is then *superseded*: its saves fail, and it no longer prunes.

A job checks its generation right before each commit and each removal. It holds a lock of
``.pyckpt/lock`` until these are done, so that no job takes the next generation in between. On file
systems without locks, a window remains, as long as a rename takes. The check is reliable even on
network file systems that cache directories, since opening a file asks the server whether it exists.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyckpt.errors import Superseded
from pyckpt.format import commit
from pyckpt.format.flock import close_unwritten, trying
from pyckpt.locks import fork_safe_lock

__all__ = ["FOLDER", "Fence", "Job"]

FOLDER = ".pyckpt"
"""The directory of the generations, below that of the checkpoints."""

_GENERATION = re.compile(r"generation-(\d{8,})")
_POLL_SECONDS = 0.01
_PATIENCE_SECONDS = 60.0


class Job(NamedTuple):
    """A job that has saved."""

    host: str
    pid: int
    """0 if it is not known."""
    namespace: str
    """Of its process number, on its host."""

    def is_running(self) -> bool | None:
        """Whether its process is there; None if that cannot be seen: it is of another host, or of
        another container, or has not said which process it is."""
        if self.host != socket.gethostname() or self.namespace != _namespace() or not self.pid:
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


class Fence:
    """The right of a job to commit and prune in a directory.

    For the rank that commits. Any thread may use it.

    Args:
        directory: of the checkpoints.
        taken: called when this job has begun to save, before it writes anything.
        patience: seconds to wait for a lock that another process holds.
        token: by which other ranks know this job; by default one that nobody else knows.
    """

    def __init__(
        self,
        directory: Path,
        *,
        taken: Callable[[], None] = lambda: None,
        patience: float = _PATIENCE_SECONDS,
        token: str | None = None,
    ) -> None:
        self._given = token
        self._folder = directory / FOLDER
        self._taken = taken
        self._patience = patience
        self._turn = fork_safe_lock()  # waits for threads of this process without polling
        self._generation: int | None = None
        self._token = ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the job that saves here while the block runs. The first time, take a generation.

        Raises:
            Superseded: another job has begun to save here since this one did.
            TimeoutError: another process is in such a block, and does not leave it.
            OSError: the directory cannot be written to.
        """
        with self._turn, self._locked() as wiped:
            if self._generation is None or wiped:
                self._take()
            else:
                self._check()
            yield

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Have no job commit, prune or begin while the block runs, without being a job that saves
        here. Raises as `held`, but never `Superseded`."""
        with self._turn, self._locked():
            yield

    def holder(self) -> str | None:
        """The token of the job that was the last to begin to save here; None if no job has. "" if
        it could not write its token, since the disk was full."""
        try:
            number = max(self._generations(), default=None)
        except FileNotFoundError:
            return None
        return None if number is None else self._who(number)["token"]

    def last_job(self) -> Job | None:
        """The job that was the last to begin to save here; None if no job has."""
        try:
            number = max(self._generations(), default=None)
        except FileNotFoundError:
            return None
        if number is None:
            return None
        who = self._who(number)  # empty if the disk was full when it began
        pid = int(who["pid"]) if who["pid"].isdecimal() and len(who["pid"]) < 10 else 0
        return Job(who["host"], pid, who["namespace"])

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock. Yields whether the folder of this job had been removed."""
        deadline = time.monotonic() + self._patience
        path = self._folder / "lock"
        wiped = False
        while True:
            wiped |= self._make_folder()
            descriptor = self._open(path)
            try:
                with trying(descriptor) as mine:
                    if mine and _is_still(path, descriptor):
                        yield wiped
                        return
            finally:
                close_unwritten(descriptor)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    f"another process has held this lock for {self._patience:.0f} s; does a job "
                    "that was replaced still hang? End it",
                    str(path),
                )
            time.sleep(_POLL_SECONDS)

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags, 0o666)

    def _make_folder(self) -> bool:
        try:
            self._folder.mkdir()
        except FileExistsError:
            return False
        except FileNotFoundError:
            commit.make_directory(self._folder, sync=True)
            return True
        commit.sync_directory(self._folder.parent)
        return True

    def _take(self) -> None:
        number = max(self._generations(), default=0)
        while True:
            number = max(number + 1, max(self._generations(), default=0))
            try:
                self._write(self._path(number))
            except FileExistsError:
                continue
            # Without locks, another job may have taken a later generation and removed the earlier
            # ones, of which the line above has just made one again.
            if max(self._generations(), default=0) == number:
                break
            self._path(number).unlink(missing_ok=True)
        for older in self._generations():
            if older < number:
                self._path(older).unlink(missing_ok=True)
        commit.sync_directory(self._folder)
        self._generation = number
        self._taken()

    def _write(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        token = self._given or uuid.uuid4().hex
        content = {
            "token": token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "namespace": _namespace(),
        }
        left = json.dumps(content).encode()
        try:
            while left:  # a disk may take it in part
                left = left[os.write(descriptor, left) :]
        except OSError as error:
            # A full disk must not fail here, since room is made after this. The name is enough, and
            # what is there of the content is read as no token.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            token = ""
        finally:
            os.close(descriptor)
        self._token = token

    def _check(self) -> None:
        assert self._generation is not None
        newest = max(self._generations(), default=0)
        if newest <= self._generation and self._who(self._generation)["token"] == self._token:
            return
        who = self._who(max(newest, self._generation))
        if (who["pid"], who["host"], who["namespace"]) == _this_process():
            raise Superseded(
                f"{self._folder.parent}: another Checkpointer of this process has begun to save "
                "here since this one did, so this one does not save or prune here any more. Save "
                "with that one, and close this one"
            )
        by = f"process {who['pid']} on {who['host']}" if who["token"] else "another job"
        raise Superseded(
            f"{self._folder.parent}: {by} has begun to save here since this job did, so this one "
            "does not save or prune here any more. If it is the one that should, end the other and "
            "start this one again"
        )

    def _who(self, number: int) -> dict[str, str]:
        try:
            content = json.loads(self._path(number).read_text())
            # The first versions did not say the last of these.
            return {"namespace": ""} | {
                key: str(content[key])
                for key in ("token", "host", "pid", "namespace")
                if key in content or key != "namespace"
            }
        except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
            return dict.fromkeys(("token", "host", "pid", "namespace"), "")

    def _generations(self) -> list[int]:
        matches = [_GENERATION.fullmatch(name) for name in os.listdir(self._folder)]
        return [int(match[1]) for match in matches if match is not None]

    def _path(self, number: int) -> Path:
        return self._folder / f"generation-{number:08d}"


def _this_process() -> tuple[str, str, str]:
    return str(os.getpid()), socket.gethostname(), _namespace()


def _namespace() -> str:
    """In which numbers of processes this one is counted: since the boot, and in its container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
