"""Files of frozen parts, which one checkpoint has from another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pyckpt.dcp.frozen import KnownItem
from pyckpt.dcp.hashing import RunningHash
from pyckpt.engine import Engine
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.store.pieces import Direct, Stored, read_pieces, stored

__all__ = ["frozen_items", "verify_items"]


def frozen_items(directory: Path, rank: int) -> list[KnownItem]:
    """What a checkpoint has in the files of frozen parts that a rank of this number wrote.

    Raises:
        OSError, PyckptError: its metadata cannot be read.
    """
    metadata = metadata_format.read(directory / commit.metadata_name())
    items = []
    for index, info in (metadata.storage_data or {}).items():
        found = vars(info).get("xxh3")
        if found is None or not commit.is_frozen_file(info.relative_path, rank):
            continue
        described = metadata.state_dict_metadata[index.fqn]
        if not isinstance(described, TensorStorageMetadata):
            continue
        size = next((c.sizes for c in described.chunks if c.offsets == index.offset), None)
        if size is not None:
            items.append(KnownItem(index, info, described.properties.dtype, size, found))
    return items


def verify_items(
    directory: Path, items: Sequence[KnownItem], *, direct: Direct, engine: Engine | None
) -> Iterator[KnownItem | None]:
    """Read items of a checkpoint from the disk, past the page cache where that is possible.

    Yields after each piece: the item that is read to its end, or None.

    Raises:
        CorruptCheckpoint: one does not have its checksum, or its hash.
        OSError: a file cannot be read.
    """
    payloads: list[Stored] = []
    of: dict[Stored, KnownItem] = {}
    for item in items:
        payload = stored(item.index.fqn, directory, item.info)
        if payload is None:
            raise CorruptCheckpoint(f"{item.index.fqn} has no checksum", key=item.index.fqn)
        payloads.append(payload)
        of[payload] = item
    payloads.sort(key=lambda one: one.offset)
    running, left = RunningHash(), -1
    for payload, piece in read_pieces(payloads, direct=direct, engine=engine):
        if left <= 0:
            running, left = RunningHash(), payload.length
        running.add(piece)
        left -= piece.numel()
        if left > 0:
            yield None
            continue
        item = of[payload]
        if running.hexdigest() != item.hash:
            raise CorruptCheckpoint(
                f"{payload.key} in {payload.path} at {payload.offset}: XXH3-128 expected "
                f"{item.hash}, found {running.hexdigest()}",
                path=str(payload.path),
                key=payload.key,
                offset=payload.offset,
            )
        yield item
