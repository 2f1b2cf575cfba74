"""A plan that the ranks agree on before there is a save, so that even the first save copies only
what its rank writes."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan

from pyckpt.dcp.failures import portable_errors
from pyckpt.dcp.plans import Ahead, KnownPlan
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.errors import PyckptError
from pyckpt.private import DistWrapper

__all__ = ["plan_ahead"]

_logger = logging.getLogger("pyckpt")


def plan_ahead(
    outline: dict[str, Any] | None, *, process_group: dist.ProcessGroup | None
) -> KnownPlan | None:
    """Find out which part of a state dict this rank will write. Collective.

    A `SavePlanner` of this process goes by this plan when a state dict of that shape is saved.

    Args:
        outline: the state dict, whose tensors need no memory; see `PinnedStager.outline`. None on a
            rank that cannot say what it has.
        process_group: the ranks, over whose first one they agree.

    Returns:
        The plan; None if such state dicts have to be planned at each save, or this rank cannot
        keep it.

    Raises:
        CheckpointException: some rank could not plan, or could not say what it has; raised on all.
    """
    ranks = DistWrapper(process_group, True, 0)
    planner = SavePlanner()

    def describe() -> SavePlan:
        with portable_errors():
            if outline is None:
                raise PyckptError("this rank has no state to plan for")
            planner.set_up_planner(outline, is_coordinator=ranks.is_coordinator)
            return dataclasses.replace(planner.create_local_plan(), storage_data=Ahead())

    def decide(plans: list[SavePlan]) -> list[SavePlan]:
        with portable_errors():
            return planner.create_global_plan(plans)[0]

    answer = ranks.reduce_scatter("planning ahead", describe, decide)
    try:
        planner.finish_plan(answer)
    except Exception as error:  # of this rank alone: it copies all, and says so when they save
        _logger.debug("the plan that was made ahead cannot be kept: %s", error)
        return None
    known = planner.known
    return known if known is not None and known.is_remembered() else None
