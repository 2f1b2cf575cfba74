"""One training job of a framework, with its clock: what `frameworks.py` runs in processes."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from _common import MIB, process_group
from torch import nn
from torch.distributed.tensor import DTensor

STOCK: Final = "the framework's own"
OURS: Final = "pyckpt"

Way = Literal["the framework's own", "pyckpt"]

# Steps of a job: some at the beginning, until all memory is there; then others, in which the first
# save may be prepared; then, after a save, those that count as touched by it, and quiet ones.
WARM = 2
TOUCHED = 3
QUIET = 5
PERIOD = TOUCHED + QUIET
SAVES = 3
LAST = SAVES * PERIOD
"""The step of the last save, from which jobs resume."""
END = LAST + TOUCHED


class Ended(Exception):
    """The job has made its steps. It ends as by a crash: without a last save."""


@dataclass
class Clock:
    """Is told of the steps of a job.

    Attributes:
        began: when the framework was called to train, or to resume.
        marks: when each step ended, by its number; before anything is saved.
        cpu: CPU seconds of the process at these times.
        begun: when each step began, by its number.
        losses: of each step.
        idle: says whether no save is under way.
    """

    model: Model
    end: int = END
    idle: Callable[[], bool] = lambda: True
    began: float = 0.0
    marks: dict[int, float] = field(default_factory=dict)
    cpu: dict[int, float] = field(default_factory=dict)
    cpu_began: float = 0.0
    cpu_until_step: float = 0.0
    begun: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    ran_over: int = 0
    digest: int = 0

    def begin(self) -> None:
        gc.collect()
        dist.barrier()
        self.began, self.cpu_began = time.perf_counter(), time.process_time()

    def step_begins(self, step: int) -> None:
        if not self.begun:
            self.cpu_until_step = time.process_time() - self.cpu_began
        self.begun[step] = time.perf_counter()

    def step_ended(self, step: int) -> None:
        """Raises Ended after the last step."""
        self.marks[step], self.cpu[step] = time.perf_counter(), time.process_time()
        self.losses[step] = float(self.model.loss)
        if step > PERIOD and step % PERIOD == TOUCHED and not self.idle():
            self.ran_over += 1
        if step == self.end:
            self.digest = self.model.digest()
            dist.barrier()  # or the first to leave would break the other's last collectives
            raise Ended

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        except Ended:
            return
        raise RuntimeError(f"training ended after step {max(self.marks, default=0)}")

    def result(self) -> dict[str, Any]:
        return {
            "until_step": self.begun[min(self.begun)] - self.began,
            "cpu_until_step": self.cpu_until_step,
            "marks": self.marks,
            "cpu": self.cpu,
            "begun": self.begun,
            "losses": self.losses,
            "digest": self.digest,
            "ran_over": self.ran_over,
        }


class Model(nn.Module):
    """Square layers, whose parameters and AdamW's state have about ``size`` bytes.

    Normalisation between them keeps the numbers finite, however many there are.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 2048 if size >= 96 * MIB else 256
        count = max(2, round(size / 12 / width**2))
        self.width = width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        self.loss = torch.zeros(())

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = x
        for layer in self.layers:
            y = nn.functional.gelu(nn.functional.layer_norm(layer(y), (self.width,)))
        loss = (y - x).square().mean()
        self.loss = loss.detach()
        return {"loss": loss}

    def digest(self) -> int:
        """Differs if a bit of this rank's parameters does."""
        total = 0
        for parameter in self.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = local.detach().view(torch.int32).flatten()
            odd = torch.arange(bits.numel(), dtype=torch.int32) * 2 + 1
            total = (total * 31 + int((bits * odd).sum(dtype=torch.int64))) % 2**63
        return total


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same example again and again, so that no loss depends on which part of the data a
    framework goes on with."""

    def __init__(self, width: int) -> None:
        self.x = torch.randn(width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": self.x, "labels": torch.zeros(1)}


BATCH = 4


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    way: Way
    resumes: bool
    directory: Path
    size: int


@dataclass(frozen=True)
class Framework:
    """How jobs run in it, and what a user adds.

    Attributes:
        run: runs a job on a rank.
        lines: what is added to a program, or changed in it, for pyckpt.
        modules: to be imported before the processes are forked, as a program does at its top.
    """

    run: Callable[[Job], Clock]
    lines: tuple[str, ...]
    modules: tuple[str, ...]


def on_rank(rank: int, name: str, job: Job, ranks: int, rendezvous: Path) -> dict[str, Any]:
    """Run a job on one of the ranks, in a process of its own."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    world = str(ranks)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # not used: the group is there
        "TORCHELASTIC_RUN_ID": "benchmark",
        "ACCELERATE_USE_CPU": "1",
    }
    from _framework_jobs import FRAMEWORKS

    gc.freeze()
    with process_group(rank, ranks, rendezvous):
        return FRAMEWORKS[name].run(job).result()
