"""torchtitan's training loop in small, saving and resuming through pyckpt.

    python examples/integrations/torchtitan_loop.py RUN [STEPS]

Run it, kill it, and run it again: it goes on after the newest checkpoint that is complete.
"""

import sys

import torch
import torch.distributed as dist
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)

from pyckpt.integrations.torchtitan import CheckpointManager


class Training:
    """The parts of torchtitan's Trainer that a checkpoint is made of."""

    def __init__(self, folder: str) -> None:
        self.step = 0
        torch.manual_seed(0)
        self.model = torch.nn.Linear(64, 64)
        adamw = ParamGroupConfig(
            pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}
        )
        self.optimizers = OptimizersContainer.Config(
            param_groups=[adamw], implementation="for-loop"
        ).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(
            optimizers=self.optimizers, training_steps=1000
        )
        # In torchtitan this is the whole change: the class of one config.
        config = CheckpointManager.Config(
            enable=True, async_mode="async_with_pinned_mem", interval=5, keep_latest_k=2
        )
        self.checkpointer = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=folder,
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def train(self, steps: int) -> None:
        self.checkpointer.load()
        print(f"training from step {self.step + 1}", flush=True)
        while self.step < steps:
            self.step += 1
            torch.manual_seed(self.step)
            loss = self.model(torch.randn(32, 64)).square().mean()
            self.optimizers.zero_grad()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            print(f"step {self.step} loss {loss.item():.6f}", flush=True)
            self.checkpointer.save(self.step)
        self.checkpointer.close()


if __name__ == "__main__":
    # torchtitan itself starts with torchrun; this script is alone.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Training(sys.argv[1]).train(int(sys.argv[2]) if len(sys.argv) > 2 else 20)
    dist.destroy_process_group()
