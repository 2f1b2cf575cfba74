"""Verifies the bytes around tensors. Stock PyTorch needs them to read a tensor; pyckpt does not."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.envelope import envelope_of
from pyckpt.format.files import open_regular
from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator
from pyckpt.format.metadata import StorageInfo
from pyckpt.train.store.pieces import Window

__all__ = ["EnvelopeItem", "holds_the_tensor", "verify_envelopes"]


class EnvelopeItem(NamedTuple):
    """A tensor that pyckpt wrote."""

    key: str
    info: StorageInfo
    dtype: torch.dtype
    shape: tuple[int, ...]


def verify_envelopes(directory: Path, metadata: Metadata) -> None:
    """Compare the bytes around each tensor that pyckpt wrote with the expected ones.

    These depend on the tensor's dtype, shape, strides and checksum, and on the version of torch
    that wrote them. If none in a checkpoint is as this version writes it, another version wrote it.
    Then each item must be an archive that holds the tensor, and whose other records are whole.

    Raises:
        CorruptCheckpoint: the bytes around a tensor are wrong; names the first.
        OSError: a file cannot be read.
    """
    different: list[EnvelopeItem] = []
    same = 0
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for item in _items(metadata):
            name = item.info.relative_path
            if name not in files:
                files[name] = stack.enter_context(open_regular(directory / name))
            if _is_as_written_here(item, files[name].fileno()):
                same += 1
            else:
                different.append(item)
        for item in different:
            path = directory / item.info.relative_path
            if same or not holds_the_tensor(item, files[item.info.relative_path]):
                raise CorruptCheckpoint(
                    f"{item.key} in {path} at {item.info.offset}: the bytes around the tensor are "
                    "not those that were written; pyckpt reads it, and other programs may not",
                    path=str(path),
                    key=item.key,
                    offset=item.info.offset,
                )


def _items(metadata: Metadata) -> Iterator[EnvelopeItem]:
    storage = metadata.storage_data or {}
    for key, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        for chunk in tensor.chunks:
            info = storage.get(MetadataIndex(key, chunk.offsets))
            if info is not None and vars(info).get("payload_offset"):
                yield EnvelopeItem(key, info, tensor.properties.dtype, tuple(chunk.sizes))


def _is_as_written_here(item: EnvelopeItem, descriptor: int) -> bool:
    extra = vars(item.info)
    stride = extra.get("payload_stride") or torch.empty(item.shape, device="meta").stride()
    layout = envelope_of(item.dtype, item.shape, tuple(stride))
    if layout is None:
        return False
    suffix = layout.envelope.suffix(extra["crc32"])
    begin = item.info.offset
    length = len(layout.envelope.prefix)
    after = length + extra["payload_length"]
    return (
        extra["payload_offset"] == length
        and item.info.length == after + len(suffix)
        and os.pread(descriptor, length, begin) == layout.envelope.prefix
        and os.pread(descriptor, len(suffix), begin + after) == suffix
    )


def holds_the_tensor(item: EnvelopeItem, file: Any) -> bool:
    """Whether an item is an archive that holds its tensor, whichever torch wrote it.

    Args:
        file: the data file, open to read.

    Raises:
        OSError: the file cannot be read.
    """
    extra = vars(item.info)
    begin, length = item.info.offset, item.info.length
    head = os.pread(file.fileno(), min(HEAD_BYTES, length), begin)
    tail_length = min(TAIL_BYTES, length)
    tail = os.pread(file.fileno(), tail_length, begin + length - tail_length)
    found = Locator().locate(head, tail, length)
    if found is None or (found.offset, found.length, found.dtype, found.shape, found.crc32) != (
        extra["payload_offset"],
        extra["payload_length"],
        item.dtype,
        item.shape,
        extra["crc32"],
    ):
        return False
    stride = extra.get("payload_stride")
    if stride is not None and tuple(found.stride) != stride:
        return False
    try:
        with zipfile.ZipFile(Window(file, begin, length)) as archive:  # type: ignore[arg-type]
            for record in archive.infolist():
                if not record.filename.endswith("/data/0"):  # the tensor itself
                    archive.read(record)
    except OSError:
        raise
    except Exception:  # as in `Locator.locate`
        return False
    return True
