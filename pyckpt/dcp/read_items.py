"""What a rank reads of what was saved: the parts of saved chunks that its own chunks are made of.

A rank of a thousand needs a thousandth of a key that was saved in a thousand chunks. So chunks are
looked up in a table, by where they are, and not gone through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from pyckpt import _C
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format.columns import chunks_of, columns_of, elements_of
from pyckpt.private import create_chunk_list, create_read_items_for_chunk_list

__all__ = ["StayingItems", "check_found", "check_part", "read_object", "read_tensor", "whole"]

_NOWHERE = torch.Size((0,))
# Fewer chunks than these are gone through in the time that a table of them takes to make.
_MANY_CHUNKS = 32


class StayingItems(Sequence[ReadItem]):
    """The items of a plan that no other rank looks at: they stay where the plan was made, and only
    their number travels.

    Args:
        items: them, or their number where they are not.
        plain: what is read besides, without an item for each.
    """

    def __init__(self, items: Sequence[ReadItem] | int, plain: _C.PlainReads | None = None) -> None:
        self._items = None if isinstance(items, int) else items
        self._count = items if isinstance(items, int) else len(items)
        self.plain = plain

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> ReadItem: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[ReadItem]: ...

    def __getitem__(self, at: int | slice) -> ReadItem | Sequence[ReadItem]:
        if self._items is None:
            raise PyckptError("the items of this plan are with the rank that made it")
        return self._items[at]

    def __iter__(self) -> Iterator[ReadItem]:
        if self._items is None:
            raise PyckptError("the items of this plan are with the rank that made it")
        return iter(self._items)

    def __reduce__(self) -> tuple[type[StayingItems], tuple[int]]:
        return StayingItems, (self._count,)


def whole(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """The one chunk that a tensor is which is no part of another."""
    return ChunkStorageMetadata(_start(tensor.dim()), tensor.shape)


def read_object(name: str) -> ReadItem:
    """Read what is no tensor."""
    index = MetadataIndex(name)
    return ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)


def read_tensor(
    name: str, saved: TensorStorageMetadata, wanted: Sequence[ChunkStorageMetadata]
) -> list[ReadItem]:
    """Read chunks of a tensor: what stock's planner would, but for parts without elements.

    Args:
        name: the tensor's key.
        saved: what was saved of it.
        wanted: this rank's chunks of it, none of which overlap.

    Raises:
        CorruptCheckpoint: there is less than that in the checkpoint.
    """
    items: list[ReadItem] | None = None
    table = chunks_of(saved)
    if table is None and len(wanted) == 1:
        items = _as_it_was_saved(name, saved, wanted[0])
        if items is not None:
            return items
    if table is None and len(saved.chunks) >= _MANY_CHUNKS:
        table = _table_of(saved)
    if table is None:
        items = create_read_items_for_chunk_list(name, saved, list(wanted))
        found = sum(item.lengths.numel() for item in items)
    else:
        items, found = _look_up(name, *table, wanted)
    check_found(name, saved, found, sum(math.prod(chunk.sizes) for chunk in wanted))
    return items


def check_found(name: str, saved: TensorStorageMetadata, found: int, needed: int) -> None:
    """Raise unless all elements of a tensor are found that are needed.

    Raises:
        CorruptCheckpoint: some are not in the checkpoint.
    """
    if found >= needed:
        return
    here, whole = elements_of(saved), saved.size.numel()
    raise CorruptCheckpoint(
        f"{name}: the checkpoint has {found} of the {needed} elements that this rank needs"
        + (
            f"; each rank saved its own part (use_collectives=False), and this one's has {here} of "
            f"the tensor's {whole}: load it on as many ranks, with the same shards"
            if here < whole
            else ""
        ),
        key=name,
        expected=needed,
        found=found,
    )


def check_part(metadata: Metadata, items: Iterable[ReadItem], planner: object) -> None:
    """Raise unless what one rank saved for itself has all that a plan is to load: planners of stock
    leave memory as it is for which they find nothing.

    Args:
        metadata: of what the rank saved.
        items: the plan's.
        planner: which made it, with the ``state_dict`` that it fills.

    Raises:
        CorruptCheckpoint: some elements are not in the checkpoint.
        PyckptError: the planner does not say what it fills, and some tensors have gaps.
    """
    if columns_of(metadata) is not None:
        return  # which have no gaps
    gapped = {
        name: saved
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata) and elements_of(saved) < saved.size.numel()
    }
    if not gapped:
        return
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        raise PyckptError(
            f"each rank saved its own part (use_collectives=False), and a {type(planner).__name__} "
            f"has no state_dict by which to see whether all of {next(iter(gapped))!r} is there "
            "that is to be loaded"
        )
    found = dict.fromkeys(gapped, 0)
    for item in items:
        if item.dest_index.fqn in found:
            found[item.dest_index.fqn] += item.lengths.numel()
    for name, saved in gapped.items():
        tensor = state.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
            continue  # this rank has no part of the tensor
        needed = sum(chunk.sizes.numel() for chunk in create_chunk_list(tensor))
        check_found(name, saved, found[name], needed)


def _look_up(
    name: str, columns: _C.Columns, key: int, wanted: Sequence[ChunkStorageMetadata]
) -> tuple[list[ReadItem], int]:
    """The items, and of how many elements they are."""
    items = []
    found = 0
    for number, chunk in enumerate(wanted):
        begin = chunk.offsets
        destination = _index(name, begin, number)
        for stored, in_stored, in_wanted, size in columns.overlaps(key, begin, chunk.sizes):
            stored_begin = torch.Size(
                [b + w - s for b, w, s in zip(begin, in_wanted, in_stored, strict=True)]
            )
            found += math.prod(size)
            items.append(
                _read(
                    destination,
                    torch.Size(in_wanted),
                    _index(name, stored_begin, stored),
                    torch.Size(in_stored),
                    torch.Size(size),
                )
            )
    return items, found


def _table_of(saved: TensorStorageMetadata) -> tuple[_C.Columns, int]:
    columns = _C.Columns()
    key = columns.add_tensor("", columns.add_properties("", "", False, 0, False), saved.size)
    for chunk in saved.chunks:
        columns.add_chunk(chunk.offsets, chunk.sizes)
    return columns, key


def _as_it_was_saved(
    name: str, saved: TensorStorageMetadata, wanted: ChunkStorageMetadata
) -> list[ReadItem] | None:
    """Read a chunk that was saved as it is wanted, whole; None where there is none like it."""
    for number, chunk in enumerate(saved.chunks):
        if chunk.sizes == wanted.sizes and chunk.offsets == wanted.offsets:
            if 0 in chunk.sizes:
                return []
            index, start = _index(name, chunk.offsets, number), _start(len(chunk.sizes))
            return [_read(index, start, index, start, chunk.sizes)]
    return None


@functools.cache
def _start(dims: int) -> torch.Size:
    return torch.Size((0,) * dims)


# What MetadataIndex(...) and ReadItem(...) make, in a third of the time: being frozen, they set
# each field by a call, and these run once a tensor.


def _index(name: str, offset: torch.Size, number: int) -> MetadataIndex:
    index = object.__new__(MetadataIndex)
    vars(index).update(fqn=name, offset=offset, index=number)
    return index


def _read(
    destination: MetadataIndex,
    at: torch.Size,
    stored: MetadataIndex,
    stored_at: torch.Size,
    size: torch.Size,
) -> ReadItem:
    item = object.__new__(ReadItem)
    vars(item).update(
        type=LoadItemType.TENSOR,
        dest_index=destination,
        dest_offsets=at,
        storage_index=stored,
        storage_offsets=stored_at,
        lengths=size,
    )
    return item
