"""`to_lightning`: a checkpoint as a file of Lightning's own format."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pyckpt.dcp.load import load_all
from pyckpt.errors import LoadError
from pyckpt.format.files import refuse_to_replace

__all__ = ["as_lightning", "is_of_training", "to_lightning"]


def to_lightning(directory: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a checkpoint of the callback or of a strategy as a file of Lightning's own format, for
    ``LightningModule.load_from_checkpoint`` and for stock strategies. One process calls it, with
    memory for the whole state.

    The file has no random number generators and no metrics, as Lightning's have none. The positions
    of dataloaders are in it if one rank saved.

    Args:
        directory: of the checkpoint.
        file: where to write. It appears once it is complete, and replaces a file of that name.

    Raises:
        LoadError: the directory has no checkpoint that `pyckpt.integrations.lightning` saved.
        CorruptCheckpoint: bytes are not those that were saved.
        FileExistsError, IsADirectoryError: ``file`` is there, and is no regular file.
        OSError: a file could not be read or written.
    """
    path = Path(file)
    refuse_to_replace(path)  # before the work, and once more after it
    checkpoint = as_lightning(directory)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(checkpoint, temporary)
        refuse_to_replace(path)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def as_lightning(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a checkpoint, as ``torch.load`` would return it from a file of Lightning's.

    Raises:
        Exception: as `to_lightning`.
    """
    loaded = load_all(directory)
    if "lightning" not in loaded or "model" not in loaded:
        raise LoadError(
            f"{directory} is no checkpoint of a Trainer: it has {', '.join(sorted(loaded))}, and "
            "not model and lightning"
        )
    checkpoint: dict[str, Any] = {**loaded["lightning"], "state_dict": dict(loaded["model"])}
    if "lr_schedulers" in checkpoint:  # and so not of weights alone
        names = [name for name in loaded if name.startswith("optimizer_")]
        checkpoint["optimizer_states"] = [
            _numbered(loaded[name]) for name in sorted(names, key=_number)
        ]
    ranks = list((loaded.get("loaders") or {}).values())
    if len(ranks) == 1 and ranks[0]:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = ranks[0]
    return checkpoint


def is_of_training(file: str | os.PathLike[str]) -> bool:
    """Whether a file is a checkpoint of Lightning's own from which training can go on, not one of
    weights alone. Runs no code of the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(b"optimizer_states" in archive.read(name) for name in names)
    except zipfile.BadZipFile:
        return False


def _number(name: str) -> int:
    return int(name.removeprefix("optimizer_"))


def _numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the numbers of its parameters, as ``state_dict`` has it."""
    groups = []
    numbers: dict[str, int] = {}
    for group in optimizer["param_groups"]:
        first = len(numbers)
        numbers.update({str(name): first + i for i, name in enumerate(group["params"])})
        own = {key: value for key, value in group.items() if key != "param_names"}
        groups.append({**own, "params": list(range(first, len(numbers)))})
    saved = optimizer.get("state") or {}
    return {
        "state": {numbers[str(name)]: entries for name, entries in saved.items()},
        "param_groups": groups,
    }
