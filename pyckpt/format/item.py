"""Locates a tensor's raw bytes inside an item that ``torch.save`` wrote.

Metadata that pyckpt wrote has their places. In other checkpoints each item is a zip archive: its
central directory has the place and the checksum of each record, and one record is a pickle that
describes the tensor. Both are small and at the ends of the item, so only these are read. Equal
tensors (of one dtype and shape, by one version of torch) are parsed once.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pyckpt.format.sealed import Sealed, scan

__all__ = [
    "HEAD_BYTES",
    "TAIL_BYTES",
    "Locator",
    "Payload",
    "has_its_checksums",
    "is_dense",
    "is_readable",
]

# Bytes to read at the start and at the end of an item. All versions of torch so far need at most
# half of them.
HEAD_BYTES = 2048
TAIL_BYTES = 2048
_DEPTH_MAX = 20

_LOCAL = struct.Struct("<4s22xHH")
_DIRECTORY = 0x10  # MS-DOS's attribute
_DESCRIPTOR_MAGIC = b"PK\7\10"


class Payload(NamedTuple):
    """Raw bytes of a tensor inside an item."""

    offset: int
    """Of the first byte, from the item's first."""
    length: int
    """Bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    crc32: int | None
    """CRC-32 of the bytes; None if it is not known."""


def has_its_checksums(item: bytes | bytearray) -> bool | None:
    """Whether the records of a whole item match the checksums in its archive; None if it is no
    archive, or was written without checksums (``torch.serialization.set_crc32_options``).

    ``torch.load`` does not check them.
    """
    if item[:4] != b"PK\3\4":
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return None
            # torch does not read a record that it takes for a directory, and would leave the tensor
            # uninitialised.
            return archive.testzip() is None and not any(
                record.external_attr & _DIRECTORY for record in records
            )
    except Exception:  # as in `Locator.locate`
        return False


def is_readable(item: bytes | bytearray) -> bool:
    """Whether torch finds the records of a whole item, which is an archive, where they are said to
    be. Python's ``zipfile`` is content with less."""
    try:
        reader = torch._C.PyTorchFileReader(io.BytesIO(item))
        for name in reader.get_all_records():
            reader.get_record(name)
    except RuntimeError:
        return False
    return True


class _Shape(NamedTuple):
    """The payload of an item, for all equal items."""

    payload: Payload
    prefix: bytes
    crc_at: int | None
    """Offset of the checksum in the tail."""


