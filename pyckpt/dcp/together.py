"""Steps that all ranks take, and in which all fail if one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from pyckpt.dcp.failures import error_of, portable_errors
from pyckpt.errors import LoadError, SaveError
from pyckpt.private import DistWrapper

__all__ = ["gather", "together"]

T = TypeVar("T")


def together(
    step: Callable[[], T],
    *,
    process_group: dist.ProcessGroup | None,
    doing: str,
    kind: type[LoadError | SaveError] = LoadError,
) -> T:
    """Take a step on each rank. Collective.

    Raises:
        Exception: it raised on some ranks; raised on all, as `pyckpt.load` raises.
    """
    results: list[T] = []
    gather(lambda: results.append(step()), process_group=process_group, doing=doing, kind=kind)
    return results[0]


def gather(
    step: Callable[[], T],
    *,
    process_group: dist.ProcessGroup | None,
    doing: str,
    kind: type[LoadError | SaveError] = LoadError,
) -> list[T]:
    """`together`; returns what the step returned on each rank, which is sent to all."""
    if not dist.is_available() or not dist.is_initialized():
        return [step()]

    def run() -> T:
        with portable_errors():
            return step()

    try:
        found: list[T] = DistWrapper(process_group, True, 0).all_gather(doing, run)
    except CheckpointException as error:
        failure = error
    else:
        return found
    raise error_of(failure, alone=False, kind=kind, doing=doing)
