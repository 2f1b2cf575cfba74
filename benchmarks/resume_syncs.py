"""What a resumed optimizer costs: synchronisations, copies and time of a training step.

The experiment of Lightning #19955: an MLP of 10 parameters, Adam, 200 steps. Four optimizers take
them: a fresh one; one whose state was restored and then moved to the GPU, ``step`` too, as
Lightning did when that thread was opened; one restored as the Lightning that is installed does,
which loads to the host and then moves all but what is called ``step``; one restored by
``pyckpt.optim.load_state_dict``. The second and the last load a checkpoint whose tensors are on the
GPU, as ``torch.load(..., map_location="cuda")`` leaves them. Without Lightning its row is left out.

With a GPU everything is measured. Without one the same optimizers step on fake CUDA tensors: the
script shows where their state lies, and counts what the host would read.

To see it as the thread did:

    nsys profile --trace cuda,nvtx python benchmarks/resume_syncs.py --variant "moved to the GPU"
    pyckpt syncs report1.nsys-rep --range optimizer
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, Report, Sample, machine
from torch import nn

from pyckpt import optim
from pyckpt.profiling import SyncCounts, count_syncs, fake_cuda

DEVICE = torch.device("cuda", 0)
INPUTS, HIDDEN, OUTPUTS = 6875, (2048, 1024, 512, 256), 7
BATCH = 32768
PARAMETERS = 2 * (len(HIDDEN) + 1)

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}
FRESH, MOVED, LIGHTNING, OURS = "fresh", "moved to the GPU", "Lightning's mover", "pyckpt.optim"
VARIANTS = (FRESH, MOVED, LIGHTNING, OURS)

# Reads of misplaced scalars, per parameter and step, that the source of torch.optim (2.6 to 2.15)
# has, by foreach: of `step`, and of NAdam's `mu_product`.
READS = {
    ("Adam", False): 1,
    ("Adam", True): 2,
    ("NAdam", False): 3,
    ("NAdam", True): 5,
    ("RAdam", False): 1,
    ("RAdam", True): 5,
}

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def mlp() -> nn.Sequential:
    # A torch without CUDA cannot draw random numbers on a GPU, not even fake ones.
    real = torch.cuda.is_available()
    widths = (INPUTS, *HIDDEN, OUTPUTS)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs, device=DEVICE if real else "meta")
        if not real:
            for name, parameter in list(linear.named_parameters()):
                setattr(linear, name, nn.Parameter(torch.empty_like(parameter, device=DEVICE)))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def moved(value: Any, device: torch.device = DEVICE) -> Any:
    """All tensors of a state, moved: what Lightning 2.2 did to each state of an optimizer, and
    what ``map_location`` does to a checkpoint."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: moved(entry, device) for key, entry in value.items()}
    if isinstance(value, list):
        return [moved(entry, device) for entry in value]
    return value


def checkpoint(make: Make) -> dict[str, Any]:
    """The state dict of an optimizer that took a few steps, every tensor on the device."""
    model = mlp()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    state: dict[str, Any] = moved(optimizer.state_dict())
    return state


