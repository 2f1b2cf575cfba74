"""The bytes that ``torch.save`` puts around a tensor's raw bytes.

A file that ``torch.save(tensor)`` writes is a zip archive of stored (not compressed) records: a
pickle that describes the tensor, a few constants, and one record that is the tensor's memory. For
tensors of one dtype, shape and strides everything but that memory and the checksums is the same. So
the archive is made once, cut at the memory into a prefix and a suffix, and used for all of them.
The engine fills in the checksums (csrc/envelope.h).

The records are those that this torch writes for a tensor of one element, with the numbers of
elements, sizes and strides replaced. The archive is laid out as torch's PyTorchStreamWriter does it
(caffe2/serialize/inline_container.cc, over miniz), so that it has byte for byte what ``torch.save``
writes. The tests check that. At run time, an envelope is used for a dtype only after ``torch.load``
has read a tensor from one. If a new torch changes its format, pyckpt falls back to ``torch.save``:
that costs speed, but no checkpoint.

Format: PKWARE APPNOTE 6.3.10, sections 4.3 (records) and 4.5.3 (zip64).
"""

from __future__ import annotations

import io
import logging
import math
import pickle
import struct
import zipfile
import zlib
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from pyckpt import _C
from pyckpt.format.item import is_dense
from pyckpt.speaking import for_all

__all__ = ["Archive", "Layout", "Record", "envelope_of"]

_logger = logging.getLogger("pyckpt")

_PAYLOAD = "data/0"
_ALIGNMENT = ".storage_alignment"
_ID = ".data/serialization_id"
_ID_DIGITS = 20  # of each of its two halves: a hash of the records' names, one of their checksums

# Their tensors carry scales and zero points besides their memory.
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}

_LIMIT_32 = 0xFFFFFFFF
_FLAG_DESCRIPTOR = 0x0008  # sizes and checksum follow the data
_FLAG_UTF8 = 0x0800
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_CENTRAL_CRC_AT = 16
_END_64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")


class Layout(NamedTuple):
    """How tensors of one dtype, shape and strides are written."""

    envelope: _C.Envelope
    stride: tuple[int, ...] | None
    """Strides, in elements, of the written bytes; None if they are in row-major order."""
    order: tuple[int, ...] | None
    """Dimensions from the outermost to the innermost in the written bytes; None if the tensor's
    memory is written as it is, or in its own order of dimensions."""


class Record(NamedTuple):
    """A record of an archive."""

    name: str
    """The path below the archive's root."""
    data: bytes


class _Template(NamedTuple):
    """The records that ``torch.save`` writes for a tensor of one element of a dtype."""

    archive: str
    records: list[Record]
    pickle_index: int
    rebuild: Any
    arguments: tuple[Any, ...]
    storage: tuple[Any, ...]


