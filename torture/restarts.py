"""``python -m torture.restarts --kills 100 --seed 1``: a job under torchrun, killed over and over.

A rank is killed at a random instant: while it begins, restores, trains, saves or prunes. torchrun
starts the job again. Its steps must go on without a gap from what was committed, with the losses
of a job that nobody killed, and end with its weights, bit for bit. Whether a kill hit a save, a
restore or a prune is read from what the killed rank itself wrote down.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from torture.results import ROOT, write

BOUND_SECONDS = 240.0
"""In which a life must begin after a kill, and then write down the next thing that it does, however
busy the machine: under a load of 45, a life took 100 s to begin."""
_LONGEST_DELAY = {"begin": 0.5, "restore": 0.03, "step": 0.3, "save": 0.04, "prune": 0.005}
"""Seconds after the rank began something, at most: about as long as it takes."""
_WEIGHTS = (1, 3, 3, 5, 3)
_STEPS_AT_THE_END = 30
_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Otherwise ranks find in torchrun's store the addresses that gloo had before the restart, and
groups fail to connect, those of torch itself as well (pytorch/pytorch#135712)."""


@dataclass
class Life:
    """What a rank wrote down between two starts of the job."""

    pid: int = 0
    restored: int | None = None
    steps: list[tuple[int, str]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    under_way: set[str] = field(default_factory=set)
    """ "save", "restore", "prune": begun, and not ended."""
    digest: str = ""


def read(lines: list[str]) -> Life:
    life = Life()
    saving: set[int] = set()
    for line in lines:
        match line.split():
            case ["begin", pid]:
                life.pid = int(pid)
            case ["restore" | "prune" as what, *_]:
                life.under_way.add(what)
            case ["restored", step]:
                life.restored = int(step)
                life.under_way.discard("restore")
            case ["pruned", _]:
                life.under_way.discard("prune")
            case ["step", step, loss]:
                life.steps.append((int(step), loss))
            case ["save", step]:
                saving.add(int(step))
            case ["committed", step]:
                life.committed.append(int(step))
                saving.discard(int(step))
            case ["failed", step]:
                life.failed.append(int(step))
                saving.discard(int(step))
            case ["skipped", step]:
                saving.discard(int(step))
            case ["end", digest]:
                life.digest = digest
    if saving:
        life.under_way.add("save")
    return life


def lives(folder: Path) -> list[list[Life]]:
    """By life and rank. A rank that was ended before it wrote anything has an empty life."""
    found: dict[tuple[int, int], Life] = {}
    for path in (folder / "activity").iterdir():
        number, rank = map(int, path.name.split("-"))
        found[number, rank] = read(path.read_text().split("\n"))
    numbers = sorted({number for number, _ in found})
    ranks = 1 + max((rank for _, rank in found), default=-1)
    return [[found.get((number, rank), Life()) for rank in range(ranks)] for number in numbers]


def judge(job: list[list[Life]], undisturbed: list[list[Life]]) -> list[str]:
    """What is wrong with a job, beside one that nobody killed."""
    wrong: list[str] = []
    (calm,) = undisturbed
    losses = [dict(life.steps) for life in calm]
    committed = 0
    for number, ranks in enumerate(job):
        restored = {life.restored for life in ranks if life.restored is not None}
        if len(restored) > 1:
            wrong.append(f"life {number}: ranks restored different steps: {sorted(restored)}")
        if restored and min(restored) < committed:
            wrong.append(
                f"life {number}: restored step {min(restored)}, and {committed} was committed"
            )
        ended = all(life.digest for life in ranks)
        for rank, life in enumerate(ranks):
            expected = (life.restored or 0) + 1
            for step, loss in life.steps:
                if step != expected:
                    wrong.append(f"life {number}, rank {rank}: step {step} in place of {expected}")
                    break
                if losses[rank].get(step) != loss:
                    wrong.append(
                        f"life {number}, rank {rank}: the loss of step {step} is {loss}, "
                        f"in place of {losses[rank].get(step)}"
                    )
                    break
                expected += 1
            # Elsewhere a rank may see another one's death before torchrun ends it.
            if life.failed and ended:
                wrong.append(f"life {number}, rank {rank}: saves failed: {life.failed}")
            committed = max([committed, *life.committed])
    for rank, (last, calm_one) in enumerate(zip(job[-1], calm, strict=False)):
        done = {step for ranks in job if rank < len(ranks) for step, _ in ranks[rank].steps}
        if missing := sorted(losses[rank].keys() - done):
            wrong.append(f"rank {rank}: never took the steps {missing[:5]}")
        if not last.digest or last.digest != calm_one.digest:
            wrong.append(f"rank {rank}: ended with other weights: {last.digest!r}")
    return wrong


# --- the job --------------------------------------------------------------------------------------


class Job:
    """A job under torchrun, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, restarts: int) -> None:
        self.folder = folder
        (folder / "activity").mkdir(parents=True)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
                    *("--monitor-interval", "0.1", "-m", "torture.restart_job", str(folder)),
                ],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OMP_NUM_THREADS": "1",
                    **_OWN_STORE,
                },
                start_new_session=True,
            )

    def lines(self, life: int, rank: int) -> list[str]:
        try:
            whole = (self.folder / "activity" / f"{life:04d}-{rank}").read_text()
        except FileNotFoundError:
            return []
        return whole.split("\n")[:-1]

    def until(self, life: int, rank: int, word: str, times: int) -> list[str] | None:
        """Wait until a rank wrote a word so often; None if it writes nothing for too long."""
        end = time.monotonic() + BOUND_SECONDS
        written = 0
        while time.monotonic() < end:
            lines = self.lines(life, rank)
            if len(lines) > written:
                written, end = len(lines), time.monotonic() + BOUND_SECONDS
            if sum(line.startswith(f"{word} ") or line == word for line in lines) >= times:
                return lines
            if self.process.poll() is not None:
                return None
            time.sleep(0.001)
        return None

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)  # torchrun ends the ranks
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def _last_seen(folder: Path) -> int:
    return max((step for life in lives(folder) for one in life for step, _ in one.steps), default=0)


def _hits(ranks: list[Life], who: int) -> list[str]:
    life = ranks[who]
    if life.under_way:
        return sorted(life.under_way)
    return ["training" if life.steps else "beginning"]


def torment(
    folder: Path, kills: int, ranks: int, random: Random, ends: float
) -> tuple[dict[str, Any], list[str]]:
    """Kill a job so often, or until a time; let it end, and then one that nobody kills."""
    job = Job(folder / "killed", ranks, kills + 10)
    triggers: Counter[str] = Counter()
    victims: list[int] = []
    seconds: list[float] = []
    wrong: list[str] = []
    killed = 0.0
    try:
        while len(victims) < kills and time.monotonic() < ends:
            life = len(victims)
            trigger = random.choices(list(_LONGEST_DELAY), _WEIGHTS)[0]
            who = 0 if trigger == "prune" else random.randrange(ranks)
            times = 1 if trigger in ("begin", "restore") else random.randint(1, 4)
            delay = random.random() * _LONGEST_DELAY[trigger]
            lines = job.until(life, who, trigger, times)
            if lines is None:
                wrong.append(f"life {life}: rank {who} did not come to {trigger!r}")
                break
            if killed:
                seconds.append(time.monotonic() - killed)
            time.sleep(delay)
            os.kill(read(lines).pid, signal.SIGKILL)
            killed = time.monotonic()
            triggers[trigger] += 1
            victims.append(who)
            if len(victims) % 10 == 0:
                print(f"{len(victims)} kills", flush=True)
        # Its ranks see this at some step, all at the same.
        _put(job.folder / "last", str(_last_seen(job.folder) + _STEPS_AT_THE_END))
        if not wrong:
            try:
                job.process.wait(BOUND_SECONDS)
            except subprocess.TimeoutExpired:
                wrong.append("the job did not end after the last kill")
    finally:
        job.end()
    if job.process.returncode != 0:
        wrong.append(f"torchrun: {(job.folder / 'log').read_text()[-3000:]}")
    calm = Job(folder / "calm", ranks, 0)
    try:
        shutil.copy(job.folder / "last", calm.folder / "last")
        calm.process.wait(BOUND_SECONDS + _last_seen(job.folder))
    finally:
        calm.end()
    found = lives(job.folder)
    if len(found) != len(victims) + 1:
        wrong.append(f"{len(found)} lives, and {len(victims)} kills")
    wrong += judge(found, lives(calm.folder))
    hits = Counter(hit for i, who in enumerate(victims) for hit in _hits(found[i], who))
    return {
        "kills": len(victims),
        "restarts": len(found) - 1,
        "triggers": dict(sorted(triggers.items())),
        "hits": dict(sorted(hits.items())),
        "ranks": ranks,
        "steps": _last_seen(job.folder),
        "steps_with_repeats": sum(len(life[0].steps) for life in found),
        "committed": len({step for life in found for one in life for step in one.committed}),
        "median_seconds_from_kill_to_next": median(seconds) if seconds else None,
        "longest_seconds_from_kill_to_next": max(seconds, default=None),
    }, wrong


def _put(path: Path, text: str) -> None:
    """All of it at once: ranks read it at any time."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.restarts", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60.0, help="of killing, at most")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    random = Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="pyckpt-restarts-"))
    ends = time.monotonic() + 60 * arguments.minutes
    counts, wrong = torment(folder, arguments.kills, arguments.ranks, random, ends)
    for one in wrong:
        print(one)
    print(f"{counts['kills']} kills, hits: {counts['hits']}, {len(wrong)} wrong")
    write("restarts", {"seed": arguments.seed, **counts, "wrong": wrong}, arguments.output)
    if wrong:
        print(f"what is left lies in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
