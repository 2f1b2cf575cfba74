"""Sections of `gpu.py`: training beside saves, synchronisations, resuming."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import resume_syncs
import torch
from _common import MIB, Sample, nbytes, remove, zeros_like
from _gpu_common import OURS, Setting, Training, gpt_training, must_equal_on_device, on_device
from _savers import Ours, Pending, Saver, Stock, training_state
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pyckpt
from pyckpt import optim
from pyckpt.profiling import count_syncs

_SLOWEST_SAVE_BYTES_PER_SECOND = 0.3e9


class StepClock:
    """When each step ended, on the device; read once everything is over."""

    def __init__(self, setting: Setting) -> None:
        self._cuda = setting.cuda
        self._ends: list[Any] = []

    def tick(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between one tick and the next. After a synchronisation."""
        pairs = zip(self._ends, self._ends[1:], strict=False)
        if self._cuda:
            return [before.elapsed_time(after) for before, after in pairs]
        return [(after - before) * 1e3 for before, after in pairs]


def step(training: Training, saver: Saver | None = None, pending: Pending | None = None) -> None:
    training.compute()
    if saver is None or pending is None:
        training.optimizer.step()
        return
    pending.before_change()
    with saver.changing():
        training.optimizer.step()


def train_with_save(setting: Setting, training: Training, saver: Saver) -> dict[str, Any]:
    """Steps before, during and after one save."""
    clock, steps = StepClock(setting), setting.scale.steps
    setting.synchronize()
    start = time.perf_counter()
    clock.tick()
    for _ in range(steps):
        step(training)
        clock.tick()
    setting.synchronize()
    idle_seconds = (time.perf_counter() - start) / steps

    state = training_state(training.model, training.optimizer)
    start = time.perf_counter()
    pending = saver.start(state, setting.path)
    blocked = time.perf_counter() - start
    during = 0
    while not pending.done():
        step(training, saver, pending)
        clock.tick()
        during += 1
        if during % 8 == 0:
            # Or the host would queue steps for minutes ahead, and "done" would come late.
            setting.synchronize()
    save_seconds = time.perf_counter() - start
    # The last that was queued while the save ran.
    setting.synchronize()
    for _ in range(steps):
        step(training, saver, pending)
        clock.tick()
    setting.synchronize()
    seconds = time.perf_counter() - start
    pending.wait()
    times = clock.milliseconds()
    phases = {
        "before": times[:steps],
        "during": times[steps : steps + during],
        "after": times[steps + during :],
    }
    lost = seconds - (during + steps) * idle_seconds
    return {
        "phases": phases,
        "sample": {
            "seconds": lost,
            "blocked_seconds": blocked,
            "save_seconds": save_seconds,
            "tokens_lost": lost / idle_seconds * training.tokens,
            "before_ms": statistics.median(phases["before"]),
            # The first has the wait for the call in it, which `blocked_seconds` has, too.
            "during_ms": statistics.median(phases["during"][1:] or phases["before"]),
            "worst_during_ms": max(phases["during"], default=0.0),
            "after_ms": statistics.median(phases["after"]),
        },
    }


