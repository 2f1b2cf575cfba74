"""Which save planners only look at tensors' dtypes and shapes, and pass the tensors on.

While a state is being staged, only the engine knows how to wait for its copies. A planner of the
program's own may do anything with the tensors (cast them, say) in any of its calls. The first of
these comes before DCP shows the planner to the writer. But the function of DCP that calls the
writer has the planner among its variables, so the writer looks there. Where it finds none, the
planner counts as unknown, and planning waits until the copies are whole.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner

from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.private import state_dict_saver

__all__ = ["KNOWN_PLANNERS", "planner_is_known"]

# These very classes. A class made from one may do anything.
KNOWN_PLANNERS = frozenset({StockSavePlanner, DefaultSavePlanner, SavePlanner})


def planner_is_known(writer: object) -> bool:
    """Whether a known planner plans the save that is calling a method of ``writer`` right now."""
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
