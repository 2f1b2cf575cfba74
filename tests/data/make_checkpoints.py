"""Makes a small checkpoint with the torch that runs, as stock saves it on two ranks.

    python tests/data/make_checkpoints.py tests/data/checkpoints

Run it in an environment of that torch (2.0 and later; 2.0 to 2.2 need numpy<2). The checkpoint goes
to a directory named for the version; tests/format/test_old_torch.py loads what is there. Needs
nothing of pyckpt. What is saved must stay the same for all versions: the test knows it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

try:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
except ImportError:  # before 2.5
    from torch.distributed._tensor import DeviceMesh, Shard, distribute_tensor


def _sharded(size: tuple[int, ...], ranks: list[int]) -> Any:
    """A ShardedTensor of ascending numbers, with a shard for each entry of ``ranks``."""
    placements = [f"rank:{rank}/cpu" for rank in ranks]
    tensor = sharded_tensor.zeros(ChunkShardingSpec(dim=0, placements=placements), *size)
    whole = torch.arange(float(size[0] * size[1])).reshape(size)
    for shard in tensor.local_shards():
        begin = shard.metadata.shard_offsets[0]
        shard.tensor.copy_(whole[begin : begin + shard.tensor.shape[0]])
    return tensor


def state_of() -> dict[str, Any]:
    state = {
        "plain": torch.arange(6.0).reshape(2, 3),
        "parameter": torch.nn.Parameter(torch.full((3,), 0.5)),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "integers": torch.arange(4, dtype=torch.int64),
        "columns": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "nested": {"list": [torch.ones(2), 7], "number": 3, "text": "seven"},
        "sharded": _sharded((4, 2), [0, 1]),
        "two_shards": _sharded((4, 2), [1, 1]),
    }
    if not torch.__version__.startswith("2.0."):  # whose DCP cannot save them
        mesh = DeviceMesh("cpu", [0, 1])
        whole = torch.arange(10.0).reshape(5, 2)
        state["dtensor"] = distribute_tensor(whole, mesh, [Shard(0)])
    return state


def _save(rank: int, root: str, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    os.chdir(root)  # later versions put the path into the metadata
    path = torch.__version__.split("+")[0]
    os.makedirs(path, exist_ok=True)
    writer = dcp.FileSystemWriter(path, sync_files=False)
    if hasattr(dcp, "save"):
        dcp.save(state_of(), storage_writer=writer)
    else:  # before 2.2
        dcp.save_state_dict(state_of(), storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = os.path.join(directory, "rendezvous")
        torch.multiprocessing.spawn(_save, (sys.argv[1], rendezvous), nprocs=2)
