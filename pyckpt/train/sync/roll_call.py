"""Who has come to where all ranks meet: what a collective that times out does not say."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from pyckpt.dcp.parts import host_name

__all__ = ["RollCall"]

_logger = logging.getLogger("pyckpt")

# The process that keeps the store may be the one that hangs.
_STORE_SECONDS = 5.0
# Ranks that wait in the same collective give up at about the same time.
_OTHERS_SECONDS = 5.0
_LOOK_SECONDS = 0.05

T = TypeVar("T")


class RollCall:
    """Counts, in the store that the process group was made with, the meetings that each rank has
    come to: a write of a few bytes for each, and nobody reads them unless a meeting fails.

    All ranks must come to the same meetings in the same order. One thread at a time may ``arrive``.

    Args:
        name: the same on all ranks, and no other roll call's.
        rank, size: of this process, among those that meet.

    Attributes:
        count: of the meetings so far. To be set where an error may have kept a rank from some.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.count = 0
        self._store = _store(f"pyckpt/{name}")
        self._hosts: dict[int, str] = {}

    def arrive(self) -> None:
        """Note that this rank has come to the next meeting. Does not wait for anyone."""
        self.count += 1
        self._tell(str(self._rank), f"{self.count} {host_name()}")

    def missing(self, *, wait: bool) -> list[int]:
        """The ranks that did not come to the meeting that failed; none where that is not known.

        Args:
            wait: where all had come, it may be that one hangs in the middle of it. Those that do
                not will give up, too, and call here: wait a little for them. Not to be done where
                the meeting failed at once, and others may still be waiting in it.
        """
        count = self.count
        self._tell(f"{self._rank}/gave up", "")
        return _within(_STORE_SECONDS + _OTHERS_SECONDS, lambda: self._missing(count, wait)) or []

    def host(self, rank: int) -> str:
        """Where a rank runs, if it said so before."""
        return self._hosts.get(rank, "")

    def _missing(self, count: int, wait: bool) -> list[int]:
        store = self._store
        if store is None:
            return []
        others = [rank for rank in range(self._size) if rank != self._rank]
        arrived = {rank: self._arrivals(store, rank) for rank in others}
        behind = [rank for rank in others if arrived[rank] < count]
        if behind or not wait:
            return behind
        deadline = time.monotonic() + _OTHERS_SECONDS
        silent = others
        while silent and time.monotonic() < deadline:
            silent = [
                rank
                for rank in silent
                if not store.check([f"{rank}/gave up"]) and self._arrivals(store, rank) <= count
            ]
            time.sleep(_LOOK_SECONDS)
        return silent

    def _arrivals(self, store: Any, rank: int) -> int:
        if not store.check([str(rank)]):
            return 0
        count, self._hosts[rank] = store.get(str(rank)).decode().split(" ", 1)
        return int(count)

    def _tell(self, key: str, value: str) -> None:
        if self._store is not None:
            try:
                self._store.set(key, value)
            except Exception as error:
                self._store = None
                _logger.debug("nobody will know which rank is missing, if one is: %s", error)


def _store(prefix: str) -> Any:
    """The store of the default process group; None where it cannot be had."""
    stores: Any = dist
    try:
        store = stores.distributed_c10d._get_default_store()
        while isinstance(store, stores.PrefixStore):
            store = store.underlying_store
        if isinstance(store, stores.TCPStore):
            # A connection of our own: others wait in theirs for long, and hold a lock meanwhile.
            store = store.clone()
        return stores.PrefixStore(prefix, store)
    except Exception as error:
        _logger.debug("nobody will know which rank is missing, if one is: %s", error)
        return None


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What a call returns; None where it takes longer, or raises."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="pyckpt-roll-call", daemon=True)
    with suppress(RuntimeError):  # there is no thread to be had
        thread.start()
        thread.join(seconds)
    return results[0] if results else None
