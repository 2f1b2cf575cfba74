"""The step guard: no optimizer's step overtakes the copies."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _forks import status_of_child
from _ranks import run_ranks
from _sampling import sampled, slow
from _staging import (
    RING,
    check_saved,
    engine,
    frozen,
    overwrite,
    same,
    slowed,
    wait_given_back,
    writer_to,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pyckpt
from pyckpt import _C, guard
from pyckpt.dcp.staging import Staging

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.Adam, {"foreach": False}),
    (torch.optim.Adam, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.fixture(scope="module")
def small_engine() -> Any:
    with engine(io_threads=1, max_pinned_bytes=256 << 20) as made:
        yield made


def strided_model() -> torch.nn.Module:
    """With parameters that take long to copy: their memory is gathered in short pieces."""
    model = torch.nn.Module()
    model.columns = torch.nn.Parameter(torch.rand(500, 501)[:, ::2])
    model.large = torch.nn.Parameter(torch.rand(1 << 18))
    for i in range(20):
        model.register_parameter(f"small{i}", torch.nn.Parameter(torch.rand(30 + i)))
    return model


def give_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)


def state_of(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """The live tensors, and not copies of them."""
    return {
        "model": dict(model.state_dict()),
        "optimizers": {f"{i}": optimizer.state_dict() for i, optimizer in enumerate(optimizers)},
    }


@pytest.mark.parametrize(("make", "options"), sampled(OPTIMIZERS, 3))
def test_step_right_after_the_call(
    tmp_path: Path, small_engine: pyckpt.Engine, make: Any, options: dict[str, Any]
) -> None:
    model = strided_model()
    optimizer = make(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    for turn in range(2):
        give_gradients(model)
        state = {**state_of(model, optimizer), "scheduler": scheduler.state_dict()}
        before = frozen(state)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=small_engine)
        with slowed(small_engine):
            future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
            optimizer.step()
        scheduler.step()
        future.result()
        check_saved(before, tmp_path / str(turn))
    assert not same(frozen(state["model"]), before["model"])  # a step did change it


def test_tensor_learning_rate_is_no_optimizer_state(
    tmp_path: Path, small_engine: pyckpt.Engine
) -> None:
    """Schedulers change it, and no step is asked."""
    parameter = torch.nn.Parameter(torch.rand(1 << 20))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(0.5), foreach=False)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    state = {"weight": parameter, "lr": optimizer.param_groups[0]["lr"]}
    before = frozen(state)
    writer = writer_to(tmp_path, stager=stager, engine=small_engine)
    future = dcp.async_save(state, storage_writer=writer)
    state["lr"].fill_(0.25)
    future.result()
    check_saved(before, tmp_path)


def test_several_optimizers(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """Any step waits, also of an optimizer that the stager was not told of."""
    model = strided_model()
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD(parameters[:1], lr=0.1, momentum=0.9),
        torch.optim.AdamW(parameters[1:], lr=0.1),
    ]
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=optimizers)
    stranger = torch.optim.SGD(parameters, lr=0.1)
    for turn in range(3):
        give_gradients(model)
        state = state_of(model, *optimizers)
        before = frozen(state)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=small_engine)
        with slowed(small_engine):
            future = dcp.async_save(state, storage_writer=writer)
            stranger.step()
            for optimizer in optimizers:
                optimizer.step()
        future.result()
        check_saved(before, tmp_path / str(turn))


def compiled_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    step: Any = torch.compile(optimizer.step, backend="eager")

    def train() -> None:
        give_gradients(model)
        step()

    return train


def compiled_loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """All of a training step compiled, as one function."""

    def train() -> None:
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in model.parameters())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()

    compiled: Any = torch.compile(train, backend="eager")
    return compiled


# Of torch itself, when it first traces a step.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [slow(compiled_step), slow(compiled_loop)])
def test_saves_are_no_reason_to_compile_again(
    tmp_path: Path, small_engine: pyckpt.Engine, compiled: Callable[..., Callable[[], object]]
) -> None:
    """More saves than dynamo compiles a function for, each with another tuple of copies to wait
    for; the compiled steps wait for them all the same."""
    torch._dynamo.reset()
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    train = compiled(model, optimizer)
    for _ in range(3):
        train()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for turn in range(torch._dynamo.config.recompile_limit + 2):
            state = state_of(model, optimizer)
            before = frozen(state)
            writer = writer_to(tmp_path / str(turn), stager=stager, engine=small_engine)
            with slowed(small_engine):
                future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
                train()
            future.result()
            check_saved(before, tmp_path / str(turn))
            train()
    assert not torch._dynamo.utils.counters["frames"]
    assert not same(frozen(state["model"]), before["model"])


def test_steps_by_hand(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    model = strided_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    for way in ["writer", "stager", "block"]:
        state = dict(model.state_dict())
        before = frozen(state)
        writer = writer_to(tmp_path / way, stager=stager, engine=small_engine)
        with slowed(small_engine):
            future = dcp.async_save(state, storage_writer=writer)
            if way == "writer":
                writer.wait_staged()
                overwrite(state)
            elif way == "stager":
                stager.wait_staged()
                overwrite(state)
            else:
                with stager.guard():
                    overwrite(state)
        future.result()
        check_saved(before, tmp_path / way)
        writer.wait_staged()  # and when all is over, and
    stager.wait_staged()  # again


def test_steps_of_other_state_do_no_harm(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    """What no given optimizer owns is copied before the call returns, guarded steps or not."""
    model = strided_model()
    other = torch.optim.SGD([torch.nn.Parameter(torch.rand(2))])
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[other])
    state = dict(model.state_dict())
    before = frozen(state)
    writer = writer_to(tmp_path, stager=stager, engine=small_engine)
    with slowed(small_engine):
        future = dcp.async_save(state, storage_writer=writer)
        overwrite(state)
    future.result()
    check_saved(before, tmp_path)


def test_lazily_made_optimizer_state(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    model = strided_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    for turn in range(3):
        state = state_of(model, optimizer)
        before = frozen(state)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer)
        give_gradients(model)
        optimizer.step()
        future.result()
        check_saved(before, tmp_path / str(turn))


def test_state_dict_of_dcp(tmp_path: Path, small_engine: pyckpt.Engine) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.BatchNorm1d(700))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    for turn in range(3):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        before = frozen(state)
        writer = writer_to(tmp_path / str(turn), stager=stager, engine=small_engine)
        future = dcp.async_save(state, storage_writer=writer, planner=pyckpt.SavePlanner())
        model(torch.rand(4, 300)).sum().backward()
        optimizer.step()
        future.result()
        check_saved(before, tmp_path / str(turn))


def zero_redundancy(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own use of what it deprecates
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = strided_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    with engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        for turn in range(3):
            give_gradients(model)
            state = {"model": dict(model.state_dict()), "inner": dict(optimizer.optim.state_dict())}
            before = frozen(state)
            writer = writer_to(path / str(turn), stager=stager, engine=own)
            future = dcp.async_save(state, storage_writer=writer)
            optimizer.step()
            future.result()
            check_saved(before, path / str(turn))


@pytest.mark.slow
def test_zero_redundancy_optimizer(tmp_path: Path) -> None:
    run_ranks(1, zero_redundancy, tmp_path)


class Gated(pyckpt.DirectWriter):
    """Writes when it is let."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, sync_files=False, **options)
        self.gate = threading.Event()
        self.reached = threading.Event()

    def prepare_local_plan(self, plan: Any) -> Any:
        self.reached.set()
        assert self.gate.wait(60)
        return super().prepare_local_plan(plan)


