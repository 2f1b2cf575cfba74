"""The parsers in Python, each with inputs that are sound, and with what must hold of any input.

An input of a parser that reads several files is a byte, which says which of them is another one,
and the content of that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torture.fuzz.parsers.base import Parser, Wrong
from torture.fuzz.parsers.other_files import (
    Accelerate,
    Distributed,
    Lightning,
    Safetensors,
    ShardedWeights,
    TorchFile,
    Trainer,
)
from torture.fuzz.parsers.own_files import (
    Checkpoint,
    CheckpointNote,
    FenceFiles,
    Metadata,
    Object,
    StockCheckpoint,
)
from torture.fuzz.parsers.reports import Nsys, Trace

__all__ = ["PARSERS", "Parser", "Wrong"]

PARSERS: dict[str, Callable[[Path], Parser]] = {
    "metadata": Metadata,
    "checkpoint": Checkpoint,
    "stock": StockCheckpoint,
    "object": Object,
    "note": CheckpointNote,
    "fence": FenceFiles,
    "torch_file": TorchFile,
    "safetensors": Safetensors,
    "weights_index": ShardedWeights,
    "trainer": Trainer,
    "accelerate": Accelerate,
    "lightning": Lightning,
    "distributed": Distributed,
    "nsys": Nsys,
    "trace": Trace,
}
