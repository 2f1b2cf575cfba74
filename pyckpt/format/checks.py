"""Checks of a checkpoint's metadata, the same for all readers.

All checks are made when metadata is decoded, so that no reader can omit one. Metadata that passes
may still differ from what was saved, and data files may not agree with it. But every file name lies
in the checkpoint's directory, every number is in range, and every element of every tensor has a
place to be read from. In what one rank saved for itself, each element has one place at most.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePath, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

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
from pyckpt.format.paths import check_paths
from pyckpt.private import StorageInfo

__all__ = ["check"]

# Comparisons of the chunks of one tensor, at most: a second or so.
_COMPARISONS_MAX = 1 << 21
_INT_MAX = (1 << 63) - 1
# The most bytes of a tensor that one byte of its item may stand for. Special tensors may be packed,
# but a tensor that claims terabytes would be allocated.
_PACKED_MAX = 64
_PACKED_FREE = 1 << 20

_OURS = {"crc32", "payload_offset", "payload_length"}
_XXH3 = re.compile(r"[0-9a-f]{32}")
_Places = dict[tuple[str, torch.Size | None], StorageInfo]


def check(metadata: Any, *, is_of_rank: bool = False) -> None:
    """Check that a checkpoint can be loaded by this metadata.

    Args:
        metadata: what was read from a file.
        is_of_rank: whether one rank saved it for itself, so that tensors may have gaps, which other
            ranks have. Who loads by it has to look whether all is there that is to be loaded.

    Raises:
        Exception: it cannot; mostly a ValueError that says why. Objects from a file may raise other
            errors when they are read.
    """
    if type(metadata) is not Metadata:
        _malformed(f"it holds a {type(metadata).__name__}")
    if metadata.storage_meta is not None and type(metadata.storage_meta) is not StorageMeta:
        _malformed(f"its storage_meta is a {type(metadata.storage_meta).__name__}")
    if any(type(name) is not str for name in vars(metadata)):
        _malformed("an attribute of it has no name")
    places = _places(metadata.storage_data)
    for key, item in _dict(metadata.state_dict_metadata).items():
        if type(key) is not str:
            _malformed(f"a key is a {type(key).__name__}")
        if type(item) is TensorStorageMetadata:
            _check_tensor(key, item, places, is_of_rank)
        elif type(item) is not BytesStorageMetadata:
            _malformed(f"{key!r} is described by a {type(item).__name__}")
        elif (key, None) not in places:
            _malformed(f"{key!r} is stored nowhere")
    check_paths(metadata)


# --- where items are ------------------------------------------------------------------------------


def _places(storage_data: Any) -> _Places:
    """Check the places of items; return them by key and offsets."""
    places: _Places = {}
    names: set[str] = set()
    for index, info in _dict(storage_data if storage_data is not None else {}).items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            _malformed(f"a {type(index).__name__} is stored in a {type(info).__name__}")
        key, offsets = index.fqn, index.offset
        if type(key) is not str or (offsets is not None and type(offsets) is not torch.Size):
            _malformed("an item has no key, or no offsets")
        if index.index is not None and type(index.index) is not int:
            _malformed(f"{key!r} has a chunk whose number is a {type(index.index).__name__}")
        extra = vars(info)
        name = info.relative_path
        if name not in names:
            _check_inside(name, key)
            names.add(name)
        if not _are_natural(info.offset, info.length) or info.offset + info.length > _INT_MAX:
            _malformed(f"{key!r} has an offset or a length that is none")
        if len(extra) > 3:
            _check_extra(key, extra, None if offsets is None else len(offsets))
        places[key, offsets] = info
    return places


def _check_extra(key: str, extra: dict[str, Any], dims: int | None) -> None:
    """Check the attributes that pyckpt adds to a place, and DCP's list of transformations."""
    transforms = extra.get("transform_descriptors")
    if transforms is not None and not (
        type(transforms) in (list, tuple) and all(type(one) is str for one in transforms)
    ):
        _malformed(f"{key!r} is transformed in ways that are no list of names")
    given = _OURS & extra.keys()
    if not given:
        return
    if given != _OURS:
        _malformed(f"{key!r} says no more of its bytes than their {', '.join(sorted(given))}")
    crc32, begin, length = extra["crc32"], extra["payload_offset"], extra["payload_length"]
    if not _are_natural(crc32, begin, length) or crc32 >> 32:
        _malformed(f"{key!r} has a checksum, or a place of its bytes, that is none")
    if begin + length > extra["length"]:
        _malformed(f"{key!r} has more bytes than its item")
    xxh3 = extra.get("xxh3")
    if xxh3 is not None and not (type(xxh3) is str and _XXH3.fullmatch(xxh3)):
        _malformed(f"{key!r} has a hash that is not one of 128 bits")
    count = extra.get("xxh3_checkpoints")
    if count is not None and (type(count) is not int or count < 1):
        _malformed(f"{key!r} has a count of checkpoints that is none")
    stride = extra.get("payload_stride")
    if stride is None:
        return
    if type(stride) is not tuple or len(stride) != dims or not _are_natural(*stride):
        _malformed(f"{key!r} has strides that are not one for each dimension")


