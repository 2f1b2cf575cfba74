"""pyckpt in torchtitan 0.3: its ``CheckpointManager``, with pyckpt's copies, files and checks. ::

    from pyckpt.integrations.torchtitan import CheckpointManager

    config.checkpoint = CheckpointManager.Config(enable=True, async_mode="async", interval=500)

All options are torchtitan's own, and mean what they mean there. Checkpoints lie in the same places
(``step-500``). torchtitan's own manager and ``torch.distributed.checkpoint.load`` load them, and
this manager loads those of torchtitan. What is different:

- ``async`` copies the state with pyckpt's threads and the GPU's copy engines before ``save``
  returns. ``async_with_pinned_mem`` copies what optimizers change while training goes on, and the
  next optimizer's step waits for it; no other process is started.
- A checkpoint is complete, with a checksum for each item, or it is not valid.
- Loading checks every byte, and runs no code of the checkpoint.
- ``keep_latest_k`` counts valid checkpoints, may be 1, and never takes a directory for a checkpoint
  that a save left unfinished. A removal that is killed leaves no directory that looks valid.
- ``close`` waits for a save that is under way.
- With ``prewarm``, the memory of the first save is made in the background, from the first step on.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyckpt.integrations.versions import require

require("torchtitan", minimum="0.3", below="0.4", extra="torchtitan")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse  # noqa: E402
from torchtitan.components.checkpointer import (  # noqa: E402
    MODEL,
    OPTIMIZER,
    AsyncMode,
)
from torchtitan.components.checkpointer import (  # noqa: E402
    CheckpointManager as TitansCheckpointManager,
)
from torchtitan.components.checkpointer.base import purge_thread  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

from pyckpt.dcp.failures import error_of  # noqa: E402
from pyckpt.dcp.load import load  # noqa: E402
from pyckpt.dcp.report import some  # noqa: E402
from pyckpt.dcp.save_planner import SavePlanner  # noqa: E402
from pyckpt.dcp.stager import PinnedStager  # noqa: E402
from pyckpt.dcp.writer import DirectWriter  # noqa: E402
from pyckpt.errors import SaveError  # noqa: E402
from pyckpt.train.prewarmer import Prewarmer  # noqa: E402
from pyckpt.train.state.forwards import written_in_forward  # noqa: E402
from pyckpt.train.store.removal import remove  # noqa: E402

if TYPE_CHECKING:
    Base = Any
else:
    Base = TitansCheckpointManager

__all__ = ["CheckpointManager"]

_KEYS_SHOWN = 10
_STEP = re.compile(r"step-(\d+)")


class CheckpointManager(Base):
    """torchtitan's ``CheckpointManager``, which saves and loads with pyckpt.

    Its ``Config`` has the options of torchtitan's, and is used in their place:
    ``config.checkpoint = CheckpointManager.Config(...)``. Checkpoints in Hugging Face format are
    read and written by torchtitan itself.

    Raises:
        ValueError: the folder is on a remote file system, which pyckpt cannot write to.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitansCheckpointManager.Config):
        """As torchtitan's; but ``keep_latest_k`` may be 1, since it counts what is complete."""

        prewarm: bool = True
        """Whether the memory of the first asynchronous save is made in the background."""

        def __post_init__(self) -> None:
            keep = self.keep_latest_k
            if keep == 1:
                self.keep_latest_k = 2  # torchtitan refuses 1
            TitansCheckpointManager.Config.__post_init__(self)
            self.keep_latest_k = keep

    def __init__(self, config: Config, **parts: Any) -> None:
        # Without torchtitan's thread, which removes directories in any order.
        super().__init__(replace(config, keep_latest_k=0), **parts)  # type: ignore[call-arg]
        if not self.enable:
            return
        if filesystem.is_remote(self.folder):
            self.enable = False  # there is nothing to close
            raise ValueError(
                f"pyckpt writes to file systems of this machine, and {self.folder} is none; "
                "use torchtitan's own CheckpointManager for it"
            )
        self.keep_latest_k = config.keep_latest_k
        if self.keep_latest_k > 0:
            self.purge_queue: queue.Queue[str | None] = queue.Queue()
            self.purge_thread = threading.Thread(
                target=purge_thread, args=(self.purge_queue, _remove), daemon=True
            )
            self.purge_thread.start()
        self._planner = SavePlanner()  # remembers the plan
        self._writer: DirectWriter | None = None  # of the last save
        # What optimizers change may be copied later than the rest, where torchtitan asks for that.
        late = self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        self.stager = PinnedStager(optimizers=list(self.states[OPTIMIZER]) if late else ())
        copies = self.async_mode != AsyncMode.DISABLED
        self._prewarmer = Prewarmer(enabled=config.prewarm and copies)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved: bool = super()._save(curr_step, last_step)
        if saved:
            self._prewarmer.saving()
        else:
            models, optimizers = self.states[MODEL].model, self.states[OPTIMIZER]
            self._prewarmer.step_ended({"models": list(models), **_numbered(optimizers)})
        return saved

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | AsyncSaveResponse | None:
        """Save a state as `torch.distributed.checkpoint.save` and ``async_save`` do.

        The arguments, and what is returned, are torchtitan's.
        """
        if to_hf:
            saved: Future[Any] | AsyncSaveResponse | None = super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
            return saved
        self.stager.copy_at_call(written_in_forward(self.states[MODEL].model))
        writer = self._writer = DirectWriter(checkpoint_id, stager=self.stager)
        if async_mode == AsyncMode.DISABLED:
            with _catchable(writer):
                dcp.save(state_dict, storage_writer=writer, planner=self._planner)
            return None
        response = dcp.async_save(
            state_dict, storage_writer=writer, planner=self._planner, process_group=self.pg
        )
        future = response if isinstance(response, Future) else response.upload_completion
        if async_mode == AsyncMode.ASYNC:
            return future
        return AsyncSaveResponse(staging_completion=writer.staged, upload_completion=future)

    def dcp_load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        from_hf: bool,
        from_quantized: bool,
    ) -> None:
        """Load a checkpoint of pyckpt or of stock, and check what has checksums.

        Raises:
            LoadError: keys of the state are not in the checkpoint, or tensors have other shapes.
            CorruptCheckpoint: bytes are not those that were saved.
            UnsafeCheckpoint: the checkpoint contains a class or function that is not allowed.
        """
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        # As in torchtitan, what the checkpoint has besides is left where it is.
        report = load(state_dict, checkpoint_id, unexpected="ignore")
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)
        if report.unexpected:
            logger.warning(
                "not loaded, since the state does not have them: %s",
                some(report.unexpected, _KEYS_SHOWN),
            )

    # --- waiting ---

    def _maybe_wait_for_staging(self) -> None:
        # The next step of an optimizer waits by itself; this is for steps that none sees, as those
        # within a CUDA graph. On a GPU it is the stream that waits.
        if self._writer is not None:
            self._writer.wait_staged()
        self.staging_future = None

    def _wait_for_saving(self) -> None:
        # Forgotten first: an error is told once.
        future: Future[Any] = self.save_future
        self.save_future = None
        assert self._writer is not None
        with _catchable(self._writer):
            future.result()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()

    # --- retention ---

    def _purge_stale_checkpoints(self) -> None:
        """Have the thread remove all but the newest ``keep_latest_k`` valid checkpoints, and what
        saves left unfinished before them."""
        if not self._should_purge():
            return
        assert self._writer is not None
        # By its name: torchtitan's folder may be relative, and the writer's path is not.
        under_way = None if self.save_future is None else Path(self._writer.path).name
        valid: list[tuple[int, Path]] = []
        rest: list[tuple[int, Path]] = []
        for name in filesystem.listdir(self.folder):
            match = _STEP.fullmatch(name)
            path = Path(self.folder, name)
            if match and name != under_way:
                (valid if _is_valid(path) else rest).append((int(match.group(1)), path))
        valid.sort()
        newest = valid[-1][0] if valid else -1
        stale = valid[: -self.keep_latest_k]
        stale += [(step, path) for step, path in rest if step < newest]
        for _, path in sorted(stale):
            self.purge_queue.put(str(path))


@contextmanager
def _catchable(writer: DirectWriter) -> Iterator[None]:
    """Turn DCP's exception, which is no ordinary one, into what it was raised for."""
    failure: CheckpointException | None = None
    try:
        yield
    except CheckpointException as error:
        failure = error
    if failure is not None:
        alone = dist.get_world_size() == 1
        raise error_of(failure, alone=alone, kind=SaveError, doing=f"saving {writer.path}")


def _numbered(objects: Iterable[Any]) -> dict[str, Any]:
    return {str(i): one for i, one in enumerate(objects)}


def _is_valid(path: Path) -> bool:
    # What torchtitan takes for a checkpoint, too.
    return (path / ".metadata").is_file() or (path / "model.safetensors.index.json").is_file()


def _remove(path: str) -> None:
    """Remove a checkpoint so that it is not valid from the first step on."""
    folder = Path(path)
    if (folder / ".metadata").is_file():
        remove(folder)
    if folder.is_dir():
        filesystem.rmtree(path)  # an export, or what a save left
