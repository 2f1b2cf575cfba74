"""Loads optimizers by their own ``load_state_dict``, and corrects what it leaves wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyckpt.optim.mover import misplaced, relocate
from pyckpt.optim.places import Placement, Resolver
from pyckpt.optim.tensors import Path, is_dtensor, leaves, mapped, replace
from pyckpt.optim.transfer import Request, place
from pyckpt.optim.wrappers import known_members

__all__ = ["FLAGS", "load_by_itself", "loads_itself", "saved_tensors"]

# These say how a step runs, not what it computes. So the program decides them, not the checkpoint.
FLAGS = ("capturable", "differentiable", "foreach", "fused")


def loads_itself(optimizer: Any) -> bool:
    """Whether its class has a ``load_state_dict`` of its own."""
    own = getattr(type(optimizer), "load_state_dict", None)
    return own is not Optimizer.load_state_dict


def load_by_itself(optimizer: Any, state_dict: dict[str, Any], flags: str) -> None:
    """Have it load, and then correct flags, places and dtypes. See `load_state_dict`."""
    holders = known_members(optimizer)
    groups = [getattr(o, "param_groups", []) for o in [optimizer, *holders]]
    before = [[{f: g[f] for f in FLAGS if f in g} for g in some] for some in groups]
    _check_offloaded(optimizer, state_dict)
    # Some write into their argument, so the containers are copied. The tensors are not.
    given = mapped(state_dict, lambda _, leaf: leaf)
    optimizer.load_state_dict(given)
    if flags == "live":
        after = [getattr(o, "param_groups", []) for o in [optimizer, *holders]]
        for old, new in zip(before, after, strict=True):
            for kept, group in zip(old, new, strict=True):
                for flag in FLAGS:
                    group.pop(flag, None)
                group.update(kept)
    saved = saved_tensors(optimizer, state_dict)
    theirs = {id(tensor) for _, tensor in leaves(state_dict)}
    for member in known_members(optimizer):
        _restore(member, saved, theirs)
        relocate(misplaced(member, exact=True), exact=True)


def _check_offloaded(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Check what torchao's CPUOffloadOptimizer does not check.

    Raises:
        ValueError: the checkpoint is of another number of parameters.
    """
    live, saved = getattr(optimizer, "optim_dict", None), state_dict.get("offloaded")
    if live is None or saved is None:
        return
    if len(live) != len(saved):
        raise ValueError(
            f"The optimizer has {len(live)} offloaded parameters and the checkpoint {len(saved)}."
        )
    if (optimizer.d_opt is None) != ("on-device" not in state_dict):
        where = "the checkpoint" if optimizer.d_opt is None else "the optimizer"
        raise ValueError(f"Only {where} has parameters that are not offloaded.")


def saved_tensors(optimizer: Any, state_dict: dict[str, Any]) -> dict[tuple[int, Path], Tensor]:
    """The tensors of a state dict of the usual form, by parameter and path; empty for others."""
    saved, live = state_dict.get("param_groups"), getattr(optimizer, "param_groups", None)
    state = state_dict.get("state")
    if not isinstance(saved, list) or not isinstance(state, dict) or live is None:
        return {}
    ids = [i for group in saved for i in group.get("params", [])]
    params = [param for group in live for param in group["params"]]
    if len(ids) != len(params):
        return {}
    return {
        (id(param), path): tensor
        for i, param in zip(ids, params, strict=True)
        for path, tensor in leaves(state.get(i))
    }


def _restore(optimizer: Any, saved: dict[tuple[int, Path], Tensor], theirs: set[int]) -> None:
    """Load tensors again that the optimizer's own method has rounded, and copy tensors of the
    caller's that it has kept."""
    resolver = Resolver(optimizer)
    owners: list[tuple[Any, Path]] = []
    requests: list[Request] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            for path, tensor in leaves(state):
                source = saved.get((id(param), path))
                wanted = resolver.wanted(index, param, path, state, tensor)
                if source is not None and _was_rounded(source, tensor, wanted):
                    requests.append(Request(source, tensor.device, wanted.dtype))
                elif id(tensor) in theirs:
                    requests.append(Request(tensor, tensor.device))
                else:
                    continue
                owners.append((state, path))
    params = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for key, state in optimizer.state.items():
        for path, tensor in leaves(state, (key,)) if id(key) not in params else ():
            if id(tensor) in theirs:
                requests.append(Request(tensor, tensor.device))
                owners.append((optimizer.state, path))
    for (state, path), tensor in zip(owners, place(requests), strict=True):
        replace(state, path, tensor)


def _was_rounded(source: Tensor, tensor: Tensor, wanted: Placement) -> bool:
    return (
        wanted.dtype is not None
        and source.is_floating_point()
        and tensor.is_floating_point()
        and not is_dtensor(source)
        and tensor.dtype != wanted.dtype
        and source.dtype.itemsize > tensor.dtype.itemsize
        and source.shape == tensor.shape
        and torch.equal(source.to(tensor.dtype).to(tensor.device), tensor)
    )
