"""Which save planners only look at tensors' dtypes and shapes, and pass the tensors on.

While a state is staged its copies are still on their way, and only the engine knows to wait for
them. A planner of the program's own may do anything with the tensors, a cast say, at any of its
calls; so with such a class in the process, planning waits until the copies are whole.
"""

from __future__ import annotations

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner

from pyckpt.dcp.save_planner import SavePlanner

__all__ = ["KNOWN_PLANNERS", "planners_are_known"]

KNOWN_PLANNERS = frozenset({StockSavePlanner, DefaultSavePlanner, SavePlanner})


def planners_are_known() -> bool:
    """Whether there is no other class of planners in this process."""
    classes: list[type] = [StockSavePlanner]
    while classes:
        cls = classes.pop()
        if cls not in KNOWN_PLANNERS:
            return False
        classes += cls.__subclasses__()
    return True
