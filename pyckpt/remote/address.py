"""Addresses of checkpoints in object stores, and the store of each."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CHECK = (
    "Check the address, the endpoint in the environment (AWS_ENDPOINT_URL, say) and the network, "
    "and try again"
)

__all__ = [
    "is_url",
    "local_path",
    "local_place_of",
    "open_store",
    "place_of",
    "telling",
    "text_of",
    "with_home",
]

_STATUS = re.compile(r"status code: (\d{3}) ([A-Z][A-Za-z ]+)")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>")
_DURATION = re.compile(r" in [0-9.]+(ns|µs|ms|s)\b")


def text_of(path: str | os.PathLike[str], name: str = "path") -> str:
    """A path or a URL as a string.

    Args:
        name: of the argument, for the error.

    Raises:
        TypeError: it is neither, or a path of bytes.
    """
    if isinstance(path, str | os.PathLike):
        text = os.fspath(path)
        if isinstance(text, str):
            return text
    raise TypeError(
        f"{name} must be a str or an os.PathLike of a str, not a value of type "
        f"{type(path).__name__}"
    )


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the URL of an object store, and not a path of a file system."""
    return "://" in text_of(path)


def local_path(path: str | os.PathLike[str], name: str = "path") -> str | os.PathLike[str]:
    """The path in a ``file://`` URL, which names a file system like any other path; all else as it
    is. Raises as `text_of`."""
    given = text_of(path, name)
    if not given.startswith("file://"):
        return path
    host, _, rest = given.removeprefix("file://").partition("/")
    if host not in ("", "localhost"):
        raise ValueError(f"{given!r} names a host, {host!r}; a path in a URL begins file:///")
    return "/" + unquote(rest)


def with_home(path: str) -> str:
    """A path in which a leading ``~`` is the home directory.

    Raises:
        ValueError: there is no such home directory.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(
            f"{path!r}: there is no such home directory; for a directory of that name write "
            f"{os.path.join('.', path)!r}"
        )
    return expanded


def place_of(path: str | os.PathLike[str], name: str = "path") -> Path | str:
    """A path of a file system, in which ``~`` is the home directory, or the URL of a store without
    a slash at its end.

    Args:
        name: of the argument, for errors.

    Raises:
        TypeError: as `text_of`.
        ValueError: it is empty, or there is no such home directory.
    """
    path = local_path(path, name)
    if is_url(path):
        return os.fspath(path).rstrip("/")
    if not os.fspath(path):
        raise ValueError("the path is empty; for the working directory write '.'")
    place = Path(with_home(os.fspath(path)))
    # './~a' names what is here, and `Path` leaves out the dot: the result may be passed here again.
    return place.absolute() if place.parts[:1] and place.parts[0].startswith("~") else place


def local_place_of(path: str | os.PathLike[str], name: str = "path") -> Path:
    """As `place_of`, for what only a file system can have.

    Raises:
        TypeError: as `text_of`.
        ValueError: it is empty, or a URL, or there is no such home directory.
    """
    place = place_of(path, name)
    if isinstance(place, str):
        raise ValueError(f"{place!r} is a URL; this takes a path of a file system")
    return place


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
        # First, since this waits for another thread that is at it. While obstore is half imported,
        # Python takes the folder of `obstore.exceptions` for that module, and it is empty.
        import obstore  # noqa: F401
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError(
            f'{url}: an object store needs obstore: pip install "pyckpt[cloud]"'
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
        raise _denied(error, what) from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(errno.EEXIST, "another program wrote it", what) from error
    except exceptions.BaseError as error:
        raise OSError(*_described(str(error)), what) from error


def _described(text: str) -> tuple[int, str]:
    """The errno of an answer that obstore has no error of its own for, and what the store said."""
    status = _STATUS.search(text)
    code = _CODE.search(text)
    said = " ".join(
        [*(status.groups() if status else ()), *([code[1]] if code else [])]
    ) or _first_line(text)
    number = int(status[1]) if status else 0
    if number == 404:
        return errno.ENOENT, f"there is no such bucket: {said}"
    if number in (401, 403):
        return errno.EACCES, f"the store refuses the credentials that the environment has: {said}"
    if number == 507:
        return errno.ENOSPC, f"the store is full: {said}"
    if number in (429, 503):
        return errno.ETIMEDOUT, f"the store asks for fewer requests: {said}"
    # Not EIO, which a disk says of damage: a store that fails says nothing of what it has.
    return errno.ETIMEDOUT, f"the store failed, also when asked again: {said}. {_CHECK}"


def _denied(error: Any, what: str) -> PermissionError:
    why = f"the store refuses the credentials that the environment has: {_first_line(error)}"
    return PermissionError(errno.EACCES, why, what)


def _first_line(error: Any) -> str:
    """What an error says, without how long it took: a store that is down says the same again."""
    return _DURATION.sub("", str(error).partition("\n")[0])
