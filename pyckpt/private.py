"""The names of torch's checkpoints that pyckpt uses although they are private or not documented.

Each name is imported here and nowhere else, so that a torch that moves one breaks one line.
``tests/test_contract.py`` says why each is needed, and what pyckpt expects of it. The old
ShardedTensor has a module of its own, `pyckpt.dcp.sharded_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.planner_helpers import (
    _create_chunk_list,
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.utils import _DistWrapper, find_tensor_shard

try:
    from torch.distributed.checkpoint.protocol import (  # type: ignore[import-not-found]
        _is_checkpointable_tensor as is_checkpointable_tensor,
    )
except ImportError:  # before torch 2.15

    def is_checkpointable_tensor(value: object) -> bool:
        """Whether a tensor is a ``CheckpointableTensor``, which this torch does not have."""
        return False


__all__ = [
    "CURRENT_DCP_VERSION",
    "AsyncCollectiveTensor",
    "DistWrapper",
    "ExtensionRegistry",
    "StorageInfo",
    "create_chunk_list",
    "create_read_items_for_chunk_list",
    "find_tensor_shard",
    "is_checkpointable_tensor",
    "load_state_dict",
    "narrow_tensor_by_index",
    "overrides",
    "save_state_dict",
    "state_dict_saver",
]

DistWrapper = _DistWrapper
StorageInfo = _StorageInfo
"""DCP's record of where an item lies: ``relative_path``, ``offset`` and ``length``."""
create_chunk_list = _create_chunk_list
load_state_dict = _load_state_dict
save_state_dict = _save_state_dict

Method = TypeVar("Method", bound=Callable[..., object])


def overrides(base: type, *, so_that: str) -> Callable[[Method], Method]:
    """Mark a method that overrides a private method of torch.

    Args:
        base: torch's class, which calls the method.
        so_that: the purpose of the method, for the error message.

    Raises:
        ImportError: the class has no such method, so torch would never call ours.
    """

    def check(method: Method) -> Method:
        if not hasattr(base, method.__name__):
            raise ImportError(
                f"torch {torch.__version__} has no {base.__name__}.{method.__name__}, which "
                f"pyckpt overrides so that {so_that}. Use another version of torch or of pyckpt"
            )
        return method

    return check
