"""The ``.metadata`` of a save, made from that of the save before it.

Between saves of one plan only a few numbers of the pickle change: where items lie that follow an
object of another size, checksums, the names of files and of the checkpoint. A template is the
pickle with places left for them, so that writing the metadata of thousands of items takes as long
as copying it.

Numbers are left room for by pickling, in the place of each, one so large that pickle spends eight
bytes on it (opcode LONG1), and different from all others, also from those that a program has in
its state dict, since it is drawn by lot; the bytes of the true number then go
where those of the large one are found. Readers do not mind that small numbers take eight bytes. The
pickle has protocol 3, which is not cut into frames, so that a path of another length may be put
into it.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.format.metadata import dumps, seal
from pyckpt.private import StorageInfo

__all__ = ["Template"]

_LONG1 = b"\x8a\x08"
_WORD = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_PROTOCOL = 3
_FIELDS = ("offset", "length", "payload_offset", "payload_length", "crc32")  # of a `Place`
_KEPT = (1 << 64) - 1  # in the place of a position: the number does not change


class Template:
    """Made of a save's metadata, for saves of the same plan.

    Args:
        metadata: as it was committed, with ``storage_data``.
        results: what each rank said of its items, in the order of its plan.
    """

    def __init__(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        self._names = [
            of_rank[0].storage_data.relative_path if of_rank else "" for of_rank in results
        ]
        self._counts = [len(of_rank) for of_rank in results]
        positions: list[int] = []
        values: list[int] = []
        path = uuid.uuid4().hex
        save_id = uuid.uuid4().hex
        base = (1 << 62) + uuid.uuid4().int % (1 << 61)
        storage_data: dict[Any, Any] = {}
        with collector_paused():
            for of_rank in results:
                for result in of_rank:
                    info, at = _with_room(result.storage_data, base + len(positions))
                    storage_data[result.index] = info
                    positions += at
                    values += _values(result.storage_data)
            body = dumps(
                Metadata(
                    metadata.state_dict_metadata,
                    metadata.planner_data,
                    storage_data,
                    StorageMeta(checkpoint_id=path, save_id=save_id),
                    metadata.version,
                ),
                _PROTOCOL,
            )
        self._save_id = save_id
        # In the pickle a string is preceded by its opcode and length.
        path_at = body.index(path.encode())
        self._head = body[: path_at - _LENGTH.size]
        self._tail = body[path_at + len(path) :]
        found = 0
        for i, position in enumerate(positions):
            if position != _KEPT:
                found = self._head.index(_LONG1 + _WORD.pack(base + i), found) + len(_LONG1)
                positions[i] = found
        self._positions = struct.pack(f"={len(positions)}Q", *positions)
        self._values = struct.pack(f"={len(values)}Q", *values)

    def fill(
        self, path: str, save_id: str, names: Sequence[str], places: Sequence[bytes]
    ) -> bytes | None:
        """The bytes of a ``.metadata`` file.

        Args:
            path, save_id: for ``storage_meta``.
            names: the file of each rank; as long as the names before.
            places: a ``Place`` of five native 64-bit words an item, for each rank.

        Returns None where more has changed than there is room for.
        """
        if [len(name) for name in names] != [len(name) for name in self._names]:
            return None
        head = self._head
        for before, name in zip(self._names, names, strict=True):
            if before:
                head = head.replace(before.encode(), name.encode())
        words = b"".join(places)
        body = bytearray(head)
        if not _C.fill_words(body, self._positions, self._values, words):
            return None
        encoded = path.encode("utf-8", "surrogatepass")  # as pickle does
        body += _LENGTH.pack(len(encoded)) + encoded
        body += self._tail.replace(self._save_id.encode(), save_id.encode())
        return seal(bytes(body))


def _values(info: StorageInfo) -> list[int]:
    known = {"payload_offset": 0, "payload_length": info.length, "crc32": 0, **vars(info)}
    return [known[field] for field in _FIELDS]


def _with_room(info: StorageInfo, first: int) -> tuple[StorageInfo, list[int]]:
    """A record with large numbers for those that may change, and which of its fields they are.
    ``first`` is the first of the five large numbers."""
    roomy = StorageInfo(info.relative_path, first, info.length)
    is_object = vars(info).get("payload_length", info.length) == info.length
    at = [0, _KEPT, _KEPT, _KEPT, _KEPT]
    if is_object:
        roomy.length = first + 1
        at[1] = 0
    for i, field in enumerate(_FIELDS[2:], 2):
        if field not in vars(info):
            continue
        if field == "crc32" or (field == "payload_length" and is_object):
            vars(roomy)[field] = first + i
            at[i] = 0
        else:
            vars(roomy)[field] = vars(info)[field]
    if "payload_stride" in vars(info):
        vars(roomy)["payload_stride"] = vars(info)["payload_stride"]
    return roomy, at
