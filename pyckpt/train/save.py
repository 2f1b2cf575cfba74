"""``pyckpt.save``: a checkpoint of a dict, made before the call returns."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from pyckpt.activity import activity
from pyckpt.dcp.save import save_tree
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.together import together
from pyckpt.dcp.writer import DirectWriter
from pyckpt.engine import Engine
from pyckpt.errors import SaveError
from pyckpt.printable import rate_text, seconds_text
from pyckpt.statistics import WriteStatistics
from pyckpt.train.arguments import state_of
from pyckpt.train.state import values

__all__ = ["save"]

_logger = logging.getLogger("pyckpt")


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    sync_files: bool = True,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
) -> WriteStatistics:
    """Save a state into ``path``, and return when the checkpoint is on disk. ::

        pyckpt.save({"model": model, "optimizer": optimizer, "epoch": 3}, "checkpoints/best")

    The save is atomic: if the process is killed at any instant, the directory holds the checkpoint
    that was there before, or the new one, or no valid one if there was none before. Both
    `pyckpt.load` and ``torch.distributed.checkpoint.load`` load it.

    If `torch.distributed` is initialised, all ranks call this with the same keys, and the ranks
    save together, each its part of DTensors. Otherwise this process saves alone. `Checkpointer`
    saves while training goes on; this function does not.

    Args:
        state: objects by name. An object with ``state_dict`` and ``load_state_dict`` methods is
            asked for its state. All else is saved as it is: tensors, numbers, strings, None, numpy
            arrays, and dicts, lists, tuples and sets of these.
        path: the checkpoint's directory; ``~`` is expanded. It is made if it is missing, as are
            those above it. Or its URL in an object store, as for `DirectWriter`.
        overwrite: whether a checkpoint in the directory is replaced. The old one can be loaded
            until the new one is complete.
        sync_files: wait until all bytes are durable (fsync). If this is False, a power failure may
            leave a checkpoint that looks complete and is not.
        planner: a `SavePlanner` that was used for the same state before. It remembers the plan,
            which makes the save of a state with many items faster.
        process_group: the ranks that save together, default all.
        no_dist: save in this process alone, whether or not `torch.distributed` is initialised.
        direct: whether writing bypasses the page cache, as for `DirectWriter`.
        engine: the memory and threads to use; by default those that everyone shares.

    Returns:
        Counts and times of this rank. A rank that had nothing to write returns zeros.

    Raises:
        FileExistsError: there is a checkpoint in the directory, and ``overwrite`` is False. It
            stays as it was.
        OSError: a file cannot be written. No checkpoint was replaced. A
            ``pyckpt.errors.NotDurable``, which is an ``OSError``, says that the new one is in place
            and that a power failure may undo that.
        TypeError: ``state`` is no dict, or has a value that `pyckpt.load` could not load, or a
            tensor on the meta device.
        ValueError: an argument is out of range, or ``path`` is empty, or a URL that names no object
            store.
        SaveError: the ranks failed in different ways, or by an error that is none of these. The
            errors of the ranks are chained.
    """
    state = state_of(state)
    writer = DirectWriter(
        path, overwrite=overwrite, sync_files=sync_files, direct=direct, engine=engine
    )
    alone = no_dist or not dist.is_available() or not dist.is_initialized()
    doing = f"saving {os.fspath(path)}"

    def tree() -> dict[str, Any]:
        states = {name: values.encode(_state_of(value), name) for name, value in state.items()}
        values.refuse_meta(states)
        return states

    # A rank that fails here must not leave the others waiting.
    if alone:
        states = tree()
    else:
        states = together(tree, process_group=process_group, doing=doing, kind=SaveError)
    speaks = alone or dist.get_rank(process_group) == 0
    if speaks:
        _logger.info("saving %s", writer.path)
    with activity(f"saving {writer.path}", speaks=speaks, measure=writer._amount) as here:
        save_tree(
            states,
            writer=writer,
            planner=SavePlanner() if planner is None else planner,
            process_group=process_group,
            alone=alone,
            doing=doing,
        )
    if speaks:
        size = writer.checkpoint_bytes or 0
        rate = rate_text(size, here.seconds)
        _logger.info("committed %s in %s (%s)", writer.path, seconds_text(here.seconds), rate)
    return writer.statistics or WriteStatistics()


def _state_of(value: Any) -> Any:
    # The protocol's own check is slow, and most values are tensors.
    if isinstance(value, torch.Tensor) or not isinstance(value, Stateful):
        return value
    return value.state_dict()
