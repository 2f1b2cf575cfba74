"""Objects that DCP saved with ``torch.save``, loaded without running code of the file.

torch's unpickler for ``weights_only=True`` reads them. pyckpt uses a second instance of its module,
because the module has one list of allowed classes for the whole process. A class that a caller
allows for one load must not be allowed to loads in other threads.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import re
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import _weights_only_unpickler as torchs_unpickler
from torch.serialization import _load, _open_zipfile_reader, default_restore_location

from pyckpt.errors import CorruptCheckpoint, UnsafeCheckpoint
from pyckpt.format import plain
from pyckpt.format.files import open_regular
from pyckpt.format.sealed import Sealed, scan

__all__ = ["Allowed", "load", "load_file"]

Allowed = Callable[..., Any] | tuple[Callable[..., Any], str]
"""A class or function that objects may contain; or a pair of it and the dotted name under which it
was saved."""

# pickle itself goes no deeper, unless the program that saves has raised Python's recursion limit.
_DEPTH_MIN = 1000
_BLOCKED = re.compile(r"unsupported GLOBAL ([\w.]+)")
_TENSORS_OF_OLD = frozenset(torch._tensor_classes)


def load(data: io.BytesIO, key: str, *, allow: Sequence[Allowed] = (), device: torch.device) -> Any:
    """Load an object with the classes in ``allow``, and those that ``weights_only=True`` admits.

    Tensors within it that were saved from the CPU stay there; others go to ``device``.

    Raises:
        UnsafeCheckpoint: the object contains a class or function that is not allowed.
        CorruptCheckpoint: the bytes are not a saved object, or take more memory or time to read
            than their number justifies.
    """

    try:
        with data.getbuffer() as item:
            return plain.decode(item)
    except plain.NotPlain:
        pass

    def location(storage: Any, saved_on: str) -> Any:
        if saved_on == "cpu":
            return storage
        return default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    allowed = _allowed(allow)
    described = b""
    try:
        _check_archive(data, data.getbuffer().nbytes)
        data.seek(0)
        with _open_zipfile_reader(data) as archive:  # type: ignore[no-untyped-call]
            described = archive.get_record("data.pkl")
            scan(described, depth=max(_DEPTH_MIN, sys.getrecursionlimit()))
            with _allowing(allowed):
                return _load(archive, location, _unpickler(), encoding="utf-8")  # type: ignore[no-untyped-call]
    # Damaged bytes can fail in any way that torch or the objects it builds can fail.
    except (Exception, MemoryError) as error:
        refused = _refused(described, allowed, error)
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


def load_file(
    path: Path,
    *,
    stand_in: Callable[[str], type] | None = None,
    located: Callable[[torch.UntypedStorage, str], None] | None = None,
) -> Any:
    """Load a file of ``torch.save``. Tensors are on the CPU, in pages of the file, which are read
    when they are used. So the file must not change while they are.

    Args:
        path: the file.
        stand_in: gets the dotted name of a class or function that loading does not allow, and
            returns a class to use in its place.
        located: called with each storage, and the device that it was saved from.

    Raises:
        UnsafeCheckpoint: the file contains a class or function that is not allowed.
        CorruptCheckpoint: it is not such a file, or takes more memory or time to read than its size
            justifies.
        OSError: it cannot be read.
    """

    def location(storage: Any, saved_on: str) -> Any:
        if located is not None:
            located(storage, saved_on)
        return storage

    described = b""
    allowed: dict[str, Any] = {}
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            _check_archive(file, size)
            with _open_zipfile_reader(str(path)) as archive:  # type: ignore[no-untyped-call]
                described = archive.get_record("data.pkl")
                scan(described, depth=max(_DEPTH_MIN, sys.getrecursionlimit()))
                if stand_in is not None:
                    allowed = {name: stand_in(name) for name in _foreign(described, {})}
                mapped = torch.UntypedStorage.from_file(str(path), False, size)
                with _allowing(allowed):
                    return _load(  # type: ignore[no-untyped-call]
                        archive, location, _unpickler(), overall_storage=mapped, encoding="utf-8"
                    )
    except OSError:
        raise
    except (Exception, MemoryError) as error:
        refused = _refused(described, allowed, error)
        if not refused:
            raise CorruptCheckpoint(
                f"{path}: not a file of torch.save that can be read: "
                f"{type(error).__name__}: {error}",
                path=str(path),
            ) from error
        raise UnsafeCheckpoint(
            f"{path} contains {', '.join(refused)}, and reading it would run their code",
            path=str(path),
            refused=refused,
        ) from error


def _check_archive(data: IO[bytes], size: int) -> None:
    """Check that no record claims to be larger than the archive, of ``size`` bytes: torch allocates
    its memory before it reads it."""
    with zipfile.ZipFile(data) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > size:
                raise ValueError(f"{record.filename!r} is compressed, or larger than the object")
            if record.filename.endswith("/constants.pkl"):
                raise ValueError("it is a program (TorchScript)")


# --- allowed classes and functions ----------------------------------------------------------------

_loading = threading.local()


@contextmanager
def _allowing(allowed: dict[str, Any]) -> Iterator[None]:
    """Also allow these, in this thread."""
    before = getattr(_loading, "allowed", {})
    _loading.allowed = allowed
    try:
        yield
    finally:
        _loading.allowed = before


def _allowed(allow: Sequence[Allowed]) -> dict[str, Any]:
    """Return, by name, what the program allows to all loads, and the caller to this one."""
    allowed: dict[str, Any] = dict(
        torchs_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]
    )
    for one in allow:
        value, name = one if isinstance(one, tuple) else (one, "")
        allowed[name or f"{value.__module__}.{value.__qualname__}"] = value
    return allowed


def _refused(described: bytes, allowed: dict[str, Any], error: BaseException) -> tuple[str, ...]:
    """Name what an object contains that is not allowed; none if ``error`` has another cause."""
    if not isinstance(error, pickle.UnpicklingError):
        return ()
    try:
        names = _foreign(described, allowed)
    except Exception:  # damaged: only the message tells the name that torch refused
        names = set()
    # torch refuses some modules whatever is allowed, and names them in its message alone.
    names.update(re.findall(_BLOCKED, str(error)))
    return tuple(sorted(names))


def _foreign(described: bytes, allowed: dict[str, Any]) -> set[str]:
    """The classes and functions in a pickle that neither torch nor ``allowed`` admits."""
    unpickler = _unpickler()
    names: set[str] = unpickler.get_globals_in_pkl(io.BytesIO(described))
    admitted: set[str] = allowed.keys() | unpickler._get_allowed_globals().keys()
    return names - admitted


@cache
def _unpickler() -> Any:
    """A second instance of torch's module, which asks this module what is allowed."""
    spec = importlib.util.find_spec(torchs_unpickler.__name__)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = {
        name: value
        for name, value in module._get_allowed_globals().items()
        # Called with a size, these return uninitialised memory.
        if value not in _TENSORS_OF_OLD
    }
    plain["torch.storage.UntypedStorage"] = _UntypedStorage
    plain["torch._utils._rebuild_sparse_tensor"] = _rebuild_sparse
    plain["builtins.bytearray"] = _make_bytearray
    module._get_allowed_globals = lambda: plain
    module._get_user_allowed_globals = lambda: getattr(_loading, "allowed", {})
    return module


