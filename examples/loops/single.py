"""One process:  python examples/loops/single.py RUN STEPS"""

import sys

import torch
from torch import nn

import pyckpt

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "rng": pyckpt.RngState()}

with pyckpt.Checkpointer(sys.argv[1], every_steps=5, keep_last=2, when_busy="wait") as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, int(sys.argv[2]) + 1):
        batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
        checkpointer.step(step, state)
