"""A training job for torchrun, that the tests send signals to: prints what it does, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _training import Run

import pyckpt


def say(**what: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), **what}) + "\n"
    os.write(1, line.encode())  # in one piece, beside the other ranks


def hold_first_save(gate: str) -> None:
    """Commit the first save when a pipe says so, so that signals come in the middle of it."""
    finish = pyckpt.DirectWriter.finish
    pipe = os.open(gate, os.O_RDWR)

    def held(*arguments: Any, **options: Any) -> None:
        pyckpt.DirectWriter.finish = finish  # type: ignore[method-assign]
        os.read(pipe, 1)
        finish(*arguments, **options)

    pyckpt.DirectWriter.finish = held  # type: ignore[method-assign]


def main(directory: Path, every: int, gate: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if gate:
        hold_first_save(gate)
    run = Run()
    with pyckpt.Checkpointer(directory, every_steps=every, on_signals=("SIGTERM",)) as checkpointer:
        start = checkpointer.restore(run.state) or 0
        say(event="start", step=start, pid=os.getpid())
        for step in range(start + 1, 1_000_000):
            run.train(step)
            handle = checkpointer.step(step, run.state)
            say(event="step", step=step, loss=run.losses[step], saves=handle is not None)
            if checkpointer.stop_requested:
                break
    say(event="end", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
