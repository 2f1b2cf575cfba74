"""The ``.metadata`` file: DCP's pickle, read without running code, with a checksum behind it.

A file that pyckpt writes is

    pickle      what stock writes: ``pickle.dumps(Metadata)``
    magic       8 bytes, ``PYCKPTM1``
    length      uint64, little endian: bytes of the pickle
    crc32       uint32, little endian: CRC-32 (zlib's) of the pickle

Stock stops at the pickle's STOP and never sees the trailer; a file without one is read too, with
nothing to check it against. Each tensor's ``_StorageInfo`` carries attributes that stock ignores:
see `storage_info`.

Reading admits DCP's own metadata classes by exact name and nothing else. What the file gets to
hold is never the class itself but a sealed stand-in, because pickle can also set attributes on
what it names: a file must neither call code nor alter a class of the process that reads it.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import io
import os
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from pyckpt import _C
from pyckpt.collector import collector_paused
from pyckpt.errors import CorruptCheckpoint, UnsafeCheckpoint
from pyckpt.format.checks import check
from pyckpt.format.columns import (
    LAYOUTS,
    MEMORY_FORMATS,
    KeysMapping,
    PlacesMapping,
    columns_of,
    metadata_of,
    storage_info,
)
from pyckpt.format.files import open_regular, read_regular
from pyckpt.format.paths import check_paths
from pyckpt.format.sealed import Sealed, scan
from pyckpt.private import StorageInfo

__all__ = [
    "MAGIC",
    "SIZE_MAX",
    "StorageInfo",
    "data_files",
    "decode",
    "dumps",
    "encode",
    "encode_to",
    "is_of_rank",
    "is_sealed",
    "read",
    "seal",
    "storage_info",
]

MAGIC = b"PYCKPTM1"
SIZE_MAX = 4 << 30
"""Bytes; some ten million items."""
# What DCP writes is nested some ten deep.
_DEPTH_MAX = 100
_NAME_SHOWN = 200
_OF_RANK = re.compile(r"__\d+\.metadata")
_TRAILER = struct.Struct("<8sQI")


# --- writing --------------------------------------------------------------------------------------


def encode(metadata: Metadata) -> bytes:
    """Return the bytes of a ``.metadata`` file: a pickle that stock reads, and the trailer.

    Raises:
        TypeError: a planner put something into it that `decode` would refuse.
    """
    blocks: list[bytes] = []
    if encode_to(metadata, blocks.append):
        return b"".join(blocks)
    with collector_paused():
        body = dumps(_with_dicts(metadata))
    return seal(body)


def encode_to(metadata: Metadata, write: Callable[[bytes], object]) -> bool:
    """Write a ``.metadata`` file in the form that `decode` reads without an object for each item.

    Args:
        write: is given the bytes in order, about a MiB at a time.

    Returns False, and writes nothing, where something in it is of another kind than what stock's
    planner and ours make.
    """
    extras = _extras(metadata)
    if extras is None or metadata.storage_data is None:
        return False
    columns = columns_of(metadata)
    keys: Any = metadata.state_dict_metadata
    if columns is None or keys.is_edited():
        columns = _columns_from(_with_dicts(metadata))
    if columns is None:
        return False
    with collector_paused():
        planner_data = _fragment(metadata.planner_data)
    checkpoint_id, save_id, version = extras
    length, crc32 = _C.encode_metadata(
        columns,
        _NAMES,
        write,
        planner_data=planner_data,
        checkpoint_id=checkpoint_id,
        save_id=save_id,
        version=version,
    )
    write(_TRAILER.pack(MAGIC, length, crc32))
    return True


_FIELDS = {field.name for field in dataclasses.fields(Metadata)} | {"version"}
_STORAGE_FIELDS = {"checkpoint_id", "save_id", "load_id", "modules"}
_FRAGMENT_PROTOCOL = 3  # is not cut into frames, so it can be part of another pickle


def _extras(metadata: Metadata) -> list[bytes | None] | None:
    """What the native encoder writes besides columns; None where there is more than that."""
    if type(metadata) is not Metadata:
        return None
    meta = metadata.storage_meta
    if vars(metadata).keys() - _FIELDS or type(meta) is not StorageMeta:
        return None
    if vars(meta).keys() != _STORAGE_FIELDS or meta.load_id is not None or meta.modules:
        return None
    texts = (meta.checkpoint_id, meta.save_id, metadata.version)
    if any(type(text) not in (str, type(None)) for text in texts):
        return None
    # As pickle does.
    return [None if text is None else str(text).encode("utf-8", "surrogatepass") for text in texts]


def _columns_from(metadata: Metadata) -> _C.Columns | None:
    """The columns of metadata in DCP's own objects; None where something has no place in them."""
    keys: Any = metadata.state_dict_metadata
    places: Any = metadata.storage_data
    if type(keys) is not dict:
        return None
    return _C.columns_from(
        keys,
        places,
        types={
            "tensor": TensorStorageMetadata,
            "bytes": BytesStorageMetadata,
            "chunk": ChunkStorageMetadata,
            "index": MetadataIndex,
            "properties": TensorProperties,
            "info": StorageInfo,
        },
        dtypes=_DTYPES,
        layouts=_LAYOUT_NAMES,
        memory_formats=_MEMORY_FORMATS,
    )


