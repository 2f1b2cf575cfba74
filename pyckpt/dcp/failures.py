"""The errors of ranks, out of DCP's wrapping."""

from __future__ import annotations

import itertools

from torch.distributed.checkpoint.api import CheckpointException

from pyckpt.dcp.report import some
from pyckpt.errors import (
    CorruptCheckpoint,
    LoadError,
    PyckptError,
    SaveError,
    UnsafeCheckpoint,
)

__all__ = ["Carried", "error_of"]


class Carried(BaseException):
    """Carries an error past DCP, which turns an Exception there into text."""


def error_of(
    failure: CheckpointException, *, alone: bool, kind: type[LoadError | SaveError], doing: str
) -> BaseException:
    """What to raise for DCP's `CheckpointException`, which is no `Exception`.

    One kind of error that callers can act on keeps its class; anything else is a ``kind``. The
    errors of all ranks are chained to it.
    """
    errors = {rank: _unwrapped(error) for rank, (error, _) in sorted(failure.failures.items())}
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
        said = {rank: f"{type(error).__name__}: {error}" for rank, error in errors.items()}
        text = "; ".join(what if alone else f"rank {rank}: {what}" for rank, what in said.items())
        together = kind(f"{doing} failed: {text}", failures=said)
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
    if isinstance(error, OSError):
        if error.errno is None:
            return type(error)(f"{who}: {error}")
        return type(error)(error.errno, f"{error.strerror} ({who})", error.filename)
    assert isinstance(error, CorruptCheckpoint | UnsafeCheckpoint | LoadError | PyckptError)
    copy = type(error)(f"{who}: {error}")
    vars(copy).update(vars(error))
    return copy
