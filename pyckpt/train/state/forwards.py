"""Which parameters forward passes change, as torch's own modules do."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pyckpt.train.state.modules import Trainable

__all__ = ["modules_in", "written_in_forward"]

# Of torch's modules, the one that cannot be told by an attribute, and where it is defined.
_LEARNABLE_FAKE_QUANTIZE = "torch.ao.quantization._learnable_fake_quantize"


def written_in_forward(objects: Iterable[Any]) -> list[torch.Tensor]:
    """The parameters that a forward pass of some modules may change. An optimizer's step is then
    not the only thing that changes them. Tensors of one storage may be changed together.

    - Embeddings with ``max_norm``: torch's own, and other modules with such an attribute. They
      scale down the rows that they look up.
    - Quantizers that learn their scale. They keep it above a bound.

    Args:
        objects: modules, and what may hold modules.
    """
    learnable = getattr(sys.modules.get(_LEARNABLE_FAKE_QUANTIZE), "_LearnableFakeQuantize", ())
    return [
        tensor
        for value in objects
        for module in modules_in(value)
        for sub in module.modules()
        # Not by `getattr`, which would run properties of the program's own modules.
        if vars(sub).get("max_norm") is not None or isinstance(sub, learnable)
        for tensor in _own_tensors(sub)
    ]


def modules_in(value: Any) -> Iterator[nn.Module]:
    """The module that an object of the state is; or those that it holds, by itself or in lists,
    tuples and dicts, if it is none."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, Trainable):
        yield value.module
    elif not isinstance(value, torch.Tensor | torch.optim.Optimizer):
        held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for one in list(held.values()):
            if isinstance(one, dict):
                one = list(one.values())
            # Long lists are data. So only those are looked through that begin with a module.
            if isinstance(one, list | tuple) and one and isinstance(one[0], nn.Module):
                yield from (each for each in one if isinstance(each, nn.Module))
            elif isinstance(one, nn.Module):
                yield one


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    # FSDP1 has views of its flat parameters in their place.
    yield from (one for one in list(vars(module).values()) if isinstance(one, torch.Tensor))