_DTYPES = {
    value: str(value).removeprefix("torch.")
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_LAYOUT_NAMES = {layout: name for name, layout in LAYOUTS.items()}
_MEMORY_FORMATS = {value: number for number, value in enumerate(MEMORY_FORMATS.values())}


def _fragment(planner_data: Any) -> bytes:
    """The opcodes of planner_data, without the first, which names the protocol, and the last."""
    if isinstance(planner_data, Mapping):
        planner_data = dict(planner_data)
    return pickle.dumps(planner_data, _FRAGMENT_PROTOCOL)[2:-1]


def _with_dicts(metadata: Metadata) -> Metadata:
    """The same with dicts in it, which alone can be decoded again."""
    for part in ("state_dict_metadata", "storage_data"):
        value = getattr(metadata, part, None)
        if isinstance(value, KeysMapping | PlacesMapping):
            metadata = copy.copy(metadata)
            setattr(metadata, part, value.copy())
        elif value is not None and type(value) is not dict:
            raise TypeError(f"the {part} of a save must be a dict, not a {type(value).__name__}")
    return metadata


def dumps(metadata: Metadata, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    """Pickle metadata so that every torch that has these classes can load it.

    The properties of a tensor are five fields. Torch 2.15 pickles a sixth, which nobody needs to
    load the tensor, and which every torch before it stumbles over.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol)
    if len(_state_of(TensorProperties())) > _PROPERTIES:
        pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduce_properties}
    pickler.dump(metadata)
    return file.getvalue()


_PROPERTIES = 5
# What properties have that were pickled without the fields which torch has added since.
_LATER_FIELDS = {
    field.name: field.default for field in dataclasses.fields(TensorProperties)[_PROPERTIES:]
}


def _state_of(properties: TensorProperties) -> tuple[Any, ...]:
    state: tuple[Any, ...] = properties.__getstate__()  # type: ignore[no-untyped-call]
    return state


def _reduce_properties(properties: TensorProperties) -> Any:
    # As pickle itself does with such objects.
    state = _state_of(properties)[:_PROPERTIES]
    return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]


def seal(body: bytes) -> bytes:
    """Put the trailer behind a pickle."""
    return body + _TRAILER.pack(MAGIC, len(body), _C.crc32(body))


# --- what a file may name -------------------------------------------------------------------------


def _stand_in(real: type) -> type:
    """Make a class that creates bare instances of ``real`` and is good for nothing else."""

    def new(cls: type) -> Any:
        return object.__new__(real)

    return Sealed(real.__name__, (), {"__slots__": (), "__new__": new})


class _Metadata(metaclass=Sealed):
    """`Metadata`, bare, or called with its fields, as a class made from it may pickle itself."""

    __slots__ = ()

    def __new__(cls, *fields: Any) -> Any:
        metadata = object.__new__(Metadata)
        names = [field.name for field in dataclasses.fields(Metadata)]
        vars(metadata).update(zip(names, fields, strict=False))
        return metadata


class _MemFormat(metaclass=Sealed):
    """Stands for DCP's enum of memory formats, and yields the member's number.

    Not the member: that is one object for the whole process, and BUILD could write into it.
    """

    __slots__ = ()

    def __new__(cls, value: int) -> Any:
        return range(len(MEMORY_FORMATS)).index(value)  # ValueError for anything else


class _Getattr(metaclass=Sealed):
    """Stands for ``getattr``, by which Python 3.11.0 to 3.11.3 pickled the members of an enum."""

    __slots__ = ()

    def __new__(cls, owner: object, name: str) -> Any:
        if owner is not _MemFormat:
            raise pickle.UnpicklingError("getattr of something that is not DCP's memory format")
        return list(MEMORY_FORMATS).index(name)


class _Layout(metaclass=Sealed):
    """Stands for ``torch.serialization._get_layout``."""

    __slots__ = ()

    def __new__(cls, name: str) -> Any:
        return LAYOUTS[name]


class _Dict(metaclass=Sealed):
    """Stands for ``OrderedDict``, and for ``dict`` called with one, as a mapping over columns
    pickles itself. Yields a dict: an instance of a class that Python's own is made into has
    attributes, by which a file could hide what is in it."""

    __slots__ = ()

    def __new__(cls, *content: dict[Any, Any]) -> Any:
        if not content:
            return {}
        (only,) = content
        if type(only) is not dict:
            raise pickle.UnpicklingError("a dict of something that is no dict")
        return only


class _Posix(metaclass=Sealed):
    __slots__ = ()

    def __new__(cls, *parts: str) -> Any:
        return Path(*parts) if os.name == "posix" else PurePosixPath(*parts)


class _Windows(metaclass=Sealed):
    __slots__ = ()

    def __new__(cls, *parts: str) -> Any:
        return PureWindowsPath(*parts)


class _Properties(TensorProperties, metaclass=Sealed):
    """`TensorProperties` that take five fields, or six and more as torch 2.15 writes them."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(_LATER_FIELDS)
        self.dtype, self.layout, self.requires_grad, memory_format, self.pin_memory = state[:5]
        self.memory_format = list(MEMORY_FORMATS.values())[memory_format]
        if len(state) > 5:
            vars(self)["strides"] = state[5]
        self.__class__ = TensorProperties  # type: ignore[assignment]


_DCP = "torch.distributed.checkpoint.metadata"
_SHARD = "torch.distributed._shard.sharded_tensor.metadata"  # what torch took until 2.2
_ALLOWED: dict[tuple[str, str], Any] = {
    (_DCP, "Metadata"): _Metadata,
    (_DCP, "MetadataIndex"): _stand_in(MetadataIndex),
    (_DCP, "TensorStorageMetadata"): _stand_in(TensorStorageMetadata),
    (_DCP, "BytesStorageMetadata"): _stand_in(BytesStorageMetadata),
    (_DCP, "ChunkStorageMetadata"): _stand_in(ChunkStorageMetadata),
    (_DCP, "StorageMeta"): _stand_in(StorageMeta),
    (_DCP, "TensorProperties"): _Properties,
    (_DCP, "_MEM_FORMAT_ENCODING"): _MemFormat,
    (_SHARD, "TensorProperties"): _Properties,
    (_SHARD, "MEM_FORMAT_ENCODING"): _MemFormat,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _stand_in(StorageInfo),
    ("torch.serialization", "_get_layout"): _Layout,
    ("builtins", "getattr"): _Getattr,
    ("collections", "OrderedDict"): _Dict,
    ("builtins", "dict"): _Dict,
    # Built into torch, so that nothing can be set on it, as on the dtypes.
    ("torch", "Size"): torch.Size,
}
for _module in ("pathlib", "pathlib._local"):  # Python 3.13 pickles the second name
    _ALLOWED[_module, "PosixPath"] = _ALLOWED[_module, "PurePosixPath"] = _Posix
    _ALLOWED[_module, "WindowsPath"] = _ALLOWED[_module, "PureWindowsPath"] = _Windows
for _name, _value in list(vars(torch).items()):
    if isinstance(_value, torch.dtype):
        _ALLOWED["torch", _name] = _value


def _name_of(named: Any) -> tuple[str, str]:
    return named.__module__, named.__qualname__


_NAMES = _C.MetadataNames(
    metadata=_name_of(Metadata),
    storage_meta=_name_of(StorageMeta),
    tensor=_name_of(TensorStorageMetadata),
    bytes=_name_of(BytesStorageMetadata),
    chunk=_name_of(ChunkStorageMetadata),
    index=_name_of(MetadataIndex),
    properties=_name_of(TensorProperties),
    info=_name_of(StorageInfo),
    size=_name_of(torch.Size),
    layout=("torch.serialization", "_get_layout"),
    memory_format=(_DCP, "_MEM_FORMAT_ENCODING"),
    dtypes={name: dtype.itemsize for dtype, name in _DTYPES.items()},
    layouts=list(LAYOUTS),
)


class _Unpickler(pickle.Unpickler):
    path = ""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            pass
        refused = f"{module}.{name}"[:_NAME_SHOWN]
        raise UnsafeCheckpoint(
            f"{self.path} asks for {refused}, which is no part of DCP's metadata; "
            "it was refused, and nothing of the file was run",
            path=self.path,
            refused=(refused,),
        )


# --- reading --------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Metadata:
    """Read the ``.metadata`` file at ``path``.

    Raises:
        OSError: the file cannot be read.
        CorruptCheckpoint: it is no regular file, or has more than ``SIZE_MAX`` bytes; or as
            `decode`.
        UnsafeCheckpoint: as `decode`.
    """
    with open_regular(path) as file:
        return decode(read_regular(file, path, most=SIZE_MAX), path=path)


def is_of_rank(path: str | os.PathLike[str]) -> bool:
    """Whether a file of this name is what one rank saved for itself (``use_collectives=False``), by
    which tensors may have gaps."""
    return _OF_RANK.fullmatch(os.fspath(path).rpartition("/")[2]) is not None


def is_sealed(path: str | os.PathLike[str]) -> bool:
    """Whether a ``.metadata`` file has a trailer, with which `read` has compared it.

    Raises:
        OSError, CorruptCheckpoint: as `read`.
    """
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TRAILER.size))
        return file.read(len(MAGIC)) == MAGIC