class _UntypedStorage(metaclass=Sealed):
    """Stands for the class in descriptions of storages, and makes none."""

    __slots__ = ()
    dtype = torch.uint8

    def __new__(cls, *args: Any) -> Any:
        raise ValueError("a storage that is not in the file")


def _make_bytearray(value: str | bytes = b"", encoding: str = "latin-1") -> bytearray:
    """``bytearray`` without its form that takes a number, and allocates that many bytes."""
    return bytearray(value.encode(encoding) if isinstance(value, str) else bytes(memoryview(value)))


def _rebuild_sparse(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    """``torch._utils._rebuild_sparse_tensor``, which also checks the indices. torch does so only on
    request, and operators read and write where the indices point."""
    with warnings.catch_warnings():
        # Torch warns of what these tensors are, once a process. A program that turns warnings into
        # errors would be told that its checkpoint is corrupt.
        warnings.simplefilter("ignore", UserWarning)
        return _checked_sparse(layout, data)


def _checked_sparse(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values, size, *more = data
        coalesced = more[0] if more else None
        torch._validate_sparse_coo_tensor_args(
            indices, values, size, coalesced, check_pinning=False
        )
        return torch.sparse_coo_tensor(
            indices,
            values,
            size,
            device=values.device,
            is_coalesced=coalesced,
            check_invariants=False,
        )
    compressed, plain, values, size = data
    torch._validate_sparse_compressed_tensor_args(
        compressed, plain, values, size, layout, check_pinning=False
    )
    return torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        size,
        layout=layout,
        device=values.device,
        check_invariants=False,
    )
