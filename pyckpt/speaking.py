"""Which of the ranks logs what all of them could log."""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

__all__ = ["for_all", "for_node"]


def for_all(level: int) -> int:
    """The level of a message that every rank could log: ``level`` on rank 0 and in a process that
    is alone, DEBUG on all other ranks."""
    return level if _rank() == 0 else logging.DEBUG


def for_node(level: int) -> int:
    """The level of a message that every rank of a machine could log: ``level`` on one of them."""
    rank = _rank()
    if rank:
        # As torchrun and Slurm set them.
        local = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
        if local != "0":
            return logging.DEBUG
    return level


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
