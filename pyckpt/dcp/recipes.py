"""How state dicts of one shape are copied."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import torch

from pyckpt import _C
from pyckpt.dcp.leaves import Leaves, is_plain_type
from pyckpt.dcp.plans import KnownPlan

__all__ = ["CopyRecipe", "Recipes"]


_RECIPES_MAX = 8  # that a stager remembers, for as many shapes of state dicts
_REGION_GRAIN = _C.page_bytes
_SMALL = _C.small_source_bytes  # smaller ones lie beside each other in one region
_SMALL_GRAIN = _C.small_alignment_bytes


class CopyRecipe:
    """How a stager copies state dicts of one shape."""

    def __init__(self, tree: _C.StateTree, leaves: Leaves) -> None:
        self.tree = tree
        self.leaves = leaves
        self.plan: KnownPlan | None = None
        """The plan by which this rank writes such a state dict; None until all ranks have agreed on
        one."""

    def wanted(self) -> bytes | None:
        """Which leaves this rank will write, a byte each; None for all."""
        plan = self.plan
        return plan.wanted() if plan is not None and plan.is_remembered() else None

    def needed_bytes(self, leaves: list[Any], wanted: bytes | None) -> int:
        """The most bytes that the copies of the wanted leaves take."""
        sources = self.leaves.sources(leaves)
        mask = repeat(1) if wanted is None else self.leaves.sources_wanted(leaves, wanted)
        # Row-major tensors that are the same memory are copied once.
        sizes = {
            (source.data_ptr(), source.nbytes)
            if source.is_contiguous()
            else id(source): source.nbytes
            for source, is_wanted in zip(sources, mask, strict=False)
            if is_wanted
            and isinstance(source, torch.Tensor)
            and is_plain_type(source)
            and source.layout is torch.strided
        }
        small = sum(size + _SMALL_GRAIN for size in sizes.values() if size < _SMALL)
        large = sum(size + _REGION_GRAIN for size in sizes.values() if size >= _SMALL)
        # The small ones lie in two regions: one for those that steps wait for, one for the others.
        return small + large + 2 * _REGION_GRAIN


class Recipes:
    """The recipes that a stager remembers: those of the shapes that came last."""

    def __init__(self) -> None:
        self._recipes: list[CopyRecipe] = []

    def of(self, state_dict: dict[str, Any]) -> tuple[CopyRecipe, list[Any]]:
        """The recipe of a state dict, and the leaves of the state dict."""
        for recipe in self._recipes:
            leaves = recipe.tree.match(state_dict)
            if leaves is not None:
                return recipe, leaves
        tree = _C.StateTree(state_dict)
        leaves = tree.match(state_dict)
        assert leaves is not None
        recipe = CopyRecipe(tree, Leaves(leaves))
        self._recipes = [recipe, *self._recipes[: _RECIPES_MAX - 1]]
        return recipe, leaves