@lru_cache(maxsize=4096)
def envelope_of(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Layout | None:
    """The envelope for plain tensors of this dtype, shape and strides (in elements), or None if
    tensors of this dtype must go through ``torch.save`` itself.

    As with stock ``FileSystemWriter``, tensors that cover their memory without gaps and overlaps
    keep their strides, and others get those that ``clone`` gives them.
    """
    template = _checked_template(dtype)
    if template is None:
        return None
    contiguous = _contiguous_stride(shape)
    written, order = contiguous, None
    if 0 not in shape:
        if is_dense(shape, stride):
            written = stride
        else:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            written = torch.empty_like(tensor).stride()
            if written != contiguous:
                order = tuple(sorted(range(len(shape)), key=lambda d: (-written[d], d)))
    envelope = _make_envelope(template, shape, written, dtype.itemsize * math.prod(shape))
    return Layout(envelope, None if written == contiguous else written, order)


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


@cache
def _checked_template(dtype: torch.dtype) -> _Template | None:
    """The template of a dtype, if an envelope made from it can be loaded."""
    if dtype in _QUANTIZED:
        return None
    try:
        template = _read_template(dtype)
        tensor = torch.empty((3, 2), dtype=dtype, device="cpu")
        tensor.view(torch.uint8).fill_(0)
        payload = bytes(tensor.numel() * tensor.itemsize)
        envelope = _make_envelope(template, (3, 2), (1, 3), len(payload))
        item = envelope.prefix + payload + envelope.suffix(_C.crc32(payload))
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        if loaded.dtype != dtype or loaded.shape != (3, 2) or loaded.stride() != (1, 3):
            raise ValueError(f"an envelope for (3, 2), strides (1, 3) came back as {loaded}")
    except Exception as error:
        _logger.log(
            for_all(logging.WARNING), "%s is written slowly, with torch.save: %s", dtype, error
        )
        return None
    return template


class _TemplateUnpickler(pickle.Unpickler):
    """Reads the pickle of a tensor, and keeps the call that rebuilds it instead of making it."""

    storage: tuple[Any, ...]

    def persistent_load(self, pid: Any) -> _Storage:
        self.storage = pid
        return _Storage()

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if name.startswith("_rebuild"):
            return lambda *arguments: (found, arguments)
        return found


class _Storage:
    """Stands for the storage in a pickle."""


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


class _TemplatePickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, storage: tuple[Any, ...]) -> None:
        super().__init__(file, protocol=2)
        self.storage = storage

    def persistent_id(self, obj: Any) -> Any:
        return self.storage if isinstance(obj, _Storage) else None


def _read_template(dtype: torch.dtype) -> _Template:
    file = io.BytesIO()
    torch.save(torch.empty(1, dtype=dtype, device="cpu"), file)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        root = names[0].split("/")[0]
        records = [Record(name.removeprefix(f"{root}/"), archive.read(name)) for name in names]
    index = [record.name for record in records].index("data.pkl")
    unpickler = _TemplateUnpickler(io.BytesIO(records[index].data))
    rebuild, arguments = unpickler.load()
    storage = unpickler.storage
    if arguments[1:4] != (0, (1,), (1,)) or storage[0] != "storage" or storage[2:4] != ("0", "cpu"):
        raise ValueError("torch.save describes tensors in a way that is not known here")
    return _Template(root, records, index, rebuild, arguments, storage)


def _make_envelope(
    template: _Template, shape: tuple[int, ...], stride: tuple[int, ...], size: int
) -> _C.Envelope:
    """The envelope of a tensor of ``size`` bytes."""
    # A storage's length is in elements, or in bytes where torch pickles it as untyped.
    length = template.storage[4] * math.prod(shape)
    pickled = io.BytesIO()
    arguments = (_Storage(), 0, tuple(shape), tuple(stride), *template.arguments[4:])
    _TemplatePickler(pickled, (*template.storage[:4], length)).dump(
        _Call(template.rebuild, arguments)
    )
    records = list(template.records)
    records[template.pickle_index] = Record("data.pkl", pickled.getvalue())
    return Archive(template.archive, records, size).envelope()


