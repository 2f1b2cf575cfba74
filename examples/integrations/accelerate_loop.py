"""A training loop with Accelerate that saves and resumes through pyckpt.

    python examples/integrations/accelerate_loop.py RUN

Run it, kill it, and run it again: it goes on after the newest checkpoint that is complete, in the
middle of an epoch. With `accelerate launch` it runs on several processes.
"""

import sys
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

from pyckpt.integrations.accelerate import Accelerator


class Progress:
    epoch = 0
    step = 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


directory = Path(sys.argv[1])
accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    project_config=ProjectConfiguration(
        str(directory), automatic_checkpoint_naming=True, total_limit=2
    ),
)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(512, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if any(directory.glob("checkpoints/*/.metadata")):
    accelerator.load_state()
    accelerator.print("resumed after step", progress.step)

while progress.epoch < 3:
    for features, target in loader:
        loss = (model(features) - target).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if loader.end_of_dataloader:
            progress.epoch += 1
        if progress.step % 10 == 0:
            accelerator.save_state()  # returns while it is written
            accelerator.print(f"step {progress.step}: {loss.item():.6f}")
accelerator.end_training()  # waits for the last save
