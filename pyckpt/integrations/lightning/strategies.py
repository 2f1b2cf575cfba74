"""Strategies of the Trainer whose checkpoints go through pyckpt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy as _DDP
from lightning.pytorch.strategies import FSDPStrategy as _FSDP
from lightning.pytorch.strategies import ModelParallelStrategy as _ModelParallel
from lightning.pytorch.strategies import SingleDeviceStrategy as _SingleDevice

from pyckpt import optim
from pyckpt.errors import LoadError
from pyckpt.integrations.first import on_first
from pyckpt.integrations.lightning.contents import Contents, Handed, Later, Template
from pyckpt.train.path_saver import PathSaver, is_checkpoint
from pyckpt.train.restorer import LoadOptions
from pyckpt.train.state.per_rank import Merge
from pyckpt.train.store.removal import remove

__all__ = ["DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"]

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
        args, kwargs: as for Lightning's strategy of the same name.
    """

    def __init__(
        self,
        *args: Any,
        merge_data: Merge | None = None,
        direct: Literal["auto", "require", "off"] = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._merge_data = merge_data
        self._direct = direct
        self._saver: PathSaver | None = None
        self._handed: Handed | None = None
        self._later: Later | None = None
        self._is_loaded = False  # the module and the optimizers, by `load_checkpoint`
        self._is_over = False

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._is_over = False

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
        trainer = self._trainer
        contents = Contents(
            trainer,
            lambda: (checkpoint, handed),
            weights_only="optimizer_states" not in checkpoint,
        )
        path = Path(self.broadcast(filepath))
        if on_first(path.is_file):
            raise FileExistsError(17, "there is a file; remove it, or save elsewhere", str(path))
        self._open().save(path, contents, step=checkpoint["global_step"])
        if path.name.startswith("hpc_ckpt_"):
            self.wait()  # Lightning has the job ended next, and started again
        if self._is_over:  # nothing will wait for it later
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
        if path.is_symlink():  # of save_last="link"
            path.unlink()
        elif path.is_file() or _is_stock(path):
            super().remove_checkpoint(filepath)
        elif self._saver is not None:
            self._saver.remove(filepath)
        else:
            remove(path)

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
        self._is_loaded, is_unfinished = on_first(lambda: look_at(path))
        if not self._is_loaded:
            if is_unfinished:
                raise LoadError(f"{path} holds no checkpoint, or one whose save did not finish")
            return super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        trainer = self._trainer
        fitting = trainer.state.fn == "fit"
        template = Template(trainer, fitting=fitting, merge_data=self._merge_data)
        strict = trainer.lightning_module.strict_loading
        options = LoadOptions(
            missing="error" if strict else "keep",
            unexpected="error" if strict else "ignore",
        )
        self._open().load(path, template.objects, options)
        if fitting:
            self._later = template.rest_of()
        return template.checkpoint()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._is_loaded:
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._is_loaded:
            super().load_optimizer_state_dict(checkpoint)

    def on_train_start(self) -> None:
        super().on_train_start()
        later, self._later = self._later, None
        if later is not None:
            later.restore(self._trainer)
        for optimizer in self.optimizers:  # in case Lightning has loaded them
            optim.repair(optimizer)

    # --- the end ----------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.abandon()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._is_over = True
        try:
            self._close()  # before the module and the optimizers are moved away
        finally:
            super().teardown()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    def _open(self) -> PathSaver:
        if self._saver is None:
            self._saver = PathSaver(direct=self._direct)
        return self._saver

    def _close(self) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


def look_at(path: Path) -> tuple[bool, bool]:
    """Whether there is a checkpoint of pyckpt, and whether there is a directory that is none."""
    is_ours = is_checkpoint(path) and not _is_stock(path)
    return is_ours, not is_ours and path.is_dir() and not _is_stock(path)


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
