"""What a disk, the memory and a GPU give, and which settings of pyckpt suit them."""

from pyckpt.tools.bench.bench import Result, Settings, bench
from pyckpt.tools.bench.series import Series, WrongBytes

__all__ = ["Result", "Series", "Settings", "WrongBytes", "bench"]
