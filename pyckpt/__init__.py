"""pyckpt: checkpoints for PyTorch at the speed of the disk.

`Checkpointer` saves, finds, keeps and restores the checkpoints of a training loop. `save` and
`load` make and load one checkpoint; `export` and `to_torch` write one for other programs.

Each part works alone. `DirectWriter`, `PinnedStager` and `SavePlanner` save, and `DirectReader` and
`LoadPlanner` load, wherever `torch.distributed.checkpoint` takes a part of that kind. `optim` puts
optimizer state where its optimizer wants it.
"""

from pyckpt._extension import check_extension

check_extension()
del check_extension

from pyckpt import errors, layouts, optim  # noqa: E402
from pyckpt.dcp.load import load  # noqa: E402
from pyckpt.dcp.planner import LoadPlanner  # noqa: E402
from pyckpt.dcp.reader import DirectReader  # noqa: E402
from pyckpt.dcp.report import Conversion, Difference, LoadReport, Replacement  # noqa: E402
from pyckpt.dcp.save_planner import SavePlanner  # noqa: E402
from pyckpt.dcp.stager import PinnedStager  # noqa: E402
from pyckpt.dcp.to_torch import to_torch  # noqa: E402
from pyckpt.dcp.writer import DirectWriter  # noqa: E402
from pyckpt.engine import Engine, configure  # noqa: E402
from pyckpt.statistics import ReadStatistics, WriteStatistics  # noqa: E402
from pyckpt.train.advice import Advice  # noqa: E402
from pyckpt.train.checkpointer import Checkpointer  # noqa: E402
from pyckpt.train.handle import SaveHandle, SaveStatistics  # noqa: E402
from pyckpt.train.save import save  # noqa: E402
from pyckpt.train.state import merges  # noqa: E402
from pyckpt.train.state.metrics import MetricState  # noqa: E402
from pyckpt.train.state.modules import Trainable  # noqa: E402
from pyckpt.train.state.per_rank import PerRank  # noqa: E402
from pyckpt.train.state.rng import RngState  # noqa: E402
from pyckpt.train.statistics import CheckpointerStatistics  # noqa: E402
from pyckpt.train.store.catalog import CheckpointInfo, DirectoryEntry  # noqa: E402
from pyckpt.train.store.export import export  # noqa: E402
from pyckpt.train.store.pruner import Protection  # noqa: E402

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
    "errors",
    "export",
    "layouts",
    "load",
    "merges",
    "optim",
    "save",
    "to_torch",
]
