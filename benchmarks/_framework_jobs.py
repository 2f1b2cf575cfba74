"""The jobs of each framework, with its own checkpoints and with pyckpt's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from _frameworks import (
    BATCH,
    END,
    LAST,
    OURS,
    PERIOD,
    Clock,
    Data,
    Framework,
    Job,
    Model,
)
from torch.distributed.fsdp import fully_shard

KEPT = 2
"""Checkpoints that every job keeps."""

# --- Lightning --------------------------------------------------------------------------------


def _lightning(job: Job, *, sharded: bool) -> Clock:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from pyckpt.integrations.lightning import Checkpoints

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(job.size)

        def configure_model(self) -> None:
            if sharded:
                mesh: Any = self.device_mesh
                _shard(self.inner, mesh["data_parallel"])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.inner(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

    class Steps(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            clock.step_begins(trainer.global_step + 1)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            clock.step_ended(trainer.global_step)

    module = Module()
    clock = Clock(module.inner)
    ckpt_path = None
    if job.way == OURS:
        # The framework's own saves are never left out, so ours must not be either.
        saving: Any = Checkpoints(
            job.directory, every_steps=PERIOD, keep_last=KEPT, when_busy="wait"
        )
        clock.idle = lambda: not saving._checkpointer._saver.busy
    else:
        saving = ModelCheckpoint(
            job.directory,
            every_n_train_steps=PERIOD,
            save_top_k=KEPT,
            monitor="step",
            mode="max",
            filename="{step}",
        )
        ckpt_path = str(job.directory / f"step={LAST}.ckpt") if job.resumes else None
    shards = {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    strategy: Any = ModelParallelStrategy(**shards) if sharded else DDPStrategy()  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        callbacks=[Steps(), saving],
        max_steps=END + 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    loader = torch.utils.data.DataLoader(Data(module.inner.width), batch_size=BATCH)
    with clock.until_the_end():
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return clock


def _shard(model: Model, mesh: Any = None) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


# --- Transformers -----------------------------------------------------------------------------


def _transformers(job: Job) -> Clock:
    import transformers

    from pyckpt.integrations.transformers import Trainer

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_begins(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_ended(state.global_step)

    model = Model(job.size)
    clock = Clock(model)
    kind = Trainer if job.way == OURS else transformers.Trainer
    trainer: Any = kind(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(job.directory),
            per_device_train_batch_size=BATCH,
            max_steps=END + 1,
            save_steps=PERIOD,
            save_total_limit=KEPT,
            learning_rate=1e-5,
            logging_strategy="no",
            ddp_find_unused_parameters=False,
            max_grad_norm=0.0,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        ),
        train_dataset=Data(model.width),
        callbacks=[Steps()],
    )
    if job.way == OURS:
        clock.idle = lambda: not trainer._checkpointer._saver.busy
    with clock.until_the_end():
        trainer.train(resume_from_checkpoint=True if job.resumes else None)
    return clock


# --- Accelerate -------------------------------------------------------------------------------


def _is_saving(saves: Any) -> bool:
    """Whether the saves of an Accelerator have one under way."""
    return saves is not None and saves._saver is not None and saves._saver.busy


def _accelerate(job: Job) -> Clock:
    import accelerate
    from accelerate.utils import ProjectConfiguration

    from pyckpt.integrations.accelerate import Accelerator

    kind = Accelerator if job.way == OURS else accelerate.Accelerator
    accelerator = kind(
        cpu=True,
        project_config=ProjectConfiguration(
            str(job.directory), automatic_checkpoint_naming=True, total_limit=KEPT
        ),
    )
    inner = Model(job.size)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-5, fused=True)
    model, optimizer = accelerator.prepare(inner, optimizer)
    batch = torch.stack([Data(inner.width)[0]["x"]] * BATCH)
    clock = Clock(inner)
    if job.way == OURS:
        clock.idle = lambda: not _is_saving(accelerator._saves)
    step = 0
    with clock.until_the_end():
        if job.resumes:
            accelerator.load_state()
            step = LAST
        while True:
            step += 1
            clock.step_begins(step)
            optimizer.zero_grad()
            accelerator.backward(model(batch)["loss"])
            optimizer.step()
            clock.step_ended(step)
            if step % PERIOD == 0:
                accelerator.save_state()
    accelerator.end_training()
    return clock


# --- torchtitan -------------------------------------------------------------------------------


def _torchtitan(job: Job) -> Clock:
    from torchtitan.components.checkpointer import CheckpointManager as Stock
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    from pyckpt.integrations.torchtitan import CheckpointManager

    class Counter:
        step = 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"]

    model = Model(job.size)
    _shard(model)
    count = Counter()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-5})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="fused").build(
        model_parts=[model]
    )
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
        optimizers=optimizers, training_steps=1000
    )
    kind: Any = CheckpointManager if job.way == OURS else Stock
    checkpointer = kind.Config(
        enable=True,
        interval=PERIOD,
        keep_latest_k=KEPT,
        async_mode="async",
        last_save_model_only=False,
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": count},
        sd_adapter=None,
        base_folder=str(job.directory),
    )
    clock = Clock(
        model, idle=lambda: checkpointer.save_future is None or checkpointer.save_future.done()
    )
    batch = torch.stack([Data(model.width)[0]["x"]] * BATCH)
    with clock.until_the_end():
        if job.resumes:
            checkpointer.load()
        while True:
            count.step += 1
            clock.step_begins(count.step)
            optimizers.zero_grad()
            model(batch)["loss"].backward()
            checkpointer.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            clock.step_ended(count.step)
            checkpointer.save(count.step)
    checkpointer.close()
    return clock


FRAMEWORKS = {
    "Lightning, DDP": Framework(
        run=lambda job: _lightning(job, sharded=False),
        lines=(
            "from pyckpt.integrations.lightning import Checkpoints",
            "callbacks=[Checkpoints(directory, every_steps=1000)]",
        ),
        modules=("lightning.pytorch", "pyckpt.integrations.lightning"),
    ),
    "Lightning, FSDP2": Framework(
        run=lambda job: _lightning(job, sharded=True),
        lines=(
            "from pyckpt.integrations.lightning import Checkpoints",
            "callbacks=[Checkpoints(directory, every_steps=1000)]",
        ),
        modules=("lightning.pytorch", "pyckpt.integrations.lightning"),
    ),
    "Transformers, DDP": Framework(
        run=_transformers,
        lines=("from pyckpt.integrations.transformers import Trainer",),
        modules=("transformers.trainer", "pyckpt.integrations.transformers"),
    ),
    "Accelerate, DDP": Framework(
        run=_accelerate,
        lines=(
            "from pyckpt.integrations.accelerate import Accelerator",
            "accelerator.end_training()",
        ),
        modules=("accelerate", "pyckpt.integrations.accelerate"),
    ),
    "torchtitan, FSDP2": Framework(
        run=_torchtitan,
        lines=("from pyckpt.integrations.torchtitan import CheckpointManager",),
        modules=("torchtitan.components.checkpointer", "pyckpt.integrations.torchtitan"),
    ),
}
