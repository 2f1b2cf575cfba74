"""Many ranks simulated in one process, for `scale.py`: real planners, writers and readers, under
real DCP, with a stand-in for its collectives.

What tells one rank from another is where it is in the mesh, so a process becomes another rank by
moving there. What would travel is pickled, and unpickled where it would arrive, as DCP's
collectives do; nothing goes over a network.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import Sample, WrongBytes, forget_peak, remove, status_bytes
from torch.distributed.checkpoint import planner_helpers, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg

import pyckpt
from pyckpt import _C
from pyckpt.dcp.global_plan import PackedResults
from pyckpt.dcp.plans import known_plans

OURS = "pyckpt"
STOCK = "stock"
STOCK_ON_OURS = "stock, our file"

ROWS, COLUMNS = 2, 8
"""Of each rank's shard of each key, in float32: so small that what remains is the description."""
SCALARS = 8
"""Tensors that all ranks have alike."""


# --- the state --------------------------------------------------------------------------------


def make_state(mesh: DeviceMesh, keys: int) -> dict[str, Any]:
    """A model and its optimizer's state as FSDP2 shards them: ``keys`` DTensors in rows over all
    ranks, `SCALARS` tensors that all have, and the hyperparameters as plain values."""
    values: dict[str, dict[str, Any]] = {"model": {}}
    state: dict[str, dict[str, Any]] = {}
    for number in range(keys):
        layer, kind = divmod(number // 3, 9)
        name = f"model.layers.{layer}.{_KINDS[kind]}.weight"
        if number % 3 == 0:
            values["model"][name] = _sharded(mesh, number)
        else:
            moment = ("exp_avg", "exp_avg_sq")[number % 3 - 1]
            state.setdefault(name, {})[moment] = _sharded(mesh, number)
    steps = {f"step.{number}": torch.tensor(float(number)) for number in range(SCALARS)}
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return {
        **values,
        "optim": {"state": state, "steps": steps, "param_groups": [group]},
        "epoch": 3,
    }


_KINDS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


def _sharded(mesh: DeviceMesh, number: int) -> DTensor:
    local = torch.full((ROWS, COLUMNS), float(number))
    shape = torch.Size((ROWS * mesh.size(), COLUMNS))
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(COLUMNS, 1)
    )


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """This rank's memory of all tensors."""
    if isinstance(state, DTensor):
        yield state._local_tensor
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


# --- the collectives --------------------------------------------------------------------------


class _Left(BaseException):
    """A rank has said what was wanted of it."""


