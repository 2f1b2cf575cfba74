"""AppState: the objects of a training loop, as one state for DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from pyckpt.dcp.load import load
from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.renaming import Rename, moved, renamed
from pyckpt.dcp.report import LoadReport, some
from pyckpt.dcp.together import together
from pyckpt.errors import LoadError, PyckptError
from pyckpt.format.paths import paths
from pyckpt.optim.wrappers import unwrapped
from pyckpt.train.state.entry import Entry, GradScalerEntry, StatefulEntry, ValueEntry
from pyckpt.train.state.modules import ModuleEntry, Trainable, is_fsdp1, quiet, reshard
from pyckpt.train.state.naming import tensor_names
from pyckpt.train.state.optimizers import OptimizerEntry, optimizer_entry
from pyckpt.train.state.per_rank import PerRank, RankEntry, RankState
from pyckpt.train.state.rng import RngState
from pyckpt.train.state.saved import Path, Policy, Rank, tree

__all__ = ["AppState"]

# Objects that read data, since each rank reads at another place.
_PER_RANK = (torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler)
_PER_RANK_PACKAGES = ("torchdata",)


class AppState:
    """The objects of a training state, as `torch.distributed.checkpoint` saves and loads them.

    - Modules, wrapped in whatever way, by the fully qualified names of their parameters.
    - Optimizers, by the names of their parameters in the modules that are in the state too.
    - Dataloaders, datasets and samplers with ``state_dict``: each rank's own, as `PerRank` does.
    - `PerRank`, `RngState` and `MetricState`.
    - Anything else with ``state_dict`` and ``load_state_dict``.
    - Plain values: numbers, strings, None, tensors, numpy arrays, and dicts, lists, tuples and sets
      of them.

    Other values than those per rank must be DTensors, or equal on all ranks: one rank's are saved.

    Args:
        objects: by name. Not copied: each method uses the present content.
        process_group: the ranks that save and load together, default all.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._objects = objects
        self._group = process_group

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers in the state."""
        return [one for one in self._objects.values() if isinstance(one, torch.optim.Optimizer)]

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the live tensors, in dicts by name. Collective if some objects are
        (FSDP1 modules, consolidated metrics).

        Raises:
            TypeError: an object has a value that could not be loaded again.
        """
        entries = self._entries()
        states = {entry.name: entry.state() for entry in sorted(entries, key=_is_rng)}
        return {entry.name: states[entry.name] for entry in entries}

    def check(self, *, keep: Sequence[str] = ()) -> None:
        """Raise the errors of ``state_dict`` that can be found early, rather than at the first
        save, hours later. Does not communicate.

        Args:
            keep: as ``load`` will get it.

        Raises:
            TypeError: as ``state_dict``.
            ValueError: as ``load``.
        """
        entries = self._entries()
        for entry in entries:
            entry.check()
        _spare(entries, keep)

    def load(
        self,
        reader: StorageReader,
        *,
        missing: Literal["error", "keep"] = "error",
        keep: Sequence[str] = (),
        unexpected: Literal["error", "ignore"] = "error",
        mismatched: Literal["error", "keep"] = "error",
        rename: Rename | None = None,
        allow: Sequence[Allowed] = (),
        share_reads: bool = False,
        check: Callable[[LoadReport, Metadata], LoadReport] | None = None,
    ) -> LoadReport:
        """Restore the objects from a checkpoint, saved on any number of ranks. Collective.

        Modules and optimizers keep their tensors, their devices and their flags. Plain dicts and
        lists are filled in place; any other plain value is written into the ``objects``. Saved
        objects under other names are not loaded.

        Args:
            reader: of the checkpoint.
            missing: what to do about objects, parameters, metrics, and keys of plain dicts that
                the checkpoint does not have: raise a `LoadError`, or "keep" them as they are.
            keep: names of objects, and of values in plain dicts ("config.total_epochs"), that stay
                as they are in ``objects``.
            unexpected: what to do about parameters, optimizer state and metrics that the
                checkpoint has and the objects lack: raise a `LoadError`, or "ignore" them.
            mismatched: what to do about parameters and buffers that have another shape in the
                checkpoint: raise a `LoadError`, or "keep" them and their optimizer state.
            rename: called with each key of the checkpoint (``"model.head.weight"``), returns the
                key that it has in the state, which may be the same. A new name of a module's
                parameter also applies to its optimizer state.
            allow, share_reads: as for `pyckpt.load`.
            check: called when everything is read, before any ``load_state_dict``, with the report
                of this rank and the checkpoint's metadata; raises on all ranks, or on none.

        Returns:
            The report of this rank.

        Raises:
            TypeError: ``objects`` cannot be written to, and has plain values.
            ValueError: a name to ``keep`` is neither that of an object nor of a value in a plain
                dict.
            Exception: as `pyckpt.load`, on all ranks alike. ``LoadError`` also for objects that
                cannot be brought from one number of ranks to another, and for errors of an object's
                own ``load_state_dict``. An ``OSError`` always concerns the checkpoint's files. For
                errors that the checkpoint's metadata shows, nothing has been changed.
        """
        policy = Policy(missing, unexpected, mismatched)
        flat = any(is_fsdp1(module) for module in self._modules().values())
        with quiet() if flat else nullcontext():
            plan = together(
                lambda: self._plan(reader, policy, rename, keep),
                process_group=self._group,
                doing="loading",
            )
            report = load(
                plan.states,
                reader=plan.reader,
                missing=policy.missing,
                allow=allow,
                create=plan.create,
                process_group=self._group,
                share_reads=share_reads,
            )
            if check is not None:
                report = check(report, plan.reader.read_metadata())
            together(lambda: self._restore(plan), process_group=self._group, doing="restoring")
        kept = [key for entry in plan.entries for key in entry.kept]
        return replace(
            report,
            kept=[*report.kept, *plan.absent, *plan.kept, *plan.spared, *kept],
            unexpected=[
                *report.unexpected,
                *(key for entry in plan.entries for key in entry.ignored),
            ],
            differing=[
                one
                for entry in plan.entries
                if isinstance(entry, ValueEntry)
                for one in entry.differing
            ],
        )

    def _modules(self) -> dict[str, nn.Module]:
        return {
            name: value.module if isinstance(value, Trainable) else value
            for name, value in self._objects.items()
            if isinstance(value, nn.Module | Trainable)
        }

    def _entries(self) -> list[Entry]:
        modules = self._modules()
        reshard(modules.values())
        rank = Rank.of(self._group)
        optimizers = _optimizers(self._objects)
        named = tensor_names(
            {name: value for name, value in self._objects.items() if isinstance(value, dict)}
        )
        others = {id(optimizer) for optimizer in optimizers.values()}
        return [
            optimizer_entry(name, value, modules, others, named)
            if name in optimizers
            else _entry(name, value, rank)
            for name, value in self._objects.items()
        ]

    def _plan(
        self, reader: StorageReader, policy: Policy, rename: Rename | None, keep: Sequence[str]
    ) -> _Plan:
        with _blamed_on("the state", OSError):
            entries = self._entries()
        spared = _spare(entries, keep)
        wanted = [entry for entry in entries if entry.name not in spared]
        plan = _Plan(wanted, reader, policy, rename, spared)
        if not isinstance(self._objects, MutableMapping):
            fixed = [one.name for one in plan.entries if isinstance(one, ValueEntry) and one.fixed]
            if fixed:
                raise TypeError(
                    f"{some(fixed, 20)} can only be restored into a dict that can be changed, and "
                    f"{type(self._objects).__name__} cannot"
                )
        return plan

    def _restore(self, plan: _Plan) -> None:
        plan.settle(plan.states)
        # Schedulers may look at their optimizers, and optimizers at their parameters.
        for entry in sorted(plan.entries, key=_turn):
            with _blamed_on(entry.name, Exception):
                entry.restore(plan.states[entry.name])
            if isinstance(entry, ValueEntry):
                self._put(entry.name, entry.value)

    def _put(self, name: str, value: Any) -> None:
        if self._objects[name] is value:
            return
        if not isinstance(self._objects, MutableMapping):
            raise TypeError(f"{name} was saved as something else, and there is no place to put it")
        self._objects[name] = value