def decode(data: bytes, *, path: str | os.PathLike[str]) -> Metadata:
    """Turn the bytes of a ``.metadata`` file, stock's or ours, into DCP's `Metadata`.

    Args:
        data: the whole file.
        path: the file's name, for messages; and since the tensors of what one rank saved for itself
            may have gaps (`is_of_rank`), which are refused in all other metadata.

    Raises:
        CorruptCheckpoint: the trailer does not match; or the pickle is damaged, is not metadata
            that can be loaded from (checks.py), or takes more to read than its size explains.
        UnsafeCheckpoint: the pickle names a class or function other than DCP's metadata classes.
    """
    where = os.fspath(path)
    length = _check_trailer(data, where)
    if length != len(data):
        native = _decode_native(memoryview(data)[:length])
        if native is not None:
            return native
    try:
        end = scan(data, depth=_DEPTH_MAX)
        unpickler = _Unpickler(io.BytesIO(data))
        unpickler.path = where
        with collector_paused():
            metadata = unpickler.load()
            check(metadata, is_of_rank=is_of_rank(where))
    except UnsafeCheckpoint:
        raise
    # A damaged pickle can fail in whatever way the objects that it builds can fail.
    except (Exception, MemoryError) as error:
        raise CorruptCheckpoint(
            f"{where} is not readable metadata: {type(error).__name__}: {error}", path=where
        ) from error
    # Stock writes nothing behind its pickle, so more than a trailer is a damaged trailer.
    if end != length:
        raise CorruptCheckpoint(
            f"{where}: the pickle ends at byte {end}, expected {length}",
            path=where,
            expected=length,
            found=end,
        )
    assert isinstance(metadata, Metadata)
    return metadata


