"""What the programs in this directory train: nothing here is about saving, and no line counts.

Each program is called as ``PROGRAM DIRECTORY STEPS`` on any number of ranks (``torchrun``), prints
a hash of the final weights on rank 0, and goes on from the newest checkpoint in the directory.
``STOP_AT=N`` in the environment has rank 0 send itself SIGTERM in step N, as a scheduler would.
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
DIRECTORY = Path(sys.argv[1])
STEPS = int(sys.argv[2])
SAVE_EVERY = 25
KEEP = 3


def make():
    """A model, its optimizer and its scheduler, the same on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(1 + rank)  # ranks see other data, and drop other neurons
    return model, optimizer, scheduler


def loss_of(model, step):
    """The loss on a batch that this rank's generator makes."""
    if int(os.environ.get("STOP_AT", "0")) == step and dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return model(torch.randn(16, 32, device=DEVICE)).square().mean()


def tell(model):
    """Print a hash of the weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    if dist.get_rank() == 0:
        print("weights", digest.hexdigest(), flush=True)