def measure_training(setting: Setting) -> None:
    """A GPT with AdamW: the steps before, during and after a save by each."""
    report = setting.report
    training = gpt_training(setting, setting.scale)
    state = training_state(training.model, training.optimizer)
    size = nbytes(state)
    count = sum(parameter.numel() for parameter in training.model.parameters())
    report.note(f"training: {count / 1e6:,.0f} million parameters, a state of {size / 1e9:.2f} GB")
    slow = size / _SLOWEST_SAVE_BYTES_PER_SECOND
    engine = pyckpt.Engine(max_pinned_bytes=size + 512 * MIB)
    ours = Ours(engine=engine, optimizers=[training.optimizer], name=OURS)
    peers = setting.peers(nbytes(state))
    try:
        for saver in (ours, *peers):
            is_ours = saver is ours
            # The first makes ready; of ours two are measured.
            rounds = 3 if is_ours else 2 if not isinstance(saver, Stock) else 1
            estimate = rounds * (size / 1.0e9 + 5 if is_ours else slow)
            if not setting.time_for(estimate, f"training beside saves by {saver.name}"):
                continue
            saver.prewarm(state)
            samples = []
            for number in range(rounds):
                result = train_with_save(setting, training, saver)
                if number or rounds == 1:
                    samples.append(result["sample"])
                    setting.traces[saver.name] = result["phases"]
                remove(setting.path)
            report.add("training", {saver.name: samples})
            if is_ours:
                _measure_gaps(setting, training, ours)
                _check_training_bytes(setting, training, ours)
    finally:
        ours.close()
        engine.close()
        setting.close_peers(peers)
    report.table(
        "Training beside a save",
        "training",
        {
            "seconds": ("lost ms", lambda seconds: seconds * 1e3),
            "tokens_lost": ("tokens", float),
            "blocked_seconds": ("blocked ms", lambda seconds: seconds * 1e3),
            "save_seconds": ("save s", float),
        },
    )
    report.table(
        "Its steps",
        "training",
        {
            "before_ms": ("before ms", float),
            "during_ms": ("during ms", float),
            "worst_during_ms": ("worst ms", float),
            "after_ms": ("after ms", float),
        },
    )
    tokens = report.median("training", OURS, "tokens_lost")
    report.target(
        "training: tokens lost in a save, over those of a step",
        None if tokens is None else tokens / training.tokens,
        at_most=0.01,
    )
    during, before = (
        report.median("training", OURS, f"{when}_ms") for when in ("during", "before")
    )
    report.target(
        "training: step during a save over before",
        None if during is None or not before else during / before,
        at_most=1.02,
    )
    blocked = report.median("training", OURS, "blocked_seconds")
    tensors = sum(map(len, state.values()))
    report.target(
        f"training: blocked, a thousand tensors ({tensors} here)",
        None if blocked is None else blocked * 1e3 / max(1.0, tensors / 1000),
        at_most=2,
        unit="ms",
    )


def _check_training_bytes(setting: Setting, training: Training, saver: Saver) -> None:
    state = training_state(training.model, training.optimizer)
    expected = on_device(state, setting.device)
    pending = saver.start(state, setting.path)
    step(training, saver, pending)
    pending.wait()
    found = zeros_like(expected)
    saver.load(found, setting.path)
    must_equal_on_device(found, expected, saver.name)
    remove(setting.path)


def _measure_gaps(setting: Setting, training: Training, saver: Saver) -> None:
    """The share of time in which no kernel of the program runs, from a trace: without a save, and
    from the call of one on."""
    activity = ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU

    def idle_share(first: Callable[[], Pending | None]) -> float:
        setting.synchronize()
        with profile(activities=[activity]) as trace:
            pending = first()
            for _ in range(5):
                step(training, saver, pending)
            setting.synchronize()
        if pending is not None:
            pending.wait()
            remove(setting.path)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in trace.events() or []
            if event.device_type.name == setting.device.type.upper() and not _is_copy(event.name)
        )
        if not spans:
            return float("nan")
        begin, end = spans[0]
        first_begin, busy = begin, 0.0
        for start, stop in spans:
            if start > end:
                busy, begin = busy + end - begin, start
            end = max(end, stop)
        busy += end - begin
        return float(1 - busy / (end - first_begin))

    idle_share(lambda: None)  # the profiler's first use takes its time
    state = training_state(training.model, training.optimizer)
    shares = {
        "without a save": idle_share(lambda: None),
        "with a save": idle_share(lambda: saver.start(state, setting.path)),
    }
    for name, share in shares.items():
        setting.report.add("device idle", {name: [{"idle_share": share}]})
    setting.report.table(
        "Device idle, of 5 steps", "device idle", {"idle_share": ("%", lambda share: share * 100)}
    )


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset")) or "pyckpt" in name


# --- synchronisations -------------------------------------------------------------------------


