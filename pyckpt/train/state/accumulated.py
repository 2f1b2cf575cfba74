"""What a metric of torchmetrics has accumulated: read, set, and merged from other ranks' states."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pyckpt.errors import LoadError
from pyckpt.speaking import for_all
from pyckpt.train.state.saved import Rank

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    Metric = Any

__all__ = [
    "accumulated",
    "block_of",
    "consolidated",
    "extremes_of",
    "has_extremes",
    "kind_of",
    "local_states",
    "merge_all",
    "set_accumulated",
]

_logger = logging.getLogger("pyckpt")


@dataclass(frozen=True)
class _Accumulated:
    """The accumulated state of a metric."""

    update_count: int
    states: dict[str, Any]
    extremes: dict[str, torch.Tensor] | None = None
    """The extremes of a ``MinMaxMetric``, if they were saved."""


def accumulated(state: Mapping[str, Any], metrics: Mapping[str, Metric]) -> dict[str, _Accumulated]:
    """The saved states, by path.

    Raises:
        LoadError: a metric has other states than the saved one.
    """
    found = {}
    for path, metric in metrics.items():
        entry = state[state[path].get("same_as", path)]
        if entry["states"].keys() != metric._defaults.keys():
            raise LoadError(
                f"{path} has the states {sorted(metric._defaults)}, and in the checkpoint "
                f"{sorted(entry['states'])}"
            )
        found[path] = _Accumulated(entry["update_count"], entry["states"], entry.get("extremes"))
    return found


# --- reading and setting a metric -------------------------------------------------------------


def local_states(metric: Metric) -> dict[str, Any]:
    """This rank's own states, even if the metric is synchronised at the moment."""
    if metric._is_synced and metric._cache is not None:
        return {attr: metric._cache[attr] for attr in metric._defaults}
    return {attr: getattr(metric, attr) for attr in metric._defaults}


def consolidated(metrics: Mapping[str, Metric], rank: Rank) -> dict[str, Any]:
    """The states of all ranks together. Collective.

    Raises:
        ValueError: a state cannot be reduced; raised on all ranks, before any communication.
    """
    for path, metric in metrics.items():
        for attr in metric._defaults:
            why = _irreducible(path, metric, attr)
            if why is not None:
                raise ValueError(f"{why}; save it with consolidate=False")
    # All metrics, even those that share states with others: a rank without updates does not know
    # yet which ones do.
    states = {path: _synced(metric) for path, metric in metrics.items()}
    gathered: list[Any] = [None] * rank.world_size
    own = [
        (metric._update_count, extremes_of(metric).get("extremes")) for metric in metrics.values()
    ]
    dist.all_gather_object(gathered, own, group=rank.group)
    together = {}
    for path, column in zip(metrics, zip(*gathered, strict=True), strict=True):
        extremes = _joint_extremes([extremes for _, extremes in column])
        together[path] = {
            "update_count": sum(count for count, _ in column),
            "states": states[path],
            **({} if extremes is None else {"extremes": extremes}),
        }
    return together


def _synced(metric: Metric) -> dict[str, Any]:
    was_synced = metric._is_synced
    if not was_synced:
        metric.sync(dist_sync_fn=metric.dist_sync_fn)
    try:
        return {attr: getattr(metric, attr) for attr in metric._defaults}
    finally:
        if metric._is_synced and not was_synced:
            metric.unsync()


_EXTREMES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "min_val": torch.min,
    "max_val": torch.max,
}


def extremes_of(metric: Metric) -> dict[str, dict[str, torch.Tensor]]:
    """The extremes of a ``MinMaxMetric``, which are not among its states."""
    if not has_extremes(metric):
        return {}
    return {"extremes": {name: getattr(metric, name).detach().clone() for name in _EXTREMES}}


def has_extremes(metric: Metric) -> bool:
    from torchmetrics.wrappers import MinMaxMetric

    return isinstance(metric, MinMaxMetric)


def _joint_extremes(states: Sequence[dict[str, Any] | None]) -> dict[str, torch.Tensor] | None:
    """The extremes of all ranks together; None if none were saved."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    return {
        name: reduce(torch.stack([state[name].cpu() for state in known]))
        for name, reduce in _EXTREMES.items()
    }


def set_accumulated(path: str, metric: Metric, found: _Accumulated) -> None:
    if found.extremes is not None:
        for name in _EXTREMES:
            setattr(metric, name, _own_copy(found.extremes[name], metric.device))
    elif has_extremes(metric):
        _logger.log(
            for_all(logging.WARNING), "%s: its extremes were not saved, and begin anew", path
        )
        for name, start in (("min_val", "inf"), ("max_val", "-inf")):
            setattr(metric, name, torch.tensor(float(start), device=metric.device))
    for attr, default in metric._defaults.items():
        value = found.states[attr]
        if isinstance(default, list):
            device = torch.device("cpu") if metric.compute_on_cpu else metric.device
            value = [_own_copy(entry, device) for entry in _as_list(value)]
        else:
            value = _own_copy(value, metric.device)
        setattr(metric, attr, value)
    metric._update_count = found.update_count
    metric._computed = metric._forward_cache = metric._cache = None
    metric._is_synced = False


def _own_copy(value: Any, device: torch.device) -> Any:
    return value.clone().to(device) if isinstance(value, torch.Tensor) else value


# --- other numbers of ranks -------------------------------------------------------------------


def kind_of(metric: Metric, attr: str) -> str:
    """The name of a state's reduction. "none" and "custom" cannot be split or merged."""
    from torchmetrics.utilities import data

    function = metric._reductions[attr]
    if function is None:
        return "none"
    for name in ("sum", "cat", "max", "min", "mean"):
        if function is getattr(data, f"dim_zero_{name}"):
            return name
    return "custom"


