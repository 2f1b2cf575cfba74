"""The ranks that train together, and groups over which they can talk without a GPU."""

from __future__ import annotations

import logging
import secrets
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyckpt.dcp.parts import name_ranks
from pyckpt.errors import PyckptError, RanksLost
from pyckpt.locks import fork_safe_lock
from pyckpt.train.sync.agreement import Leaving
from pyckpt.train.sync.roll_call import RollCall

__all__ = ["Ranks"]

_logger = logging.getLogger("pyckpt")


class Ranks:
    """Two gloo groups of the ranks of ``process_group``, one for each thread that communicates.

    Making it is collective. Without `torch.distributed` there is one rank, and no group.

    Args:
        process_group: the ranks, default all.
        timeout: how long to wait for a rank; by default that of torch's gloo groups.

    Attributes:
        rank, size: of this process in the group, and of the group.
        lost: the error after which the ranks cannot act together; None before it.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        self.rank, self.size = 0, 1
        self._work: dist.ProcessGroup | None = None
        self._talk: dist.ProcessGroup | None = None
        self.lost: RanksLost | None = None
        self._losing = fork_safe_lock()
        self._timeout = timeout
        self._roll_call: RollCall | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group")
        self._work = work = _gloo(process_group, timeout)
        if self.size > 1:
            self._talk = _gloo(process_group, timeout)
            # torchrun keeps one store for all restarts of the ranks. By this number they tell what
            # they count there from what those before them did, whose groups had the same names.
            drawn = self.largest(secrets.randbits(62))
            self._roll_call = RollCall(f"{work.group_name}/{drawn}", self.rank, self.size)

    @property
    def work(self) -> dist.ProcessGroup | None:
        """The group for saving and loading; None for a single process.

        Raises:
            RanksLost: the ranks cannot act together any more.
        """
        group = self._work
        if group is None and self.size > 1:
            with self._losing:  # another thread is finding out who is missing
                pass
        self.check()
        return group

    def take_talk(self) -> dist.ProcessGroup:
        """The group for a ``GroupAgreement``, which has it from now on. There is none for a single
        rank."""
        group, self._talk = self._talk, None
        assert group is not None
        return group

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. Collective.

        Raises:
            RanksLost: a rank did not come.
        """
        return self._largest([number], torch.int64)[0]

    def numbers(self, mine: int) -> list[int]:
        """The number of each rank, -1 or more. Collective.

        Raises:
            RanksLost: a rank did not come.
        """
        slots = [mine if rank == self.rank else -1 for rank in range(self.size)]
        return self._largest(slots, torch.int64)

    def on_any(self, names: Sequence[str], mine: Collection[str]) -> list[str]:
        """The names, of some that are the same on all ranks, that any rank has in ``mine``.
        Collective.

        Raises:
            RanksLost: a rank did not come.
        """
        if not names or self.work is None:
            return [name for name in names if name in mine]
        flags = self._largest([name in mine for name in names], torch.uint8)
        return [name for name, flag in zip(names, flags, strict=True) if flag]

    def _largest(self, numbers: Sequence[int], dtype: torch.dtype) -> list[int]:
        group = self.work
        if group is None:
            return list(numbers)
        self.arrive()
        tensor = torch.tensor(numbers, dtype=dtype, device="cpu")
        try:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
        except (RuntimeError, ValueError) as error:  # this, if it was left meanwhile
            group = None
            raise self.lose(error, "restoring") from error
        found: list[int] = tensor.tolist()
        return found

    def is_first_to_say(self, text: str) -> bool:
        """Whether this rank is the one to log what several ranks find out, each in a thread. Does
        not wait for other ranks."""
        return self._roll_call is None or self._roll_call.is_first_to_say(text)

    # --- missing ranks ----------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the ranks can still act together.

        Raises:
            RanksLost: they cannot.
        """
        if self.lost is not None:
            raise self.lost

    def arrive(self) -> None:
        """Record that this rank has come to the next meeting of all ranks."""
        if self._roll_call is not None:
            self._roll_call.arrive()

    @contextmanager
    def meetings(self, number: int) -> Iterator[None]:
        """In this block all ranks ``arrive`` so many times, or fewer if the block fails."""
        count = 0 if self._roll_call is None else self._roll_call.count
        try:
            yield
        finally:
            if self._roll_call is not None:
                self._roll_call.count = count + number

    def lose(self, error: BaseException, doing: str) -> RanksLost:
        """The ranks did not meet: record that, and find out which are missing.

        Args:
            error: the error of the collective. After a ``Leaving``, this rank only tells the others
                that it is not missing.
            doing: the action that it was part of.

        Returns:
            The error to raise, now and in all later meetings.
        """
        with self._losing:
            if self.lost is None:
                self._leave(error)
                if isinstance(error, Leaving):
                    if self._roll_call is not None:
                        self._roll_call.leave()
                    self.lost = RanksLost(f"{doing} has ended: this rank has left ({error})")
                    return self.lost
                self.lost = self._explain(error, doing)
                there = set(range(self.size)) - set(self.lost.ranks)
                # Each says it if it is not known who is missing: that may be the first.
                speaks = not self.lost.ranks or self.rank == min(there, default=self.rank)
                _logger.log(logging.ERROR if speaks else logging.DEBUG, "%s", self.lost)
            return self.lost

    @contextmanager
    def acting(self, doing: str) -> Iterator[None]:
        """In this block all ranks take the same steps, over ``work``.

        Raises:
            RanksLost: they did not. What a step raises on one rank is no `RuntimeError`, since it
                is sent to all: such an error is that of a collective.
        """
        try:
            yield
        except PyckptError:
            raise
        except Exception as error:
            # A group that was left while this thread was about to use it raises anything.
            has_left = self._work is None
            if self.size == 1 or not (has_left or isinstance(error, RuntimeError)):
                raise
            raise self.lose(error, doing) from error

    def _leave(self, error: BaseException) -> None:
        """Leave ``work``, so that ranks find out that wait in it for this one, and have lost nobody
        themselves. The group closes its connections when nothing refers to it any more."""
        traceback.clear_frames(error.__traceback__)
        group, self._work = self._work, None
        if group is not None:
            with suppress(Exception):  # the program may have destroyed it
                dist.destroy_process_group(group)

    def _explain(self, error: BaseException, doing: str) -> RanksLost:
        missing = [] if self._roll_call is None else self._roll_call.missing()
        if missing:
            who = f"{self._named(missing)} did not come"
        else:
            who = "the ranks did not meet; it is not known who is missing"
        waited = "" if self._timeout is None else f" (timeout={self._timeout.total_seconds():g} s)"
        return RanksLost(
            f"{doing} failed: {who}{waited}. This Checkpointer saves and restores no more: end the "
            "job and resume from the last checkpoint, or make new process groups and a new "
            f"Checkpointer on all ranks. ({type(error).__name__}: {error})",
            ranks=tuple(missing),
        )

    def late(self) -> tuple[str, float]:
        """The ranks that this one waits for, and for how many seconds; "" if there are none, or
        another rank is to name them. Any thread may call it."""
        if self._roll_call is None or self.lost is not None:
            return "", 0.0
        ranks = self._roll_call.late()
        return self._named(ranks) if ranks else "", time.monotonic() - self._roll_call.arrived

    def _named(self, ranks: Sequence[int]) -> str:
        """The names of ranks, with their hosts."""
        assert self._roll_call is not None
        hosts = sorted({host for rank in ranks if (host := self._roll_call.host(rank))})
        return name_ranks(ranks) + (f" ({', '.join(hosts)})" if hosts else "")

    def close(self) -> None:
        """Destroy the groups. Idempotent."""
        groups, self._work, self._talk = (self._work, self._talk), None, None
        if dist.is_available() and dist.is_initialized():
            for group in groups:
                if group is not None:
                    dist.destroy_process_group(group)


def _gloo(process_group: dist.ProcessGroup | None, timeout: timedelta | None) -> Any:
    # Ranks outside of the group do not make this call, so only its own ranks synchronise.
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    return dist.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=ranks is not None
    )
