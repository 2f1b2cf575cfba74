"""What a real run does to its files, as strace sees it: a list of operations.

The list has one operation for each system call that changed a file or a directory below a root,
or made one durable, of all processes and threads of the run. Two times belong to each, counted in
lines of the log: when it *began* and when it *ended*. A call that had begun may have taken effect;
one that ended has. So two processes that write at once stay interleaved as they were.

`Recording.check` compares what the operations give, one after the other, with the files that the
run has really left. So a call that this module does not know cannot go unnoticed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

__all__ = ["EVERYTHING", "ROOT", "Binding", "Change", "Operation", "Recording", "Run", "record"]

ROOT = 0
"""The number of the root directory. It is there, durably, before the run begins."""
EVERYTHING = -1
"""What ``sync`` and ``syncfs`` make durable."""

CALLS = (
    *("openat", "open", "creat", "lseek", "write", "pwrite64", "writev", "pwritev", "pwritev2"),
    *("sendfile", "copy_file_range", "truncate", "ftruncate", "fallocate"),
    *("fsync", "fdatasync", "sync_file_range", "sync", "syncfs", "msync"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
)


@dataclass(frozen=True)
class Binding:
    """A name that a call gave to a file or directory; or took away, if ``node`` is None."""

    directory: int
    name: str
    node: int | None


@dataclass(frozen=True)
class Change:
    """What a call did to the content of a file."""

    kind: Literal["write", "size", "room"]
    """``size``: it was cut, or grew; ``room``: it got room up to there, at least."""
    at: int
    """Where the bytes were written; or the size."""
    data: bytes = b""


@dataclass(frozen=True)
class Operation:
    """A system call. ``node`` is the file or directory that it changed or synced, by number."""

    begun: float
    ended: float
    call: str
    node: int = ROOT
    bindings: tuple[Binding, ...] = ()
    change: Change | None = None
    syncs: int | None = None
    """The file or directory that it made durable; None if it is no such call."""
    replaced: bool = False
    """Whether it renamed a file over another one."""
    mark: Any = None
    """What the run said here of itself."""

    @property
    def is_metadata(self) -> bool:
        """Whether a journal of metadata has it: names, and sizes that were set."""
        return bool(self.bindings) or (self.change is not None and self.change.kind != "write")


@dataclass
class Recording:
    """The operations of a run, in the order in which they ended."""

    operations: list[Operation]
    directories: set[int] = field(default_factory=lambda: {ROOT})
    names: dict[int, str] = field(default_factory=lambda: {ROOT: "."})
    """How each file and directory was first called, for reports."""

    def without(self, index: int) -> Recording:
        """The same, had that call not been made."""
        kept = self.operations[:index] + self.operations[index + 1 :]
        return replace(self, operations=kept)

    @property
    def syncs(self) -> list[int]:
        """Which of the operations are syncs."""
        return [i for i, op in enumerate(self.operations) if op.syncs is not None]

    def tree(self) -> dict[str, bytes | None]:
        """What the operations give: the content of each path, None for directories."""
        names: dict[tuple[int, str], int | None] = {}
        contents: dict[int, bytearray] = {}
        for op in self.operations:
            names |= {(one.directory, one.name): one.node for one in op.bindings}
            if op.change is not None:
                apply(contents.setdefault(op.node, bytearray()), op.change)
        return walk(
            {key: node for key, node in names.items() if node is not None},
            self.directories,
            lambda node: bytes(contents.get(node, b"")),
        )

    def check(self, root: Path) -> None:
        """Raise unless the operations give what is below ``root``."""
        expected, found = self.tree(), dict(_on_disk(root))
        for path in sorted(expected.keys() | found.keys()):
            if path not in found or path not in expected or expected[path] != found[path]:
                raise AssertionError(f"the recording is wrong about {path}")


class Run(NamedTuple):
    """Where a run has its files."""

    root: Path
    """The directory that is recorded."""
    marks: Path
    """A file outside of it. Each ``write`` to it is JSON, which becomes an `Operation.mark`."""


def apply(content: bytearray, change: Change) -> None:
    """Make a change to the content of a file."""
    end = change.at + len(change.data)
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if change.kind == "write":
        content[change.at : end] = change.data
    elif change.kind == "size":
        del content[change.at :]


def walk(names: dict[tuple[int, str], int], directories: set[int], content: Any) -> dict[str, Any]:
    """The paths that are reached from the root, with the content of each; None for directories."""
    inside: dict[int, list[tuple[str, int]]] = {}
    for (directory, name), node in names.items():
        inside.setdefault(directory, []).append((name, node))
    found: dict[str, Any] = {}
    waiting = [("", ROOT)]
    while waiting:
        path, directory = waiting.pop()
        for name, node in inside.get(directory, ()):
            found[path + name] = None if node in directories else content(node)
            if node in directories:
                waiting.append((f"{path}{name}/", node))
    return found


def _on_disk(root: Path) -> Iterator[tuple[str, bytes | None]]:
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        yield name, None if path.is_dir() else path.read_bytes()


def record(command: Sequence[str], runs: Mapping[str, Run], log: Path) -> dict[str, Recording]:
    """Run a command under strace, and return what it did in each of several runs.

    Args:
        runs: where each of them has its files, by name.
        log: where strace writes. It holds all bytes that were written.

    Raises:
        RuntimeError: strace or the command failed.
        AssertionError: the log does not tell how the files came to be.
    """
    options = ["--seccomp-bpf", "-f", "-qq", "-y", "-xx", "-s", str(1 << 22)]
    options += ["-e", f"trace={','.join(CALLS)}", "-e", "signal=none", "-o", str(log)]
    done = subprocess.run(
        ["strace", *options, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}")
    with log.open(encoding="ascii") as lines:
        calls = list(_calls(lines))
    recordings = {name: parse(calls, run) for name, run in runs.items()}
    for name, recording in recordings.items():
        recording.check(runs[name].root)
    return recordings


_CALL = re.compile(r"(?P<thread>\d+) +(?P<name>\w+)\((?P<rest>.*)")
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)")
_UNFINISHED = "<unfinished ...>"


class Call(NamedTuple):
    """A system call, as strace shows it."""

    begun: float
    ended: float
    name: str
    text: str
    """The arguments and the result."""


def _calls(lines: Iterable[str]) -> Iterator[Call]:
    """The calls of strace's log, in the order of their ends. Those that a kill has cut off are left
    out; if they did something, `Recording.check` will say so."""
    unfinished: dict[str, tuple[float, str, str]] = {}
    for number, line in enumerate(lines):
        line = line.rstrip("\n")
        if match := _RESUMED.match(line):
            begun, name, text = unfinished.pop(match["thread"])
            yield Call(begun, number + 0.5, name, text + match["rest"])
        elif match := _CALL.match(line):
            if match["rest"].endswith(_UNFINISHED):
                text = match["rest"].removesuffix(_UNFINISHED)
                unfinished[match["thread"]] = (number, match["name"], text)
            else:
                yield Call(number, number + 0.5, match["name"], match["rest"])


def parse(calls: Iterable[Call], run: Run) -> Recording:
    """The operations of one run."""
    reader = _Reader(str(run.root), str(run.marks))
    needles = [_hex(str(path)) for path in (run.root, run.marks)]
    for call in calls:
        if call.name == "sync" or any(needle in call.text for needle in needles):
            reader.read(*call)
    return Recording(reader.operations, reader.directories, reader.called)


def _hex(path: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(path))


class _Reader:
    """Turns calls, in the order of their ends, into operations on numbered files."""

    def __init__(self, root: str, marks: str) -> None:
        self._root, self._marks = root, marks
        self._names: dict[tuple[int, str], int] = {}
        self._contents: dict[int, bytearray] = {}  # as the run sees it
        self._positions: dict[tuple[int, int], int] = {}  # of (descriptor, file)
        self.operations: list[Operation] = []
        self.directories = {ROOT}
        self.called = {ROOT: "."}

    def read(self, begun: float, ended: float, name: str, text: str) -> None:
        arguments, result = _split(text)
        if result is None:
            return
        handler = getattr(self, f"_{name}", None)
        if handler is None:
            if any(self._inside(_path(one)) for one in arguments):
                raise AssertionError(f"a call that the model does not know: {name}({text[:200]}")
            return
        for op in handler(arguments, result) or ():
            self._add(replace(op, begun=begun, ended=ended, call=name))

    def _add(self, op: Operation) -> None:
        for one in op.bindings:
            if one.node is None:
                self._names.pop((one.directory, one.name), None)
            else:
                self._names[one.directory, one.name] = one.node
        if op.change is not None:
            apply(self._contents.setdefault(op.node, bytearray()), op.change)
        self.operations.append(op)

    # Paths.

    def _inside(self, path: str | None) -> bool:
        return path is not None and (path == self._root or path.startswith(self._root + "/"))

    def _node(self, path: str | None) -> int | None:
        """The number of the file of that name; None if there is none, or it is outside."""
        if path is None or not self._inside(path):
            return None
        node: int | None = ROOT
        for name in PurePosixPath(path).relative_to(self._root).parts:
            node = self._names.get((node, name)) if node is not None else None
        return node

    def _place(self, path: str | None) -> tuple[int, str] | None:
        """The directory of a path that is inside, and the name in it."""
        if path is None or not self._inside(path) or path == self._root:
            return None
        directory = self._node(os.path.dirname(path))
        if directory is None:
            raise AssertionError(f"{path} is in a directory that was never made")
        return directory, os.path.basename(path)

    def _new(self, path: str, *, directory: bool) -> Operation | None:
        place = self._place(path)
        if place is None:
            return None
        node = len(self.called)
        self.called[node] = os.path.relpath(path, self._root)
        if directory:
            self.directories.add(node)
        else:
            self._contents[node] = bytearray()
        return _operation(node, bindings=(Binding(*place, node),))

    # Calls that open and write.

    def _openat(self, arguments: list[str], result: str) -> Iterator[Operation]:
        path = _path(result)
        if path is None or not self._inside(path):
            return
        flags = arguments[2]
        node = self._node(path)
        if node is None and "O_CREAT" in flags:
            made = self._new(path, directory=False)
            assert made is not None
            yield made
            node = made.node
        elif node is not None and "O_TRUNC" in flags and self._contents.get(node):
            yield _operation(node, change=Change("size", 0))
        if "O_SYNC" in flags or "O_DSYNC" in flags:
            raise AssertionError(f"{path} is open with {flags}, which the model does not know")
        if node is not None and node not in self.directories:
            at = len(self._contents[node]) if "O_APPEND" in flags else 0
            self._positions[_number(result), node] = at

    def _open(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._openat(["", *arguments], result)

    def _lseek(self, arguments: list[str], result: str) -> None:
        node = self._node(_path(arguments[0]))
        if node is not None:
            self._positions[_number(arguments[0]), node] = int(result)

    def _write(self, arguments: list[str], result: str) -> Iterator[Operation]:
        data = _bytes(arguments[1])[: int(result)]
        if _path(arguments[0]) == self._marks:
            yield Operation(0, 0, "", mark=json.loads(data))
            return
        yield from self._at_position(arguments[0], data)

    def _writev(self, arguments: list[str], result: str) -> Iterator[Operation]:
        data = b"".join(map(_bytes, re.findall(r'iov_base=("[^"]*")', arguments[1])))
        return self._at_position(arguments[0], data[: int(result)])

    def _pwrite64(self, arguments: list[str], result: str) -> Iterator[Operation]:
        node = self._node(_path(arguments[0]))
        if node is not None:
            data = _bytes(arguments[1])[: int(result)]
            yield _operation(node, change=Change("write", int(arguments[3]), data))

    def _at_position(self, descriptor: str, data: bytes) -> Iterator[Operation]:
        node = self._node(_path(descriptor))
        if node is None:
            return
        key = _number(descriptor), node
        at = self._positions[key]
        self._positions[key] = at + len(data)
        yield _operation(node, change=Change("write", at, data))

    def _sendfile(self, arguments: list[str], result: str) -> Iterator[Operation]:
        node = self._node(_path(arguments[0]))
        if node is None:
            return iter(())
        source = self._node(_path(arguments[1]))
        match = re.match(r"\[(\d+)", arguments[2])
        if source is None or match is None:
            raise AssertionError(f"bytes from outside, or from where is not said: {arguments}")
        at = int(match[1])
        data = bytes(self._contents[source][at : at + int(result)])
        return self._at_position(arguments[0], data)

    def _ftruncate(self, arguments: list[str], result: str) -> Iterator[Operation]:
        node = self._node(_path(arguments[0]))
        if node is not None:
            size = int(arguments[1])
            if len(self._contents[node]) < size:
                yield _operation(node, change=Change("room", size))
            else:
                yield _operation(node, change=Change("size", size))

    _truncate = _ftruncate

    def _fallocate(self, arguments: list[str], result: str) -> Iterator[Operation]:
        node = self._node(_path(arguments[0]))
        if node is not None:
            assert arguments[1] == "0", arguments
            end = int(arguments[2]) + int(arguments[3])
            yield _operation(node, change=Change("room", end))

    # Calls that sync.

    def _fsync(self, arguments: list[str], result: str) -> Iterator[Operation]:
        node = self._node(_path(arguments[0]))
        if node is not None:
            yield _operation(node, syncs=node)

    _fdatasync = _fsync

    def _sync_file_range(self, arguments: list[str], result: str) -> None:
        """It promises nothing: neither the size nor the disk's cache."""

    def _sync(self, arguments: list[str], result: str) -> Iterator[Operation]:
        yield _operation(ROOT, syncs=EVERYTHING)

    _syncfs = _sync

    # Calls that change names.

    def _mkdir(self, arguments: list[str], result: str) -> Iterator[Operation]:
        made = self._new(_at("", arguments[0]), directory=True)
        if made is not None:
            yield made

    def _mkdirat(self, arguments: list[str], result: str) -> Iterator[Operation]:
        made = self._new(_at(*arguments[:2]), directory=True)
        if made is not None:
            yield made

    def _renamed(self, source: str, target: str) -> Iterator[Operation]:
        old, new = self._place(source), self._place(target)
        if old is None and new is None:
            return
        if old is None or new is None:
            raise AssertionError(f"renamed across the root: {source}, {target}")
        node = self._names[old]
        bindings = (Binding(*new, node), Binding(*old, None))
        is_file = node not in self.directories
        yield _operation(node, bindings=bindings, replaced=is_file and new in self._names)

    def _rename(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._renamed(_at("", arguments[0]), _at("", arguments[1]))

    def _renameat(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._renamed(_at(*arguments[:2]), _at(*arguments[2:4]))

    def _renameat2(self, arguments: list[str], result: str) -> Iterator[Operation]:
        assert "RENAME_EXCHANGE" not in arguments[4], arguments
        return self._renameat(arguments, result)

    def _removed(self, path: str) -> Iterator[Operation]:
        place = self._place(path)
        if place is not None:
            yield _operation(self._names[place], bindings=(Binding(*place, None),))

    def _unlink(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._removed(_at("", arguments[0]))

    _rmdir = _unlink

    def _unlinkat(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._removed(_at(*arguments[:2]))

    def _linked(self, source: str, target: str) -> Iterator[Operation]:
        place, node = self._place(target), self._node(source)
        if place is not None:
            assert node is not None, source
            yield _operation(node, bindings=(Binding(*place, node),))

    def _link(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._linked(_at("", arguments[0]), _at("", arguments[1]))

    def _linkat(self, arguments: list[str], result: str) -> Iterator[Operation]:
        return self._linked(_at(*arguments[:2]), _at(*arguments[2:4]))


def _operation(node: int, **what: Any) -> Operation:
    return Operation(0, 0, "", node, **what)


def _split(text: str) -> tuple[list[str], str | None]:
    """The arguments and the result of a call; None as the result of one that failed."""
    match = re.fullmatch(r"(.*)\) += (.*)", text)
    if match is None or match[2].startswith(("-1", "?")):
        return [], None
    inside, result = match.groups()
    arguments, depth, begin = [], 0, 0
    for found in re.finditer(r"[\[\]{},]", inside):
        if found[0] in "[{":
            depth += 1
        elif found[0] in "]}":
            depth -= 1
        elif depth == 0:
            arguments.append(inside[begin : found.start()].strip())
            begin = found.end()
    arguments.append(inside[begin:].strip())
    return arguments, result.split(" (")[0]


def _bytes(text: str) -> bytes:
    quoted = re.fullmatch(r'"((?:\\x[0-9a-f]{2})*)"', text)
    if quoted is None:
        raise AssertionError(f"not all of what was written is in the log: {text[:80]}")
    return bytes.fromhex(quoted[1].replace("\\x", ""))


def _path(text: str) -> str | None:
    """The path of a descriptor as strace shows it, unless its file was removed."""
    match = re.fullmatch(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>", text)
    return None if match is None else os.fsdecode(bytes.fromhex(match[1].replace("\\x", "")))


def _number(text: str) -> int:
    return int(text.partition("<")[0])


def _at(directory: str, name: str) -> str:
    """The path of a name that is relative to a descriptor of a directory."""
    path = os.fsdecode(_bytes(name))
    base = _path(directory) or "/"
    return os.path.normpath(os.path.join(base, path))