def prepared(
    variant: str, make: Make, saved: dict[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    optimizer = make(list(model.parameters()))
    restore(variant, optimizer, saved)
    return model, optimizer


def restore(
    variant: str,
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    device: torch.device = DEVICE,
) -> None:
    """As that variant does it. ``saved`` is on the device. A fresh optimizer stays one."""
    if variant == MOVED:
        optimizer.load_state_dict(saved)
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = moved(state, device)
    elif variant == LIGHTNING:
        from lightning.fabric.utilities.optimizer import _optimizer_to_device

        # Its Trainer maps what it loads to the host.
        optimizer.load_state_dict(moved(saved, torch.device("cpu")))
        _optimizer_to_device(optimizer, device)
    elif variant == OURS:
        optim.load_state_dict(optimizer, saved)
    elif variant != FRESH:
        raise ValueError(f"no such variant: {variant}")


def available(report: Report, variants: Sequence[str] = VARIANTS) -> list[str]:
    """Those that can be measured here; says which Lightning that is."""
    lightning = version_of("lightning")
    if lightning is None:
        report.note(f"lightning is not installed: {LIGHTNING} is left out")
        return [variant for variant in variants if variant != LIGHTNING]
    report.note(f"{LIGHTNING}: lightning {lightning}")
    return list(variants)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def places(optimizer: torch.optim.Optimizer) -> str:
    """Where the first parameter's state lies."""
    state = next(iter(optimizer.state.values()))
    return ", ".join(
        f"{key} on {value.device}" for key, value in state.items() if torch.is_tensor(value)
    )


def per_step(counts: SyncCounts, steps: int) -> Sample:
    return {
        "waits": counts.total / steps,
        "items": counts.items / steps,
        "d2h_copies": counts.d2h_copies / steps,
        "d2h_bytes": counts.d2h_bytes / steps,
        "all_d2h_copies": counts.d2h_copies,
    }


# --- without a GPU ----------------------------------------------------------------------------


def on_fakes(report: Report, variants: list[str], steps: int) -> None:
    for name, cls in OPTIMIZERS.items():
        for foreach in (True, False):
            group = f"{name}, foreach={foreach}"
            # All steps are alike: the experiment's number of them is for the experiment itself.
            taken = steps if (name, foreach) == ("Adam", True) else min(steps, 10)

            def make(
                parameters: list[nn.Parameter], cls: Any = cls, foreach: bool = foreach
            ) -> torch.optim.Optimizer:
                optimizer: torch.optim.Optimizer = cls(parameters, lr=0.01, foreach=foreach)
                return optimizer

            with fake_cuda():
                saved = checkpoint(make)
                for variant in variants:
                    model, optimizer = prepared(variant, make, saved)
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    optimizer.step()
                    with count_syncs() as counts:
                        for _ in range(taken):
                            optimizer.step()
                    report.add(group, {variant: [per_step(counts, taken)]})
                    if foreach:
                        report.note(f"{name}, {variant}: {places(optimizer)}")
            if MOVED in variants:
                found = report.median(group, MOVED, "items")
                assert found is not None
                report.target(
                    f"{group}, {MOVED}: reads per parameter and step, off {READS[name, foreach]}",
                    abs(found / PARAMETERS - READS[name, foreach]),
                    at_most=0,
                )


# --- with a GPU -------------------------------------------------------------------------------


@contextmanager
def marked(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def on_gpu(report: Report, variants: list[str], steps: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, INPUTS, generator=generator).to(DEVICE)
    y = torch.randn(BATCH, OUTPUTS, generator=generator).to(DEVICE)
    loss_of = nn.MSELoss()

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for _ in range(number):
            with marked("it step"):
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                with marked("optimizer"):
                    optimizer.step()

    saved = checkpoint(make)
    trained = {variant: prepared(variant, make, saved) for variant in variants}
    samples: dict[str, list[Sample]] = {variant: [] for variant in variants}
    for variant, (model, optimizer) in trained.items():
        train(model, optimizer, 3)
        report.note(f"Adam, {variant}: {places(optimizer)}")
    for _ in range(rounds):
        for variant, (model, optimizer) in trained.items():
            # Counted in steps of their own: operators take longer while they are watched.
            with count_syncs() as counts:
                train(model, optimizer, steps)
            torch.cuda.synchronize()
            start = time.perf_counter()
            train(model, optimizer, steps)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / steps
            samples[variant].append({"seconds": seconds, **per_step(counts, steps)})
    report.add("Adam", samples)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="inner steps (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, help="samples on a GPU (default: 5)")
    parser.add_argument(
        "--variant", choices=VARIANTS, action="append", help="this alone; may be repeated"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="the results (default: benchmarks/results/resume_syncs.json, or "
        "resume_syncs-fake.json without a GPU, for a run of all variants and steps)",
    )
    chosen = parser.parse_args()
    variants = [variant for variant in VARIANTS if variant in (chosen.variant or VARIANTS)]
    gpu = torch.cuda.is_available()
    name = "resume_syncs" if gpu else "resume_syncs-fake"
    output = chosen.output
    if output is None and not chosen.variant and chosen.steps == 200:
        output = ROOT / "benchmarks" / "results" / f"{name}.json"
    with tempfile.TemporaryDirectory() as directory:
        described = machine(Path(directory))
    for key in ("file_system", "mount_options", "device", "fio"):  # nothing is written
        described.pop(key)
    described["gpu"] = torch.cuda.get_device_name(DEVICE) if gpu else None
    parameters: dict[str, Any] = {"steps": chosen.steps, "parameters": PARAMETERS}
    if gpu:
        parameters |= {"rounds": chosen.rounds, "batch": BATCH}
    report = Report(name, parameters, described)
    report.show_machine()
    variants = parameters["variants"] = available(report, variants)
    if gpu:
        on_gpu(report, variants, chosen.steps, chosen.rounds)
    else:
        report.note("no GPU: optimizers step on fake CUDA tensors, and nothing is timed")
        on_fakes(report, variants, chosen.steps)
    counted = {
        "waits": ("waits\na step", float),
        "items": (".item()\na step", float),
        "d2h_copies": ("D2H copies\na step", float),
        "d2h_bytes": ("D2H bytes\na step", float),
        "all_d2h_copies": ("D2H copies\nin all", float),
    }
    timed = {"seconds": ("ms\na step", lambda seconds: seconds * 1e3)} if gpu else {}
    for group in report.results:
        report.table(group, group, {**timed, **counted})
        if {FRESH, OURS} <= set(variants):
            for metric, what in (("waits", "waits"), ("d2h_copies", "D2H copies")):
                ours, fresh = (report.median(group, v, metric) for v in (OURS, FRESH))
                assert ours is not None
                assert fresh is not None
                report.target(
                    f"{group}, {OURS}: {what} a step, more than fresh", ours - fresh, at_most=0
                )
    if MOVED in variants and chosen.steps == 200:
        group = "Adam" if gpu else "Adam, foreach=True"
        report.target(
            f"{group}, {MOVED}: D2H copies in 200 steps (the thread: 4,094, of them 74 fresh)",
            report.median(group, MOVED, "all_d2h_copies"),
            at_least=4000,
        )
    report.finish(output)
    return 0 if all(target.met for target in report.targets) else 1


if __name__ == "__main__":
    sys.exit(main())
