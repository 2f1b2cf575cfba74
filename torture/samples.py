"""``python -m torture.samples --seed 1``: a short sample of each script of torture/, two at a time.

What a change must pass, in at most six minutes on two cores that do nothing else. Each sample keeps
about one core busy. What it says goes to build/samples/NAME.log, and its result beside it. A sample
that takes longer than its bound hangs: its processes are asked where they are (SIGABRT), and ended.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torture.results import ROOT

BOUND_SECONDS = 900.0
"""Several times what the longest sample takes on a busy machine."""
_GRACE_SECONDS = 10.0
"""In which a process that hangs says where."""
_TAIL = 6000
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Sample:
    """One script of torture/, and how much of it.

    Attributes:
        name: of the sample.
        command: the module, and its arguments.
        root: whether it needs root.
        seeded: whether it takes ``--seed``.
    """

    name: str
    command: str
    root: bool = False
    seeded: bool = True


# The longest first, so that in the end both cores have something to do.
SAMPLES = {
    sample.name: sample
    for sample in (
        Sample("faults", "torture.faults --workers 1 --minutes 1.2 --sizes 1 2"),
        Sample("power", "torture.power --jobs 1 --minutes 0.7"),
        Sample("restarts", "torture.restarts --kills 5 --minutes 0.5"),
        Sample(
            "filesystems",
            "torture.filesystems --only 'ext4, sectors of 4096' overlay quota",
            root=True,
            seeded=False,
        ),
        Sample("ranks", "torture.ranks --cases 12 --minutes 0.8"),
        Sample("fuzz", "torture.fuzz --minutes 0.6"),
        Sample("concurrency", "torture.concurrency --minutes 0.6"),
        Sample("soak", "torture.soak --saves 500 --minutes 10"),
    )
}


def run(sample: Sample, folder: Path, seed: int, bound: float = BOUND_SECONDS) -> str:
    """Run a sample to its end. Returns what is wrong; empty if nothing is.

    Args:
        folder: where its log and its result go.
        bound: seconds after which it counts as hanging.
    """
    command = [sys.executable, "-m", *shlex.split(sample.command)]
    command += ["--output", str(folder / f"{sample.name}.json")]
    command += ["--seed", str(seed)] if sample.seeded else []
    log = folder / f"{sample.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        status = process.wait(bound)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"hung for {bound:.0f} s: {_tail(log)}"
    return "" if status == 0 else f"exit status {status}: {_tail(log)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group, having them say where they are."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_TAIL:]


def end_children() -> None:
    """End all children of this process, and theirs, which become its own when these end."""
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline:
        children: list[int] = []
        ended = False
        for thread in Path("/proc/self/task").iterdir():
            try:
                children += map(int, (thread / "children").read_text().split())
            except (FileNotFoundError, ProcessLookupError):
                ended = True  # the thread, whose children another one has now, perhaps unseen
        if not children and not ended:
            return
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def adopt_orphans() -> None:
    """From now on, children whose parent has ended are those of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.samples", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SAMPLES), choices=SAMPLES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2, metavar="N")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "samples")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    printing = threading.Lock()
    wrong: list[str] = []

    def one(name: str) -> None:
        sample = SAMPLES[name]
        begun = time.monotonic()
        if not sample.root or os.geteuid() == 0:
            found = run(sample, arguments.folder, arguments.seed)
        elif os.environ.get("PYCKPT_REQUIRE_ALL") == "1":
            found = "needs root, which PYCKPT_REQUIRE_ALL=1 says is here"
        else:
            with printing:
                print(f"{name}: skipped, since it needs root", flush=True)
            return
        with printing:
            seconds = time.monotonic() - begun
            print(f"{name}: {found or 'nothing wrong'} ({seconds:.0f} s)", flush=True)
            wrong.extend([name] if found else [])

    pool = ThreadPoolExecutor(arguments.at_once)
    try:
        list(pool.map(one, arguments.only))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        end_children()
    if wrong:
        print(f"wrong: {', '.join(wrong)}; what they said is in {arguments.folder}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
