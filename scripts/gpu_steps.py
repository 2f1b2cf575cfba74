"""Runs what takes a GPU, step by step, each with a time limit of its own. Installs nothing.

scripts/gpu.sh [STEP...]       these steps, in this order, or all of them
scripts/gpu.sh --plan          says what there is, and how long it may take
scripts/gpu.sh --cpu           walks through them where there is no GPU, measures nothing

Each step leaves RESULTS/gpu-STEP.json as it ends, whatever its end: with date, commit, machine,
driver, torch, and what it measured or the end of what it printed. No step is started that has not
20 seconds left of --within, and none may go on beyond it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARK = ROOT / "benchmarks" / "gpu.py"
SCRATCH = ROOT / "build" / "benchmarks"
KERNEL = ROOT / "build" / "check_pack"
_LINES_KEPT = 200
_GRACE_S = 10.0
_LEAST_S = 20.0
_CPU_FACTOR = 5  # a walk is on any machine, beside anything
_PROBE_S = 15.0
INCOMPLETE = 3
"""The exit code of a benchmark whose sections measured only a part of what they are for."""


class NotRun(Exception):
    """Why a step cannot be run here, which is no failure of what it is for."""


@dataclass(frozen=True)
class Setting:
    python: str
    results: Path
    cpu: bool
    capability: str
    """Of the GPU: "9.0"."""
    cuda_home: Path

    def tool(self, name: str) -> str:
        """A program of the CUDA toolkit."""
        beside = self.cuda_home / "bin" / name
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is None:
            raise NotRun(f"{name} is neither in {self.cuda_home}/bin (CUDA_HOME) nor on the PATH")
        return found


@dataclass(frozen=True)
class Step:
    limit_s: int
    about_s: int
    """What it should take on an H100 whose disk writes and reads 1 GB/s: reckoned, not measured."""
    proves: str
    command: Callable[[Setting, float], Sequence[str]]
    """Given the setting, and the seconds that there are."""
    writes_results: bool = False
    """Whether the command writes RESULTS/gpu-STEP.json itself."""


def _build(setting: Setting, seconds: float) -> Sequence[str]:
    # Ninja compiles what has changed; without --force, setuptools would not see changed headers.
    return [setting.python, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]


def _tests(setting: Setting, seconds: float) -> Sequence[str]:
    command = [setting.python, "scripts/gpu_tests.py", "-q", "-p", "no:cacheprovider"]
    return [*command, "--collect-only"] if setting.cpu else command


def _kernel(setting: Setting, seconds: float) -> Sequence[str]:
    KERNEL.parent.mkdir(exist_ok=True)
    target = f"sm_{setting.capability.replace('.', '')}"
    sources = [
        "csrc/pack.cu",
        "csrc/pack_small.cu",
        "csrc/pack_cuda.cpp",
        "tests/native/check_pack.cu",
    ]
    # The host compares every byte, under the sanitizer too: without -O2 that takes the most time.
    options = ["-std=c++17", "-O2", "-lineinfo", f"-arch={target}", "-Icsrc"]
    options += [*sources, "-o", str(KERNEL)]
    run = "" if setting.cpu else ' && "$0"'
    return ["bash", "-c", f'"$@"{run}', str(KERNEL), setting.tool("nvcc"), *options]


def _sanitizer(setting: Setting, seconds: float) -> Sequence[str]:
    sanitizer = setting.tool("compute-sanitizer")
    if setting.cpu:
        raise NotRun("compute-sanitizer needs a GPU")
    if not KERNEL.exists():
        raise NotRun("the step `kernel` makes what it looks at: run that first")
    # No rounds: it loads the kernels and ends, which is enough to be refused.
    probe = [sanitizer, "--tool", "memcheck", str(KERNEL), "0"]
    code, lines = run_limited(probe, min(_PROBE_S, seconds))
    if code is None:
        raise NotRun(f"compute-sanitizer did not come to the end of nothing in {_PROBE_S:.0f} s")
    if any("Device not supported" in line for line in lines):
        raise NotRun("compute-sanitizer does not support this device, as in some virtual machines")
    tools = "for tool in memcheck racecheck initcheck synccheck; do"
    tools += ' echo "$tool"; "$0" --tool "$tool" --error-exitcode 1 "$1" || exit; done'
    return ["bash", "-c", tools, sanitizer, str(KERNEL)]


def _section(name: str) -> Callable[[Setting, float], Sequence[str]]:
    def command(setting: Setting, seconds: float) -> Sequence[str]:
        options = ["--seconds", f"{max(5.0, measuring_seconds(seconds)):.0f}"]
        options += ["--results", str(setting.results), *(["--cpu"] if setting.cpu else [])]
        return [setting.python, str(BENCHMARK), name, *options]

    return command


def measuring_seconds(seconds: float) -> float:
    """Of so many that a step has. To start Python and to end, a section needs some more than it
    measures; and its guesses of what comes next may be too low."""
    return seconds * 0.9 - 10


def _measures(name: str, limit_s: int, about_s: int, proves: str) -> tuple[str, Step]:
    return name, Step(limit_s, about_s, proves, _section(name), writes_results=True)


# The most telling first.
STEPS: dict[str, Step] = dict(
    [
        (
            "build",
            Step(120, 90, "it compiles against the torch and the toolkit of this machine", _build),
        ),
        ("tests", Step(120, 60, "every test marked cuda passes on a GPU, none skipped", _tests)),
        _measures(
            "staging-large", 110, 85, "16 GiB leave the GPU at the speed of a bare pinned copy"
        ),
        _measures("torn", 85, 70, "no save is torn, by kernels late or early; whether stock's are"),
        _measures("guard", 130, 100, "steps of all kinds wait for the copies; bytes compared"),
        _measures("training", 160, 130, "what a save takes from training a GPT; tokens, steps"),
        _measures("training-beside", 135, 110, "what a save by others takes from that training"),
        _measures("syncs", 70, 55, "a save makes the training thread wait for nothing"),
        ("kernel", Step(30, 20, "the pack kernel alone, all alignments, without torch", _kernel)),
        ("sanitizer", Step(50, 40, "memcheck, racecheck, initcheck, synccheck of it", _sanitizer)),
        _measures(
            "staging-small", 60, 35, "20,000 tensors of 16 KiB in 40 ms, blocked 1.5 us each"
        ),
        _measures(
            "staging-many", 125, 105, "20,000 tensors of 0.8 MB at 0.9 of a bare pinned copy"
        ),
        _measures("storage", 120, 95, "loading to and saving from the GPU at the disk's speed"),
        _measures("resume", 80, 45, "restored optimizers step as fresh ones do"),
        _measures("offload", 60, 35, "optimizer state out and back at the bus's speed"),
    ]
)


def run(name: str, step: Step, setting: Setting, seconds: float) -> str:
    """Run it; return "passed", "incomplete", "failed", "cut off" or "not run"."""
    output = setting.results / f"gpu-{name}.json"
    others = set(_scratch())
    start = time.monotonic()
    date = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    try:
        command = step.command(setting, seconds)
    except NotRun as reason:
        print(f"== {name}: NOT RUN: {reason}", flush=True)
        outcome, code, lines = "not run", None, [str(reason)]
    else:
        print(f"== {name}: at most {seconds:.0f} s", flush=True)
        if step.writes_results and not setting.cpu:
            # Or an older run's would pass for this one's.
            output.unlink(missing_ok=True)
        code, lines = run_limited(command, seconds)
        outcome = "cut off" if code is None else "failed" if code else "passed"
        if step.writes_results and code == INCOMPLETE:
            outcome = "incomplete"
        # What is killed in the middle of a save leaves it on a disk that has room for few.
        for left in set(_scratch()) - others:
            shutil.rmtree(left, ignore_errors=True)
    elapsed = time.monotonic() - start
    if not setting.cpu and not (step.writes_results and output.exists()):
        content = {
            "benchmark": f"gpu-{name}",
            "date": date,
            "machine": described(setting),
            "state": outcome,
            "exit_code": code,
            "seconds": round(elapsed, 1),
            "output": lines,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"== {name}: {outcome.upper()} after {elapsed:.0f} s", flush=True)
    return outcome


def _scratch() -> list[Path]:
    return list(SCRATCH.glob("pyckpt-*"))


def run_limited(command: Sequence[str], seconds: float) -> tuple[int | None, list[str]]:
    """Run a command; return its exit code, None where it ran past the limit, and the end of what it
    printed, which is printed here as it comes. At the limit it is asked to end, then killed with
    all that it started."""
    # What was built here, whatever else is installed.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    late = threading.Event()

    def end() -> None:
        late.set()
        # Of the whole group it alone may have something to write down.
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        _kill_group(process.pid)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        with process.stdout:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip("\n"))
                del lines[:-_LINES_KEPT]
        code = process.wait()
    finally:
        timer.cancel()
        _kill_group(process.pid)
    return None if late.is_set() else code, lines


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def described(setting: Setting) -> dict[str, Any]:
    """The machine, as the sections of the benchmark describe it."""
    script = (
        "import json, os, sys, torch\n"
        "sys.path.insert(0, 'benchmarks')\n"
        "from pathlib import Path\n"
        "from _common import machine\n"
        "from gpu import gpu_of\n"
        "found = {**machine(Path('.')), **gpu_of(torch.device('cuda', 0))}\n"
        "found['commit'] = found['commit'] or os.environ.get('PYCKPT_COMMIT')\n"
        "print(json.dumps(found))\n"
    )
    answer = subprocess.run(
        [setting.python, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if answer.returncode == 0:
        found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return found
    # Before the extension is built, or where building it failed.
    return {"commit": os.environ.get("PYCKPT_COMMIT"), "python": sys.version.split()[0]}


def find_toolkit(usual: Path = Path("/usr/local/cuda")) -> Path:
    """Where nvcc is: in the usual place, or where the PATH has it. Else the usual place, for the
    compiler's message."""
    nvcc = shutil.which("nvcc")
    if nvcc is None or (usual / "bin" / "nvcc").exists():
        return usual
    return Path(nvcc).resolve().parent.parent


