"""What pyckpt raises.

    Exception
    ├── OSError                      built in: a system call failed; carries errno and path, and its
    │                                message names the call and the offset
    └── PyckptError
        ├── CorruptCheckpoint        bytes on disk are not the bytes that were saved
        ├── UnsafeCheckpoint         a file asks for a class that loading does not allow
        ├── LoadError                a checkpoint and the state it is loaded into do not fit
        │   └── CheckpointReplaced   it was saved over while it was loaded
        ├── StagerBusy               saves under way leave no memory for another
        ├── SaveError                a save failed, in different ways on different ranks perhaps
        ├── RanksLost                other ranks did not come to a save or a restore
        ├── Superseded               another job has begun to save where this one did
        ├── EngineClosed             an engine was used after ``close()``
        └── CudaError                a CUDA call failed

Wrong arguments are ``ValueError`` and ``TypeError``, as everywhere in Python.
"""

from __future__ import annotations

from pyckpt.printable import printable as _printable

__all__ = [
    "CheckpointReplaced",
    "CorruptCheckpoint",
    "CudaError",
    "EngineClosed",
    "LoadError",
    "PyckptError",
    "RanksLost",
    "SaveError",
    "StagerBusy",
    "Superseded",
    "UnsafeCheckpoint",
]


class PyckptError(Exception):
    """Base class of the errors that pyckpt defines.

    What a message quotes may come from a file that is not to be trusted, such as a key: what is no
    printable character is shown as Python's escape of it, so that it cannot act on a terminal, or
    look like another line of a log.
    """

    def __init__(self, message: str = "", *more: object) -> None:
        super().__init__(_printable(message), *more)


class CorruptCheckpoint(PyckptError):
    """Bytes on disk are not the bytes that were saved: damaged, truncated, missing or swapped.

    The message says all of it; what is known is also in the attributes ``path``, ``key``,
    ``offset`` (bytes), ``expected`` and ``found`` (checksums or sizes), ``None`` otherwise.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        offset: int | None = None,
        expected: int | None = None,
        found: int | None = None,
    ) -> None:
        # Only the message goes into args: pickle then calls cls(message) and restores the rest.
        super().__init__(message)
        self.path = path
        self.key = key
        self.offset = offset
        self.expected = expected
        self.found = found


class UnsafeCheckpoint(PyckptError):
    """A file asks for a class or function that loading does not allow.

    ``refused`` holds the dotted names of what it asked for; ``path`` or ``key`` tells where.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        key: str | None = None,
        refused: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.path = path
        self.key = key
        self.refused = refused


class LoadError(PyckptError):
    """A checkpoint does not fit the state it is loaded into.

    ``missing`` are keys of the state that the checkpoint lacks, ``unexpected`` keys of the
    checkpoint that the state lacks, ``mismatched`` keys whose shapes differ, and ``failures``
    what each failing rank said, by rank. The message shortens these lists; they are complete.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
        failures: dict[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched
        self.failures = failures or {}


class CheckpointReplaced(LoadError):
    """A checkpoint was saved over while it was loaded, so that ranks saw different ones. Load it
    again; ``pyckpt.load`` has tried that a few times."""


class StagerBusy(PyckptError):
    """Saves under way leave no memory for another, which was not to wait for it."""


class SaveError(PyckptError):
    """A save failed, in different ways on different ranks, or by an error that is neither an
    ``OSError`` nor one of pyckpt's. ``failures`` has what each failing rank said, by rank.
    """

    def __init__(self, message: str, *, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class RanksLost(PyckptError):
    """Ranks did not come to what all of them do together, in time or at all. ``ranks`` holds those
    that are known to be missing; it may be empty.

    A ``Checkpointer`` that raised this saves and restores no more, since its ranks may be in
    different calls. Checkpoints that were committed are as they were.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Superseded(PyckptError):
    """Another job has begun to save into the directory where this one did. What was committed is
    there; nothing that this job saves will be, until it is started again."""


class EngineClosed(PyckptError):
    """An engine, or something that borrows from it, was used after ``close()``."""


class CudaError(PyckptError):
    """A CUDA call failed. The message names the call and what CUDA says of it."""
