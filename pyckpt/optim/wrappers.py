"""Optimizers that wrap others: objects that hold an optimizer of the same parameters. Only this
module knows of wrappers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pyckpt.optim.tensors import Path, is_dtensor, leaves, mapped

__all__ = [
    "added_to",
    "changes_outside_of_step",
    "held",
    "known_members",
    "layers",
    "members",
    "parameters",
    "relinked",
    "sharding",
    "unsaved",
    "unwrapped",
]

# By qualified name, the entries that some wrappers add to the state that they share. They are like
# the parameter, and on its device.
_ADDED: dict[str, tuple[Path, ...]] = {
    "schedulefree.wrap_schedulefree.ScheduleFreeWrapper": (("z",),),
    "schedulefree.wrap_schedulefree_reference.ScheduleFreeWrapperReference": (
        ("x",),
        ("y",),
        ("z",),
    ),
}
# The same by inner optimizer, recorded whenever one is reached through its wrapper.
_added: weakref.WeakKeyDictionary[Any, tuple[Path, ...]] = weakref.WeakKeyDictionary()
# Wrappers whose own ``state`` is a copy of the inner optimizer's.
_COPIES = {"torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": True}


def held(optimizer: Any) -> dict[str, Any]:
    """The optimizers that one holds for some of its own parameters, by the names of attributes. For
    an object without parameters of its own, all optimizers that it holds."""
    own = {id(param) for group in _groups(optimizer) for param in group["params"]}
    return {
        name: other
        for name, other in _attributes(optimizer)
        if other is not optimizer
        and (
            not own
            or any(id(param) in own for group in _groups(other) for param in group["params"])
        )
    }


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The optimizers, and wrappers of optimizers, among an object's attributes, and in lists and
    dicts among these."""
    if isinstance(owner, nn.Module) or not hasattr(owner, "__dict__"):
        return
    for name, value in list(vars(owner).items()):
        if name in ("state", "param_groups"):
            continue
        if _is_optimizer(value):
            yield name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{name}[{i}]", one) for i, one in enumerate(value) if _is_optimizer(one))
        elif isinstance(value, dict):
            # A key may be a parameter, which is no name; use the number of the entry instead.
            ones = [(key, one) for key, one in value.items() if _is_optimizer(one)]
            yield from (
                (f"{name}[{key!r}]" if isinstance(key, str) else f"{name}[{i}]", one)
                for i, (key, one) in enumerate(ones)
            )


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, Optimizer):
        return True
    # A wrapper that is no Optimizer itself, within another wrapper.
    cls = type(value)
    return (
        hasattr(cls, "step")
        and hasattr(cls, "load_state_dict")
        and isinstance(getattr(value, "param_groups", None), list)
    )


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list):
        return []
    return [group for group in groups if isinstance(group, dict) and "params" in group]


