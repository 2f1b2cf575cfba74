"""Optimizer state where its optimizer wants it.

After a resume, state that lies in the wrong place slows every step down or breaks it, and nothing
says so. `load_state_dict` loads it right; `check` and `repair` find and correct what something else
has loaded; `move` and `Offloader` take it elsewhere and back.
"""

from pyckpt.optim.load import load_state_dict
from pyckpt.optim.mover import Misplaced, check, move, repair
from pyckpt.optim.offloader import Offloader
from pyckpt.optim.places import Placement, Placements, placement, register_placement
from pyckpt.optim.rules import register_known

register_known()
del register_known

__all__ = [
    "Misplaced",
    "Offloader",
    "Placement",
    "Placements",
    "check",
    "load_state_dict",
    "move",
    "placement",
    "register_placement",
    "repair",
]
