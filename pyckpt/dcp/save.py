"""One save, made by DCP in the calling thread."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from pyckpt.dcp.failures import error_of, portable_errors
from pyckpt.dcp.writer import DirectWriter
from pyckpt.errors import SaveError
from pyckpt.private import save_state_dict

__all__ = ["save_tree", "save_with_dcp"]


def save_with_dcp(
    tree: dict[str, Any],
    *,
    writer: StorageWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    alone: bool,
) -> None:
    """Do what ``dcp.save`` does, but for asking objects in the tree for their state.

    ``dcp.save`` itself warns at each call of a process that is alone.

    Args:
        alone: whether this process saves without others.

    Raises:
        CheckpointException: the save failed, on some rank.
    """
    save_state_dict(
        tree,
        storage_writer=writer,
        process_group=process_group,
        no_dist=alone,
        planner=planner,
    )


def save_tree(
    tree: dict[str, Any],
    *,
    writer: DirectWriter,
    planner: SavePlanner,
    process_group: dist.ProcessGroup | None,
    alone: bool,
    doing: str,
) -> None:
    """`save_with_dcp`, with errors that can be caught. However it ends, the writer holds nothing
    after it: DCP tells a writer nothing of an interrupt.

    Args:
        doing: what to call the save in errors.

    Raises:
        OSError, PyckptError: the save failed, on some rank; see `error_of`.
    """
    try:
        save_with_dcp(
            tree,
            writer=_HonestWriter(writer),  # type: ignore[arg-type]
            planner=planner,
            process_group=process_group,
            alone=alone,
        )
    except CheckpointException as error:
        failure = error
    else:
        return
    finally:
        writer.close_save()
    # Outside of the handler, or else Python would also show DCP's rendering of the same errors.
    raise error_of(failure, alone=alone, kind=SaveError, doing=doing)


class _HonestWriter:
    """A writer whose errors reach the other ranks with their classes."""

    def __init__(self, writer: StorageWriter) -> None:
        self._writer = writer

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with portable_errors():
            return self._writer.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with portable_errors():
            return self._writer.prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        with portable_errors():
            return self._writer.write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with portable_errors():
            self._writer.finish(metadata, results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)
