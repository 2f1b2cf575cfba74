"""Checkpointer on 1 to 4 ranks of gloo: all do the same things, whatever happens to one."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _ranks import run_ranks
from _sampling import slow
from _training import Run
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pyckpt
from pyckpt import Checkpointer
from pyckpt.errors import CorruptCheckpoint, LoadError, SaveError
from pyckpt.train.saver import Saver
from pyckpt.train.state import app_state
from pyckpt.train.store import catalog


def steps_of(checkpointer: Checkpointer) -> list[int]:
    return [checkpoint.step for checkpoint in checkpointer.checkpoints()]


# --- saved on some, restored on others ------------------------------------------------------------


def _wrapped(how: str, optimizer: type[torch.optim.Optimizer]) -> Run:
    run = Run(optimizer)
    if how == "ddp":
        run.model = DistributedDataParallel(run.model)  # type: ignore[assignment]
    elif how == "fsdp2":
        fully_shard(run.model)
        run.optimizer = optimizer(run.model.parameters(), lr=0.05)  # type: ignore[call-arg]
    return run


def _full(model: torch.nn.Module) -> list[list[float]]:
    tensors = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [tensor.flatten().tolist() for tensor in tensors]


def _train(
    directory: Path, how: str, optimizer: type[torch.optim.Optimizer], start: int | None, stop: int
) -> list[list[float]]:
    run = _wrapped(how, optimizer)
    with Checkpointer(directory, every_steps=4, when_busy="wait") as checkpointer:
        assert checkpointer.restore(run.state) == start
        for step in range((start or 0) + 1, stop + 1):
            generator = torch.Generator().manual_seed(step)
            # The same on all ranks, so that their number makes no difference to the gradients.
            run.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            checkpointer.step(step, run.state)
    return _full(run.model)


@pytest.mark.parametrize(
    ("ranks", "how", "then", "how_then"),
    [
        slow(1, "plain", 3, "ddp"),
        slow(2, "ddp", 1, "plain"),
        (4, "fsdp2", 3, "fsdp2"),
        slow(3, "fsdp2", 2, "ddp"),
    ],
)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, slow(torch.optim.NAdam)])
def test_from_one_number_of_ranks_to_another(
    ranks: int,
    how: str,
    then: int,
    how_then: str,
    optimizer: type[torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    run_ranks(ranks, _train, tmp_path / "run", how, optimizer, None, 6)
    found = run_ranks(then, _train, tmp_path / "run", how_then, optimizer, 4, 8)
    (whole,) = run_ranks(1, _train, tmp_path / "whole", "plain", optimizer, None, 8)
    for of_rank in found:
        for values, expected in zip(of_rank, whole, strict=True):
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- together -------------------------------------------------------------------------------------


def _loop(checkpointer: Checkpointer, run: Run, steps: range) -> list[int]:
    """Train in lockstep; the steps at which something was saved."""
    saved = []
    for step in steps:
        run.train(step)
        if checkpointer.step(step, run.state) is not None:
            saved.append(step)
        if checkpointer.stop_requested:
            break
    return saved


def _stop_of_one(directory: Path, who: int) -> tuple[list[int], int]:
    run = Run()
    with Checkpointer(directory, every_steps=1000) as checkpointer:
        saved = _loop(checkpointer, run, range(1, 21))
        if dist.get_rank() == who:
            checkpointer.request_stop()
        saved += _loop(checkpointer, run, range(21, 100_000))
        assert checkpointer.stop_requested
    with Checkpointer(directory) as checkpointer:
        newest = checkpointer.latest()
        assert newest is not None
        return saved, newest.step


@pytest.mark.parametrize(("ranks", "who"), [slow(1, 0), slow(2, 1), (3, 0), slow(4, 2)])
def test_one_rank_that_is_to_stop_stops_all(ranks: int, who: int, tmp_path: Path) -> None:
    results = run_ranks(ranks, _stop_of_one, tmp_path, who)
    assert len(set(map(str, results))) == 1
    saved, newest = results[0]
    assert saved == [newest]
    assert newest > 20


def _requests(directory: Path) -> list[int]:
    run = Run()
    with Checkpointer(directory) as checkpointer:
        saved: list[int] = []
        step = 0
        for _ in range(3):
            if dist.get_rank() == 1:
                checkpointer.request_save()
            before = len(saved)
            while len(saved) == before:
                step += 1
                saved += _loop(checkpointer, run, range(step, step + 1))
        checkpointer._saver.wait()
        assert steps_of(checkpointer) == saved
        return saved


def test_one_rank_may_ask_for_a_save(tmp_path: Path) -> None:
    first, second = run_ranks(2, _requests, tmp_path)
    assert first == second
    assert len(first) == 3


def _requests_in_turn(directory: Path) -> int:
    run = Run()
    step = 0
    with Checkpointer(directory) as checkpointer:
        for who in (1, 1, 0, 1, 0):
            if dist.get_rank() == who:
                checkpointer.request_save()
            step = _until_saved(checkpointer, run, step)
    return step


def _until_saved(checkpointer: Checkpointer, run: Run, step: int) -> int:
    """Train until something is saved, but not for ever; commit it."""
    for at in range(step + 1, step + 20_000):
        if _loop(checkpointer, run, range(at, at + 1)):
            checkpointer._saver.wait()
            return at
    raise AssertionError("nothing was saved")


@pytest.mark.slow
def test_ranks_may_ask_in_turn(tmp_path: Path) -> None:
    first, second = run_ranks(2, _requests_in_turn, tmp_path)
    assert first == second


def _requests_after_going_back(directory: Path) -> int:
    run = Run()
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(10, run.state).wait()
        checkpointer.step(1_000_000, run.state)
        if dist.get_rank() == 1:
            checkpointer.request_save()
        agreement: Any = checkpointer._agreement
        with agreement._condition:  # until it is known from when on the request counts
            assert agreement._condition.wait_for(
                lambda: any(facts.requests for _, facts in agreement._coming), 60
            )
        assert checkpointer.restore(run.state, step=10) == 10
        return _until_saved(checkpointer, run, 10)


@pytest.mark.slow
def test_requests_after_going_back(tmp_path: Path) -> None:
    first, second = run_ranks(2, _requests_after_going_back, tmp_path)
    assert first == second < 1_000_000


def _minutes_after_a_request(directory: Path) -> int:
    run = Run()
    with Checkpointer(directory, every_minutes=60) as checkpointer:
        if dist.get_rank() == 1:
            checkpointer.request_save()
        step = _until_saved(checkpointer, run, 0)
        checkpointer._requests.saved_at -= 3600.0
        return _until_saved(checkpointer, run, step)


@pytest.mark.slow
def test_the_clock_goes_on_after_a_request(tmp_path: Path) -> None:
    first, second = run_ranks(2, _minutes_after_a_request, tmp_path)
    assert first == second


def _minutes(directory: Path) -> list[int]:
    run = Run()
    # By the clocks of the others it would be due at every step.
    minutes = 0.2 / 60 if dist.get_rank() == 0 else 1e-9
    with Checkpointer(directory, every_minutes=minutes) as checkpointer:
        saved: list[int] = []
        step = 0
        while len(saved) < 2:
            step += 1
            saved += _loop(checkpointer, run, range(step, step + 1))
    return saved


def test_the_clock_of_rank_0_counts(tmp_path: Path) -> None:
    first, second = run_ranks(2, _minutes, tmp_path)
    assert first == second


def _busy(directory: Path) -> tuple[list[int], int]:
    """The first save is held on rank 0 until step 35."""
    gate = threading.Event()
    finish = pyckpt.DirectWriter.finish

    def held(*arguments: Any, **options: Any) -> None:
        assert gate.wait(60)
        finish(*arguments, **options)

    pyckpt.DirectWriter.finish = held  # type: ignore[method-assign]
    run = Run()
    with Checkpointer(directory, every_steps=10) as checkpointer:
        saved = _loop(checkpointer, run, range(1, 36))
        gate.set()
        step = 36
        while len(saved) < 2:
            saved += _loop(checkpointer, run, range(step, step + 1))
            step += 1
        skipped = checkpointer.statistics.skipped
    return saved, skipped


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_all_leave_out_the_same_saves(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(ranks, _busy, tmp_path)
    assert len(set(map(str, results))) == 1
    saved, skipped = results[0]
    assert saved[0] == 10
    assert saved[1] >= 40
    assert skipped == (saved[1] - saved[0]) // 10 - 1


def _subgroup(directory: Path) -> int | None:
    groups = [dist.new_group([0, 2], backend="gloo"), dist.new_group([1], backend="gloo")]
    group = groups[dist.get_rank() % 2]
    run = Run()
    name = "pair" if dist.get_rank() % 2 == 0 else "single"
    with Checkpointer(directory / name, process_group=group, every_steps=2) as checkpointer:
        checkpointer.save(3 + dist.get_rank() % 2, run.state)
        assert checkpointer.step(5, run.state) is None
        checkpointer._saver.wait()
        return checkpointer.restore(run.state)


def test_groups_of_ranks_each_with_its_own(tmp_path: Path) -> None:
    assert run_ranks(3, _subgroup, tmp_path) == [3, 4, 3]


# --- failures -------------------------------------------------------------------------------------


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


def _tree_fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("no state on this rank")


def _failing(directory: Path, where: str) -> tuple[int, str, list[int]]:
    """Rank 1 fails in its second save. When does who learn of it, and what is there afterwards?"""
    run = Run()
    owner, name, failure = {
        "writing": (pyckpt.DirectWriter, "write_data", _full_disk),
        "state": (Saver, "_tree", _tree_fails),
    }[where]
    working = getattr(owner, name)
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(10, run.state).wait()
        if dist.get_rank() == 1:
            setattr(owner, name, failure)
        checkpointer.step(19, run.state)
        checkpointer.request_save()
        step, told = 19, ""
        while not told:
            step += 1
            run.train(step)
            try:
                checkpointer.step(step, run.state)
            except (OSError, SaveError) as error:
                told = f"{type(error).__name__}: {error}"
        setattr(owner, name, working)
        checkpointer.save(1_000_000, run.state)
        checkpointer._saver.wait()
        return step, told, steps_of(checkpointer)


@pytest.mark.parametrize("where", ["writing", slow("state")])
@pytest.mark.parametrize("ranks", [slow(2), 3])
def test_the_failure_of_one_is_raised_on_all_at_the_same_step(
    where: str, ranks: int, tmp_path: Path
) -> None:
    results = run_ranks(ranks, _failing, tmp_path, where)
    assert len({step for step, _, _ in results}) == 1
    for _, told, steps in results:
        assert {"writing": "No space", "state": "no state on this rank"}[where] in told
        assert steps == [10, 1_000_000]


class Unmakeable(RuntimeError):
    """Cannot be made again from its arguments, as pickle does."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


