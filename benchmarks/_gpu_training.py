"""Sections of `gpu.py`: training beside saves, synchronisations, resuming."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import resume_syncs
import torch
from _common import MIB, Sample, nbytes, remove, zeros_like
from _gpu_common import (
    OURS,
    Setting,
    Training,
    gpt_training,
    must_equal_on_device,
    on_device,
    tensors_of,
)
from _savers import Ours, Pending, Saver, training_state
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pyckpt
from pyckpt.profiling import count_syncs

_TRAINING = "training"
_FIRST_STEPS = 3
"""From the call on, in which the copies are made."""
_TAIL_STEPS = 2
"""After the save, since what it leaves behind goes after it."""


def step(training: Training, saver: Saver | None = None, pending: Pending | None = None) -> None:
    training.compute()
    if saver is None or pending is None:
        training.optimizer.step()
        return
    pending.before_change()
    with saver.changing():
        training.optimizer.step()


def timed_step(
    setting: Setting,
    training: Training,
    saver: Saver | None = None,
    pending: Pending | None = None,
) -> float:
    """Seconds until the training's stream is through, as in a loop that logs its loss. What other
    streams copy may go on."""
    start = time.perf_counter()
    step(training, saver, pending)
    setting.synchronize_stream()
    return time.perf_counter() - start


@dataclasses.dataclass
class Windows:
    """Steps without a save, between the saves: what these are compared with, and how much it
    differs by itself."""

    seconds: list[list[float]] = dataclasses.field(default_factory=list)

    def idle_step(self) -> float:
        """Of the last two windows: that before a save, and that after it."""
        return statistics.mean([one for window in self.seconds[-2:] for one in window])

    def noise(self, steps: int) -> float:
        """By how many steps as many of them differ, at most, with no save among them."""
        length = max(1, min([steps, *(len(window) // 2 for window in self.seconds)]))
        sums = [
            sum(window[at : at + length])
            for window in self.seconds
            for at in range(0, len(window) - length + 1, length)
        ]
        if len(sums) < 2:
            return math.nan
        return (max(sums) - min(sums)) / statistics.mean(sums) * steps


def run_window(setting: Setting, training: Training) -> list[float]:
    setting.synchronize()
    return [timed_step(setting, training) for _ in range(setting.scale.steps)]


def train_beside(
    setting: Setting, training: Training, windows: Windows, saver: Saver, rounds: int
) -> None:
    """Steps during a save, and a window after it; into the report, as soon as they are there."""
    report, samples = setting.report, []
    for number in range(rounds):
        estimate = 2 * (report.median(_TRAINING, saver.name, "save_seconds") or 0.0)
        if number and not setting.time_for(estimate, f"training by {saver.name}, once more"):
            break
        sample, during, after = _train_with_save(setting, training, saver)
        remove(setting.path)
        saver.let_go()
        before = windows.seconds[-1]
        windows.seconds.append(run_window(setting, training))
        idle = windows.idle_step()
        sample |= {
            "seconds": sample["with_seconds"] - sample["steps"] * idle,
            "first_seconds": sample["first_with_seconds"] - sample["first_steps"] * idle,
            "before_ms": idle * 1e3,
        }
        sample["tokens_lost"] = sample["seconds"] / idle * training.tokens
        samples.append(sample)
        setting.traces[saver.name] = {
            name: [one * 1e3 for one in seconds]
            for name, seconds in (
                ("before", before),
                ("during", during),
                ("after", [*after, *windows.seconds[-1]]),
            )
        }
        report.add(_TRAINING, {saver.name: samples})


def _train_with_save(
    setting: Setting, training: Training, saver: Saver
) -> tuple[Sample, list[float], list[float]]:
    """What it took, the steps during the save, and those after it."""
    state = training_state(training.model, training.optimizer)
    setting.synchronize()
    during: list[float] = []
    first_seconds: list[float] = []
    start = time.perf_counter()
    pending = saver.start(state, setting.path)
    blocked = time.perf_counter() - start

    def take() -> float:
        taken = timed_step(setting, training, saver, pending)
        if len(first_seconds) < _FIRST_STEPS:
            first_seconds.append(time.perf_counter() - start)
        return taken

    while not pending.done():
        during.append(take())
    save_seconds = time.perf_counter() - start
    after = [take() for _ in range(_TAIL_STEPS)]
    seconds = time.perf_counter() - start
    pending.wait()
    sample = {
        "with_seconds": seconds,
        "steps": float(len(during) + len(after)),
        "first_with_seconds": first_seconds[-1],
        "first_steps": float(len(first_seconds)),
        "blocked_seconds": blocked,
        "save_seconds": save_seconds,
        # The first has the wait for the call in it, which `blocked_seconds` has, too.
        "during_ms": statistics.median(during[1:] or during or after) * 1e3,
        "worst_during_ms": max(during, default=0.0) * 1e3,
    }
    return sample, during, after


def measure_training(setting: Setting) -> None:
    """A GPT with AdamW, and the steps beside saves of ours."""
    training, size, tensors = _training(setting)
    state = training_state(training.model, training.optimizer)
    windows = Windows()
    with pyckpt.Engine(max_pinned_bytes=size + 512 * MIB) as engine:
        ours = Ours(engine=engine, optimizers=[training.optimizer], name=OURS)
        try:
            ours.prewarm(state)
            # The first save makes ready, too.
            _check_training_bytes(setting, training, ours)
            windows.seconds.append(run_window(setting, training))
            train_beside(setting, training, windows, ours, 2)
            _judge_training(setting, training, windows, tensors)
            if setting.time_for(15 + size / 1e9, "the device's idle time, from a trace"):
                _measure_gaps(setting, training, ours)
        finally:
            ours.close()
    _tell_training(setting)


def measure_training_beside(setting: Setting) -> None:
    """The same training, and its steps beside saves of each peer."""
    training, size, tensors = _training(setting)
    state = training_state(training.model, training.optimizer)
    windows = Windows([run_window(setting, training)])

    def measure(peer: Saver) -> None:
        peer.prewarm(state)
        peer.let_go()
        train_beside(setting, training, windows, peer, 1)

    # It copies at 2 GB/s and writes at 1, and has processes to start. What most programs use comes
    # first: there may not be the time for all.
    setting.beside(size, tensors, _TRAINING, 12 + 1.5 * size / 1e9, measure, known_first=True)
    _tell_training(setting)


def _training(setting: Setting) -> tuple[Training, int, int]:
    """The training, and the bytes and tensors of its state."""
    training = gpt_training(setting, setting.scale)
    state = training_state(training.model, training.optimizer)
    size, tensors = nbytes(state), sum(map(len, state.values()))
    count = sum(parameter.numel() for parameter in training.model.parameters())
    setting.report.note(
        f"training: {count / 1e6:,.0f} million parameters, a state of {size / 1e9:.2f} GB, "
        f"{training.tokens:,} tokens a step"
    )
    return training, size, tensors


def _tell_training(setting: Setting) -> None:
    report = setting.report
    if _TRAINING not in report.results:
        return
    report.table(
        "Training beside a save",
        _TRAINING,
        {
            "seconds": ("lost ms", lambda seconds: seconds * 1e3),
            "first_seconds": ("lost at first ms", lambda seconds: seconds * 1e3),
            "tokens_lost": ("tokens", float),
            "blocked_seconds": ("blocked ms", lambda seconds: seconds * 1e3),
            "save_seconds": ("save s", float),
        },
    )
    report.table(
        "Its steps",
        _TRAINING,
        {
            "before_ms": ("beside none, ms", float),
            "during_ms": ("during ms", float),
            "worst_during_ms": ("worst ms", float),
        },
    )


def _judge_training(setting: Setting, training: Training, windows: Windows, tensors: int) -> None:
    """What is asked of ours, and by how much windows differ that have no save in them."""
    report = setting.report

    def median(metric: str) -> float:
        found = report.median(_TRAINING, OURS, metric)
        assert found is not None
        return found

    idle = median("before_ms") / 1e3
    for what, lost, steps in (
        ("", median("seconds") / idle, median("steps")),
        ("at first, ", median("first_seconds") / idle, median("first_steps")),
    ):
        noise = windows.noise(round(steps))
        report.add(
            "training, noise",
            {f"{what}{steps:.0f} steps": [{"lost_steps": lost, "noise_steps": noise}]},
        )
        verdict = "within the noise" if abs(lost) <= noise else "beyond the noise"
        report.note(
            f"training: {what}a save took {lost:+.3f} of a step, beside {steps:.0f} steps; as many "
            f"without a save differ by up to {noise:.3f} of a step: {verdict}"
        )
    report.target(
        "training: tokens lost in a save, over those of a step (the noise is in the notes)",
        median("tokens_lost") / training.tokens,
        at_most=0.01,
    )
    report.target(
        f"training: tokens lost in {_FIRST_STEPS} steps from the call on, over those of a step",
        median("first_seconds") / idle,
        at_most=0.01,
    )
    report.target(
        "training: step during a save over before",
        median("during_ms") / median("before_ms"),
        at_most=1.02,
    )
    report.target(
        f"training: blocked, a thousand tensors ({tensors} here)",
        median("blocked_seconds") * 1e3 / max(1.0, tensors / 1000),
        at_most=2,
        unit="ms",
    )


def _check_training_bytes(setting: Setting, training: Training, saver: Saver) -> None:
    """The weights of a save beside a step: all of the state has no room there twice, and the
    section `guard` compares the rest."""
    state = training_state(training.model, training.optimizer)
    expected = on_device({"model": state["model"]}, setting.device)
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

    def idle_share(first: Callable[[], Pending | None], steps: int = 2) -> float:
        setting.synchronize()
        with profile(activities=[activity]) as trace:
            pending = first()
            for _ in range(steps):
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

    idle_share(lambda: None, 1)  # the profiler's first use takes its time
    state = training_state(training.model, training.optimizer)
    shares = {
        "without a save": idle_share(lambda: None),
        "with a save": idle_share(lambda: saver.start(state, setting.path)),
    }
    for name, share in shares.items():
        setting.report.add("device idle", {name: [{"idle_share": share}]})
    setting.report.table(
        "Device idle, of 2 steps", "device idle", {"idle_share": ("%", lambda share: share * 100)}
    )


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset")) or "pyckpt" in name


# --- synchronisations -------------------------------------------------------------------------


_BUSY_MS = 300.0
_WAITS = re.compile(r"^cu.*Synchronize(_v\d+)?$")
_SYNCS = "synchronisations"


def measure_syncs(setting: Setting) -> None:
    """What makes the training thread wait, in as many steps with a save as without. A small model:
    operators are slow while they are watched, and the number does not depend on size."""
    report, scale = setting.report, setting.scale
    _measure_busy_stream(setting)
    setting.empty_cache()
    small = dataclasses.replace(
        scale,
        layers=min(scale.layers, 4),
        width=min(scale.width, 256),
        heads=min(scale.heads, 4),
        context=min(scale.context, 256),
        micro_batches=1,
    )
    training = gpt_training(setting, small)
    state = training_state(training.model, training.optimizer)
    size, tensors = nbytes(state), sum(map(len, state.values()))
    with pyckpt.Engine(max_pinned_bytes=size + 256 * MIB) as engine:
        ours = Ours(engine=engine, optimizers=[training.optimizer], name=OURS)
        try:
            _count_waits(setting, training, ours, stacks=True)
        finally:
            ours.close()
    for metric, what in (
        ("total", "as torch counts them"),
        ("cuda_waits", "as CUDA's trace has them, of all libraries"),
    ):
        value = report.median(_SYNCS, OURS, metric)
        report.target(f"synchronisations of the training thread, a save, {what}", value, at_most=0)
    report.target(
        "async_save behind a busy stream: returns before the stream reaches it (1: it does)",
        report.median(_SYNCS, OURS, "returned_early"),
        at_least=1,
    )
    setting.beside(size, tensors, _SYNCS, 10, lambda peer: _count_waits(setting, training, peer))
    report.table(
        "Synchronisations of the training thread, a save",
        _SYNCS,
        {
            "total": ("torch's", float),
            "cuda_waits": ("in CUDA's trace", float),
            "returned_early": ("returns early", float),
            "busy_call_seconds": ("call ms", lambda seconds: seconds * 1e3),
        },
    )


def _count_waits(
    setting: Setting, training: Training, saver: Saver, *, stacks: bool = False
) -> None:
    report, steps = setting.report, setting.scale.steps
    state = training_state(training.model, training.optimizer)
    saver.prewarm(state)
    saver.let_go()

    def without_save() -> None:
        for _ in range(steps):
            step(training)

    def with_save() -> Pending:
        pending = saver.start(state, setting.path)
        for _ in range(steps):
            step(training, saver, pending)
        return pending

    def finish(pending: Pending) -> None:
        pending.wait()
        remove(setting.path)
        saver.let_go()

    for _ in range(2):
        finish(saver.start(state, setting.path))
    with count_syncs(threads="current") as without:
        without_save()
    with count_syncs(threads="current", stacks=stacks) as counts:
        pending = with_save()
    finish(pending)
    sample: Sample = {
        name: getattr(counts, name) - getattr(without, name)
        for name in (
            "total",
            "stream_syncs",
            "device_syncs",
            "event_syncs",
            "blocking_copies",
            "items",
        )
    }
    if stacks and counts.total > without.total:
        for kind, stack in counts.stacks.items():
            report.note(f"a {kind} of {saver.name}: {stack[-1] if stack else 'no stack'}")

    # It may hold the copies, and to free them is no part of the next call.
    del pending
    setting.synchronize()
    busy = setting.busy(_BUSY_MS)
    start = time.perf_counter()
    pending = saver.start(state, setting.path)
    sample["busy_call_seconds"] = time.perf_counter() - start
    sample["returned_early"] = float(busy.goes_on())
    finish(pending)
    report.add(_SYNCS, {saver.name: [sample]})

    # Last, since not every machine lets its users trace.
    plain = _traced_waits(setting, without_save)
    saves: list[Pending] = []
    traced = _traced_waits(setting, lambda: saves.append(with_save()))
    finish(saves.pop())
    if plain is not None and traced is not None:
        sample["cuda_waits"] = traced.total() - plain.total()
        for name, number in (traced - plain).items():
            report.note(f"{saver.name}: {name} of the training thread in a save: {number}")
    elif setting.cuda:
        report.note(f"{saver.name}: the trace has no calls of CUDA")

    report.add(_SYNCS, {saver.name: [sample]})


def _traced_waits(setting: Setting, action: Callable[[], None]) -> Counter[str] | None:
    """The calls of CUDA in which this thread waits, as the driver's tracing has them: of every
    library. None where it has none at all."""
    activity = ProfilerActivity.CUDA if setting.cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        setting.synchronize()
        action()
        setting.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        trace.export_chrome_trace(str(path))
        return waits_of_first_thread(json.loads(path.read_text())["traceEvents"])


def waits_of_first_thread(events: list[dict[str, Any]]) -> Counter[str] | None:
    """By name, of the thread that was the first to synchronise with the device: a trace may number
    threads as it likes. `count_syncs` sees those of torch alone."""
    calls = sorted(
        (float(event["ts"]), str(event["tid"]), str(event["name"]))
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    )
    first = next((thread for _, thread, name in calls if name == "cudaDeviceSynchronize"), None)
    if first is None:
        return None
    return Counter(name for _, thread, name in calls if thread == first and _WAITS.match(name))


def _measure_busy_stream(setting: Setting) -> None:
    """How long the call takes while the program's stream is busy, with more copies than a stream of
    CUDA takes: behind about a thousand that wait, the next launch waits for room."""
    report, scale, group = setting.report, setting.scale, "behind a busy stream"
    size = scale.busy_tensor_bytes
    count = max(1, min(scale.busy_tensors, scale.staging_bytes * 3 // 4 // size))
    what = f"{count:,} tensors of {size / MIB:.0f} MiB behind a busy stream"
    samples: list[Sample] = []
    # Memory is registered at 3 GB/s.
    if setting.time_for(3 + count * size / 2e9, what):
        state = tensors_of(setting, count, size)
        with pyckpt.Engine(max_pinned_bytes=count * (size + 4096) + 256 * MIB) as engine:
            stager = pyckpt.PinnedStager(engine=engine)
            stager.prewarm(state)
            stager.stage(state).result()
            for _ in range(min(3, scale.rounds)):
                setting.synchronize()
                busy = setting.busy(_BUSY_MS)
                start = time.perf_counter()
                copies = stager.stage(state)
                call = time.perf_counter() - start
                early = float(busy.goes_on())
                copies.result()
                samples.append(
                    {
                        "seconds": call,
                        "returned_early": early,
                        "busy_seconds": busy.seconds(),
                        "copied_seconds": time.perf_counter() - start,
                    }
                )
                del copies
            stager.close()
        report.add(group, {OURS: samples})
        report.table(
            f"Staging {what}",
            group,
            {
                "seconds": ("call ms", lambda seconds: seconds * 1e3),
                "busy_seconds": ("busy ms", lambda seconds: seconds * 1e3),
                "copied_seconds": ("all ms", lambda seconds: seconds * 1e3),
            },
        )
    report.target(
        f"{what}: the call returns before the stream reaches it (1: always)",
        min((sample["returned_early"] for sample in samples), default=None),
        at_least=1,
    )


# --- resuming ---------------------------------------------------------------------------------


def measure_resume(setting: Setting) -> None:
    """Steps of optimizers that were restored by whom: the experiment of `resume_syncs.py`, and
    optimizers of many small parameters."""
    report = setting.report
    variants = resume_syncs.available(report)
    if setting.cuda:
        # A step takes some 0.1 s in float32: 10 of them counted and 10 timed, twice, by each.
        if setting.time_for(25, "the experiment of resume_syncs.py"):
            resume_syncs.on_gpu(report, variants, steps=10, rounds=2)
        _show_resume(setting, "Adam")
    # Ours and what it is compared with before the others, which read from the device most.
    variants.sort(key=[resume_syncs.FRESH, resume_syncs.OURS, *resume_syncs.VARIANTS].index)
    for name, cls in resume_syncs.OPTIMIZERS.items():
        group = f"{name}, {setting.scale.parameters} parameters"
        for variant in variants:
            if setting.time_for(4, f"{group}, {variant}"):
                rounds = min(2, setting.scale.rounds)
                samples = [_steps_resumed(setting, cls, variant) for _ in range(rounds)]
                report.add(group, {variant: samples})
        _show_resume(setting, group)


def _steps_resumed(
    setting: Setting, cls: Callable[..., torch.optim.Optimizer], variant: str, steps: int = 5
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
    saved = resume_syncs.moved(before.state_dict(), setting.device)
    optimizer = make()
    resume_syncs.restore(variant, optimizer, saved, setting.device)
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


def _show_resume(setting: Setting, group: str) -> None:
    report = setting.report
    if group in report.results:
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
