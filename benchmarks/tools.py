"""The commands that look at checkpoints, beside what the disk gives.

``verify`` reads all of a checkpoint, beside fio with direct I/O on a file of that size. ``inspect``
shows a checkpoint of 100,000 tensors, and ``ls`` a directory of 1,000 checkpoints: as calls in a
process that has imported what they need, with all that is printed. And what ``import pyckpt`` adds
to ``import torch``, of new processes.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from _common import (
    ROOT,
    Options,
    Report,
    Sample,
    Variant,
    WrongBytes,
    drop_page_cache,
    fio,
    gigabytes_per_second,
    interleave,
    large_state,
    remove,
    run,
    timed,
)

import pyckpt
from pyckpt.cli.app import app

ITEMS = 100_000
STEPS = 1_000
IMPORTS = 5


def _command(*arguments: str) -> Callable[[], Sample]:
    def called() -> Sample:
        with redirect_stdout(io.StringIO()):
            return timed(lambda: _checked(app(list(arguments), standalone_mode=False)))

    return called


def _checked(status: object) -> None:
    if status:
        raise WrongBytes(f"the command ended with {status}")


def verify(report: Report, chosen: Options) -> None:
    checkpoint, file = chosen.directory / "checkpoint", chosen.directory / "fio"
    pyckpt.save(large_state(chosen.size), checkpoint)
    (data,) = checkpoint.glob("*.distcp")
    size = data.stat().st_size // (8 << 20) * (8 << 20)
    fio(file, size, "write")
    samples = interleave(
        [
            Variant("fio", lambda: fio(file, size, "read")),
            Variant("pyckpt verify", _command("verify", str(checkpoint))),
        ],
        chosen.rounds,
        before=lambda: drop_page_cache(chosen.directory),
        console=report.console,
        title=f"verify: {size / 1e9:.2f} GB",
    )
    report.add("verify", samples)
    report.table("verify", "verify", {"seconds": gigabytes_per_second(size)})
    report.target(
        "verify, of fio's speed",
        report.ratio("verify", "fio", "pyckpt verify"),
        at_least=0.85,
    )
    remove(checkpoint)
    remove(file)


def inspect(report: Report, chosen: Options) -> None:
    count = ITEMS // 10 if chosen.quick else ITEMS
    checkpoint = chosen.directory / "many"
    tensors = {f"layers.{i // 10}.p{i % 10}.weight": torch.zeros(4) for i in range(count)}
    pyckpt.save({"model": tensors}, checkpoint)
    samples = interleave(
        [
            Variant("tree", _command("inspect", str(checkpoint))),
            Variant("all keys", _command("inspect", str(checkpoint), "--depth", "9")),
            Variant("--top 10", _command("inspect", str(checkpoint), "--top", "10")),
        ],
        chosen.rounds,
        before=lambda: None,
        console=report.console,
        title=f"inspect: {count} items",
    )
    report.add("inspect", samples)
    report.table("inspect", "inspect", {"seconds": ("s", float)})
    name = f"inspect of {count} items"
    report.target(name, report.median("inspect", "tree"), at_most=2, unit="s")
    remove(checkpoint)


def ls(report: Report, chosen: Options) -> None:
    count = STEPS // 10 if chosen.quick else STEPS
    root = chosen.directory / "run"
    with pyckpt.Checkpointer(root) as checkpointer:
        checkpointer.save(0, {"w": torch.zeros(64), "n": 1}, metrics={"loss": 0.5})
    for step in range(1, count):
        shutil.copytree(root / "step-00000000", root / f"step-{step:08d}")
    samples = interleave(
        [Variant("ls", _command("ls", str(root)))],
        chosen.rounds,
        before=lambda: None,
        console=report.console,
        title=f"ls: {count} checkpoints",
    )
    report.add("ls", samples)
    report.table("ls", "ls", {"seconds": ("s", float)})
    report.target(f"ls of {count}", report.median("ls", "ls"), at_most=1, unit="s")
    remove(root)


def imports(report: Report, chosen: Options) -> None:
    def importing(what: str) -> Callable[[], Sample]:
        # CPU time, which other programs on the machine change less; Python counts all threads.
        code = f"{what}; import time; print(time.process_time(), time.perf_counter())"
        wall = f"import time; start = time.perf_counter(); {what}; print(time.perf_counter()-start)"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}

        def called() -> Sample:
            def told(code: str) -> float:
                command = [sys.executable, "-c", code]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
                return float(done.stdout.split()[0])

            return {"seconds": told(wall), "import_cpu_seconds": told(code)}

        return called

    samples = interleave(
        [
            Variant("torch", importing("import torch")),
            Variant("torch and pyckpt", importing("import torch, pyckpt")),
        ],
        max(chosen.rounds, IMPORTS),
        before=lambda: None,
        console=report.console,
        title="import",
    )
    report.add("import", samples)
    report.table(
        "import", "import", {"seconds": ("s", float), "import_cpu_seconds": ("CPU s", float)}
    )
    both = report.median("import", "torch and pyckpt"), report.median("import", "torch")
    assert both[0] is not None
    assert both[1] is not None
    added = (both[0] - both[1]) * 1e3
    report.target("import pyckpt, beyond torch", added, at_most=150, unit="ms")


SECTIONS = {"verify": verify, "inspect": inspect, "ls": ls, "import": imports}

if __name__ == "__main__":
    Path(ROOT / "build").mkdir(exist_ok=True)
    sys.exit(run("tools", SECTIONS, __doc__))
