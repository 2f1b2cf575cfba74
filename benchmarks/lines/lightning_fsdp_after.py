"""What Lightning Fabric's FSDP2 example (examples/fabric/tensor_parallel) needs of one."""

import pyckpt


def train(fabric, model, optimizer, dataloader, train_step):
    state = {"model": model.module, "optimizer": optimizer.optimizer}
    with pyckpt.Checkpointer("checkpoints", every_steps=100, keep_last=3) as checkpointer:
        start = checkpointer.restore(state) or 0
        for step, batch in enumerate(dataloader, start + 1):
            train_step(batch)
            checkpointer.step(step, state)
