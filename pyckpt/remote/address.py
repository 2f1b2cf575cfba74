"""Addresses of checkpoints in object stores, and the store of each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["is_url", "local_path", "open_store", "telling"]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of an object store, and not a path of a file system."""
    return "://" in os.fspath(path)


def local_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The path in a ``file://`` URL, which names a file system like any other path; all else as it
    is."""
    given = os.fspath(path)
    if not given.startswith("file://"):
        return path
    host, _, rest = given.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise ValueError(f"{given!r} names a host, {host!r}; a path in a URL begins file:///")
    return "/" + unquote(rest)


@lru_cache(maxsize=64)
def open_store(url: str) -> ObjectStore:
    """The store at a URL: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``memory://``, ``http://``.

    Names that the store is given later are below the URL's path. Credentials, endpoint and region
    come from the environment, by the names that obstore documents (``AWS_ENDPOINT_URL``, say).

    Raises:
        ImportError: obstore is not installed.
        ValueError: the URL is of no kind that obstore knows.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise ValueError(
            f"{url!r} has a '?' or '#', which no name in an object store can have here"
        )
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError(
            f'{url}: reading from an object store needs obstore: pip install "pyckpt[cloud]"'
        ) from error
    try:
        return from_url(url)
    except (BaseError, ValueError) as error:
        raise ValueError(
            f"{url!r} is no address of an object store: {_first_line(error)}"
        ) from None


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn obstore's errors into ``OSError`` with an errno, and ``what`` as the file's name."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", what) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(
            errno.EACCES, f"the store refuses the credentials: {_first_line(error)}", what
        ) from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(errno.EEXIST, "another program wrote it", what) from error
    except exceptions.BaseError as error:
        # Not EIO, which a disk says of damage: a store that fails says nothing of what it has.
        raise OSError(errno.ETIMEDOUT, f"the store failed: {_first_line(error)}", what) from error


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0]