class Costs:
    """CPU seconds, of all threads, by what they were spent on; and other figures."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.figures[f"{what}_seconds"] += time.process_time() - start


class _Rank:
    """Stands for DCP's ``_DistWrapper`` on a rank that does not coordinate.

    Args:
        answer: what the coordinator sends it in answer to its plan. Where there is none yet, the
            rank leaves when it has planned.
    """

    def __init__(self, rank: int, ranks: int, costs: Costs, answer: bytes | None = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self.costs = costs
        self.answer = answer
        self.message = b""
        """What the rank sent last."""
        self.group = None
        self.coordinator_rank = self.global_coordinator_rank = 0
        self.use_dist = True
        self.is_coordinator = rank == 0

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return self.ranks

    def barrier(self) -> None:
        pass

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], list[Any]]
    ) -> Any:
        with self.costs.of("rank_plan"):
            plan = map_fun()
            self.message = pickle.dumps(plan)
        if self.answer is None:
            raise _Left
        with self.costs.of("rank_answer"):
            return pickle.loads(self.answer)

    def all_reduce(
        self, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]
    ) -> Any:
        with self.costs.of("rank_write"):
            self.message = pickle.dumps(map_fun())
        raise _Left

    def all_gather(self, step: str, map_fun: Callable[[], Any]) -> list[Any]:
        with self.costs.of("rank_read"):
            return [map_fun()]


class _Coordinator(_Rank):
    """Stands for it on the rank that coordinates.

    Args:
        messages: the plans of the others.
        results: called with the answers to all ranks, returns what the others send when they have
            written.
    """

    def __init__(
        self,
        ranks: int,
        costs: Costs,
        messages: list[bytes],
        results: Callable[[list[bytes]], list[bytes]] = lambda answers: [],
    ) -> None:
        super().__init__(0, ranks, costs)
        self._messages = messages
        self._results = results
        self.answers: list[bytes] = []

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], list[Any]]
    ) -> Any:
        figures, costs = self.costs.figures, self.costs
        messages = [pickle.dumps(map_fun()), *self._messages]
        self._messages = []
        figures["plans_bytes"] = sum(map(len, messages))
        figures["longest_plan_bytes"] = max(map(len, messages))
        with costs.of("plans_unpickled"):
            plans = [pickle.loads(message) for message in messages]
        del messages
        with costs.of("global_plan"):
            answers = reduce_fun(plans)
        with costs.of("answers_pickled"):
            self.answers = [pickle.dumps(answer) for answer in answers]
        del plans, answers
        figures["answers_bytes"] = sum(map(len, self.answers))
        figures["longest_answer_bytes"] = max(map(len, self.answers))
        return pickle.loads(self.answers[0])

    def all_reduce(
        self, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], Any]
    ) -> Any:
        figures, costs = self.costs.figures, self.costs
        messages = [pickle.dumps(map_fun()), *self._results(self.answers)]
        self.answers = []
        figures["results_bytes"] = sum(map(len, messages))
        with costs.of("results_unpickled"):
            results = [pickle.loads(message) for message in messages]
        start = time.perf_counter()
        with costs.of("metadata"):
            outcome = reduce_fun(results)
        figures["metadata_wall_seconds"] = time.perf_counter() - start
        with costs.of("outcome_pickled"):
            figures["outcome_bytes"] = len(pickle.dumps(outcome))
        return outcome


_current: _Rank
_HELPERS: Any = planner_helpers


def _instead_of_dist_wrapper(group: object, use_dist: bool, coordinator_rank: int) -> _Rank:
    return _current


# --- the world --------------------------------------------------------------------------------


class World:
    """The ranks, and which of them this process is."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore())  # type: ignore[no-untyped-call]
        self.mesh = init_device_mesh("cpu", (ranks,))
        for module in (state_dict_saver, state_dict_loader):
            module._DistWrapper = _instead_of_dist_wrapper  # type: ignore[attr-defined]
        self._offsets = _HELPERS.compute_local_shape_and_global_offset
        self._remembered = functools.lru_cache(maxsize=None)(self._offsets_at)

    def close(self) -> None:
        _HELPERS.compute_local_shape_and_global_offset = self._offsets
        dist.destroy_process_group()

    @contextmanager
    def rank(self, stand_in: _Rank, *, is_measured: bool = True) -> Iterator[None]:
        """Be the rank that the stand-in is of. Ranks that are not measured are let off computing
        the same offsets for each of thousands of equal shapes."""
        global _current
        _current = stand_in
        mesh: Any = self.mesh
        before = mesh._coordinate_on_dim
        mesh._coordinate_on_dim = type(before)((stand_in.rank,))
        if not is_measured:
            _HELPERS.compute_local_shape_and_global_offset = self._offsets_here
        try:
            with suppress(_Left):
                yield
        finally:
            mesh._coordinate_on_dim = before
            _HELPERS.compute_local_shape_and_global_offset = self._offsets

    def _offsets_here(self, shape: Any, mesh: Any, placements: Any) -> Any:
        return self._remembered(shape, placements, mesh.get_coordinate()[0])

    def _offsets_at(self, shape: Any, placements: Any, rank: int) -> Any:
        return self._offsets(shape, self.mesh, placements)


@contextmanager
def world(ranks: int) -> Iterator[World]:
    made = World(ranks)
    try:
        yield made
    finally:
        made.close()


# --- saving -----------------------------------------------------------------------------------


