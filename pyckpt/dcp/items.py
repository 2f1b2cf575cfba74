"""Gives the items of a plan to the job that writes a rank's file, and tells DCP where they lie."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt import _C
from pyckpt.dcp.leaves import is_plain_type
from pyckpt.errors import PyckptError
from pyckpt.format import plain
from pyckpt.format.envelope import envelope_of
from pyckpt.format.metadata import StorageInfo, storage_info

__all__ = [
    "OPAQUE",
    "FirstWrite",
    "Place",
    "Raw",
    "add",
    "add_known",
    "expected_size",
    "first_write_of",
    "last_place",
    "places_of",
    "write_result",
]

# The most bytes that the envelope of a tensor takes, and the gap before an aligned tensor
# (docs/format.md). They are for the preallocation; the file is cut to its true size at the end.
_ENVELOPE_BYTES_MAX = 2048
_GAP_BYTES_MAX = _C.page_bytes
_ALIGNED_PAYLOAD_MIN = _C.aligned_payload_min_bytes


class Raw(NamedTuple):
    """A tensor that was given to the engine as its memory."""

    stride: tuple[int, ...] | None
    """Strides of the payload; None if it is row-major."""
    as_planned: bool
    """Whether the plan, and so the metadata, has the tensor's true dtype and size."""


OPAQUE = Raw(None, True)
"""Stands for an item that was given to the engine as finished bytes."""


class Place(NamedTuple):
    """Where an item lies, in bytes, as a `_C.WriteJob` packs it."""

    offset: int
    length: int
    payload_offset: int
    payload_length: int
    crc32: int


_PLACE = struct.Struct("=5Q")


def places_of(packed: bytes) -> Iterator[Place]:
    """Unpack what ``_C.WriteJob.finish`` returns."""
    return map(Place._make, _PLACE.iter_unpack(packed))


def last_place(packed: bytes) -> Place:
    """The place of the item that lies last in the file."""
    return Place._make(_PLACE.unpack_from(packed, len(packed) - _PLACE.size))


def add(job: _C.FillJob, planner: SavePlanner, item: WriteItem, settle: Callable[[], None]) -> Raw:
    """Give an item to the job. ``settle`` waits until staged memory may be read."""
    if item.type == WriteItemType.BYTE_IO:
        encoded = _encode(planner, item)
        if encoded is not None:
            job.add_bytes(encoded)
            return OPAQUE
    data = planner.resolve_data(item)
    if not isinstance(data, torch.Tensor):
        job.add_bytes(data.getbuffer())
        return OPAQUE
    if data.is_meta:
        raise PyckptError(
            f"{item.index.fqn} is on the meta device, and has no values. If the state has it "
            "elsewhere, it fell to this rank, which had left it to another that has the same: the "
            "ranks' states changed. The next save stages it."
        )
    if not is_plain_type(data):
        data = data.detach()
    if is_plain_type(data) and data.layout is torch.strided:
        shape = data.shape
        layout = envelope_of(data.dtype, shape, data.stride())
        if layout is not None and layout.order is not None:
            data = data.permute(layout.order)
        if layout is not None and (
            job.add_tensor(data, layout.envelope)
            # The GPU itself gathers its strided memory.
            or (data.is_cuda and job.add_tensor(data.contiguous(), layout.envelope))
        ):
            plan = item.tensor_data
            as_planned = (
                plan is not None
                and plan.properties.dtype == data.dtype
                and plan.chunk.sizes == shape
            )
            return Raw(layout.stride, as_planned)
    settle()
    job.add_bytes(_serialize(data))
    return OPAQUE


def _encode(planner: Any, item: WriteItem) -> bytes | None:
    """The bytes of a plain object, made without the planner; None for any other object."""
    encode = getattr(planner, "_encode_plain", None)  # pyckpt.SavePlanner's
    if encode is not None:
        return encode(item)  # type: ignore[no-any-return]
    kind: Any = type(planner)
    if not _saves_as_stock(kind):
        return None
    try:
        return plain.encode(planner.lookup_object(item.index))
    except plain.NotPlain:
        return None


@lru_cache(maxsize=64)
def _saves_as_stock(planner: type[SavePlanner]) -> bool:
    """Whether planners of this class give objects as ``torch.save`` writes them."""
    return (
        getattr(planner, "resolve_data", None) is DefaultSavePlanner.resolve_data
        and getattr(planner, "transform_object", None) is DefaultSavePlanner.transform_object
    )


def _serialize(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor that is more than its memory, as stock ``FileSystemWriter`` writes
    them."""
    tensor = tensor.detach().cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getbuffer()


def write_result(
    item: WriteItem, name: str, raw: Raw, place: Place, xxh3: str | None = None
) -> WriteResult:
    """The result by which DCP learns where an item lies in the file ``name``, and which hash its
    payload has, if that is known."""
    return WriteResult(item.index, place.length, _info(name, raw, place, xxh3))


class FirstWrite(NamedTuple):
    """How a rank wrote a plan for the first time, which is how it writes it again."""

    raws: list[Raw]
    envelopes: list[_C.Envelope | None]
    """None for an item that must be looked at again in each save."""
    expected_size: int


def first_write_of(
    plan: SavePlan, raws: list[Raw], tensors: Sequence[torch.Tensor | None]
) -> FirstWrite:
    """How a rank wrote a plan, to be remembered once all its items are written.

    Args:
        raws: what `add` returned for each item.
        tensors: the memory of each item; None for objects.
    """
    envelopes = [
        None if tensor is None or raw is OPAQUE or not raw.as_planned else _simple_envelope(tensor)
        for raw, tensor in zip(raws, tensors, strict=True)
    ]
    return FirstWrite(raws, envelopes, expected_size(plan))


def _simple_envelope(tensor: torch.Tensor) -> _C.Envelope | None:
    layout = envelope_of(tensor.dtype, tensor.shape, tensor.stride())
    return None if layout is None or layout.order is not None else layout.envelope


def add_known(
    job: _C.FillJob,
    planner: SavePlanner,
    items: Sequence[WriteItem],
    tensors: list[torch.Tensor | None],
    first: FirstWrite,
    settle: Callable[[], None],
) -> list[Raw]:
    """Give the items of a plan that an earlier save has written to the job. Tensors that are as
    they were then cost no Python each."""
    raws = list(first.raws)
    done = 0
    while True:
        done = job.add_tensors(tensors, first.envelopes, done)
        if done == len(items):
            return raws
        raws[done] = add(job, planner, items[done], settle)
        done += 1


def _info(name: str, raw: Raw, place: Place, xxh3: str | None) -> StorageInfo:
    if not raw.as_planned:
        # A planner has changed the tensor after it was planned, and has not changed the plan. So
        # the metadata is wrong about the tensor. Readers learn its dtype and size from the item
        # itself.
        return StorageInfo(name, place.offset, place.length)
    return storage_info(
        name,
        place.offset,
        place.length,
        crc32=place.crc32,
        payload_offset=place.payload_offset,
        payload_length=place.payload_length,
        payload_stride=raw.stride,
        xxh3=xxh3,
    )


def expected_size(plan: SavePlan) -> int:
    """About how many bytes the file of a plan takes, rather too many. Objects are not counted."""
    total = 0
    for item in plan.items:
        data: Any = item.tensor_data
        if data is not None:
            size = data.properties.dtype.itemsize * math.prod(data.chunk.sizes)
            total += size + _ENVELOPE_BYTES_MAX
            if size >= _ALIGNED_PAYLOAD_MIN:
                total += _GAP_BYTES_MAX
    return total