@pytest.fixture
def opens_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lets a save write as soon as something waits for its end; so what does not wait is not
    overtaken by chance."""
    writers: list[Gated] = []
    original = Staging.wait_released

    def wait_released(self: Staging) -> None:
        for writer in writers:
            writer.gate.set()
        original(self)

    monkeypatch.setattr(Staging, "wait_released", wait_released)
    return writers.append


def tight_engine() -> pyckpt.Engine:
    """With room for one small state, and for none of 4 MiB."""
    return engine(max_pinned_bytes=RING + (2 << 20))


@pytest.mark.parametrize("way", ["step", "writer", "stager", "block"])
def test_beyond_the_budget_the_step_waits_for_the_file(
    tmp_path: Path, way: str, opens_when_waited_for: Any
) -> None:
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    with tight_engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        state = dict(model.state_dict())
        before = frozen(state)
        writer = Gated(tmp_path, stager=stager, engine=own)
        opens_when_waited_for(writer)
        future = dcp.async_save(state, storage_writer=writer)
        assert not writer.written.done()
        if way == "step":
            optimizer.step()
        elif way == "writer":
            writer.wait_staged()
        elif way == "stager":
            stager.wait_staged()
        else:
            with stager.guard():
                assert writer.written.done()
        assert writer.written.done()
        overwrite(state)
        future.result()
        check_saved(before, tmp_path)
        assert own.native.arena_held_bytes <= 2 << 20
        assert own.native.arena_used_bytes == 0


def test_beyond_the_budget_the_call_waits_for_what_is_not_guarded(
    tmp_path: Path, opens_when_waited_for: Any
) -> None:
    state = {"large": torch.rand(1 << 20), "small": torch.rand(10)}
    with tight_engine() as own:
        before = frozen(state)
        writer = Gated(tmp_path, engine=own)
        opens_when_waited_for(writer)
        future = dcp.async_save(state, storage_writer=writer)
        assert writer.written.done()
        overwrite(state)
        future.result()
        check_saved(before, tmp_path)


def embeddings(rows: int) -> tuple[torch.nn.Embedding, torch.nn.Parameter]:
    """A large embedding that its forward passes change, and a view of its memory."""
    model = torch.nn.Embedding(rows, 1024, max_norm=1.0)
    return model, torch.nn.Parameter(model.weight.detach()[:1])


def test_parameters_that_forward_changes_are_copied_at_the_call(
    tmp_path: Path, small_engine: pyckpt.Engine
) -> None:
    model, view = embeddings(64)
    linear = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD([view, *model.parameters(), *linear.parameters()], lr=0.1)
    stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
    stager.copy_at_call([model.weight])
    assert len(stager._guarded_storages() or ()) == 2  # those of the linear module alone
    before = frozen(dict(model.state_dict()))
    writer = writer_to(tmp_path, stager=stager, engine=small_engine)
    with slowed(small_engine):
        future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
        model(torch.arange(64))
    future.result()
    check_saved(before, tmp_path)
    assert not same(frozen(dict(model.state_dict())), before)  # the pass did change it


def test_beyond_the_budget_the_call_waits_for_parameters_that_forward_changes(
    tmp_path: Path, opens_when_waited_for: Any
) -> None:
    model, _ = embeddings(1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tight_engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        stager.copy_at_call(model.parameters())
        before = frozen(dict(model.state_dict()))
        writer = Gated(tmp_path, stager=stager, engine=own)
        opens_when_waited_for(writer)
        future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
        assert writer.written.done()
        model(torch.arange(1024))
        future.result()
        check_saved(before, tmp_path)


def test_a_failed_save_holds_no_step_back(tmp_path: Path) -> None:
    """Beyond the budget, and it fails at every point before it could write."""

    class Fails(pyckpt.DirectWriter):
        def __init__(self, path: Path, at: str, **options: Any) -> None:
            super().__init__(path, **options)
            self.at = at

        def fail(self, at: str) -> None:
            if self.at == at:
                raise OSError(at)

        def reset(self, checkpoint_id: Any = None) -> None:
            self.fail("reset")
            super().reset(checkpoint_id)

        def storage_meta(self) -> Any:
            self.fail("storage_meta")
            return super().storage_meta()

        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            self.fail("set_up_storage_writer")
            super().set_up_storage_writer(*args, **kwargs)

        def prepare_global_plan(self, plans: Any) -> Any:
            self.fail("prepare_global_plan")
            return super().prepare_global_plan(plans)

        def finish(self, metadata: Any, results: Any) -> None:
            self.fail("finish")
            super().finish(metadata, results)

    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    with tight_engine() as own:
        for at in ["set_up_storage_writer", "prepare_global_plan", "finish"]:
            stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
            writer = Fails(tmp_path, at, stager=stager, engine=own)
            future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
            optimizer.step()
            stager.wait_staged()
            with pytest.raises(BaseException, match=at):
                future.result()
            wait_given_back(writer)
            assert own.native.arena_used_bytes == 0


def test_a_save_that_never_reached_the_writer_holds_no_step_back(tmp_path: Path) -> None:
    """DCP fails before it calls the writer for the first time but to tell it where to write."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    with tight_engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        writer = writer_to(tmp_path, stager=stager, engine=own)
        try:
            future = dcp.async_save(
                dict(model.state_dict()),
                storage_writer=writer,
                checkpoint_id="other://bucket/step-1",
            )
        except ValueError:  # as in torch 2.9
            pytest.skip("this torch tells the writer where to write before it has the state copied")
        with pytest.raises(BaseException, match="address"):
            future.result()
        stepping = threading.Thread(target=optimizer.step, daemon=True)
        stepping.start()
        stepping.join(30)
        assert not stepping.is_alive()
        wait_given_back(writer)
        assert own.native.arena_used_bytes == 0


