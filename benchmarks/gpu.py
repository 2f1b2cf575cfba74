"""What saves cost on a GPU, and whether they are right: a section at a time.

    python benchmarks/gpu.py [SECTION...] [--seconds 150] [--dir DIR] [--results DIR]
    python benchmarks/gpu.py --cpu
    python benchmarks/gpu.py --plots

staging-large  Large tensors out of the GPU: seconds and blocked milliseconds of PinnedStager beside
               one bare copy to pinned memory, DefaultStager as async_save makes it and with all
               options, and torch_checkpointing's. What taking and registering memory costs.
staging-small  The same of 20,000 tensors of 16 KiB.
staging-many   The same of 20,000 tensors of as many bytes as the large ones.
torn           Late kernels on the caller's stream before the call, and changes right after it: the
               share of wrong values in checkpoints of each.
guard          Saves with steps right after the call under torch.compile, CUDA graphs, GradScaler,
               accumulation, several optimizers, several streams; bytes compared.
training       A GPT of 1.3 billion parameters with AdamW: steps before, during and after a save,
               tokens lost beside their noise, idle time of the device from a trace.
training-beside  The same beside saves of stock, torch_checkpointing and DefaultStager.
syncs          What makes the training thread wait: as torch and as CUDA's trace count it, and
               whether calls return while the stream is busy.
resume         Restored optimizers: synchronisations, copies and time of a step.
storage        Loading from, and saving to, the disk, beside stock and bare direct I/O.
offload        Optimizer state out and back, beside the loop that people write.

Sizes are scaled to the memory of GPU and host. Each section takes --seconds at most, as far as it
can tell beforehand: what there is no time for is left out, and said. Its results are in
DIR/gpu-SECTION.json from its first figure on, so that what cuts it off takes no more than what it
was at. A section that fails does not stop the others. Ours is measured to the end before anybody
else's; a peer that fails is a note. The exit code is 1 if a section failed or bytes were wrong,
and 3 if a target could not be measured.

``--cpu`` walks the same code with tiny CPU tensors, to see that it runs: nothing that it prints is
a figure of a GPU, and it writes no results. ``--plots`` draws what the results have, with
matplotlib, where there need not be a GPU.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _common import ROOT, Report, Sample, Target, WrongBytes, machine
from _gpu_common import SMOKE, Setting, scale_of
from _gpu_correctness import measure_guard, measure_torn
from _gpu_plots import draw
from _gpu_speed import (
    measure_offload,
    measure_staging_large,
    measure_staging_many,
    measure_staging_small,
    measure_storage,
)
from _gpu_training import (
    measure_resume,
    measure_syncs,
    measure_training,
    measure_training_beside,
)

SECTIONS: dict[str, Callable[[Setting], None]] = {
    # In the order of what one would miss most, should time run out.
    "staging-large": measure_staging_large,
    "staging-small": measure_staging_small,
    "torn": measure_torn,
    "guard": measure_guard,
    "training": measure_training,
    "training-beside": measure_training_beside,
    "syncs": measure_syncs,
    "staging-many": measure_staging_many,
    "storage": measure_storage,
    "resume": measure_resume,
    "offload": measure_offload,
}


INCOMPLETE = 3
"""The exit code where targets could not be measured; `scripts/gpu_steps.py` knows it."""


class CutOff(BaseException):
    """Somebody wants this process to end."""


@dataclass
class SectionReport(Report):
    """Is on disk from its first figure on."""

    output: Path | None = None
    state: str = "cut off"
    """What the file says of the section: "cut off", until it is known better."""
    traces: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, group: str, samples: Mapping[str, Sequence[Sample]]) -> None:
        super().add(group, samples)
        self.save()

    def target(self, *arguments: Any, **options: Any) -> None:
        super().target(*arguments, **options)
        self.save()

    def note(self, text: str) -> None:
        super().note(text)
        self.save()

    def save(self) -> None:
        if self.output is not None:
            self.write(self.output)

    def content(self) -> dict[str, Any]:
        return {**super().content(), "state": self.state, "step_milliseconds": self.traces}


def gpu_of(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides `machine`."""
    properties: Any = torch.cuda.get_device_properties(device)
    found: dict[str, Any] = {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "driver": None,
    }
    if shutil.which("nvidia-smi"):
        query = "driver_version,clocks.sm,clocks.mem,pcie.link.gen.current,pcie.link.width.current"
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        if answer.returncode == 0:
            values = [value.strip() for value in answer.stdout.splitlines()[0].split(",")]
            found["driver"] = values[0]
            found["clocks_and_link"] = ", ".join(values[1:])
    return found


