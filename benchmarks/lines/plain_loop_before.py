"""A plain loop, by hand: saves in the background, keeps three, resumes, stops on SIGTERM."""

import os
import random
import shutil
import signal

import _task as task
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
from torch.nn.parallel import DistributedDataParallel


def state_of(model, optimizer, scheduler, step):
    rng = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "scheduler": scheduler.state_dict(),
        f"rng_{dist.get_rank()}": rng,
        "step": step,
    }


def newest(directory):
    steps = [int(path.parent.name[5:]) for path in directory.glob("step-*/.metadata")]
    step = torch.tensor([max(steps, default=-1)], device=task.DEVICE)
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
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])
    return state["step"]


def prune(directory, keep):
    committed = sorted(path.parent for path in directory.glob("step-*/.metadata"))
    for path in committed[:-keep]:
        os.rename(path / ".metadata", path / ".removed")
        shutil.rmtree(path, ignore_errors=True)


def main():
    dist.init_process_group(task.BACKEND)
    model, optimizer, scheduler = task.make()
    model = DistributedDataParallel(model)
    group = dist.new_group(backend="gloo")
    signalled = False

    def handle(*_):
        nonlocal signalled
        signalled = True

    signal.signal(signal.SIGTERM, handle)
    path = newest(task.DIRECTORY)
    start = restore(path, model, optimizer, scheduler) if path else 0
    future = None
    for step in range(start + 1, task.STEPS + 1):
        task.loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        stop = torch.tensor([signalled], dtype=torch.int32, device=task.DEVICE)
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if step % task.SAVE_EVERY and not stop:
            continue
        if future is not None:
            future.result()
            if dist.get_rank() == 0:
                prune(task.DIRECTORY, task.KEEP)
        future = dcp.async_save(
            state_of(model, optimizer, scheduler, step),
            checkpoint_id=task.DIRECTORY / f"step-{step:08d}",
            process_group=group,
        )
        if stop:
            break
    if future is not None:
        future.result()
    task.tell(model)
    dist.destroy_process_group()


main()
