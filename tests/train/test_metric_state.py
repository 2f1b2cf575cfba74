"""MetricState: what metrics have accumulated comes back once, on the same and on another number of
ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import RanksFailed, run_ranks
from _sampling import slow
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric, MaxMetric, MinMetric
from torchmetrics.classification import (
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassPrecision,
    MulticlassRecall,
)
from torchmetrics.wrappers import MetricTracker, MinMaxMetric

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.train.state.app_state import AppState


class Mean(Metric):
    """None of torchmetrics' own has a state with this reduction."""

    mean: torch.Tensor
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        # _update_count has this update in it already.
        self.mean = self.mean + (value - self.mean) / self._update_count

    def compute(self) -> torch.Tensor:
        return self.mean


class Smoothed(Metric):
    """A sum that does not begin at zero."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(1.0), dist_reduce_fx="sum")

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> torch.Tensor:
        return self.total


class Unreduced(Metric):
    """Its states are not to be merged."""

    values: list[torch.Tensor]

    def __init__(self, reduction: Any = None) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=reduction)

    def update(self, value: float) -> None:
        self.values.append(torch.tensor([value]))

    def compute(self) -> torch.Tensor:
        return torch.stack(self.values).sum()


class Model(nn.Module):
    """Metrics where Lightning modules have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.sum = SumMetric()
        self.nested = nn.ModuleDict(
            {"cat": CatMetric(), "max": MaxMetric(), "min": MinMetric(), "mean": Mean()}
        )
        self.smoothed = Smoothed()
        self.weighted = MeanMetric()


def metrics_of(model: nn.Module) -> dict[str, Metric]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Metric)}


def update(model: Model, rank: int, updates: int) -> None:
    for i in range(updates):
        value = float(10 * (rank + 1) + i)
        for metric in metrics_of(model).values():
            # Metrics do not synchronise lists of numbers that are longer on some ranks.
            metric.update(torch.tensor([value]) if isinstance(metric, CatMetric) else value)


def computed(model: nn.Module) -> dict[str, Any]:
    with warnings.catch_warnings():
        # A rank that has had no update, computing what others had.
        warnings.filterwarnings("ignore", message=".*was called before the ``update`` method")
        return {name: m.compute().tolist() for name, m in metrics_of(model).items()}


