"""`Objects`: what is below one URL, for those that write there."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyckpt.remote.address import open_store, telling

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ObjectStore

__all__ = ["PIECE_BYTES", "Objects", "Version"]

PIECE_BYTES = 8 << 20
"""An upload sends so much in one request, and more if the object would have too many parts."""
_PARTS_MAX = 9_000  # S3 takes 10,000 in one upload
_PARTS_AT_A_TIME = 4
_REMOVED_AT_A_TIME = 500
_ATTEMPTS = 4
_PATIENCE_SECONDS = 0.5


@dataclass(frozen=True)
class Version:
    """Which of the objects that had one name, one after another."""

    e_tag: str | None
    version: str | None

    @classmethod
    def of(cls, meta: Any) -> Version:
        """From what obstore says of an object."""
        return cls(meta["e_tag"], meta["version"])

    def _condition(self) -> UpdateVersion:
        known: UpdateVersion = {}
        if self.e_tag is not None:
            known["e_tag"] = self.e_tag
        if self.version is not None:
            known["version"] = self.version
        return known


class Objects:
    """The objects below one URL. Any thread may call the methods.

    obstore repeats a request that failed for a while, with growing delays; by default for three
    minutes, ten times at most. An error here is one that stayed.

    Args:
        url: as for ``pyckpt.remote.address.open_store``.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the URL is of no kind that obstore knows.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.store: ObjectStore = open_store(self.url)

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> str:
        """The address of an object, for messages."""
        return f"{self.url}/{name}"

    def list(self, prefix: str = "") -> dict[str, int]:
        """Names and bytes of the objects whose names begin with a folder's, ``"a/"``. The names
        are without that."""
        import obstore

        with telling(self.path(prefix)):
            found = [one for page in obstore.list(self.store, prefix or None) for one in page]
        return {one["path"][len(prefix) :]: one["size"] for one in found}

    def version(self, name: str) -> Version | None:
        """The version of an object; None if there is none."""
        import obstore

        try:
            with telling(self.path(name)):
                return Version.of(obstore.head(self.store, name))
        except FileNotFoundError:
            return None

    def read(self, name: str) -> tuple[bytes, Version] | None:
        """An object, and its version; None if there is none."""
        import obstore

        try:
            with telling(self.path(name)):
                found = obstore.get(self.store, name)
                return bytes(found.bytes()), Version.of(found.meta)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, by one request."""
        import obstore

        with telling(self.path(name)):
            obstore.put(self.store, name, data, use_multipart=False)

    def put_pieces(self, name: str, pieces: Iterable[bytes], *, expected: int) -> None:
        """Write an object from its bytes, several parts at a time, each repeated if it fails. The
        object is there when all of it is. If ``pieces`` raises, it never is.

        At most ``_PARTS_AT_A_TIME`` parts, and two more, are in memory.

        Args:
            expected: about how many bytes there will be.
        """
        import obstore

        coming = iter(pieces)
        first: list[bytes] = []
        size = 0
        for piece in coming:
            first.append(piece)
            size += len(piece)
            if size > PIECE_BYTES:
                break
        else:
            self.put(name, b"".join(first))
            return

        def all_pieces() -> Iterator[bytes]:
            while first:
                yield first.pop(0)
            yield from coming

        part = max(PIECE_BYTES, -(-(expected + expected // 8) // _PARTS_MAX))
        with telling(self.path(name)):
            obstore.put(
                self.store,
                name,
                all_pieces(),
                chunk_size=part,
                max_concurrency=_PARTS_AT_A_TIME,
            )

    def copy(self, source: str, target: str) -> None:
        """Have the store copy an object, with no bytes of it coming here."""
        import obstore

        with telling(self.path(target)):
            obstore.copy(self.store, source, target)

    def replace(self, name: str, data: bytes, seen: Version | None) -> None:
        """Write an object if nobody else has written it since. Of several programs that do so at
        the same time, one succeeds.

        Stores that know no conditions are asked whether somebody has, and then written to.

        Args:
            data: bytes that no other program writes there.
            seen: its version; None if there was none.

        Raises:
            FileExistsError: another program wrote it.
        """
        for attempt in range(_ATTEMPTS):
            try:
                with telling(self.path(name)):
                    return self._replace(name, data, seen)
            except OSError as error:
                # The store may have done it, and then failed to say so.
                if self._has(name, data):
                    return None
                last = attempt == _ATTEMPTS - 1
                if last or isinstance(error, FileExistsError | PermissionError):
                    raise
            time.sleep(_PATIENCE_SECONDS * 2**attempt)
        return None

    def _replace(self, name: str, data: bytes, seen: Version | None) -> None:
        import obstore
        from obstore.exceptions import NotSupportedError

        try:
            mode: Any = "create" if seen is None else seen._condition()
            obstore.put(self.store, name, data, mode=mode, use_multipart=False)
        except (NotSupportedError, NotImplementedError):
            if self.version(name) != seen:
                raise FileExistsError(
                    errno.EEXIST, "another program wrote it", self.path(name)
                ) from None
            obstore.put(self.store, name, data, use_multipart=False)

    def _has(self, name: str, data: bytes) -> bool:
        try:
            found = self.read(name)
        except OSError:
            return False
        return found is not None and found[0] == data

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects. One that is not there is fine."""
        import obstore

        going = sorted(names)
        for begin in range(0, len(going), _REMOVED_AT_A_TIME):
            some = going[begin : begin + _REMOVED_AT_A_TIME]
            try:
                with telling(self.path(some[0])):
                    obstore.delete(self.store, some)
            except FileNotFoundError:
                # Some stores say so, and leave those behind it.
                for name in some:
                    with suppress(FileNotFoundError), telling(self.path(name)):
                        obstore.delete(self.store, name)
