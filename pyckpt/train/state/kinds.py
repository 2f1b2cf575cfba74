"""Which kind of entry an object of the state gets, and in which order kinds take their turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.data
from torch import nn

from pyckpt.optim.wrappers import unwrapped
from pyckpt.train.state.entry import Entry, GradScalerEntry, StatefulEntry, ValueEntry
from pyckpt.train.state.modules import ModuleEntry, Trainable
from pyckpt.train.state.per_rank import PerRank, RankEntry, RankState
from pyckpt.train.state.rng import RngState
from pyckpt.train.state.saved import Rank

__all__ = ["entry_of", "is_rng", "optimizers_in", "restore_turn"]

# Objects that read data, since each rank reads at another place.
_PER_RANK = (torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler)
_PER_RANK_PACKAGES = ("torchdata",)


def optimizers_in(objects: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name, each without wrappers that have no state of their own."""
    found = {}
    for name, value in objects.items():
        if not isinstance(value, nn.Module) and _is_stateful(value):
            inner = unwrapped(value)
            if isinstance(inner, torch.optim.Optimizer):
                found[name] = inner
    return found


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


def entry_of(name: str, value: Any, rank: Rank) -> Entry:
    """The entry of an object that is no optimizer."""
    if isinstance(value, RankState):
        return RankEntry(name, value, rank)
    if isinstance(value, nn.Module | Trainable):
        return ModuleEntry(name, value)
    if _is_stateful(value):
        if isinstance(value, _PER_RANK) or type(value).__module__.startswith(_PER_RANK_PACKAGES):
            return RankEntry(name, PerRank(value), rank)
        if isinstance(value, torch.amp.GradScaler):
            return GradScalerEntry(name, value)
        return StatefulEntry(name, value)
    return ValueEntry(name, value)


def restore_turn(entry: Entry) -> int:
    """When an entry is restored: those with smaller numbers go first. Modules come before the
    optimizers of their parameters, and objects that look at either come after both."""
    if isinstance(entry, ModuleEntry):
        return 0
    return 3 if is_rng(entry) else 2 if isinstance(entry, StatefulEntry) else 1


def is_rng(entry: Entry) -> bool:
    """Whether an entry has the random number generators. They come last, since other objects may
    draw numbers while they are saved and restored."""
    return isinstance(entry, RankEntry) and isinstance(entry.value, RngState)
