"""Files of weights, in the formats of safetensors and of ``torch.save``, written as a stream."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from pyckpt import _C
from pyckpt.format.files import naming
from pyckpt.train.store.archive import torch_layout
from pyckpt.train.store.swap import MARK
from pyckpt.train.store.tensors import ModelTensor

__all__ = ["SAFETENSORS", "copy", "safetensors_file", "torch_file"]

SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

Finish = Callable[[Mapping[str, int]], None]


def safetensors_file(
    file: Any, tensors: Sequence[ModelTensor], aliases: Mapping[str, str]
) -> tuple[Finish, list[tuple[ModelTensor, int]]]:
    """Write the header; return the offset of each tensor. For the format, see
    https://github.com/huggingface/safetensors."""
    # The names that were left out, as safetensors' save_model lists them, so that a program can tie
    # them again.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **MARK, **aliases}}
    # Tensors of wide elements come first, so that all are aligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    places = []
    at = 0
    for tensor in ordered:
        name = SAFETENSORS.get(tensor.dtype)
        if name is None:
            raise ValueError(f"{tensor.name}: safetensors has no {tensor.dtype}")
        header[tensor.name] = {
            "dtype": name,
            "shape": list(tensor.meta.size),
            "data_offsets": [at, at + tensor.nbytes],
        }
        places.append(at)
        at += tensor.nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    file.write(len(data).to_bytes(8, "little") + data)
    start = 8 + len(data)
    with naming(file.name):
        os.truncate(file.fileno(), start + at)
    return lambda _: None, [(t, start + place) for t, place in zip(ordered, places, strict=True)]


def torch_file(
    file: Any, tensors: Sequence[ModelTensor], aliases: Mapping[str, str]
) -> tuple[Finish, list[tuple[ModelTensor, int]]]:
    shapes = {tensor.name: (tensor.meta.size, tensor.dtype) for tensor in tensors}
    layout = torch_layout(file, shapes, aliases)
    return layout.finish, [(tensor, layout.offsets[tensor.name]) for tensor in tensors]


def copy(
    file: Any,
    places: Mapping[ModelTensor, int],
    pieces: Iterator[tuple[ModelTensor, torch.Tensor]],
    on_written: Callable[[int], None] = lambda count: None,
) -> dict[str, int]:
    """Write each tensor at its offset of a file; return the CRC-32 of its bytes, by its name.
    ``on_written`` is called with the bytes of each piece."""
    ends = dict(places)
    checksums = dict.fromkeys((tensor.name for tensor in places), 0)
    room = torch.empty(
        0, dtype=torch.uint8, device="cpu"
    )  # used again, since malloc would keep freed memory
    for tensor, piece in _ahead(pieces):
        written = piece
        if piece.dtype != tensor.dtype:
            needed = piece.numel() * tensor.dtype.itemsize
            if room.numel() < needed:
                room = torch.empty(needed, dtype=torch.uint8, device="cpu")
            written = room[:needed].view(tensor.dtype).copy_(piece)
        # The tensor's memory without numpy, which need not be installed.
        array = (ctypes.c_ubyte * written.nbytes).from_address(written.data_ptr())
        data = memoryview(array).cast("B")
        checksums[tensor.name] = _C.crc32(data, checksums[tensor.name])
        while data:
            with naming(file.name):
                count = os.pwrite(file.fileno(), data, ends[tensor])
            data = data[count:]
            ends[tensor] += count
            on_written(count)
    for tensor, place in places.items():
        assert ends[tensor] == place + tensor.nbytes, tensor.name
    return checksums


_Item = TypeVar("_Item")


def _ahead(pieces: Iterator[_Item]) -> Iterator[_Item]:
    """Yield the same pieces, and read the next one while one is used."""
    ready: queue.Queue[_Item | BaseException | None] = queue.Queue(maxsize=1)
    unwanted = threading.Event()

    def read() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                ready.put(piece)
                if unwanted.is_set():
                    return
        except BaseException as error:
            last = error
        ready.put(last)

    thread = threading.Thread(target=read, name="pyckpt-export", daemon=True)
    thread.start()
    try:
        while True:
            piece = ready.get()
            if piece is None:
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        unwanted.set()
        while thread.is_alive():
            try:
                ready.get(timeout=0.01)
            except queue.Empty:
                thread.join(0.01)