def save_model(path: str, consolidate: bool) -> tuple[Any, Any]:
    """What all ranks compute, and each rank's own states, after saving."""
    model = Model()
    update(model, dist.get_rank(), 2)
    before = copy.deepcopy({n: m.metric_state for n, m in metrics_of(model).items()})
    state = {"metrics": pyckpt.MetricState(model, consolidate=consolidate)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    for name, metric in metrics_of(model).items():
        assert not metric._is_synced
        for attr, value in metric.metric_state.items():
            torch.testing.assert_close(value, before[name][attr], rtol=0, atol=0)
    return computed(model), {n: m.update_count for n, m in metrics_of(model).items()}


def load_model(path: str, more: int) -> tuple[Any, Any]:
    model = Model()
    update(model, 7, 3)  # what is there before does not count
    AppState({"metrics": pyckpt.MetricState(model)}).load(pyckpt.DirectReader(path))
    counts = {name: metric.update_count for name, metric in metrics_of(model).items()}
    update(model, dist.get_rank(), more)
    return computed(model), counts


@pytest.mark.parametrize("consolidate", [False, slow(True)])
@pytest.mark.parametrize(
    ("saved", "restored"), [slow(2, 2), (1, 3), (3, 2), slow(2, 4), slow(4, 1)]
)
def test_totals(saved: int, restored: int, consolidate: bool, tmp_path: Path) -> None:
    path = str(tmp_path)
    before = run_ranks(saved, save_model, path, consolidate)
    after = run_ranks(restored, load_model, path, 0)
    for found, _ in after:
        for name, value in before[0][0].items():
            assert found[name] == pytest.approx(value), name
    for name in before[0][1]:
        total = sum(counts[name] for _, counts in after)
        assert total == sum(counts[name] for _, counts in before)


def test_it_goes_on_after(tmp_path: Path) -> None:
    """Two updates a rank on two ranks, then four in all on four."""
    path = str(tmp_path)
    run_ranks(2, save_model, path, False)
    ((found, *_), *_) = run_ranks(4, load_model, path, 1)
    values = [10, 11, 20, 21, 10, 20, 30, 40]
    assert found["sum"] == sum(values)
    assert sorted(found["nested.cat"]) == sorted(values)
    assert (found["nested.max"], found["nested.min"]) == (40, 10)
    assert found["nested.mean"] == pytest.approx(sum(values) / len(values))
    assert found["weighted"] == pytest.approx(sum(values) / len(values))


def save_sum(path: str, first: float, consolidate: bool) -> float:
    metric = SumMetric()
    metric.update(first * (dist.get_rank() + 1))
    state = {"metrics": pyckpt.MetricState(metric, consolidate=consolidate)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    return float(metric.sum_value)


def load_sum(path: str) -> tuple[float, float]:
    metric = SumMetric()
    AppState({"metrics": pyckpt.MetricState(metric)}).load(pyckpt.DirectReader(path))
    local = float(metric.sum_value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return local, float(metric.compute())


@pytest.mark.parametrize("consolidate", [False, slow(True)])
@pytest.mark.parametrize("first", [20, slow(10)])
def test_where_others_lose_half(first: float, consolidate: bool, tmp_path: Path) -> None:
    """20 and 40 are 60: Lightning 2.6.6 restores 20 and 20. 10 and 20 are 30: DCP restores the
    local states as 10 and 10, and the synchronised one as 30 and 30."""
    path = str(tmp_path)
    assert run_ranks(2, save_sum, path, first, consolidate) == [first, 2 * first]
    local = [3 * first, 0] if consolidate else [first, 2 * first]
    assert run_ranks(2, load_sum, path) == [(one, 3 * first) for one in local]
    assert run_ranks(1, load_sum, path) == [(3 * first, 3 * first)]


@pytest.mark.slow
def test_order_of_joined_states(tmp_path: Path) -> None:
    """That of the ranks, as synchronising would have joined them."""
    before = run_ranks(4, save_model, str(tmp_path), False)
    after = run_ranks(2, load_model, str(tmp_path), 0)
    assert after[0][0]["nested.cat"] == before[0][0]["nested.cat"]


def save_without_collectives(path: str) -> None:
    model = Model()
    update(model, dist.get_rank(), 1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective")

    dist.all_gather = dist.all_reduce = dist.all_gather_object = refuse
    AppState({"metrics": pyckpt.MetricState(model)}).state_dict()


def test_local_states_are_saved_without_communication(tmp_path: Path) -> None:
    run_ranks(2, save_without_collectives, str(tmp_path))


# --- what cannot be merged ----------------------------------------------------------------------


def total_of_values(values: torch.Tensor) -> torch.Tensor:
    return values.sum(0)


def save_unreduced(path: str, reduction: Any, updates: int, consolidate: bool) -> None:
    metric = Unreduced(reduction)
    for _ in range(updates):
        metric.update(float(dist.get_rank()))
    state = {"metrics": pyckpt.MetricState(metric, consolidate=consolidate)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))


def load_unreduced(path: str, reduction: Any) -> list[float]:
    metric = Unreduced(reduction)
    metric.update(9.0)
    AppState({"metrics": pyckpt.MetricState(metric)}).load(pyckpt.DirectReader(path))
    return [float(value) for value in metric.values]


@pytest.mark.parametrize("reduction", [None, slow(total_of_values)])
def test_unreduced(reduction: Any, tmp_path: Path) -> None:
    path = str(tmp_path)
    run_ranks(2, save_unreduced, path, reduction, 3, False)
    assert run_ranks(2, load_unreduced, path, reduction) == [[0, 0, 0], [1, 1, 1]]
    for world in (1, 3):
        with pytest.raises(RanksFailed) as info:
            run_ranks(world, load_unreduced, path, reduction)
        assert isinstance(info.value.__cause__, LoadError)
        assert "metrics: metric (Unreduced): the state values" in str(info.value.__cause__)


def test_unreduced_without_updates(tmp_path: Path) -> None:
    """Between epochs there is nothing to merge."""
    run_ranks(2, save_unreduced, str(tmp_path), None, 0, False)
    assert run_ranks(3, load_unreduced, str(tmp_path), None) == [[], [], []]


@pytest.mark.slow
def test_unreduced_is_not_consolidated(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="the state values has no reduction"):
        run_ranks(2, save_unreduced, str(tmp_path / "two"), None, 1, True)
    # There is nothing to synchronise in one process.
    run_ranks(1, save_unreduced, str(tmp_path / "one"), None, 1, True)
    assert run_ranks(1, load_unreduced, str(tmp_path / "one"), None) == [[0]]
    with pytest.raises(RanksFailed, match="the state values has no reduction"):
        run_ranks(2, load_unreduced, str(tmp_path / "one"), None)


# --- in one process -----------------------------------------------------------------------------


def round_trip(saved: Any, restored: Any, path: Path, **options: Any) -> None:
    state = {"metrics": pyckpt.MetricState(saved, **options)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))
    AppState({"metrics": pyckpt.MetricState(restored)}).load(pyckpt.DirectReader(path))


@pytest.mark.parametrize("consolidate", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_lists_of_any_length(length: int, consolidate: bool, tmp_path: Path) -> None:
    saved, restored = CatMetric(), CatMetric()
    restored.update(torch.ones(3))
    for i in range(length):
        saved.update(torch.arange(float(i + 1)))
    round_trip(saved, restored, tmp_path, consolidate=consolidate)
    assert isinstance(restored.value, list)
    assert [v.tolist() for v in restored.value] == [v.tolist() for v in saved.value]
    assert restored.update_count == length
    saved.update(5.0)
    restored.update(5.0)
    assert restored.compute().tolist() == saved.compute().tolist()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(8, 3, generator=generator),
        torch.randint(0, 3, (8,), generator=generator),
    )


def collection() -> MetricCollection:
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3),
            "precision": MulticlassPrecision(3),
            "recall": MulticlassRecall(3, average=None),
        },
        prefix="val_",
    )


