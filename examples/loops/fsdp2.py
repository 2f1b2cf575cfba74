"""FSDP2:  torchrun --nproc-per-node 2 examples/loops/fsdp2.py RUN STEPS"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import pyckpt

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "rng": pyckpt.RngState()}

with pyckpt.Checkpointer(sys.argv[1], every_steps=5, keep_last=2, when_busy="wait") as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, int(sys.argv[2]) + 1):
        batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = model(batch[rank::world]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.9f}", flush=True)
        checkpointer.step(step, state)
dist.destroy_process_group()
