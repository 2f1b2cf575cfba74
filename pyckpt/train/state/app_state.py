"""AppState: the objects of a training loop, as one state for DCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from pyckpt.dcp.load import load
from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.renaming import Rename
from pyckpt.dcp.report import LoadReport, some
from pyckpt.dcp.together import together
from pyckpt.train.state import values
from pyckpt.train.state.entry import Entry, ValueEntry
from pyckpt.train.state.forwards import written_in_forward
from pyckpt.train.state.kinds import entry_of, is_rng, optimizers_in, restore_turn
from pyckpt.train.state.load_plan import LoadPlan, blamed_on, claimed, spare
from pyckpt.train.state.modules import Trainable, is_fsdp1, quiet, reshard
from pyckpt.train.state.naming import tensor_names
from pyckpt.train.state.optimizers import optimizer_entry
from pyckpt.train.state.saved import Policy, Rank

__all__ = ["AppState"]


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

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the modules in the state."""
        for module in self._modules().values():
            yield from module.parameters()

    @property
    def written_in_forward(self) -> list[torch.Tensor]:
        """The parameters that forward passes change, too, and not only the optimizers' steps. Of
        FSDP2's modules, those that are in them now: ask after ``state_dict``."""
        return written_in_forward(self._objects.values())

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the live tensors, in dicts by name. Collective if some objects are
        (FSDP1 modules, consolidated metrics).

        Raises:
            TypeError: an object has a value that could not be loaded again, or a tensor on the meta
                device, which has no values.
        """
        entries = self._entries()
        states = {entry.name: entry.state() for entry in sorted(entries, key=is_rng)}
        values.refuse_meta(states)
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
        spare(entries, keep)

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
        share_reads: bool | None = None,
        check: Callable[[LoadReport, Metadata], LoadReport] | None = None,
    ) -> LoadReport:
        """Restore the objects from a checkpoint, saved on any number of ranks. Collective.

        Modules keep their tensors, and optimizers their devices and flags; optimizer state may be
        new tensors. Plain dicts and
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
                checkpoint: raise a `LoadError`, or "keep" them and their optimizer state. The same
                holds for tensors in plain values that require gradients, or are DTensors. Other
                tensors there become what was saved, unless this is "keep".
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
            # Apart, since objects may use collectives when they are restored: a rank that goes on
            # while another one fails would wait for it there.
            together(lambda: self._judge(plan), process_group=self._group, doing="restoring")
            together(lambda: self._restore(plan), process_group=self._group, doing="restoring")
        kept = [key for entry in plan.entries for key in entry.kept]
        stay = {entry.name for entry in plan.entries if entry.stays}
        loaded = [key for key in report.loaded if key not in stay] if stay else report.loaded
        return replace(
            report,
            loaded=[*loaded, *(key for entry in plan.entries for key in entry.tied)],
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
        optimizers = optimizers_in(self._objects)
        named = tensor_names(
            {name: value for name, value in self._objects.items() if isinstance(value, dict)}
        )
        others = {id(optimizer) for optimizer in optimizers.values()}
        return [
            optimizer_entry(name, value, modules, others, named)
            if name in optimizers
            else entry_of(name, value, rank)
            for name, value in self._objects.items()
        ]

    def _plan(
        self, reader: StorageReader, policy: Policy, rename: Rename | None, keep: Sequence[str]
    ) -> LoadPlan:
        with blamed_on("the state", OSError):
            entries = self._entries()
        spared = spare(entries, keep)
        wanted = [entry for entry in entries if entry.name not in spared]
        plan = LoadPlan(wanted, reader, policy, rename, spared, claimed(entries))
        self._refuse_fixed(plan)
        return plan

    def _judge(self, plan: LoadPlan) -> None:
        plan.judge()
        self._refuse_fixed(plan)

    def _refuse_fixed(self, plan: LoadPlan) -> None:
        if isinstance(self._objects, MutableMapping):
            return
        fixed = [one.name for one in plan.entries if isinstance(one, ValueEntry) and one.fixed]
        if fixed:
            raise TypeError(
                f"{some(fixed, 20)} can only be restored into a dict that can be changed, and "
                f"{type(self._objects).__name__} cannot"
            )

    def _restore(self, plan: LoadPlan) -> None:
        # Schedulers may look at their optimizers, and optimizers at their parameters.
        for entry in sorted(plan.entries, key=restore_turn):
            if entry.stays:
                continue
            with blamed_on(entry.name, Exception):
                entry.restore(plan.states[entry.name])
            if isinstance(entry, ValueEntry):
                self._put(entry.name, entry.value)

    def _put(self, name: str, value: Any) -> None:
        if self._objects[name] is value:
            return
        if not isinstance(self._objects, MutableMapping):
            raise TypeError(f"{name} was saved as something else, and there is no place to put it")
        self._objects[name] = value