class _Saves:
    """Saves of one state, by simulated ranks."""

    def __init__(self, variant: str, world: World, keys: int) -> None:
        self._is_ours = variant == OURS
        self._world = world
        self._state = make_state(world.mesh, keys)
        self._items = 0  # of each rank's plan
        # What ranks remember: of the first two, and of those that stand for others.
        self._known: dict[int, Any] = {}
        self._stands_for: dict[int, int] = {}  # rank -> the rank whose results are like its own

    def step(self) -> None:
        """Training goes on."""
        for tensor in _tensors(self._state):
            tensor.add_(1)

    def first(self, path: Path) -> dict[str, float]:
        """A save of which nobody knows anything."""
        ranks, rank_1 = self._world.ranks, Costs()
        messages = [
            self._save(path, _Rank(rank, ranks, rank_1 if rank == 1 else Costs())).message
            for rank in range(1, ranks)
        ]
        self._items = len(pickle.loads(messages[0]).items)
        return self._coordinate(path, messages, self._write_first, rank_1)

    def second(self, path: Path) -> dict[str, float]:
        """A save whose plan all know."""
        ranks, rank_1 = self._world.ranks, Costs()
        of_first = self._save(path, _Rank(1, ranks, rank_1)).message
        messages = [of_first, *(_sent_by(rank, of_first) for rank in range(2, ranks))]
        return self._coordinate(path, messages, self._write_again, rank_1)

    def _coordinate(
        self,
        path: Path,
        messages: list[bytes],
        write: Callable[[Path, list[bytes], Costs], list[bytes]],
        rank_1: Costs,
    ) -> dict[str, float]:
        costs = Costs()
        # It plans again before it writes; and then not in a process of its own.
        planned = rank_1.figures["rank_plan_seconds"]

        def results(answers: list[bytes]) -> list[bytes]:
            return write(path, answers, rank_1)

        coordinator = _Coordinator(self._world.ranks, costs, messages, results)
        del messages
        gc.collect()
        forget_peak()
        self._save(path, coordinator)
        figures = dict(costs.figures)
        figures["peak_bytes"] = status_bytes("VmHWM")
        metadata = path / ".metadata"
        figures["metadata_bytes"] = metadata.stat().st_size
        figures |= _bare_write(metadata)
        stages = ("plans_unpickled", "global_plan", "answers_pickled", "results_unpickled")
        figures["without_metadata_seconds"] = sum(figures[f"{stage}_seconds"] for stage in stages)
        figures["coordinator_seconds"] = (
            figures["without_metadata_seconds"] + figures["metadata_seconds"]
        )
        figures |= rank_1.figures
        figures["rank_plan_seconds"] = planned
        figures["rank_seconds"] = sum(
            figures[f"rank_{part}_seconds"] for part in ("plan", "answer", "write")
        )
        return figures

    def _save(self, path: Path, stand_in: Any) -> Any:
        """Save as a rank; return its stand-in."""
        rank = stand_in.rank
        planner: Any
        writer: Any
        if self._is_ours:
            # Other processes remember what this one must not.
            known_plans.clear()
            if rank in self._known:
                known_plans.keep(self._known[rank].name, self._known[rank])
            planner, writer = pyckpt.SavePlanner(), pyckpt.DirectWriter(path, sync_files=False)
        else:
            planner = DefaultSavePlanner()
            writer = FileSystemWriter(path, sync_files=False, thread_count=1)
        with self._world.rank(stand_in, is_measured=rank < 2):
            state_dict_saver._save_state_dict(
                self._state, storage_writer=writer, planner=planner, no_dist=False
            )
        if self._is_ours and planner.known is not None and rank not in self._known:
            self._known[rank] = planner.known
        return stand_in

    def _write_first(self, path: Path, answers: list[bytes], rank_1: Costs) -> list[bytes]:
        """What the other ranks send when they have written. Those whose answers are alike write
        alike: one of them does, and the others' files are links to its own."""
        models: dict[Any, tuple[int, bytes]] = {}
        messages = []
        for rank, answer in enumerate(answers[1:], 1):
            kind = _kind_of(answer, self._items) if self._is_ours else rank
            if kind in models:
                self._stands_for[rank], message = models[kind]
                message = _written_by(rank, self._stands_for[rank], message, path)
            else:
                message = self._write(path, rank, answer, rank_1)
                models[kind] = rank, message
            messages.append(message)
        return messages

    def _write_again(self, path: Path, answers: list[bytes], rank_1: Costs) -> list[bytes]:
        messages: list[bytes] = []
        for rank, answer in enumerate(answers[1:], 1):
            model = self._stands_for.get(rank)
            if model is None:
                messages.append(self._write(path, rank, answer, rank_1))
            else:
                messages.append(_written_by(rank, model, messages[model - 1], path))
        return messages

    def _write(self, path: Path, rank: int, answer: bytes, rank_1: Costs) -> bytes:
        """Plan as a rank once more, take the answer, write; return what the rank sends."""
        costs = rank_1 if rank == 1 else Costs()
        message: bytes = self._save(path, _Rank(rank, self._world.ranks, costs, answer)).message
        return message


