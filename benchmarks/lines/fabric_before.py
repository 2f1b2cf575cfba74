"""A loop with Lightning Fabric, which saves a file when it is told to and knows no more: what keeps
three, resumes, stops on SIGTERM and brings each rank's random numbers back is by hand."""

import os
import random
import signal

import _task as task
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric import Fabric


def rng_of():
    rng = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rng)  # Fabric writes what rank 0 has
    return gathered


def set_rng(rng):
    random.setstate(rng["python"])
    np.random.set_state(rng["numpy"])
    torch.set_rng_state(rng["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])


def saved(directory):
    return sorted(directory.glob("step-*.ckpt"))


def prune(directory, keep):
    for path in saved(directory)[:-keep]:
        os.unlink(path)


def main():
    fabric = Fabric(devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, optimizer, scheduler = task.make()
    model, optimizer = fabric.setup(model, optimizer)
    signalled = False

    def handle(*_):
        nonlocal signalled
        signalled = True

    signal.signal(signal.SIGTERM, handle)
    start = 0
    paths = fabric.broadcast(saved(task.DIRECTORY))
    if paths:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        rest = fabric.load(paths[-1], state, weights_only=False)
        start = rest["step"]
        set_rng(rest["rng"][fabric.global_rank])
    for step in range(start + 1, task.STEPS + 1):
        fabric.backward(task.loss_of(model, step))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        stop = bool(fabric.all_reduce(torch.tensor(float(signalled)), reduce_op="sum"))
        if step % task.SAVE_EVERY and not stop:
            continue
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        state |= {"step": step, "rng": rng_of()}
        fabric.save(task.DIRECTORY / f"step-{step:08d}.ckpt", state)
        if fabric.is_global_zero:
            prune(task.DIRECTORY, task.KEEP)
        if stop:
            break
    task.tell(model)


main()
