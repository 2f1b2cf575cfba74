"""MetricState: the accumulated states of torchmetrics, on each rank.

torchmetrics keeps states and update counts out of ``state_dict``. If all ranks saved their states
under the same keys, DCP would save one rank's only. And if every rank loaded one synchronised
state, a sum would count once for each rank. Here each rank saves its own, without communication.
Each state's reduction says how to bring it to another number of ranks, so that ``compute()`` gives
the same result as before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from pyckpt.dcp.report import some
from pyckpt.errors import LoadError
from pyckpt.train.state.accumulated import (
    accumulated,
    block_of,
    consolidated,
    extremes_of,
    has_extremes,
    kind_of,
    local_states,
    merge_all,
    set_accumulated,
)
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
            return consolidated(metrics, rank)
        leaders = self._leaders()
        return {
            path: {"same_as": leaders[path]}
            if path in leaders
            else {
                "update_count": metric._update_count,
                "states": local_states(metric),
                **extremes_of(metric),
            }
            for path, metric in metrics.items()
        }

    # --- loading ----------------------------------------------------------------------------------

    def _sources(self, saved: int, rank: Rank) -> Sequence[int]:
        if saved == rank.world_size:
            return [rank.index]
        block = block_of(saved, rank)
        kinds = {
            kind_of(metric, attr) for metric in self._find().values() for attr in metric._defaults
        }
        if any(has_extremes(metric) for metric in self._find().values()):
            kinds.add("max")
        local = {"sum", "cat", "max", "min"} if block else {"sum", "cat"}
        # At least one, to know which metrics were saved.
        return (block or [0]) if kinds <= local else range(saved)

    def _take(self, states: dict[int, Any], saved: int, rank: Rank, policy: Policy) -> Unfit:
        self._grow(states.values())
        metrics, unfit = self._fitting(states.values(), policy)
        found = {i: accumulated(state, metrics) for i, state in states.items()}
        if saved == rank.world_size:
            for path, metric in metrics.items():
                set_accumulated(path, metric, found[rank.index][path])
        else:
            merge_all(metrics, found, block_of(saved, rank), rank)
        return unfit

    def _take_shared(self, state: Any, rank: Rank, policy: Policy) -> Unfit:
        self._grow([state])
        metrics, unfit = self._fitting([state], policy)
        # As if rank 0 had accumulated all of it.
        found = {0: accumulated(state, metrics)}
        merge_all(metrics, found, [0] if rank.index == 0 else [], rank)
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
            LoadError: some are only live, or only saved, and the policy does not allow that.
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
