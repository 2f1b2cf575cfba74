"""Train with Lightning, save as it goes, and go on where the last run stopped."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

from pyckpt.integrations.lightning import Checkpoints


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.mean_loss = MeanMetric()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = (self.layers(inputs) - targets).square().mean()
        self.mean_loss.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch}: mean loss {self.mean_loss.compute():.4f}")
        self.mean_loss.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


directory, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=epochs,
    logger=False,
    enable_progress_bar=False,
    callbacks=[Checkpoints(directory, every_steps=10, keep_last=2, on_signals="SIGTERM")],
)
trainer.fit(Regression(), StatefulDataLoader(data, batch_size=16, shuffle=True))
print(f"trained {trainer.global_step} steps")
