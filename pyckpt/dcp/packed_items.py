"""Items of plans that are not Python objects until somebody looks at them.

A rank sends its plan as one block of bytes (csrc/plan_block.h), and the coordinator makes the plan
of all ranks from the blocks. What DCP passes on in between is a `SavePlan` as ever, whose ``items``
are one of these: they behave as a list of DCP's `WriteItem`, and make them when they are looked at.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from pyckpt import _C
from pyckpt.errors import PyckptError

__all__ = ["ImpliedItems", "LazySequence", "PackedItems", "PackedPaths", "chosen", "pack"]

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
"""In the order of DCP's numbers for them."""
_KINDS = (None, WriteItemType.BYTE_IO, WriteItemType.TENSOR, WriteItemType.SHARD)
"""In the order of csrc/plan_block.h."""


class _NotPackable(Exception):
    """A block cannot hold it: it has to travel as it is."""


# --- packing --------------------------------------------------------------------------------------


def pack(items: Sequence[WriteItem], mappings: Mapping[str, Any]) -> bytes | None:
    """Put a rank's plan into a block; None where that is not possible without loss.

    Args:
        items: what the rank has.
        mappings: the path of each key, as DCP puts it into ``planner_data``.
    """
    packer = _C.PlanPacker()
    properties: dict[tuple[Any, ...], int] = {}
    try:
        for item in items:
            _pack_item(packer, item, mappings, properties)
        for key, path in mappings.items():
            packer.add_path(key, path)
    # TypeError: not of the types that stock's planner makes. ValueError: a key that is not its
    # path, joined, or that is planned twice.
    except (_NotPackable, TypeError, ValueError):
        return None
    return packer.finish()


def _pack_item(
    packer: _C.PlanPacker,
    item: WriteItem,
    mappings: Mapping[str, Any],
    properties: dict[tuple[Any, ...], int],
) -> None:
    index, data = item.index, item.tensor_data
    if type(item) is not WriteItem or type(index) is not MetadataIndex:
        raise _NotPackable
    if item.bytes_io_data is not None:
        raise _NotPackable
    path = mappings.get(index.fqn)
    if item.type is WriteItemType.BYTE_IO:
        if data is not None or index.offset is not None:
            raise _NotPackable
        packer.add_object(index.fqn, path, index.index)
        return
    chunk = data.chunk if type(data) is TensorWriteData else None
    if type(data) is not TensorWriteData or type(chunk) is not ChunkStorageMetadata:
        raise _NotPackable
    sizes = (data.size, chunk.offsets, chunk.sizes, index.offset)
    if any(type(numbers) is not torch.Size for numbers in sizes) or index.offset != chunk.offsets:
        raise _NotPackable
    of = data.properties
    if type(of) is not TensorProperties:
        raise _NotPackable
    known = (of.dtype, of.layout, of.requires_grad, of.memory_format, of.pin_memory)
    number = properties.get(known)
    if number is None:
        number = properties[known] = packer.add_properties(
            str(of.dtype).removeprefix("torch."),
            str(of.layout),
            bool(of.requires_grad),
            _MEMORY_FORMATS.index(of.memory_format),
            bool(of.pin_memory),
            _element_size(of),
        )
    is_shard = item.type is WriteItemType.SHARD
    packer.add_tensor(
        index.fqn, path, is_shard, number, data.size, chunk.offsets, chunk.sizes, index.index
    )


def _element_size(properties: TensorProperties) -> int:
    """Bytes of an element, as DCP counts them where it balances what ranks write."""
    one = TensorWriteData(
        ChunkStorageMetadata(torch.Size(), torch.Size()), properties, torch.Size()
    )
    size = WriteItem(MetadataIndex(""), WriteItemType.TENSOR, tensor_data=one).tensor_storage_size()
    assert size is not None
    return size


def _properties(of: tuple[str, str, bool, int, bool]) -> TensorProperties:
    dtype, layout, requires_grad, memory_format, pin_memory = of
    return TensorProperties(
        dtype=getattr(torch, dtype),
        layout=getattr(torch, layout.removeprefix("torch.")),
        requires_grad=requires_grad,
        memory_format=_MEMORY_FORMATS[memory_format],
        pin_memory=pin_memory,
    )


