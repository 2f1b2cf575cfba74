"""DCP's objects over columns: made when somebody looks.

The metadata of a large checkpoint speaks of millions of items. Here they stand in ``_C.Columns``,
and what DCP and programs see are mappings of the same keys and values as the dicts of stock.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.private import StorageInfo

__all__ = [
    "LAYOUTS",
    "MEMORY_FORMATS",
    "KeysMapping",
    "PlacesMapping",
    "chunks_of",
    "columns_of",
    "elements_of",
    "metadata_of",
    "storage_info",
]

MEMORY_FORMATS = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
"""By the names of DCP's enum, in the order of its numbers."""
LAYOUTS = {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}
_MEMORY_FORMATS = list(MEMORY_FORMATS.values())

_Described: TypeAlias = TensorStorageMetadata | BytesStorageMetadata


def metadata_of(
    columns: _C.Columns,
    planner_data: Any = None,
    storage_meta: StorageMeta | None = None,
    version: str | None = None,
) -> Metadata:
    """DCP's metadata over columns; without ``storage_data`` where items have no files yet."""
    keys: Any = KeysMapping(columns)
    places = None if columns.item_count and not columns.file_count else PlacesMapping(columns)
    metadata = Metadata(keys, planner_data, places, storage_meta)
    metadata.version = version
    return metadata


def columns_of(metadata: Metadata) -> _C.Columns | None:
    """The columns that metadata is over, with all of its parts; None where it is not."""
    keys = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not isinstance(keys, KeysMapping):
        return None
    if places is None or (isinstance(places, PlacesMapping) and places.columns is keys.columns):
        return keys.columns
    return None


def chunks_of(tensor: TensorStorageMetadata) -> tuple[_C.Columns, int] | None:
    """The columns that a tensor is over, and its key there; None where it has a list of chunks,
    since it was made with one, or somebody has looked at it."""
    known = vars(tensor)
    source: tuple[_C.Columns, int] | None = known.get("_source")
    return None if "chunks" in known else source


def elements_of(tensor: TensorStorageMetadata) -> int:
    """How many elements of a tensor are in a checkpoint: all of them, but for what one rank saved
    for itself."""
    whole = tensor.size.numel()
    if chunks_of(tensor) is not None:
        return whole  # the native decoder takes no gaps
    # Chunks that are there twice fill the tensor: where it has gaps, no two overlap.
    return min(whole, sum(chunk.sizes.numel() for chunk in tensor.chunks))


def storage_info(
    relative_path: str,
    offset: int,
    length: int,
    *,
    crc32: int,
    payload_offset: int,
    payload_length: int,
    payload_stride: tuple[int, ...] | None = None,
    xxh3: str | None = None,
) -> StorageInfo:
    """Say where an item lies: stock's record, plus what pyckpt needs to read it directly.

    Args:
        relative_path: the data file, relative to the checkpoint's directory.
        offset: first byte of the item in that file.
        length: bytes of the item, envelope included.
        crc32: CRC-32 of the payload.
        payload_offset: where the raw tensor bytes begin, in bytes from the item's first byte.
        payload_length: bytes of the raw tensor. An item that is not a raw tensor in an envelope
            is a payload as a whole: offset 0, all its length.
        payload_stride: strides in elements, given only where the payload is not in row-major order.
        xxh3: XXH3-128 of the payload, in hexadecimal, given only for frozen parts.
    """
    info = StorageInfo(relative_path, offset, length)
    extra = info.__dict__
    extra["crc32"] = crc32
    extra["payload_offset"] = payload_offset
    extra["payload_length"] = payload_length
    if payload_stride is not None:
        extra["payload_stride"] = payload_stride
    if xxh3 is not None:
        extra["xxh3"] = xxh3
    return info


# --- tensors --------------------------------------------------------------------------------------


class _Tensor(TensorStorageMetadata):
    """A `TensorStorageMetadata` whose chunks are not made yet. Once they are, it is of DCP's class.

    Its class gives way because much looks at the class and not at what it is derived from: equality
    of dataclasses, pickle, and ``type(x) is``.
    """

    @classmethod
    def over(cls, columns: _C.Columns, key: int) -> _Tensor:
        """The tensor of a key."""
        dtype, layout, requires_grad, memory_format, pin_memory = columns.properties(key)
        made = cls.__new__(cls)
        vars(made).update(
            properties=TensorProperties(
                getattr(torch, dtype),
                LAYOUTS[layout],
                requires_grad,
                _MEMORY_FORMATS[memory_format],
                pin_memory,
            ),
            size=torch.Size(columns.size(key)),
            _source=(columns, key),
        )
        return made

    def __getattr__(self, name: str) -> Any:
        if name != "chunks":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _become_stock(self)
        return self.chunks

    def __eq__(self, other: object) -> bool:
        # Python asks a derived class first, on whichever side it stands.
        if not isinstance(other, TensorStorageMetadata):
            return NotImplemented
        if self.properties != other.properties or self.size != other.size:
            return False
        return bool(self.chunks == other.chunks)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        _become_stock(self)
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _become_stock(self)
        return self.__reduce_ex__(protocol)


_Tensor.__name__ = TensorStorageMetadata.__name__
_Tensor.__qualname__ = TensorStorageMetadata.__qualname__


def _become_stock(tensor: TensorStorageMetadata) -> None:
    """Make the chunks of a tensor. Another thread may be at it as well."""
    known = vars(tensor)
    source = known.get("_source")
    if source is not None and "chunks" not in known:
        columns, key = source
        with collector_paused():
            boxes = (columns.chunk(key, i) for i in range(columns.chunk_count(key)))
            known.setdefault(
                "chunks",
                [
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    for offsets, sizes in boxes
                ],
            )
    known.pop("_source", None)
    tensor.__class__ = TensorStorageMetadata


