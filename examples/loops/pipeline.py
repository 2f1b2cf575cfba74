"""Pipeline stages, one a rank:  torchrun --nproc-per-node 2 examples/loops/pipeline.py RUN STEPS

A run can be resumed on another number of stages.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import pyckpt

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).to(device)
mine = range(rank * 4 // world, (rank + 1) * 4 // world)
stage = PipelineStage(layers[mine.start : mine.stop], rank, world, device)
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda out, _: out.square().mean())
optimizers = {i: torch.optim.AdamW(layers[i].parameters(), lr=1e-2) for i in mine}
# Each layer has a name and an optimizer of its own, so that any stage can take it over.
state = {f"layer-{i}": layers[i] for i in mine}
state |= {f"optimizer-{i}": optimizers[i] for i in mine}
state["rng"] = pyckpt.RngState()

with pyckpt.Checkpointer(sys.argv[1], every_steps=5, keep_last=2, when_busy="wait") as checkpointer:
    start = checkpointer.restore(state) or 0
    for step in range(start + 1, int(sys.argv[2]) + 1):
        batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
        losses: list[torch.Tensor] = []
        layers.zero_grad()
        schedule.step(*([batch] if rank == 0 else []), target=batch, losses=losses)
        for optimizer in optimizers.values():
            optimizer.step()
        if rank == world - 1:
            print(f"step {step} loss {torch.stack(losses).mean().item():.9f}", flush=True)
        checkpointer.step(step, state)
dist.destroy_process_group()
