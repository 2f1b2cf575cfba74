"""An Accelerator whose ``save_state`` and ``load_state`` go through pyckpt. ::

from pyckpt.integrations.accelerate import Accelerator  # in place of accelerate's own
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyckpt.integrations.versions import require

require("accelerate", minimum="1.15", below="2", extra="accelerate")

# ruff: noqa: E402
import accelerate
import torch
from accelerate.utils import DistributedType

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.integrations.first import on_first
from pyckpt.train.arguments import directory_of
from pyckpt.train.handle import SaveHandle
from pyckpt.train.restorer import LoadOptions, Restorer
from pyckpt.train.saver import Saver
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.fence import Fence
from pyckpt.train.store.pruner import prune
from pyckpt.train.store.retention import Retention
from pyckpt.train.sync.ranks import Ranks

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

    _saves: _Saves | None = None

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
        if self._saves is None:
            self._saves = _Saves()
        saves = self._saves
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
            LoadError: the checkpoint does not fit; nothing was loaded.
            OSError, PyckptError: it cannot be read, or an earlier save failed.
        """
        self.wait_for_saves()
        if input_dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs a directory, or automatic_checkpoint_naming")
        path, is_ours = on_first(lambda: self._find(input_dir))
        if not is_ours:
            super().load_state(str(path), load_kwargs, **load_model_func_kwargs)
            for optimizer in self._optimizers:
                pyckpt.optim.repair(optimizer)
            return
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(path))
        state = self._state([(i, one) for i, one in enumerate(self._models) if _has(models, one)])
        strict = load_model_func_kwargs.get("strict", True)
        options = LoadOptions() if strict else LoadOptions(missing="keep", unexpected="ignore")
        ranks = Ranks()
        try:
            restorer = Restorer(_Places({0: path}), ranks, direct="auto", engine=None)
            restorer.restore(state, 0, options, required=True)
        except LoadError as error:
            if "accelerator" not in error.missing:
                raise
            raise LoadError(
                f"{path} was not saved by an Accelerator of pyckpt; its model alone can be loaded, "
                "with pyckpt.load({'model': model}, path, unexpected='ignore')",
                missing=error.missing,
            ) from error
        finally:
            ranks.close()
        rng = pyckpt.RngState().state_dict()
        for loader in self._dataloaders:
            if (position := _position_of(loader)) is not None:
                position.resume_with(rng)
        self.step = state["accelerator"]["step"]
        project = self.project_configuration
        if project.automatic_checkpoint_naming:
            project.iteration = max(project.iteration, state["accelerator"]["iteration"] + 1)

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

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As of Accelerate; the loader's epochs are followed from here on."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if hasattr(prepared, "base_dataloader") and _position_of(prepared) is None:
            prepared.pyckpt_position = _Position(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As of Accelerate. The epoch after it is the next one for ``dataloader``, too."""
        skipping = super().skip_first_batches(dataloader, num_batches)
        position = _position_of(dataloader)
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
            _name("loader", i): pyckpt.PerRank(position, merge=_on_other_ranks)
            for i, one in enumerate(self._dataloaders)
            if (position := _position_of(one)) is not None
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
        numbered = _Numbered(directory_of(os.path.join(self.project_dir, "checkpoints")))
        seen = []
        for number in numbered.steps():
            entry = numbered.examine(number)
            if entry.error is not None:
                raise entry.error
            path = numbered.path(number)
            if entry.checkpoint is not None or any(path.glob("random_states_*.pkl")):
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


class _Position:
    """The epoch of a prepared loader and its position in it, as far as these can be known.

    A loader draws random numbers when an epoch begins: the order of the examples, and seeds for its
    workers. A program that resumes in the middle of an epoch begins it again. So that it gets the
    same order, and goes on with the same numbers as if it had not been interrupted, this puts the
    generators back to where the epoch began, and, once the first batch is there, to where they were
    at the save. For this it takes the place of the ``__iter__`` of the loader's own loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch: int | None = None  # that began last
        self._start: dict[str, torch.Tensor] | None = None  # generators, while an epoch goes on
        self._replay: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        if self._is_stateful:
            loader.load_state_dict({})  # or its first epoch would have begun when it was prepared
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Watch the epochs of a loader: of the prepared one, or of one that skips batches of it."""
        base = loader.base_dataloader
        begin = base.__iter__

        def iterate() -> Iterator[Any]:
            if self._replay is not None:
                self._set(self._replay[0])
            self._epoch, self._start = getattr(loader, "iteration", 0), self._generators()
            try:
                batches = begin()
                for batch in batches:
                    if self._replay is not None:
                        replay, self._replay = self._replay, None
                        pyckpt.RngState().load_state_dict(replay[1])
                    yield batch
                if loader is not self._loader:
                    self._loader.set_epoch(self._epoch + 1)
            finally:
                self._start = None  # also if the program leaves the loop

        base.__iter__ = iterate

    def _generators(self) -> dict[str, torch.Tensor]:
        return {"torch": torch.get_rng_state()} | {
            name: generator.get_state() for name, generator in self._own().items()
        }

    def _own(self) -> dict[str, torch.Generator]:
        """The generators that belong to the loader, by the places where it has them."""
        loader = self._loader
        sampler = getattr(loader, "batch_sampler", None)
        while sampler is not None and not hasattr(sampler, "generator"):
            sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        found = {
            "synchronized": getattr(loader, "synchronized_generator", None),
            "loader": getattr(loader.base_dataloader, "generator", None),
            "sampler": getattr(sampler, "generator", None),
        }
        return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}

    def _set(self, states: Mapping[str, torch.Tensor]) -> None:
        for name, generator in self._own().items():
            if name in states:
                generator.set_state(states[name])
        if "torch" in states:
            torch.set_rng_state(states["torch"])

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        epoch = getattr(loader, "iteration", 0)
        own = {name: one.get_state() for name, one in self._own().items()}
        if self._start is None:
            # In the body of the loop, at the last batch, the loader still counts the old epoch.
            return {"epoch": epoch + (epoch == self._epoch and self._ended()), "generators": own}
        state = {"epoch": self._epoch, "generators": own, "start": self._start}
        if self._is_stateful:
            state["position"] = loader.state_dict()
        return state

    def _ended(self) -> bool:
        return bool(self._loader.end_of_dataloader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loader = self._loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(state["epoch"])
        self._set(state["generators"])
        self._epoch, self._replay = None, None
        if "start" in state:
            self._replay = (state["start"], {})
        if self._is_stateful:
            loader.load_state_dict(state.get("position", {}))

    def resume_with(self, rng: dict[str, Any]) -> None:
        """All else is restored; ``rng`` is the state of this rank's generators."""
        if self._replay is not None:
            self._replay = (self._replay[0], rng)


def _position_of(loader: Any) -> _Position | None:
    """The position of a loader that was prepared. It belongs to the loader, and ends with it."""
    found = vars(loader).get("pyckpt_position")
    return found if isinstance(found, _Position) else None


def _on_other_ranks(states: list[Any], rank: int, world_size: int) -> Any:
    if "position" in states[0]:
        raise LoadError(
            f"saved on {len(states)} ranks in the middle of an epoch, and the position of a "
            f"stateful loader cannot be brought to {world_size}: load it on {len(states)}, or save "
            "at the end of an epoch"
        )
    return states[0]


def _make_directory(path: Path) -> None:
    with suppress(OSError):  # the save will say it
        path.mkdir(parents=True, exist_ok=True)


class _Saves:
    """The saves of one Accelerator, one at a time, each at a path of its own."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self._places = _Places({})
        self._limits: dict[int, int] = {}  # how many numbered checkpoints to keep, by save
        self._saver = Saver(
            self._places,
            self._ranks,
            _Unfenced(Path()),
            direct="auto",
            engine=None,
            on_commit=self._committed,
        )

    def start(self, path: Path, state: Mapping[str, Any], limit: int | None) -> SaveHandle:
        number = self._saver.started + 1
        self._places.paths = {number: path}
        self._limits = {} if limit is None else {number: limit}
        handle = self._saver.start(number, state, {}, final=False, overwrite=True)
        handle.committed.add_done_callback(self._tell)
        self._saver.wait_staged()  # programs change parameters between steps, too
        return handle

    def _committed(self, handle: SaveHandle) -> None:
        limit = self._limits.get(handle.step)
        if limit is not None and self._ranks.rank == 0:
            number = int(handle.path.name.rpartition("_")[2])
            numbered = _Numbered(handle.path.parent)
            prune(numbered, Retention(keep_last=max(1, limit)), committed=(number,))

    def _tell(self, committed: Future[Path]) -> None:
        error = committed.exception()
        if error is not None and self._ranks.rank == 0:
            _logger.error("save_state failed, and the next one will say so: %s", error)

    def finish(self) -> None:
        """Wait for the save that is under way; raise the error of one that failed."""
        self._saver.wait()
        self._saver.raise_failure()

    def close(self) -> None:
        self._saver.wait()
        self._saver.close()
        self._ranks.close()
        self._saver.raise_failure()


class _Places(Catalog):
    """Checkpoints at paths that the program chose, by number."""

    def __init__(self, paths: dict[int, Path]) -> None:
        super().__init__(Path())
        self.paths = paths

    def path(self, step: int) -> Path:
        return self.paths[step]

    def steps(self) -> list[int]:
        return sorted(self.paths, reverse=True)


class _Numbered(Catalog):
    """Checkpoints under the names that Accelerate numbers."""

    def path(self, step: int) -> Path:
        return self.directory / f"checkpoint_{step}"

    def steps(self) -> list[int]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        found = [match for name in names if (match := re.fullmatch(r"checkpoint_(\d+)", name))]
        return sorted((int(match[1]) for match in found), reverse=True)


class _Unfenced(Fence):
    """Whoever saves may: the program chose the directory."""

    @contextmanager
    def held(self) -> Iterator[None]:
        yield


def _name(kind: str, number: int) -> str:
    return kind if number == 0 else f"{kind}_{number}"


def _has(ones: Any, one: Any) -> bool:
    return any(other is one for other in ones)


def _is_unfinished(path: Path) -> bool:
    """Whether a save of pyckpt did not get to its end there."""
    names = os.listdir(path)
    return bool(names) and all(commit.is_part(name) for name in names)