class _Plan:
    """The plan of one rank's load, by the checkpoint's metadata. ``spared`` are the names of
    objects that are not loaded."""

    def __init__(
        self,
        entries: list[Entry],
        reader: StorageReader,
        policy: Policy,
        rename: Rename | None,
        spared: Sequence[str],
    ) -> None:
        by_name = {entry.name: entry for entry in entries}
        for entry in entries:
            entry.policy, entry.rename = policy, rename

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
        # Modules come first: they decide which parameters stay as they are, and optimizers keep the
        # state of these.
        for entry in sorted(self.entries, key=_turn):
            with _blamed_on(entry.name, OSError):
                if isinstance(entry, OptimizerEntry):
                    entry.leave(mismatched)
                self.states[entry.name] = entry.template(saved[entry.name])
            if isinstance(entry, ModuleEntry):
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
            if isinstance(entry, ValueEntry)
            for key in entry.absent(found[entry.name])
        ]
        if self.kept and self._missing == "error":
            raise LoadError(
                f"keys of the state that the checkpoint does not have ({len(self.kept)}): "
                f"{some(self.kept, 20)}; pass missing='keep' to leave them as they are",
                missing=tuple(self.kept),
            )

    def create(self, key: str, item: TensorStorageMetadata) -> torch.Tensor | None:
        name, *rest = self._paths[key]
        return self._by_name[str(name)].create(tuple(rest), item)

    def _wants(self, path: Path) -> bool:
        entry = self._by_name.get(str(path[0]))
        return entry is None or len(path) == 1 or entry.wants(path[1:])


