"""128-bit hashes of tensors' bytes, by which a save knows what has not changed.

XXH3-128 reads some ten gigabytes a second on each core. It is no cryptographic hash: nobody should
be able to have made two states that differ and have the same hash, and nobody does so by chance.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pyckpt.dcp.leaves import is_memory
from pyckpt.format.envelope import envelope_of
from pyckpt.timeline import named

__all__ = ["RunningHash", "can_be_hashed", "hash_function", "hash_tensors", "stride_of"]

_THREADS_MAX = 4
# Below this, another thread costs more than it saves.
_BYTES_FOR_THREADS = 32 << 20


def hash_function() -> Callable[[object], str]:
    """XXH3-128 of a buffer, in hexadecimal. It lets other threads of Python run meanwhile.

    Raises:
        ImportError: xxhash is not installed.
    """
    try:
        from xxhash import xxh3_128_hexdigest
    except ImportError as error:
        raise ImportError(
            "frozen= and unchanged='detect' compare hashes, which needs xxhash: "
            'pip install "pyckpt[frozen]"'
        ) from error
    function: Any = xxh3_128_hexdigest
    return function  # type: ignore[no-any-return]


class RunningHash:
    """XXH3-128 of bytes that come in pieces. Needs xxhash."""

    def __init__(self) -> None:
        from xxhash import xxh3_128

        self._state: Any = xxh3_128()

    def add(self, piece: torch.Tensor) -> None:
        """Add a contiguous piece in host memory."""
        if piece.nbytes:
            self._state.update((ctypes.c_char * piece.nbytes).from_address(piece.data_ptr()))

    def add_bytes(self, piece: memoryview) -> None:
        """Add bytes."""
        self._state.update(piece)

    def hexdigest(self) -> str:
        """The hash, in hexadecimal."""
        digest: str = self._state.hexdigest()
        return digest


def can_be_hashed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is saved as the bytes of its memory, which then have its hash."""
    if not is_memory(tensor) or tensor.is_meta or not tensor.numel():
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    layout = envelope_of(tensor.dtype, tensor.shape, tensor.stride())
    if layout is None or layout.order is not None:
        return False
    # Without gaps and overlaps, so that all of it lies behind its first byte.
    return stride_of(tensor) is not None or tensor.is_contiguous()


def stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides under which a checkpoint has such a tensor; None for row-major ones."""
    layout = envelope_of(tensor.dtype, tensor.shape, tensor.stride())
    return None if layout is None else layout.stride


def hash_tensors(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The hash of each tensor's bytes. The tensors are such as ``can_be_hashed``, and nobody may
    change them meanwhile. Those of a GPU are copied to the host, one after another."""
    function = hash_function()
    total = sum(tensor.nbytes for tensor in tensors)

    def of(tensor: torch.Tensor) -> str:
        host = tensor.detach().cpu()
        buffer = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
        return function(buffer)

    threads = min(_THREADS_MAX, os.cpu_count() or 1, len(tensors))
    with named("hash", total):
        if threads < 2 or total < _BYTES_FOR_THREADS:
            return [of(tensor) for tensor in tensors]
        with ThreadPoolExecutor(threads, thread_name_prefix="pyckpt-hash") as pool:
            return list(pool.map(of, tensors))
