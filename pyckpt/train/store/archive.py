"""A ``torch.save`` file of many tensors, whose bytes are written later and in pieces."""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pyckpt.format.files import naming

__all__ = ["TorchLayout", "torch_layout"]

_CENTRAL_BYTES = 46
_CENTRAL_CRC_AT = 16
# More than torch writes of a file without the bytes of its tensors.
_ROOM = 1 << 16
_ROOM_OF_ONE = 1 << 10
_DESCRIPTOR_MAGIC = b"PK\7\10"


class TorchLayout(NamedTuple):
    """A file that is complete except for the bytes of the tensors and their checksums."""

    file: Any
    offsets: dict[str, int]
    """The offset of each tensor's bytes in the file, which are in row-major order."""
    records: dict[str, str]

    def finish(self, checksums: Mapping[str, int]) -> None:
        """Write the checksums into the archive. torch does not check them, but other tools do."""
        by_record = {self.records[name]: crc32 for name, crc32 in checksums.items()}
        descriptor = self.file.fileno()
        with zipfile.ZipFile(self.file) as archive:
            at = archive.start_dir
            for record in archive.infolist():
                name = record.filename.partition("/")[2]
                if name in by_record and record.file_size:
                    crc32 = struct.pack("<I", by_record[name])
                    with naming(self.file.name):
                        os.pwrite(descriptor, crc32, at + _CENTRAL_CRC_AT)
                    end = _data_offset(descriptor, record.header_offset) + record.file_size
                    if os.pread(descriptor, 4, end) == _DESCRIPTOR_MAGIC:
                        with naming(self.file.name):
                            os.pwrite(descriptor, crc32, end + 4)
                header = os.pread(descriptor, _CENTRAL_BYTES, at)
                at += _CENTRAL_BYTES + sum(struct.unpack_from("<HHH", header, 28))


def _data_offset(descriptor: int, header_offset: int) -> int:
    name, extra = struct.unpack("<HH", os.pread(descriptor, 4, header_offset + 26))
    return header_offset + 30 + int(name) + int(extra)


def _refuse_full(file: Any, room: int) -> None:
    """Raise the system's error if a file cannot get so many bytes more. When torch could not write
    a file, its own error does not say why."""
    with naming(file.name):
        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, room)


def torch_layout(
    file: Any,
    tensors: Mapping[str, tuple[torch.Size, torch.dtype]],
    aliases: Mapping[str, str],
) -> TorchLayout:
    """Write the file of ``torch.save`` for a dict of tensors, with room for their bytes.

    Args:
        file: an open file, empty, with a descriptor and a name.
        tensors: name to shape and dtype.
        aliases: names that share the memory of other names.
    """
    with FakeTensorMode():
        state = {
            name: torch.empty(size, dtype=dtype, device="cpu")
            for name, (size, dtype) in tensors.items()
        }
    state |= {alias: state[name] for alias, name in aliases.items()}
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        try:
            torch.save(state, file.name)
        except RuntimeError:
            _refuse_full(file, _ROOM + _ROOM_OF_ONE * len(state))
            raise
    reader: Any = torch._C.PyTorchFileReader(file.name)
    # torch numbers the storages in the order of the dict.
    records = {name: f"data/{number}" for number, name in enumerate(tensors)}
    offsets = {name: reader.get_record_offset(record) for name, record in records.items()}
    return TorchLayout(file, offsets, records)
