"""Classifies errors of reading a checkpoint: transient, damage, or neither.

A checkpoint is given up for an older one only if it is damaged. A server that is slow to answer, or
a directory that this user may not read, is no evidence of damage.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TypeVar

from pyckpt.errors import CorruptCheckpoint, LoadError

__all__ = ["DELAYS", "Failure", "failure_of", "is_shortage", "persist"]

_logger = logging.getLogger("pyckpt")

T = TypeVar("T")

DELAYS = (0.05, 0.2, 1.0)
"""Seconds to wait before each further attempt after a transient error."""

_SHORTAGES = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)

_PASSING = (errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EIO)

# A file is missing or of another kind; or the file system cannot read blocks, or finds that their
# own checksums do not match.
_DAMAGE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO),
    *(errno.EINVAL, errno.EOVERFLOW),
    *(errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO),
)


class Failure(IntEnum):
    """The kind of an error of reading a checkpoint; of several, the largest counts."""

    NONE = 0
    DAMAGE = 1
    """The checkpoint cannot be read, now or later."""
    PASSING = 2
    """A transient error: another attempt may succeed."""
    OTHER = 3
    """The cause is not in the checkpoint."""


def is_shortage(error: BaseException) -> bool:
    """Whether a call failed for lack of memory or descriptors, which is no fault of the file."""
    return isinstance(error, OSError) and error.errno in _SHORTAGES


def failure_of(error: BaseException, *, last: bool) -> Failure:
    """The kind of an error of reading a checkpoint. ``last``: no further attempt is made."""
    if isinstance(error, LoadError) and error.failures and error.__cause__ is not None:
        # The errors of ranks that failed in different ways, chained.
        causes: list[BaseException] = []
        cause: BaseException | None = error.__cause__
        while cause is not None and len(causes) < len(error.failures):
            causes.append(cause)
            cause = cause.__cause__
        return max(failure_of(cause, last=last) for cause in causes)
    if isinstance(error, CorruptCheckpoint):
        return Failure.DAMAGE
    if not isinstance(error, OSError):
        return Failure.OTHER
    if error.errno in _PASSING and not last:
        return Failure.PASSING
    return Failure.DAMAGE if error.errno is None or error.errno in _DAMAGE else Failure.OTHER


def persist(call: Callable[[], T]) -> T:
    """Make a call, and repeat it a few times after transient errors.

    Raises:
        OSError: the error of the last attempt.
    """
    for delay in DELAYS:
        try:
            return call()
        except OSError as error:
            if failure_of(error, last=False) is not Failure.PASSING:
                raise
            _logger.debug("trying again in %s s: %s", delay, error)
        time.sleep(delay)
    return call()
