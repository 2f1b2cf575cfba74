"""A checkpoint's model in one piece, for other programs: safetensors, or ``torch.save``'s format.

tensors.py reads the checkpoint, model_files.py writes the files, and swap.py replaces the files of
an earlier export.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from pyckpt.activity import Amount, activity
from pyckpt.engine import Engine
from pyckpt.format import commit
from pyckpt.printable import rate_text, seconds_text
from pyckpt.remote.address import local_place_of
from pyckpt.speaking import for_all
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.model_files import copy, safetensors_file, torch_file
from pyckpt.train.store.swap import (
    CONFIG,
    MARK,
    new_file,
    put_in_place,
    refuse_others_files,
    refuse_what_is_no_file,
    temporary_directory,
)
from pyckpt.train.store.tensors import ModelTensor, RenameTensors, TensorSource

__all__ = ["export"]

_logger = logging.getLogger("pyckpt")

_STEMS = {"safetensors": ("model", "safetensors"), "torch": ("pytorch_model", "bin")}
_FILES = {"safetensors": safetensors_file, "torch": torch_file}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def export(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: Literal["safetensors", "torch"] = "safetensors",
    key: str | None = "model",
    rename: RenameTensors | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tied: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    overwrite: bool = True,
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
) -> list[Path]:
    """Write the model of a checkpoint, in one piece, as files that other programs read.

    This process reads the checkpoint's files and needs neither the model nor other ranks. It reads,
    converts and writes one piece after another, in some 100 MiB of memory, and checks the bytes
    that it reads.

    Args:
        checkpoint: directory of a checkpoint, of pyckpt or of stock PyTorch.
        path: a directory, which is made if it is missing. It gets ``model.safetensors`` or
            ``pytorch_model.bin``. If the model takes several files, they are numbered, and the
            index that Hugging Face's loaders look for is beside them. An earlier export of the same
            format is replaced once all of the new one is written, so there must be room for both.
        format: "safetensors", or "torch" for ``torch.load``.
        key: the name of the model in the state. Its tensors are written under the names that they
            have in it. None exports all tensors, under their full names: for checkpoints whose
            state is the model's own state dict.
        rename: new names: a mapping of those that change; a function of a name, which returns None
            for a tensor to leave out; or a layout of `pyckpt.layouts`, which may also reorder
            values.
        dtype: convert floating point tensors to this.
        max_shard_size: of one file, in bytes or as "5GB" or "512MiB". A tensor is not split.
        tied: names to leave out, each with the name that has the same values, such as
            ``{"lm_head.weight": "embed.weight"}``. They are names after ``rename``. Format "torch"
            writes both as tensors that share memory. Format "safetensors" cannot, and names the
            pairs in the file's metadata, as its ``save_model`` does. Tied tensors that are not
            named here are written in full.
        config: written as ``config.json`` beside the weights: a mapping, an object with
            ``to_dict()`` as transformers' configurations are, or the path of such a file.
        overwrite: whether files are replaced that are not known to be an earlier export's. Of files
            of format "torch" that is never known.
        direct: whether reading bypasses the page cache, as for `DirectReader`.
        engine: the memory and threads to use; by default those that everyone shares.

    Returns:
        The files written. The last one completes the export: the index, or the only file of
        weights.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no checkpoint.
        TypeError: an argument is of another type.
        ValueError: an argument is out of range, there are no tensors under ``key``, two tensors
            that ``tied`` pairs differ, or safetensors lacks the dtype.
        CorruptCheckpoint: bytes differ from those that were saved.
        FileExistsError: ``overwrite`` is False, and there is such a file; or a pipe, a device or
            the like has the name of a file to write or to remove.
        IsADirectoryError: a directory has such a name.
        OSError: a file cannot be read or written.
        TimeoutError: another process has been putting an export in place there for a minute.
    """
    if format not in _FILES:
        raise ValueError(f"{format = } must be 'safetensors' or 'torch'.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, such as torch.bfloat16, not {dtype!r}.")
    limit = _bytes(max_shard_size)
    content_of_config = None if config is None else _config(config)
    source_directory = local_place_of(checkpoint, "checkpoint")
    target = local_place_of(path)
    if not (source_directory / commit.metadata_name()).exists():
        raise commit.no_checkpoint(source_directory)
    stem, suffix = _STEMS[format]
    written: list[int] = []
    total = 0
    with (
        reading(source_directory),
        activity(
            f"exporting {source_directory}", measure=lambda: Amount(sum(written), total)
        ) as doing,
    ):
        source = TensorSource(source_directory, direct, engine)
        tensors = source.tensors(key, dtype, rename)
        aliases = source.ties(tensors, tied or {})
        shards = _shards([t for t in tensors if t.name not in aliases], limit)
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        names = _names(stem, suffix, len(shards))
        where = {tensor.name: i for i, shard in enumerate(shards) for tensor in shard}
        commit.make_directory(target, sync=True)
        # Before the work, and once more after it.
        others = () if content_of_config is None else (CONFIG,)
        refuse_what_is_no_file(target, (stem, suffix), others)
        if not overwrite:
            refuse_others_files(target, (stem, suffix))
        with temporary_directory(target) as temporary:
            for i, shard in enumerate(shards):
                here = {alias: name for alias, name in aliases.items() if where[name] == i}
                with new_file(temporary / names[i]) as file:
                    finish, order = _FILES[format](file, shard, here)
                    pieces = source.read([tensor for tensor, _ in order])
                    finish(copy(file, dict(order), pieces, written.append))
            if len(shards) > 1:
                weights = {name: names[i] for name, i in where.items()}
                if format == "torch":
                    weights |= {alias: names[where[name]] for alias, name in aliases.items()}
                names.append(f"{stem}.{suffix}.index.json")
                with new_file(temporary / names[-1]) as file:
                    file.write(_index(shards, weights))
            if content_of_config is not None:
                names.insert(len(names) - 1, CONFIG)
                with new_file(temporary / CONFIG) as file:
                    file.write(content_of_config)
            put_in_place(temporary, target, names, (stem, suffix), overwrite=overwrite)
    _logger.log(
        for_all(logging.INFO),
        "exported %s to %s in %s (%s)",
        source_directory,
        target,
        seconds_text(doing.seconds),
        rate_text(total, doing.seconds),
    )
    return [target / name for name in names]


def _names(stem: str, suffix: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}.{suffix}"]
    return [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]


def _index(shards: Sequence[Sequence[ModelTensor]], weights: Mapping[str, str]) -> bytes:
    """Which file has which tensor, as Hugging Face's loaders look for it."""
    content = {
        "metadata": {
            "total_size": sum(tensor.nbytes for shard in shards for tensor in shard),
            **MARK,
        },
        "weight_map": dict(sorted(weights.items())),
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def _config(config: Any) -> bytes:
    """The content of ``config.json``, whatever it is given as."""
    if isinstance(config, str | os.PathLike):
        return local_place_of(config, "config").read_bytes()
    if callable(to_dict := getattr(config, "to_dict", None)):  # as transformers' configurations
        config = to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a mapping, an object with to_dict(), or the path of a file, not "
            f"{type(config).__name__}"
        )
    return json.dumps(dict(config), indent=2, sort_keys=True).encode() + b"\n"


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", size.upper())
        if match is None:
            raise ValueError(f"max_shard_size={size!r} must be bytes, or like '5GB' or '512MiB'.")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(f"max_shard_size={size!r} must be positive.")
    return size


def _shards(tensors: Sequence[ModelTensor], limit: int) -> list[list[ModelTensor]]:
    """Tensors in their order, in groups of at most ``limit`` bytes; larger ones are alone."""
    shards: list[list[ModelTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
