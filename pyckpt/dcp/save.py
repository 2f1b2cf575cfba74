"""One save, made by DCP in the calling thread."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageWriter

__all__ = ["save_tree"]


def save_tree(
    tree: dict[str, Any],
    *,
    writer: StorageWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    alone: bool,
) -> None:
    """What ``dcp.save`` does, where nothing in the tree is to be asked for its state.

    ``dcp.save`` itself warns, at each call, that it does not use `torch.distributed`.

    Args:
        alone: whether this process saves without others.

    Raises:
        CheckpointException: the save failed, on some rank.
    """
    _save_state_dict(
        tree,
        storage_writer=writer,
        process_group=process_group,
        no_dist=alone,
        planner=planner,
    )
