"""Which ranks have come to a meeting of all ranks. A collective that times out does not tell."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from pyckpt.dcp.parts import host_name
from pyckpt.errors import RanksLost

__all__ = ["RollCall"]

_logger = logging.getLogger("pyckpt")

# A bound, since the process that keeps the store may be the one that hangs.
_STORE_SECONDS = 5.0
# Ranks that wait in the same collective give up at about the same time.
_OTHERS_SECONDS = 5.0
_LOOK_SECONDS = 0.05

T = TypeVar("T")


class RollCall:
    """Counts the meetings that each rank has come to, in the store that the process group was made
    with. A meeting costs a write of a few bytes. Ranks read them only if a meeting fails.

    All ranks must come to the same meetings in the same order. One thread at a time may ``arrive``.

    Args:
        name: the same on all ranks, and different for each roll call.
        rank, size: of this process among the ranks that meet, and their number.

    Attributes:
        count: of the meetings so far. The caller sets it after an error, which may have kept this
            rank from some meetings.
        arrived: when this rank came to the last of them, by ``time.monotonic``.
    """

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self.count = 0
        self.arrived = time.monotonic()
        self._store = _store(f"pyckpt/{name}")
        self._hosts: dict[int, str] = {}

    def arrive(self) -> None:
        """Record that this rank has come to the next meeting. Does not wait for other ranks."""
        self.count += 1
        self.arrived = time.monotonic()
        self._tell(str(self._rank), f"{self.count} {host_name()}")

    def assemble(
        self, what: str, *, late: float, limit: float, tell: Callable[[list[int]], object]
    ) -> list[int]:
        """Come to the next meeting, and wait until all ranks have.

        Args:
            what: the ranks are going to do, which has to be the same.
            late: seconds after which ``tell`` is called with the ranks that have not come.
            limit: seconds after which the wait ends.

        Returns:
            The ranks that have not come; empty if all have, or if that cannot be known.

        Raises:
            RanksLost: all have come, and not for the same. Raised on all ranks.
        """
        self.arrive()
        store = self._store
        if store is None:
            return []
        meeting = f"meeting {self.count}"
        try:
            same = f"{meeting} for {what}"
            store.add(same, 1)  # before the meeting, so that the last one to come knows of all
            if store.add(meeting, 1) == self._size:
                is_same = store.add(same, 0) == self._size
                store.set(f"{meeting} is complete", "same" if is_same else "other")
                store.delete_key(same)
                # All ranks have left the one before.
                store.delete_key(f"meeting {self.count - 1}")
                store.delete_key(f"meeting {self.count - 1} is complete")
        except RuntimeError as error:
            _logger.debug("nobody will know which rank is missing, if one is: %s", error)
            return []
        deadline = time.monotonic() + limit
        for seconds in (min(late, limit), limit):
            with suppress(RuntimeError):  # the time is over
                left = min(seconds, max(0.0, deadline - time.monotonic()))
                store.wait([f"{meeting} is complete"], timedelta(seconds=max(0.001, left)))
                if store.get(f"{meeting} is complete") == b"other":
                    raise RanksLost(
                        f"this process has called {what}, and another one something else: all "
                        "processes have to make the same calls in the same order"
                    )
                return []
            missing = self._missing(self.count, wait=False)
            if seconds < limit and missing:
                tell(missing)
        return missing

    def missing(self, *, wait: bool) -> list[int]:
        """The ranks that did not come to the meeting that failed; empty if that is not known.

        Args:
            wait: if all ranks had come, one may hang inside of the meeting. The others will also
                give up and call this, so wait a little for them. Pass False if the meeting failed
                at once, since others may still wait in it.
        """
        count = self.count
        self._tell(f"{self._rank}/gave up", "")
        return _within(_STORE_SECONDS + _OTHERS_SECONDS, lambda: self._missing(count, wait)) or []

    def late(self) -> list[int]:
        """The ranks that this one waits for, if it is the one to say so: the first of those that
        are there. Any thread may call it, also while another waits in a meeting.

        Raises:
            Exception: the store does not answer.
        """
        count, store = self.count, self._store
        if store is None:
            return []
        # In this order, so that most ranks ask for one other only.
        if any(self._arrivals(store, rank) >= count for rank in range(self._rank)):
            return []
        after = range(self._rank + 1, self._size)
        behind = [rank for rank in after if self._arrivals(store, rank) < count]
        return [*range(self._rank), *behind]

    def host(self, rank: int) -> str:
        """The host of a rank; empty if it is not known."""
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
    """The store of the default process group; None if it is not available."""
    stores: Any = dist
    try:
        store = stores.distributed_c10d._get_default_store()
        while isinstance(store, stores.PrefixStore):
            store = store.underlying_store
        if isinstance(store, stores.TCPStore):
            # A connection of its own: other users of the store wait for long, and hold a lock then.
            store = store.clone()
        return stores.PrefixStore(prefix, store)
    except Exception as error:
        _logger.debug("nobody will know which rank is missing, if one is: %s", error)
        return None


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of a call; None if it takes longer, or raises."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    thread = threading.Thread(target=run, name="pyckpt-roll-call", daemon=True)
    with suppress(RuntimeError):  # no thread can be started
        thread.start()
        thread.join(seconds)
    return results[0] if results else None