def refuse(self: _C.Staging) -> None:
    raise RuntimeError("no stream can be held")


@pytest.mark.parametrize("whole", [False, True], ids=["on the way", "whole"])
def test_a_guard_that_fails_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The step runs unguarded, so that its values may be in the copies: nothing is committed, and
    the checkpoint before stays. Neither does it count that all copies are there."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        writer = Gated(tmp_path, stager=stager, engine=own)
        writer.gate.set()
        state = dict(model.state_dict())
        dcp.async_save(state, storage_writer=writer).result()
        before = frozen(state)
        optimizer.step()
        writer.gate.clear()
        future = dcp.async_save(state, storage_writer=writer)
        if whole:
            writer.staged.result(60)
        with monkeypatch.context() as patched:
            patched.setattr(_C.Staging, "guard", refuse)
            writer.wait_staged()
            optimizer.step()
        writer.gate.set()
        with pytest.raises(BaseException, match="could not be made to wait"):
            future.result()
        check_saved(before, tmp_path)
        assert len(list(tmp_path.glob("*.distcp"))) == 1
        failure = stager.take_failure()
        # A save that has not been planned yet, takes it, and fails of it.
        assert isinstance(failure, RuntimeError) or (failure is None and not whole)
        dcp.async_save(state, storage_writer=writer).result()
        check_saved(state, tmp_path)


