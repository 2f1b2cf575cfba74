"""`Chooser`: the newest checkpoint of which every part is somewhere, on a node or in the mirror."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pyckpt.dcp.parts import name_ranks
from pyckpt.errors import LoadError, PyckptError
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.nodes.grouping import Nodes
from pyckpt.train.store.catalog import Catalog, CheckpointInfo
from pyckpt.train.store.transient import persist
from pyckpt.train.tiers.tier import Tier

__all__ = ["Chooser", "Places"]

_logger = logging.getLogger("pyckpt")


@dataclass(frozen=True)
class _Sight:
    """What a node sees of a step."""

    save_id: str = ""
    """Of its own directory; "" if it has no metadata there."""
    files: Mapping[str, int] = field(default_factory=dict)
    """All data files, with the bytes of each."""
    here: frozenset[str] = frozenset()
    """Those that are in its directory, with all their bytes."""
    mirror_id: str | None = None
    """Of the valid checkpoint in the mirror; None if there is none."""
    is_known: bool = False
    """Whether its directory tells that the step was committed, even if nothing can be read."""
    mirror_failed: bool = False
    """Whether this node could not look into the mirror."""


@dataclass(frozen=True)
class Places:
    """Where the files of a checkpoint are."""

    files: Mapping[str, int]
    holders: Mapping[str, int]
    """For each data file that some node has: the first rank of such a node."""
    has_metadata: Collection[int]
    """The first ranks of the nodes that have the metadata."""
    here: Collection[str]
    """The data files that this node has."""
    mirror: Path | str | None
    """The checkpoint in the mirror, if all nodes see it there."""


class Chooser:
    """Finds a checkpoint that all ranks can load. All ranks make the same calls.

    A node that lacks a part gets it from the nodes that have it, or else from the mirror. So a
    checkpoint is valid if each of its data files is on some node, or all of it is in the mirror.

    Args:
        catalog: of the checkpoints in the directory of this node.
        nodes: the nodes.
        mirror: the mirror, if there is one.
    """

    def __init__(self, catalog: Catalog, nodes: Nodes, mirror: Tier | None) -> None:
        self._catalog = catalog
        self._nodes = nodes
        self._mirror = mirror
        self._mirror_error: OSError | None = None
        self.places = Places({}, {}, (), (), None)
        """Of the checkpoint that was found last."""

    def newest(
        self,
        limit: int | None,
        *,
        exactly: int | None = None,
        not_local: Collection[int] = (),
        not_mirrored: Collection[int] = (),
    ) -> CheckpointInfo | None:
        """The newest checkpoint up to a step; None if there is none. Collective.

        Args:
            limit: the step; None for all.
            exactly: the only step that will do.
            not_local, not_mirrored: steps that are not to be read on the nodes, or in the mirror.

        Raises:
            FileNotFoundError: the checkpoint of step ``exactly`` is not there, or not all of it.
            LoadError: there are checkpoints, and of each something is missing.
            OSError: a node cannot look into the mirror, which may have the step ``exactly``, or one
                that the nodes have a part of and that is newer than what they have all of.
        """
        self._mirror_error = None
        problems: list[str] = []
        while True:
            latest = partial(self._latest, limit, not_mirrored)
            step = max(self._nodes.together("looking for checkpoints", latest))
            if exactly is not None:
                step = exactly
            if step < 0:
                if problems:
                    raise LoadError(
                        f"{self._catalog.directory}: no checkpoint is complete. "
                        f"{'; '.join(problems)}. Bring back the nodes, or what was on their disks, "
                        "or move the checkpoints away on all nodes to start from the beginning"
                    )
                return None
            look = partial(self._look, step, step not in not_local, step not in not_mirrored)
            sights = self._nodes.together("looking for the parts of checkpoints", look)
            found = self._choose(step, sights)
            if found is not None:
                return found
            missing = self._missing(step, sights)
            known = exactly is not None or any(sight.is_known for sight in sights)
            if known and any(sight.mirror_failed for sight in sights):
                self._log(
                    logging.ERROR,
                    "%s; it is not passed over, since the mirror cannot be reached and may have it",
                    missing,
                )
                self._nodes.together("looking at the mirror", self._raise_mirror_error)
            if exactly is not None:
                path = str(self._catalog.path(step))
                raise FileNotFoundError(errno.ENOENT, f"no valid checkpoint: {missing}", path)
            problems.append(missing)
            self._log(logging.WARNING, "%s", missing)
            limit = step - 1

    # --- on one node ---

    def _latest(self, limit: int | None, not_mirrored: Collection[int]) -> int:
        """The newest step that this node sees something of."""
        if not self._nodes.is_first:
            return -1
        steps = [step for step in self._catalog.steps() if limit is None or step <= limit]
        there = self._in_mirror(limit, not_mirrored)
        here = next((step for step in steps if self._is_known(step)), -1)
        if here < 0:
            self._raise_mirror_error()
        return here if there is None else max(here, there.step)

    def _is_known(self, step: int) -> bool:
        """Whether the directory of this node tells that a step was committed. If its metadata is
        lost, only the mirror may have it, so that counts while the mirror cannot be reached."""
        path = self._catalog.path(step)
        if (path / commit.metadata_name()).exists():
            return True
        return self._mirror_error is not None and self._catalog.examine(step).state == "damaged"

    def _in_mirror(self, limit: int | None, without: Collection[int]) -> CheckpointInfo | None:
        # A mirror that is down may take long to say so: it is asked once.
        if self._mirror is None or self._mirror_error is not None:
            return None
        try:
            return self._mirror.newest(limit, without=without)
        except OSError as error:
            self._mirror_error = error
            self._log(
                logging.ERROR, "the mirror may have a newer checkpoint than this node: %s", error
            )
            return None

    def _raise_mirror_error(self) -> None:
        # Its traceback holds what is being restored, so this does not keep it.
        error, self._mirror_error = self._mirror_error, None
        if error is not None:
            raise error

    def _look(self, step: int, local: bool, mirrored: bool) -> _Sight:
        if not self._nodes.is_first:
            return _Sight()
        path = self._catalog.path(step)
        files: Mapping[str, int] = {}
        save_id = ""
        if local:
            try:
                metadata = persist(partial(metadata_format.read, path / commit.metadata_name()))
                files = metadata_format.data_files(metadata)
                save_id = (metadata.storage_meta and metadata.storage_meta.save_id) or "unnamed"
            except (FileNotFoundError, NotADirectoryError):
                pass
            except PyckptError as error:
                _logger.warning("%s is damaged: %s", path, error)
        here = frozenset(name for name, size in files.items() if _size(path / name) == size)
        mirror_id = None
        if mirrored:
            there = self._in_mirror(step, ())
            if there is not None and there.step == step:
                mirror_id = there.save_id or "unnamed"
        failed = mirrored and self._mirror_error is not None
        return _Sight(save_id, files, here, mirror_id, self._is_known(step), failed)

    # --- of what all nodes said ---

    def _choose(self, step: int, sights: list[_Sight]) -> CheckpointInfo | None:
        """The save of which every file is somewhere; of several, the one that most nodes have."""
        nodes = self._nodes
        firsts = nodes.firsts
        saves = {sights[first].save_id for first in firsts} - {""}
        mirrored = {sights[first].mirror_id for first in firsts}
        in_mirror = mirrored.pop() if len(mirrored) == 1 else None
        candidates = []
        for save in sorted(saves | ({in_mirror} if in_mirror is not None else set())):
            having = [first for first in firsts if sights[first].save_id == save]
            files = sights[having[0]].files if having else {}
            holders = _holders(files, {first: sights[first].here for first in having})
            if save == in_mirror or len(holders) == len(files):
                candidates.append((len(holders) == len(files), len(having), save, having, holders))
        if not candidates:
            return None
        _, _, save, having, holders = max(candidates, key=lambda one: one[:3])
        path = self._catalog.path(step)
        mine = sights[nodes.first]
        is_local = nodes.first in having
        files = sights[having[0]].files if having else {}
        mirror = None
        if save == in_mirror and self._mirror is not None:
            mirror = self._mirror.place(step)
        self.places = Places(files, holders, having, mine.here if is_local else (), mirror)
        return CheckpointInfo(
            step,
            path,
            bytes=sum(files.values()),
            files=tuple(files),
            mirror=None if mirror is None else str(mirror),
            is_local=is_local or mirror is None,
            elsewhere=tuple(name for name in files if not is_local or name not in mine.here),
            save_id=save,
        )

    def _missing(self, step: int, sights: list[_Sight]) -> str:
        """What of a step is nowhere."""
        path = self._catalog.path(step)
        firsts = self._nodes.firsts
        saves = sorted({sights[first].save_id for first in firsts} - {""})
        said = []
        for save in saves:
            having = [first for first in firsts if sights[first].save_id == save]
            files = sights[having[0]].files
            holders = _holders(files, {first: sights[first].here for first in having})
            lost = sorted(
                {rank for n in files.keys() - holders if (rank := commit.rank_of(n)) is not None}
            )
            lacking = [first for first in firsts if first not in having]
            without = f", and {name_ranks(lacking)} no metadata of it" if lacking else ""
            said.append(
                f"the data that {name_ranks(lost)} saved is on no node that takes part"
                f"{without} (save {save})"
            )
        where = "" if self._mirror is None else f"; nor do all nodes see it in {self._mirror}"
        return f"{path} is not complete: {'; '.join(said) or 'nothing of it can be read'}{where}"

    def _log(self, level: int, text: str, *args: object) -> None:
        _logger.log(logging.DEBUG if self._nodes.ranks.rank else level, text, *args)


def _holders(files: Collection[str], here: Mapping[int, Collection[str]]) -> dict[str, int]:
    """For each file the first of those who have it."""
    found: dict[str, int] = {}
    for first in sorted(here):
        for name in here[first]:
            if name in files:
                found.setdefault(name, first)
    return found


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1
