"""What an asynchronous save takes from the training loop: pyckpt beside stock and its rival.

    python benchmarks/stall.py [--dir DIR] [--rounds 5] [--size-mib 2048] [--quick] [--only SECTION]

The training time lost by a save is the time of K steps with it, from the call of ``async_save`` on
(so blocked time counts), less that of K steps without, right after it in the same process. K is how
many steps the save lasts, and a tenth more. Savers take turns in an order that is rotated from
round to round. Each has saved three times before it is measured, so that all are warm; what the
third save wrote while the state went on changing is loaded and compared with the state at the call.
Each is used as its documentation says: a program waits, before it changes the state, for the
staging of DefaultStager, and holds torch_checkpointing's lock while it does.

guarded   2 GiB of parameters and AdamW's state. A step is forward and backward of an MLP, which
          keep all cores busy, and the optimizer's step. Ours is told of the optimizer
          (PinnedStager), so that its copy goes on while the loop computes, until the step.
small     5,000 tensors of 16 KiB, beside a loop that is bound by the speed at which Python
          launches: bursts of 20 small eager operators, on one thread. Ours copies them before the
          call returns, unless it was told of an optimizer that has them ("guarded"). As a state
          dict of one key ("model"), and, for information, of 5,000: DCP itself looks at each key of
          the first level twice.
large     64 tensors of 16 MiB beside the same loop: its rate while the save is written, blocked
          time apart, over its rate without; and the same of a process that does nothing but write
          as many bytes, since disks take some of the processor whoever writes.
overlap   A save of 1 MiB of guarded CPU state, and at once what its step's guard does: for how long
          that holds the thread, alone, and while a save before it, one tensor of 1 GiB, is being
          written; and how long the copies take to be whole where no step asks for them. Nothing
          else runs, so that what shows is the waiting.
budget    A save of 2 GiB by an engine of 256 MiB (max_pinned_bytes), in a new process: by how much
          the peak of the resident memory grows. The optimizer steps right after the call.

Results go to benchmarks/results/stall.json. The exit code is 1 if bytes were wrong, else 0.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import (
    MIB,
    SMALL_TENSOR_BYTES,
    SMALL_TENSORS,
    Options,
    Report,
    Sample,
    State,
    Variant,
    WrongBytes,
    in_children,
    interleave,
    nbytes,
    peak_growth,
    remove,
    run,
)
from _savers import (
    BareWriter,
    Loop,
    Ours,
    Saver,
    Stock,
    StockDefaultStager,
    TorchCheckpointing,
    loss_variant,
    measure_loss,
    training_state,
)
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import pyckpt

OURS = "pyckpt"
OURS_STOCK_PLANNER = "pyckpt, stock's planner"
OURS_GUARDED = "pyckpt, guarded"
FLAT = ", flat dict"
STOCK = Stock.name

METRICS = {
    "seconds": ("lost ms", lambda seconds: seconds * 1e3),
    "blocked_seconds": ("blocked ms", lambda seconds: seconds * 1e3),
    "save_seconds": ("save ms", lambda seconds: seconds * 1e3),
}


@contextmanager
def warm_savers(
    report: Report, options: Options, savers: Sequence[Saver], state: State
) -> Iterator[list[Saver]]:
    """These, and those of others, with their memory taken; closed at the end."""
    rival, reason = TorchCheckpointing.where_it_runs(options.directory)
    if rival is None:
        report.note(f"left out: {reason}")
    everyone = [*savers, Stock(), StockDefaultStager(), *([] if rival is None else [rival])]
    with ExitStack() as stack:
        for saver in everyone:
            stack.callback(saver.close)
            saver.prewarm(state)
        yield everyone


def add_losses(
    report: Report,
    options: Options,
    group: str,
    title: str,
    savers: Sequence[Saver],
    loop: Loop,
    state_of: Callable[[], State],
    *,
    limit: BareWriter | None = None,
) -> None:
    path = options.directory / "checkpoint"
    variants = [loss_variant(saver, loop, state_of, path) for saver in savers]
    if limit is not None:
        variants.append(
            Variant(
                limit.name,
                run=lambda: measure_loss(loop, limit, state_of(), path),
                clean=lambda: remove(path),
            )
        )
    report.add(
        group,
        interleave(
            variants,
            min(5, options.rounds),
            before=os.sync,
            console=report.console,
            title=title,
        ),
    )


def ratio_target(
    report: Report, group: str, what: str, ours: str, metric: str, *, at_most: float
) -> None:
    report.target(
        f"{group}: {what}, {ours} over {STOCK}",
        report.ratio(group, ours, STOCK, metric),
        at_most=at_most,
    )


# --- sections ---------------------------------------------------------------------------------

_WIDTH = 2048
_LAYER_BYTES = 4 * _WIDTH * _WIDTH
_TOKENS = 64


def training(size: int) -> tuple[torch.optim.Optimizer, Loop, Callable[[], State]]:
    """An MLP of which parameters and AdamW's state are ``size`` bytes, a third each."""
    torch.manual_seed(3)
    layers = max(1, size // 3 // _LAYER_BYTES)
    # Normalisation between keeps the numbers finite, however deep this is.
    model = nn.Sequential(
        *(
            layer
            for _ in range(layers)
            for layer in (
                nn.Linear(_WIDTH, _WIDTH, bias=False),
                nn.LayerNorm(_WIDTH, elementwise_affine=False),
                nn.GELU(),
            )
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(_TOKENS, _WIDTH)

    def compute() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    compute()
    optimizer.step()
    loop = Loop(compute, optimizer.step, steps_min=2)
    return optimizer, loop, lambda: training_state(model, optimizer)


def measure_guarded(report: Report, options: Options) -> None:
    optimizer, loop, state_of = training(options.size)
    state = state_of()
    size = nbytes(state)
    with (
        pyckpt.Engine(max_pinned_bytes=size + 256 * MIB) as engine,
        warm_savers(
            report, options, [Ours(engine=engine, optimizers=[optimizer], name=OURS)], state
        ) as savers,
    ):
        add_losses(
            report,
            options,
            "guarded",
            f"{size / MIB:,.0f} MiB in {sum(map(len, state.values()))} tensors, AdamW, "
            f"{torch.get_num_threads()} threads",
            savers,
            loop,
            state_of,
        )
    report.table(
        "Lost by a save of guarded CPU state",
        "guarded",
        METRICS
        | {
            "step_seconds": ("idle step ms", lambda seconds: seconds * 1e3),
            "rate_during": ("rate during save\n% of idle", lambda rate: rate * 100),
        },
    )
    ratio_target(report, "guarded", "blocked", OURS, "blocked_seconds", at_most=1 / 50)
    ratio_target(report, "guarded", "time lost", OURS, "seconds", at_most=1 / 10)


def scaled(count: int, options: Options) -> int:
    """As many as for a large state of 2 GiB, or fewer for a smaller one (``--quick``)."""
    return max(1, min(count, count * options.size // (2048 * MIB)))


@contextmanager
def launch_bound(options: Options, burst: int = 20) -> Iterator[Loop]:
    """A loop whose step is some operators too small to be work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(8, 8)

    def compute() -> None:
        for _ in range(burst):
            x.add(1)

    try:
        # A quarter of a second of it, more or less, so that idle rates mean something.
        yield Loop(compute, steps_min=scaled(5_000, options))
    finally:
        torch.set_num_threads(threads)


BURSTS = METRICS | {
    "worst_step_seconds": ("worst burst\nms", lambda seconds: seconds * 1e3),
    "worst_idle_step_seconds": ("idle worst\nms", lambda seconds: seconds * 1e3),
    "rate_during": ("rate during save\n% of idle", lambda rate: rate * 100),
}


def measure_small(report: Report, options: Options) -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = {
        f"weight.{i:04d}": torch.rand(SMALL_TENSOR_BYTES // 4, generator=generator)
        for i in range(scaled(SMALL_TENSORS, options))
    }
    state = {"model": tensors}
    optimizer = torch.optim.SGD(list(tensors.values()), lr=0.1)
    with pyckpt.Engine(max_pinned_bytes=1024 * MIB) as engine, launch_bound(options) as loop:
        ours = [
            Ours(engine=engine, name=OURS),
            Ours(engine=engine, name=OURS_GUARDED, optimizers=[optimizer]),
            Ours(engine=engine, name=OURS_STOCK_PLANNER, cached_plans=False),
        ]
        with warm_savers(report, options, ours, state) as savers:
            add_losses(
                report,
                options,
                "small",
                f"{len(tensors):,} tensors of 16 KiB, launch-bound loop",
                savers,
                loop,
                lambda: state,
            )
        report.table("Lost by a save of small tensors", "small", BURSTS)
        _measure_flat(report, options, tensors, engine, loop)
    ratio_target(report, "small", "time lost", OURS, "seconds", at_most=1 / 40)
    ratio_target(report, "small", "time lost", OURS_STOCK_PLANNER, "seconds", at_most=1 / 5)
    ratio_target(report, "small", "worst burst", OURS, "worst_step_seconds", at_most=1 / 20)


def _measure_flat(
    report: Report,
    options: Options,
    tensors: dict[str, torch.Tensor],
    engine: pyckpt.Engine,
    loop: Loop,
) -> None:
    path = options.directory / "checkpoint"
    savers = [Ours(engine=engine, name=OURS + FLAT), _named(Stock(), STOCK + FLAT)]
    # The bytes were checked as a nested dict; `loss_variant` checks those only.
    samples = interleave(
        [loss_variant(_Flat(saver), loop, lambda: {"model": tensors}, path) for saver in savers],
        min(3, options.rounds),
        before=os.sync,
        console=report.console,
        title=f"the same as a state dict of {len(tensors):,} keys (for information)",
        quiet=True,
    )
    report.add("small, flat dict", samples)
    report.table("The same, flat", "small, flat dict", BURSTS)
    for saver in savers:
        saver.close()


def _named(saver: Saver, name: str) -> Saver:
    saver.name = name
    return saver


class _Flat(Saver):
    """Saves, and loads, what is in the group "model" without the group."""

    def __init__(self, saver: Saver) -> None:
        self.name = saver.name
        self._saver = saver

    def start(self, state: Any, path: Path) -> Any:
        return self._saver.start(dict(state["model"]), path)

    def load(self, into: Any, path: Path) -> None:
        self._saver.load(into["model"], path)


def measure_large(report: Report, options: Options) -> None:
    count = scaled(64, options)
    generator = torch.Generator().manual_seed(5)
    state = {
        "model": {f"weight.{i}": torch.rand(4 << 20, generator=generator) for i in range(count)}
    }
    budget = nbytes(state) + 256 * MIB
    with pyckpt.Engine(max_pinned_bytes=budget) as engine, launch_bound(options) as loop:
        ours: list[Saver] = [Ours(engine=engine, name=OURS)]
        with warm_savers(report, options, ours, state) as savers:
            limit = BareWriter(nbytes(state))
            add_losses(
                report,
                options,
                "large",
                f"{count} tensors of 16 MiB, launch-bound loop",
                savers,
                loop,
                lambda: state,
                limit=limit,
            )
            limit.close()
    report.table("Lost by a save of large tensors", "large", BURSTS)
    report.target(
        f"large: rate of the loop while the save is written, {OURS} over {BareWriter.name}",
        report.ratio("large", OURS, BareWriter.name, "rate_during"),
        at_least=0.97,
    )
    report.target(
        f"large: {OURS}: rate of the loop while the save is written, over idle",
        report.median("large", OURS, "rate_during"),
        at_least=0.97,
    )


_GUARDED_FLOATS = 1 << 18
ALONE = "nothing is written"
OVERLAPPING = "a save before is written"


def measure_overlap(report: Report, options: Options) -> None:
    generator = torch.Generator().manual_seed(6)
    # One tensor, as an embedding is, so that all of it is queued at once.
    large = {"model": {"weight": torch.rand(scaled(64, options) * (4 << 20), generator=generator)}}
    parameter = nn.Parameter(torch.rand(_GUARDED_FLOATS, generator=generator))
    small = {"model": {"weight": parameter}}
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pyckpt.Engine(max_pinned_bytes=nbytes(large) + 256 * MIB) as engine:
        before = Ours(engine=engine)
        ours = Ours(engine=engine, optimizers=[optimizer])
        before.prewarm(large)  # or else a smaller state might take the room for that one tensor

        def measure(*, under_way: bool) -> Sample:
            other = before.start(large, options.directory / "before") if under_way else None
            while other is not None and not other.done() and not _bytes_written(before):
                time.sleep(1e-3)
            start = time.perf_counter()
            pending = ours.start(small, options.directory / "checkpoint")
            called = time.perf_counter()
            ours.stager.wait_staged()
            held = time.perf_counter()
            unasked = ours.start(small, options.directory / "unasked")
            begun = time.perf_counter()
            assert ours.writer is not None
            ours.writer.staged.result()
            staged = time.perf_counter()
            overlapped = other is not None and not other.done()
            for save in (pending, unasked, other):
                if save is not None:
                    save.wait()
            return {
                "guard_seconds": held - called,
                "staged_seconds": staged - begun,
                "call_seconds": called - start,
                "overlapped": float(overlapped),
            }

        def check() -> None:
            into = {"model": {"weight": torch.empty(_GUARDED_FLOATS)}}
            ours.load(into, options.directory / "checkpoint")
            if not torch.equal(into["model"]["weight"], parameter):
                raise WrongBytes("overlap: not what it was at the call")

        def clean() -> None:
            for name in ("before", "checkpoint", "unasked"):
                remove(options.directory / name)

        variants = [
            Variant(
                name, run=partial(measure, under_way=name == OVERLAPPING), check=check, clean=clean
            )
            for name in (ALONE, OVERLAPPING)
        ]
        report.add(
            "overlap",
            interleave(
                variants,
                options.rounds,
                before=os.sync,
                console=report.console,
                title=f"1 MiB of guarded state, and {nbytes(large) / MIB:,.0f} MiB being written",
            ),
        )
        before.close()
        ours.close()
    report.table(
        "Held by the guard of a step right after its save",
        "overlap",
        {
            "guard_seconds": ("held ms", lambda seconds: seconds * 1e3),
            "staged_seconds": ("staged ms", lambda seconds: seconds * 1e3),
            "call_seconds": ("call ms", lambda seconds: seconds * 1e3),
            "overlapped": ("write went on %", lambda share: share * 100),
        },
    )
    held = report.median("overlap", OVERLAPPING, "guard_seconds")
    report.target(
        f"overlap: held by the guard while {OVERLAPPING}",
        None if held is None else held * 1e3,
        at_most=5,
        unit="ms",
    )


def _bytes_written(saver: Ours) -> int:
    statistics = None if saver.writer is None else saver.writer.statistics
    return 0 if statistics is None else statistics.bytes_written


# --- memory -----------------------------------------------------------------------------------

_BUDGET = 256 * MIB


def _save_in_child(rank: int, size: int, path: Path) -> Sample:
    """Save, and step right after the call. What was saved must be what was there before it."""
    torch.set_num_threads(1)
    count = 4 << 20
    names = [f"weight.{i:03d}" for i in range(max(1, size // 4 // count))]

    def expected(number: int) -> torch.Tensor:
        return torch.rand(count, generator=torch.Generator().manual_seed(number))

    state = {"model": {name: nn.Parameter(expected(i)) for i, name in enumerate(names)}}
    gradient = torch.ones(count)
    for parameter in state["model"].values():
        parameter.grad = gradient  # one for all: it is the state that is measured
    optimizer = torch.optim.SGD(state["model"].values(), lr=1.0, foreach=False)
    pyckpt.configure(max_pinned_bytes=_BUDGET)
    stager = pyckpt.PinnedStager(optimizers=[optimizer])

    def save() -> None:
        future: Any = async_save(
            state,
            storage_writer=pyckpt.DirectWriter(path, stager=stager),
            planner=pyckpt.SavePlanner(),
            no_dist=True,
        )
        optimizer.step()
        future.result()

    sample = peak_growth(save)
    found = {"model": {name: torch.empty(count) for name in names}}
    pyckpt.load(found, path)
    for i, name in enumerate(names):
        if not torch.equal(found["model"][name], expected(i)):
            raise WrongBytes(f"budget: {name} is not what it was at the call")
    return sample


def measure_budget(report: Report, options: Options) -> None:
    path = options.directory / "checkpoint"
    samples = []
    for _ in range(min(3, options.rounds)):
        samples += in_children(1, _save_in_child, options.size, path)
        remove(path)
    report.add("budget", {OURS: samples})
    report.table(
        f"{options.size / MIB:,.0f} MiB saved by an engine of {_BUDGET // MIB} MiB",
        "budget",
        {"growth_bytes": ("peak growth MiB", lambda size: size / MIB)},
    )
    growth = report.median("budget", OURS, "growth_bytes") or math.nan
    report.target(
        f"budget: peak growth, max_pinned_bytes {_BUDGET // MIB} MiB, state "
        f"{options.size / MIB:,.0f} MiB",
        growth / MIB,
        at_most=400,
        unit="MiB",
    )


SECTIONS: dict[str, Callable[[Report, Options], None]] = {
    "guarded": measure_guarded,
    "small": measure_small,
    "large": measure_large,
    "overlap": measure_overlap,
    "budget": measure_budget,
}

if __name__ == "__main__":
    assert __doc__ is not None
    sys.exit(run("stall", SECTIONS, __doc__))