class UnmakeableOSError(OSError):
    def __init__(self, *, what: str) -> None:
        super().__init__(28, what, "somewhere")


class UnmakeableSaveError(SaveError):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


def _unpicklable() -> RuntimeError:
    error = RuntimeError("no state today")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


_ODD: dict[str, Callable[[], Exception]] = {
    "Unmakeable": lambda: Unmakeable(7, "no state today"),
    "UnmakeableOSError": lambda: UnmakeableOSError(what="no state today"),
    "UnmakeableSaveError": lambda: UnmakeableSaveError(7, "no state today"),
    "RuntimeError": _unpicklable,
}


class OddValue:
    """Fails in its own way when it is written."""

    def __init__(self, which: str) -> None:
        self.which = which

    def __reduce__(self) -> Any:
        raise _ODD[self.which]()

    def __deepcopy__(self, memo: Any) -> OddValue:
        return self


class Odd:
    """A part of the state that fails in its own way, in the call or when it is written."""

    def __init__(self, which: str, when: str) -> None:
        self.which = which
        self.when = when

    def state_dict(self) -> dict[str, Any]:
        if self.when == "called":
            raise _ODD[self.which]()
        return {"odd": OddValue(self.which) if self.when == "written" else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _odd_errors(directory: Path, when: str, who: int | None) -> list[BaseException | None]:
    run = Run()
    found: list[BaseException | None] = []
    torch.serialization.add_safe_globals([OddValue])
    with Checkpointer(directory) as checkpointer:
        for number, which in enumerate(_ODD):
            odd = Odd(which, when if who in (None, dist.get_rank()) else "")
            handle = checkpointer.save(number, {**run.state, "odd": odd})
            found.append(handle.committed.exception(timeout=30))
            with suppress(OSError, SaveError):
                checkpointer._saver.raise_failure()
        checkpointer.save(99, {**run.state, "odd": Odd("", "")}).wait()
        assert steps_of(checkpointer) == [99]
    return found


@pytest.mark.parametrize(("when", "who"), [slow("called", 0), ("called", 1), ("written", None)])
def test_errors_of_one_rank_that_do_not_pickle(when: str, who: int | None, tmp_path: Path) -> None:
    for found in run_ranks(2, _odd_errors, tmp_path, when, who):
        for which, error in zip(_ODD, found, strict=True):
            assert type(error) in (OSError, SaveError), error
            assert isinstance(error, OSError) == (which == "UnmakeableOSError")
            assert f"{which}: " in str(error)
            assert "no state today" in str(error)
            assert ("rank" if who is None else f"rank {who}") in str(error)


# --- restoring ------------------------------------------------------------------------------------


def _save(directory: Path, *steps: int) -> None:
    run = Run()
    with Checkpointer(directory) as checkpointer:
        for step in steps:
            run.train(step)
            checkpointer.save(step, run.state)


def _sees_less(directory: Path, hidden: dict[int, list[int]]) -> tuple[int | None, str]:
    all_steps = catalog.Catalog.steps
    mine = hidden.get(dist.get_rank(), [])
    catalog.Catalog.steps = lambda self: [  # type: ignore[method-assign]
        step for step in all_steps(self) if step not in mine
    ]
    run = Run()
    with Checkpointer(directory) as checkpointer:
        try:
            return checkpointer.restore(run.state), ""
        except (LoadError, FileNotFoundError) as error:
            return None, str(error)


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [slow({}, 4), slow({1: [4]}, 3), ({0: [4], 1: [3]}, 2), ({0: [3, 4], 2: [1, 2]}, None)],
)
def test_ranks_that_see_less(
    hidden: dict[int, list[int]], expected: int | None, tmp_path: Path
) -> None:
    run_ranks(1, _save, tmp_path, 1, 2, 3, 4)
    results = run_ranks(3, _sees_less, tmp_path, hidden)
    assert [step for step, _ in results] == [expected] * 3
    for _, message in results:
        assert ("is it the same directory" in message) == (expected is None)


