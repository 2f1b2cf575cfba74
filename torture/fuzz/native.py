"""The engine's parsers under libFuzzer: built with clang++, and run one after another."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from torture.results import ROOT

FOLDER = ROOT / "torture" / "fuzz" / "native"
BUILD = ROOT / "build" / "fuzz"
TARGETS = sorted(path.name.removesuffix("_fuzz.cpp") for path in FOLDER.glob("*_fuzz.cpp"))
_INPUT_MAX = 8192
_WALL_FACTOR = 12
"""A target ends after so many times its seconds of CPU, however little it got of the processor."""
_HANG_SECONDS = 20
_MEMORY_MIB = 2048
_AT_ONCE_MIB = 512


def missing() -> str:
    """What this machine lacks, if it does."""
    return "" if shutil.which("clang++") else "clang++ (apt-get install clang)"


def build() -> None:
    """Raises RuntimeError if a target does not compile."""
    command = ["make", "--silent", "-C", str(FOLDER), f"-j{os.cpu_count()}", "build"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the native targets were not built:\n{done.stderr[-4000:]}")


def run(target: str, seconds: float, seed: int, found: Path, kept: Path) -> dict[str, Any]:
    """Fuzzes one target, for so many seconds of CPU. What it has learnt stays in build/fuzz, and
    the next run goes on from it.

    Args:
        found: where inputs that end the process are left.
        kept: inputs that did so once.
    """
    corpus = BUILD / "corpus" / target
    for folder in (corpus, found, kept):
        folder.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        done = subprocess.Popen(
            [
                str(BUILD / f"{target}_fuzz"),
                str(corpus),
                str(kept),
                f"-max_total_time={max(1, int(_WALL_FACTOR * seconds))}",
                f"-seed={seed + 1}",
                f"-max_len={_INPUT_MAX}",
                f"-timeout={_HANG_SECONDS}",
                f"-rss_limit_mb={_MEMORY_MIB}",
                f"-malloc_limit_mb={_AT_ONCE_MIB}",
                f"-artifact_prefix={found}{os.sep}",
                "-print_final_stats=1",
            ],
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        while done.poll() is None:
            if _cpu_seconds(done.pid) >= seconds:
                done.send_signal(signal.SIGUSR1)  # it ends by itself, and says what it did
                done.wait()
            time.sleep(0.05)
        errors.seek(0)
        said = errors.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    count = re.search(r"number_of_executed_units: (\d+)", said)
    findings = sorted(path.name for path in found.iterdir() if path.is_file())
    if done.returncode and not findings:
        findings = [f"exit status {done.returncode}"]
    if findings:
        (found / "log").write_text(said[-20_000:])
    return {
        "executions": int(count[1]) if count else 0,
        "cpu_seconds": round(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1
        ),
        "findings": findings,
    }


def _cpu_seconds(pid: int) -> float:
    """Of a child that was not waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
