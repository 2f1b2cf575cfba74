"""What a Checkpointer costs, in time and in lines of code.

    python benchmarks/checkpointer.py [--quick] [--only SECTION]

- restore: a state of 2 GiB, by ``Checkpointer.restore`` and by `DirectReader` alone.
- latest: the newest of 1,000 checkpoints, and all of them.
- export: the model as safetensors, beside a bare loop that reads and writes as many bytes.
- lines: whole programs that save, find, prune, resume and stop by hand, beside the same programs
  with a Checkpointer (`lines/`; the tests run all of them, interrupt them and resume them).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from _common import (
    MIB,
    Options,
    Report,
    Sample,
    Variant,
    WrongBytes,
    drop_page_cache,
    gigabytes_per_second,
    in_children,
    interleave,
    large_state,
    nbytes,
    peak_growth,
    remove,
    run,
    timed,
)
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load

import pyckpt

CHECKPOINTS = 1000
COPY_BYTES = 16 * MIB


class Model(nn.Module):
    """The tensors of the large state, as parameters."""

    def __init__(self, size: int, *, fill: bool) -> None:
        super().__init__()
        for name, tensor in large_state(size, fill=fill)["model"].items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor))


def saved(options: Options) -> tuple[Path, Model]:
    """A checkpoint of a model of the size that is asked for."""
    directory = options.directory / "run"
    model = Model(options.size, fill=True)
    if not directory.exists():
        with pyckpt.Checkpointer(directory) as checkpointer:
            checkpointer.save(1, {"model": model}, final=True)
    return directory, model


# --- restore --------------------------------------------------------------------------------------


def measure_restore(report: Report, options: Options) -> None:
    directory, model = saved(options)
    target = Model(options.size, fill=False)

    def check() -> None:
        for name, tensor in target.state_dict().items():
            if not torch.equal(tensor, model.state_dict()[name]):
                raise WrongBytes(f"{name} is not what was saved")
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()

    def restore() -> Sample:
        with pyckpt.Checkpointer(directory) as checkpointer:
            return timed(lambda: checkpointer.restore({"model": target}))

    def read() -> Sample:
        state = {"model": {k: v.detach() for k, v in target.state_dict().items()}}
        reader = pyckpt.DirectReader(directory / "step-00000001")
        return timed(lambda: load(state, storage_reader=reader))

    samples = interleave(
        [Variant("Checkpointer.restore", restore, check), Variant("DirectReader", read, check)],
        options.rounds,
        before=lambda: drop_page_cache(directory),
        console=report.console,
        title="restore",
    )
    report.add("restore", samples)
    report.table(
        f"Restoring {options.size / MIB:,.0f} MiB from disk",
        "restore",
        {"seconds": gigabytes_per_second(options.size)},
    )
    report.target(
        "speed of restore, over DirectReader's",
        report.ratio("restore", "DirectReader", "Checkpointer.restore"),
        at_least=0.97,
        unit="x",
    )


# --- latest ---------------------------------------------------------------------------------------


def measure_latest(report: Report, options: Options) -> None:
    directory = options.directory / "many"
    state = {"model": nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))}
    with pyckpt.Checkpointer(directory) as checkpointer:
        first = checkpointer.save(1, state).wait()
    for step in range(2, CHECKPOINTS + 1):
        path = directory / f"step-{step:08d}"
        path.mkdir()
        for name in os.listdir(first):
            os.link(first / name, path / name)

    def latest() -> Sample:
        checkpointer = pyckpt.Checkpointer(directory)
        sample = timed(lambda: found.append(checkpointer.latest()))
        checkpointer.close()
        return sample

    def all_of_them() -> Sample:
        checkpointer = pyckpt.Checkpointer(directory)
        sample = timed(lambda: counts.append(len(checkpointer.checkpoints())))
        checkpointer.close()
        return sample

    found: list[pyckpt.CheckpointInfo | None] = []
    counts: list[int] = []

    def check_latest() -> None:
        if found[-1] is None or found[-1].step != CHECKPOINTS:
            raise WrongBytes(f"the newest is {found[-1]}")

    def check_all() -> None:
        if counts[-1] != CHECKPOINTS:
            raise WrongBytes(f"{counts[-1]} of {CHECKPOINTS} were found")

    samples = interleave(
        [
            Variant("latest()", latest, check_latest),
            Variant("checkpoints()", all_of_them, check_all),
        ],
        options.rounds,
        before=lambda: drop_page_cache(directory),
        console=report.console,
        title="latest",
    )
    report.add("latest", samples)
    report.table(
        f"Among {CHECKPOINTS:,} checkpoints of 100 tensors",
        "latest",
        {"seconds": ("ms", lambda seconds: 1e3 * seconds)},
    )
    milliseconds = report.median("latest", "latest()")
    report.target(
        f"latest() over {CHECKPOINTS:,} checkpoints",
        None if milliseconds is None else 1e3 * milliseconds,
        at_most=100,
        unit="ms",
    )


# --- export ---------------------------------------------------------------------------------------


def copy(source: Path, target: Path) -> None:
    """Read a file and write another of its bytes, durably: what an export cannot do without."""
    buffer = bytearray(COPY_BYTES)
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while count := reader.readinto(buffer):
            writer.write(memoryview(buffer)[:count])
        os.fsync(writer.fileno())


def memory_of_export(rank: int, directory: Path, target: Path) -> Sample:
    checkpointer = pyckpt.Checkpointer(directory)
    pyckpt.configure()  # the engine's memory is there before
    return peak_growth(lambda: checkpointer.export(target))


def measure_export(report: Report, options: Options) -> None:
    directory, model = saved(options)
    (data,) = (directory / "step-00000001").glob("*.distcp")
    target, copied = options.directory / "exported", options.directory / "copied"

    def export() -> Sample:
        checkpointer = pyckpt.Checkpointer(directory)
        sample = timed(lambda: checkpointer.export(target, max_shard_size=1 << 60))
        checkpointer.close()
        return sample

    def check() -> None:
        from safetensors.torch import load_file

        found = load_file(target / "model.safetensors")
        for name, tensor in model.state_dict().items():
            if not torch.equal(found[name], tensor):
                raise WrongBytes(f"export: {name} is not what was saved")

    samples = interleave(
        [
            Variant("export", export, check, clean=lambda: remove(target)),
            Variant(
                "read, write, fsync",
                lambda: timed(lambda: copy(data, copied)),
                clean=lambda: remove(copied),
            ),
        ],
        options.rounds,
        before=lambda: drop_page_cache(directory),
        console=report.console,
        title="export",
    )
    report.add("export", samples)
    report.table(
        f"Exporting {nbytes({'model': dict(model.state_dict())}) / MIB:,.0f} MiB as safetensors",
        "export",
        {"seconds": gigabytes_per_second(options.size)},
    )
    report.target(
        "speed of export, over the bare loop's",
        report.ratio("export", "read, write, fsync", "export"),
        at_least=0.8,
        unit="x",
    )
    (growth,) = in_children(1, memory_of_export, directory, target)
    remove(target)
    report.add("export memory", {"export": [growth]})
    report.target("memory that export takes", growth["growth_bytes"] / MIB, at_most=160, unit="MiB")


# --- lines of code --------------------------------------------------------------------------------

LINES = Path(__file__).with_name("lines")


def code_lines(path: Path) -> int:
    """Lines of a program that are neither empty nor comments nor in the docstring at the top."""
    text = path.read_text()
    if text.startswith('"""'):
        text = text.split('"""', 2)[2]
    lines = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def measure_lines(report: Report, options: Options) -> None:
    groups: dict[str, dict[str, list[Sample]]] = {}
    for path in sorted(LINES.glob("[!_]*.py")):
        name, _, which = path.stem.rpartition("_")
        groups.setdefault(name, {})[which] = [{"lines": float(code_lines(path))}]
    for name, samples in groups.items():
        report.add(f"lines {name}", samples)
        report.table(
            f"Lines of user code: {name.replace('_', ' ')}",
            f"lines {name}",
            {"lines": ("lines", lambda count: count)},
        )


SECTIONS: dict[str, Any] = {
    "restore": measure_restore,
    "latest": measure_latest,
    "export": measure_export,
    "lines": measure_lines,
}

if __name__ == "__main__":
    sys.exit(run("checkpointer", SECTIONS, __doc__ or ""))
