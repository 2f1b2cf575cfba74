"""``ShardedTensor``, which FSDP1 saves its shards as, and which DTensor has replaced.

Few programs have any. Import this only where `pyckpt.dcp.leaves.is_sharded_tensor` found one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.remote_device import _remote_device

from pyckpt.errors import LoadError

__all__ = ["flattened", "is_meta", "like", "local_parts"]


def local_parts(tensor: ShardedTensor) -> list[torch.Tensor]:
    """The memory of the shards that are here."""
    return [shard.tensor for shard in tensor.local_shards()]


def like(tensor: ShardedTensor, parts: list[torch.Tensor]) -> ShardedTensor:
    """A ShardedTensor as another one is, whose local shards have other memory."""
    # Torch wants each shard where its placement says, and all to be as the properties say.
    shards = [
        Shard(part.detach(), _placed_on(part.device, shard.metadata))
        for part, shard in zip(parts, tensor.local_shards(), strict=True)
    ]
    here = {tuple(shard.metadata.shard_offsets): shard.metadata for shard in shards}
    metadata = tensor.metadata()
    properties = dataclasses.replace(
        metadata.tensor_properties,
        requires_grad=False,
        pin_memory=any(part.is_pinned() for part in parts),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        sharded_tensor_metadata=dataclasses.replace(
            metadata,
            shards_metadata=[
                here.get(tuple(shard.shard_offsets), shard) for shard in metadata.shards_metadata
            ],
            tensor_properties=properties,
        ),
        process_group=tensor._process_group,
    )


def _placed_on(device: torch.device, metadata: ShardMetadata) -> ShardMetadata:
    placement: Any = metadata.placement
    there = _remote_device(f"rank:{placement.rank()}/{device}")
    return dataclasses.replace(metadata, placement=there)


def flattened(name: str, tensor: Any) -> Any:
    """What DCP loads in the place of a ShardedTensor whose shard is sharded again, as FSDP1 makes
    them in two dimensions. One without local shards stays as it is."""
    if type(tensor) is not ShardedTensor:
        return tensor
    return _flatten_sharded_tensors({name: tensor}).get(name, tensor)


def is_meta(name: str, tensor: Any) -> bool:
    """Raise where the shards have no memory to load into: the tensor does not say so itself.

    Raises:
        LoadError: they are on the meta device.
    """
    if any(shard.tensor.is_meta for shard in tensor.local_shards()):
        raise LoadError(
            f"{name} is a ShardedTensor on the meta device, which has no memory to load into; give "
            "its shards some first",
            mismatched=(name,),
        )
    return False
