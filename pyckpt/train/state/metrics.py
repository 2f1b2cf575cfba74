"""MetricState: the accumulated states of torchmetrics, on each rank.

torchmetrics keeps states and update counts out of ``state_dict``. If all ranks saved their states
under the same keys, DCP would save one rank's only. And if every rank loaded one synchronised
state, a sum would count once for each rank. Here each rank saves its own, without communication.
Each state's reduction says how to bring it to another number of ranks, so that ``compute()`` gives
the same result as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pyckpt.dcp.report import some
from pyckpt.errors import LoadError
from pyckpt.train.state.per_rank import RankState, Unfit
from pyckpt.train.state.saved import Policy, Rank

if TYPE_CHECKING:
    from torchmetrics import Metric
else:
    Metric = Any

__all__ = ["MetricState"]

_logger = logging.getLogger("pyckpt")


class MetricState(RankState):
    """The states of metrics of `torchmetrics <https://lightning.ai/docs/torchmetrics>`_.

    ::

        state = {"model": model, "metrics": pyckpt.MetricState(model)}

    Each rank saves what it has accumulated, with ``update_count``, and gets it back. Nothing is
    synchronised. On another number of ranks, a state is merged or split by its reduction:

    - ``sum``, ``cat``: fewer ranks add up, or join, the states of neighbours. A new rank has
      nothing.
    - ``max``, ``min``: fewer ranks take the extremes of neighbours. A new rank has that of all.
    - ``mean``: every rank has the mean of all, weighted by their update counts, and an equal share
      of the updates.
    - none, or a function: there is no general way. It is refused, unless there were no updates.

    Args:
        metrics: a metric, a ``MetricCollection``, any module that contains metrics, or a dict or
            list of these.
        consolidate: save one state of all ranks, synchronised as metrics do it. Saving is then
            collective. Metrics go on with their local states after it. When it is loaded, rank 0
            has ``sum`` and ``cat``, and other ranks have zero and nothing; all ranks have ``max``,
            ``min`` and ``mean``. A state without a reduction is refused when it is saved. In a
            single process nothing is synchronised.

    A checkpoint is loaded in the form in which it was saved, whatever ``consolidate`` is.

    Raises:
        ModuleNotFoundError: torchmetrics is not installed.
        TypeError: ``metrics`` is none of the above.
        ValueError: it contains no metric.
    """

    def __init__(
        self,
        metrics: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
        *,
        consolidate: bool = False,
    ) -> None:
        import torchmetrics

        del torchmetrics
        self._roots = _roots(metrics)
        self._consolidate = consolidate
        if not self._find():
            raise ValueError("There is no torchmetrics.Metric in what MetricState was given.")

    # --- saving -----------------------------------------------------------------------------------

    def _is_shared(self, rank: Rank) -> bool:
        return self._consolidate

    def _own(self, rank: Rank) -> Any:
        metrics = self._find()
        if self._consolidate and rank.world_size > 1:
            return _consolidated(metrics, rank)
        leaders = self._leaders()
        return {
            path: {"same_as": leaders[path]}
            if path in leaders
            else {
                "update_count": metric._update_count,
                "states": _local(metric),
                **_extremes(metric),
            }
            for path, metric in metrics.items()
        }

    # --- loading ----------------------------------------------------------------------------------

    def _sources(self, saved: int, rank: Rank) -> Sequence[int]:
        if saved == rank.world_size:
            return [rank.index]
        block = _block(saved, rank)
        kinds = {
            _kind(metric, attr) for metric in self._find().values() for attr in metric._defaults
        }
        if any(_has_extremes(metric) for metric in self._find().values()):
            kinds.add("max")
        local = {"sum", "cat", "max", "min"} if block else {"sum", "cat"}
        # At least one, to know which metrics were saved.
        return (block or [0]) if kinds <= local else range(saved)

    def _take(self, states: dict[int, Any], saved: int, rank: Rank, policy: Policy) -> Unfit:
        self._grow(states.values())
        metrics, unfit = self._fitting(states.values(), policy)
        found = {i: _accumulated(state, metrics) for i, state in states.items()}
        if saved == rank.world_size:
            for path, metric in metrics.items():
                _set(path, metric, found[rank.index][path])
        else:
            _merge_all(metrics, found, _block(saved, rank), rank)
        return unfit

    def _take_shared(self, state: Any, rank: Rank, policy: Policy) -> Unfit:
        self._grow([state])
        metrics, unfit = self._fitting([state], policy)
        # As if rank 0 had accumulated all of it.
        found = {0: _accumulated(state, metrics)}
        _merge_all(metrics, found, [0] if rank.index == 0 else [], rank)
        return unfit

    def _grow(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Give trackers as many steps as they had when they were saved."""
        from torchmetrics.wrappers import MetricTracker

        saved = [path for state in states for path in state]
        for path, module in list(self._walk()):
            if isinstance(module, MetricTracker):
                prefix = "" if path == _ROOT else f"{path}."
                heads = {
                    name.removeprefix(prefix).split(".")[0]
                    for name in saved
                    if name.startswith(prefix)
                }
                if not heads:
                    continue  # it was not saved
                # Steps are numbered from 1, after the metric that they are copied from.
                steps = max((int(head) for head in heads if head.isdecimal()), default=0)
                while module.n_steps < steps:
                    module.increment()
                while module.n_steps > steps:
                    del module._modules[str(module.n_steps)]
                module._increment_called = steps > 0

    def _fitting(
        self, states: Iterable[Mapping[str, Any]], policy: Policy
    ) -> tuple[dict[str, Metric], Unfit]:
        """The metrics that were saved, by path, and those that are only live or only saved.

        Raises:
            LoadError: there are such, and the policy does not allow them.
        """
        metrics = self._find()
        saved = dict.fromkeys(path for state in states for path in state)
        missing = [path for path in metrics if path not in saved]
        unexpected = [path for path in saved if path not in metrics]
        parts = []
        if missing and policy.missing == "error":
            parts.append(
                f"metrics not in the checkpoint: {some(missing, 20)}; pass missing='keep' to leave "
                "them as they are"
            )
        if unexpected and policy.unexpected == "error":
            parts.append(
                f"metrics in the checkpoint only: {some(unexpected, 20)}; pass "
                "unexpected='ignore' to leave them out"
            )
        if parts:
            raise LoadError("; ".join(parts), missing=tuple(missing), unexpected=tuple(unexpected))
        fitting = {path: metric for path, metric in metrics.items() if path in saved}
        return fitting, Unfit(missing, unexpected)

    # --- finding ----------------------------------------------------------------------------------

    def _find(self) -> dict[str, Metric]:
        """All metrics by path. Not cached, since modules may change."""
        from torchmetrics import Metric

        return {path: module for path, module in self._walk() if isinstance(module, Metric)}

    def _leaders(self) -> dict[str, str]:
        """For metrics of a collection that share another metric's states, the path of the other."""
        from torchmetrics import MetricCollection

        leaders: dict[str, str] = {}
        for path, module in self._walk():
            if isinstance(module, MetricCollection):
                prefix = "" if path == _ROOT else f"{path}."
                for leader, *others in module.compute_groups.values():
                    leaders.update({f"{prefix}{other}": f"{prefix}{leader}" for other in others})
        return leaders

    def _walk(self) -> Iterator[tuple[str, nn.Module]]:
        for root, module in self._roots.items():
            for name, sub in module.named_modules():
                yield ".".join(filter(None, (root, name))) or _ROOT, sub


