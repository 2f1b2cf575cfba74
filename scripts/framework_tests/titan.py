"""torchtitan's tests of its CheckpointManager.

Most of them replace ``dcp.save`` and ``dcp.load`` by records of the calls, or by others that write
a file. Ours saves and loads all the same, and calls these besides, as torchtitan would. What a
record is asked to load, and is no checkpoint, is left to the record.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from scripts.framework_tests._common import Suite

__all__ = ["SUITES"]

_STAGER = "replaces the parts of torchtitan's way to copy, which ours does not use"


def _swap() -> None:
    import torch.distributed.checkpoint as storage
    import torchtitan.components.checkpointer as package
    from torchtitan.components.checkpointer import dcp

    from pyckpt.integrations.torchtitan import CheckpointManager

    save = storage.save

    class Recorded(CheckpointManager):
        def dcp_save(self, state_dict: Any, checkpoint_id: str, *args: Any, **options: Any) -> Any:
            recorded, storage.save = storage.save, save
            try:
                ended = super().dcp_save(state_dict, checkpoint_id, *args, **options)
            finally:
                storage.save = recorded
            if recorded is not save:
                recorded(state_dict, checkpoint_id=checkpoint_id)
            return ended

        def dcp_load(self, state_dict: Any, checkpoint_id: str, *args: Any, **options: Any) -> None:
            file = Path(checkpoint_id, ".metadata")
            is_checkpoint = file.exists() and file.stat().st_size > 0
            if is_checkpoint:
                super().dcp_load(state_dict, checkpoint_id, *args, **options)
            if hasattr(storage.load, "assert_called"):
                # What is loaded must be what ours loads, and not what the test's own function does.
                shown = copy.deepcopy(state_dict) if is_checkpoint else state_dict
                storage.load(shown, checkpoint_id=checkpoint_id)

    package.CheckpointManager = Recorded
    dcp.CheckpointManager = Recorded


SUITES = {
    "torchtitan": Suite(
        package="torchtitan",
        module=__name__,
        swap=_swap,
        files=["tests/unit_tests/test_checkpoint.py"],
        left_out={
            "*::test_async_save_with_pinned_mem_assigns_staging_future": _STAGER,
            "*::test_legacy_config_only_adds_dcp_specific_fields": (
                "asks for the fields that torchtitan's own class adds, which ours inherits"
            ),
            "*::test_sanity_and_range_checks": "wants keep_latest_k=1 refused, which ours allows",
        },
    ),
}
