"""Which ranks have come to a meeting of all ranks. A collective that times out does not tell."""

from __future__ import annotations

import hashlib
import logging
import secrets
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
# The rank that finds out for the others may end before it has: they wait this much longer for it.
_VERDICT_SECONDS = 1.0
_LOOK_SECONDS = 0.05
# A system that is short of threads, as where many processes end at once, may have one soon.
_THREAD_SECONDS = 1.0
_VERDICT, _NOBODY = "missing", "-"
_FINDS_OUT, _LEAVES = "finds out", "leaves"

T = TypeVar("T")


class RollCall:
    """Counts the meetings that each rank has come to, in the store that the process group was made
    with. A meeting costs a write of a few bytes. Ranks read them only if a meeting fails.

    All ranks must come to the same meetings in the same order. One thread at a time may ``arrive``.

    Args:
        name: the same on all ranks, and different for each roll call.
        rank, size: of this process among the ranks that meet, and their number.
        may_be_left: whether ranks before a restart may have used this name in the same store. The
            first meeting is then one to ``assemble`` for, in which the ranks find a new name.

    Attributes:
        count: of the meetings so far. The caller sets it after an error, which may have kept this
            rank from some meetings.
        arrived: when this rank came to the last of them, by ``time.monotonic``.
    """

    def __init__(self, name: str, rank: int, size: int, *, may_be_left: bool = False) -> None:
        self._rank = rank
        self._size = size
        self.count = 0
        self._told = 0  # of the meetings that this rank did come to, the number of the last
        self.arrived = time.monotonic()
        self._store = _store(f"pyckpt/{name}")
        self._naming: _Naming | None = None
        if may_be_left and self._store is not None:
            self._naming = _Naming(self._store, rank, size)
        self._hosts: dict[int, str] = {}
        self._said: dict[str, int] = {}

    def arrive(self) -> None:
        """Record that this rank has come to the next meeting. Does not wait for other ranks."""
        self.count += 1
        self._told = self.count
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
        begun = time.monotonic()

        def wait(is_over: Callable[[float], bool], absent: Callable[[], list[int]]) -> list[int]:
            missing: list[int] = []
            for seconds in (min(late, limit), limit):
                if is_over(begun + seconds):
                    return []
                missing = absent()
                if seconds < limit and missing:
                    tell(missing)
            return missing

        naming = self._naming
        try:
            if naming is not None:
                if self._rank != 0 and (missing := wait(naming.until, lambda: [0])):
                    return missing
                self._naming = None
                self._store = naming.named()
            self.arrive()
            store = self._store
            if store is None:
                return []
            meeting = f"meeting {self.count}"
            complete = f"{meeting} is complete"
            same = f"{meeting} for {what}"
            store.add(same, 1)  # before the meeting, so that the last one to come knows of all
            if store.add(meeting, 1) == self._size:
                is_same = store.add(same, 0) == self._size
                store.set(complete, "same" if is_same else "other")
                store.delete_key(same)
                # All ranks have left the one before.
                store.delete_key(f"meeting {self.count - 1}")
                store.delete_key(f"meeting {self.count - 1} is complete")
        except RuntimeError as error:
            _logger.debug("nobody will know which rank is missing, if one is: %s", error)
            return []

        def is_complete(deadline: float) -> bool:
            with suppress(RuntimeError):  # the time is over
                if naming is not None and self._rank == 0 and not naming.until(deadline):
                    return False
                left = max(0.001, deadline - time.monotonic())
                store.wait([complete], timedelta(seconds=left))
                if store.get(complete) == b"other":
                    raise RanksLost(
                        f"this process has called {what}, and another one something else: all "
                        "processes have to make the same calls in the same order"
                    )
                return True
            return False

        return wait(is_complete, lambda: self._behind(store, self.count))

    def missing(self) -> list[int]:
        """The ranks because of which a meeting failed, on this rank or on another; empty if that is
        not known. Each rank whose meeting failed calls this once. All are told the same.

        A rank that is alive finds out soon, too, and says so here. So those are missing that say
        nothing. If all do, those are that did not come to the meeting.
        """
        count = self._told
        self._tell(_gave_up(self._rank), _FINDS_OUT)
        seconds = 2 * _OTHERS_SECONDS + _VERDICT_SECONDS + _STORE_SECONDS
        return _within(seconds, lambda: self._judge(count)) or []

    def leave(self) -> None:
        """Say that this rank is not missing, and does not find out who is."""
        _within(_STORE_SECONDS, lambda: self._tell(_gave_up(self._rank), _LEAVES))

    def late(self) -> list[int]:
        """The ranks that this one waits for, if it is the one to say so: the first of those that
        are there. Any thread may call it, also while another waits in a meeting.

        Raises:
            Exception: the store does not answer.
        """
        count, store = self._told, self._store
        if store is None:
            return []
        # In this order, so that most ranks ask for one other only.
        if any(self._arrivals(store, rank) >= count for rank in range(self._rank)):
            return []
        after = range(self._rank + 1, self._size)
        behind = [rank for rank in after if self._arrivals(store, rank) < count]
        return [*range(self._rank), *behind]

    def is_first_to_say(self, text: str) -> bool:
        """Whether no other rank has said this as often as this one by now. Any thread may call it,
        one at a time."""
        self._said[text] = count = self._said.get(text, 0) + 1
        digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        try:
            return self._store is None or self._store.add(f"said {digest} {count}", 1) == 1
        except Exception:  # whoever cannot know says it
            return True

    def host(self, rank: int) -> str:
        """The host of a rank; empty if it is not known."""
        return self._hosts.get(rank, "")

    def _judge(self, count: int) -> list[int]:
        """What the first rank that is there finds out, which tells the others."""
        store = self._store
        if store is None:
            return []
        deadline = time.monotonic() + _OTHERS_SECONDS + _VERDICT_SECONDS
        while self._is_led(store) and time.monotonic() < deadline:
            if store.check([_VERDICT]):
                return self._read_verdict(store, store.get(_VERDICT))
            time.sleep(_LOOK_SECONDS)
        deadline = time.monotonic() + _OTHERS_SECONDS
        silent = [rank for rank in range(self._size) if rank != self._rank]
        while silent and time.monotonic() < deadline:
            silent = [rank for rank in silent if not store.check([_gave_up(rank)])]
            time.sleep(_LOOK_SECONDS)
        # One that has come to a later meeting may be busy elsewhere, if another one is missing.
        silent = [rank for rank in silent if self._arrivals(store, rank) <= count] or silent
        found = silent or self._behind(store, count)
        verdict = ",".join(map(str, found)) or _NOBODY
        return self._read_verdict(store, store.compare_set(_VERDICT, "", verdict))

    def _is_led(self, store: Any) -> bool:
        """Whether a rank before this one finds out who is missing."""
        before = [_gave_up(rank) for rank in range(self._rank)]
        return any(store.check([key]) and store.get(key) != _LEAVES.encode() for key in before)

    def _read_verdict(self, store: Any, verdict: bytes) -> list[int]:
        text = verdict.decode()
        found = [] if text == _NOBODY else [int(rank) for rank in text.split(",")]
        for rank in found:
            self._arrivals(store, rank)  # learns its host
        return found

    def _behind(self, store: Any, count: int) -> list[int]:
        """The ranks that have not come to so many meetings."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        return [rank for rank in others if self._arrivals(store, rank) < count]

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


def _gave_up(rank: int) -> str:
    return f"{rank}/gave up"


class _Naming:
    """Finds a name that ranks have for what they keep in a store, without a collective, in which
    those that come would hang if one does not.

    torchrun may keep one store for all restarts of the ranks. So whatever a rank reads there may be
    of ranks that are gone. The first rank draws the name. Each other one writes down which name it
    has read, with a number of its own. The first rank repeats the number if the name was right.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._number = secrets.token_hex(8)
        self._name = self._number if rank == 0 else ""
        self._unanswered = set(range(1, size))

    def until(self, deadline: float) -> bool:
        """Wait until this rank knows the name; the first one until all know it.

        Args:
            deadline: by ``time.monotonic``, after which this returns False.

        Raises:
            RuntimeError: the store does not answer.
        """
        look = self._answer if self._rank == 0 else self._ask
        pause = 0.001
        while not look():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS)
        return True

    def named(self) -> Any:
        """The store under the name, which this rank knows."""
        if self._rank == 0:
            self._store.set("name", self._name)
        stores: Any = dist
        return stores.PrefixStore(self._name, self._store)

    def _answer(self) -> bool:
        for rank in sorted(self._unanswered):
            name, _, number = self._read(f"{rank} has read").partition(" ")
            if name == self._name:
                self._store.set(f"{rank} is right", number)
                self._unanswered.remove(rank)
        return not self._unanswered

    def _ask(self) -> bool:
        name = self._read("name")
        if name != self._name:
            self._name = name
            self._store.set(f"{self._rank} has read", f"{name} {self._number}")
        return self._read(f"{self._rank} is right") == self._number

    def _read(self, key: str) -> str:
        text: str = self._store.get(key).decode() if self._store.check([key]) else ""
        return text


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
    """The result of a call; None if it takes longer, or raises, or no thread can be started."""
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(call())

    gives_up = time.monotonic() + _THREAD_SECONDS
    while True:
        thread = threading.Thread(target=run, name="pyckpt-roll-call", daemon=True)
        try:
            thread.start()
            break
        except RuntimeError:
            if time.monotonic() >= gives_up:
                return None
            time.sleep(_LOOK_SECONDS)
    thread.join(seconds)
    return results[0] if results else None
