"""A plain loop, by hand: saves in the background, keeps three, resumes, stops on SIGTERM, on any
number of ranks. What a step is does not matter here."""

import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def state_of(model, optimizer, scheduler, step):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        f"rng_{dist.get_rank()}": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(),
        },
        "step": step,
    }


def newest(directory):
    steps = [int(path.parent.name[5:]) for path in directory.glob("step-*/.metadata")]
    step = torch.tensor([max(steps, default=-1)], device="cuda")
    dist.all_reduce(step, dist.ReduceOp.MIN)
    return None if step < 0 else directory / f"step-{int(step):08d}"


def restore(path, model, optimizer, scheduler):
    state = state_of(model, optimizer, scheduler, 0)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    rng = state[f"rng_{dist.get_rank()}"]
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    torch.cuda.set_rng_state(rng["cuda"])
    return state["step"]


def prune(directory, keep):
    committed = sorted(path.parent for path in directory.glob("step-*/.metadata"))
    for path in committed[:-keep]:
        os.rename(path / ".metadata", path / ".removed")
        shutil.rmtree(path, ignore_errors=True)


def train(directory, model, optimizer, scheduler, train_step, steps, group):
    signalled = False

    def handle(*_):
        nonlocal signalled
        signalled = True

    signal.signal(signal.SIGTERM, handle)
    path = newest(Path(directory))
    start = restore(path, model, optimizer, scheduler) if path else 0
    future = None
    for step in range(start + 1, steps + 1):
        train_step()
        stop = torch.tensor([signalled], dtype=torch.int32, device="cuda")
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if step % 100 and not stop:
            continue
        if future is not None:
            future.result()
            if dist.get_rank() == 0:
                prune(Path(directory), keep=3)
        future = dcp.async_save(
            state_of(model, optimizer, scheduler, step),
            checkpoint_id=Path(directory) / f"step-{step:08d}",
            process_group=group,
        )
        if stop:
            break
    if future is not None:
        future.result()