def guard_fails_on_one_rank(path: Path) -> None:
    state = {"weight": torch.nn.Parameter(torch.ones(1000))}  # which one rank writes
    optimizer = torch.optim.SGD(state.values(), lr=0.1)
    with engine() as own:
        for failing in range(2):
            stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
            writer = Gated(path / str(failing), stager=stager, engine=own)
            future = dcp.async_save(state, storage_writer=writer)
            if dist.get_rank() == failing:
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(_C.Staging, "guard", refuse)
                    writer.wait_staged()
            writer.gate.set()
            with pytest.raises(BaseException, match="could not be made to wait"):
                future.result()
            assert not (path / str(failing) / ".metadata").exists()


@pytest.mark.slow
def test_a_guard_that_fails_on_one_rank_fails_the_save(tmp_path: Path) -> None:
    run_ranks(2, guard_fails_on_one_rank, tmp_path)


def test_other_hooks_run_as_ever(tmp_path: Path) -> None:
    """Copies may end while a step goes through its hooks, ours among them."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    give_gradients(model)
    with tight_engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        state = dict(model.state_dict())
        future = dcp.async_save(
            state, storage_writer=writer_to(tmp_path, stager=stager, engine=own)
        )
        called: list[Any] = []

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            called.append(optimizer)

        handle = register_optimizer_step_pre_hook(hook)
        try:
            optimizer.step()  # ends the save, and only then goes on to the other hook
        finally:
            handle.remove()
        assert called == [optimizer]
        future.result()


def test_steps_of_a_forked_child(tmp_path: Path) -> None:
    """The parent's copies, whose threads a child has not, hold its steps not back."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    give_gradients(model)
    with tight_engine() as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        writer = Gated(tmp_path, stager=stager, engine=own)
        future = dcp.async_save(dict(model.state_dict()), storage_writer=writer)
        assert writer.reached.wait(60)
        status = status_of_child(lambda: guard._before_step(optimizer, (), {}))
        writer.gate.set()
        future.result()
        assert status == 0


