"""Looks at what a save or a load depends on: the software, the machine, and a directory's disk."""

from pyckpt.tools.doctor.diagnosis import Diagnosis, examine
from pyckpt.tools.doctor.finding import Finding, Level

__all__ = ["Diagnosis", "Finding", "Level", "examine"]
