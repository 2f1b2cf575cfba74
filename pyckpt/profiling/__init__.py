"""Counting what makes the host wait for the device.

`count_syncs` counts in this process; `pyckpt.profiling.nsys` reads reports of Nsight Systems;
the fixtures ``no_syncs`` and ``max_syncs`` of the pytest plugin pin a number in a test.
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
