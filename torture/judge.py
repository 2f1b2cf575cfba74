"""What a directory holds after a case: asked of pyckpt, and of PyTorch alone."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader

import pyckpt
from pyckpt.format import metadata as metadata_format
from pyckpt.tools.verifying import verify
from torture.scenarios import tensors_of, tree_of, value_of

__all__ = [
    "Wrong",
    "checkpoint",
    "exported",
    "strays",
    "strays_of_export",
    "whole_node_local_run",
    "whole_run",
]

_STEP = re.compile(r"step-(\d{8})")


class Wrong(Exception):
    """A directory holds something that it must not."""


def checkpoint(path: Path) -> int | None:
    """The value of a checkpoint; None if there is none.

    Raises:
        Wrong: it is damaged, not the whole of one save, or PyTorch alone reads something else.
    """
    if not (path / ".metadata").exists():
        return None
    verified = verify(path)
    if not verified.good:
        raise Wrong(f"{path.name}: damaged: {verified.damages[:3]}")
    loaded = pyckpt.load(path)
    loaded.pop("pyckpt.checkpoint", None)
    ours = value_of(loaded)
    if isinstance(ours, str):
        raise Wrong(f"{path.name}: pyckpt reads {ours}")
    stock = _as_stock_reads(path)
    if stock != ours:
        raise Wrong(f"{path.name}: pyckpt reads {ours}, PyTorch {stock}")
    return ours


def _as_stock_reads(path: Path) -> int | str:
    """The value of a checkpoint, read by PyTorch alone into a state of the right keys and shapes;
    or text that says what is wrong."""
    described = FileSystemReader(path).read_metadata().state_dict_metadata
    target = tree_of(0)
    expected: dict[str, Any] = {
        f"{part}.{key}": entry for part, entries in target.items() for key, entry in entries.items()
    }
    named = described.keys() - {"pyckpt.checkpoint"}
    if named != expected.keys():
        return f"other keys: {sorted(named ^ expected.keys())}"
    for key, entry in expected.items():
        size = getattr(described[key], "size", None)
        right = entry.shape if isinstance(entry, torch.Tensor) else None
        if size != right:
            return f"{key}: {size} instead of {right}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_loader.load(target, storage_reader=FileSystemReader(path), no_dist=True)
    return value_of(target)


def whole_node_local_run(disks: Sequence[Path], scratch: Path, *, is_over: bool) -> dict[int, int]:
    """The values of all checkpoints of which nodes have a part each, by step: the parts are brought
    together in a scratch directory, which is removed.

    Args:
        is_over: whether no removal may be half done. Each node removes its part by itself, so until
            the next job some may have theirs of a checkpoint that is older than a whole one.
    """
    try:
        for disk in disks:
            for path in sorted(disk.glob("run/step-*")):
                mine, others = path / ".metadata", scratch / path.name / ".metadata"
                if mine.exists() and others.exists() and mine.read_bytes() != others.read_bytes():
                    raise Wrong(f"{path}: another node has other metadata")
                shutil.copytree(path, scratch / path.name, dirs_exist_ok=True)
        newer = False
        for path in sorted(scratch.glob("step-*"), reverse=True):
            if (path / ".metadata").exists():
                named = metadata_format.data_files(metadata_format.read(path / ".metadata"))
                if newer and not is_over and not all((path / name).exists() for name in named):
                    shutil.rmtree(path)
                newer = True
        return whole_run(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def whole_run(run: Path) -> dict[int, int]:
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


def strays(path: Path, *, run: bool, node: bool = False) -> list[str]:
    """What lies in a directory besides one checkpoint, or besides a Checkpointer's.

    Args:
        node: whether it is that of a node, which has one file that says which part it has.
    """
    if not run:
        named = set(metadata_format.data_files(metadata_format.read(path / ".metadata")))
        left = sorted({p.name for p in path.iterdir()} - named - {".metadata"})
        parts = [name for name in left if name.startswith(".part.")]
        return [name for name in left if name not in parts] if node and len(parts) == 1 else left
    found = []
    for entry in sorted(path.iterdir()):
        if entry.name == ".pyckpt":
            names = sorted(p.name for p in entry.iterdir())
            generations = [name for name in names if name.startswith("generation-")]
            if len(generations) != 1:
                found += [f".pyckpt/{name}" for name in generations] or [".pyckpt: no generation"]
            found += [f".pyckpt/{name}" for name in set(names) - {"lock", *generations}]
        elif _STEP.fullmatch(entry.name) and (entry / ".metadata").exists():
            found += [f"{entry.name}/{name}" for name in strays(entry, run=False, node=node)]
        else:
            found.append(entry.name)
    return found


def exported(path: Path) -> int | None:
    """The value of an export; None if there is none that loads.

    Raises:
        Wrong: what loads is not the whole of one save.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return None
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors |= load_file(path / name)
    value = value_of(tensors, tensors_of)
    if isinstance(value, str):
        raise Wrong(f"export: {value}")
    return value


def strays_of_export(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values())
    return sorted({p.name for p in path.iterdir()} - named - {index.name})
