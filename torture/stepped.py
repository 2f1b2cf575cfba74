"""A state of which each value tells the step."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["state_at", "step_of"]

_TENSORS = 12
_LARGE = 3 << 20
"""Elements of 4 bytes: an object of several parts, in a store."""


def state_at(step: int, *, large: bool = False) -> dict[str, Any]:
    tensors = {
        f"t{i}": torch.full((1 << (4 + i), 3), float(step * 100 + i)) for i in range(_TENSORS)
    }
    if large:
        tensors["large"] = torch.full((_LARGE,), step, dtype=torch.int32)
    return {**tensors, "step": step, "nested": {"list": [step, str(step), torch.tensor(step)]}}


def step_of(state: dict[str, Any]) -> int:
    """Raises AssertionError if not all values are of one step."""
    step = state["step"]
    for i in range(_TENSORS):
        assert bool(state[f"t{i}"].eq(step * 100 + i).all()), f"t{i} is not of step {step}"
    if "large" in state:
        assert bool(state["large"].eq(step).all()), f"large is not of step {step}"
    number, text, tensor = state["nested"]["list"]
    assert (number, text, int(tensor)) == (step, str(step), step), f"nested is not of step {step}"
    return int(step)
