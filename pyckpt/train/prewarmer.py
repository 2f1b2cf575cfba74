"""`Prewarmer`: has the memory of a first save made while the first steps run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

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
    run code of the program, and talk to other ranks. A save makes what is missing by itself.

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
                tensors = [one.detach() for one in _tensors({**objects, **optimizers})]
            PinnedStager(engine=self._engine).prewarm({"state": tensors}, background=True)
        except Exception as error:
            # The first save takes its memory by itself, and says what is wrong.
            _logger.debug("the first save is not prepared: %s", error)

    def saving(self) -> None:
        """A save begins, which makes its memory by itself."""
        self._left = 0


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
