"""LoadPlanner: decides what is read, where it goes, and says what did not fit.

It works under any StorageReader. On each rank it compares the state with the metadata, which holds
every key, so it needs no collectives beyond DCP's own. The caller's state is changed late:
containers when all ranks have planned (`finish_plan`), and a created tensor goes in when its data
has arrived (`commit_tensor`), so that a load that fails leaves no uninitialised tensors behind.
`pyckpt.load` also gives the containers back their old structure then.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.dcp import objects
from pyckpt.dcp.filling import TEMPORARY_BYTES
from pyckpt.dcp.leaves import is_checkpointable, is_sharded_tensor, whole_size, with_attributes
from pyckpt.dcp.read_items import (
    StayingItems,
    check_found,
    read_object,
    read_tensor,
    whole,
)
from pyckpt.dcp.renaming import wrappers_hint
from pyckpt.dcp.report import Conversion, LoadReport, Replacement, some
from pyckpt.dcp.template import Growth, Slot, Template, Undo, is_empty, place
from pyckpt.dcp.whole import KEYS
from pyckpt.errors import LoadError
from pyckpt.format.columns import columns_of, elements_of
from pyckpt.format.paths import path_of, paths
from pyckpt.locks import fork_safe_lock
from pyckpt.private import create_chunk_list, narrow_tensor_by_index
from pyckpt.timeline import named

__all__ = ["LoadPlanner"]

_KEYS_SHOWN = 50
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Create = Callable[[str, TensorStorageMetadata], torch.Tensor | None]


class LoadPlanner(DefaultLoadPlanner):
    """A DCP load planner that fills what it is given with all that was saved.

    Every container that the caller passes, at any depth, comes to hold what it held when saved.
    Dicts and lists are filled in place, so that references to them stay good. None, and an empty
    list, dict or tensor, stand for "whatever was saved"; a list takes the length it had. Tensors
    that the state has are loaded in place: a dtype that differs is converted, a shape that differs
    is an error. A value of another kind than saved (an int where a tensor was saved, a tensor where
    None was, a dict where a list was) gives way to what was saved. Top-level entries that the
    caller does not pass are not loaded. `report` tells of all of it.

    DCP records no empty dicts, though `pyckpt.save` does. So empty dicts at the end of a list that
    the caller passes may stay beyond its saved length.

    DCP saves the keys of dicts as strings. Where it creates a key, this planner makes it an int
    again if all keys that the dict has are ints, or if the dict is the ``state`` of an optimizer.

    Args:
        missing: what to do about keys of the state that the checkpoint does not have: "error" lists
            them all in a `LoadError`, "keep" leaves them as they are. With "keep", lists that are
            longer than saved also keep what they have beyond.
        unexpected: what to do about keys of the checkpoint, in containers that were passed, that
            the state does not have: "fill" creates them, "ignore" leaves them out and names them in
            the report, "error" lists them all in a `LoadError`. Only "fill" changes the structure
            of the state.
        mismatched: what to do about tensors that the checkpoint has in another shape: "error" lists
            them all in a `LoadError`, "keep" leaves them as they are.
        allow: classes and functions, beyond those that ``torch.load(weights_only=True)`` admits,
            that saved objects may contain; as for `torch.serialization.safe_globals`.
        device: where tensors go that have to be created, and those within objects that were saved
            from an accelerator.
        create: called as ``create(key, metadata)`` for each tensor that has to be created. Returns
            a tensor or DTensor of shape ``metadata.size``, or None for a plain tensor on
            ``device``. For DTensors, return
            ``torch.distributed.tensor.empty(metadata.size, dtype=metadata.properties.dtype,
            device_mesh=mesh, placements=placements)``.
    """

    def __init__(
        self,
        *,
        missing: Literal["error", "keep"] = "error",
        unexpected: Literal["fill", "ignore", "error"] = "fill",
        mismatched: Literal["error", "keep"] = "error",
        allow: Sequence[objects.Allowed] = (),
        device: torch.device | str = "cpu",
        create: Create | None = None,
    ) -> None:
        super().__init__()
        if missing not in ("error", "keep"):
            raise ValueError(f"missing must be 'error' or 'keep', not {missing!r}")
        if unexpected not in ("fill", "ignore", "error"):
            raise ValueError(f"unexpected must be 'fill', 'ignore' or 'error', not {unexpected!r}")
        self._missing = missing
        if mismatched not in ("error", "keep"):
            raise ValueError(f"mismatched must be 'error' or 'keep', not {mismatched!r}")
        self._unexpected = unexpected
        self._mismatched = mismatched
        self._allow = tuple(allow)
        self._device = torch.device(device)
        self._create = create
        self._lock = fork_safe_lock()
        self._report = LoadReport()
        self._items: Sequence[ReadItem] = []
        self._plain: _C.PlainReads | None = None
        self._undo = Undo()
        # Set by `pyckpt.load`, which knows the reader: whether it looks at no items of other ranks,
        # and whether it reads what is plain without an item for each.
        self._items_stay = False
        self._reads_plain = False

    @property
    def report(self) -> LoadReport:
        """What this rank's last load did. Verification and time are not the planner's to know:
        `pyckpt.load` fills them in."""
        assert self.metadata is not None
        nbytes = 0 if self._plain is None else self._plain.tensor_bytes
        for item in self._items:
            if item.type is LoadItemType.TENSOR:
                saved = self._saved[item.storage_index.fqn]
                assert isinstance(saved, TensorStorageMetadata)
                nbytes += item.lengths.numel() * saved.properties.dtype.itemsize
        report = self._report
        return replace(
            report,
            bytes=nbytes,
            # The order in which values are read is not the same in all ways to read.
            replaced=sorted(report.replaced),
            loaded=self._of_the_program(report.loaded),
            filled=self._of_the_program(report.filled),
            left_out=self._of_the_program(report.left_out),
        )

    def _of_the_program(self, names: list[str]) -> list[str]:
        """The keys without those of lists of true keys, which pyckpt saved beside some dicts."""
        assert self.metadata is not None
        return [
            name
            for name in names
            if not name.endswith(KEYS) or path_of(self.metadata, name)[-1] != KEYS
        ]

    # --- planning -----------------------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is None:
            raise ValueError("LoadPlanner needs the checkpoint's metadata")
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self._template = Template(state_dict)
        self.state_dict = self._template.values
        self.mappings = self._template.paths
        for name, value in self.state_dict.items():
            if is_sharded_tensor(value):
                from pyckpt.dcp import sharded_tensors

                self.state_dict[name] = sharded_tensors.flattened(name, value)
        self._slots: dict[str, Slot] = dict(self._template.slots)
        self._growth: Growth | None = None
        self._undo = Undo()
        # Created tensors that are not in the state yet, with the reads they wait for.
        self._pending: dict[str, int] = {}
        self._chunks: dict[Any, list[ChunkStorageMetadata]] = {}
        # What the checkpoint has of this rank's keys, but for those of `_plain`.
        self._saved: dict[str, STORAGE_TYPES] = {}
        self._plain = None

    def create_local_plan(self) -> LoadPlan:
        """Compare state and checkpoint, and list the reads.

        Raises:
            LoadError: keys are missing or unexpected and the policy is "error", or shapes differ,
                or tensors are complex in the checkpoint alone.
            CorruptCheckpoint: the metadata contradicts itself, or lacks a part of a tensor.
        """
        with named("plan"):
            return self._create_local_plan()

    def _create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        all_saved = self.metadata.state_dict_metadata
        values = self.state_dict
        report = self._report = LoadReport()
        others = self._take_plain()
        # Looked up once: what is not a dict may make what it gives.
        found = {name: all_saved.get(name) for name in others}
        missing = [name for name, item in found.items() if item is None]
        extra = [] if len(all_saved) + len(missing) == len(values) else self._sort_extra(report)
        saved = {name: item for name, item in found.items() if item is not None}
        saved |= {name: all_saved[name] for name in extra}
        self._saved = saved
        if missing or extra or self._is_numbered_otherwise():
            self._settle(missing, extra, report)

        to_create: list[tuple[str, torch.device]] = []
        present: list[str] = []
        self._match(present, to_create, report)
        if self._plain is not None:
            _note_plain(report, values, others)
        for name in extra:
            if isinstance(saved[name], TensorStorageMetadata):
                to_create.append((name, self._device))
            report.filled.append(name)
        for name, device in to_create:
            values[name] = self._new_tensor(name, device)
        self._refuse_complex([*present, *(name for name, _ in to_create)])
        return self._plan(present, [name for name, _ in to_create], extra, report)

    def _take_plain(self) -> Iterable[str]:
        """Take what is read without Python for each item. Returns the keys of the rest."""
        assert self.metadata is not None
        columns = columns_of(self.metadata) if self._reads_plain else None
        if columns is None or self.metadata.storage_data is None:
            return self.state_dict
        plain = _C.PlainReads(columns, object_bytes=TEMPORARY_BYTES)
        others = plain.take(self.state_dict)
        if len(plain):
            self._plain = plain
        return others

    def _sort_extra(self, report: LoadReport) -> list[str]:
        """Find saved keys that the state lacks: in its containers, or under other entries."""
        assert self.metadata is not None
        passed = {str(key) for key in self.original_state_dict}
        extra: list[str] = []
        for name in self.metadata.state_dict_metadata:
            if name not in self.state_dict:
                path = path_of(self.metadata, name)
                if self._unexpected != "fill" and path[-1] == KEYS:
                    continue
                inside = path[0] in passed
                (extra if inside else report.left_out).append(name)
        return extra

    def _is_numbered_otherwise(self) -> bool:
        """Whether the state has a list where a dict was saved, or the reverse: both have the same
        keys."""
        assert self.metadata is not None
        for depth, name in self._template.numbered:
            path, own = path_of(self.metadata, name), self._template.paths[name]
            is_alike = len(path) == len(own) and list(map(str, path)) == list(map(str, own))
            if is_alike and isinstance(path[depth], int) is not isinstance(own[depth], int):
                return True
        return False

    def _settle(self, missing: list[str], extra: list[str], report: LoadReport) -> None:
        """Apply the policies to ``missing`` and ``extra``; what of ``extra`` is not to be loaded is
        removed from it."""
        assert self.metadata is not None
        fill = self._unexpected == "fill"
        growth = Growth(
            self._template,
            self.original_state_dict,
            paths(self.metadata),
            missing,
            cut_lists=fill and self._missing == "error",
        )
        if extra and self._unexpected == "error":
            raise LoadError(
                f"keys of the checkpoint that the state does not have ({len(extra)}): "
                f"{some(extra, _KEYS_SHOWN)}",
                unexpected=tuple(extra),
            )
        explained = {*growth.taken, *growth.dropped}
        kept = [name for name in missing if name not in explained]
        unused = list(extra)
        if fill:
            self._growth = growth
            self._slots.update(growth.slots)
            report.replaced.extend(growth.replaced)
            report.dropped.extend(growth.dropped)
        else:
            report.unexpected.extend(extra)
            extra.clear()
            # Not missing: saved as something else, which was not to be filled in.
            report.kept.extend(name for name in missing if name in explained)
        if kept and self._missing == "error":
            raise LoadError(
                f"keys of the state that the checkpoint does not have ({len(kept)}): "
                f"{some(kept, _KEYS_SHOWN)}{self._hint(kept, unused)}",
                missing=tuple(kept),
            )
        report.kept.extend(kept)
        for name in missing:
            del self.state_dict[name]

    def _hint(self, missing: list[str], unused: list[str]) -> str:
        """What may be wrong where keys are missing; empty, or to be appended to an error."""
        assert self.metadata is not None
        saved = {str(path[0]): None for path in paths(self.metadata).values()}
        absent = {str(self._template.paths[name][0]): None for name in missing}
        absent = {name: None for name in absent if name not in saved}
        hint = wrappers_hint(missing, unused)
        if absent:
            hint += f"; not in the checkpoint: {some(absent, _KEYS_SHOWN)}; it has "
            hint += some(saved, _KEYS_SHOWN)
        return hint

    def _match(
        self, present: list[str], to_create: list[tuple[str, torch.device]], report: LoadReport
    ) -> None:
        """Sort the keys that both have into those that can be read in place and those that
        cannot."""
        mismatched: dict[str, str] = {}
        loaded, filled = report.loaded, report.filled
        for name, item in self._saved.items():
            if name not in self.state_dict:
                continue  # it is to be created
            value = self.state_dict[name]
            if isinstance(item, BytesStorageMetadata):
                present.append(name)
                loaded.append(name)
            elif not isinstance(value, torch.Tensor):
                to_create.append((name, self._device))
                (filled if is_empty(value) else loaded).append(name)
            elif (size := whole_size(value)) != item.size:
                if value.numel() or _is_sharded(value):
                    mismatched[name] = f"{name}: {tuple(item.size)} is not {tuple(size)}"
                    continue
                device = self._device if _is_meta(name, value) else value.device
                to_create.append((name, device))
                filled.append(name)
            elif _is_meta(name, value):
                to_create.append((name, self._device))
                filled.append(name)
            else:
                present.append(name)
                loaded.append(name)
                if value.dtype != item.properties.dtype:
                    report.converted.append(Conversion(name, item.properties.dtype, value.dtype))
        if mismatched and self._mismatched == "keep":
            for name in mismatched:
                report.kept.append(name)
                del self.state_dict[name]
        elif mismatched:
            raise LoadError(
                f"tensors of another shape in the checkpoint than in the state "
                f"({len(mismatched)}): {some(mismatched.values(), _KEYS_SHOWN)}",
                mismatched=tuple(mismatched),
            )

    def _refuse_complex(self, names: list[str]) -> None:
        """torch would drop the imaginary parts, and say so once a process."""
        lossy = [
            name
            for name in names
            if isinstance(item := self._saved[name], TensorStorageMetadata)
            and item.properties.dtype.is_complex
            and not self.state_dict[name].dtype.is_complex
        ]
        if lossy:
            raise LoadError(
                f"complex values would lose their imaginary parts in {some(lossy, _KEYS_SHOWN)}; "
                "load them into complex tensors",
                mismatched=tuple(lossy),
            )

    def _new_tensor(self, name: str, device: torch.device) -> torch.Tensor:
        item = self._saved[name]
        assert isinstance(item, TensorStorageMetadata)
        current = self.state_dict.get(name)
        if (
            isinstance(current, torch.Tensor)
            and whole_size(current) == item.size
            and _is_meta(name, current)
        ):
            return _materialized(current, device)
        tensor = None if self._create is None else self._create(name, item)
        if tensor is None:
            # Before there is memory for it: its size may be any where little of it was saved.
            check_found(name, item, elements_of(item), item.size.numel())
            return torch.empty(item.size, dtype=item.properties.dtype, device=device)
        if tensor.shape != item.size:
            raise LoadError(
                f"create({name!r}) returned a tensor of shape {tuple(tensor.shape)} for one of "
                f"shape {tuple(item.size)}",
                mismatched=(name,),
            )
        return tensor

    def _plan(
        self, present: list[str], created: list[str], extra: list[str], report: LoadReport
    ) -> LoadPlan:
        """List the reads for the keys that are in place, the created tensors and new objects."""
        saved = self._saved
        items: list[ReadItem] = []
        for name in present:
            item = saved[name]
            if isinstance(item, BytesStorageMetadata):
                items.append(read_object(name))
            else:
                items += read_tensor(name, item, self._wanted(self.state_dict[name]))
        for name in extra:
            if isinstance(saved[name], BytesStorageMetadata):
                items.append(read_object(name))
        for name in created:
            item = saved[name]
            assert isinstance(item, TensorStorageMetadata)
            tensor = self.state_dict[name]
            if tensor.dtype != item.properties.dtype:
                report.converted.append(Conversion(name, item.properties.dtype, tensor.dtype))
            reads = read_tensor(name, item, self._wanted(tensor))
            self._pending[name] = len(reads)
            items += reads
        self._items = StayingItems(items, self._plain) if self._items_stay else items
        return LoadPlan(self._items)  # type: ignore[arg-type]

    def _wanted(self, tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
        """The chunks of a tensor that this rank has."""
        if _is_whole(tensor):
            return [whole(tensor)]
        if not isinstance(tensor, DTensor):
            return list(create_chunk_list(tensor))
        if tensor.device_mesh.get_coordinate() is None:
            return []  # this rank has no part of the tensor
        # Many tensors share few shapes, and DTensor takes long to compute its offsets.
        key = (tensor.shape, id(tensor.device_mesh), tensor.placements)
        if key not in self._chunks:
            self._chunks[key] = list(create_chunk_list(tensor))
        return self._chunks[key]

    # --- reading ------------------------------------------------------------------------------

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """All ranks have planned without an error: give the state its new structure."""
        for container, key, value in self._template.edits:
            self._undo.note(container, key)
            container[key] = value
        if self._growth is not None:
            self._growth.apply(self._undo)
        for name in [name for name, reads in self._pending.items() if reads == 0]:
            self._put(name, self.state_dict[name])
        if isinstance(new_plan.items, StayingItems):
            new_plan = replace(new_plan, items=self._items)  # type: ignore[arg-type]
        self._items = new_plan.items
        return new_plan

    def _undo_changes(self) -> None:
        """After a load that has failed: give the state its old structure. Tensors, and numbers that
        were numbers, stay as far as they are loaded."""
        self._undo.run()

    def put_plain(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Put numbers, strings, bools and None in their places."""
        slots = self._slots
        for name, value in zip(names, values, strict=True):
            container, key = slots[name]
            if type(container) is dict and type(container.get(key)) is type(value):
                container[key] = value
            else:
                self._put(name, value)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a saved object, without running code of the file, and put it in its place.

        Raises:
            UnsafeCheckpoint: the object contains a class that is not allowed.
            CorruptCheckpoint: the bytes are not a saved object.
        """
        name = read_item.dest_index.fqn
        self._put(name, objects.load(value, name, allow=self._allow, device=self._device))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        tensor = self.state_dict[read_item.dest_index.fqn]
        if isinstance(tensor, DTensor) and type(tensor._local_tensor) in _PLAIN:
            tensor = tensor._local_tensor  # what to_local() gives, without autograd's part in it
        elif _is_sharded(tensor):
            tensor = self.lookup_tensor(read_item.dest_index)
        if tensor.shape == read_item.lengths:
            return tensor
        return narrow_tensor_by_index(tensor, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if not self._pending:
            return
        name = read_item.dest_index.fqn
        with self._lock:  # a reader may commit from several threads
            reads = self._pending.get(name)
            if reads is None:
                return
            self._pending[name] = reads - 1
        if reads == 1:
            self._put(name, self.state_dict[name])

    def take(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Put a tensor that is more than its memory in the place of one that was to be created and
        filled. Returns False where there is one to fill."""
        name = read_item.dest_index.fqn
        with self._lock:
            if self._pending.get(name) != 1 or tensor.shape != self.state_dict[name].shape:
                return False
            self._pending[name] = 0
        self._put(name, tensor.to(self._device))
        return True

    def _put(self, name: str, value: Any) -> None:
        self._undo.note(*self._slots[name])
        replacement: Replacement | None = place(name, self._slots[name], value)
        if replacement is not None:
            self._report.replaced.append(replacement)