# --- mappings -------------------------------------------------------------------------------------


class _OverColumns(Mapping[Any, Any]):
    """A mapping that stands for a dict, and pickles as one."""

    def __init__(self, columns: _C.Columns) -> None:
        self.columns = columns

    def copy(self) -> dict[Any, Any]:
        """A dict of the same, as ``dict.copy`` would make it."""
        with collector_paused():
            return dict(self.items())

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self) and other.columns is self.columns:  # type: ignore[attr-defined]
            return True
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and self.copy() == dict(other.items())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class KeysMapping(_OverColumns):
    """``state_dict_metadata``: what each key is. An object is made once, and kept."""

    def __init__(self, columns: _C.Columns) -> None:
        super().__init__(columns)
        self._made: dict[int, _Described] = {}

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[str]:
        return map(self.columns.name, range(len(self.columns)))

    def __contains__(self, key: object) -> bool:
        return _find(self.columns, key) >= 0

    def __getitem__(self, key: str) -> _Described:
        number = _find(self.columns, key)
        if number < 0:
            raise KeyError(key)
        return self._of(number)

    def items(self) -> ItemsView[str, _Described]:
        return _KeysItems(self)

    def values(self) -> ValuesView[_Described]:
        return _KeysValues(self)

    def is_edited(self) -> bool:
        """Whether an object is no longer what the columns say of it, since somebody changed it."""
        made = list(self._made.items())  # another thread may look at more
        return not all(self._is_as_made(number, described) for number, described in made)

    def _is_as_made(self, number: int, described: _Described) -> bool:
        if not isinstance(described, TensorStorageMetadata):
            return not vars(described)
        now, columns = vars(described), self.columns
        fresh = vars(_Tensor.over(columns, number))
        if now.keys() - {"chunks"} - fresh.keys() or any(
            now.get(name) != fresh[name] for name in ("properties", "size")
        ):
            return False
        chunks = now.get("chunks")
        return chunks is None or (
            len(chunks) == columns.chunk_count(number)
            and all(
                (tuple(chunk.offsets), tuple(chunk.sizes)) == columns.chunk(number, i)
                for i, chunk in enumerate(chunks)
            )
        )

    def _of(self, number: int) -> _Described:
        made = self._made.get(number)
        if made is None:
            made = (
                _Tensor.over(self.columns, number)
                if self.columns.is_tensor(number)
                else BytesStorageMetadata()
            )
            made = self._made.setdefault(number, made)
        return made


class PlacesMapping(_OverColumns):
    """``storage_data``: where each item is. Objects are made anew at each look."""

    def __len__(self) -> int:
        return self.columns.item_count

    def __iter__(self) -> Iterator[MetadataIndex]:
        columns = self.columns
        for key in range(len(columns)):
            name = columns.name(key)
            if not columns.is_tensor(key):
                yield MetadataIndex(name)
                continue
            for number in range(columns.chunk_count(key)):
                yield MetadataIndex(name, columns.chunk(key, number)[0], number)

    def __contains__(self, index: object) -> bool:
        return self._find(index) >= 0

    def __getitem__(self, index: MetadataIndex) -> StorageInfo:
        item = self._find(index)
        if item < 0:
            raise KeyError(index)
        return _info(self.columns, item)

    def items(self) -> ItemsView[MetadataIndex, StorageInfo]:
        return _PlacesItems(self)

    def values(self) -> ValuesView[StorageInfo]:
        return _PlacesValues(self)

    def _find(self, index: object) -> int:
        """The number of an item; -1 where there is none."""
        columns = self.columns
        if not isinstance(index, MetadataIndex):
            return -1
        key = _find(columns, index.fqn)
        if key < 0 or columns.is_tensor(key) != (index.offset is not None):
            return -1
        first = columns.first_item(key)
        if index.offset is None:
            return first
        if len(index.offset) != len(columns.size(key)):
            return -1
        hint = index.index
        if type(hint) is not int or not 0 <= hint < columns.item_count:
            hint = -1
        number = columns.find_chunk(key, tuple(index.offset), hint)
        return -1 if number < 0 else first + number


class _KeysValues(ValuesView[_Described]):
    _mapping: KeysMapping

    def __iter__(self) -> Iterator[_Described]:
        return map(self._mapping._of, range(len(self._mapping)))


class _KeysItems(ItemsView[str, _Described]):
    _mapping: KeysMapping

    def __iter__(self) -> Iterator[tuple[str, _Described]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


class _PlacesValues(ValuesView[StorageInfo]):
    _mapping: PlacesMapping

    def __iter__(self) -> Iterator[StorageInfo]:
        columns = self._mapping.columns
        return (_info(columns, item) for item in range(columns.item_count))


class _PlacesItems(ItemsView[MetadataIndex, StorageInfo]):
    _mapping: PlacesMapping

    def __iter__(self) -> Iterator[tuple[MetadataIndex, StorageInfo]]:
        return zip(self._mapping, self._mapping.values(), strict=True)


def _find(columns: _C.Columns, key: object) -> int:
    if not isinstance(key, str):
        return -1
    try:
        return columns.find(key)
    except TypeError:  # no UTF-8 of it: it has half of a surrogate pair
        return -1


def _info(columns: _C.Columns, item: int) -> StorageInfo:
    name, offset, length, payload_offset, payload_length, crc32, stride = columns.place(item)
    if payload_offset is None:
        return StorageInfo(name, offset, length)
    assert payload_length is not None
    assert crc32 is not None
    return storage_info(
        name,
        offset,
        length,
        crc32=crc32,
        payload_offset=payload_offset,
        payload_length=payload_length,
        payload_stride=stride,
    )
