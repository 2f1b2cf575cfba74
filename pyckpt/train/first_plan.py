"""`FirstPlan`: before the first save copies anything, the ranks agree on who writes what."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from pyckpt.dcp.ahead import plan_ahead
from pyckpt.dcp.leaves import is_memory, local_tensor
from pyckpt.dcp.plans import KnownPlan
from pyckpt.locks import fork_safe_lock
from pyckpt.train.sync.ranks import Ranks

__all__ = ["FirstPlan", "replicated_bytes"]

_logger = logging.getLogger("pyckpt")

_WORTH_BYTES = 16 << 20
"""For less, training does not wait."""
_PATIENCE_SECONDS = 5.0


class FirstPlan:
    """Where ranks hold the same tensors, as in data-parallel training, one of them writes each. So
    at every save but the first a rank copies only what it writes. At the first it would copy
    everything, into as much memory on each rank, if the ranks did not agree on a plan before.

    They agree in the thread that saves, like in a save. Training waits for that only where it
    spares a copy, and not long: a rank that is late must not stop the others, which then copy all.

    Args:
        ranks: all of which save.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._turn = fork_safe_lock()
        self._plan: Future[KnownPlan | None] = Future()

    @property
    def is_made(self) -> bool:
        """Whether the ranks have agreed, or failed to."""
        return self._plan.done()

    def make(self, outline: dict[str, Any] | None, doing: str) -> None:
        """Agree. Collective; called by the thread that saves, before the save, on all ranks. Calls
        after the first do nothing, but wait for it: only one thread may talk to the other ranks.
        Raises interrupts alone: if this fails, the save says why, or copies all.

        Args:
            outline: see `plan_ahead`; None on a rank whose save fails.
            doing: what to call the save in errors.
        """
        with self._turn:
            if self.is_made:
                return
            plan = None
            try:
                with self._ranks.meetings(1):
                    self._ranks.arrive()
                    plan = plan_ahead(outline, process_group=self._ranks.work)
            except CheckpointException as error:
                _logger.debug("the first save copies all: %s", error)
            except BaseException as error:
                # The error is not one rank's, which would be sent to all: the collective failed.
                self._ranks.lose(error, doing)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._plan.set_result(plan)

    def wait(self, leaves: Iterable[Any]) -> KnownPlan | None:
        """The plan, for the thread that trains; None if there is none, or it does not come soon, or
        is not worth waiting for.

        Args:
            leaves: of the state dict.
        """
        if replicated_bytes(leaves) >= _WORTH_BYTES:
            with suppress(FutureTimeout):
                return self._plan.result(_PATIENCE_SECONDS)
        return None


def replicated_bytes(leaves: Iterable[Any]) -> int:
    """The bytes of tensors that other ranks may hold as well."""
    found = 0
    for leaf in leaves:
        if isinstance(leaf, DTensor):
            sizes = leaf.device_mesh.shape
            if any(p.is_replicate() and n > 1 for p, n in zip(leaf.placements, sizes, strict=True)):
                found += local_tensor(leaf).nbytes
        elif isinstance(leaf, torch.Tensor) and is_memory(leaf):
            found += leaf.nbytes
    return found
