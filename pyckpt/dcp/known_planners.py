"""Which save planners only look at tensors' dtypes and shapes, and pass the tensors on.

While a state is staged its copies are still on their way, and only the engine knows to wait for
them. A planner of the program's own may do anything with the tensors, a cast say, at any of its
calls, the first of which comes before DCP shows the planner to a writer. What calls the writer is a
function of DCP that has both at hand, so the planner is taken from there. Where it cannot be, it
counts as unknown, and planning waits until the copies are whole.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner

from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.private import state_dict_saver

__all__ = ["KNOWN_PLANNERS", "planner_is_known"]

# These very classes: what is made from one may do anything.
KNOWN_PLANNERS = frozenset({StockSavePlanner, DefaultSavePlanner, SavePlanner})


def planner_is_known(writer: object) -> bool:
    """Whether it is one of these that plans the save which calls the writer's method that asks."""
    return type(_planner_of(writer)) in KNOWN_PLANNERS


def _planner_of(writer: object) -> Any:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(state_dict_saver):
            names = frame.f_locals
            if names.get("storage_writer") is writer:
                return names.get("planner")
        frame = frame.f_back  # type: ignore[assignment]
    return None
