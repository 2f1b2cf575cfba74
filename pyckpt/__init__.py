"""pyckpt: checkpoints for PyTorch at the speed of the disk.

`Checkpointer` saves, finds, keeps and restores the checkpoints of a training loop. `save` and
`load` make and load one checkpoint; `export` and `to_torch` write one for other programs.

Each part works alone. `DirectWriter`, `PinnedStager` and `SavePlanner` save, and `DirectReader` and
`LoadPlanner` load, wherever `torch.distributed.checkpoint` takes a part of that kind. `optim` puts
optimizer state where its optimizer wants it.
"""

import importlib
from typing import TYPE_CHECKING

from pyckpt._extension import check_extension

check_extension()
del check_extension

from pyckpt import errors, layouts  # noqa: E402

if TYPE_CHECKING:
    from pyckpt import convert, exporters, optim
    from pyckpt.bars import progress
    from pyckpt.convert.load_model import load_model
    from pyckpt.dcp.load import load
    from pyckpt.dcp.planner import LoadPlanner
    from pyckpt.dcp.reader import DirectReader
    from pyckpt.dcp.report import Conversion, Difference, LoadReport, Replacement
    from pyckpt.dcp.save_planner import SavePlanner
    from pyckpt.dcp.stager import PinnedStager
    from pyckpt.dcp.to_torch import to_torch
    from pyckpt.dcp.writer import DirectWriter
    from pyckpt.engine import Engine, configure
    from pyckpt.statistics import ReadStatistics, WriteStatistics
    from pyckpt.train import events
    from pyckpt.train.advice import Advice
    from pyckpt.train.checkpointer import Checkpointer
    from pyckpt.train.handle import SaveHandle, SaveStatistics
    from pyckpt.train.save import save
    from pyckpt.train.state import merges
    from pyckpt.train.state.metrics import MetricState
    from pyckpt.train.state.modules import Trainable
    from pyckpt.train.state.per_rank import PerRank
    from pyckpt.train.state.rng import RngState
    from pyckpt.train.statistics import CheckpointerStatistics
    from pyckpt.train.store.catalog import CheckpointInfo, DirectoryEntry
    from pyckpt.train.store.export import export
    from pyckpt.train.store.pruner import Protection

    __version__: str

__all__ = [
    "Advice",
    "CheckpointInfo",
    "Checkpointer",
    "CheckpointerStatistics",
    "Conversion",
    "Difference",
    "DirectReader",
    "DirectWriter",
    "DirectoryEntry",
    "Engine",
    "LoadPlanner",
    "LoadReport",
    "MetricState",
    "PerRank",
    "PinnedStager",
    "Protection",
    "ReadStatistics",
    "Replacement",
    "RngState",
    "SaveHandle",
    "SavePlanner",
    "SaveStatistics",
    "Trainable",
    "WriteStatistics",
    "configure",
    "convert",
    "errors",
    "events",
    "export",
    "exporters",
    "layouts",
    "load",
    "load_model",
    "merges",
    "optim",
    "progress",
    "save",
    "to_torch",
]

# The modules of names that are imported at their first use. They need torch.distributed.checkpoint
# or dynamo, which take longer to import than all of this package.
_HOMES = {
    "Advice": "pyckpt.train.advice",
    "CheckpointInfo": "pyckpt.train.store.catalog",
    "Checkpointer": "pyckpt.train.checkpointer",
    "CheckpointerStatistics": "pyckpt.train.statistics",
    "Conversion": "pyckpt.dcp.report",
    "Difference": "pyckpt.dcp.report",
    "DirectReader": "pyckpt.dcp.reader",
    "DirectWriter": "pyckpt.dcp.writer",
    "DirectoryEntry": "pyckpt.train.store.catalog",
    "Engine": "pyckpt.engine",
    "LoadPlanner": "pyckpt.dcp.planner",
    "LoadReport": "pyckpt.dcp.report",
    "MetricState": "pyckpt.train.state.metrics",
    "PerRank": "pyckpt.train.state.per_rank",
    "PinnedStager": "pyckpt.dcp.stager",
    "Protection": "pyckpt.train.store.pruner",
    "ReadStatistics": "pyckpt.statistics",
    "Replacement": "pyckpt.dcp.report",
    "RngState": "pyckpt.train.state.rng",
    "SaveHandle": "pyckpt.train.handle",
    "SavePlanner": "pyckpt.dcp.save_planner",
    "SaveStatistics": "pyckpt.train.handle",
    "Trainable": "pyckpt.train.state.modules",
    "WriteStatistics": "pyckpt.statistics",
    "configure": "pyckpt.engine",
    "export": "pyckpt.train.store.export",
    "load": "pyckpt.dcp.load",
    "load_model": "pyckpt.convert.load_model",
    "progress": "pyckpt.bars",
    "save": "pyckpt.train.save",
    "to_torch": "pyckpt.dcp.to_torch",
}

_MODULES = {
    "convert": "pyckpt.convert",
    "events": "pyckpt.train.events",
    "exporters": "pyckpt.exporters",
    "merges": "pyckpt.train.state.merges",
    "optim": "pyckpt.optim",
}

if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            value = importlib.import_module(_MODULES[name])
        elif name == "__version__":
            value = _version()
        elif name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, "__version__"})

    def _version() -> str:
        metadata = importlib.import_module("importlib.metadata")
        try:
            return str(metadata.version("pyckpt"))
        except metadata.PackageNotFoundError:
            return "0+unknown"  # built in a checkout, and not installed
