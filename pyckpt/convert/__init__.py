"""Checkpoints of other programs, brought to pyckpt and back. Nothing here runs code of a file."""

from pyckpt.convert.copying import copy_checkpoint
from pyckpt.convert.importing import Imported, import_checkpoint
from pyckpt.convert.repair import Repair, repair_optimizer

__all__ = [
    "Imported",
    "Repair",
    "copy_checkpoint",
    "import_checkpoint",
    "repair_optimizer",
]