def _are_natural(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_inside(name: Any, key: str) -> None:
    if type(name) is not str:
        _malformed(f"{key!r} is stored in a file whose name is a {type(name).__name__}")
    # By the rules of both systems, so that a file written on one is also refused on the other.
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if not _is_inside(path) or "\0" in name:
            _malformed(f"{key!r} is said to be stored in {name!r}, outside of the checkpoint")


def _is_inside(path: PurePath) -> bool:
    return bool(path.parts) and not path.anchor and ".." not in path.parts


# --- what items are -------------------------------------------------------------------------------


def _check_tensor(key: str, item: TensorStorageMetadata, places: _Places, is_of_rank: bool) -> None:
    properties, size, chunks = item.properties, item.size, item.chunks
    if type(properties) is not TensorProperties or type(properties.dtype) is not torch.dtype:
        _malformed(f"{key!r} has no dtype")
    if (
        type(properties.layout) is not torch.layout
        or type(properties.memory_format) is not torch.memory_format
        or type(properties.requires_grad) is not bool
        or type(properties.pin_memory) is not bool
    ):
        _malformed(f"{key!r} has properties that are none")
    if type(size) is not torch.Size or min(size, default=0) < 0:
        _malformed(f"{key!r} has no size")
    if type(chunks) is not list:
        _malformed(f"{key!r} has a {type(chunks).__name__} of chunks")
    item_size = properties.dtype.itemsize
    numel = math.prod(size)
    # Strides are products of the other sizes, even if one size is 0.
    if (numel or math.prod(extent or 1 for extent in size)) * item_size > _INT_MAX:
        _malformed(f"{key!r} is larger than any memory")
    stored = 0
    transformed = False
    for chunk in chunks:
        if type(chunk) is not ChunkStorageMetadata:
            _malformed(f"{key!r} has a {type(chunk).__name__} as a chunk")
        offsets, sizes = chunk.offsets, chunk.sizes
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size:
            _malformed(f"{key!r} has a chunk without offsets and sizes")
        if len(offsets) != len(size) or len(sizes) != len(size):
            _malformed(f"{key!r} has a chunk of other dimensions than its own")
        if sizes != size or any(offsets):
            for start, extent, whole in zip(offsets, sizes, size, strict=True):
                if start < 0 or extent < 0 or start + extent > whole:
                    _malformed(
                        f"{key!r} of size {tuple(size)} has a chunk of {tuple(sizes)} at "
                        f"{tuple(offsets)}"
                    )
        count = numel if sizes == size else math.prod(sizes)
        if not count:
            continue
        info = places.get((key, offsets))
        if info is None:
            _malformed(f"the chunk of {key!r} at {tuple(offsets)} is stored nowhere")
        stored += info.length
        extra = vars(info)
        if extra.get("transform_descriptors"):
            transformed = True
        elif extra.get("payload_offset") and extra["payload_length"] != count * item_size:
            _malformed(f"{key!r}: its length and its shape do not agree")
    if numel and (len(chunks) != 1 or chunks[0].sizes != size) and not _is_filled(size, chunks):
        if not is_of_rank:
            _malformed(f"the chunks of {key!r} leave gaps in it, or overlap")
        if not _are_apart(key, chunks):
            _malformed(f"the chunks of {key!r} overlap")
        numel = sum(chunk.sizes.numel() for chunk in chunks)
    if (
        properties.layout is torch.strided
        and not transformed
        and numel * item_size > _PACKED_MAX * stored + _PACKED_FREE
    ):
        _malformed(f"{key!r} is of {numel * item_size} bytes, and {stored} of it were saved")


def _is_filled(size: torch.Size, chunks: list[ChunkStorageMetadata]) -> bool:
    if not size:
        return bool(chunks)  # one element, and each chunk is that
    return _C.is_tiling(
        size, [chunk.offsets for chunk in chunks], [chunk.sizes for chunk in chunks]
    )


def _are_apart(key: str, chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether no element is in two of the chunks. A rank has few of a tensor."""
    boxes = [
        (tuple(chunk.offsets), tuple(map(sum, zip(chunk.offsets, chunk.sizes, strict=True))))
        for chunk in chunks
        if chunk.sizes.numel()
    ]
    if len(boxes) < 2:
        return True
    # Along the dimension in which they are cut most, each is compared with those that it is beside.
    dims = range(len(boxes[0][0]))
    along = max(dims, key=lambda dim: len({begin[dim] for begin, _ in boxes}), default=None)
    if along is None:
        return False  # one element, and each of them is that
    boxes.sort(key=lambda box: box[0][along])
    beside: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    left = _COMPARISONS_MAX
    for begin, end in boxes:
        beside = [other for other in beside if other[1][along] > begin[along]]
        left -= len(beside)
        if left < 0:
            _malformed(f"the chunks of {key!r} are too many to be compared")
        for other_begin, other_end in beside:
            if all(begin[dim] < other_end[dim] and other_begin[dim] < end[dim] for dim in dims):
                return False
        beside.append((begin, end))
    return True


def _dict(value: Any) -> dict[Any, Any]:
    # Not a subclass, which might yield other entries to one reader than to another.
    if type(value) is not dict:
        _malformed(f"a {type(value).__name__} is where a dict belongs")
    return value  # type: ignore[no-any-return]


def _malformed(what: str) -> NoReturn:
    raise ValueError(what)
