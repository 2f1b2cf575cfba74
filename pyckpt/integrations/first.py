"""What the first rank finds out for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from pyckpt.dcp.failures import portable

__all__ = ["on_first"]

T = TypeVar("T")


def on_first(function: Callable[[], T]) -> T:
    """What a function returns on the first rank. So ranks whose file systems lag agree. Collective.

    Raises:
        Exception: the function raised; the same on all ranks.
    """
    alone = not dist.is_available() or not dist.is_initialized()
    if alone:
        return function()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = function()
        except Exception as error:
            box[1] = portable(error)
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    result: T = box[0]
    return result
