"""Synchronisations and copies in reports of NVIDIA Nsight Systems.

Record with ``nsys profile --trace cuda,nvtx``, then::

    pyckpt syncs after.nsys-rep --against before.nsys-rep --range optimizer

or from Python: `read` a report, ask it for `Report.totals`, `Report.syncs` and `Report.copies` of a
range, and `compare` it with another.
"""

from pyckpt.profiling.nsys.comparison import Comparison, Difference, compare
from pyckpt.profiling.nsys.report import CopyRow, RangeInfo, Report, SyncRow, Totals, read

__all__ = [
    "Comparison",
    "CopyRow",
    "Difference",
    "RangeInfo",
    "Report",
    "SyncRow",
    "Totals",
    "compare",
    "read",
]