def run_section(name: str, setting: Setting) -> str:
    """Run it; return "passed", or how it failed."""
    report = setting.report
    report.console.rule(name)
    start = time.monotonic()
    try:
        SECTIONS[name](setting)
        outcome = "passed"
    except WrongBytes as error:
        outcome = "wrong bytes"
        report.note(f"{name}: WRONG BYTES: {error}")
    except CutOff:
        outcome = "cut off"
        report.note(f"{name} was cut off: what was measured until then is here")
    except Exception:
        outcome = "failed"
        # Brackets of a traceback are no markup.
        report.notes.append(f"{name} failed: {traceback.format_exc()}")
        report.console.print(report.notes[-1], markup=False, style="red")
    finally:
        setting.close()
        setting.empty_cache()
    report.note(f"section {name} took {time.monotonic() - start:.0f} s")
    if any("wrong" in target.name and target.met is False for target in report.targets):
        return "wrong bytes"
    # What has no value was not measured, or not all of what it stands for.
    missing = [target.name for target in targets_of(setting) if target.met is None]
    if outcome == "passed" and missing:
        report.note(f"{name} is incomplete: {'; '.join(missing)}")
        return "incomplete"
    return outcome


def targets_of(setting: Setting) -> list[Target]:
    """Those that mean something there: without a GPU, those alone that are about bytes."""
    return [t for t in setting.report.targets if setting.cuda or "wrong" in t.name]


def allow_many_files() -> None:
    """Shared memory takes a descriptor for each tensor, and the usual limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="default: all of them")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build" / "benchmarks",
        help="where to write checkpoints (default: build/benchmarks)",
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="a section (default: 150)")
    parser.add_argument("--cpu", action="store_true", help="walk the code; measures nothing")
    parser.add_argument("--plots", action="store_true", help="draw the results there are")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="directory of the results (default: benchmarks/results)",
    )
    chosen = parser.parse_args()
    if unknown := set(chosen.sections) - set(SECTIONS):
        parser.error(
            f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}"
        )
    if chosen.plots:
        for path in draw(chosen.results):
            print(f"written: {os.path.relpath(path)}")
        return 0
    if not chosen.cpu and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false (--cpu walks the code without one)")
        return 1
    device = torch.device("cpu") if chosen.cpu else torch.device("cuda", 0)
    chosen.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="pyckpt-", dir=chosen.dir))
    signal.signal(signal.SIGTERM, _cut_off)
    allow_many_files()
    try:
        return _run(chosen, device, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _cut_off(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise CutOff


def _run(chosen: argparse.Namespace, device: torch.device, directory: Path) -> int:
    described = machine(directory)
    # A copy of the tree may have come without its history.
    described["commit"] = described["commit"] or os.environ.get("PYCKPT_COMMIT")
    scale = SMOKE
    if chosen.cpu:
        torch.set_num_threads(1)
        print("a walk through the code with CPU tensors: NOTHING here is a figure of a GPU")
    else:
        from pyckpt import _C

        if not _C.cuda:
            print("pyckpt was built without CUDA: PYCKPT_CUDA=1 python setup.py build_ext -i")
            return 1
        torch.cuda.set_device(device)
        described |= gpu_of(device)
        scale = scale_of(device)
    outcomes: dict[str, str] = {}
    for name in chosen.sections or SECTIONS:
        report = SectionReport(
            f"gpu-{name}",
            {"seconds": chosen.seconds, "scale": vars(scale)},
            described,
            output=None if chosen.cpu else chosen.results / f"gpu-{name}.json",
        )
        if not outcomes:
            report.show_machine()
        report.save()
        deadline = time.monotonic() + chosen.seconds
        setting = Setting(report, directory, device, scale, deadline, traces=report.traces)
        report.state = outcomes[name] = run_section(name, setting)
        if chosen.cpu:
            report.targets = targets_of(setting)
        report.finish(report.output)
        if outcomes[name] == "cut off":
            break
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}")
    if chosen.cpu:
        print("NOTHING above is a figure of a GPU")
    if set(outcomes.values()) <= {"passed", "incomplete"}:
        return INCOMPLETE if "incomplete" in outcomes.values() else 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