def _decode_native(body: memoryview) -> Metadata | None:
    """Metadata over columns; None where it is not in the canonical form, or to be refused."""
    try:
        decoded = _C.decode_metadata(body, _NAMES)
    except MemoryError:
        return None  # the other way says what is the matter
    if decoded is None:
        return None
    columns, fragment, checkpoint_id, save_id, version = decoded
    with collector_paused():
        # Strings, tuples and a dict: the decoder has looked at each opcode.
        planner_data = pickle.loads(b"\x80\x03" + fragment + b".")
    metadata = metadata_of(
        columns,
        planner_data,
        StorageMeta(_text(checkpoint_id), _text(save_id)),
        _text(version),
    )
    try:
        check_paths(metadata)
    except ValueError:
        return None
    return metadata


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _check_trailer(data: bytes, path: str) -> int:
    """Check the trailer if there is one; return how many bytes the pickle should have."""
    body = len(data) - _TRAILER.size
    if body < 0:
        return len(data)
    magic, length, expected = _TRAILER.unpack_from(data, body)
    if magic != MAGIC:
        return len(data)
    if length != body:
        raise CorruptCheckpoint(
            f"{path}: its trailer speaks of {length} bytes of metadata, {body} were found",
            path=path,
            expected=length,
            found=body,
        )
    found = _C.crc32(memoryview(data)[:body])
    if found != expected:
        raise CorruptCheckpoint(
            f"{path}: CRC-32 of the metadata expected {expected:#010x}, found {found:#010x}",
            path=path,
            expected=expected,
            found=found,
        )
    return body


def data_files(metadata: Metadata) -> dict[str, int]:
    """Name every data file that ``metadata`` speaks of, with the least bytes it must have.

    `decode` has made sure that they are in the checkpoint's directory.
    """
    places: Any = metadata.storage_data or {}
    if isinstance(places, PlacesMapping):  # whichever of its keys the metadata shows
        return places.columns.file_sizes()
    files: dict[str, int] = {}
    for info in places.values():
        name = info.relative_path
        files[name] = max(files.get(name, 0), info.offset + info.length)
    return files