def _kind_of(answer: bytes, items: int) -> bytes:
    """Which of its items a rank is to write, by the answer to its plan: a byte each."""
    answered = pickle.loads(answer).planner_data.answer
    return bytes(number > 0 for number in _C.unpack_answer(answered, items))


def _sent_by(rank: int, message: bytes) -> bytes:
    """What a rank sends that sends the name of a known plan, from what another sends."""
    plan = pickle.loads(message)
    return pickle.dumps(
        replace(
            plan,
            planner_data=plan.planner_data._replace(rank=rank),
            storage_data=replace(plan.storage_data, rank=rank),
        )
    )


def _written_by(rank: int, model: int, message: bytes, path: Path) -> bytes:
    """What a rank sends that has written what another has; its file is a link to the other's."""
    results = pickle.loads(message)
    if not isinstance(results, PackedResults):
        assert results == []
        return message
    name = results.file.replace(f"__{model}_", f"__{rank}_", 1)
    os.link(path / results.file, path / name)
    turn = results.turn._replace(rank=rank)
    return pickle.dumps(PackedResults(turn, name, results.size, results.data, results.against))


def _bare_write(path: Path) -> dict[str, float]:
    """What it takes to write a file of as many bytes, and have it durable."""
    content = path.read_bytes()
    copied = path.with_name("copied")
    start, cpu = time.perf_counter(), time.process_time()
    with open(copied, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    figures = {
        "bare_write_wall_seconds": time.perf_counter() - start,
        "bare_write_seconds": time.process_time() - cpu,
    }
    copied.unlink()
    return figures


def save(_: int, variant: str, ranks: int, keys: int, directory: Path) -> dict[str, Sample]:
    """Two saves of one state, the second by the plan of the first; in a process of its own. The
    second checkpoint stays in ``directory / "second"``. (Stock would plan again as it did: it saves
    once, and its checkpoint is taken for the second.)"""
    _warm(variant, directory)
    samples = {}
    with world(ranks) as here:
        saves = _Saves(variant, here, keys)
        gc.collect()
        before = status_bytes("VmRSS")
        if variant == OURS:
            samples["first"] = saves.first(directory / "first")
            remove(directory / "first")
            saves.step()
            samples["second"] = saves.second(directory / "second")
        else:
            saves.step()
            samples["first"] = saves.first(directory / "second")
        for sample in samples.values():
            sample["peak_growth_bytes"] = sample.pop("peak_bytes") - before
    return samples


def _warm(variant: str, directory: Path) -> None:
    """Import and make what is imported and made once, so that it is not measured."""
    with world(2) as here:
        _Saves(variant, here, 3).first(directory / "warm")
        _load_as_rank_1(variant, here, _zeros(here.mesh, 3), directory / "warm", Costs())
    remove(directory / "warm")


# --- loading ----------------------------------------------------------------------------------


def load(_: int, variant: str, ranks: int, keys: int, directory: Path) -> dict[str, Sample]:
    """A load, into zeros, of what `save` left; in a process of its own. All ranks but one are taken
    to send what rank 1 sends."""
    _warm(OURS if variant == OURS else STOCK, directory)
    path = directory / "second"
    with world(ranks) as here:
        costs = Costs()
        state = _zeros(here.mesh, keys)
        gc.collect()
        forget_peak()
        before = status_bytes("VmRSS")
        message = _load_as_rank_1(variant, here, state, path, costs)
        growth = status_bytes("VmHWM") - before
        coordinator = _Coordinator(
            ranks, costs, [bytes(bytearray(message)) for _ in range(ranks - 1)]
        )
        with here.rank(coordinator):
            _load(variant, _zeros(here.mesh, keys), path, Costs())
        check_loaded(state, variant)
    figures = dict(costs.figures)
    figures["plan_bytes"] = len(message)
    figures["peak_growth_bytes"] = growth
    figures["metadata_bytes"] = (path / ".metadata").stat().st_size
    figures["rank_seconds"] = figures["decode_seconds"] + figures["rank_plan_seconds"]
    return {"load": figures}


def _load_as_rank_1(
    variant: str, here: World, state: dict[str, Any], path: Path, costs: Costs
) -> bytes:
    """Load as rank 1, as if the coordinator had sent the plan back as it was; return the plan."""
    rank_1 = _Answered(1, here.ranks, costs)
    with here.rank(rank_1):
        _load(variant, state, path, costs)
    return rank_1.message


class _Answered(_Rank):
    """A rank that has its own plan back."""

    def reduce_scatter(
        self, step: str, map_fun: Callable[[], Any], reduce_fun: Callable[[list[Any]], list[Any]]
    ) -> Any:
        decoded = self.costs.figures["decode_seconds"]
        with self.costs.of("rank_plan"):
            plan = map_fun()
            self.message = pickle.dumps(plan)
        # The metadata was read meanwhile.
        self.costs.figures["rank_plan_seconds"] -= self.costs.figures["decode_seconds"] - decoded
        [answer] = reduce_fun([pickle.loads(self.message)])
        answer = pickle.dumps(answer)
        with self.costs.of("rank_answer"):
            return pickle.loads(answer)


def _load(variant: str, state: dict[str, Any], path: Path, costs: Costs) -> None:
    reader: Any = pyckpt.DirectReader(path) if variant == OURS else FileSystemReader(path)
    read_metadata = reader.read_metadata

    @functools.wraps(read_metadata)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with costs.of("decode"):
            return read_metadata(*args, **kwargs)

    reader.read_metadata = timed
    if variant == OURS:
        pyckpt.load(state, reader=reader)
    else:
        state_dict_loader._load_state_dict(
            state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=False
        )


def _zeros(mesh: DeviceMesh, keys: int) -> dict[str, Any]:
    state = make_state(mesh, keys)
    for tensor in _tensors(state):
        tensor.zero_()
    [group] = state["optim"]["param_groups"]
    group.update(dict.fromkeys(group, 0.0))
    state["epoch"] = 0
    return state


def check_loaded(state: dict[str, Any], variant: str) -> None:
    """Raise WrongBytes unless a state is what `save` left."""
    mesh = next(iter(state["model"].values())).device_mesh
    expected = make_state(mesh, sum(1 for t in _tensors(state)) - SCALARS)
    for found, value in zip(_tensors(state), _tensors(expected), strict=True):
        if not torch.equal(found, value + 1):
            raise WrongBytes(f"{variant} loaded {found}, and {value + 1} was saved")
    for name in ("param_groups", "epoch"):
        found, value = (where["optim"].get(name, where["epoch"]) for where in (state, expected))
        if found != value:
            raise WrongBytes(f"{variant} loaded {found} as {name}, and {value} was saved")