def test_saves_of_a_forked_child(tmp_path: Path) -> None:
    """A child that has its parent's stager and writer waits for nothing of the parent's, and saves
    with memory and threads of its own."""
    stager = pyckpt.PinnedStager()
    state = {"large": torch.rand(100_000), "small": torch.rand(3)}
    writer = Gated(tmp_path / "parent", stager=stager)
    future = dcp.async_save(state, storage_writer=writer)
    assert writer.reached.wait(60)

    def save() -> None:
        writer.wait_staged()
        stager.wait_staged()
        stager.synchronize_staging()
        own = pyckpt.DirectWriter(tmp_path / "child", stager=stager, sync_files=False)
        dcp.async_save(state, storage_writer=own).result()
        copies = stager.stage(state).result()
        assert torch.equal(copies["large"], state["large"])
        writer.gate.set()
        dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "again")
        stager.close()

    status = status_of_child(save)
    writer.gate.set()
    future.result()
    assert status == 0
    for name in ("parent", "child", "again"):
        loaded = {key: torch.zeros_like(value) for key, value in state.items()}
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path / name))
        assert all(torch.equal(loaded[key], state[key]) for key in state)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
def test_optimizers_that_change_parameters_outside_of_step(tmp_path: Path, wrapped: bool) -> None:
    """Schedule-free ones are in eval mode while they are saved, and go back right after."""
    schedulefree = pytest.importorskip("schedulefree")
    model = torch.nn.Linear(700, 700)
    optimizer = (
        schedulefree.ScheduleFreeWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
        if wrapped
        else schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)
    )
    with engine(io_threads=1, max_pinned_bytes=256 << 20) as own:
        stager = pyckpt.PinnedStager(engine=own, optimizers=[optimizer])
        optimizer.train()
        for turn in range(2):
            for _ in range(3):
                give_gradients(model)
                optimizer.step()
            optimizer.eval()
            state = state_of(model)
            before = frozen(state)
            writer = writer_to(tmp_path / str(turn), stager=stager, engine=own)
            with slowed(own):
                future = dcp.async_save(state, storage_writer=writer)
                optimizer.train()
            future.result()
            check_saved(before, tmp_path / str(turn))
            assert not same(frozen(state), before)  # train did change it


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nobody had looked at steps yet."""
    monkeypatch.setattr(guard, "_hooks", ())
    for done in (guard.watch, guard._hook_torch):
        done.cache_clear()
    yield
    for done in (guard.watch, guard._hook_torch):
        done.cache_clear()


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the current stream captured a CUDA graph, and nobody had been told."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(guard, "_told", set())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "pyckpt" and r.levelname == "WARNING"
    ]


def test_a_step_that_is_captured_is_told_of_once(
    capturing: None,
    unwatched: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also before the first save: when the graph is replayed, nobody is asked."""
    hooks: list[Any] = []
    monkeypatch.setattr(
        guard, "register_optimizer_step_pre_hook", lambda hook: hooks.append(hook) or hook
    )
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    pyckpt.PinnedStager(optimizers=[optimizer])
    assert len(hooks) == 1
    for _ in range(3):
        hooks[0](optimizer, (), {})
    [warning] = warnings_in(caplog)
    assert "call wait_staged() before each replay" in warning


def test_wait_staged_within_a_capture_is_told_of(
    capturing: None, caplog: pytest.LogCaptureFixture
) -> None:
    pyckpt.PinnedStager().wait_staged()
    assert "outside of the graph" in warnings_in(caplog)[0]


def test_optimizers_made_for_graphs_are_told_of_once(
    small_engine: pyckpt.Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their steps may have been captured before there was a stager."""
    monkeypatch.setattr(guard, "_told", set())
    parameter = torch.nn.Parameter(torch.ones(3))
    for capturable in (False, True, True):
        optimizer = torch.optim.Adam([parameter], capturable=capturable)
        stager = pyckpt.PinnedStager(engine=small_engine, optimizers=[optimizer])
        stager.stage({"a": parameter}).result()
        assert len(warnings_in(caplog)) == capturable
