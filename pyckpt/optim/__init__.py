"""Optimizer state on the devices and in the dtypes that its optimizer uses.

After a resume, misplaced state slows every step down or breaks it, and no error says why.
`load_state_dict` places state as it loads. `check` finds state that other code has misplaced, and
`repair` corrects it. `move` and `Offloader` move state to other devices and back.
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
