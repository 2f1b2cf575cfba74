"""`Nodes`: which ranks see the same directory, found out by trying.

Neither names of hosts nor numbers of devices tell whether two ranks see one directory: it may be
mounted from a server, in a container, or under the same path on each host. So each rank makes a
file there whose name nobody had before, and looks for those of the others.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from pyckpt.dcp.failures import error_of, portable_errors
from pyckpt.errors import LoadError, PyckptError
from pyckpt.format import commit
from pyckpt.private import DistWrapper
from pyckpt.train.store.fence import FOLDER
from pyckpt.train.sync.ranks import Ranks

__all__ = ["Nodes"]

T = TypeVar("T")

_RULE = "Each directory must be on a file system that is the same for all who see it"


class Nodes:
    """The ranks, grouped by the directory that they see. A *node* is such a group, and its first
    rank acts for it. Making this is collective.

    Args:
        directory: of the checkpoints.
        ranks: that save together.

    Attributes:
        first_of: the first rank of each rank's node.

    Raises:
        OSError: a rank cannot make a file in its directory.
        PyckptError: ranks do not agree on who sees what.
    """

    def __init__(self, directory: Path, ranks: Ranks) -> None:
        self.ranks = ranks
        self.first_of: list[int] = [0]
        folder = directory / FOLDER
        mine = folder / f"probe-{uuid.uuid4().hex}"

        def make() -> str:
            commit.make_directory(folder, sync=False)
            with open(mine, "xb"):
                return mine.name

        def look() -> int:
            # By their names: what a file system remembers of a listing may be old.
            seen = (rank for rank, name in enumerate(names) if (folder / name).exists())
            return next(seen, -1)

        def compare() -> int:
            """A rank that this one sees, but which does not see it; or the reverse."""
            mine = self.members
            unseen = (r for r in mine if self.is_first and not (folder / names[r]).exists())
            there = set(os.listdir(folder))
            strangers = (r for r, name in enumerate(names) if name in there and r not in mine)
            return next(chain(unseen, strangers), -1)

        try:
            names = self.together("making a file in each directory", make)
            self.first_of = self.together("looking for the files of other ranks", look)
            one_sided = self.together("comparing who sees whom", compare)
        finally:
            with suppress(OSError):
                mine.unlink()
        wrong = [r for r, first in enumerate(self.first_of) if first < 0 or first > r]
        wrong += [r for r, first in enumerate(self.first_of) if self.first_of[first] != first]
        if wrong:
            raise PyckptError(
                f"{directory}: rank {wrong[0]} sees files of other ranks there that do not see its "
                f"own. {_RULE}"
            )
        for rank, other in enumerate(one_sided):
            if other >= 0:
                raise PyckptError(
                    f"{directory}: of the ranks {rank} and {other}, one sees the files of the "
                    f"other there, and the other does not see its files. {_RULE}"
                )

    @property
    def first(self) -> int:
        """The first rank of this node."""
        return self.first_of[self.ranks.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank acts for its node."""
        return self.first == self.ranks.rank

    @property
    def firsts(self) -> list[int]:
        """The first ranks of all nodes."""
        return sorted(set(self.first_of))

    @property
    def members(self) -> list[int]:
        """The ranks of this node."""
        return [rank for rank, first in enumerate(self.first_of) if first == self.first]

    def meet(self, doing: str, step: Callable[[], T]) -> list[T]:
        """Take a step on each rank; return what it returned on each. Collective.

        Raises:
            CheckpointException: it raised on some ranks. Raised on all, with the errors of all.
        """

        def run() -> T:
            with portable_errors():
                return step()

        self.ranks.check()
        self.ranks.arrive()
        found: list[T] = self._wrapper(0).all_gather(doing, run)
        return found

    def together(self, doing: str, step: Callable[[], T]) -> list[T]:
        """`meet` for loading: raises on all ranks what the step raised on some, as `pyckpt.load`
        does."""
        try:
            return self.meet(doing, step)
        except CheckpointException as error:
            failure = error
        raise error_of(failure, alone=self.ranks.size == 1, kind=LoadError, doing=doing)

    def from_rank(self, rank: int, value: T | None) -> T:
        """What one of the ranks passes, on all. Collective."""
        self.ranks.arrive()
        sent: T = self._wrapper(rank).broadcast_object(value)
        return sent

    def _wrapper(self, rank: int) -> Any:
        return DistWrapper(self.ranks.work, self.ranks.work is not None, rank)