def _shared(optimizer: Any) -> Any:
    """The inner optimizer whose state and groups a wrapper shows as its own, or None."""
    state, groups = getattr(optimizer, "state", None), _groups(optimizer)
    if state is None:
        return None
    for other in held(optimizer).values():
        theirs = _groups(other)
        if (
            getattr(other, "state", None) is state
            and len(groups) == len(theirs)
            and all(one is two for one, two in zip(groups, theirs, strict=True))
        ):
            return other
    return None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer behind wrappers that have no state of their own."""
    return _chain(optimizer)[-1]


def _chain(optimizer: Any) -> list[Any]:
    """Wrappers that have no state of their own, from the outermost inwards, and the optimizer that
    they wrap."""
    chain = [optimizer]
    while (inner := _shared(optimizer)) is not None and all(inner is not one for one in chain):
        added = _by_name(_ADDED, type(optimizer))
        if added is not None:
            _added[inner] = added
        chain.append(inner)
        optimizer = inner
    return chain


def added_to(optimizer: Any) -> tuple[Path, ...]:
    """The entries that a wrapper of this optimizer adds to the state of a parameter."""
    return _added.get(optimizer, ())


def changes_outside_of_step(optimizer: Any) -> bool:
    """Whether an optimizer changes parameters in other calls than ``step``, which have no hooks.
    Schedule-free ones do so in ``train`` and ``eval``, and programs save between these."""
    inner = getattr(optimizer, "optimizer", None)  # Accelerate gives any optimizer these methods
    if isinstance(inner, Optimizer):
        return changes_outside_of_step(inner)
    return callable(getattr(optimizer, "train", None))


def members(optimizer: Any) -> list[Any]:
    """The optimizers that have the state: this one, and those that it holds.

    Raises:
        TypeError: it is no optimizer, and no wrapper of optimizers.
    """
    found = known_members(optimizer)
    if not found:
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} is no optimizer, with state and param_groups, "
            f"and holds none."
        )
    return found


def known_members(optimizer: Any) -> list[Any]:
    """As `members`, but empty if it is neither."""
    found: dict[int, Any] = {}
    for layer in layers(optimizer):
        state = getattr(layer, "state", None)
        if state is None or not hasattr(layer, "param_groups") or _by_name(_COPIES, type(layer)):
            continue
        found[id(state)] = layer  # of those that share a state, the innermost, which comes last
    return list(found.values())


def layers(optimizer: Any) -> list[Any]:
    """The optimizer, those that it holds, and those that they hold; each once."""
    found: dict[int, Any] = {}

    def collect(layer: Any) -> None:
        if id(layer) in found:
            return
        found[id(layer)] = layer
        added = _by_name(_ADDED, type(layer))
        for inner in held(layer).values():
            if added is not None:
                _added[inner] = added
            collect(inner)

    collect(optimizer)
    return list(found.values())


def relinked(optimizer: Any) -> Callable[[], None]:
    """Some wrappers keep references of their own to the state and groups of the inner optimizer.
    Return a function that renews these after the inner optimizer has loaded."""
    chain = _chain(optimizer)
    own = [
        (shell, name)
        for shell in chain[:-1]
        for name in ("state", "param_groups")
        if name in vars(shell)
    ]

    def relink() -> None:
        for shell, name in own:
            vars(shell)[name] = getattr(chain[-1], name)

    return relink


def unsaved(
    optimizer: Any, state_dict: dict[str, Any], elsewhere: Container[int]
) -> dict[str, Any]:
    """Of the optimizers that one holds, those with state that its state dict lacks.

    Args:
        state_dict: of the optimizer.
        elsewhere: ids of optimizers that are saved by themselves.
    """
    inner = held(optimizer)
    if not inner or _by_name(_COPIES, type(optimizer)):
        return {}
    saved = {id(tensor) for _, tensor in leaves(state_dict)}
    kept = {
        id(tensor)
        for layer in layers(optimizer)
        if id(layer) not in elsewhere
        for tensor in _tensors(layer)
    }
    if len(saved) >= len(kept):
        return {}  # the state dict may have copies of the tensors
    return {
        name: other
        for name, other in inner.items()
        if id(other) not in elsewhere and any(id(tensor) not in saved for tensor in _tensors(other))
    }


@contextmanager
def sharding(owner: Any) -> Iterator[None]:
    """While an object loads its own state dict, let the optimizers that it holds take whole tensors
    for sharded parameters, and keep this rank's shard of each."""
    hooks = [
        layer.register_load_state_dict_pre_hook(_sharded_as_parameters)
        for layer in layers(owner)
        if hasattr(layer, "_optimizer_load_state_dict_pre_hooks")
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _sharded_as_parameters(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(map(is_dtensor, params)):
        return None
    from torch.distributed.tensor import distribute_tensor

    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    param_of = dict(zip(ids, params, strict=False))

    def shard(path: Path, value: Any) -> Any:
        param: Any = param_of.get(path[0])
        if (
            not isinstance(value, Tensor)
            or is_dtensor(value)
            or not is_dtensor(param)
            or value.shape != param.shape
        ):
            return value
        # All ranks have loaded the whole tensor, so nothing is sent.
        mesh, placements = param.device_mesh, param.placements
        return distribute_tensor(value, mesh, placements, src_data_rank=None)

    return {**state_dict, "state": mapped(state_dict["state"], shard)}


def parameters(owner: Any) -> Iterator[Tensor]:
    """The parameters of the optimizers that an object holds."""
    for layer in layers(owner):
        for group in _groups(layer):
            yield from group["params"]


def _tensors(optimizer: Any) -> Iterator[Tensor]:
    for state in dict(getattr(optimizer, "state", {})).values():
        for _, tensor in leaves(state):
            yield tensor


def _by_name(table: dict[str, Any], cls: type) -> Any:
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((table[name] for name in names if name in table), None)
