"""Names for the parameters that an optimizer's ``state_dict`` numbers, by order and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["name_parameters"]

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
# More of them mean that shapes tell too little, and that counting takes long.
_STATES_MAX = 10_000


def name_parameters(
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Mapping[str, Any]],
    weights: Mapping[str, Any],
) -> dict[Any, str] | None:
    """The names of numbered parameters, if weights fit them in exactly one way.

    Each group has parameters in the order of the module. A parameter's shape is that of its state.

    Args:
        groups: of the optimizer; ``params`` are numbers.
        state: of the parameters, by number.
        weights: of the module, in its order.

    Returns:
        Number -> name; None if several ways fit, or none.
    """
    shapes = []
    for group in groups:
        found = [(number, _shape(state.get(number, {}))) for number in group["params"]]
        if any(shape is None for _, shape in found):
            return None
        shapes.append(found)
    names = _parameters(weights)
    # How many ways lead to each state (how many parameters of each group are placed), and one.
    start = (0,) * len(shapes)
    ways: dict[tuple[int, ...], tuple[int, Any]] = {start: (1, None)}
    for name, shape in names:
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for at, (count, path) in ways.items():
            moves: list[tuple[tuple[int, ...], Any]] = [(at, path)]  # the weight is frozen
            for i, group_shapes in enumerate(shapes):
                if at[i] < len(group_shapes) and group_shapes[at[i]][1] == shape:
                    there = (*at[:i], at[i] + 1, *at[i + 1 :])
                    moves.append((there, (group_shapes[at[i]][0], name, path)))
            for there, one in moves:
                before = following.get(there, (0, None))[0]
                following[there] = (before + count, one)
        if len(following) > _STATES_MAX:
            return None
        ways = following
    count, path = ways.get(tuple(map(len, shapes)), (0, None))
    if count != 1:
        return None
    found_names: dict[Any, str] = {}
    while path is not None:
        number, name, path = path
        found_names[number] = name
    return found_names


def _shape(entries: Mapping[str, Any]) -> tuple[int, ...] | None:
    tensors = [tuple(one.shape) for one in entries.values() if isinstance(one, torch.Tensor)]
    large = {shape for shape in tensors if shape}
    return large.pop() if len(large) == 1 else None


def _parameters(weights: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what may be a parameter; of tensors that share memory, the first."""
    seen = set()
    found = []
    for name, one in weights.items():
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            continue
        place = (one.data_ptr(), tuple(one.shape))
        if name.rpartition(".")[2] in _BUFFERS or (place in seen and one.numel()):
            continue
        seen.add(place)
        found.append((name, tuple(one.shape)))
    return found
