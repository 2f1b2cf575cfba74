"""What a directory holds after a case: asked of pyckpt, and of PyTorch alone."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

import pyckpt
from pyckpt.format import metadata as metadata_format
from pyckpt.tools.verifying import verify
from torture.scenarios import value_of

__all__ = ["Wrong", "checkpoint", "exported", "strays", "strays_of_export", "whole_run"]

_STEP = re.compile(r"step-(\d{8})")


class Wrong(Exception):
    """A directory holds something that it must not."""


def checkpoint(path: Path) -> float | None:
    """The value of a checkpoint; None if there is none.

    Raises:
        Wrong: it is damaged, a mixture, or PyTorch alone reads something else.
    """
    if not (path / ".metadata").exists():
        return None
    verified = verify(path)
    if not verified.good:
        raise Wrong(f"{path.name}: damaged: {verified.damages[:3]}")
    loaded = pyckpt.load(path)
    loaded.pop("pyckpt.checkpoint", None)
    ours = value_of(loaded)
    described = FileSystemReader(path).read_metadata().state_dict_metadata
    target: dict[str, Any] = {}
    for key, entry in described.items():
        if key != "pyckpt.checkpoint":
            size = getattr(entry, "size", None)
            target[key] = 0 if size is None else torch.empty(size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    stock = value_of(target)
    if isinstance(ours, str) or ours != stock:
        raise Wrong(f"{path.name}: pyckpt reads {ours}, PyTorch {stock}")
    return ours


def whole_run(run: Path) -> dict[int, float]:
    """The values of all checkpoints in a Checkpointer's directory, by step."""
    found = {}
    if run.is_dir():
        for path in sorted(run.iterdir()):
            match = _STEP.fullmatch(path.name)
            if match is not None:
                value = checkpoint(path)
                if value is not None:
                    found[int(match[1])] = value
    return found


def strays(path: Path, *, run: bool) -> list[str]:
    """What lies in a directory besides one checkpoint, or besides a Checkpointer's."""
    if not run:
        named = set(metadata_format.data_files(metadata_format.read(path / ".metadata")))
        return sorted({p.name for p in path.iterdir()} - named - {".metadata"})
    found = []
    for entry in sorted(path.iterdir()):
        if entry.name == ".pyckpt":
            names = sorted(p.name for p in entry.iterdir())
            generations = [name for name in names if name.startswith("generation-")]
            if len(generations) != 1:
                found += [f".pyckpt/{name}" for name in generations] or [".pyckpt: no generation"]
            found += [f".pyckpt/{name}" for name in set(names) - {"lock", *generations}]
        elif _STEP.fullmatch(entry.name) and (entry / ".metadata").exists():
            found += [f"{entry.name}/{name}" for name in strays(entry, run=False)]
        else:
            found.append(entry.name)
    return found


def exported(path: Path) -> float | None:
    """The value of an export; None if there is none that loads.

    Raises:
        Wrong: it loads as a mixture.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return None
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    value = value_of({name: load_file(path / name) for name in names})
    if isinstance(value, str):
        raise Wrong(f"export: {value}")
    return value


def strays_of_export(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values())
    return sorted({p.name for p in path.iterdir()} - named - {index.name})
