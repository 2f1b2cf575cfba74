"""What moves bytes beside the disk: copies, checksums, and a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pyckpt import _C
from pyckpt.engine import Engine

__all__ = ["cuda_variants", "host_variants"]


@contextmanager
def host_variants(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """Copies and checksums of so many bytes, each by one thread."""
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    for offset in range(0, size, 1 << 20):
        source[offset : offset + (1 << 20)] = os.urandom(4096) * (min(1 << 20, size - offset) >> 12)
    array = ctypes.c_char * size
    views = [array.from_buffer(source), array.from_buffer(target)]
    addresses = [ctypes.addressof(view) for view in views]
    try:
        yield {
            "memcpy, one thread": lambda: ctypes.memmove(addresses[1], addresses[0], size),
            "CRC-32, one thread": lambda: _C.crc32(source),
        }
    finally:
        views.clear()
        del array


@contextmanager
def cuda_variants(size: int) -> Iterator[dict[str, Callable[[], object]]]:
    """What the first GPU gives; nothing if there is none, or the extension is built without
    CUDA."""
    if not (_C.cuda and torch.cuda.is_available()):
        yield {}
        return
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    torch.cuda.synchronize()

    def register() -> None:
        # Memory of an engine is registered once, and stays so: each time another engine.
        with Engine(max_pinned_bytes=size + (16 << 20), slot_bytes=1 << 20) as engine:
            engine.native.prewarm(size, shared=False, devices=[0])

    def to_host() -> None:
        pinned.copy_(on_device, non_blocking=True)
        torch.cuda.synchronize()

    def to_device() -> None:
        on_device.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize()

    yield {
        "filling and registering memory": register,
        "device to host": to_host,
        "host to device": to_device,
    }
