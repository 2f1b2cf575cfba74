"""What a recipe like torchtune's full_finetune_distributed.py needs of a Checkpointer."""

import pyckpt


def train(recipe, cfg):
    state = {
        "model": recipe._model,
        "optimizer": recipe._optimizer,
        "scheduler": recipe._lr_scheduler,
        "data": recipe._dataloader,
        "rng": pyckpt.RngState(),
    }
    with pyckpt.Checkpointer(cfg.output_dir, every_steps=cfg.save_every_n_steps) as checkpointer:
        recipe.global_step = checkpointer.restore(state) or 0
        for _ in recipe.steps():
            checkpointer.step(recipe.global_step, state)
