"""pyckpt: checkpoints for PyTorch at the speed of the disk.

`Checkpointer` saves, finds, keeps and restores the checkpoints of a training loop. Its parts stand
alone: `DirectWriter`, `PinnedStager` and `SavePlanner` save wherever `torch.distributed.checkpoint`
takes a writer, a stager and a planner; `load`, or `DirectReader` and `LoadPlanner`, load; `optim`
brings optimizer state to where its optimizer wants it.
"""

import importlib
from typing import TYPE_CHECKING

from pyckpt._extension import check_extension

check_extension()

from pyckpt import errors, layouts  # noqa: E402

if TYPE_CHECKING:
    from pyckpt import optim
    from pyckpt.dcp.everything import to_torch
    from pyckpt.dcp.load import load
    from pyckpt.dcp.planner import LoadPlanner
    from pyckpt.dcp.reader import DirectReader
    from pyckpt.dcp.report import Conversion, LoadReport, Replacement
    from pyckpt.dcp.save_planner import SavePlanner
    from pyckpt.dcp.stager import PinnedStager
    from pyckpt.dcp.writer import DirectWriter
    from pyckpt.engine import Engine, configure
    from pyckpt.statistics import ReadStatistics, WriteStatistics
    from pyckpt.train import merges
    from pyckpt.train.checkpointer import Checkpointer
    from pyckpt.train.handle import SaveHandle
    from pyckpt.train.metrics import MetricState
    from pyckpt.train.modules import Trainable
    from pyckpt.train.per_rank import PerRank
    from pyckpt.train.rng import RngState

__all__ = [
    "Checkpointer",
    "Conversion",
    "DirectReader",
    "DirectWriter",
    "Engine",
    "LoadPlanner",
    "LoadReport",
    "MetricState",
    "PerRank",
    "PinnedStager",
    "ReadStatistics",
    "Replacement",
    "RngState",
    "SaveHandle",
    "SavePlanner",
    "Trainable",
    "WriteStatistics",
    "configure",
    "errors",
    "layouts",
    "load",
    "merges",
    "optim",
    "to_torch",
]

# Where the names are from that are imported when they are first asked for. They need
# torch.distributed.checkpoint, or dynamo, which take longer to import than all of this package.
_HOMES = {
    "Checkpointer": "pyckpt.train.checkpointer",
    "Conversion": "pyckpt.dcp.report",
    "DirectReader": "pyckpt.dcp.reader",
    "DirectWriter": "pyckpt.dcp.writer",
    "Engine": "pyckpt.engine",
    "LoadPlanner": "pyckpt.dcp.planner",
    "LoadReport": "pyckpt.dcp.report",
    "MetricState": "pyckpt.train.metrics",
    "PerRank": "pyckpt.train.per_rank",
    "PinnedStager": "pyckpt.dcp.stager",
    "ReadStatistics": "pyckpt.statistics",
    "Replacement": "pyckpt.dcp.report",
    "RngState": "pyckpt.train.rng",
    "SaveHandle": "pyckpt.train.handle",
    "SavePlanner": "pyckpt.dcp.save_planner",
    "Trainable": "pyckpt.train.modules",
    "WriteStatistics": "pyckpt.statistics",
    "configure": "pyckpt.engine",
    "load": "pyckpt.dcp.load",
    "to_torch": "pyckpt.dcp.everything",
}

_MODULES = {"merges": "pyckpt.train.merges", "optim": "pyckpt.optim"}

if not TYPE_CHECKING:  # or else a type checker would take any name for one of these

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            value = importlib.import_module(_MODULES[name])
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
