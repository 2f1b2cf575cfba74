"""What a rank knows, from save to save, of the parts of its state that do not change.

The rule is proof, not trust: a save takes an earlier file for a tensor only if the tensor's bytes
have the hash of those that were written. Where the bytes are hashed decides what is not done:

- Tensors in host memory that were declared frozen are hashed in the call, before training goes on;
  with ``watches`` those whose pages the kernel knows to be unwritten have the last one
  (`HashedMemory`). So their hash is that of the state at the call, whatever the program does to
  them afterwards, and they need not be copied. The identity of their memory and the version counter
  that autograd keeps are the hint: a tensor whose hint has changed is not hashed in the call, since
  it has probably changed, too. The hint proves nothing: ``parameter.data.add_(1)`` does not count.
- All others (on a GPU; with another hint; in the first save of a plan; with ``detect``) are copied
  like everything else, and the copies are hashed in the background. Then only the writing is saved.

Hashing live tensors in the background would save more, and is wrong: a program that merges adapters
into its base, saves, and takes them out again would have the base saved as it was before.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from pyckpt.dcp.hashed_memory import HashedMemory
from pyckpt.dcp.hashing import can_be_hashed, hash_function, stride_of
from pyckpt.dcp.leaves import local_tensor
from pyckpt.dcp.plans import KnownPlan
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.commit import frozen_file_name
from pyckpt.format.metadata import StorageInfo
from pyckpt.locks import fork_safe_lock

__all__ = ["COUNT", "Check", "Frozen", "FrozenSave", "KnownItem"]

Check = Callable[[Path, Sequence["KnownItem"]], Iterator["KnownItem | None"]]
"""Reads items of a checkpoint from the disk, and raises unless they have their checksums and
hashes. Yields after each piece: the item that is read to its end, if there is one."""

COUNT = "xxh3_checkpoints"
"""The attribute of a place that says how many checkpoints have had its file."""

_USED_MIN = 0.5
"""A file of which less than this share is still used is written anew, to give the rest back."""


@dataclass(frozen=True)
class KnownItem:
    """A part of a tensor that a file of the last checkpoint has."""

    index: MetadataIndex
    info: StorageInfo
    dtype: torch.dtype
    size: torch.Size
    hash: str

    @property
    def file(self) -> str:
        """The name of the file."""
        name: str = self.info.relative_path
        return name

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor with the same bytes would be saved as this is."""
        return (
            tensor.dtype == self.dtype
            and tensor.shape == self.size
            and stride_of(tensor) == vars(self.info).get("payload_stride")
        )


@dataclass
class _File:
    """A file of frozen parts in the last checkpoint."""

    size: int
    checkpoints: int
    """How many have had it since it was written."""
    unverified: int | None
    """How many saves ago its checksums were read; None: never."""
    is_usable: bool = True
    """Whether the next checkpoint may have it."""
    read: set[MetadataIndex] = field(default_factory=set)
    """What an interrupted look at its checksums has come to."""


class _Hint(NamedTuple):
    address: int
    storage: int
    version: int


def _hint_of(tensor: torch.Tensor) -> _Hint:
    # Inference tensors have no version counter.
    version = -1 if tensor.is_inference() else tensor._version
    return _Hint(tensor.data_ptr(), tensor.untyped_storage()._cdata, version)


