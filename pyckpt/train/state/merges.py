"""Merge functions for ``PerRank``: they bring the states of ranks to another number of ranks. ::

state = {"data": pyckpt.PerRank(loader, merge=pyckpt.merges.first)}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyckpt.errors import LoadError

__all__ = ["first", "share"]


def first(states: list[Any], rank: int, world_size: int) -> Any:
    """Give all ranks the state of rank 0. For loaders, samplers and counters that are the same on
    all ranks, and whose state does not count the entries of a single rank's share."""
    return states[0]


def share(states: list[Any], rank: int, world_size: int) -> Any:
    """Join the states of all ranks in the order of ranks, and divide the result into equal parts.
    If there is a remainder, the first ranks get one entry more.

    For lists, and for tensors along their first dimension, alone or in dicts; for example buffers
    of samples.

    Raises:
        LoadError: the states are of different kinds, or neither lists nor tensors.
    """
    kinds = {type(state) for state in states}
    if len(kinds) > 1:
        raise LoadError(f"ranks had different things: {sorted(kind.__name__ for kind in kinds)}")
    head = states[0]
    if isinstance(head, Mapping):
        if any(state.keys() != head.keys() for state in states):
            raise LoadError("ranks had different keys")
        return {key: share([state[key] for state in states], rank, world_size) for key in head}
    if isinstance(head, list):
        joined: Any = [entry for state in states for entry in state]
    elif isinstance(head, torch.Tensor) and head.dim():
        joined = torch.cat(states)
    else:
        raise LoadError(
            f"a {type(head).__name__} cannot be shared out among ranks; only lists and tensors can"
        )
    each, more = divmod(len(joined), world_size)
    begin = rank * each + min(rank, more)
    return joined[begin : begin + each + (rank < more)]
