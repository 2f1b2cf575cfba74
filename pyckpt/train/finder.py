"""The half of a Checkpointer that looks, checks and exports, and changes nothing."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.dcp.report import some
from pyckpt.engine import Engine, engine_of
from pyckpt.train.arguments import directory_of, step_of
from pyckpt.train.state.rehearsal import rehearse
from pyckpt.train.store import export as exporting
from pyckpt.train.store.catalog import Catalog, CheckpointInfo, DirectoryEntry
from pyckpt.train.store.envelopes import verify_envelopes
from pyckpt.train.store.names import DEFAULT, Naming
from pyckpt.train.store.pieces import Direct, verify
from pyckpt.train.store.tensors import RenameTensors
from pyckpt.train.tiers.opening import open_tier
from pyckpt.train.tiers.tier import Tier

__all__ = ["Finder"]

_logger = logging.getLogger("pyckpt")


class Finder:
    """Finds the checkpoints in a directory. Each rank, and any other process, may do so alone."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        direct: Direct,
        engine: Engine | None,
        mirror: str | os.PathLike[str] | None = None,
        naming: str | None = None,
    ) -> None:
        if direct not in ("auto", "require", "off"):
            raise ValueError(f"{direct = } must be 'auto', 'require' or 'off'.")
        self.directory = directory_of(directory)
        self._direct: Direct = direct
        self._engine = engine_of(engine)
        self._catalog = Catalog(
            self.directory,
            naming=DEFAULT if naming is None else Naming(naming),
            verify=partial(_verify, direct, engine),
        )
        self._mirror: Tier | None = None
        if mirror is not None:
            self._mirror = open_tier(mirror, self.directory, self._catalog.naming)

    def checkpoints(self, *, verify: bool = False) -> list[CheckpointInfo]:
        """The valid checkpoints, oldest first; also those that are in the mirror alone.

        If the directory and the mirror have different saves of a step, it is that in the directory,
        and ``mirror`` is None.

        A checkpoint is valid if its metadata is complete, and all its files are there and of the
        right size.

        Args:
            verify: read all that are in the directory, and list only those whose checksums match.
        """
        entries = self._catalog.entries(verify=verify)
        found = {one.checkpoint.step: one.checkpoint for one in entries if one.checkpoint}
        if self._mirror is not None:
            for there in self._mirror.checkpoints():
                here = found.setdefault(there.step, there)
                # A step that was saved again need not have come there: the mirror has another save.
                if here.save_id == there.save_id:
                    found[there.step] = replace(here, mirror=there.mirror)
        return [found[step] for step in sorted(found)]

    def inspect(self, *, verify: bool = False) -> list[DirectoryEntry]:
        """Everything in the directory: the kind of each entry, and the reason if it is not valid.

        Args:
            verify: also read all checkpoints. Those whose checksums do not match are damaged.
        """
        return self._catalog.entries(verify=verify)

    def latest(self) -> CheckpointInfo | None:
        """The newest valid checkpoint that this rank sees; None if there is none.

        Raises:
            OSError: this rank cannot read the directory, or a checkpoint that may be the newest.
        """
        return self._catalog.newest()

    def _newer_than(self, step: int) -> list[int]:
        """The steps of newer checkpoints."""
        return [one.step for one in self.checkpoints() if one.step > step]

    def _tell_newer(self, begun: int | str, place: object, newer: Collection[int]) -> None:
        """Warn of newer checkpoints than those of training, if there are any.

        Args:
            begun: the step at which training begins.
            place: where they are.
            newer: their steps.
        """
        if newer:
            _logger.warning(
                "training begins at step %s, and %s has newer checkpoints of an earlier run, "
                "which the next restore will find first, unless they are moved away: steps %s",
                begun,
                place,
                some(sorted(newer), 5),
            )

    def export(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        format: Literal["safetensors", "torch"] = "safetensors",
        key: str | None = "model",
        rename: RenameTensors | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
        tied: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    ) -> list[Path]:
        """Write the model of a checkpoint, in one piece, as files that other programs read.

        This is `pyckpt.export`, which documents the other arguments, for a checkpoint given by its
        step. It uses the ``engine`` and the ``direct`` of this Checkpointer.

        Args:
            path: a directory, which is made if it is missing.
            step: the checkpoint; by default the newest valid one.

        Returns:
            The files written. The last one completes the export: the index, or the only file of
            weights.

        Raises:
            FileNotFoundError: there is no checkpoint of that step, or none at all.
            Exception: as `pyckpt.export`.
        """
        if step is None:
            newest = self.latest()
            if newest is None:
                raise FileNotFoundError(2, "no valid checkpoint", str(self.directory))
            source = newest.path
        else:
            source = self._catalog.path(step_of(step))
        return exporting.export(
            source,
            path,
            format=format,
            key=key,
            rename=rename,
            dtype=dtype,
            max_shard_size=max_shard_size,
            tied=tied,
            config=config,
            direct=self._direct,
            engine=self._engine,
        )


def _verify(direct: Direct, engine: Engine | None, path: Path, metadata: Metadata) -> None:
    verify(path, metadata, direct=direct, engine=engine)
    verify_envelopes(path, metadata)
    rehearse(path, metadata)
