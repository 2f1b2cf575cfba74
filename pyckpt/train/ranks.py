"""The ranks that train together, and groups over which they can talk without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

__all__ = ["Ranks"]

_logger = logging.getLogger("pyckpt")


class Ranks:
    """Two gloo groups of the same ranks as ``process_group``, one for each thread that uses one.

    Making it is collective. Without `torch.distributed` there is one rank, and no group.

    Attributes:
        rank, size: of this process, among them.
        work: for saving and loading.
        talk: for ``GroupAgreement``; None for a single rank.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size = 0, 1
        self.work: dist.ProcessGroup | None = None
        self.talk: dist.ProcessGroup | None = None
        if not dist.is_available() or not dist.is_initialized():
            return
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError("this rank is not in the process group")
        self.work = _gloo(process_group)
        if self.size > 1:
            self.talk = _gloo(process_group)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers. Collective."""
        if self.work is None:
            return number
        tensor = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.work)
        return int(tensor)

    def on_any(self, names: Sequence[str], mine: Collection[str]) -> list[str]:
        """Those of some names, the same on all ranks, that any rank calls its own. Collective."""
        if self.work is None or not names:
            return [name for name in names if name in mine]
        flags = torch.tensor([name in mine for name in names], dtype=torch.uint8, device="cpu")
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.work)
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def close(self) -> None:
        """Let go of the groups. Idempotent."""
        groups, self.work, self.talk = (self.work, self.talk), None, None
        if dist.is_available() and dist.is_initialized():
            for group in groups:
                if group is not None:
                    dist.destroy_process_group(group)


def _gloo(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    # Where only some of all ranks are in the group, the others do not come here to make another.
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    group: dist.ProcessGroup | None = dist.new_group(
        ranks, backend="gloo", use_local_synchronization=ranks is not None
    )
    assert group is not None
    return group
