"""Lightning's tests of its strategies, of ModelCheckpoint and of resuming, and those of Fabric.

The sources are the folder ``tests`` of its repository, of the release. The tests take a checkpoint
for a file that is there when the call returns. So ours waits for each save, and where a test looks
at a checkpoint by ``torch.load`` or ``os.path.isfile``, it sees what `to_lightning` would write.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from scripts.framework_tests._common import Suite

__all__ = ["SUITES"]

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")


def _swap() -> None:
    # The modules that take the strategies by their names.
    import lightning.fabric.connector
    import lightning.pytorch.core.saving
    import lightning.pytorch.trainer.connectors.accelerator_connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    from pyckpt.integrations.lightning import fabric, strategies

    ours = {
        getattr(theirs, name): getattr(module, name)
        for theirs, module in (
            (lightning.pytorch.strategies, strategies),
            (lightning.fabric.strategies, fabric),
        )
        for name in _STRATEGIES
    }
    for registry in (STRATEGY_REGISTRY, StrategyRegistry):
        for entry in registry.values():
            entry["strategy"] = ours.get(entry["strategy"], entry["strategy"])
    _replace(ours)
    for owner in (strategies._Saving, fabric._Saving):
        _settle(owner)
    _show_files()


def _replace(ours: dict[Any, Any]) -> None:
    """Everywhere in Lightning."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning.") and module is not None:
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value in ours:
                    setattr(module, key, ours[value])


def _settle(owner: Any) -> None:
    """Have each save wait, and count as one call of ``torch.save`` where a test counts these."""
    import torch

    real, save, teardown = torch.save, owner.save_checkpoint, owner.teardown

    def save_checkpoint(self: Any, *args: Any, **options: Any) -> None:
        counted, torch.save = torch.save, real
        try:
            save(self, *args, **options)
            self.wait()
        finally:
            torch.save = counted
        if counted is not real and getattr(self, "is_global_zero", True):
            counted({}, "checkpoint")

    def end(self: Any) -> None:
        try:
            teardown(self)
        finally:
            for thread in threading.enumerate():
                if thread.name == "pyckpt-save-end":  # ends by itself, a moment later
                    thread.join(10)

    owner.save_checkpoint, owner.teardown = save_checkpoint, end


def _show_files() -> None:
    """Checkpoints look like files, to those who ask for files."""
    import torch
    from lightning.fabric.utilities import cloud_io

    from pyckpt.integrations.lightning.files import as_lightning

    isfile = os.path.isfile

    def is_ours(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and isfile(os.path.join(path, ".metadata"))

    def seeing(load: Any) -> Any:
        def seen(path: Any, *args: Any, **options: Any) -> Any:
            return as_lightning(path) if is_ours(path) else load(path, *args, **options)

        return seen

    opened, torch.load = cloud_io._load, seeing(torch.load)
    os.path.isfile = lambda path: is_ours(path) or isfile(path)
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning.") and module is not None:
            for key, value in list(vars(module).items()):
                if value is opened:
                    setattr(module, key, seeing(opened))


_URL = "saves to a file system that only fsspec knows; ours says that it does not"
_SERVED = "loads the checkpoint from a web server, which serves no directories as files"
_MESSAGE = "wants an error in Lightning's words; ours has others"
_MOCKS = "hands mocks to Lightning's own way to save or load, which ours does not go"
_FORMAT = "is about Lightning's own sharded format: what its files are, and which it refuses"

SUITES = {
    "lightning": Suite(
        package="lightning",
        module=__name__,
        swap=_swap,
        files=[
            "tests_pytorch/checkpointing/test_checkpoint_callback_frequency.py",
            "tests_pytorch/checkpointing/test_model_checkpoint.py",
            "tests_pytorch/checkpointing/test_torch_saving.py",
            "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
            "tests_pytorch/callbacks/test_model_checkpoint_additional_cases.py",
            "tests_pytorch/models/test_restore.py",
            "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
            "tests_pytorch/strategies/test_ddp.py",
            "tests_pytorch/strategies/test_fsdp.py",
            "tests_pytorch/strategies/test_model_parallel.py",
            "tests_pytorch/strategies/test_single_device.py",
            "tests_fabric/strategies/test_ddp.py",
            "tests_fabric/strategies/test_fsdp.py",
            "tests_fabric/strategies/test_model_parallel.py",
            "tests_fabric/strategies/test_single_device.py",
        ],
        left_out={
            "*::test_ckpt_for_fsspec": _URL,
            "*::test_local_cross_device_checkpoint": _URL,
            "*::test_strict_model_load_more_params[[]True]": _SERVED,
            "*::test_strict_model_load_less_params[[]True]": _SERVED,
            "*::test_strict_loading*": (
                "counts calls of the module's load_state_dict; ours fills its tensors in place"
            ),
            "*::test_callbacks_state_fit_ckpt_path": (
                "wants callbacks restored before on_fit_start; with ours they are after it, as "
                "with Lightning's own sharded strategies"
            ),
            "*::test_model_checkpoint_no_extraneous_invocations": (
                "wants no call of torch.save on the second rank; with ours each rank writes"
            ),
            "*::test_trainer_save_checkpoint_storage_options": (
                "hands storage_options to a CheckpointIO, which ours does not have"
            ),
            "*::test_save_checkpoint_storage_options": _MESSAGE,
            "*::test_device_mesh_type_annotation": (
                "reads the annotations of __init__; ours hands the arguments on"
            ),
            "*::test_save_checkpoint_path_exists": _MOCKS,
            "*::test_save_checkpoint_unknown_state_dict_type": _MOCKS,
            "*::test_save_checkpoint_one_*_module_required": (
                "wants several sharded modules, or none, refused; ours saves them"
            ),
            "tests_pytorch/*::test_load_unknown_checkpoint_type": _MOCKS,
            "tests_fabric/*::test_load_unknown_checkpoint_type": _MESSAGE,
            "*::test_load_checkpoint_no_state": _MESSAGE,
            "*::test_load_checkpoint_one_*_module_required": _MESSAGE,
            "*::test_load_raw_checkpoint_*": _FORMAT,
        },
    ),
}
