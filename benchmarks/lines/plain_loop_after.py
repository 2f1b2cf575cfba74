"""The same with a Checkpointer."""

import pyckpt


def train(directory, model, optimizer, scheduler, train_step, steps):
    rng = pyckpt.RngState()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng}
    with pyckpt.Checkpointer(
        directory, keep_last=3, every_steps=100, on_signals=("SIGTERM",)
    ) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step in range(start + 1, steps + 1):
            train_step()
            checkpointer.step(step, state)
            if checkpointer.stop_requested:
                break
