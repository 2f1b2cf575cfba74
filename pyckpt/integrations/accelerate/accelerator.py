"""`Accelerator`: the methods of Accelerate's that save and load, through pyckpt."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
from accelerate.utils import DistributedType

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.integrations.accelerate.positions import Position, position_of
from pyckpt.integrations.accelerate.saves import Numbered, Saves, is_stock
from pyckpt.integrations.first import on_first
from pyckpt.train.arguments import directory_of
from pyckpt.train.handle import SaveHandle
from pyckpt.train.prewarmer import Prewarmer
from pyckpt.train.restorer import LoadOptions

__all__ = ["Accelerator"]

_logger = logging.getLogger("pyckpt")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, which saves while training goes on. ::

        accelerator = Accelerator()
        model, optimizer, loader, scheduler = accelerator.prepare(...)
        ...
        accelerator.save_state(f"runs/step_{step}")  # returns when the state may change again
        ...
        accelerator.load_state("runs/step_100")
        ...
        accelerator.end_training()  # waits for the last save

    ``save_state`` saves what Accelerate's own saves, and what that leaves out: the epoch of each
    prepared loader, its position if it is stateful (``use_stateful_dataloader``), and the generator
    of its sampler. The directory is one checkpoint, which holds all or nothing, on one process,
    under DDP and under FSDP. FSDP saves shards, whatever the ``state_dict_type`` of its plugin is,
    and any number of ranks loads them. Optimizer state comes back to the device where the
    optimizer's own step makes it.

    A save that fails is logged at once. The next ``save_state``, ``load_state``, ``wait_for_saves``
    or ``end_training`` raises its error, on all ranks.
    """

    patience = timedelta(minutes=10)
    """How long ``save_state`` and ``load_state`` wait for a process that has not called them."""
    prewarm = True
    """Whether the memory of the first save is made in the background, from the first step on."""
    _saves: Saves | None = None
    _prewarmer: Prewarmer | None = None

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As of Accelerate. Before the second step it also begins to ``prewarm``."""
        super().backward(loss, **kwargs)
        prewarmer = self._prewarming()
        if prewarmer.is_over:
            return
        optimizers = {_name("optimizer", i): one for i, one in enumerate(self._optimizers)}
        prewarmer.step_ended({"models": self._models, **optimizers})

    def _prewarming(self) -> Prewarmer:
        if self._prewarmer is None:
            self._prewarmer = Prewarmer(enabled=self.prewarm)
        return self._prewarmer

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> SaveHandle:
        """Save the state of everything that was prepared or registered. Collective.

        Args:
            output_dir: the directory of the checkpoint; one that is there is replaced, once the new
                one is whole. By default that of ``automatic_checkpoint_naming``, of which
                ``total_limit`` are kept.
            safe_serialization: has no effect.

        Returns:
            The save. ``wait()`` waits until the checkpoint is on disk.

        Raises:
            OSError, PyckptError: the save before this one failed.
            RanksLost: a process has not called this, and ``patience`` is over.
            FileExistsError: the next number is taken, by a checkpoint of an earlier run.
            ValueError: there is no directory, or something is asked for that cannot be saved.
        """
        self._refuse_unsupported(save_model_func_kwargs)
        project = self.project_configuration
        automatic = project.automatic_checkpoint_naming
        if automatic:
            folder = directory_of(os.path.join(self.project_dir, "checkpoints"))
            path = folder / f"checkpoint_{self.save_iteration}"
        elif output_dir is not None:
            path = directory_of(output_dir)
        else:
            raise ValueError("save_state needs a directory, or automatic_checkpoint_naming")
        saves = self._assembled("save_state")
        saves.finish()
        if automatic:

            def refuse_used() -> None:
                if (path / commit.metadata_name()).exists():
                    raise FileExistsError(
                        errno.EEXIST,
                        "it is of an earlier run; load it, or set "
                        "ProjectConfiguration(iteration=...) to the number to go on with",
                        str(path),
                    )

            on_first(refuse_used)
        # Programs write files of their own beside the checkpoint.
        on_first(lambda: _make_directory(path))
        models = self._models_that_hooks_leave(path)
        limit = project.total_limit if automatic else None
        self._prewarming().saving()
        handle = saves.start(path, self._state(models), limit)
        project.iteration += 1
        return handle

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint into everything that was prepared or registered. Collective.

        Args:
            input_dir: the directory of a checkpoint, of pyckpt or of Accelerate's own; by default
                the newest that is valid, under ``automatic_checkpoint_naming``.
            load_kwargs: for a checkpoint of Accelerate's own.
            load_model_func_kwargs: ``strict=False`` leaves out what the models or the checkpoint
                lack; others are for a checkpoint of Accelerate's own.

        Raises:
            FileNotFoundError: there is no valid checkpoint.
            RanksLost: a process has not called this, and ``patience`` is over.
            LoadError: the checkpoint does not fit; nothing was loaded.
            OSError, PyckptError: it cannot be read, or an earlier save failed.
        """
        if input_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs a directory, or automatic_checkpoint_naming")
        saves = self._assembled("load_state")
        saves.finish()
        path, is_ours = on_first(lambda: self._find(input_dir))
        if not is_ours:
            try:
                super().load_state(str(path), load_kwargs, **load_model_func_kwargs)
            except Exception as error:
                raise LoadError(
                    f"{path} is no checkpoint of pyckpt, and Accelerate cannot load it here "
                    f"({type(error).__name__}: {error}). If it is one of another framework, or of "
                    f"another number of processes, convert it: pyckpt import {path} DIRECTORY"
                ) from error
            for optimizer in self._optimizers:
                pyckpt.optim.repair(optimizer)
            return
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(path))
        state = self._state([(i, one) for i, one in enumerate(self._models) if _has(models, one)])
        strict = load_model_func_kwargs.get("strict", True)
        options = LoadOptions() if strict else LoadOptions(missing="keep", unexpected="ignore")
        try:
            saves.load(path, state, options)
        except LoadError as error:
            if "accelerator" not in error.missing:
                raise
            raise LoadError(
                f"{path} was not saved by an Accelerator of pyckpt; its model alone can be loaded, "
                "with pyckpt.load({'model': model}, path, unexpected='ignore')",
                missing=error.missing,
            ) from error
        rng = pyckpt.RngState().state_dict()
        for loader in self._dataloaders:
            if (position := position_of(loader)) is not None:
                position.resume_with(rng)
        self.step = state["accelerator"]["step"]
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            project.iteration = max(project.iteration, state["accelerator"]["iteration"] + 1)

    def _assembled(self, method: str) -> Saves:
        """The saves, once all processes have called a method."""
        if self._saves is None:
            self._saves = Saves()
        self._saves.assemble(method, self.patience)
        return self._saves

    def wait_for_saves(self) -> None:
        """Wait until no save is under way. Collective.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        if self._saves is not None:
            self._saves.finish()

    def end_training(self) -> None:
        """As of Accelerate, after the last save.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        try:
            self._end_saves()
        finally:
            super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """As of Accelerate, after the last save of what was prepared: saves know the optimizers.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        try:
            self._end_saves()
        finally:
            freed = super().free_memory(*objects)
        return freed

    def _end_saves(self) -> None:
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.close()

    def __getstate__(self) -> dict[str, Any]:
        # What pickles of Accelerate's pickles of this one; the copy has saves of its own.
        own = ("_saves", "_prewarmer")
        return {name: one for name, one in vars(self).items() if name not in own}

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As of Accelerate; the loader's epochs are followed from here on."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if hasattr(prepared, "base_dataloader") and position_of(prepared) is None:
            prepared.pyckpt_position = Position(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As of Accelerate. The epoch after it is the next one for ``dataloader``, too."""
        skipping = super().skip_first_batches(dataloader, num_batches)
        position = position_of(dataloader)
        if position is not None:
            position.follow(skipping)
        return skipping

    # --- what is saved ----------------------------------------------------------------------------

    def _state(self, models: list[tuple[int, Any]]) -> dict[str, Any]:
        """The objects of a checkpoint, by name. ``models`` have their numbers."""
        state: dict[str, Any] = {_name("model", i): model for i, model in models}
        for name, objects in {
            "optimizer": self._optimizers,
            "scheduler": self._schedulers,
            "custom": self._custom_objects,
        }.items():
            state |= {_name(name, i): one for i, one in enumerate(objects)}
        state |= {
            _name("loader", i): pyckpt.PerRank(position, merge=position.on_other_ranks)
            for i, one in enumerate(self._dataloaders)
            if (position := position_of(one)) is not None
        }
        if self.scaler is not None:
            state["scaler"] = self.scaler
        state["rng"] = pyckpt.RngState()
        state["accelerator"] = {"step": self.step, "iteration": self.save_iteration}
        return state

    def _models_that_hooks_leave(self, path: Path) -> list[tuple[int, Any]]:
        """The models that the program's hooks do not save by themselves, with their numbers. A hook
        says so by taking a model's weights out of the list."""
        numbered = list(enumerate(self._models))
        hooks = self._save_model_state_pre_hook.values()
        if not hooks:
            return numbered
        path.mkdir(parents=True, exist_ok=True)
        sharded = self.distributed_type == DistributedType.FSDP
        each = [] if sharded else [model.state_dict() for model in self._models]
        left = list(each)
        for hook in hooks:
            hook(self._models, left, str(path))
        return numbered if sharded else [(i, one) for i, one in numbered if _has(left, each[i])]

    def _find(self, input_dir: str | os.PathLike[str] | None) -> tuple[Path, bool]:
        """The checkpoint to load, and whether it is one of pyckpt."""
        if input_dir is not None:
            path = directory_of(input_dir)
            if not path.is_dir():
                raise FileNotFoundError(errno.ENOENT, "no directory to load from", str(path))
            return path, (path / commit.metadata_name()).exists() or _is_unfinished(path)
        numbered = Numbered(directory_of(os.path.join(self.project_dir, "checkpoints")))
        seen = []
        for number in numbered.steps():
            entry = numbered.examine(number)
            if entry.error is not None:
                raise entry.error
            path = numbered.path(number)
            if entry.checkpoint is not None or is_stock(path):
                return path, entry.checkpoint is not None
            seen.append(str(entry))
        what = f" ({'; '.join(seen[:5])})" if seen else ""
        raise FileNotFoundError(
            errno.ENOENT, f"no valid checkpoint to load{what}", str(numbered.directory)
        )

    def _refuse_unsupported(self, arguments: Mapping[str, Any]) -> None:
        if self.distributed_type in (
            DistributedType.DEEPSPEED,
            DistributedType.MEGATRON_LM,
            DistributedType.XLA,
        ):
            raise ValueError(
                f"{self.distributed_type.value} saves its engine by itself: use "
                "accelerate.Accelerator"
            )
        if self.project_configuration.save_on_each_node:
            raise ValueError(
                "save_on_each_node=True: a checkpoint is one directory, on a file system that all "
                "nodes share; take the argument away"
            )
        if arguments:
            raise TypeError(f"save_state takes no {', '.join(arguments)}")


def _make_directory(path: Path) -> None:
    with suppress(OSError):  # the save will say it
        path.mkdir(parents=True, exist_ok=True)


def _name(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _has(ones: Any, one: Any) -> bool:
    return any(other is one for other in ones)


def _is_unfinished(path: Path) -> bool:
    """Whether a save of pyckpt did not get to its end there."""
    names = os.listdir(path)
    return bool(names) and all(commit.is_part(name) for name in names)
