"""The same with a Checkpointer, which besides saves in the background."""

import os

import _task as task
from lightning.fabric import Fabric

import pyckpt


def main():
    fabric = Fabric(devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model, optimizer, scheduler = task.make()
    model, optimizer = fabric.setup(model, optimizer)
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
            fabric.backward(task.loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.step(step, state)
            if checkpointer.stop_requested:
                break
    task.tell(model)


main()
