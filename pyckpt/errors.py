"""What pyckpt raises.

    Exception
    ├── OSError                      built in: a system call failed; carries errno and path, and its
    │   │                            message names the call and the offset
    │   └── NotDurable               a save is committed, and a power failure may undo it
    └── PyckptError
        ├── CorruptCheckpoint        bytes on disk are not the bytes that were saved
        ├── UnsafeCheckpoint         a file asks for a class that loading does not allow
        ├── LoadError                a checkpoint and the state it is loaded into do not fit
        │   └── CheckpointReplaced   a checkpoint was overwritten while it was loaded
        ├── StagerBusy               earlier saves hold the memory that a save needs
        ├── SaveError                a save failed, perhaps differently on different ranks
        ├── RanksLost                other ranks did not come to a save or a restore
        ├── Superseded               another job has begun to save into the same directory
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
    "NotDurable",
    "PyckptError",
    "RanksLost",
    "SaveError",
    "StagerBusy",
    "Superseded",
    "UnsafeCheckpoint",
]


class PyckptError(Exception):
    """Base class of the errors that pyckpt defines.

    A message may quote text from an untrusted file, such as a key. Characters that are not
    printable are shown as Python's escapes, so that they cannot control a terminal or forge a line
    of a log.
    """

    def __init__(self, message: str = "", *more: object) -> None:
        super().__init__(_printable(message), *more)


class NotDurable(OSError):
    """A save is committed, and synchronising its directory failed after that.

    The new checkpoint is in place, whole, and readers see it. A power failure may undo it: then the
    one that it replaced is there again, if there was one. Saving the step again is safe.
    """


class CorruptCheckpoint(PyckptError):
    """Bytes on disk are not the bytes that were saved: damaged, truncated, missing or swapped.

    The attributes ``path``, ``key``, ``offset`` (in bytes), ``expected`` and ``found`` (checksums,
    or sizes in bytes) repeat the message. An attribute that is not known is None.
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

    ``refused`` holds the dotted names of the classes and functions that were refused; ``path`` or
    ``key`` names the file or the item that asks for them.
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
    """A checkpoint does not fit the state that it is loaded into.

    ``missing`` are keys of the state that the checkpoint lacks, ``unexpected`` keys of the
    checkpoint that the state lacks, and ``mismatched`` keys whose shapes differ. ``failures`` maps
    each failing rank to its error, as text. The message shortens these; the attributes are
    complete.
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
    """A checkpoint was overwritten while it was loaded, so that ranks saw different ones. Load it
    again. ``pyckpt.load`` raises this after several attempts."""


class StagerBusy(PyckptError):
    """Earlier saves hold the memory that a save needs, and ``when_busy`` of `PinnedStager` says not
    to wait for it. Or a save began so late that another save, or a step, took its memory."""


class SaveError(PyckptError):
    """A save failed, in different ways on different ranks, or by an error that is neither an
    ``OSError`` nor one of pyckpt's. ``failures`` maps each failing rank to its error, as text.
    """

    def __init__(self, message: str, *, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class RanksLost(PyckptError):
    """Ranks did not take part in a collective call within its timeout. ``ranks`` holds those that
    are known to be missing; it may be empty.

    A ``Checkpointer`` that raised this no longer saves or restores, since its ranks may be in
    different calls. Committed checkpoints stay as they were.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Superseded(PyckptError):
    """Another job has begun to save into the same directory since this job did. Committed
    checkpoints stay. All later saves of this job fail until it is started again."""


class EngineClosed(PyckptError):
    """An engine, or something that borrows from it, was used after ``close()``."""


class CudaError(PyckptError):
    """A CUDA call failed. The message names the call and quotes CUDA's description."""