def _unpack(block: _C.PlanBlock) -> list[WriteItem]:
    items = []
    known: dict[tuple[str, str, bool, int, bool], TensorProperties] = {}
    for i in range(len(block)):
        kind, name, hint, of, size, offsets, sizes = block.item(i)
        if of is None:
            items.append(WriteItem(MetadataIndex(name, None, hint), WriteItemType.BYTE_IO))
            continue
        if of not in known:
            known[of] = _properties(of)
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, known[of], torch.Size(size))
        write_type = _KINDS[kind]
        assert write_type is not None
        index = MetadataIndex(name, chunk.offsets, hint)
        items.append(WriteItem(index, write_type, tensor_data=data))
    return items


def _opened(block: bytes) -> _C.PlanBlock:
    try:
        return _C.PlanBlock(block)
    except ValueError as error:
        raise PyckptError(f"a rank's plan {error}") from None


# --- what stands for items ------------------------------------------------------------------------


class LazySequence(Sequence[Any]):
    """A list that is made when somebody looks at it."""

    @abstractmethod
    def _make(self) -> Sequence[Any]:
        """Make it."""

    @cached_property
    def _made(self) -> Sequence[Any]:
        return self._make()

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | LazySequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._made)


class PackedItems(LazySequence):
    """The items of a block. Crosses to other ranks as the block alone.

    Args:
        block: of `pack`.
        items: that are in it, where this process has them anyway.
        is_remembered: whether the rank will remember the plan that is made of it, by its name.
    """

    def __init__(
        self,
        block: bytes,
        items: Sequence[WriteItem] | None = None,
        is_remembered: bool = False,
    ) -> None:
        self.block = block
        self.is_remembered = is_remembered
        if items is not None:
            self._made = items

    def _make(self) -> Sequence[WriteItem]:
        return _unpack(_opened(self.block))

    def __reduce__(self) -> Any:
        return PackedItems, (self.block, None, self.is_remembered)


class PackedPaths(Mapping[str, Any]):
    """The paths of the keys of a block: the ``planner_data`` of the plan whose items it has."""

    def __init__(self, block: bytes, paths: Mapping[str, Any] | None = None) -> None:
        self.block = block
        if paths is not None:
            self._made = paths

    @cached_property
    def _made(self) -> Mapping[str, Any]:
        return _opened(self.block).paths()

    def __getitem__(self, key: str) -> Any:
        return self._made[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __repr__(self) -> str:
        return repr(self._made)

    def __reduce__(self) -> Any:
        return PackedPaths, (self.block,)


class ImpliedItems(LazySequence):
    """Items that are not sent, since our planner on the other side can tell which they are.

    Args:
        make: the items, for whoever looks at them on this side; None on the other.
    """

    def __init__(self, make: Callable[[], Sequence[WriteItem]] | None = None) -> None:
        self._maker = make

    def _make(self) -> Sequence[WriteItem]:
        if self._maker is None:
            raise PyckptError(
                "a rank sent the name of its plan, which only a pyckpt.SavePlanner can look up: "
                "all ranks of a save need the same planner"
            )
        return self._maker()

    def __reduce__(self) -> Any:
        return ImpliedItems, ()


def chosen(items: Sequence[WriteItem], answer: bytes) -> list[WriteItem]:
    """The items that a rank is to write, with the numbers that DCP gives the chunks.

    Args:
        items: what it has.
        answer: the coordinator's.
    """
    return [
        item if item.type is WriteItemType.BYTE_IO else _numbered(item, number - 1)
        for item, number in zip(items, _C.unpack_answer(answer, len(items)), strict=True)
        if number
    ]


def _numbered(item: WriteItem, chunk: int) -> WriteItem:
    index = MetadataIndex(item.index.fqn, item.index.offset, chunk)
    return WriteItem(index, item.type, item.bytes_io_data, item.tensor_data)