@pytest.mark.parametrize("used", [False, True])
def test_compute_groups(used: bool, tmp_path: Path) -> None:
    """Metrics that share their states: saved once, and each has them when restored."""
    saved, restored = collection(), collection()
    saved.update(*batch(0))
    assert len(saved.compute_groups) == 1
    if used:
        restored.update(*batch(5))
    state = pyckpt.MetricState(saved).state_dict()["rank-00000-of-00001"]
    assert sum("states" in entry for entry in state.values()) == 1
    round_trip(saved, restored, tmp_path)

    def results(metrics: MetricCollection) -> dict[str, Any]:
        return {name: value.tolist() for name, value in metrics.compute().items()}

    assert results(restored) == results(saved)
    for metrics in (saved, restored):
        metrics.update(*batch(1))
    assert results(restored) == results(saved)
    assert restored["accuracy"].update_count == 2


def save_uneven_groups(path: str, consolidate: bool) -> None:
    metrics = collection()
    if dist.get_rank() == 0:  # the other does not know its groups yet
        metrics.update(*batch(0))
    state = {"metrics": pyckpt.MetricState(metrics, consolidate=consolidate)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))


def load_groups(path: str) -> dict[str, Any]:
    metrics = collection()
    AppState({"metrics": pyckpt.MetricState(metrics)}).load(pyckpt.DirectReader(path))
    return {name: value.tolist() for name, value in metrics.compute().items()}


@pytest.mark.parametrize("consolidate", [False, slow(True)])
def test_groups_that_not_all_ranks_know(consolidate: bool, tmp_path: Path) -> None:
    run_ranks(2, save_uneven_groups, str(tmp_path), consolidate)
    expected = collection()
    expected.update(*batch(0))
    (found,) = run_ranks(1, load_groups, str(tmp_path))
    assert found == {name: value.tolist() for name, value in expected.compute().items()}


def test_dicts_and_lists_of_metrics(tmp_path: Path) -> None:
    saved = {"a": BinaryAUROC(), "b": SumMetric()}
    saved["a"].update(torch.tensor([0.1, 0.8, 0.4]), torch.tensor([0, 1, 1]))
    saved["b"].update(4.0)
    restored = {"a": BinaryAUROC(), "b": SumMetric()}
    round_trip(saved, restored, tmp_path)
    assert restored["a"].compute() == saved["a"].compute()
    assert restored["b"].compute() == 4
    round_trip([saved["b"]], [restored["b"]], tmp_path / "list")
    assert restored["b"].compute() == 4


def test_a_cached_value_does_not_survive(tmp_path: Path) -> None:
    saved, restored = SumMetric(), SumMetric()
    saved.update(3.0)
    restored.update(1.0)
    assert restored.compute() == 1
    round_trip(saved, restored, tmp_path)
    assert restored.compute() == 3
    assert restored.update_called
    restored.reset()
    assert restored.sum_value == 0