class _Narrowed:
    """A reader with metadata that is reduced to the items that this rank loads."""

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader = reader
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def _is_kept(entry: Entry) -> bool:
    return isinstance(entry, ValueEntry) and entry.is_kept


def _spare(entries: Sequence[Entry], keep: Sequence[str]) -> list[str]:
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
def _blamed_on(name: str, kind: type[Exception]) -> Iterator[None]:
    """Raise errors of this kind as a LoadError that names the object, so that they are not taken
    for errors of reading the checkpoint."""
    try:
        yield
    except PyckptError:
        raise
    except kind as error:
        raise LoadError(f"{name}: {type(error).__name__}: {error}") from error


def _turn(entry: Entry) -> int:
    if isinstance(entry, ModuleEntry):
        return 0
    return 3 if _is_rng(entry) else 2 if isinstance(entry, StatefulEntry) else 1


def _is_rng(entry: Entry) -> bool:
    """Whether an entry has the random number generators. They come last, since other objects may
    draw numbers while they are saved and restored."""
    return isinstance(entry, RankEntry) and isinstance(entry.value, RngState)


def _optimizers(objects: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name, each without wrappers that have no state of their own."""
    found = {}
    for name, value in objects.items():
        if not isinstance(value, nn.Module) and _is_stateful(value):
            inner = unwrapped(value)
            if isinstance(inner, torch.optim.Optimizer):
                found[name] = inner
    return found


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def _entry(name: str, value: Any, rank: Rank) -> Entry:
    if isinstance(value, RankState):
        return RankEntry(name, value, rank)
    if isinstance(value, nn.Module | Trainable):
        return ModuleEntry(name, value)
    if _is_stateful(value):
        if isinstance(value, _PER_RANK) or type(value).__module__.startswith(_PER_RANK_PACKAGES):
            return RankEntry(name, PerRank(value), rank)
        if isinstance(value, torch.amp.GradScaler):
            return GradScalerEntry(name, value)
        return StatefulEntry(name, value)
    return ValueEntry(name, value)
