"""`RemoteFolder`: a checkpoint in an object store, as a load sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pyckpt.errors import CorruptCheckpoint
from pyckpt.remote.address import open_store, telling
from pyckpt.remote.job import RemoteJob

if TYPE_CHECKING:
    from obstore import ReadableFile
    from obstore.store import ObjectStore

__all__ = ["RemoteFolder"]


class RemoteFile:
    """An object as a file, whose errors are ``OSError``."""

    def __init__(self, file: ReadableFile, path: str) -> None:
        self._file = file
        self._path = path

    def seek(self, offset: int) -> int:
        with telling(self._path):
            return self._file.seek(offset)

    def read(self, size: int) -> bytes:
        with telling(self._path):
            return bytes(self._file.read(size))


class RemoteFolder:
    """The objects below one URL.

    Args:
        url: of the checkpoint, such as ``s3://bucket/run/step-00000100``.

    Raises:
        ImportError: obstore is not installed.
        ValueError: the URL is of no kind that obstore knows.
    """

    is_remote = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._sizes: dict[str, int] | None = None

    @property
    def store(self) -> ObjectStore:
        return open_store(self.url)

    def __str__(self) -> str:
        return self.url

    def path(self, name: str) -> str:
        """The address of an object, for messages."""
        return f"{self.url}/{name}"

    def read(self, name: str, *, most: int) -> bytes:
        """An object as a whole.

        Raises:
            OSError: there is none, or the store fails.
            CorruptCheckpoint: it has more than ``most`` bytes.
        """
        import obstore

        with telling(self.path(name)):
            found = obstore.get(self.store, name)
            size = found.meta["size"]
            if size <= most:
                return bytes(found.bytes())
        raise CorruptCheckpoint(
            f"{self.path(name)} has {size} bytes, and no such file has more than {most}",
            path=self.path(name),
            expected=most,
            found=size,
        )

    def range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of an object.

        Raises:
            OSError: there is no such object, or the store fails.
        """
        import obstore

        with telling(self.path(name)):
            return bytes(obstore.get_range(self.store, name, start=offset, length=length))

    def time(self, name: str) -> float:
        """When an object was written, in seconds since 1970, by the store's clock.

        Raises:
            OSError: there is none, or the store fails.
        """
        import obstore

        with telling(self.path(name)):
            return obstore.head(self.store, name)["last_modified"].timestamp()

    def folders(self) -> list[str]:
        """Names of the folders right below the URL.

        Raises:
            OSError: the store fails.
        """
        import obstore

        with telling(self.url):
            found = obstore.list_with_delimiter(self.store)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    @contextmanager
    def open(self, name: str) -> Iterator[RemoteFile]:
        """An object as a file that can be read and sought in.

        Raises:
            OSError: there is none, or the store fails.
        """
        import obstore

        with telling(self.path(name)):
            found = obstore.open_reader(self.store, name)
        yield RemoteFile(found, self.path(name))

    def sizes(self) -> dict[str, int]:
        """Names and bytes of the objects, without those in folders below.

        Raises:
            OSError: the store fails.
        """
        import obstore

        with telling(self.url):
            found = obstore.list_with_delimiter(self.store)["objects"]
        return {one["path"]: one["size"] for one in found}

    def size(self, name: str) -> int:
        """Bytes of an object. All are asked for at once, at the first call.

        Raises:
            OSError: there is none, or the store fails.
        """
        if self._sizes is None:
            self._sizes = self._listed()
        found = self._sizes.get(name)
        return self._size_of(name) if found is None else found

    def _listed(self) -> dict[str, int]:
        import obstore
        from obstore.exceptions import BaseError

        try:
            listed = obstore.list_with_delimiter(self.store)
        except (BaseError, NotImplementedError):
            return {}  # plain HTTP servers list nothing
        return {one["path"]: one["size"] for one in listed["objects"]}

    def _size_of(self, name: str) -> int:
        import obstore

        with telling(self.path(name)):
            return obstore.head(self.store, name)["size"]

    def job(self, *, checksum: bool) -> RemoteJob:
        """A job that reads objects of this folder."""
        return RemoteJob(self.store, self.url, checksum=checksum)

    def add(self, job: RemoteJob, name: str) -> int:
        """Name an object for a job; returns its number."""
        return job.add_object(name)
