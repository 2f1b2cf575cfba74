"""Which parts of a checkpoint are loaded into which objects, as its metadata decides it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from pyckpt.dcp.renaming import Rename, moved, renamed
from pyckpt.dcp.report import some
from pyckpt.errors import LoadError, PyckptError
from pyckpt.format.paths import paths
from pyckpt.speaking import for_all
from pyckpt.train.state.claims import Claims
from pyckpt.train.state.entry import Entry, ValueEntry
from pyckpt.train.state.modules import ModuleEntry
from pyckpt.train.state.optimizers import OptimizerEntry
from pyckpt.train.state.saved import Path, Policy, tree

__all__ = ["LoadPlan", "blamed_on", "claimed", "spare"]

_logger = logging.getLogger("pyckpt")


class LoadPlan:
    """The plan of one rank's load, by the checkpoint's metadata. ``spared`` are the names of
    objects that are not loaded, and ``claims`` the memory of objects."""

    def __init__(
        self,
        entries: list[Entry],
        reader: StorageReader,
        policy: Policy,
        rename: Rename | None,
        spared: Sequence[str],
        claims: Claims,
    ) -> None:
        by_name = {entry.name: entry for entry in entries}
        for entry in entries:
            entry.policy, entry.rename, entry.claims = policy, rename, claims

        def path_of(key: str, path: Path) -> Path:
            before = path
            if rename is not None:
                path = moved(key, path, rename(key), by_name)
            entry = by_name.get(str(path[0]))
            if entry is None or len(path) == 1:
                return path
            rest = path[1:] if rename is None or path != before else entry.translated(path[1:])
            return (path[0], *entry.live(rest))

        original = reader.read_metadata()
        metadata = renamed(original, paths(original), path_of)
        saved = tree(metadata)
        absent = [entry for entry in entries if entry.name not in saved]
        self.spared = [*spared, *(entry.name for entry in absent if _is_kept(entry))]
        self.absent = [entry.name for entry in absent if not _is_kept(entry)]
        if self.absent and policy.missing == "error":
            raise LoadError(
                f"not in the checkpoint: {some(self.absent, 20)}; it has {some(saved, 20)}",
                missing=tuple(self.absent),
            )
        self.entries = [entry for entry in entries if entry.name in saved]
        self.states = {}
        mismatched: set[int] = set()
        # Optimizers come last: the others decide which parameters stay as they are, and optimizers
        # keep the state of these.
        for entry in sorted(self.entries, key=lambda one: isinstance(one, OptimizerEntry)):
            with blamed_on(entry.name, OSError):
                if isinstance(entry, OptimizerEntry):
                    entry.leave(mismatched)
                template = entry.template(saved[entry.name])
            if not entry.stays:
                self.states[entry.name] = template
            mismatched |= entry.mismatched
        self._missing = policy.missing
        self.settle(saved)
        self._by_name = {entry.name: entry for entry in self.entries}
        self._paths = paths(metadata)
        wanted = {
            key: item
            for key, item in metadata.state_dict_metadata.items()
            if self._wants(self._paths[key])
        }
        self.reader: Any = _Narrowed(reader, replace(metadata, state_dict_metadata=wanted))

    def settle(self, found: Mapping[str, Any]) -> None:
        """Apply the policy to keys of plain dicts that were not saved. ``found`` are the saved
        keys: those in the metadata at first, and later all that were loaded."""
        self.kept = [
            key
            for entry in self.entries
            if isinstance(entry, ValueEntry) and not entry.stays
            for key in entry.absent(found[entry.name])
        ]
        if self.kept and self._missing == "error":
            raise LoadError(
                f"keys of the state that the checkpoint does not have ({len(self.kept)}): "
                f"{some(self.kept, 20)}; pass missing='keep' to leave them as they are",
                missing=tuple(self.kept),
            )

    def judge(self) -> None:
        """Look at what was loaded, before any object is restored.

        Raises:
            LoadError: it lacks keys, or a tensor that shares memory with another cannot hold what
                it has to.
        """
        self.settle(self.states)
        for entry in self.entries:
            if isinstance(entry, ValueEntry) and not entry.stays:
                entry.compare(self.states[entry.name])
        self._tell_parted()

    def _tell_parted(self) -> None:
        parted = {
            key: other
            for entry in self.entries
            if isinstance(entry, ValueEntry)
            for key, other in entry.parted.items()
        }
        if parted:
            _logger.log(
                for_all(logging.WARNING),
                "%d of the tensors in plain values share memory with others of the state, and get "
                "memory of their own: %s",
                len(parted),
                some([f"{key} ({other})" for key, other in parted.items()], 20),
            )

    def create(self, key: str, item: TensorStorageMetadata) -> torch.Tensor | None:
        name, *rest = self._paths[key]
        return self._by_name[str(name)].create(tuple(rest), item)

    def _wants(self, path: Path) -> bool:
        entry = self._by_name.get(str(path[0]))
        if entry is None:
            return True
        return not entry.stays and (len(path) == 1 or entry.wants(path[1:]))


class _Narrowed:
    """A reader with metadata that is reduced to the items that this rank loads."""

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader = reader
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def claimed(entries: Sequence[Entry]) -> Claims:
    """What modules and optimizers claim, whether they are loaded or stay as they are."""
    claims = Claims()
    # Modules first: what an optimizer shares with a parameter is the parameter.
    for entry in sorted(entries, key=lambda one: not isinstance(one, ModuleEntry)):
        entry.claims = claims
        entry.claim()
    return claims


def _is_kept(entry: Entry) -> bool:
    return isinstance(entry, ValueEntry) and entry.is_kept


def spare(entries: Sequence[Entry], keep: Sequence[str]) -> list[str]:
    """Mark the plain values to keep; return the names of other objects to keep."""
    if isinstance(keep, str):
        raise TypeError(f"{keep = } must be a sequence of names, such as ({keep!r},).")
    by_name = {entry.name: entry for entry in entries}
    spared = []
    for key in keep:
        # Names may have dots, too.
        name = max((n for n in by_name if key == n or key.startswith(f"{n}.")), key=len, default="")
        entry = by_name.get(name)
        path = tuple(key[len(name) + 1 :].split(".")) if key != name else ()
        if isinstance(entry, ValueEntry):
            try:
                entry.keep(path)
                continue
            except KeyError:
                pass
        elif entry is not None and not path:
            spared.append(name)
            continue
        raise ValueError(
            f"keep: {key!r} is neither the name of an object of the state ({some(by_name, 20)}), "
            "nor that of a value in a plain dict of it"
        )
    return spared


@contextmanager
def blamed_on(name: str, kind: type[Exception]) -> Iterator[None]:
    """Raise errors of this kind as a LoadError that names the object, so that they are not taken
    for errors of reading the checkpoint."""
    try:
        yield
    except PyckptError:
        raise
    except kind as error:
        raise LoadError(f"{name}: {type(error).__name__}: {error}") from error
