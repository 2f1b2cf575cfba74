"""Checks that the bytes that a load reads are the bytes that were saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from pyckpt import _C
from pyckpt.dcp.folder import Folder
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format.item import Payload, has_its_checksums
from pyckpt.format.metadata import StorageInfo

__all__ = ["Check", "Verification", "damaged"]


@dataclass(slots=True)
class Check:
    """The check of one saved tensor, which is made when its parts are read."""

    key: str
    info: StorageInfo
    payload: Payload
    tiles: list[tuple[int, int, int]]
    """The runs of the payload's bytes that were read. Each is the offset of its first byte, the
    offset behind its last byte, and the CRC-32 of its bytes."""


class Verification:
    """The checks of one load.

    Args:
        folder: of the checkpoint.
        enabled: whether to compare checksums. If not, everything that is read counts as unverified.
    """

    def __init__(self, folder: Folder, *, enabled: bool) -> None:
        self.enabled = enabled
        self.unverified: set[str] = set()
        """Keys of items that were read, and for which there was no checksum to compare."""
        self._folder = folder
        self._checks: dict[tuple[str, int], Check] = {}

    def of(self, item: ReadItem, info: StorageInfo, payload: Payload) -> Check:
        """The check of a saved tensor, of which an item reads a part."""
        place = (info.relative_path, info.offset)
        check = self._checks.get(place)
        if check is None:
            check = self._checks[place] = Check(item.storage_index.fqn, info, payload, [])
        return check

    def check_tensors(self) -> None:
        """Raise if a tensor that was read as a whole has another checksum than was saved."""
        if not self.enabled:
            self.unverified.update(check.key for check in self._checks.values())
            return
        wrong = []
        for check in self._checks.values():
            crc32 = _checksum_of(check)
            if crc32 is None or check.payload.crc32 is None:
                self.unverified.add(check.key)
            elif crc32 != check.payload.crc32:
                wrong.append((check, crc32))
        self._checks.clear()
        if wrong:
            check, found = wrong[0]
            raise _mismatch(
                check.key,
                self._folder.path(check.info.relative_path),
                check.info.offset + check.payload.offset,
                check.payload.crc32,
                found,
                others=len(wrong) - 1,
            )

    def check_plain(self, wrong: Sequence[tuple[str, str, int, int, int, bool]]) -> None:
        """Raise where `_C.PlainReads.check` found that something differs from what was saved."""
        # Tensors first, as where there is an item for each.
        for is_tensor in (True, False):
            of_kind = [found for found in wrong if found[-1] is is_tensor]
            if of_kind:
                key, name, offset, expected, found, _ = of_kind[0]
                others = len(of_kind) - 1 if is_tensor else 0
                raise _mismatch(key, self._folder.path(name), offset, expected, found, others)

    def check_bytes(self, item: ReadItem, info: StorageInfo, data: bytearray) -> None:
        """Check an item that was read whole, as bytes."""
        key = item.storage_index.fqn
        expected = info.__dict__.get("crc32")
        if not self.enabled:
            self.unverified.add(key)
            return
        if expected is None:
            # Another writer saved it. Only tensors are looked at: there may be thousands of
            # objects, and each takes a while.
            sound = None
            if item.type == LoadItemType.TENSOR:
                sound = has_its_checksums(data)
            if sound is None:
                self.unverified.add(key)
            elif not sound:
                raise damaged(item, info, self._folder, "its checksums do not match")
            return
        found = _C.crc32(data)
        if found != expected:
            path = self._folder.path(info.relative_path)
            raise _mismatch(key, path, info.offset, expected, found)


def _checksum_of(check: Check) -> int | None:
    """The checksum of a payload, from those of its tiles; None if the tiles do not cover it."""
    if len(check.tiles) == 1 and check.tiles[0][:2] == (0, check.payload.length):
        return check.tiles[0][2]
    crc32 = at = 0
    for begin, end, checksum in sorted(check.tiles):
        if begin > at:
            return None
        if begin == at:
            crc32 = _C.crc32_shift(crc32, end - begin) ^ checksum
            at = end
        elif end > at:
            return None  # from tiles that overlap in part, the checksum of the whole is not known
    return crc32 if at == check.payload.length and check.tiles else None


def damaged(item: ReadItem, info: StorageInfo, folder: Folder, what: str) -> CorruptCheckpoint:
    """An error that says which item is damaged, and how."""
    return CorruptCheckpoint(
        f"{item.storage_index.fqn} in {folder.path(info.relative_path)} at {info.offset}: {what}",
        key=item.storage_index.fqn,
        path=folder.path(info.relative_path),
        offset=info.offset,
    )


def _mismatch(
    key: str, path: str, offset: int, expected: int | None, found: int, others: int = 0
) -> CorruptCheckpoint:
    more = f" ({others} more items are damaged)" if others else ""
    return CorruptCheckpoint(
        f"{key} in {path} at {offset}: CRC-32 expected {expected:#010x}, found {found:#010x}{more}",
        key=key,
        path=path,
        offset=offset,
        expected=expected,
        found=found,
    )
