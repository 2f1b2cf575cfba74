"""pyckpt: checkpoints for PyTorch at the speed of the disk."""

from pyckpt._extension import check_extension

check_extension()

from pyckpt import errors  # noqa: E402
from pyckpt.dcp.writer import DirectWriter  # noqa: E402
from pyckpt.engine import Engine, configure  # noqa: E402
from pyckpt.statistics import WriteStatistics  # noqa: E402

__all__ = ["DirectWriter", "Engine", "WriteStatistics", "configure", "errors"]