def _corrupt_for(directory: Path, who: int, kind: type[Exception]) -> tuple[int | None, bool]:
    load = app_state.AppState.load

    def failing(self: app_state.AppState, reader: Any, **options: Any) -> Any:
        report = load(self, reader, **options)
        if dist.get_rank() == who and reader.path.name != "step-00000001":
            raise kind("damaged, as this rank reads it")
        return report

    app_state.AppState.load = failing  # type: ignore[method-assign]
    run, expected = Run(), Run()
    expected.train(1, alone=True)
    with Checkpointer(directory) as checkpointer:
        step = checkpointer.restore(run.state)
    return step, run.equals(expected)


@pytest.mark.parametrize("kind", [CorruptCheckpoint, slow(OSError)])
def test_what_is_corrupt_for_one_is_passed_over_by_all(
    kind: type[Exception], tmp_path: Path
) -> None:
    run_ranks(1, _save, tmp_path, 1, 2, 3)
    assert run_ranks(3, _corrupt_for, tmp_path, 1, kind) == [(1, True)] * 3


def _damaged_shard(directory: Path) -> tuple[int | None, bool]:
    """Every rank reads its own part, and one part of the newest is damaged."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model)
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(float(step))
            checkpointer.save(step, {"model": model})
        checkpointer._saver.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            (file,) = (directory / "step-00000002").glob("__1_*.distcp")
            data = bytearray(file.read_bytes())
            data[4096] ^= 1
            file.write_bytes(data)
        dist.barrier()
        step = checkpointer.restore({"model": model})
        return step, bool((model.weight.full_tensor() == float(step or 0)).all())


def test_a_damaged_shard(tmp_path: Path) -> None:
    assert run_ranks(3, _damaged_shard, tmp_path) == [(1, True)] * 3


def _save_sharded(directory: Path) -> None:
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model)
    with Checkpointer(directory) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                model.weight.fill_(float(step))
            checkpointer.save(step, {"model": model, "objects": {"step": step}})


def _restore_sharded(directory: Path) -> tuple[int | None, bool, list[str]]:
    model = torch.nn.Linear(64, 64, bias=False)
    fully_shard(model)
    with Checkpointer(directory) as checkpointer:
        step = checkpointer.restore({"model": model, "objects": {}})
        assert checkpointer.load_report is not None
        return (
            step,
            bool((model.weight.full_tensor() == float(step or 0)).all()),
            checkpointer.load_report.not_verified,
        )


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [None, 0, 1])
def test_damage_in_what_each_rank_reads_a_part_of(damaged: int | None, tmp_path: Path) -> None:
    run_ranks(2, _save_sharded, tmp_path)
    if damaged is not None:
        (file,) = (tmp_path / "step-00000002").glob(f"__{damaged}_*.distcp")
        data = bytearray(file.read_bytes())
        data[4096] ^= 1
        file.write_bytes(data)
    expected = 2 if damaged is None else 1
    assert run_ranks(4, _restore_sharded, tmp_path) == [(expected, True, [])] * 4


# --- keeping, exporting, leaving ------------------------------------------------------------------


def _prunes(directory: Path) -> tuple[list[int], int]:
    run = Run()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyckpt").addHandler(handler)
    with Checkpointer(directory) as earlier:
        earlier.save(9, run.state, metrics={"loss": 0.0})
    checkpointer = Checkpointer(
        directory, keep_last=2, keep_best=("loss", 1, "min"), every_steps=1, when_busy="wait"
    )
    with checkpointer:
        for step in range(1, 7):
            # Those of rank 0 count: the best is step 3.
            loss = abs(step - 3.0) if dist.get_rank() == 0 else float(step)
            checkpointer.step(step, run.state, metrics={"loss": loss})
    # 9 is of an earlier run, beside which this one has begun anew.
    told = sum("training begins at step 1 or before, and" in text for text in said)
    assert told == (dist.get_rank() == 0)
    with Checkpointer(directory) as after:
        return steps_of(after), checkpointer.statistics.pruned


def test_rank_0_prunes(tmp_path: Path) -> None:
    left = [3, 5, 6, 9]
    assert run_ranks(3, _prunes, tmp_path) == [(left, 3), (left, 0), (left, 0)]


def _exports(directory: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 5))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    with Checkpointer(directory / "run") as checkpointer:
        checkpointer.save(1, {"model": model}, final=True)
        if dist.get_rank() == 1:
            from safetensors.torch import load_file

            (file,) = checkpointer.export(directory / "out")
            exported = load_file(file)
            assert exported.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(exported[name], tensor)


def test_any_rank_exports(tmp_path: Path) -> None:
    run_ranks(3, _exports, tmp_path)
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def _one_raises(directory: Path) -> str:
    run = Run()
    try:
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(1, run.state)
            if dist.get_rank() == 1:
                raise ZeroDivisionError
    except ZeroDivisionError:
        return "raised"
    return "closed"


def test_a_rank_that_raises_holds_up_nobody(tmp_path: Path) -> None:
    assert run_ranks(3, _one_raises, tmp_path) == ["closed", "raised", "closed"]
    assert (tmp_path / "step-00000001" / ".metadata").exists()