def _irreducible(path: str, metric: Metric, attr: str) -> str | None:
    """Why a state cannot be merged with those of other ranks; None if it can."""
    kind = kind_of(metric, attr)
    if kind not in ("none", "custom"):
        return None
    what = "has no reduction" if kind == "none" else "is reduced by a function of its own"
    return (
        f"{path} ({type(metric).__name__}): the state {attr} {what} (dist_reduce_fx), so that it "
        "can only be saved by each rank and loaded on as many ranks"
    )


def block_of(saved: int, rank: Rank) -> list[int]:
    """The ranks that saved whose states this rank takes over. They are neighbours, so that joined
    entries stay in order."""
    if saved <= rank.world_size:
        return [rank.index] if rank.index < saved else []
    return [i for i in range(saved) if i * rank.world_size // saved == rank.index]


def merge_all(
    metrics: Mapping[str, Metric],
    found: Mapping[int, Mapping[str, _Accumulated]],
    block: list[int],
    rank: Rank,
) -> None:
    merged = {
        path: _merge(path, metric, {i: of[path] for i, of in found.items()}, block, rank)
        for path, metric in metrics.items()
    }
    for path, metric in metrics.items():
        set_accumulated(path, metric, merged[path])


def _merge(
    path: str, metric: Metric, states: dict[int, _Accumulated], block: list[int], rank: Rank
) -> _Accumulated:
    """Merge the states of other ranks for one rank.

    Args:
        states: those that were read, by rank; all that were saved, if a reduction needs all.
        block: the ranks whose states this rank takes over.
    """
    mine = [states[i] for i in block]
    total = sum(state.update_count for state in states.values())
    count = sum(state.update_count for state in mine)
    if any(kind_of(metric, attr) == "mean" for attr in metric._defaults):
        count = total // rank.world_size + (rank.index < total % rank.world_size)
    merged: dict[str, Any] = {}
    for attr, default in metric._defaults.items():
        kind = kind_of(metric, attr)
        # A state may count twice in max and min, and the default state of a new rank must not
        # count at all. So a new rank takes the extremes of all.
        of = mine if mine or kind in ("sum", "cat") else list(states.values())
        parts = [state.states[attr] for state in of]
        if kind in ("none", "custom"):
            if total > 0 and (rank.world_size > 1 or len(states) > 1):
                raise LoadError(str(_irreducible(path, metric, attr)))
            merged[attr] = parts[0] if total > 0 else default
        elif kind == "cat":
            entries = [entry for part in parts for entry in _as_list(part)]
            merged[attr] = entries if isinstance(default, list) else _joined(entries, default)
        elif kind == "mean":
            merged[attr] = _mean(list(states.values()), attr, default)
        elif parts:
            merged[attr] = _REDUCE[kind](torch.stack(parts))
        else:
            assert isinstance(default, torch.Tensor)
            merged[attr] = torch.zeros_like(default)
    return _Accumulated(
        count, merged, _joint_extremes([state.extremes for state in states.values()])
    )


def _as_list(value: Any) -> list[Any]:
    """The entries of a ``cat`` state, which is one tensor if it was synchronised."""
    if isinstance(value, list):
        return value
    return [value] if value.numel() else []


def _joined(entries: list[Any], default: Any) -> Any:
    if not entries:
        return default
    return torch.cat([entry if entry.dim() else entry.reshape(1) for entry in entries])


_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


def _mean(states: list[_Accumulated], attr: str, default: Any) -> Any:
    updated = [state for state in states if state.update_count > 0]
    if not updated:
        return default
    stacked = torch.stack([state.states[attr] for state in updated])
    counts = [float(state.update_count) for state in updated]
    weights = torch.tensor(counts, dtype=torch.float64, device=stacked.device)
    shape = (len(updated),) + (1,) * (stacked.dim() - 1)
    mean = (stacked * weights.view(shape)).sum(0) / weights.sum()
    return mean.to(stacked.dtype)
