"""What saves cost on a GPU, and whether they are right: run by ``make gpu``.

    python benchmarks/gpu.py [--dir DIR] [--minutes 5] [--only SECTION]
    python benchmarks/gpu.py --cpu

staging     Large tensors, 20,000 tensors of 16 KiB and 20,000 of as many bytes as the large ones,
            out of the GPU: seconds and blocked milliseconds of PinnedStager beside one bare copy to
            pinned memory, DefaultStager as async_save makes it and with all options, and
            torch_checkpointing's. What taking and registering memory costs, and prewarm saves.
torn        Late kernels on the caller's stream before the call, and changes right after it: the
            share of wrong values in checkpoints of each.
guard       Saves with steps right after the call under torch.compile, CUDA graphs, GradScaler,
            accumulation, several optimizers, several streams; bytes compared.
syncs       What makes the training thread wait, counted.
training    A GPT of 1.3 billion parameters with AdamW: steps before, during and after a save,
            tokens lost, idle time of the device from a trace.
storage     Saving to, and loading from, the disk, beside stock and bare direct I/O.
resume      Restored optimizers: synchronisations, copies and time of a step.
offload     Optimizer state out and back, beside the loop that people write.

Sizes are scaled to the memory of GPU and host. What there is no time for is left out, and said. A
section that fails does not stop the others. Results go to
benchmarks/results/gpu-<date>-<commit>.json, with the tables as .txt and, where matplotlib is
installed, plots as .png beside it. The exit code is 1 if a section failed or bytes were wrong.

``--cpu`` walks the same code with tiny CPU tensors, to see that it runs: nothing that it prints is
a figure of a GPU, and it writes no results.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, Report, WrongBytes, machine
from _gpu_common import BARE, OURS, SMOKE, Setting, scale_of
from _gpu_correctness import measure_guard, measure_torn
from _gpu_speed import measure_offload, measure_staging, measure_storage
from _gpu_training import measure_resume, measure_syncs, measure_training
from _savers import TorchCheckpointing

SECTIONS: dict[str, Callable[[Setting], None]] = {
    # In the order of what one would miss most, should time run out.
    "staging": measure_staging,
    "torn": measure_torn,
    "guard": measure_guard,
    "syncs": measure_syncs,
    "training": measure_training,
    "storage": measure_storage,
    "resume": measure_resume,
    "offload": measure_offload,
}


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


def run_sections(setting: Setting, sections: list[str]) -> list[str]:
    """Run them; return those that failed."""
    report, failed = setting.report, []
    for name, measure in SECTIONS.items():
        if name not in sections:
            continue
        report.console.rule(name)
        start = time.monotonic()
        try:
            measure(setting)
        except WrongBytes as error:
            failed.append(name)
            report.note(f"{name}: WRONG BYTES: {error}")
        except Exception:
            failed.append(name)
            # Brackets of a traceback are no markup.
            report.notes.append(f"{name} failed: {traceback.format_exc()}")
            report.console.print(report.notes[-1], markup=False, style="red")
        finally:
            setting.empty_cache()
        report.note(f"section {name} took {time.monotonic() - start:.0f} s")
    return failed


def plot(setting: Setting, stem: Path) -> None:
    """Step times beside saves, and the speed of staging."""
    if importlib.util.find_spec("matplotlib") is None:
        setting.report.note("matplotlib is not installed: no plots")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if setting.traces:
        figure, all_axes = pyplot.subplots(
            len(setting.traces), 1, figsize=(9, 2.4 * len(setting.traces)), squeeze=False
        )
        for (saver, phases), axes in zip(setting.traces.items(), all_axes[:, 0], strict=True):
            at = 0
            for phase, values in phases.items():
                axes.plot(range(at, at + len(values)), values, ".-", markersize=3, label=phase)
                at += len(values)
            axes.set(title=saver, xlabel="step", ylabel="ms")
            axes.set_yscale("log")
        all_axes[0, 0].legend()
        figure.tight_layout()
        figure.savefig(f"{stem}-steps.png", dpi=150)
        pyplot.close(figure)
    groups = [g for g in setting.report.results if g.startswith("staging") and "memory" not in g]
    if groups:
        figure, all_axes = pyplot.subplots(1, len(groups), figsize=(4.5 * len(groups), 3.2))
        for group, axes in zip(groups, [all_axes] if len(groups) == 1 else all_axes, strict=True):
            bare = setting.report.median(group, BARE)
            assert bare is not None
            variants = list(setting.report.results[group])
            speeds = [bare / (setting.report.median(group, name) or bare) for name in variants]
            colors = ["tab:orange" if name == OURS else "tab:blue" for name in variants]
            axes.barh(variants, speeds, color=colors)
            axes.set(title=group, xlabel="speed over the bare copy's")
            axes.invert_yaxis()
        figure.tight_layout()
        figure.savefig(f"{stem}-staging.png", dpi=150)
        pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build" / "benchmarks",
        help="where to write checkpoints (default: build/benchmarks)",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time to use (default: 5)")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="may be repeated")
    parser.add_argument("--cpu", action="store_true", help="walk the code; measures nothing")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "benchmarks" / "results",
        help="directory of the results (default: benchmarks/results)",
    )
    chosen = parser.parse_args()
    if not chosen.cpu and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false (--cpu walks the code without one)")
        return 1
    device = torch.device("cpu") if chosen.cpu else torch.device("cuda", 0)
    chosen.dir.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="pyckpt-", dir=chosen.dir))
    try:
        return _run(chosen, device, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(chosen: argparse.Namespace, device: torch.device, directory: Path) -> int:
    described = machine(directory)
    # A copy of the tree may have come without its history.
    described["commit"] = described["commit"] or os.environ.get("PYCKPT_COMMIT")
    scale = SMOKE
    if not chosen.cpu:
        from pyckpt import _C

        if not _C.cuda:
            print("pyckpt was built without CUDA: PYCKPT_CUDA=1 python setup.py build_ext -i")
            return 1
        torch.cuda.set_device(device)
        described |= gpu_of(device)
        scale = scale_of(device)
    report = Report("gpu", {"minutes": chosen.minutes, "scale": vars(scale)}, described)
    report.console.record = True
    report.show_machine()
    setting = Setting(
        report, directory, device, scale, deadline=time.monotonic() + 60 * chosen.minutes
    )
    if chosen.cpu:
        torch.set_num_threads(1)
        report.note("a walk through the code with CPU tensors: NOTHING here is a figure of a GPU")
    setting.rival, reason = (
        (None, "torch_checkpointing: not in a walk through the code")
        if chosen.cpu
        else TorchCheckpointing.where_it_runs(directory, cuda=True)
    )
    if setting.rival is None:
        report.note(f"left out: {reason}")
    try:
        failed = run_sections(setting, chosen.only or list(SECTIONS))
    finally:
        if setting.rival is not None:
            setting.rival.close()
    wrong = [t.name for t in report.targets if "wrong" in t.name and t.met is False]
    for name in failed:
        report.console.print(f"[bold red]FAILED[/] {name}")
    if chosen.cpu:
        # Of the targets those alone mean something that are about bytes.
        report.targets = [target for target in report.targets if "wrong" in target.name]
        report.finish(None)
        report.note("NOTHING above is a figure of a GPU")
        return 1 if failed or wrong else 0
    stem = chosen.results / f"gpu-{described['date'][:10]}-{(described['commit'] or 'unknown')[:9]}"
    report.parameters["failed_sections"] = failed
    report.finish(stem.with_name(f"{stem.name}.json"))
    plot(setting, stem)
    report.console.save_text(f"{stem}.txt")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
