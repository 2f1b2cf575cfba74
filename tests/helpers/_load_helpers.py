"""What the tests of loading share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from pyckpt.dcp.load import load
from pyckpt.dcp.report import LoadReport


def save(state: dict[str, Any], path: Path) -> None:
    """Save with stock, without its remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(path))


def load_stock_file(state: dict[str, Any], path: Path, **options: Any) -> LoadReport:
    """Load with our planner and stock's reader."""
    return load(state, reader=FileSystemReader(path), trust_metadata=True, **options)


def round_trip(
    saved: dict[str, Any], into: dict[str, Any], path: Path, **options: Any
) -> LoadReport:
    save(saved, path)
    return load_stock_file(into, path, **options)