def measure_syncs(setting: Setting) -> None:
    """What makes the training thread wait, in as many steps with a save as without. A small model:
    operators are slow while they are watched, and the number does not depend on size."""
    report, scale = setting.report, setting.scale
    small = dataclasses.replace(
        scale,
        layers=min(scale.layers, 4),
        width=min(scale.width, 256),
        heads=min(scale.heads, 4),
        context=min(scale.context, 256),
    )
    training = gpt_training(setting, small)
    state = training_state(training.model, training.optimizer)
    engine = pyckpt.Engine(max_pinned_bytes=nbytes(state) + 256 * MIB)
    ours = Ours(engine=engine, optimizers=[training.optimizer], name=OURS)
    peers = setting.peers(nbytes(state))
    try:
        for saver in (ours, *peers):
            saver.prewarm(state)
            for _ in range(2):
                saver.start(state, setting.path).wait()
                remove(setting.path)
            with count_syncs(threads="current") as without:
                for _ in range(scale.steps):
                    step(training)
            with count_syncs(threads="current", stacks=saver is ours) as counts:
                pending = saver.start(state, setting.path)
                for _ in range(scale.steps):
                    step(training, saver, pending)
            pending.wait()
            remove(setting.path)
            report.add(
                "synchronisations",
                {
                    saver.name: [
                        {
                            "total": counts.total - without.total,
                            "stream_syncs": counts.stream_syncs - without.stream_syncs,
                            "device_syncs": counts.device_syncs - without.device_syncs,
                            "event_syncs": counts.event_syncs - without.event_syncs,
                            "blocking_copies": counts.blocking_copies - without.blocking_copies,
                            "items": counts.items - without.items,
                        }
                    ]
                },
            )
            if saver is ours and counts.total > without.total:
                for kind, stack in counts.stacks.items():
                    report.note(f"a {kind} of ours: {stack[-1] if stack else 'no stack'}")
    finally:
        ours.close()
        engine.close()
        setting.close_peers(peers)
    report.table(
        "Synchronisations of the training thread, a save",
        "synchronisations",
        {key: (key, float) for key in ("total", "stream_syncs", "device_syncs", "event_syncs")},
    )
    report.target(
        "synchronisations of the training thread, a save",
        report.median("synchronisations", OURS, "total"),
        at_most=0,
    )


# --- resuming ---------------------------------------------------------------------------------


def measure_resume(setting: Setting) -> None:
    """Steps of optimizers that were restored by whom: the experiment of `resume_syncs.py`, and
    optimizers of many small parameters."""
    report = setting.report
    if setting.cuda and setting.time_for(40, "the experiment of resume_syncs.py"):
        resume_syncs.on_gpu(report, list(resume_syncs.VARIANTS), 50, 2)
        _show_resume(setting, "Adam")
    for name, cls in resume_syncs.OPTIMIZERS.items():
        group = f"{name}, {setting.scale.parameters} parameters"
        for variant in resume_syncs.VARIANTS:
            samples = [_steps_resumed(setting, cls, variant) for _ in range(setting.scale.rounds)]
            report.add(group, {variant: samples})
        _show_resume(setting, group)


def _steps_resumed(
    setting: Setting, cls: Callable[..., torch.optim.Optimizer], variant: str, steps: int = 20
) -> Sample:
    def make() -> torch.optim.Optimizer:
        parameters = [
            nn.Parameter(torch.ones(64, 64, device=setting.device))
            for _ in range(setting.scale.parameters)
        ]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1)
        return cls(parameters, lr=0.01)

    before = make()
    before.step()
    saved = _moved(before.state_dict(), setting.device)
    optimizer = make()
    if variant == resume_syncs.MOVED:
        optimizer.load_state_dict(saved)
        for parameter, entries in optimizer.state.items():
            optimizer.state[parameter] = _moved(entries, setting.device)
    elif variant == resume_syncs.OURS:
        optim.load_state_dict(optimizer, saved)
    optimizer.step()
    with count_syncs() as counts:
        for _ in range(steps):
            optimizer.step()
    setting.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    setting.synchronize()
    seconds = (time.perf_counter() - start) / steps
    return {"seconds": seconds, **resume_syncs.per_step(counts, steps)}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: _moved(entry, device) for key, entry in value.items()}
    return value


def _show_resume(setting: Setting, group: str) -> None:
    report = setting.report
    report.table(
        f"Resumed: {group}",
        group,
        {
            "seconds": ("ms a step", lambda seconds: seconds * 1e3),
            "waits": ("waits\na step", float),
            "d2h_copies": ("D2H copies\na step", float),
        },
    )
    for metric, what in (("waits", "waits"), ("d2h_copies", "D2H copies")):
        ours = report.median(group, resume_syncs.OURS, metric)
        fresh = report.median(group, resume_syncs.FRESH, metric)
        report.target(
            f"{group}: {what} a step, more than fresh",
            None if ours is None or fresh is None else ours - fresh,
            at_most=0,
        )
