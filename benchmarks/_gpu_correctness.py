"""Sections of `gpu.py`: saves must have the state at the call, whatever the streams do next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _common import MIB, Sample, State, WrongBytes, nbytes, remove, zeros_like
from _gpu_common import OURS, Setting, must_equal_on_device, on_device
from _savers import Ours, Pending, Saver, training_state
from torch import Tensor, nn

import pyckpt

_LATE_MS = 100.0

# --- torn reads -------------------------------------------------------------------------------


def measure_torn(setting: Setting) -> None:
    """All values are 2 at the call, by a kernel that is late; right after it they become 3, as soon
    as the saver lets the program go on. Whatever else is in the checkpoint was torn."""
    report = setting.report
    count = 16
    elements = setting.scale.attempt_bytes // count // 4
    tensors = {
        f"weight.{i:02d}": nn.Parameter(torch.zeros(elements, device=setting.device))
        for i in range(count)
    }
    state: State = {"model": dict(tensors)}
    # Its step subtracts a gradient of -1.
    optimizer = torch.optim.SGD(tensors.values(), lr=1.0)
    for parameter in tensors.values():
        parameter.grad = torch.full_like(parameter, -1)
    size, attempts = nbytes(state), setting.scale.attempts

    def measure(saver: Saver, attempts: int) -> None:
        saver.prewarm(state)
        samples: list[Sample] = []
        for _ in range(attempts):
            samples.append(_attempt(setting, saver, state, optimizer))
            report.add("torn reads", {saver.name: samples})

    def seconds(attempts: int) -> float:
        # Each is written and read, at 1 GB/s, after a second for memory and processes.
        return 1 + attempts * 2 * size / 1e9

    with pyckpt.Engine(max_pinned_bytes=2 * size + 256 * MIB) as engine:
        ours: list[Saver] = [
            Ours(engine=engine, optimizers=[optimizer], name=f"{OURS}, guarded"),
            Ours(engine=engine, name=OURS),
        ]
        for saver in ours:
            try:
                if setting.time_for(seconds(attempts), f"torn reads by {saver.name}"):
                    measure(saver, attempts)
            finally:
                saver.close()
            spread = report.results.get("torn reads", {}).get(saver.name, {}).get("wrong_share")
            worst = None if spread is None else max(spread.samples)
            report.target(f"torn reads: {saver.name}: share of wrong values", worst, at_most=0)
    few = min(3, attempts)
    setting.beside(size, len(tensors), "torn reads", seconds(few), lambda peer: measure(peer, few))
    if "torn reads" not in report.results:
        return
    report.table(
        "Torn reads: share of values that were not those at the call, an attempt",
        "torn reads",
        {
            "wrong_share": ("wrong %", lambda share: share * 100),
            "older_share": ("older %", lambda share: share * 100),
            "newer_share": ("newer %", lambda share: share * 100),
        },
    )


@torch.no_grad()
def _attempt(
    setting: Setting, saver: Saver, state: State, optimizer: torch.optim.Optimizer
) -> Sample:
    tensors = list(state["model"].values())
    for tensor in tensors:
        tensor.fill_(1)
    setting.synchronize()
    setting.sleep(_LATE_MS)
    optimizer.step()
    pending = saver.start(state, setting.path)
    pending.before_change()
    with saver.changing():
        optimizer.step()
    pending.wait()
    found = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    saver.load(found, setting.path)
    remove(setting.path)
    saver.let_go()
    total = sum(tensor.numel() for tensor in tensors)

    def share(value: int) -> float:
        equal = sum(int((tensor == value).sum()) for tensor in found["model"].values())
        return float(equal / total)

    return {"wrong_share": 1 - share(2), "older_share": share(1), "newer_share": share(3)}


# --- the step guard ---------------------------------------------------------------------------


@dataclass
class Case:
    """A way to train. ``step`` changes everything that is saved."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    step: Callable[[pyckpt.PinnedStager], object]

    def state(self) -> State:
        state: State = {}
        for number, optimizer in enumerate(self.optimizers):
            for group, tensors in training_state(self.model, optimizer).items():
                state[group if group == "model" else f"{number}.{group}"] = tensors
        return state


def _network(setting: Setting) -> nn.Sequential:
    """Few large layers, so that copies take longer than steps; and buffers that forward changes."""
    width = max(8, int((setting.scale.attempt_bytes / 4 / 12) ** 0.5))
    with setting.device:
        return nn.Sequential(
            nn.Linear(width, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, width)
        )


def _batch(setting: Setting, model: nn.Sequential) -> Tensor:
    first = model[0]
    assert isinstance(first, nn.Linear)
    return torch.randn(16, first.in_features, device=setting.device)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def plain(setting: Setting) -> Case:
    model = _network(setting)
    optimizer, x = torch.optim.AdamW(model.parameters()), _batch(setting, model)

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Case(model, [optimizer], step)


def compiled(setting: Setting) -> Case:
    """Model and optimizer's step compiled. On CPU, where there may be no compiler, traced only."""
    model = _network(setting)
    optimizer, x = torch.optim.AdamW(model.parameters()), _batch(setting, model)
    backend = "inductor" if setting.cuda else "eager"
    fast: Any = torch.compile(model, backend=backend)

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        _loss(fast, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Case(model, [optimizer], step)


def compiled_step(setting: Setting) -> Case:
    model = _network(setting)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=setting.cuda)
    x = _batch(setting, model)
    fast_step: Any = torch.compile(optimizer.step, backend="inductor" if setting.cuda else "eager")

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        fast_step()

    return Case(model, [optimizer], step)


