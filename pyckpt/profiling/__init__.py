"""Counts how often the host waits for the device, and why.

`count_syncs` counts in this process. `pyckpt.profiling.nsys` reads reports of Nsight Systems. The
fixtures ``no_syncs`` and ``max_syncs`` of the pytest plugin limit the number in a test.
"""

from pyckpt.profiling.counter import SyncCounter, count_syncs
from pyckpt.profiling.counts import CopyCounts, SyncCounts, ThreadCounts
from pyckpt.profiling.fakes import fake_cuda

__all__ = [
    "CopyCounts",
    "SyncCounter",
    "SyncCounts",
    "ThreadCounts",
    "count_syncs",
    "fake_cuda",
]
