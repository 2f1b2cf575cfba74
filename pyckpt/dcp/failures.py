"""The errors of ranks: sent through DCP, and taken out of its `CheckpointException`."""

from __future__ import annotations

import builtins
import itertools
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from pyckpt import errors as ours
from pyckpt.dcp.report import some
from pyckpt.errors import (
    CorruptCheckpoint,
    LoadError,
    PyckptError,
    SaveError,
    UnsafeCheckpoint,
)

__all__ = ["Carried", "OfAnother", "error_of", "portable", "portable_errors", "said"]


class Carried(BaseException):
    """Carries an error through a part of DCP that turns every `Exception` into text."""


class Described(Exception):
    """Stands for an error that cannot be sent to other ranks, and has its text."""


class OfAnother(Exception):
    """Another rank's error, raised on a rank that has not failed and cannot go on without it.

    Args:
        rank: which has failed, of the group.
        error: its error, as `portable` returned it.
    """

    def __init__(self, rank: int, error: Exception) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error


def said(error: BaseException) -> str:
    """Describe an error in a line."""
    if isinstance(error, Described):
        return str(error)
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # that of somebody else's __str__
        return f"{type(error).__name__}, which does not say what it is"


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks. It is the error itself, if its class is
    built in or pyckpt's and pickle can copy it. Otherwise it is one of such a class, with the same
    text, and with errno and path if it has them.

    Pickle cannot copy many exceptions that have constructors of their own. DCP does not catch the
    failure to pickle, so the ranks would wait for each other.
    """
    if isinstance(error, OfAnother):
        return error
    known = _known(type(error))
    if known is type(error):
        try:
            if type(pickle.loads(pickle.dumps(error))) is known:
                return error
        except Exception:
            pass
    what = said(error)
    if isinstance(error, OSError) and isinstance(error.errno, int):
        name = error.filename if isinstance(error.filename, str | bytes | int) else None
        return OSError(error.errno, what, name)
    kept = known if issubclass(known, OSError | PyckptError) else Described
    return kept(what)


@contextmanager
def portable_errors() -> Iterator[None]:
    """Raise each error from inside as `portable` returns it."""
    try:
        yield
    except Exception as error:
        carried = portable(error)
        if carried is error:
            raise
        raise carried.with_traceback(error.__traceback__) from error


def _known(kind: type[BaseException]) -> type[BaseException]:
    """The class, or its nearest base that every rank has and that is made from a message."""
    return next(k for k in kind.__mro__ if k.__module__ in (builtins.__name__, ours.__name__))


def error_of(
    failure: CheckpointException, *, alone: bool, kind: type[LoadError | SaveError], doing: str
) -> BaseException:
    """Return the error to raise for DCP's `CheckpointException`, which is no `Exception`.

    If all failing ranks raised the same class, an `OSError` or `PyckptError`, the result has that
    class, or its nearest base that is built in or pyckpt's. Otherwise it is a ``kind``. The errors
    of all ranks are chained to it.
    """
    found = {rank: _unwrapped(error) for rank, (error, _) in sorted(failure.failures.items())}
    others = [error for error in found.values() if isinstance(error, OfAnother)]
    errors = {rank: error for rank, error in found.items() if not isinstance(error, OfAnother)}
    # A rank that has failed may have been kept from saying so.
    errors = errors or {other.rank: other.error for other in others}
    first = next(iter(errors.values()))
    for error in errors.values():
        if not isinstance(error, Exception):
            return error  # KeyboardInterrupt, SystemExit
    actionable = isinstance(first, OSError | PyckptError)
    if alone and actionable:
        return first
    if actionable and all(type(error) is type(first) for error in errors.values()):
        together = _with_ranks(first, list(errors))
    else:
        whats = {rank: said(error) for rank, error in errors.items()}
        text = "; ".join(what if alone else f"rank {rank}: {what}" for rank, what in whats.items())
        together = kind(f"{doing} failed: {text}", failures=whats)
    together.__cause__ = _chained(errors)
    return together


def _unwrapped(error: BaseException) -> BaseException:
    if isinstance(error, Carried):
        inner = error.args[0]
        assert isinstance(inner, BaseException)
        return inner
    return error


def _chained(errors: dict[int, BaseException]) -> BaseException:
    """Return the first rank's error with those of the other ranks behind it."""
    chain = list(errors.values())
    for error, cause in itertools.pairwise(chain):
        last = error
        while last.__cause__ is not None and last.__cause__ is not cause:
            last = last.__cause__
        if last is not cause:
            last.__cause__ = cause
    return chain[0]


def _with_ranks(error: BaseException, ranks: list[int]) -> BaseException:
    """Copy an error, with the ranks that raised it in its message."""
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {some(ranks, 8)}"
    kind = _known(type(error))  # a class of others may not be made from a message
    if isinstance(error, OSError):
        if error.errno is None:
            return kind(f"{who}: {error}")
        return kind(error.errno, f"{error.strerror} ({who})", error.filename)
    assert isinstance(error, CorruptCheckpoint | UnsafeCheckpoint | LoadError | PyckptError)
    copy = kind(f"{who}: {error}")
    vars(copy).update(vars(error))
    return copy
