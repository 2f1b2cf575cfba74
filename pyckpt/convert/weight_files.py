"""Weights as other programs keep them: safetensors files, alone or with an index, and the files of
``torch.save`` that came before them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyckpt.convert.mapped import map_file, view
from pyckpt.convert.torch_files import read_torch
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.format.files import open_regular, read_regular
from pyckpt.train.store.model_files import SAFETENSORS

__all__ = ["find_weights", "is_extra_state", "read_safetensors", "read_weights"]

_DTYPES = {name: dtype for dtype, name in SAFETENSORS.items()}
_HEADER_MAX = 100_000_000  # that of the safetensors package
_BYTES_MAX = (1 << 63) - 1
_INDEX_MAX = 1 << 28
_NAMES = ("model.safetensors", "pytorch_model.bin", "adapter_model.bin")


def find_weights(folder: Path, name: str = "") -> Path | None:
    """The file in a folder that leads to a model's weights: the index, or the only file.

    Args:
        name: of the files if they have no index, without suffix; by default those that Hugging
            Face's programs write, or the only safetensors file of any name.
    """
    names = (f"{name}.safetensors", f"pytorch_{name}.bin") if name else _NAMES
    for one in names:
        for found in (folder / f"{one}.index.json", folder / one):
            if found.is_file():
                return found
    others = [] if name else [path for path in folder.glob("*.safetensors") if path.is_file()]
    return others[0] if len(others) == 1 else None


def is_extra_state(name: str) -> bool:
    """Whether a name in a module's state is that of what ``get_extra_state`` has returned."""
    return name.rpartition(".")[2] == "_extra_state"


def read_weights(path: Path) -> dict[str, Any]:
    """The tensors of a model, in pages of their files, which are read when they are used; and the
    extra states of its modules, which may be any plain values.

    Names that a safetensors file lists as tied to others (as `pyckpt.export` and safetensors'
    ``save_model`` do) lead to the tensors of these.

    Args:
        path: a safetensors file, a file of ``torch.save``, or an index of either.

    Raises:
        CorruptCheckpoint: a file is damaged, or not what its name says.
        LoadError: a file of ``torch.save`` holds something else than named tensors, or a tensor is
            of a type that this torch does not have.
        UnsafeCheckpoint: it cannot be read without code of its own.
        OSError: a file cannot be read.
    """
    if not path.name.endswith(".index.json"):
        return _read_one(path)
    with open_regular(path) as file:
        weight_map = _parsed(read_regular(file, path, most=_INDEX_MAX), path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CorruptCheckpoint(f"{path} has no weight_map", path=str(path))
    tensors: dict[str, Any] = {}
    for name in sorted({str(name) for name in weight_map.values()}):
        # A name with a path in it would read files that are no part of this model.
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise CorruptCheckpoint(f"{path} names the file {name!r}", path=str(path))
        try:
            os.fsencode(name)
        except UnicodeEncodeError as error:  # no file can have it: half of a surrogate pair
            what = f"{path} names the file {name!r}"
            raise CorruptCheckpoint(what, path=str(path)) from error
        tensors |= _read_one(path.parent / name)
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise CorruptCheckpoint(
            f"{path} names {missing[0]!r}, which is in none of its files", path=str(path)
        )
    return tensors


def _read_one(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        # A header of safetensors begins with its length, and no archive does.
        if path.suffix == ".safetensors" or file.read(9)[8:] == b"{":
            return read_safetensors(path)
    value, left_out = read_torch(path)
    entries = value.items() if isinstance(value, Mapping) and not left_out else ()
    tensors = {
        str(name): one
        for name, one in entries
        if isinstance(one, torch.Tensor) or is_extra_state(str(name))
    }
    if not tensors or len(tensors) < len(entries):
        raise LoadError(
            f"{path} is no file of weights: it holds something else than named tensors; "
            "pyckpt import makes a checkpoint of what other programs saved"
        )
    return tensors


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one safetensors file, as `read_weights` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        if size < start or length > _HEADER_MAX:
            raise CorruptCheckpoint(
                f"{path} is no whole safetensors file: its header would have {length} bytes, and "
                f"the file has {size}",
                path=str(path),
            )
        header = _parsed(file.read(length), path)
    notes = header.pop("__metadata__", None)
    storage = map_file(path, size)
    tensors = {
        name: _tensor(storage, start, size, entry, name, path) for name, entry in header.items()
    }
    _check_ranges(header, start, size, path)
    for name, other in (notes if isinstance(notes, dict) else {}).items():
        if name not in tensors and isinstance(other, str) and other in tensors:
            tensors[name] = tensors[other]
    return tensors


def _check_ranges(header: Mapping[str, Any], start: int, size: int, path: Path) -> None:
    """Check that the tensors fill the file, one after the other, as the safetensors package does:
    of bytes that several tensors share, or none has, programs could make different things."""
    at = 0
    for (begin, end), name in sorted(
        (tuple(entry["data_offsets"]), name) for name, entry in header.items()
    ):
        if begin != at:
            raise CorruptCheckpoint(
                f"{path}: {name!r} begins at byte {begin} of the tensors, and the one before it "
                f"ends at {at}",
                path=str(path),
                key=name,
                offset=start + begin,
            )
        at = end
    if start + at != size:
        raise CorruptCheckpoint(
            f"{path} has {size} bytes, and its tensors end at {start + at}", path=str(path)
        )


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not readable: {error}", path=str(path)) from error
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{path} is not readable: no JSON object", path=str(path))
    return content


def _tensor(storage: Any, start: int, size: int, entry: Any, name: str, path: Path) -> torch.Tensor:
    try:
        code, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole or not isinstance(code, str):
        raise CorruptCheckpoint(f"{path} describes {name!r} wrongly", path=str(path), key=name)
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise LoadError(f"{path}: {name!r} is of the type {code!r}, which this torch does not have")
    # torch counts elements, and steps from one to the next, in 64 bits, of empty tensors, too.
    fits = math.prod(max(1, one) for one in shape) * dtype.itemsize <= _BYTES_MAX
    count = math.prod(shape) * dtype.itemsize if fits else None
    if count is None or end - begin != count or start + end > size:
        raise CorruptCheckpoint(
            f"{path} does not hold all of {name!r}", path=str(path), key=name, offset=start + begin
        )
    return view(storage, start + begin, shape, dtype)
