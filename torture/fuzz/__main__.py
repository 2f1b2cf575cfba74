"""``python -m torture.fuzz --minutes 60 --only object --seed 1``: fuzzes all parsers, or some.

The processor's time is shared by the parsers. What is found is copied to torture/corpus, and this
exits with 1. The result adds up: a run adds itself to those that are in the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torture.adding_up import added, code, next_seed, runs_in
from torture.fuzz import native
from torture.fuzz.parsers import PARSERS
from torture.fuzz.totals import CODE, totals
from torture.results import RESULTS, ROOT, head, write

CORPUS = ROOT / "torture" / "corpus"
_NATIVE = "native-"


def _arguments() -> argparse.Namespace:
    names = [*PARSERS, *(_NATIVE + name for name in native.TARGETS)]
    parser = argparse.ArgumentParser(prog="python -m torture.fuzz", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=1.5, help="of CPU, of all together")
    length.add_argument("--cases", type=int, default=0, help="inputs of each parser in Python")
    parser.add_argument("--only", action="append", choices=names, metavar="PARSER", help=str(names))
    parser.add_argument("--seed", type=int, help="by default one that no run in the file had")
    parser.add_argument("--output", type=Path, default=RESULTS / "fuzz.json")
    parser.add_argument("--found", type=Path, default=CORPUS, help="where what is found is kept")
    arguments = parser.parse_args()
    arguments.only = arguments.only or names
    if arguments.seed is None:
        arguments.seed = next_seed(runs_in(arguments.output))
    return arguments


def _run_python(
    name: str, seconds: float, arguments: argparse.Namespace, guided: bool
) -> dict[str, Any]:
    """Starts workers until the time is used, since an input may end a process."""
    # In memory, if there is some: what is tried is not the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pyckpt-found-", dir=memory) as folder:
        found = Path(folder)
        command = [sys.executable, "-m", "torture.fuzz.worker", name, "--found", folder]
        command += ["--corpus", str(CORPUS / name), "--seed", str(arguments.seed)]
        command += ["--seconds", str(seconds), "--executions", str(arguments.cases)]
        if guided:
            command += ["--guided", str(native.BUILD / "guided" / name)]
        with open(found / "log", "w+", errors="replace") as log:
            done = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT)
            log.seek(0)
            said = log.read()[-4000:]
        counts: dict[str, Any] = {"executions": 0, "cpu_seconds": 0.0}
        if (found / "counts.json").exists():
            counts = json.loads((found / "counts.json").read_text())
        findings = [path.read_text().splitlines()[0] for path in sorted(found.glob("*.txt"))]
        kept = arguments.found / name
        inputs = sorted(found.glob("*.input"))
        if done.returncode != 0:
            findings.append(f"exit status {done.returncode}: {said}")
            shutil.copy(found / "current", found / f"ended-{arguments.seed}.input")
            inputs.append(found / f"ended-{arguments.seed}.input")
        for path in inputs:
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, kept / path.stem)
        return {**counts, "cpu_seconds": round(counts["cpu_seconds"], 1), "findings": findings}


def main() -> int:
    arguments = _arguments()
    seconds = 60 * arguments.minutes / len(arguments.only)
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        print("atheris is not installed (pip install atheris): without guidance by coverage")
    lacks = native.missing()
    natives = [one for one in arguments.only if one.startswith(_NATIVE)]
    if natives and lacks:
        print(f"left out, since there is no {lacks}: {', '.join(natives)}")
    elif natives:
        native.build()
    found: dict[str, Any] = {}
    for name in arguments.only:
        if name in natives:
            if lacks:
                continue
            target = name.removeprefix(_NATIVE)
            result = native.run(
                target,
                seconds,
                arguments.seed,
                native.BUILD / "found" / target / str(arguments.seed),
                CORPUS / name,
            )
        else:
            # What coverage leads to, and what it does not.
            half = seconds / (1 + guided)
            result = _run_python(name, half, arguments, False)
            if guided:
                more = _run_python(name, half, arguments, True)
                result = {key: result[key] + more[key] for key in result}
        found[name] = result
        print(
            f"{name}: {result['executions']} inputs, {result['cpu_seconds']} s of CPU, "
            f"{len(result['findings'])} found",
            flush=True,
        )
        for one in result["findings"]:
            print(f"  {one}", flush=True)
    run = {
        **{key: head()[key] for key in ("date", "commit", "changed")},
        "code": code(*CODE),
        "seed": arguments.seed,
        "guided": guided,
        "only": arguments.only,
        "left_out": natives if lacks else [],
        "parsers": found,
    }
    runs = added(runs_in(arguments.output), run, ("seed", "code", "guided", "only"))
    sums = totals(runs)
    write(
        "fuzz",
        {
            "executions": sum(one["executions"] for one in sums.values()),
            "cpu_seconds": round(sum(one["cpu_seconds"] for one in sums.values()), 1),
            "parsers": sums,
            "runs": runs,
        },
        arguments.output,
    )
    return 1 if any(one["findings"] for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
