"""Strategies of the Trainer whose checkpoints go through pyckpt."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy as _DDP
from lightning.pytorch.strategies import FSDPStrategy as _FSDP
from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallel
from lightning.pytorch.strategies import SingleDeviceStrategy as _SingleDevice

from pyckpt import optim
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.integrations.first import on_first
from pyckpt.integrations.lightning import finetuning, schedules
from pyckpt.integrations.lightning.contents import Contents, Handed, Later, Template
from pyckpt.integrations.lightning.files import as_lightning, is_of_training
from pyckpt.train.path_saver import PathSaver, is_checkpoint
from pyckpt.train.prewarmer import Prewarmer
from pyckpt.train.restorer import LoadOptions
from pyckpt.train.state.per_rank import Merge
from pyckpt.train.store.catalog import note_of
from pyckpt.train.store.removal import remove

__all__ = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"]

_logger = logging.getLogger("pyckpt")

_Strategy: Any = object  # one of Lightning's, in each class that is made of these


class _Saving(_Strategy):
    """What the strategies have in common: how they save, load and remove checkpoints.

    A checkpoint is a directory, sharded where the strategy shards, written in the background and
    committed at once. The next save waits for it, and raises its error if it failed. The end of
    training waits, too. A checkpoint that ``ModelCheckpoint`` removes stays until the one that was
    saved after it is committed.

    ``ckpt_path`` may also be a checkpoint of Lightning's own strategy of this name.

    Args:
        merge_data: brings the positions of dataloaders to another number of ranks, as for
            `Checkpoints`.
        direct: whether saving and loading bypass the page cache, as for `DirectWriter`.
        prewarm: whether the memory of the first save is made in the background, from the first
            batch on, if the Trainer has a checkpoint callback.
        args, kwargs: as for Lightning's strategy of the same name.
    """

    def __init__(
        self,
        *args: Any,
        merge_data: Merge | None = None,
        direct: Literal["auto", "require", "off"] = "auto",
        prewarm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._merge_data = merge_data
        self._direct = direct
        self._prewarmer = Prewarmer(enabled=prewarm)
        self._saver: PathSaver | None = None
        self._handed: Handed | None = None
        self._later: Later | None = None
        self._is_loaded = False  # the module and the optimizers, by `load_checkpoint`
        self._is_running = False  # a Trainer runs, and will wait for the last save when it ends

    def setup_environment(self) -> None:
        super().setup_environment()
        self._is_running = True

    # --- saving -----------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The live tensors of the module, each rank's shards. Nothing is copied."""
        assert self.model is not None
        self._handed = Handed(self.model)
        return dict(self._handed.weights)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: the optimizers themselves are saved."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        handed, self._handed = self._handed, None
        assert handed is not None
        trainer = self._attached()
        if trainer is not None and "optimizer_states" in checkpoint:
            schedules.note(trainer, checkpoint)
            finetuning.note(trainer, checkpoint)
        contents = Contents(
            self,
            lambda: (checkpoint, handed),
            weights_only="optimizer_states" not in checkpoint,
        )
        path = Path(self.broadcast(filepath))
        if on_first(path.is_file):
            raise FileExistsError(17, "there is a file; remove it, or save elsewhere", str(path))
        # ModelCheckpoint links to it, and takes the names that are there for taken, at once. If it
        # cannot be made, the save says so.
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        self._open().save(path, contents, step=checkpoint["global_step"])
        if path.name.startswith("hpc_ckpt_"):
            self.wait()  # Lightning has the job ended next, and started again
        if not self._is_running:  # nothing will wait for it later
            self._close()

    def wait(self) -> None:
        """Wait until no save is under way. All ranks call it.

        Raises:
            OSError, PyckptError: a save failed, and its error was not raised before.
        """
        if self._saver is not None:
            self._saver.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.is_global_zero:
            return
        path = Path(filepath)
        by: Callable[[], object] = partial(_remove, path)
        if path.is_symlink():  # of save_last="link"
            by = partial(path.unlink, missing_ok=True)
        elif path.is_file() or _is_stock(path):
            by = partial(super().remove_checkpoint, filepath)
        if self._saver is not None:
            self._saver.remove(path, by=by)
        else:
            by()

    # --- loading ----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return not self._is_loaded and super().lightning_restore_optimizer

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self.wait()  # it may be the one that is being saved
        path = Path(self.broadcast(checkpoint_path))
        # The first rank looks: file systems of others may lag behind.
        kind = on_first(lambda: look_at(path))
        trainer = self._attached()
        if kind == "unfinished":
            instead = on_first(lambda: _newest_beside(path, trainer))
            if instead is None:
                if trainer is not None and trainer.state.fn == "fit" and _is_last(path, trainer):
                    _logger.warning(
                        "%s holds no complete checkpoint, and neither does its directory: "
                        "training begins anew",
                        path,
                    )
                    return _Nothing({"pytorch-lightning_version": lightning.__version__})
                raise no_checkpoint(path, kind)
            _logger.warning(
                "%s holds no complete checkpoint, since its save did not finish; the newest "
                "complete one beside it is loaded: %s",
                path,
                instead,
            )
            path = instead
            kind = on_first(lambda: look_at(path))
        elif kind in ("foreign", "lost"):
            raise no_checkpoint(path, kind)
        self._is_loaded = kind == "ours"
        if not self._is_loaded:
            return self._load_stock(path, checkpoint_path, weights_only)
        if trainer is None:
            self._is_loaded = False  # the module is not here; Lightning loads what it is handed
            return as_lightning(path)
        fitting = trainer.state.fn == "fit"
        template = Template(trainer, fitting=fitting, merge_data=self._merge_data)
        strict = trainer.lightning_module.strict_loading
        options = LoadOptions(
            missing="error" if strict else "keep",
            unexpected="error" if strict else "ignore",
        )
        with self._loader() as loader:
            if first := template.first:
                loader.load(path, first, options)
                template.prepare()
            loader.load(path, template.objects, options)
        if fitting:
            self._later = template.rest_of()
        return template.checkpoint()

    def _load_stock(self, path: Path, given: Any, weights_only: bool | None) -> Any:
        if not isinstance(self, _FSDP | _ModelParallel):
            refuse_shards(path, self)
        # What is no local file or directory is left as it was given: it may be a URL.
        return super().load_checkpoint(path if path.exists() else given, weights_only=weights_only)

    @contextmanager
    def _loader(self) -> Iterator[PathSaver]:
        if self._saver is not None:
            yield self._saver
            return
        saver = PathSaver(direct=self._direct)  # has a thread, which nothing would end later
        try:
            yield saver
        except BaseException:
            saver.abandon()
            raise
        saver.close()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_loaded:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_loaded:
            return
        trainer = self._attached()
        if trainer is not None:
            finetuning.regroup(trainer, checkpoint)
        super().load_optimizer_state_dict(checkpoint)

    def on_train_start(self) -> None:
        super().on_train_start()
        later, self._later = self._later, None
        if later is not None:
            assert self.lightning_module is not None
            later.restore(self.lightning_module.trainer)
        for optimizer in self.optimizers:  # in case Lightning has loaded them
            optim.repair(optimizer)
        trainer = self._attached()
        if trainer is not None and self.is_global_zero:
            _remove_empty(trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        trainer = self._attached()
        if self._saver is not None:
            self._prewarmer.saving()
        elif trainer is not None and trainer.checkpoint_callbacks and not trainer.fast_dev_run:
            optimizers = {f"optimizer_{i}": one for i, one in enumerate(self.optimizers)}
            self._prewarmer.step_ended({"model": self.model, **optimizers})

    # --- the end ----------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.abandon()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._is_running = False
        try:
            self._close()  # before the module and the optimizers are moved away
        finally:
            super().teardown()

    def _attached(self) -> Trainer | None:
        """The Trainer; None if a program has connected a module without one, or no module."""
        try:
            return None if self.lightning_module is None else self.lightning_module.trainer
        except RuntimeError:
            return None

    def _open(self) -> PathSaver:
        if self._saver is None:
            self._saver = PathSaver(direct=self._direct)
        return self._saver

    def _close(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


Kind = Literal["ours", "theirs", "unfinished", "lost", "foreign"]


def look_at(path: Path) -> Kind:
    """What is at a path.

    - "ours": a checkpoint of pyckpt
    - "theirs": a file, a sharded checkpoint of Lightning's own, or nothing on this machine
    - "unfinished": what a save, or a removal, of ours leaves that was killed
    - "lost": a checkpoint of pyckpt that has lost its metadata
    - "foreign": a directory with files of others
    """
    if _is_stock(path) or not path.is_dir():
        return "theirs"
    if is_checkpoint(path):
        return "ours"
    names = os.listdir(path)
    if commit.lost_metadata(names):
        return "lost"
    is_ours = all(commit.is_part(name) or name == commit.REMOVED for name in names)
    return "unfinished" if is_ours else "foreign"


def no_checkpoint(path: Path, kind: Kind) -> LoadError:
    """The error for a directory that is no checkpoint."""
    if kind == "lost":
        return LoadError(f"{path} holds {commit.LOST_METADATA}")
    if kind == "foreign":
        return LoadError(f"{path} holds no checkpoint, but other files; give the path of one")
    return LoadError(f"{path} holds no checkpoint, or one whose save did not finish")


def refuse_shards(path: Path, strategy: Any) -> None:
    """Raise a `LoadError` if there is a sharded checkpoint of Lightning's own."""
    if on_first(lambda: _is_stock(path)):
        raise LoadError(
            f"{path} is a sharded checkpoint of Lightning's own, which {type(strategy).__name__} "
            "does not load. Make it a checkpoint of pyckpt, in a directory RUN, by: "
            f"pyckpt import {path} RUN"
        )


def _is_last(path: Path, trainer: Trainer | None) -> bool:
    """Whether Lightning would take it for ``ckpt_path="last"``. It does not say whether it did."""
    return trainer is not None and any(
        isinstance(one, ModelCheckpoint)
        and one.dirpath is not None
        and os.path.abspath(one.dirpath) == os.path.abspath(path.parent)
        and path.name.startswith(one.CHECKPOINT_NAME_LAST)
        for one in trainer.checkpoint_callbacks
    )


def _newest_beside(path: Path, trainer: Trainer | None) -> Path | None:
    """The newest complete checkpoint of the directory, if ``path`` may have been chosen for being
    the last. It is when a save of the last one was killed that none would be found otherwise."""
    if not _is_last(path, trainer):
        return None
    # Copying changes the times of files, but not the steps. Files may be exports, so they count
    # only where there is no checkpoint of ours.
    ours: list[tuple[int, int, Path]] = []
    theirs: list[tuple[int, Path]] = []
    for one in path.parent.iterdir():
        if one.suffix != path.suffix or one.is_symlink():
            continue
        kind = look_at(one)
        if kind == "ours" and (step := _step_of(one)) is not None:
            changed = (one / commit.metadata_name()).stat().st_mtime_ns
            ours.append((step, changed, one))
        elif kind == "theirs" and (one.is_dir() or is_of_training(one)):
            theirs.append((one.stat().st_mtime_ns, one))
    if ours:
        return max(ours)[-1]
    return max(theirs)[-1] if theirs else None


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint of pyckpt; -1 if it does not say, None if training cannot go on from
    it."""
    metadata = metadata_format.read(path / commit.metadata_name())
    if not any(key.startswith("rng.") for key in metadata.state_dict_metadata):
        return None  # weights only, or none of a Trainer
    note = note_of(path, metadata)
    return -1 if note is None or note.step is None else note.step


class _Nothing(dict[str, Any]):
    """A checkpoint from which Lightning restores nothing."""

    def __bool__(self) -> bool:
        return False


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        remove(path)


def _remove_empty(trainer: Trainer) -> None:
    """Remove the empty directories that killed saves have left where ``ModelCheckpoint`` saves. It
    would take their names for taken. Another job's save makes its directory again when it begins,
    and fails only if it is removed between that and its first file."""
    for one in trainer.checkpoint_callbacks:
        if isinstance(one, ModelCheckpoint) and one.dirpath is not None:
            for path in Path(one.dirpath).glob(f"*{one.FILE_EXTENSION}"):
                with suppress(OSError):  # it is a file, or has some
                    path.rmdir()


def _is_stock(path: Path) -> bool:
    """Whether a directory is a sharded checkpoint of Lightning's own."""
    return (path / "meta.pt").exists()


class SingleDeviceStrategy(_Saving, _SingleDevice):
    __doc__ = _Saving.__doc__


class DDPStrategy(_Saving, _DDP):
    __doc__ = _Saving.__doc__


class FSDPStrategy(_Saving, _FSDP):
    __doc__ = _Saving.__doc__


class ModelParallelStrategy(_Saving, _ModelParallel):
    __doc__ = _Saving.__doc__
