"""Hashes of memory that are made again only where it may have been written.

The kernel says which pages were written since a hash was made (Linux 6.13; csrc/page_watch.h). That
is a proof, as the hash is: a tensor whose pages nobody has written has the bytes that were hashed.
It costs a look at the page tables instead of reading the memory. Where the kernel does not say it,
and now and then in any case, the bytes are hashed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyckpt import _C
from pyckpt.dcp.hashing import hash_tensors
from pyckpt.locks import fork_safe_lock
from pyckpt.timeline import named

__all__ = ["HashedMemory"]

_logger = logging.getLogger("pyckpt")

# Watching splits a mapping of the process. Less than this is hashed nearly as fast as looked up.
_WATCHED_MIN = 256 << 10

_Key = tuple[int, int]
"""The address of memory, and how many bytes it has."""


@dataclass(frozen=True)
class _Known:
    hash: str
    since: int
    """By this the watch is asked whether it was written; 0: it is not watched."""


class HashedMemory:
    """The hashes of tensors in host memory, from one call to the next. For one thread, but `close`.

    Args:
        anew_every: of so many calls one hashes all bytes, whatever the kernel says.
        watches: whether the kernel is asked at all.
    """

    def __init__(self, *, anew_every: int, watches: bool) -> None:
        self._anew_every = anew_every
        self._trusting = 0  # calls since all bytes were hashed
        self._known: dict[_Key, _Known] = {}
        self._lock = fork_safe_lock()
        self._watch: _C.PageWatch | None = None
        if watches and anew_every > 1:
            try:
                self._watch = _C.PageWatch()
            except OSError as error:
                _logger.debug("frozen memory is hashed at each save: %s", error)

    def hashes(self, tensors: Sequence[torch.Tensor]) -> list[str]:
        """The hash of each tensor's bytes, as of `hash_tensors`. Those that the program changes
        during the call may have any."""
        with self._lock:
            memory = {_key_of(one): one for one in tensors}
            watch = None if _C.PageWatch.pinned() else self._watch
            same = {} if watch is None else self._unwritten(watch, memory)
            hashes_all = not same or self._trusting + 1 >= self._anew_every
            self._trusting = 0 if hashes_all else self._trusting + 1
            changing = {key: one for key, one in memory.items() if key not in same}
            # Before they are hashed: who writes from now on, writes after the hash.
            since = {} if watch is None else {k: _watch(watch, one) for k, one in changing.items()}
            hashed = memory if hashes_all else changing
            found = dict(zip(hashed, hash_tensors(list(hashed.values())), strict=True))
            if any(found.get(key, one.hash) != one.hash for key, one in same.items()):
                self._distrust()
                same, since = {}, {}
            # Where somebody wrote between the look and the hash, and puts the bytes back later, a
            # later look would find them, and the hash is of something else.
            still = {
                key: number
                for key, number in since.items()
                if number and watch is not None and watch.is_unwritten(memory[key], number)
            }
            for key, known in self._known.items():
                if self._watch is not None and key not in memory:
                    self._watch.forget(key[0], known.since)
            self._known = dict(same)
            for key, hash in found.items():
                if key not in same:
                    self._known[key] = _Known(hash, still.get(key, 0))
            return [self._known[_key_of(one)].hash for one in tensors]

    def _unwritten(
        self, watch: _C.PageWatch, memory: dict[_Key, torch.Tensor]
    ) -> dict[_Key, _Known]:
        with named("look for written pages", sum(size for _, size in memory)):
            return {
                key: known
                for key, tensor in memory.items()
                if (known := self._known.get(key)) is not None
                and known.since
                and watch.is_unwritten(tensor, known.since)
            }

    def _distrust(self) -> None:
        _logger.warning(
            "frozen memory has changed, and the kernel has not noticed: a device writes into it, "
            "perhaps, or a thread while a save begins. From now on each save hashes it. Earlier "
            "saves may have the state before"
        )
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        """Watch nothing more. Hashes are made as before."""
        with self._lock:
            if self._watch is not None:
                self._watch.close()
                self._watch = None
            self._known = {}


def _key_of(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.nbytes


def _watch(watch: _C.PageWatch, tensor: torch.Tensor) -> int:
    # A GPU may write to pinned memory, past the processor's page tables.
    last = tensor.detach().as_strided((1,), (1,), tensor.storage_offset() + tensor.numel() - 1)
    if tensor.nbytes < _WATCHED_MIN or tensor.is_pinned() or last.is_pinned():
        return 0
    return watch.watch(tensor.detach())
