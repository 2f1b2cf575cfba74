"""OptimizerPlacement: optimizer state where a fresh run has it, whoever restored it."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from pyckpt import optim

__all__ = ["OptimizerPlacement"]

_logger = logging.getLogger("pyckpt")


class OptimizerPlacement(Callback):
    """Puts each entry of the optimizers' state on the device where the optimizer's step creates it.

    Lightning moves the state of optimizers to the device of the strategy, all but entries called
    ``step``. That suits Adam. Others keep more on the host, or nothing, and then each step waits
    for the GPU. ::

        trainer = Trainer(callbacks=[OptimizerPlacement()])

    It acts before training starts: after the strategy is set up, and after any restore. It changes
    no value. `Checkpoints` and the strategies of this package place state by themselves.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            for entry in optim.repair(optimizer):
                _logger.info("moved to where a fresh run has it: %s", entry)