_ROOT = "metric"


def _roots(metrics: Any) -> dict[str, nn.Module]:
    if isinstance(metrics, nn.Module):
        return {"": metrics}
    if isinstance(metrics, Mapping):
        roots = {str(key): value for key, value in metrics.items()}
    elif isinstance(metrics, Sequence):
        roots = {str(index): value for index, value in enumerate(metrics)}
    else:
        raise TypeError(f"MetricState takes modules, not {type(metrics).__name__}.")
    for key, value in roots.items():
        if not isinstance(value, nn.Module):
            raise TypeError(f"MetricState takes modules; {key!r} is {type(value).__name__}.")
    return roots


@dataclass(frozen=True)
class _Accumulated:
    """The accumulated state of a metric."""

    update_count: int
    states: dict[str, Any]
    extremes: dict[str, torch.Tensor] | None = None
    """Of a ``MinMaxMetric``, if they were saved."""


def _accumulated(
    state: Mapping[str, Any], metrics: Mapping[str, Metric]
) -> dict[str, _Accumulated]:
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


def _merge_all(
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
        _set(path, metric, merged[path])


# --- reading and setting a metric -------------------------------------------------------------


def _local(metric: Metric) -> dict[str, Any]:
    """This rank's own states, even if the metric is synchronised at the moment."""
    if metric._is_synced and metric._cache is not None:
        return {attr: metric._cache[attr] for attr in metric._defaults}
    return {attr: getattr(metric, attr) for attr in metric._defaults}


def _consolidated(metrics: Mapping[str, Metric], rank: Rank) -> dict[str, Any]:
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
    own = [(metric._update_count, _extremes(metric).get("extremes")) for metric in metrics.values()]
    dist.all_gather_object(gathered, own, group=rank.group)
    consolidated = {}
    for path, column in zip(metrics, zip(*gathered, strict=True), strict=True):
        extremes = _joint_extremes([extremes for _, extremes in column])
        consolidated[path] = {
            "update_count": sum(count for count, _ in column),
            "states": states[path],
            **({} if extremes is None else {"extremes": extremes}),
        }
    return consolidated


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


def _extremes(metric: Metric) -> dict[str, dict[str, torch.Tensor]]:
    """The extremes of a ``MinMaxMetric``, which are not among its states."""
    if not _has_extremes(metric):
        return {}
    return {"extremes": {name: getattr(metric, name).detach().clone() for name in _EXTREMES}}


def _has_extremes(metric: Metric) -> bool:
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


def _set(path: str, metric: Metric, found: _Accumulated) -> None:
    if found.extremes is not None:
        for name in _EXTREMES:
            setattr(metric, name, _own_copy(found.extremes[name], metric.device))
    elif _has_extremes(metric):
        _logger.warning("%s: its extremes were not saved, and begin anew", path)
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


def _kind(metric: Metric, attr: str) -> str:
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
    kind = _kind(metric, attr)
    if kind not in ("none", "custom"):
        return None
    what = "has no reduction" if kind == "none" else "is reduced by a function of its own"
    return (
        f"{path} ({type(metric).__name__}): the state {attr} {what} (dist_reduce_fx), so that it "
        "can only be saved by each rank and loaded on as many ranks"
    )


def _block(saved: int, rank: Rank) -> list[int]:
    """The ranks that saved whose states this rank takes over. They are neighbours, so that joined
    entries stay in order."""
    if saved <= rank.world_size:
        return [rank.index] if rank.index < saved else []
    return [i for i in range(saved) if i * rank.world_size // saved == rank.index]


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
    if any(_kind(metric, attr) == "mean" for attr in metric._defaults):
        count = total // rank.world_size + (rank.index < total % rank.world_size)
    merged: dict[str, Any] = {}
    for attr, default in metric._defaults.items():
        kind = _kind(metric, attr)
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
    weights = torch.tensor([float(state.update_count) for state in updated], dtype=torch.float64)
    shape = (len(updated),) + (1,) * (stacked.dim() - 1)
    mean = (stacked * weights.view(shape)).sum(0) / weights.sum()
    return mean.to(stacked.dtype)