def test_other_metrics_than_saved(tmp_path: Path) -> None:
    saved = {"a": SumMetric(), "b": SumMetric()}
    for metric in saved.values():
        metric.update(1.0)
    with pytest.raises(LoadError, match=r"metrics: .*not in the checkpoint: c; .*only: b"):
        round_trip(saved, {"a": SumMetric(), "c": SumMetric()}, tmp_path)
    with pytest.raises(LoadError, match=r"metrics: b has the states \['value'\].*\['sum_value'\]"):
        round_trip(saved, {"a": SumMetric(), "b": CatMetric()}, tmp_path / "other")


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"no torchmetrics\.Metric"):
        pyckpt.MetricState(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="int"):
        pyckpt.MetricState(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'a' is float"):
        pyckpt.MetricState({"a": 1.0})  # type: ignore[dict-item]


# --- other metrics than were saved ----------------------------------------------------------------


def accuracy(*values: float) -> SumMetric:
    metric = SumMetric()
    for value in values:
        metric.update(value)
    return metric


def saved_metrics(path: Path, metrics: dict[str, nn.Module]) -> None:
    state = {"metrics": pyckpt.MetricState(metrics)}
    dcp.save(AppState(state).state_dict(), storage_writer=pyckpt.DirectWriter(path))


def test_metrics_that_were_added_and_removed(tmp_path: Path) -> None:
    saved_metrics(tmp_path, {"loss": accuracy(3.0), "old": accuracy(1.0)})
    metrics = {"loss": accuracy(), "new": accuracy(7.0)}
    objects = {"metrics": pyckpt.MetricState(metrics)}
    with pytest.raises(LoadError, match=r"missing='keep'.*old.*unexpected='ignore'"):
        AppState(objects).load(pyckpt.DirectReader(tmp_path))
    with pytest.raises(LoadError, match="in the checkpoint only: old"):
        AppState(objects).load(pyckpt.DirectReader(tmp_path), missing="keep")
    report = AppState(objects).load(
        pyckpt.DirectReader(tmp_path), missing="keep", unexpected="ignore"
    )
    assert (report.kept, report.unexpected) == (["metrics.new"], ["metrics.old"])
    assert [metric.compute().item() for metric in metrics.values()] == [3.0, 7.0]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_tracker_takes_the_steps_that_it_had(steps: int, tmp_path: Path) -> None:
    tracker = MetricTracker(SumMetric(), maximize=True)
    for value in (1.0, 5.0, 2.0):
        tracker.increment()
        tracker.update(value)
    saved_metrics(tmp_path, {"tracked": tracker})
    fresh = MetricTracker(SumMetric(), maximize=True)
    for _ in range(steps):
        fresh.increment()
        fresh.update(9.0)
    AppState({"metrics": pyckpt.MetricState({"tracked": fresh})}).load(
        pyckpt.DirectReader(tmp_path)
    )
    assert fresh.n_steps == 3
    assert fresh.compute_all().tolist() == [1.0, 5.0, 2.0]
    assert fresh.best_metric(return_step=True) == (5.0, 1)
    fresh.increment()
    fresh.update(6.0)
    assert fresh.best_metric(return_step=True) == (6.0, 3)


def test_a_tracker_of_a_collection(tmp_path: Path) -> None:
    def made() -> MetricTracker:
        return MetricTracker(
            MetricCollection({"sum": SumMetric(), "max": MaxMetric()}), maximize=[True, True]
        )

    tracker = made()
    for value in (1.0, 5.0):
        tracker.increment()
        tracker.update(value)
    saved_metrics(tmp_path, {"tracked": tracker})
    fresh = made()
    AppState({"metrics": pyckpt.MetricState({"tracked": fresh})}).load(
        pyckpt.DirectReader(tmp_path)
    )
    assert fresh.n_steps == 2
    assert fresh.best_metric() == {"sum": 5.0, "max": 5.0}


def extremes(path: str, save: bool, consolidate: bool = False) -> list[float]:
    # Without this each rank would see the sums of all.
    metric = MinMaxMetric(SumMetric(sync_on_compute=False), sync_on_compute=False)
    state = AppState({"metrics": pyckpt.MetricState(metric, consolidate=consolidate)})
    if save:
        for value in (2.0, -5.0 * (1 + dist.get_rank())):
            metric.update(value)
            metric.compute()
        dcp.save(state.state_dict(), storage_writer=pyckpt.DirectWriter(path))
    else:
        state.load(pyckpt.DirectReader(path))
    return [metric.min_val.item(), metric.max_val.item()]


@pytest.mark.parametrize("consolidate", [False, slow(True)])
def test_extremes_are_restored(consolidate: bool, tmp_path: Path) -> None:
    path = str(tmp_path)
    assert run_ranks(2, extremes, path, True, consolidate) == [[-3.0, 2.0], [-8.0, 2.0]]
    everyones = [[-8.0, 2.0]] * 2
    assert run_ranks(2, extremes, path, False) == (
        everyones if consolidate else [[-3.0, 2.0], [-8.0, 2.0]]
    )
    assert run_ranks(1, extremes, path, False) == everyones[:1]
    third = run_ranks(3, extremes, path, False)[2]
    assert third == everyones[0]


def test_extremes_that_were_not_saved_begin_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in checkpoints of before."""
    metric = MinMaxMetric(SumMetric())
    metric.update(2.0)
    metric.compute()
    saved = AppState({"metrics": pyckpt.MetricState(metric)}).state_dict()
    for entry in saved["metrics"]["rank-00000-of-00001"].values():
        entry.pop("extremes", None)
    dcp.save(saved, storage_writer=pyckpt.DirectWriter(tmp_path))
    with caplog.at_level("WARNING", logger="pyckpt"):
        AppState({"metrics": pyckpt.MetricState(metric)}).load(pyckpt.DirectReader(tmp_path))
    assert "its extremes were not saved, and begin anew" in caplog.text
    assert metric.min_val.item() == float("inf")