def find_setting(cpu: bool) -> Setting | str:
    """What there is, or why nothing can be run."""
    python = sys.executable
    capability = "9.0"
    if not cpu:
        probe = (
            "import torch\n"
            "if not torch.cuda.is_available():\n"
            "    raise SystemExit(f'torch {torch.__version__} finds no GPU')\n"
            "print('%d.%d' % torch.cuda.get_device_capability())\n"
        )
        # In a process of its own: this one must hold no memory of the GPU.
        answer = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
        if answer.returncode:
            return (
                f"This needs a GPU, and {python} a torch with CUDA (--cpu walks through it without "
                f"one): {answer.stderr.strip().splitlines()[-1]}"
            )
        capability = answer.stdout.strip()
    results = Path(os.environ.get("RESULTS", ROOT / "benchmarks" / "results")).resolve()
    cuda_home = Path(os.environ.setdefault("CUDA_HOME", str(find_toolkit())))
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", capability)
    os.environ["PYCKPT_CUDA"] = "1"
    return Setting(python, results, cpu, capability, cuda_home)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="default: all of them")
    parser.add_argument("--cpu", action="store_true", help="walk through; measures nothing")
    parser.add_argument("--plan", action="store_true", help="say what there is, and end")
    parser.add_argument(
        "--within", type=float, help="seconds for all steps together (default: their limits)"
    )
    chosen = parser.parse_args()
    names = chosen.steps or list(STEPS)
    if unknown := set(names) - set(STEPS):
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if chosen.plan:
        for name in names:
            step = STEPS[name]
            print(f"{name:14} {step.limit_s:4} s, about {step.about_s:4} s  {step.proves}")
        limits, abouts = (
            sum(getattr(STEPS[name], which) for name in names) for which in ("limit_s", "about_s")
        )
        print(f"{'together':14} {limits:4} s, about {abouts:4} s")
        return 0
    setting = find_setting(chosen.cpu)
    if isinstance(setting, str):
        print(f"{setting}: nothing was run", file=sys.stderr)
        return 1
    end = time.monotonic() + (chosen.within or float("inf"))
    outcomes: dict[str, str] = {}
    for name in names:
        limit = STEPS[name].limit_s * (_CPU_FACTOR if chosen.cpu else 1)
        seconds = min(limit, end - time.monotonic() - _GRACE_S)
        if seconds < _LEAST_S:
            outcomes[name] = "not run: no time was left"
            continue
        outcomes[name] = run(name, STEPS[name], setting, seconds)
        if name == "build" and outcomes[name] != "passed":
            break
    print()
    for name, outcome in outcomes.items():
        print(f"== {name}: {outcome}")
    if chosen.cpu:
        print("== a walk without a GPU: NOTHING above is a figure of one")
    return 0 if set(outcomes.values()) <= {"passed", "not run"} else 1


if __name__ == "__main__":
    sys.exit(main())
