"""The loops of examples/loops, killed on the way and resumed, also on another number of ranks."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

LOOPS = Path(__file__).parents[2] / "examples/loops"
STEPS = 40
KILLED_AT = 13


def command(loop: str, ranks: int, run: Path) -> list[str]:
    """How to start a loop, as its first line says."""
    arguments = [str(LOOPS / f"{loop}.py"), str(run), str(STEPS)]
    if loop == "single":
        return [sys.executable, "-W", "ignore", *arguments]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-W", "ignore", *torchrun, *arguments]


def losses(text: str) -> dict[int, float]:
    found = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[3]) for words in found if words[2] == "loss"}


def run_to_the_end(loop: str, ranks: int, run: Path) -> dict[int, float]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(loop, ranks, run), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def kill_on_the_way(loop: str, ranks: int, run: Path) -> int:
    """Kill all processes of a run as soon as it says that it took a step. Returns the last step of
    which it said so: some more, where this process is slow."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(loop, ranks, run),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    said = ""
    while not (line := process.stdout.readline()).startswith(f"step {KILLED_AT} "):
        assert line, "it ended before that"
    said += line
    # torchrun gives its workers sessions of their own.
    for pid in [process.pid, *_descendants(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    said += process.stdout.read()
    process.stdout.close()
    return max(losses(said[: said.rindex("\n") + 1]))


def _descendants(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += [int(child) for child in (task / "children").read_text().split()]
    return children + [one for child in children for one in _descendants(child)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[int, float]]:
    """The losses of a run that nobody stops."""
    known: dict[tuple[str, int], dict[int, float]] = {}

    def losses_of(loop: str, ranks: int) -> dict[int, float]:
        if (loop, ranks) not in known:
            known[loop, ranks] = run_to_the_end(loop, ranks, tmp_path_factory.mktemp("whole"))
        return known[loop, ranks]

    return losses_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "ranks", "later"),
    [
        ("single", 1, 1),
        ("ddp", 2, 2),
        ("ddp", 2, 1),
        ("fsdp2", 2, 2),
        ("fsdp2", 2, 1),
        ("fsdp2", 2, 4),
        ("tp_fsdp2", 4, 4),
        ("tp_fsdp2", 4, 2),
        ("pipeline", 2, 2),
        ("pipeline", 2, 1),
        ("pipeline", 2, 4),
    ],
)
def test_a_loop_goes_on_where_it_was_killed(
    tmp_path: Path,
    whole: Callable[[str, int], dict[int, float]],
    loop: str,
    ranks: int,
    later: int,
) -> None:
    expected = whole(loop, ranks)
    assert sorted(expected) == [*range(1, STEPS + 1)]
    killed_at = kill_on_the_way(loop, ranks, tmp_path)
    resumed = run_to_the_end(loop, later, tmp_path)
    first = min(resumed)
    # It saves each fifth step, and waits for the save before; so at most two are lost.
    assert first % 5 == 1
    assert killed_at - 13 <= first <= killed_at + 2
    assert sorted(resumed) == [*range(first, STEPS + 1)]
    for step, loss in resumed.items():
        if later == ranks:
            assert loss == expected[step]
        else:  # the sums are of other parts
            assert loss == pytest.approx(expected[step], rel=1e-3)


def test_a_pipeline_on_several_nodes_takes_the_gpu_of_its_own_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Moved(Exception):
        pass

    def to(module: nn.Module, device: torch.device) -> nn.Module:
        raise Moved(str(device))

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nn.Module, "to", to)
    with pytest.raises(Moved, match="cuda:1"):
        runpy.run_path(str(LOOPS / "pipeline.py"))


def test_the_loops_are_those_that_are_tested() -> None:
    assert {path.stem for path in LOOPS.glob("*.py")} == {
        *("single", "ddp", "fsdp2", "tp_fsdp2", "pipeline")
    }
