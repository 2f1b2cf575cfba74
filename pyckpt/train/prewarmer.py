"""`Prewarmer`: has the memory of a first save made while the first steps run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyckpt.dcp.stager import PinnedStager
from pyckpt.engine import Engine
from pyckpt.train.state.kinds import optimizers_in
from pyckpt.train.state.modules import Trainable

__all__ = ["Prewarmer"]

_logger = logging.getLogger("pyckpt")

_PATIENCE = 100
"""After so many steps an optimizer that has no state is taken for one that needs none."""


class Prewarmer:
    """Prewarms once, in the background, as soon as the size of the state is known.

    What a save will copy is estimated from the objects themselves: making their state dicts could
    run code of the program, and talk to other ranks. A save makes what is missing by itself. Of
    what `DistributedDataParallel` keeps the same on all its ranks, each rank will write a share.

    Args:
        engine: whose memory; by default the one that everyone shares.
        enabled: if false, this does nothing.
    """

    def __init__(self, engine: Engine | None = None, *, enabled: bool = True) -> None:
        self._engine = engine
        self._left = _PATIENCE if enabled else 0

    @property
    def is_over(self) -> bool:
        """Whether ``step_ended`` does nothing any more, so that its objects need not be found."""
        return self._left == 0

    def step_ended(self, objects: Mapping[str, Any]) -> None:
        """Prewarm for these objects of a state, unless that was done. Optimizers make their state
        in their first step, so those that have none are waited for."""
        if self.is_over:
            return
        self._left -= 1
        optimizers = optimizers_in(objects)
        if self._left > 0 and not all(one.state for one in optimizers.values()):
            return
        self._left = 0
        try:
            with torch.no_grad():
                tensors = [one.detach() for one in _share({**objects, **optimizers})]
            PinnedStager(engine=self._engine).prewarm({"state": tensors}, background=True)
        except Exception as error:
            # The first save takes its memory by itself, and says what is wrong.
            _logger.debug("the first save is not prepared: %s", error)

    def saving(self) -> None:
        """A save begins, which makes its memory by itself."""
        self._left = 0


def _share(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a save would copy on this rank; of replicas about as many as it will."""
    replicas = [one for value in objects.values() for one in _replicas_in(value)]
    ranks = min((one.process_group.size() for one in replicas), default=1)
    params = {id(param) for one in replicas for param in one.parameters()}
    # Each once, though the module and the optimizer show it.
    found = {id(one): one for one in _tensors(objects)}
    if ranks == 1:
        return list(found.values())
    alike = {id(one) for module in replicas for one in _tensors(module)}
    for value in objects.values():
        # Others may divide their state among the ranks.
        if isinstance(value, torch.optim.Optimizer) and type(value).__module__.startswith(
            "torch.optim"
        ):
            states = [state for param, state in value.state.items() if id(param) in params]
            alike.update(id(one) for one in _tensors(states))
    left = sum(one.nbytes for key, one in found.items() if key in alike) // ranks
    share = []
    for key, one in found.items():
        if key in alike:
            if left <= 0:
                continue
            left -= one.nbytes
        share.append(one)
    return share


def _replicas_in(value: Any) -> Iterator[DistributedDataParallel]:
    if isinstance(value, Trainable):
        value = value.module
    if isinstance(value, nn.Module):
        yield from (one for one in value.modules() if isinstance(one, DistributedDataParallel))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _replicas_in(one)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value that a save would copy, as far as the value shows them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Trainable):
        yield from (one for one in value.module.parameters() if one.requires_grad)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors(dict(value.state))
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