class Frozen:
    """What a rank knows of its frozen parts in the last checkpoint. Saves come one after another.

    The thread that saves changes it, and `begin` reads it in the thread that trains.

    Args:
        check: reads items from the disk.
        room: how many bytes a save may copy after its call.
        verify_every: a file is linked only if its checksums were read within so many saves.
        fresh_every: every so many saves a file is written anew.
        watches: whether memory that the kernel knows to be unwritten is not hashed again, but once
            in ``verify_every`` saves.

    Raises:
        ImportError: xxhash is not installed.
    """

    def __init__(
        self,
        check: Check,
        *,
        verify_every: int,
        fresh_every: int,
        room: Callable[[], int],
        watches: bool = False,
    ) -> None:
        hash_function()
        self._memory = HashedMemory(anew_every=verify_every, watches=watches)
        self._check = check
        self._verify_every = verify_every
        self._fresh_every = fresh_every
        self._room = room
        self._begun = 0
        self._lock = fork_safe_lock()
        self._closing = threading.Event()
        self._directory: Path | None = None
        self._items: dict[str, list[KnownItem]] = {}
        self._files: dict[str, _File] = {}
        self._hints: dict[MetadataIndex, _Hint] = {}
        self._hashes: dict[MetadataIndex, str] = {}

    def begin(self, declared: Collection[str], *, detects: bool) -> FrozenSave:
        """A save begins.

        Args:
            declared: keys of what is frozen.
            detects: whether all other tensors are looked at, too.
        """
        with self._lock:
            self._begun += 1
            usable = {name: file.size for name, file in self._files.items() if file.is_usable}
            items = {
                key: kept
                for key, known in self._items.items()
                if (kept := [one for one in known if one.file in usable])
            }
            return FrozenSave(
                self,
                memory=self._memory,
                directory=self._directory,
                known=items,
                number=self._begun,
                room=self._room,
                file_sizes=usable,
                ages={name: file.checkpoints for name, file in self._files.items()},
                hints=dict(self._hints),
                hashes=self._hashes,
                declared=declared,
                detects=detects,
            )

    def adopt(self, directory: Path, items: Sequence[KnownItem]) -> None:
        """Begin with the checkpoint of another process.

        Args:
            directory: of the checkpoint.
            items: what this rank may take from it.

        Raises:
            OSError: a file that it names is not there.
        """
        files = {}
        for name in {one.file for one in items}:
            status = (directory / name).stat()
            # Each checkpoint that has it has a name of it, and retention may have removed some.
            counted = (vars(one.info).get(COUNT, 0) for one in items if one.file == name)
            had = max(status.st_nlink, *counted)
            files[name] = _File(status.st_size, had, None, had < self._fresh_every)
        with self._lock:
            self._take(directory, items)
            self._files = files

    def committed(self, directory: Path, save: FrozenSave) -> None:
        """A save was committed in a directory."""
        if not save.is_written:
            return
        with self._lock:
            before = self._files
            self._take(directory, save.items)
            self._hashes = save.hashes
            self._hints = {one.index: hint for one in save.items if (hint := save.hint(one.index))}
            used: dict[str, int] = defaultdict(int)
            for one in save.items:
                used[one.file] += one.info.length
            self._files = {}
            for name, size in save.sizes.items():
                file = before.get(name)
                if file is None or name in save.copied:
                    file = _File(size, 0, None)
                elif file.unverified is not None:
                    file.unverified += 1
                file.checkpoints += 1
                file.is_usable = (
                    file.checkpoints < self._fresh_every and used[name] >= _USED_MIN * size
                )
                self._files[name] = file

    def _take(self, directory: Path, items: Iterable[KnownItem]) -> None:
        self._directory = directory
        self._items = {}
        for one in items:
            self._items.setdefault(one.index.fqn, []).append(one)

    # --- verifying; on the thread that saves ---

    def ensure_verified(self, directory: Path, name: str) -> None:
        """Read a file's checksums, if that was not done within the last saves.

        Raises:
            OSError, CorruptCheckpoint: it cannot be read, or is damaged. If it is damaged, it is
                not used again.
        """
        self._verify(directory, name, self._verify_every, lambda: False)

    def give_up(self, name: str) -> None:
        """Use a file no more."""
        with self._lock:
            if name in self._files:
                self._files[name].is_usable = False

    def _verify(
        self, directory: Path, name: str, every: int, is_wanted: Callable[[], bool]
    ) -> None:
        """Read what was not read within so many saves. Stops after a piece if it ``is_wanted``
        elsewhere; the next call goes on where this one stopped."""
        with self._lock:
            file = self._files.get(name)
            if file is None:
                raise FileNotFoundError(2, "no such file of frozen parts", name)
            is_known = file.unverified is not None and file.unverified < every
            items = [
                one
                for known in self._items.values()
                for one in known
                if one.file == name and one.index not in file.read
            ]
        if is_known:
            return
        try:
            with closing(self._check(directory, items)) as pieces:  # type: ignore[type-var]
                for item in pieces:
                    if item is not None:
                        file.read.add(item.index)
                    if is_wanted():
                        return
        except CorruptCheckpoint:
            self.give_up(name)
            raise
        with self._lock:
            file.unverified = 0
            file.read.clear()

    def verify_next(self, after: FrozenSave) -> list[tuple[Path, Exception]]:
        """Read the files that the next saves could otherwise link only after reading them. Called
        when a save is over. Begins before it must, and stops for a save that comes meanwhile, so
        that few saves wait for it. Returns what is damaged, or cannot be read."""

        def is_wanted() -> bool:
            return self._closing.is_set() or self._begun > after.number

        every = self._verify_every - self._verify_every // 4
        with self._lock:
            directory = self._directory
            names = [name for name, file in self._files.items() if file.is_usable]
        failed: list[tuple[Path, Exception]] = []
        for name in names if directory is not None else ():
            if is_wanted():
                break
            assert directory is not None
            try:
                self._verify(directory, name, every, is_wanted)
            except Exception as error:
                failed.append((directory / name, error))
        return failed

    def close(self) -> None:
        """Verify and watch nothing more."""
        self._closing.set()
        self._memory.close()