class Locator:
    """Finds payloads. Remembers what it parsed; not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], _Shape] = {}

    def locate(self, head: bytes, tail: bytes, length: int) -> Payload | None:
        """The payload of an item, or None if the item is not one plain, dense tensor.

        Args:
            head: the first ``HEAD_BYTES`` bytes of the item, or all of a shorter one.
            tail: the last ``TAIL_BYTES`` bytes, likewise.
            length: bytes of the item.
        """
        key = (length, head[:256])
        shape = self._known.get(key)
        if shape is None or not head.startswith(shape.prefix):
            try:
                shape = _parse(head, tail, length)
            # Damaged bytes can raise any error of zipfile and pickle.
            except Exception:
                return None
            self._known[key] = shape
        if shape.crc_at is None:
            return shape.payload
        crc = int.from_bytes(tail[shape.crc_at : shape.crc_at + 4], "little")
        return shape.payload._replace(crc32=crc)


class _Sparse(io.RawIOBase):
    """A file of which only the start and the end are known."""

    def __init__(self, head: bytes, tail: bytes, length: int) -> None:
        self.head, self.tail, self.length = head, tail, length
        self.at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = (0, self.at, self.length)[whence] + offset
        return self.at

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.length if size < 0 else min(self.at + size, self.length)
        tail_at = self.length - len(self.tail)
        if end <= len(self.head):
            data = self.head[self.at : end]
        elif self.at >= tail_at:
            data = self.tail[self.at - tail_at : end - tail_at]
        else:
            raise ValueError("the archive has a record where none is expected")
        self.at = end
        return data


def _parse(head: bytes, tail: bytes, length: int) -> _Shape:
    with zipfile.ZipFile(_Sparse(head, tail, length)) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        described = archive.read(records["data.pkl"])
        data = [info for name, info in records.items() if name.startswith("data/")]
    byteorder = records.get("byteorder")
    if len(data) != 1 or data[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("not one stored tensor")
    if byteorder is not None and byteorder.CRC != _CRC_OF_LITTLE:
        raise ValueError("not little-endian")
    scan(described, depth=_DEPTH_MAX)
    tensor = _Unpickler(io.BytesIO(described)).load()
    if not isinstance(tensor, _Tensor) or not all(
        type(number) is int and number >= 0 for number in (*tensor.shape, *tensor.stride)
    ):
        raise ValueError("not a tensor")
    dtype, count = tensor.storage
    if data[0].header_offset < 0:  # zipfile adapts offsets to bytes before the archive, or missing
        raise ValueError("the tensor's record is before the item's first byte")
    magic, name_length, extra_length = _LOCAL.unpack_from(head, data[0].header_offset)
    offset = data[0].header_offset + _LOCAL.size + name_length + extra_length
    size = data[0].file_size
    if magic != b"PK\3\4" or offset > len(head) or offset + size > length:
        raise ValueError("the tensor's record is not where the directory says")
    if tensor.offset != 0 or count * dtype.itemsize != size or not _is_whole(tensor, count):
        raise ValueError("a view of a larger storage")
    payload = Payload(offset, size, dtype, tensor.shape, tensor.stride, data[0].CRC)
    crc_at = offset + size + 4 - (length - len(tail))
    if size == 0:
        return _Shape(payload, head[:offset], None)
    if tail[crc_at - 4 : crc_at] != _DESCRIPTOR_MAGIC:
        raise ValueError("no checksum follows the tensor's bytes")
    return _Shape(payload, head[:offset], crc_at)


_CRC_OF_LITTLE = 434322821  # of b"little"


class _Tensor(NamedTuple):
    storage: tuple[torch.dtype, int]
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _is_whole(tensor: _Tensor, count: int) -> bool:
    """Whether the elements cover the storage without gaps and overlaps."""
    return math.prod(tensor.shape) == count and is_dense(tensor.shape, tensor.stride)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements with these strides lie one after another, in whatever order."""
    if len(stride) != len(shape):
        return False
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return 0 in shape
        expected *= size
    return True


# A file may set attributes of the classes that it names, so these stand-ins have none to set.


class _RebuildV2(metaclass=Sealed):
    """Stands for ``torch._utils._rebuild_tensor_v2``."""

    __slots__ = ()

    def __new__(  # type: ignore[misc]
        cls,
        storage: tuple[torch.dtype, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        hooks: object,
        metadata: object = None,
    ) -> _Tensor:
        if metadata:
            raise ValueError("a tensor with metadata (conjugated or negated)")
        return _Tensor(storage, offset, shape, stride)


class _RebuildV3(metaclass=Sealed):
    """Stands for ``torch._utils._rebuild_tensor_v3``."""

    __slots__ = ()

    def __new__(  # type: ignore[misc]
        cls,
        storage: tuple[torch.dtype, int],
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        requires_grad: bool,
        hooks: object,
        dtype: torch.dtype,
        metadata: object = None,
    ) -> _Tensor:
        # The storage is untyped: its length is in bytes.
        count = storage[1] // dtype.itemsize
        if metadata:
            raise ValueError("a tensor with metadata (conjugated or negated)")
        return _Tensor((dtype, count), offset, shape, stride)


class _Hooks(metaclass=Sealed):
    """Stands for the ``OrderedDict`` of a tensor's hooks, which are never saved."""

    __slots__ = ()

    def __new__(cls) -> Any:
        return None


_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
    "UntypedStorage": torch.uint8,  # its length is in bytes
}
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class _Unpickler(pickle.Unpickler):
    """Reads the description of a plain tensor, and nothing else."""

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, int]:
        kind, dtype, _, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(count, int):
            raise ValueError("not a storage")
        return dtype, count

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _RebuildV2
        if module == "torch._utils" and name == "_rebuild_tensor_v3":
            return _RebuildV3
        if (module, name) == ("collections", "OrderedDict"):
            return _Hooks
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise ValueError(f"{module}.{name} is no part of a plain tensor")
