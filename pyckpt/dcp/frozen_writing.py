"""Writes one rank's part of a save in which some things are frozen: links what an earlier file has,
and writes the rest, what is frozen into a file of its own."""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as StockSavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from pyckpt import _C
from pyckpt.dcp.frozen import FrozenSave, KnownItem
from pyckpt.dcp.hashing import can_be_hashed, hash_tensors
from pyckpt.dcp.items import OPAQUE, Raw, add, expected_size, places_of, write_result
from pyckpt.dcp.own_files import OwnFiles
from pyckpt.dcp.report import some
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.staging import Staging
from pyckpt.dcp.writing import WriteProgress
from pyckpt.errors import PyckptError, SaveError
from pyckpt.format import commit
from pyckpt.speaking import for_node

__all__ = ["FrozenWriting"]

_logger = logging.getLogger("pyckpt")

_KEYS_SHOWN = 5
# The file system makes no links, or no more of this file. EPERM is said by those that have none.
_NO_LINK = {errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOTSUP, errno.ENOSYS}
_told: set[tuple[int, int]] = set()  # of which devices the log has said that, and why


class FrozenWriting:
    """The items of a rank's plan, of which some are frozen.

    Args:
        plan: the final one.
        planner: it resolves the items.
        staging: the copies that are written; None for a save that reads the state itself.
        save: what is known of the frozen parts.
        files: makes the files.
        progress: is told what is written, and what need not be.
    """

    def __init__(
        self,
        plan: SavePlan,
        planner: StockSavePlanner,
        staging: Staging | None,
        save: FrozenSave,
        files: OwnFiles,
        progress: WriteProgress,
    ) -> None:
        self._plan = plan
        self._items = plan.items
        self._planner = planner
        self._staging = staging
        self._save = save
        self._files = files
        self._progress = progress
        # Positions of items: those that an earlier file has, those for a file that later saves may
        # link, and all others.
        self._reused: dict[int, KnownItem] = {}
        self._fresh: list[int] = []
        self._rest: list[int] = []
        self._hashes: dict[int, str] = {}
        # Of what was not copied at the call, and must be written nevertheless.
        self._late: dict[int, torch.Tensor] = {}
        self._results: dict[int, WriteResult] = {}
        self._sort()

    @property
    def is_needed(self) -> bool:
        """Whether this rank has something frozen. If not, it writes as always."""
        return bool(self._reused or self._fresh)

    def _sort(self) -> None:
        save = self._save
        looked: list[tuple[int, torch.Tensor]] = []
        for i, item in enumerate(self._items):
            proven = save.proven.get(item.index)
            if proven is not None:
                self._reused[i] = proven[0]
                save.hashes[item.index] = proven[0].hash
                continue
            data: Any = None
            if item.type != WriteItemType.BYTE_IO and (
                save.detects or item.index.fqn in save.declared
            ):
                data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor) and can_be_hashed(data):
                looked.append((i, data))
            else:
                self._rest.append(i)
        if looked:
            self._settle()
        changed = []
        hashes = hash_tensors([data for _, data in looked])
        for (i, data), found in zip(looked, hashes, strict=True):
            index = self._items[i].index
            known = save.known(index)
            self._hashes[i] = save.hashes[index] = found
            if known is not None and known.hash == found and known.is_of(data):
                self._reused[i] = known
            elif known is not None:
                # Not into a file that is to be linked: it may change again.
                changed.append(index.fqn)
                self._rest.append(i)
            elif index.fqn in save.declared or save.stood_still(index, found):
                self._fresh.append(i)
            else:
                self._rest.append(i)
        self._rest.sort()
        self._write_instead(save.without_ends(self._reused.values()))
        if changed:
            _logger.log(
                logging.INFO if save.detects else logging.WARNING,
                "%d frozen tensors have changed since the last save, and are written: %s",
                len(changed),
                some(changed, _KEYS_SHOWN),
            )

    def write(self, rank: int, save_id: str, check: Callable[[], None]) -> list[WriteResult]:
        """Link, and write the files.

        Args:
            rank, save_id: for the names of the files.
            check: called when a file is written; raises if the copies are not the state at the
                call.

        Raises:
            SaveError: a frozen tensor was not copied, because it had not changed at the call. The
                file that has it was lost meanwhile, and the program has changed the tensor.
            OSError: a file cannot be written.
        """
        self._link()
        self._progress.bytes_linked = sum(
            known.info.length
            for known in self._reused.values()
            if known.file not in self._save.copied
        )
        self._progress.items = [self._items[i] for i in (*self._fresh, *self._rest)]
        if not self._fresh and not self._rest:
            check()
            self._files.sync_names()
        if self._fresh:
            self._write(commit.frozen_file_name(rank, save_id), self._fresh, check)
        if self._rest:
            self._write(commit.data_file_name(rank, save_id), self._rest, check)
        for i, known in self._reused.items():
            info = self._save.counted(known)
            self._results[i] = WriteResult(self._items[i].index, info.length, info)
        self._keep()
        self._learn()
        return [self._results[i] for i in range(len(self._items))]

    # --- links ---

    def _link(self) -> None:
        directory = self._save.directory
        of_file: dict[str, list[int]] = defaultdict(list)
        for i, known in self._reused.items():
            of_file[known.file].append(i)
        for name, members in of_file.items():
            assert directory is not None
            try:
                self._save.owner.ensure_verified(directory, name)
                self._have(directory / name)
            except (OSError, PyckptError) as error:
                self._save.owner.give_up(name)
                _logger.warning(
                    "%s cannot be used again, and its %d frozen tensors are written anew: %s",
                    directory / name,
                    len(members),
                    error,
                )
                self._write_instead({name})
        self._fresh.sort()

    def _have(self, source: Path) -> None:
        """Have an earlier file in this checkpoint."""
        try:
            self._files.link(source)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            said = (os.stat(source).st_dev, error.errno)
            self._files.copy(source)
            self._save.copied.add(source.name)
            if said not in _told:
                _told.add(said)
                _logger.log(
                    for_node(logging.WARNING),
                    "%s: its files of frozen parts are copied, since the file system makes no "
                    "link of them (%s)",
                    source.parent,
                    error.strerror,
                )

    def _write_instead(self, names: Collection[str]) -> None:
        """Write what these files have, which cannot be used."""
        lost = {i: known for i, known in self._reused.items() if known.file in names}
        late_bytes = sum(
            known.info.length for known in lost.values() if known.index in self._save.proven
        )
        if late_bytes > self._save.room:
            raise SaveError(
                f"{', '.join(sorted(names))} is lost or damaged, and its {late_bytes} bytes of "
                f"frozen tensors were not copied at the call. Copies of them do not fit into the "
                f"{self._save.room} bytes that max_pinned_bytes leaves. The next save copies them "
                "piece by piece"
            )
        for i, known in lost.items():
            del self._reused[i]
            self._fresh.append(i)
            self._hashes[i] = known.hash
            proven = self._save.proven.get(known.index)
            if proven is None:
                continue  # there is a copy
            # It was hashed in the call. This copy is the state at the call if it has that hash.
            late = proven[1].detach().clone()
            if hash_tensors([late]) != [known.hash]:
                raise SaveError(
                    f"{known.index.fqn} had not changed at the call, so it was not copied. The "
                    f"file that has it, {known.file}, is lost or damaged, and the program has "
                    "changed the tensor since. The next save writes it"
                )
            self._late[i] = late

    # --- files ---

    def _write(self, name: str, positions: Sequence[int], check: Callable[[], None]) -> None:
        items = [self._items[i] for i in positions]
        raws: list[Raw] = []

        def add_all(job: _C.FillJob) -> None:
            for i in positions:
                late = self._late.get(i)
                planner: Any = self._planner if late is None else _Late(late)
                raws.append(add(job, planner, self._items[i], self._settle))

        expected = expected_size(SavePlan(items))
        places = self._files.write(name, expected, add_all, check)
        for i, raw, place in zip(positions, raws, places_of(places), strict=True):
            is_known = i in self._hashes and raw.as_planned and raw is not OPAQUE
            found = self._hashes[i] if is_known and commit.is_frozen_file(name) else None
            self._results[i] = write_result(self._items[i], name, raw, place, found)

    def _keep(self) -> None:
        """Say what the save has come to."""
        save = self._save
        for i, result in self._results.items():
            found, data = vars(result.storage_data).get("xxh3"), self._items[i].tensor_data
            if found is not None and data is not None:
                save.items.append(
                    KnownItem(
                        result.index,
                        result.storage_data,
                        data.properties.dtype,
                        data.chunk.sizes,
                        found,
                    )
                )
        paths = [Path(path) for path in self._files.paths]
        frozen = {path.name: path for path in paths if commit.is_frozen_file(path.name)}
        save.sizes = {name: os.stat(path).st_size for name, path in frozen.items()}
        save.is_written = True

    def _learn(self) -> None:
        """Only if a plan is known does the next save know, in its call, what this rank writes."""
        known = self._planner.known if type(self._planner) is SavePlanner else None
        if known is not None and self._staging is not None:
            self._staging.learn(known)

    def _settle(self) -> None:
        if self._staging is not None:
            self._staging.settle()


class _Late:
    """Resolves an item to a copy that was made after the call."""

    def __init__(self, copy: torch.Tensor) -> None:
        self._copy = copy

    def resolve_data(self, item: Any) -> torch.Tensor:
        return self._copy
