"""Tensor parallel within pairs, FSDP2 across them:

torchrun --nproc-per-node 4 examples/loops/tp_fsdp2.py RUN STEPS
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pyckpt

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()
world = dist.get_world_size()
mesh = init_device_mesh(device, (world // 2, 2), mesh_dim_names=("data", "tensor"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": optimizer, "rng": pyckpt.RngState()}
part, parts = mesh["data"].get_local_rank(), mesh["data"].size()

with pyckpt.Checkpointer(sys.argv[1], every_steps=5, keep_last=2, when_busy="wait") as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, int(sys.argv[2]) + 1):
        batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(batch[part::parts]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item() / world:.9f}", flush=True)
        checkpointer.step(step, state)
dist.destroy_process_group()
