"""Saved objects: what DCP stores with ``torch.save``, loaded without running code of the file."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.serialization import (
    default_restore_location,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from pyckpt.errors import CorruptCheckpoint, UnsafeCheckpoint
from pyckpt.locks import fork_safe_lock

__all__ = ["Allowed", "load"]

Allowed = Callable[..., Any] | tuple[Callable[..., Any], str]
"""A class or function that objects may contain, or it and the dotted name it was saved under."""

# torch keeps one list for the process, and each `safe_globals` takes away what it was given, even
# if another thread's asked for the same: so ours follow one another.
_allow_lock = fork_safe_lock()
_REFUSED = re.compile(r"(?:Unsupported global: GLOBAL|unsupported GLOBAL) ([\w.]+)")


def load(data: io.BytesIO, key: str, *, allow: Sequence[Allowed] = (), device: torch.device) -> Any:
    """Load an object with ``weights_only=True`` and the classes in ``allow``.

    Tensors within it that were saved from the CPU stay there; others go to ``device``.

    Raises:
        UnsafeCheckpoint: it contains a class or function that is not allowed.
        CorruptCheckpoint: the bytes are not a saved object.
    """

    def location(storage: Any, saved_on: str) -> Any:
        if saved_on == "cpu":
            return storage
        return default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    with _allowing(allow):
        try:
            return torch.load(data, map_location=location, weights_only=True)
        # Damaged bytes can fail in any way that torch.load or the objects it builds can fail.
        except (Exception, MemoryError) as error:
            refused = _refused(data, error)
            if not refused:
                raise CorruptCheckpoint(
                    f"{key}: not a readable object: {type(error).__name__}: {error}", key=key
                ) from error
            raise UnsafeCheckpoint(
                f"{key}: the saved object contains {', '.join(refused)}, which loading does not "
                f"allow; if you trust the checkpoint, pass allow=[{', '.join(refused)}]",
                key=key,
                refused=refused,
            ) from error


@contextmanager
def _allowing(allow: Sequence[Allowed]) -> Iterator[None]:
    if not allow:
        yield
        return
    with _allow_lock:
        # What is admitted already must stay so afterwards.
        known = get_safe_globals()
        with safe_globals([one for one in allow if one not in known]):
            yield


def _refused(data: io.BytesIO, error: BaseException) -> tuple[str, ...]:
    """Name what torch refused to load; empty when that was not the cause of ``error``."""
    if not isinstance(error, pickle.UnpicklingError):
        return ()
    data.seek(0)
    try:
        names = set(get_unsafe_globals_in_checkpoint(data))
    except Exception:  # not a zip, or damaged: the message says what torch stumbled on
        names = set()
    # Some classes are never named in the pickle, but made by a function in it, as numpy's dtypes.
    names.update(re.findall(_REFUSED, str(error)))
    return tuple(sorted(names))
