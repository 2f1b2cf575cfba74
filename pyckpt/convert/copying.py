"""``copy_checkpoint``: a DCP checkpoint, or a part of one, as a plain checkpoint of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pyckpt.convert.stored import stored
from pyckpt.dcp.save import save_tree
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.whole import KEYS, VALUE, Whole
from pyckpt.dcp.writer import DirectWriter
from pyckpt.engine import Engine
from pyckpt.errors import LoadError
from pyckpt.statistics import WriteStatistics
from pyckpt.train.state import values
from pyckpt.train.state.saved import Tree
from pyckpt.train.store.catalog import OWN_KEYS
from pyckpt.train.store.pieces import Direct

__all__ = ["as_saved", "copy_checkpoint", "existing_above", "write"]


def copy_checkpoint(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    overwrite: bool = False,
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> WriteStatistics:
    """Write a checkpoint, or one entry of it, as a plain DCP checkpoint in one file.

    Stock PyTorch loads it without pyckpt. With ``key="model"`` its state *is* the model's state
    dict: ``dcp.load(model.state_dict(), checkpoint_id=path)``. This process reads and writes
    alone, and needs neither the model nor other ranks. What has checksums is checked. Tensors need
    room in ``path`` twice until it ends, and little memory.

    Args:
        checkpoint: the directory of a checkpoint, of pyckpt or of stock PyTorch.
        path: the directory to write.
        key: the top-level entry to write; by default all, but for what a Checkpointer notes.
        overwrite: whether a checkpoint in ``path`` is replaced, once the new one is whole.
        direct: whether reading and writing bypass the page cache, as for `DirectWriter`.
        engine: the memory and threads to use; by default those that everyone shares.

    Raises:
        FileExistsError: there is a checkpoint in ``path``.
        LoadError: there is no such entry, or it is a single value.
        CorruptCheckpoint: bytes are not those that were saved.
        OSError: a file cannot be read or written.
    """
    source, target = Path(checkpoint), Path(path)
    keys = None if key is None else (key,)
    scratch = existing_above(target)
    with stored(source, scratch=scratch, keys=keys, direct=direct, engine=engine) as found:
        state = {name: one for name, one in found.state.items() if name not in OWN_KEYS}
        saved = found.tree
        if key is not None:
            state, saved = state[key], saved[key]
            if not isinstance(state, dict):
                raise LoadError(f"{source}: {key!r} is a single value, and no dict")
        tree = as_saved(state, saved)
        return write(tree, target, overwrite=overwrite, direct=direct, engine=engine)


def as_saved(state: Mapping[Any, Any], saved: Tree) -> dict[str, Any]:
    """Encode a state so that its items get the keys that they had, for who asks for these keys.

    Stock takes apart what `values.encode` keeps whole, such as lists of dicts without tensors.

    Args:
        state: what a checkpoint holds.
        saved: the tree of its items.
    """
    items = saved if isinstance(saved, dict) else {}
    return {
        str(name): _as_saved(one, items.get(str(name)), str(name)) for name, one in state.items()
    }


def _as_saved(value: Any, saved: Tree, name: str) -> Any:
    if isinstance(saved, dict) and VALUE not in saved:
        if isinstance(value, list) and all(isinstance(i, int) and i < len(value) for i in saved):
            # Only an empty dict leaves no item.
            return [
                _as_saved(sub, saved[i], f"{name}.{i}") if i in saved else {}
                for i, sub in enumerate(value)
            ]
        parts = {str(key): sub for key, sub in value.items()} if isinstance(value, dict) else {}
        if parts.keys() == saved.keys() - {KEYS}:
            keys = {KEYS: list(value)} if KEYS in saved else {}
            return {
                part: _as_saved(sub, saved[part], f"{name}.{part}") for part, sub in parts.items()
            } | keys
    encoded = values.encode(value, name)
    if isinstance(saved, BytesStorageMetadata) and isinstance(encoded, dict | list):
        return Whole(value)  # it was one item
    return encoded


def write(
    tree: Mapping[str, Any],
    path: Path,
    *,
    overwrite: bool,
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> WriteStatistics:
    """Save a tree of encoded values, by this process alone.

    Raises:
        FileExistsError: there is a checkpoint, and ``overwrite`` is False.
        OSError, PyckptError: the save failed.
    """
    writer = DirectWriter(path, overwrite=overwrite, direct=direct, engine=engine)
    save_tree(
        dict(tree),
        writer=writer,
        planner=SavePlanner(),
        process_group=None,
        alone=True,
        doing=f"saving {path}",
    )
    return writer.statistics or WriteStatistics()


def existing_above(path: Path) -> Path:
    """The directory itself, or the nearest above it that exists."""
    path = Path(os.path.abspath(path.expanduser()))
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