def _note_plain(report: LoadReport, names: Iterable[str], others: Iterable[str]) -> None:
    """Add what is plain to what is loaded, in the order of the state."""
    others = set(others)
    loaded = set(report.loaded)
    report.loaded[:] = [name for name in names if name not in others or name in loaded]


def _is_sharded(tensor: torch.Tensor) -> bool:
    # Whoever takes part in DCP's protocols for tensors that know their own chunks.
    return (
        hasattr(tensor, "__create_chunk_list__")
        or is_sharded_tensor(tensor)
        or is_checkpointable(tensor)
    )


def _is_whole(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and not _is_sharded(tensor)


def _is_meta(name: str, tensor: torch.Tensor) -> bool:
    if not is_sharded_tensor(tensor):
        return tensor.is_meta
    from pyckpt.dcp import sharded_tensors

    return sharded_tensors.is_meta(name, tensor)


def _materialized(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Give a tensor on the meta device memory; a DTensor's is on the device of its mesh."""
    if not isinstance(tensor, DTensor):
        made = torch.empty_like(tensor, device=device)
        return with_attributes(made, tensor) if is_checkpointable(tensor) else made
    local = torch.empty_like(tensor.to_local(), device=tensor.device_mesh.device_type)
    return DTensor.from_local(
        local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
