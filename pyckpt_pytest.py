"""Pytest fixtures that limit how often a region of code waits for the device.

The plugin is a module beside the package, so that pytest loads neither torch nor pyckpt until a
test uses one of these::

    def test_step_does_not_wait(no_syncs):
        with no_syncs():
            optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyckpt.profiling import SyncCounts

__all__ = ["max_syncs", "no_syncs"]


class _Limit:
    """Fails the test at the end of the block, if the block waited more often than ``limit``."""

    def __init__(self, limit: int, threads: str) -> None:
        from pyckpt.profiling import count_syncs

        if limit < 0:
            raise ValueError(f"a region cannot wait {limit} times")
        self._limit = limit
        self._counter = count_syncs(stacks=True, threads=threads)  # type: ignore[arg-type]

    def __enter__(self) -> SyncCounts:
        self._counts = self._counter.__enter__()
        return self._counts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._counter.__exit__(kind, error, where)
        # An error of the block itself says more.
        if error is None and self._counts.total > self._limit:
            pytest.fail(_message(self._counts, self._limit), pytrace=False)


def _message(counts: SyncCounts, limit: int) -> str:
    lines = [f"at most {limit} waits for the device were expected here", str(counts)]
    for kind, stack in counts.stacks.items():
        if kind == "nonblocking_copy":
            continue
        lines += ["", f"the first {kind.replace('_', ' ')}, most recent call last:"]
        lines += ["".join(stack.format()).rstrip() or "  (in a thread that runs no Python)"]
    return "\n".join(lines)


@pytest.fixture
def no_syncs() -> Callable[..., _Limit]:
    """``with no_syncs():`` fails the test if the block makes the host wait for the device.

    The failure shows the stack of the first wait of each kind. ``threads="current"`` ignores other
    threads. ``with no_syncs() as counts:`` gives the counts of the block. See
    `pyckpt.profiling.count_syncs` for the waits that it sees. Without a GPU these are those of fake
    tensors.
    """

    def limit(*, threads: str = "all") -> _Limit:
        return _Limit(0, threads)

    return limit


@pytest.fixture
def max_syncs() -> Callable[..., _Limit]:
    """``with max_syncs(n):`` fails the test if the block waits more than ``n`` times. In all else
    it is like ``no_syncs``."""

    def limit(n: int, *, threads: str = "all") -> _Limit:
        return _Limit(n, threads)

    return limit
