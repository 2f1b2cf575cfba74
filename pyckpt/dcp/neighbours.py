"""Ranks of one host, which copy out of each other's memory.

The kernel copies from one process into another in one step, faster than a process group. It may
forbid that: containers and security modules have rules for it. So nobody relies on it before it was
tried. Each rank puts a random number somewhere and says where. The others of its host read it
there, and all agree on which hosts this works.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from pyckpt import _C
from pyckpt.engine import Engine

__all__ = ["HELLO", "Copy", "Neighbours", "numbers_of"]

_logger = logging.getLogger("pyckpt")

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_DESCENDANTS_ONLY = "1"  # in _YAMA: a process may say who else reads it

HELLO = 6
"""Numbers in what `Neighbours.hello` says."""


class Copy(NamedTuple):
    """What is to be copied from another rank."""

    rank: int
    address: int
    target: torch.Tensor
    """Contiguous, on the host."""


class Neighbours:
    """What a rank knows of the ranks of its host. Leave it, as a context, when no rank copies any
    more.

    Args:
        rank: this one.
        engine: makes, or gives, the engine whose threads copy.
    """

    def __init__(self, rank: int, engine: Callable[[], Engine]) -> None:
        self._rank = rank
        self._engine = engine
        self._nonce: torch.Tensor | None = None
        self._heard: list[list[int]] = []
        self._lets_read = False

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lets_read:
            _C.let_peers_read(False)
            self._lets_read = False

    def hello(self) -> list[int]:
        """What this rank says of itself: `HELLO` numbers."""
        if _asks_for_leave():
            self._lets_read = _C.let_peers_read(True)
        secret = numbers_of(secrets.token_bytes(16))
        self._nonce = torch.tensor(secret, dtype=torch.int64, device="cpu")
        host = numbers_of(hashlib.blake2b(_host().encode(), digest_size=16).digest())
        return [*host, os.getpid(), self._nonce.data_ptr(), *secret]

    def hear(self, hellos: Sequence[Sequence[int]]) -> None:
        """Take what each rank said."""
        self._heard = [list(hello) for hello in hellos]

    def is_near(self, rank: int) -> bool:
        """Whether a rank, perhaps this one, is on this host."""
        return self._heard[rank][:2] == self._heard[self._rank][:2]

    def probe(self, ranks: Iterable[int]) -> bool:
        """Whether this rank can read the memory of others of its host."""
        others = [rank for rank in ranks if rank != self._rank]
        found = torch.zeros(len(others), 2, dtype=torch.int64, device="cpu")
        try:
            self.copy(Copy(rank, self._heard[rank][3], found[i]) for i, rank in enumerate(others))
        except OSError as error:
            _logger.debug("ranks of this host do not copy from each other's memory: %s", error)
            return False
        return found.tolist() == [self._heard[rank][4:HELLO] for rank in others]

    def agree(self, works: Sequence[bool]) -> list[int]:
        """For each rank, a number that it has in common with the ranks of its host, if all of them
        can read the memory of all, and with nobody else.

        Args:
            works: what each rank said of its probe.
        """
        host_of = [tuple(heard[:2]) for heard in self._heard]
        failed = {host for host, well in zip(host_of, works, strict=True) if not well}
        return [
            rank if host in failed else host_of.index(host) for rank, host in enumerate(host_of)
        ]

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy from other ranks.

        Raises:
            OSError: the kernel refused; some bytes are copied then and some are not.
        """
        job = _C.PeerJob(self._engine().native)
        for rank, address, target in copies:
            job.add(self._heard[rank][2], address, target)
        job.run()


def numbers_of(data: bytes) -> list[int]:
    """Bytes as numbers of 64 bits."""
    return [
        int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)
    ]


def _host() -> str:
    """A name of what a process has to have in common with another to know it by its number: the
    running kernel, and the space of process numbers. A name that no other process has where these
    cannot be told."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)


def _asks_for_leave() -> bool:
    """Whether a process has to allow it before one that is not its parent reads it."""
    try:
        return _YAMA.read_text().strip() == _DESCENDANTS_ONLY
    except OSError:
        return False  # there is no such rule
