"""A tiny model with dropout, its data, and a Trainer of them: what tests of Trainers share."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _ranks import preload
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from pyckpt.integrations.transformers import Trainer

# As children have; with more, sums have other last bits.
torch.set_num_threads(1)
preload(
    "accelerate.utils.fsdp_utils", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"
)

EPOCH = 12  # steps
STEPS = 3 * EPOCH


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int = 4 * EPOCH) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def make_model(width: int = 16, dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=8,
        n_embd=width,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def make_trainer(
    directory: Any,
    *,
    kind: type[transformers.Trainer] = Trainer,
    model: Any = None,
    data: Any = None,
    eval_data: Any = None,
    callbacks: Any = (),
    checkpointer: Any = None,
    **arguments: Any,
) -> Any:
    """A Trainer of three epochs of 12 steps, that saves every 5 steps and logs each."""
    options = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "save_steps": 5,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        **arguments,
    }
    return kind(
        model=make_model() if model is None else model,
        args=transformers.TrainingArguments(output_dir=str(directory), **options),
        train_dataset=Data() if data is None else data,
        eval_dataset=eval_data,
        callbacks=list(callbacks),
        **({} if checkpointer is None else {"checkpointer": checkpointer}),
    )


def losses(trainer: Any) -> list[float]:
    """The losses that the Trainer has logged, also those before it was resumed."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class At(transformers.TrainerCallback):  # type: ignore[misc]
    """Does something at the end of a step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


class Interrupt(Exception):
    pass


def interrupt() -> None:
    raise Interrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_up_rank() -> None:
    """Tell Accelerate, which reads the environment, of the process group of this child."""
    warnings.simplefilter("default")
    os.environ["ACCELERATE_USE_CPU"] = "1"
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")


def use_fsdp2(accelerator: Any) -> None:
    """Accelerate shards on GPUs alone; FSDP2 itself does on CPUs, too."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="NO_WRAP",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    accelerator.state._shared_state.update(
        distributed_type=DistributedType.FSDP, fsdp_plugin=plugin
    )


class ShardedTrainer(Trainer):
    """Of a model that FSDP2 shards."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        use_fsdp2(self.accelerator)
        self.is_fsdp_enabled = True