class FrozenSave:
    """The frozen parts in one save of a rank.

    Attributes:
        declared: keys of what is frozen.
        detects: whether all other tensors are looked at, too.
        directory: of the checkpoint whose files may be linked; None if there is none.
        proven: what was hashed in the call and has not changed: the item, and the live memory.
        is_written: whether this rank has written its part. Then the others are known:
        items: what the save has in files of frozen parts.
        hashes: of all tensors that were looked at.
        sizes: of the files of frozen parts.
        number: of the save, among those that have begun.
        copied: names of the files that were copied, since they could not be linked.
    """

    def __init__(
        self,
        owner: Frozen,
        *,
        memory: HashedMemory,
        directory: Path | None,
        known: dict[str, list[KnownItem]],
        number: int,
        room: Callable[[], int],
        file_sizes: dict[str, int],
        ages: dict[str, int],
        hints: dict[MetadataIndex, _Hint],
        hashes: dict[MetadataIndex, str],
        declared: Collection[str],
        detects: bool,
    ) -> None:
        self.owner = owner
        self.directory = directory
        self.declared = declared
        self.detects = detects
        self.is_written = False
        self.items: list[KnownItem] = []
        self.hashes: dict[MetadataIndex, str] = {}
        self.sizes: dict[str, int] = {}
        self.copied: set[str] = set()
        self.proven: dict[MetadataIndex, tuple[KnownItem, torch.Tensor]] = {}
        self.number = number
        self._memory = memory
        self._room = room
        self._ages = ages
        self._known = known
        self._file_sizes = file_sizes
        self._hints_before = hints
        self._hashes_before = hashes
        self._hints: dict[MetadataIndex, _Hint] = {}

    def names(self, rank: int, save_id: str) -> tuple[str, ...]:
        """The names of the files of frozen parts that this save may make, linked ones included."""
        links = {one.file for known in self._known.values() for one in known}
        return (frozen_file_name(rank, save_id), *sorted(links))

    @property
    def room(self) -> int:
        """How many bytes may be copied after the call."""
        return self._room()

    def counted(self, known: KnownItem) -> StorageInfo:
        """Where an item of an earlier file lies, with the count of checkpoints that have had it."""
        info = copy(known.info)
        count = 0 if known.file in self.copied else self._ages.get(known.file, 0)
        vars(info)[COUNT] = count + 1
        return info

    def known(self, index: MetadataIndex) -> KnownItem | None:
        """What the last checkpoint has of an item, in a file that may be used."""
        return next((one for one in self._known.get(index.fqn, ()) if one.index == index), None)

    def without_ends(self, items: Iterable[KnownItem]) -> set[str]:
        """Of the files that have these items, those that end with another one.

        A reader takes a file for damaged if it is longer than the items that the checkpoint has in
        it. So the next checkpoint cannot have such a file, unless the last item is in it, too.
        """
        ends: dict[str, int] = defaultdict(int)
        for one in items:
            ends[one.file] = max(ends[one.file], one.info.offset + one.info.length)
        return {name for name, end in ends.items() if end != self._file_sizes.get(name)}

    def hint(self, index: MetadataIndex) -> _Hint | None:
        """Of an item's live memory, at the call; None if it was not looked at."""
        return self._hints.get(index)

    def stood_still(self, index: MetadataIndex, found: str) -> bool:
        """Whether an item had this hash in the last save, too."""
        return self._hashes_before.get(index) == found

    def prove(self, plan: KnownPlan, leaves: Sequence[Any]) -> set[int]:
        """Hash what is declared, in host memory, and was in the last checkpoint. Called in the call
        that saves. Returns the positions of the leaves that have not changed."""
        of_leaf: dict[int, list[WriteItem]] = defaultdict(list)
        for item, i in zip(plan.final.items, plan.order, strict=True):
            if item.index.fqn in self._known and item.index.fqn in self.declared:
                of_leaf[i].append(item)
        found: list[tuple[int, KnownItem, torch.Tensor]] = []
        for i, items in of_leaf.items():
            known = self.known(items[0].index) if len(items) == 1 else None
            memory = _memory_of(leaves[i])
            if known is None or memory is None or memory.device.type != "cpu":
                continue
            if not can_be_hashed(memory) or not known.is_of(memory):
                continue
            hint = self._hints[known.index] = _hint_of(memory)
            if self._hints_before.get(known.index, hint) == hint:
                found.append((i, known, memory))
        hashes = self._memory.hashes([memory for _, _, memory in found])
        same = [one for one, hash in zip(found, hashes, strict=True) if one[1].hash == hash]
        unsure = self.without_ends(known for _, known, _ in same)
        same = [one for one in same if one[1].file not in unsure]
        self.proven = {known.index: (known, memory) for _, known, memory in same}
        return {i for i, _, _ in same}


def _memory_of(leaf: Any) -> torch.Tensor | None:
    if isinstance(leaf, DTensor):
        return local_tensor(leaf)
    return leaf if isinstance(leaf, torch.Tensor) else None
