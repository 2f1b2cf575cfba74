"""One rank of the training job that `torture.restarts` kills; torchrun starts it again.

It writes down what it does as it does it, a line at a time, so that what a kill has hit is known.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import pyckpt
from pyckpt.train import first_plan
from pyckpt.train.store import pruner

SAVE_EVERY = 3
_WIDTH = 64
_SHARDED = (512, 1024)  # 2 MiB: a save takes longer than a step


class Activity:
    """The file of one rank in one life of the job. Each line is one write, which a kill cannot
    take back."""

    def __init__(self, folder: Path, life: int, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{life:04d}-{rank}", flags, 0o666)

    def __call__(self, *words: object) -> None:
        os.write(self._file, (" ".join(str(word) for word in words) + "\n").encode())


def _tells_prunes(tell: Activity) -> None:
    remove: Callable[..., bool] = pruner.remove

    def told(path: Path, **options: Any) -> bool:
        tell("prune", path.name)
        try:
            return remove(path, **options)
        finally:
            tell("pruned", path.name)

    pruner.remove = told


class _Training:
    """A model that all ranks have, a tensor of which each has a part, and numbers drawn by each."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._model = torch.nn.Sequential(
            torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh(), torch.nn.Linear(_WIDTH, _WIDTH)
        )
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        whole = torch.randn(_SHARDED)
        self._sharded = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        torch.manual_seed(1 + rank)
        self.state = {
            "model": self._model,
            "optimizer": self._optimizer,
            "sharded": self._sharded,
            "rng": pyckpt.RngState(),
        }

    def step(self) -> float:
        batch = torch.randn(8, _WIDTH)
        loss = (self._model(batch) - batch.flip(1)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        for parameter in self._model.parameters():
            dist.all_reduce(parameter.grad)
        self._optimizer.step()
        self._sharded.to_local().mul_(0.99).add_(loss.detach())
        return float(loss.detach())

    def digest(self) -> str:
        """Of every bit of this rank's part of the state."""
        found = hashlib.sha256()
        moments = [
            value
            for one in self._optimizer.state.values()
            for _, value in sorted(one.items())  # in which order a restore makes them says nothing
            if isinstance(value, torch.Tensor)
        ]
        rng = torch.get_rng_state()
        for tensor in (*self._model.state_dict().values(), *moments, self._sharded.to_local(), rng):
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def _last_step(folder: Path) -> int:
    """The step after which to end, as all ranks see it: no rank goes where another does not."""
    try:
        mine = int((folder / "last").read_text() or 0)
    except OSError:
        mine = 0
    seen = torch.tensor([mine if mine > 0 else 1 << 40])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    return int(seen)


def main(folder: Path) -> None:
    first_plan._WORTH_BYTES = 0  # small states, too, are copied by the plan
    torch.set_num_threads(1)
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    tell = Activity(folder / "activity", life, rank)
    tell("begin", os.getpid())
    dist.init_process_group("gloo")
    _tells_prunes(tell)
    training = _Training(rank)
    with pyckpt.Checkpointer(folder / "run", keep_last=2, every_steps=SAVE_EVERY) as checkpointer:
        tell("restore")
        step = checkpointer.restore(training.state) or 0
        tell("restored", step)
        while step < _last_step(folder):
            step += 1
            loss = training.step()
            tell("step", step, loss.hex())
            if step % SAVE_EVERY:
                checkpointer.step(step, training.state)
                continue
            tell("save", step)
            handle = checkpointer.step(step, training.state)
            if handle is None:
                tell("skipped", step)
                continue
            handle.committed.add_done_callback(
                lambda done, step=step: tell(  # type: ignore[misc]
                    *(("committed", step) if done.exception() is None else ("failed", step))
                )
            )
    tell("end", training.digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