class Archive:
    """Lays out the archive of some records without the bytes of one of them, the payload."""

    def __init__(
        self, root: str, records: list[Record], payload_size: int, *, payload: str = _PAYLOAD
    ) -> None:
        self.root = root
        self.records = records
        self.payload_size = payload_size
        self.payload = payload
        alignments = [record.data for record in records if record.name == _ALIGNMENT]
        self.alignment = int(alignments[0]) if alignments else 64
        # The bytes of the archive without the payload, and its present end with the payload.
        self.prefix: bytes | None = None
        self.written = bytearray()
        self.end = 0
        self.places: dict[str, int] = {}  # in the suffix: of a record's data
        self.crc_places: dict[str, list[int]] = {}  # in the suffix: of a record's checksum

    def envelope(self) -> _C.Envelope:
        offsets = {record.name: self._add(record) for record in self.records}
        central_at = self.end
        for record in self.records:
            self._write(self._central_header(record, offsets[record.name]))
        self._write(self._end_records(central_at))
        assert self.prefix is not None
        names = [record.name for record in self.records]
        split = names.index(self.payload)
        checksums = [zlib.crc32(record.data) for record in self.records]
        arguments: dict[str, Any] = {}
        if _ID in names:
            last = names.index(_ID)
            arguments = {
                "id_position": self.places[_ID],
                "id_size": len(self.records[last].data),
                "id_hash_position": self.places[_ID] + _ID_DIGITS,
                "id_crc_positions": self.crc_places[_ID],
                "crcs_before": checksums[:split],
                "crcs_after": checksums[split + 1 : last],
            }
        return _C.Envelope(
            prefix=self.prefix,
            suffix=bytes(self.written),
            payload_size=self.payload_size,
            crc_positions=self.crc_places[self.payload],
            **arguments,
        )

    def _write(self, data: bytes) -> None:
        self.written += data
        self.end += len(data)

    def _size(self, record: Record) -> int:
        return self.payload_size if record.name == self.payload else len(record.data)

    def _name(self, record: Record) -> bytes:
        return f"{self.root}/{record.name}".encode()

    def _is_large(self, record: Record, offset: int) -> bool:
        return self._size(record) >= _LIMIT_32 or offset >= _LIMIT_32

    def _flags(self, record: Record) -> int:
        return _FLAG_UTF8 | (_FLAG_DESCRIPTOR if self._size(record) else 0)

    def _add(self, record: Record) -> int:
        """Write a record; return its offset in the archive."""
        offset = self.end
        size = self._size(record)
        name = self._name(record)
        large = self._is_large(record, offset)
        # The second size is that of the compressed data, which miniz does not know here: 0.
        extra = _zip64_extra((size, 0), offset) if large else b""
        # torch aligns the data of each record by a field of its own ("FB") in the header.
        start = offset + _LOCAL.size + len(name) + len(extra) + 4
        padding = -start % self.alignment
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = self._flags(record)
        self._write(_LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)))
        self._write(name + extra)
        if record.name == self.payload:
            self.prefix = bytes(self.written)
            self.written.clear()
            self.end += size
        else:
            self.places[record.name] = len(self.written)
            self._write(record.data)
        if size:
            self._write(b"PK\7\10")
            self._write_crc(record)
            self._write(struct.pack("<QQ" if large else "<II", size, size))
        return offset

    def _write_crc(self, record: Record) -> None:
        self.crc_places.setdefault(record.name, []).append(len(self.written))
        self._write(struct.pack("<I", zlib.crc32(record.data)))

    def _central_header(self, record: Record, offset: int) -> bytes:
        size = self._size(record)
        name = self._name(record)
        extra = _zip64_extra((size, size), offset) if self._is_large(record, offset) else b""
        self.crc_places.setdefault(record.name, []).append(len(self.written) + _CENTRAL_CRC_AT)
        size = min(size, _LIMIT_32)
        return (
            _CENTRAL.pack(
                b"PK\1\2", 0, 0, self._flags(record), 0, 0, 0, zlib.crc32(record.data), size, size,
                len(name), len(extra), 0, 0, 0, 0, min(offset, _LIMIT_32),
            )
            + name
            + extra
        )  # fmt: skip

    def _end_records(self, central_at: int) -> bytes:
        count = len(self.records)
        size = self.end - central_at
        return (
            _END_64.pack(
                b"PK\6\6", _END_64.size - 12, 0x031E, 45, 0, 0, count, count, size, central_at
            )
            + _LOCATOR_64.pack(b"PK\6\7", 0, self.end, 1)
            + _END.pack(b"PK\5\6", 0, 0, count, count, size, min(central_at, _LIMIT_32), 0)
        )


def _zip64_extra(sizes: tuple[int, int], offset: int) -> bytes:
    values = [*sizes] if sizes[0] >= _LIMIT_32 else []
    if offset >= _LIMIT_32:
        values.append(offset)
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)