def graphed(setting: Setting) -> Case:
    """The whole step in a CUDA graph, which calls no hook: the program says when it changes the
    state."""
    model = _network(setting)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=setting.cuda)
    x = _batch(setting, model)

    def body() -> None:
        optimizer.zero_grad(set_to_none=True)
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    replay: Callable[[], object] = body
    if setting.cuda:
        with setting.side_stream():
            for _ in range(3):
                body()
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            _loss(model, x).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        replay = graph.replay

    def step(stager: pyckpt.PinnedStager) -> None:
        # Forward changes BatchNorm's buffers in the graph, so all of it must wait.
        with stager.guard():
            replay()

    return Case(model, [optimizer], step)


def scaled(setting: Setting) -> Case:
    """GradScaler, which may skip a step and has state of its own."""
    model = _network(setting)
    optimizer, x = torch.optim.AdamW(model.parameters()), _batch(setting, model)
    scaler = torch.amp.GradScaler(setting.device.type)

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        with torch.autocast(setting.device.type, torch.bfloat16):
            loss = _loss(model, x)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return Case(model, [optimizer], step)


def accumulated(setting: Setting) -> Case:
    model = _network(setting)
    optimizer, x = torch.optim.AdamW(model.parameters()), _batch(setting, model)

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        for _ in range(4):
            (_loss(model, x) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return Case(model, [optimizer], step)


def several_optimizers(setting: Setting) -> Case:
    model = _network(setting)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.NAdam(model[1].parameters()),
        torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9),
    ]
    x = _batch(setting, model)

    def step(stager: pyckpt.PinnedStager) -> None:
        model.zero_grad()
        _loss(model, x).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()

    return Case(model, optimizers, step)


def several_streams(setting: Setting) -> Case:
    """Backward on one stream, the step on another; the save is called on the default one."""
    model = _network(setting)
    optimizer, x = torch.optim.AdamW(model.parameters()), _batch(setting, model)

    def step(stager: pyckpt.PinnedStager) -> None:
        optimizer.zero_grad()
        with setting.side_stream():
            _loss(model, x).backward()  # type: ignore[no-untyped-call]
        with setting.side_stream():
            optimizer.step()

    return Case(model, [optimizer], step)


def save_on_side_stream(setting: Setting) -> Case:
    """All of the training, and the call of the save, on a stream that is not the default one: the
    stream is made current by `_run_case`."""
    return plain(setting)


COMPILED = (compiled, compiled_step)
# The compiler, started for the first time, may take longer than all others together.
CASES: tuple[Callable[[Setting], Case], ...] = (
    plain,
    several_streams,
    save_on_side_stream,
    accumulated,
    several_optimizers,
    scaled,
    graphed,
    *COMPILED,
)
_COMPILER_S = 60.0


def measure_guard(setting: Setting) -> None:
    """Saves in all these ways of training, with steps right after the call; the bytes compared. A
    case for which there is no time has no value, and one that raises does not stop the others."""
    failures: list[Exception] = []
    # Half of `attempt_bytes` are saved, which a disk of 1 GB/s takes and gives back in a second.
    estimate, compiling = 10.0, _COMPILER_S
    for make in CASES:
        name = make.__name__.replace("_", " ")
        attempts = min(2 if make in COMPILED else 3, setting.scale.attempts)
        wrong: int | None = None
        start = time.monotonic()
        if setting.time_for(compiling if make in COMPILED else estimate, f"the step guard, {name}"):
            try:
                with _stream_of(setting, make):
                    _run_case(setting, make(setting), name, attempts)
                wrong = 0
            except WrongBytes as error:
                wrong = 1
                setting.report.note(str(error))
            except Exception as error:
                failures.append(error)
                setting.note_failure(f"the step guard, {name}", error)
            if make in COMPILED:
                # What the first has started is there for the second.
                compiling = time.monotonic() - start
        setting.report.target(f"step guard, {name}: checkpoints with wrong bytes", wrong, at_most=0)
        setting.empty_cache()
    if failures:
        raise failures[0]


@contextmanager
def _stream_of(setting: Setting, make: Callable[[Setting], Case]) -> Iterator[None]:
    if make is not save_on_side_stream:
        yield
        return
    with setting.side_stream():
        yield


def _run_case(setting: Setting, case: Case, name: str, attempts: int) -> None:
    with pyckpt.Engine(max_pinned_bytes=2 * setting.scale.attempt_bytes + 256 * MIB) as engine:
        saver = Ours(engine=engine, optimizers=case.optimizers, name=f"step guard, {name}")
        for _ in range(3):
            case.step(saver.stager)
        for _ in range(attempts):
            state = case.state()
            expected = on_device(state, setting.device)
            # The device is late, so that the host is ahead of the copies by whole steps.
            setting.sleep(_LATE_MS)
            pending: Pending = saver.start(state, setting.path)
            for _ in range(2):
                case.step(saver.stager)
            pending.wait()
            found = zeros_like(expected)
            saver.load(found, setting.path)
            must_equal_on_device(found, expected, saver.name)
            _must_have_changed(case.state(), expected, saver.name)
            remove(setting.path)
        saver.close()


def _must_have_changed(state: State, expected: State, name: str) -> None:
    """Or the comparison would have shown nothing."""
    for group in ("model",):
        if all(torch.equal(state[group][key], expected[group][key]) for key in expected[group]):
            raise WrongBytes(f"{name}: the steps after the save changed nothing in {group}")
