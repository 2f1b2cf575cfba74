"""The same with a Checkpointer."""

import _task as task
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pyckpt


def main():
    dist.init_process_group(task.BACKEND)
    model, optimizer, scheduler = task.make()
    model = DistributedDataParallel(model)
    rng = pyckpt.RngState()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng}
    with pyckpt.Checkpointer(
        task.DIRECTORY,
        keep_last=task.KEEP,
        every_steps=task.SAVE_EVERY,
        when_busy="wait",
        on_signals=("SIGTERM",),
    ) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, task.STEPS + 1):
            task.loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.step(step, state)
            if checkpointer.stop_requested:
                break
    task.tell(model)
    dist.destroy_process_group()


main()
