"""A child process to which the kernel is made to lie, or that is killed, at a chosen system call.

strace does both, attached to a child that is ready to make the calls that matter: so the n-th call
is the n-th of those. It counts each thread's calls on its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _ranks import TIMEOUT_S, Child, ChildFailed, Pipe

# What changes files and directories, or opens them.
CALLS = (
    *("openat", "mkdir", "fcntl", "fallocate", "pwrite64", "write", "ftruncate", "fsync"),
    *("close", "rename", "unlink"),
)


@dataclass(frozen=True)
class Call:
    """A system call that a child made while it was traced."""

    name: str
    nth: int  # of this name, in its thread
    text: str  # as strace prints it: arguments, result
    injected: bool


@dataclass(frozen=True)
class Traced:
    """How a traced child ended, and what it did."""

    result: Any  # of its function; None where it was killed
    killed: bool
    calls: list[Call]

    @property
    def injected(self) -> list[Call]:
        return [call for call in self.calls if call.injected]


@contextmanager
def traced(pipe: Pipe) -> Iterator[None]:
    """In a child's function: what is done in this block is traced."""
    pipe.send("attach")
    pipe.wait()
    try:
        yield
    finally:
        try:
            pipe.send("detach")
        except OSError:  # this was the n-th write of its thread
            pipe.send("detach")
        pipe.wait()


def run_traced(function: Callable[..., Any], *args: Any, inject: str | None = None) -> Traced:
    """Run ``function(pipe, *args)`` in a child, and strace on its ``traced`` block.

    ``inject`` says what strace does to it, in strace's words: "pwrite64:error=EIO:when=3".
    """
    child = Child(function, *args)
    with tempfile.TemporaryDirectory(prefix="pyckpt-strace-") as folder:
        log = Path(folder) / "log"
        tracer: subprocess.Popen[str] | None = None
        try:
            if child.receive() != "attach":
                raise AssertionError("the function has no traced block")
            tracer = _attach(child.process.pid, log, inject)
            child.connection.send("go")
            try:
                child.receive()
            except (EOFError, ConnectionResetError):
                if child.join() != -signal.SIGKILL:
                    raise ChildFailed(f"a child ended with {child.process.exitcode}") from None
                tracer.communicate(timeout=TIMEOUT_S)
                return Traced(None, True, _parse(log.read_text()))
            tracer.send_signal(signal.SIGINT)  # lets go of the child
            tracer.communicate(timeout=TIMEOUT_S)
            child.connection.send("go")
            result = child.receive()
            child.join()
            return Traced(result, False, _parse(log.read_text()))
        finally:
            child.kill()
            if tracer is not None:
                tracer.kill()
                tracer.communicate()


def _attach(pid: int | None, log: Path, inject: str | None) -> subprocess.Popen[str]:
    command = ["strace", "-f", "-y", "-o", str(log)]
    calls = set(CALLS)
    if inject is not None:
        command += ["-e", f"inject={inject}"]
        calls.add(inject.partition(":")[0])
    command += ["-e", f"trace={','.join(sorted(calls))}"]
    tracer = subprocess.Popen(
        [*command, "-p", str(pid)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        raise RuntimeError(f"strace could not attach: {said}{tracer.communicate()[1]}")
    return tracer


_LINE = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<text>.*)")
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<text>.*)")


def _parse(log: str) -> list[Call]:
    """The calls of a log, in the order of their beginnings."""
    counts: dict[tuple[str, str], int] = {}
    calls: list[dict[str, Any]] = []
    unfinished: dict[str, dict[str, Any]] = {}
    for line in log.splitlines():
        if match := _LINE.match(line):
            thread, name, text = match["thread"], match["name"], match["text"]
            counts[thread, name] = nth = counts.get((thread, name), 0) + 1
            call = {"name": name, "nth": nth, "text": text.removesuffix("<unfinished ...>")}
            calls.append(call)
            unfinished[thread] = call
        elif match := _RESUMED.match(line):
            unfinished[match["thread"]]["text"] += match["text"]
    return [Call(**call, injected="(INJECTED)" in call["text"]) for call in calls]


def pwrite_range(call: Call) -> tuple[int, int]:
    """The size and the offset that a pwrite64 was asked for."""
    match = re.search(r", (\d+), (\d+)(\)| *$)", call.text)
    assert match is not None, call.text
    return int(match[1]), int(match[2])


def is_in(call: Call, directory: Path) -> bool:
    """Whether the call names the directory, or something in it."""
    return re.search(rf"[\"<]{re.escape(os.fspath(directory))}[/\">]", call.text) is not None
