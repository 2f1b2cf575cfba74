"""What a power failure may leave of the files of a run: models of file systems.

A model takes a `Recording` and an instant, and gives the states in which the disk may be found
afterwards. What a sync made durable before the instant is in each of them: a sync that had returned
covers the operations that had ended when it began. All else is open:

``posix``
    What POSIX does not exclude. Of the names that were given and taken without a sync of their
    directory, any subset counts, also of one directory. A rename may leave both names; none, if it
    goes to another directory. The sync of a file makes no name durable. Of the bytes that were
    written without a sync of their file, any sectors of 512 or 4096 bytes are there; the file has
    any of the sizes that it had; what is missing within it is zeros, or junk.
``ext4``
    ext4 with ``data=ordered``. Names and sizes that were set are in a journal: a prefix of them
    counts, which contains at least what concerns a file or directory up to its last sync. Bytes
    that make a file longer wait in memory (delayed allocation): a file may be empty, or have some
    of its pages; its size never reaches beyond bytes that are there. A file that is renamed over
    another is written before the rename counts. Bytes that overwrite others are written in place,
    and torn.
``xfs``
    The same journal, without the care for files that are renamed over others.
``btrfs``
    A tree as it was at some instant, a prefix of the names, which syncs do not move forward; on it,
    the log of the syncs since is replayed. The sync of a file brings back its content, its names,
    and the directories above; that of a directory its names. Pages are old or new, never torn.

The idea is that of ALICE (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014): to
record a workload, to construct the states that a model of the file system allows, and to let a
checker look at each. Syncs as the instants at which promises begin, and the states around them, are
from CrashMonkey and B3 (Mohan et al., "Finding Crash-Consistency Bugs with Bounded Black-Box Crash
Testing", OSDI 2018), which also describe the log replay of btrfs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torture.recording import EVERYTHING, Change, Operation, Recording, apply, walk

__all__ = ["MODELS", "Instant", "Model", "State", "instants", "states"]

Model = Literal["posix", "ext4", "xfs", "btrfs"]
MODELS: tuple[Model, ...] = ("posix", "ext4", "xfs", "btrfs")

Tree = dict[str, bytes | None]

_SECTORS = (512, 4096)
_PAGE = 4096
_CONTENTS = ("all", "lost", "zeros", "junk", "torn", "torn")
_ENUMERATED = 6
"""Up to so many open operations, each subset of them is tried."""


@dataclass(frozen=True)
class State:
    """What may be found after a power failure."""

    tree: Tree
    """The content of each path; None for directories."""
    how: str
    """How it came to be, for reports."""


def instants(recording: Recording) -> list[float]:
    """When the power may fail, so that each state of the run is met: while each call is under way,
    after each thing that the run said, and at its end."""
    found = {op.begun + 0.1 for op in recording.operations if op.syncs is None}
    found |= {op.ended + 0.1 for op in recording.operations if op.mark is not None}
    found |= {max((op.ended for op in recording.operations), default=0.0) + 0.1}
    return sorted(found)


class Instant:
    """What is known, and what is open, when the power fails."""

    def __init__(self, recording: Recording, when: float) -> None:
        self.recording = recording
        self.when = when
        self.operations = [op for op in recording.operations if op.begun < when]
        self.syncs = [op for op in self.operations if op.syncs is not None and op.ended < when]
        self.marks = [op.mark for op in self.operations if op.mark is not None and op.ended < when]

    @cached_property
    def _horizon(self) -> dict[int, float]:
        """Up to when what was done to a file or directory is durable."""
        found: dict[int, float] = {}
        for sync in self.syncs:
            assert sync.syncs is not None
            found[sync.syncs] = max(found.get(sync.syncs, 0.0), sync.begun)
        return found

    def is_synced(self, op: Operation, node: int) -> bool:
        """Whether a sync of that file or directory covers an operation."""
        horizon = max(self._horizon.get(node, 0.0), self._horizon.get(EVERYTHING, 0.0))
        return op.ended < horizon

    @cached_property
    def changes(self) -> dict[int, list[Operation]]:
        """What was done to the content of each file."""
        found: dict[int, list[Operation]] = {}
        for op in self.operations:
            if op.change is not None:
                found.setdefault(op.node, []).append(op)
        return found

    @cached_property
    def metadata(self) -> list[Operation]:
        """The operations that a journal has, in its order."""
        return [op for op in self.operations if op.is_metadata]

    def open_content(self, node: int) -> list[Operation]:
        """What was done to a file, and not synced."""
        return [op for op in self.changes.get(node, ()) if not self.is_synced(op, node)]

    def durable_content(self, node: int) -> bytearray:
        content = bytearray()
        for op in self.changes.get(node, ()):
            if self.is_synced(op, node) and op.change is not None:
                apply(content, op.change)
        return content

    @cached_property
    def open_files(self) -> list[int]:
        return [node for node in self.changes if self.open_content(node)]


def states(
    instant: Instant, model: Model, generator: random.Random, *, samples: int
) -> Iterator[State]:
    """The states that a model allows: those at its corners, and some at random between them.

    Args:
        samples: how many at random. Equal states may come more than once.
    """
    makers: dict[str, Callable[..., Iterator[State]]] = {
        "posix": _posix,
        "ext4": _journal,
        "xfs": _journal,
        "btrfs": _btrfs,
    }
    return makers[model](instant, model, generator, samples)


# The content of a file.


def _full(instant: Instant, node: int) -> bytes:
    content = bytearray()
    for op in instant.changes.get(node, ()):
        if op.change is not None:
            apply(content, op.change)
    return bytes(content)


def _sized(instant: Instant, node: int, size: int, junk: random.Random | None) -> bytes:
    """What is durable of a file, at another size; what it grew by is zeros or junk."""
    content = instant.durable_content(node)
    grown = max(0, size - len(content))
    return bytes(content[:size]) + (bytes(grown) if junk is None else junk.randbytes(grown))


def _sizes(instant: Instant, node: int) -> list[int]:
    """The sizes that a file may be found with."""
    content = instant.durable_content(node)
    found = [len(content)]
    for op in instant.open_content(node):
        if op.change is not None:
            apply(content, op.change)
            found.append(len(content))
    return found


def _torn(instant: Instant, node: int, generator: random.Random) -> bytes:
    """Some of the sectors that were written, in some of the sizes."""
    sector = generator.choice(_SECTORS)
    size = generator.choice(_sizes(instant, node)[-2:] + _sizes(instant, node))
    junk = generator if generator.random() < 0.3 else None
    share = generator.choice([0.1, 0.5, 0.9, 0.99])
    content = bytearray(_sized(instant, node, size, junk))
    for op in instant.open_content(node):
        change = op.change
        if change is None or change.kind != "write":
            continue
        for begin, end in _pieces(change.at, change.at + len(change.data), sector):
            if generator.random() < share and end <= size:
                content[begin:end] = change.data[begin - change.at : end - change.at]
    return bytes(content)


def _pieces(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """A range, cut at the multiples of a size."""
    while begin < end:
        cut = min(end, (begin // size + 1) * size)
        yield begin, cut
        begin = cut


# POSIX.


def _posix(
    instant: Instant, model: Model, generator: random.Random, samples: int
) -> Iterator[State]:
    names = [op for op in instant.operations if op.bindings]
    files = instant.open_files
    # An operation counts as a whole, but for a rename that is torn.
    open_names = [
        i
        for i, op in enumerate(names)
        if not all(instant.is_synced(op, one.directory) for one in op.bindings)
    ]

    def content(node: int, what: str) -> bytes:
        if what == "all":
            return _full(instant, node)
        if what == "torn":
            return _torn(instant, node, generator)
        size = len(_full(instant, node)) if what in ("zeros", "junk") else 0
        if what == "lost":
            return bytes(instant.durable_content(node))
        return _sized(instant, node, size, generator if what == "junk" else None)

    def state(
        lost: Collection[int],
        contents: Mapping[int, str],
        how: str,
        torn: tuple[int, int] | None = None,
    ) -> State:
        bound: dict[tuple[int, str], int | None] = {}
        for i, op in enumerate(names):
            for half, one in enumerate(op.bindings):
                if (i in lost or torn == (i, half)) and not instant.is_synced(op, one.directory):
                    continue
                bound[one.directory, one.name] = one.node
        made = {node: content(node, what) for node, what in contents.items()}
        return State(_tree(instant, bound, made), f"{model}: {how}")

    def everywhere(what: str) -> dict[int, str]:
        return dict.fromkeys(files, what)

    for what in ("all", "lost", "zeros", "junk", "torn"):
        yield state((), everywhere(what), f"all names, content {what}")
    yield state(open_names, everywhere("lost"), "no names, content lost")
    if len(open_names) <= _ENUMERATED:
        for count in range(1, len(open_names) + 1):
            for some in itertools.combinations(open_names, count):
                yield state(some, {}, f"without {_said(names, some)}")
                if files:
                    yield state(some, everywhere("torn"), f"torn, without {_said(names, some)}")
    else:
        for i in open_names:
            yield state({i}, {}, f"without {_said(names, [i])}")
            yield state({*open_names} - {i}, {}, f"of open names only {_said(names, [i])}")
    for i in open_names:
        for half in _tears(names[i]):
            yield state((), {}, f"half of {_said(names, [i])}", (i, half))
    for node in files:
        for what in ("lost", "zeros", "junk", "torn"):
            yield state((), {node: what}, f"{instant.recording.names[node]} {what}")
    for _ in range(samples if open_names or files else 0):
        share = generator.choice([0.1, 0.5, 0.9])
        lost = [i for i in open_names if generator.random() < share]
        contents = {node: generator.choice(_CONTENTS) for node in files}
        yield state(lost, contents, f"at random, without {_said(names, lost)}")


def _tears(op: Operation) -> Sequence[int]:
    """Which half of an operation may be lost: within a directory, the new name is written before
    the old is taken away."""
    if len(op.bindings) < 2:
        return ()
    return (1,) if op.bindings[0].directory == op.bindings[1].directory else (0, 1)


def _said(names: Sequence[Operation], which: Sequence[int]) -> str:
    said = [
        f"{names[i].call} {' '.join(one.name for one in reversed(names[i].bindings))}"
        for i in which[:4]
    ]
    return ", ".join(said) + (", ..." if len(which) > 4 else "")


def _tree(
    instant: Instant, bound: dict[tuple[int, str], int | None], contents: dict[int, bytes]
) -> Tree:
    """The tree of these names. A file that is not in ``contents`` has all that was written."""

    def content(node: int) -> bytes:
        if node not in contents:
            contents[node] = _full(instant, node)
        return contents[node]

    names = {key: node for key, node in bound.items() if node is not None}
    return walk(names, instant.recording.directories, content)


# Journals.


def _journal(
    instant: Instant, model: Model, generator: random.Random, samples: int
) -> Iterator[State]:
    journal = instant.metadata
    least = 0
    for sync in instant.syncs:
        for i, op in enumerate(journal):
            if op.ended < sync.begun and _concerns(op, sync.syncs):
                least = max(least, i + 1)
    counts = range(least, len(journal) + 1)
    plan = [(count, what) for count in counts for what in ("all", "lost")]
    for count, what in [*plan, *((generator.choice(counts), "pages") for _ in range(samples))]:
        taken = journal[:count]
        bound = {(one.directory, one.name): one.node for op in taken for one in op.bindings}
        safe: dict[int, float] = {}  # files that are written before a rename counts
        if model == "ext4":
            safe = {op.node: op.begun for op in taken if op.replaced}
        contents = {
            node: _delayed(
                instant,
                node,
                what,
                taken,
                safe.get(node, 0.0),
                generator,
                torn=_SECTORS[0],
            )
            for node in instant.open_files
        }
        yield State(_tree(instant, bound, contents), f"{model}: {count} of the journal, {what}")


def _concerns(op: Operation, node: int | None) -> bool:
    if node == EVERYTHING or op.node == node:
        return True
    return any(node in (one.directory, one.node) for one in op.bindings)


def _delayed(
    instant: Instant,
    node: int,
    what: str,
    journal: list[Operation],
    safe: float,
    generator: random.Random,
    *,
    torn: int,
) -> bytes:
    """A file whose bytes are written by and by: what it grows by appears page by page, and its size
    follows; what it had is overwritten in pieces of ``torn`` bytes.

    Args:
        what: "all", "lost" or "pages".
        journal: the operations that count. Sizes that were set are among them.
        safe: what was written before is there.
    """
    content = instant.durable_content(node)
    had = len(content)
    counted = {id(op) for op in journal}
    pages = generator.choice([0.2, 0.5, 0.9])
    for op in instant.open_content(node):
        change = op.change
        if change is None:
            continue
        if change.kind != "write":
            if id(op) in counted:
                apply(content, change)
            continue
        for begin, end in _pieces(change.at, change.at + len(change.data), _PAGE):
            grows = what == "pages" and begin >= had
            if what == "all" or op.ended < safe or (grows and generator.random() < pages):
                apply(content, _written(change.at, change.data, begin, end))
            elif what == "pages" and begin < had:
                for low, high in _pieces(begin, end, torn):
                    if generator.random() < pages:
                        apply(content, _written(change.at, change.data, low, high))
    return bytes(content)


def _written(at: int, data: bytes, begin: int, end: int) -> Change:
    return Change("write", begin, data[begin - at : end - at])


# btrfs.


def _btrfs(
    instant: Instant, model: Model, generator: random.Random, samples: int
) -> Iterator[State]:
    journal = instant.metadata
    every = list(range(len(journal) + 1))
    whole = [sync.begun for sync in instant.syncs if sync.syncs == EVERYTHING]
    least = sum(op.ended < max(whole, default=0.0) for op in journal)
    bases = every[least:]
    plan = [(base, what) for base in bases for what in ("all", "lost")]
    for base, what in [*plan, *((generator.choice(bases), "pages") for _ in range(samples))]:
        taken = journal[:base]
        bound = {(one.directory, one.name): one.node for op in taken for one in op.bindings}
        for sync in instant.syncs:
            if base < len(journal):
                _replay(instant, journal[base:], sync, bound)
        contents = {
            node: _delayed(instant, node, what, taken, 0.0, generator, torn=_PAGE)
            for node in instant.open_files
        }
        yield State(_tree(instant, bound, contents), f"{model}: {base} of the tree, {what}")


def _replay(
    instant: Instant,
    later: list[Operation],
    sync: Operation,
    bound: dict[tuple[int, str], int | None],
) -> None:
    """Do what the log of a sync says of names that the tree does not have yet."""
    missing = [op for op in later if op.ended < sync.begun]
    logged = {sync.syncs}
    for op in reversed(missing):  # the directories above, as far as they are new
        logged |= {one.directory for one in op.bindings if one.node in logged}
    above = (logged & instant.recording.directories) - {sync.syncs}
    for op in missing:
        # A file's names come and go with it; the log of a directory has all names in it.
        inside = any(one.directory == sync.syncs for one in op.bindings)
        if op.node == sync.syncs or op.node in above or inside:
            bound |= {(one.directory, one.name): one.node for one in op.bindings}
