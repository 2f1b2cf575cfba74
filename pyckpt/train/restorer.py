"""Restoring: all ranks load the same checkpoint, or none does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from pyckpt.activity import Activity, activity
from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.reader import DirectReader
from pyckpt.dcp.renaming import Rename, function_of, stored_keys
from pyckpt.dcp.report import LoadReport, some
from pyckpt.dcp.together import gather, together
from pyckpt.engine import Engine
from pyckpt.errors import CorruptCheckpoint, LoadError, PyckptError, RanksLost
from pyckpt.remote.address import is_url
from pyckpt.train.announcer import Announcer
from pyckpt.train.nodes.reading import NodeReader
from pyckpt.train.nodes.restoring import NodeRestore
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store.catalog import Catalog, CheckpointInfo, DirectoryEntry, reading
from pyckpt.train.store.pieces import Direct, verify
from pyckpt.train.store.transient import DELAYS, Failure, failure_of
from pyckpt.train.sync.ranks import Ranks
from pyckpt.train.tiers.tier import Tier

__all__ = ["First", "LoadOptions", "Restorer"]

_logger = logging.getLogger("pyckpt")

T = TypeVar("T")

_NEWER_TOLD = 5
"""How many newer checkpoints in the mirror are named."""


def _which(numbers: Sequence[int]) -> str:
    """The ranks with the largest number, which says what happened there."""
    worst = max(numbers)
    ranks = [rank for rank, number in enumerate(numbers) if number == worst]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {some(ranks, 8)}"


@dataclass(frozen=True)
class LoadOptions:
    """How to load, as for ``AppState.load``.

    Raises:
        TypeError: ``rename`` is neither a function nor a mapping.
        ValueError: an option has an unknown value.
    """

    missing: Literal["error", "keep"] = "error"
    keep: Sequence[str] = ()
    unexpected: Literal["error", "ignore"] = "error"
    mismatched: Literal["error", "keep"] = "error"
    rename: Rename | Mapping[str, str] | None = None
    allow: Sequence[Allowed] = ()
    share_reads: bool | None = None

    @property
    def renames(self) -> Rename | None:
        """``rename`` as a function."""
        return function_of(self.rename)

    def __post_init__(self) -> None:
        if self.missing not in ("error", "keep"):
            raise ValueError(f"missing = {self.missing!r} must be 'error' or 'keep'.")
        if self.unexpected not in ("error", "ignore"):
            raise ValueError(f"unexpected = {self.unexpected!r} must be 'error' or 'ignore'.")
        if self.mismatched not in ("error", "keep"):
            raise ValueError(f"mismatched = {self.mismatched!r} must be 'error' or 'keep'.")
        function_of(self.rename)


class First(NamedTuple):
    """What is loaded of each checkpoint that is tried, before the state is loaded from it."""

    objects: Mapping[str, Any]
    """As a state."""
    then: Callable[[], None]
    """Called on each rank when they are loaded: makes the state fit this checkpoint."""


class Restorer:
    """Finds a checkpoint that all ranks can load, and loads it.

    Args:
        catalog: of the checkpoints.
        ranks: the ranks that restore together.
        direct, engine: as for `Checkpointer`.
        announcer: tells of what is restored; by default one that only logs.
        nodes: finds and reads checkpoints whose parts are on several nodes; None where all ranks
            share a directory.

    Attributes:
        report: of the last load, on this rank.
        distrusted: steps of checkpoints in the directory that look valid but proved corrupt.
    """

    def __init__(
        self,
        catalog: Catalog,
        ranks: Ranks,
        *,
        direct: Direct,
        engine: Engine | None,
        mirror: Tier | None = None,
        announcer: Announcer | None = None,
        nodes: NodeRestore | None = None,
    ) -> None:
        self._nodes = nodes
        self._mirror = mirror
        # Steps whose checkpoints proved corrupt in the mirror, and those that are not read from the
        # directory, since they proved corrupt there on some rank.
        self._distrusted_there: set[int] = set()
        self._not_here: set[int] = set()
        self._mirror_failed = False  # in the restore that is under way, on this rank
        self._catalog = catalog
        self._ranks = ranks
        self._direct: Direct = direct
        self._engine = engine
        self._announcer = announcer or Announcer(ranks, engine=engine)
        self.report: LoadReport | None = None
        self.distrusted: set[int] = set()

    def restore(
        self,
        state: Mapping[str, Any],
        step: int | None,
        options: LoadOptions,
        *,
        required: bool,
        first: First | None = None,
    ) -> int | None:
        """See ``Checkpointer.restore``."""
        doing = f"restoring from {self._catalog.directory}"
        with self._activity(doing) as here:
            with self._ranks.acting(doing):
                found = self._restore(state, step, options, here, first, required=required)
            # What a handler of the log raises is not the error of a collective.
            if found is not None:
                self._announcer.restored(found, here.seconds, self.report)
                self._tell_newer(found)
                # Otherwise the newest one that the mirror has was looked for.
                if step is not None:
                    self._tell_newer_in_mirror(found)
                self._tell_differing(found)
        return None if found is None else found.step

    def _restore(
        self,
        state: Mapping[str, Any],
        step: int | None,
        options: LoadOptions,
        here: Activity,
        first: First | None,
        *,
        required: bool,
    ) -> CheckpointInfo | None:
        self._refuse_unusable(state, options)
        limit = step
        newest: Exception | None = None
        self._mirror_failed = False
        if self._nodes is not None:
            self._nodes.settle()
        while True:
            found = self._agree_on_newest(limit, exactly=step)
            if found is None:
                if newest is not None:
                    raise newest
                self._raise_if_damaged()
                self._tell_nothing(required)
                return None
            here.name = f"restoring {found.place}"
            failure = self._load(found, state, options, first)
            if failure is None:
                return found
            if self._turn_to_mirror(found):
                self._log(
                    logging.ERROR,
                    "%s is corrupt, and its copy in the mirror is loaded instead: %s",
                    found.place,
                    failure,
                )
                continue
            if step is not None:
                raise failure
            newest = newest or failure
            self._log(
                logging.ERROR,
                "%s is corrupt and is passed over for an older checkpoint: %s",
                found.place,
                failure,
            )
            self._distrusted_there.add(found.step)
            self.distrusted.add(found.step)
            limit = found.step - 1

    def load(self, path: Path | str, state: Mapping[str, Any], options: LoadOptions) -> None:
        """Load the checkpoint in a directory of any name, or at a URL, and no other.

        Raises:
            Exception: as ``Checkpointer.restore`` with a ``step``.
        """
        found = CheckpointInfo(0, Path(path))
        if isinstance(path, str):
            found = replace(found, mirror=path, is_local=False)
        doing = f"loading {path}"
        with self._activity(doing) as here:
            with self._ranks.acting(doing):
                self._refuse_unusable(state, options)
                failure = self._load(found, state, options)
                if failure is not None:
                    raise failure
            self._announcer.restored(found, here.seconds, self.report)

    def _activity(self, name: str) -> AbstractContextManager[Activity]:
        return activity(name, speaks=self._ranks.rank == 0, late=self._announcer.late)

    def trust(self, step: int) -> None:
        """A step was saved again. Called on all ranks."""
        for distrusted in (self.distrusted, self._distrusted_there, self._not_here):
            distrusted.discard(step)

    def _refuse_unusable(self, state: Mapping[str, Any], options: LoadOptions) -> None:
        """Raise for objects that could not be saved, and for wrong options, even if there is
        nothing to restore."""
        failure: Exception | None = None
        try:
            AppState(state, process_group=self._ranks.work).check(keep=options.keep)
        except Exception as error:
            failure = error
        failed = self._ranks.numbers(int(failure is not None))
        if any(failed):
            raise failure or LoadError(f"the state of {_which(failed)} cannot be saved")

    def _agree_on_newest(
        self, limit: int | None, *, exactly: int | None = None
    ) -> CheckpointInfo | None:
        """The newest checkpoint up to a step that every rank sees."""
        if self._nodes is not None:
            return self._nodes.newest(
                limit,
                exactly=exactly,
                not_local=self._not_here | self._distrusted_there,
                not_mirrored=self._distrusted_there,
            )
        while True:
            mine = self._together(partial(self._newest, limit, exactly), "looking for checkpoints")
            number = -1 if mine is None else mine.step
            if exactly is not None and number != exactly:
                number, mine = -1, None
            numbers = self._ranks.numbers(number)
            lowest, highest = min(numbers), max(numbers)
            if exactly is not None and lowest != exactly:
                raise self._none_of(exactly, seen=number == exactly)
            if lowest == highest:
                if mine is None or (mine := self._agree_on_save(mine)) is not None:
                    return mine
                text = "%s: the ranks see different saves of it, and none that all see"
                self._log(logging.WARNING, text, self._catalog.path(highest))
                if exactly is not None:
                    path = str(self._catalog.path(exactly))
                    raise FileNotFoundError(2, "no save of it that all ranks see", path)
                limit = highest - 1
                continue
            if lowest == -1:
                raise LoadError(
                    f"{self._catalog.directory}: {_which(numbers)} can see a checkpoint of step "
                    f"{highest} there, and {_which([-n for n in numbers])} none that is valid; is "
                    "it the same directory for all?"
                )
            self._log(
                logging.WARNING,
                "%s is not valid on all ranks, or not seen by all of them",
                self._catalog.path(highest),
            )
            limit = lowest

    def _none_of(self, step: int, *, seen: bool) -> FileNotFoundError:
        """The error for a step that has no checkpoint, or none that all ranks see."""
        entry = self._catalog.examine(step)
        where = " on other ranks" if seen else ""
        why = f" ({entry.state}: {entry.reason})"
        if not seen and self._mirror is None and not entry.path.exists():
            steps: list[int] = []
            with suppress(OSError):
                steps = sorted(self._catalog.steps(), key=lambda other: abs(other - step))
            near = some([*sorted(steps[:5]), *steps[5:]], 5)
            why = f"; there are steps {near}" if steps else ", nor one of another step"
        return FileNotFoundError(2, f"no valid checkpoint{where}{why}", str(entry.path))

    def _agree_on_save(self, mine: CheckpointInfo) -> CheckpointInfo | None:
        """The checkpoint of a step that all ranks see somewhere, if the directory of some and the
        mirror hold different saves of it; of several, the one that most ranks would take."""
        group, doing = self._ranks.work, "comparing checkpoints"
        first = gather(lambda: mine.save_id or "", process_group=group, doing=doing)
        if len(set(first)) == 1:
            return mine
        saves = {mine.save_id or "": mine}
        if self._mirror is not None:
            mirror = self._mirror
            there = self._together(
                lambda: mirror.newest(mine.step, without=self._distrusted_there), doing
            )
            if there is not None and there.step == mine.step:
                saves.setdefault(there.save_id or "", there)
        every = gather(lambda: set(saves), process_group=group, doing=doing)
        common = set.intersection(*every)
        return saves[max(common, key=lambda save: (first.count(save), save))] if common else None

    def _newest(self, limit: int | None, exactly: int | None) -> CheckpointInfo | None:
        """The newest checkpoint up to a step that this rank sees, here or in the mirror.

        Raises:
            OSError: the mirror cannot be reached, and it may have the only whole copy of a step
                that is wanted: the step ``exactly``, or one that is newer than all that are whole
                here.
        """
        found = self._catalog.newest_first(limit)
        here = next(
            (one for one in found if one.step not in self._not_here and not one.elsewhere), None
        )
        if self._mirror is None:
            return here
        try:
            there = self._mirror.newest(limit, without=self._distrusted_there)
        except OSError as error:
            self._mirror_failed = True
            lost = self._lost_here(-1 if here is None else here.step, limit)
            if lost:
                text = "%s; it is not passed over, since the mirror may have it whole: %s"
                _logger.error(text, lost[0], error)
            if lost or here is None or (exactly is not None and here.step != exactly):
                raise
            _logger.error("the mirror may have a newer checkpoint than %s: %s", here.path, error)
            return here
        if there is None or (here is not None and here.step >= there.step):
            return here
        return there

    def _lost_here(self, step: int, limit: int | None) -> list[DirectoryEntry]:
        """Newer checkpoints than a step, up to a limit, that were committed in the directory and
        are not whole there. Newest first, without those that proved corrupt in the mirror, too."""
        newer = [s for s in self._catalog.steps() if s > step and (limit is None or s <= limit)]
        entries = [self._catalog.examine(s) for s in newer if s not in self._distrusted_there]
        # One that looks valid was passed over, because it proved corrupt, or is a part.
        return [entry for entry in entries if entry.state in ("damaged", "valid")]

    def _turn_to_mirror(self, found: CheckpointInfo) -> bool:
        """After a checkpoint that some ranks read in the directory proved corrupt: whether all are
        to read it in the mirror."""
        if self._mirror is None or not self._ranks.largest(int(found.is_local)):
            return False
        mirror = self._mirror
        there = self._together(
            lambda: mirror.newest(found.step, without=self._distrusted_there),
            "looking at the mirror",
        )
        is_there = there is not None and there.step == found.step
        if self._ranks.largest(int(not is_there)):
            return False
        self._not_here.add(found.step)
        self.distrusted.add(found.step)
        return True

    def _load(
        self,
        found: CheckpointInfo,
        state: Mapping[str, Any],
        options: LoadOptions,
        first: First | None = None,
    ) -> Exception | None:
        """Load a checkpoint on all ranks. If it is damaged, return the error, on all ranks. After a
        transient error, all ranks try again.

        Raises:
            Exception: an error that has other causes than the checkpoint.
        """
        for delay in (*DELAYS, None):
            failure = self._try(found, state, options, first)
            mine = Failure.NONE
            if failure is not None:
                mine = failure_of(failure, last=delay is None)
            found_on = self._ranks.numbers(mine)
            worst = max(found_on)
            if delay is None or worst != Failure.PASSING:
                break
            if failure is not None:
                self._log(
                    logging.WARNING,
                    "%s: reading it failed, and is tried again: %s",
                    found.place,
                    failure,
                )
            time.sleep(delay)
        if worst == Failure.NONE:
            return None
        if worst == Failure.DAMAGE:
            return failure or CorruptCheckpoint(
                f"{found.place} could not be read on {_which(found_on)}", path=str(found.place)
            )
        raise failure or LoadError(f"{found.place} could not be loaded on {_which(found_on)}")

    def _try(
        self,
        found: CheckpointInfo,
        state: Mapping[str, Any],
        options: LoadOptions,
        first: First | None,
    ) -> Exception | None:
        """Load a checkpoint on all ranks; return the error of this one."""
        with ExitStack() as held:

            def keep() -> None:
                if not is_url(found.place) and (self._nodes is None or self._nodes.has_metadata):
                    held.enter_context(reading(Path(found.place)))

            try:
                with self._ranks.acting(f"loading {found.place}"):
                    self._together(keep, f"opening {found.place}")
                    if first is not None:
                        with self._reader(found) as reader:
                            self._fill(found, reader, first.objects, options)
                        self._together(first.then, f"preparing to load {found.place}")
                    reader = held.enter_context(self._reader(found))
                    self.report = self._fill(found, reader, state, options)
            except RanksLost:
                raise
            except Exception as error:
                return error
        return None

    def _fill(
        self,
        found: CheckpointInfo,
        reader: DirectReader,
        state: Mapping[str, Any],
        options: LoadOptions,
    ) -> LoadReport:
        return AppState(state, process_group=self._ranks.work).load(
            reader,
            missing=options.missing,
            keep=options.keep,
            unexpected=options.unexpected,
            mismatched=options.mismatched,
            rename=options.renames,
            allow=options.allow,
            # Nodes fetch from each other what they lack, each once.
            share_reads=options.share_reads if self._nodes is None else False,
            check=partial(self._check, found, reader),
        )

    @contextmanager
    def _reader(self, found: CheckpointInfo) -> Iterator[DirectReader]:
        if self._nodes is None:
            yield DirectReader(found.place, direct=self._direct, engine=self._engine)
        else:
            with self._nodes.reader(found, direct=self._direct, engine=self._engine) as reader:
                yield reader

    def _check(
        self, found: CheckpointInfo, reader: DirectReader, report: LoadReport, metadata: Metadata
    ) -> LoadReport:
        """Compare the checksums of items that ranks read in part. Each rank reads a share of these
        items as a whole."""
        keys = sorted(stored_keys(metadata))
        doubtful = self._ranks.on_any(keys, set(report.not_verified))
        if not doubtful:
            return report
        share = partial(
            verify,
            found.place,
            metadata,
            keys=set(doubtful),
            share=(self._ranks.rank, self._ranks.size),
            direct=self._direct,
            engine=self._engine,
        )
        if isinstance(reader, NodeReader):
            share = partial(reader.check, metadata, doubtful, direct=self._direct)
        without = self._together(share, "verifying")
        without = set(self._ranks.on_any(keys, without))
        return replace(report, not_verified=[key for key in report.not_verified if key in without])

    def _raise_if_damaged(self) -> None:
        """Raise if all checkpoints are damaged: pyckpt must not decide to start from nothing."""
        entries = self._together(self._catalog.entries, "looking for checkpoints")
        damaged = [str(entry) for entry in entries if entry.state == "damaged"]
        damaged += [
            f"{one.path.name}: a part of it; other nodes have the rest, so pass node_local=True on "
            "as many of them"
            for one in (entry.checkpoint for entry in entries)
            if one is not None and one.elsewhere
        ]
        if self._mirror is not None:
            mirror = self._mirror
            there = self._together(mirror.damaged, "looking at the mirror")
            damaged += [f"step {step} in the mirror, {mirror}" for step in there]
        if self._ranks.largest(len(damaged)):
            what = "; ".join(damaged) or "as other ranks see it"
            raise CorruptCheckpoint(
                f"{self._catalog.directory} holds damaged checkpoints only ({what}); move them "
                "away to start from the beginning",
                path=str(self._catalog.directory),
            )

    def _tell_nothing(self, required: bool) -> None:
        what = ""
        if self._ranks.rank == 0 or required:
            what = self._catalog.describe_nothing()
            if self._mirror is not None:
                what += f", and the mirror, {self._mirror}, has no checkpoint"
        if required:
            raise FileNotFoundError(
                2, f"there is no checkpoint to restore: {what}", str(self._catalog.directory)
            )
        if self._ranks.rank == 0:
            _logger.warning(
                "nothing to restore in %s, so training begins: %s", self._catalog.directory, what
            )

    def _tell_differing(self, found: CheckpointInfo) -> None:
        if self._ranks.rank or self.report is None:
            return
        for one in self.report.differing:
            _logger.info(
                "%s is %r in the state and %r in %s: %s",
                one.key,
                one.live,
                one.saved,
                found.place,
                "it was kept as it is" if one.kept else "it is now as saved",
            )

    def _tell_newer(self, found: CheckpointInfo) -> None:
        if self._ranks.rank:
            return
        try:
            newer = [step for step in self._catalog.steps() if step > found.step]
            entries = [self._catalog.examine(step) for step in reversed(newer)]
        except OSError as error:  # do not raise: the other ranks have finished restoring
            _logger.warning("cannot tell what is newer than %s: %s", found.path, error)
            return
        for entry in entries:
            if entry.checkpoint is not None and entry.step not in self.distrusted:
                self._warn_of_newer(entry.checkpoint, found)
            else:
                _logger.warning("passed over %s", entry)

    def _tell_newer_in_mirror(self, found: CheckpointInfo) -> None:
        # A mirror that is down may take long to say so, and was told of.
        if self._ranks.rank or self._mirror is None or self._mirror_failed:
            return
        limit: int | None = None
        try:
            # Each takes requests to a store, and those that are named show what to move away.
            for _ in range(_NEWER_TOLD):
                there = self._mirror.newest(limit, without=self._distrusted_there)
                if there is None or there.step <= found.step:
                    return
                self._warn_of_newer(there, found)
                limit = there.step - 1
        except (OSError, PyckptError) as error:  # do not raise: the other ranks have finished
            text = "cannot tell what %s has that is newer than step %d: %s"
            _logger.warning(text, self._mirror, found.step, error)

    def _warn_of_newer(self, newer: CheckpointInfo, found: CheckpointInfo) -> None:
        _logger.warning(
            "%s is newer than step %d, which was restored; the next restore will find it first, "
            "unless it is moved away",
            newer.place,
            found.step,
        )

    def _log(self, level: int, text: str, *args: object) -> None:
        """Log what all ranks could log, once."""
        _logger.log(logging.DEBUG if self._ranks.rank else level, text, *args)

    def _together(self, step: Callable[[], T], doing: str) -> T:
        """Run a function on each rank. It fails on all ranks if it fails on one."""
        return together(step, process_group=self._ranks.work, doing=doing)
