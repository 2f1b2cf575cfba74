"""Removes checkpoints by hand, in a directory where no job saves.

What is removed is planned first, with a reason for each entry. Nothing is removed that a
Checkpointer would not remove: damaged checkpoints and foreign entries stay, so that a person can
look at them.
Checkpoints stay too that hold a file which no save has written.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pyckpt.errors import PyckptError
from pyckpt.format import commit
from pyckpt.format.claim import is_claimed
from pyckpt.train.store.catalog import Catalog, CheckpointInfo, DirectoryEntry
from pyckpt.train.store.fence import FOLDER, Fence, Job
from pyckpt.train.store.part import pending
from pyckpt.train.store.removal import remove
from pyckpt.train.store.retention import Retention, surplus

__all__ = ["JobRuns", "Plan", "Planned", "plan", "prune"]


_LINK = "a link to another directory"
_PREPARED = "its commit is prepared, which the next job here finishes or gives up"


class JobRuns(PyckptError):
    """A job may still be saving into the directory, so nothing was removed."""


@dataclass(frozen=True)
class Planned:
    """An entry of the directory, and what is to become of it."""

    path: Path
    step: int
    action: Literal["keep", "remove"]
    why: str
    bytes: int
    """Of its data files; 0 where they are not known."""
    is_remains: bool = False
    """Whether it is what an interrupted save or removal left."""


@dataclass(frozen=True)
class Plan:
    """What a prune is to do. Entries that are not named as checkpoints are not in it."""

    directory: Path
    entries: list[Planned]
    """By step."""
    last_job: Job | None
    """The job that was the last to save here."""

    @property
    def going(self) -> list[Planned]:
        return [entry for entry in self.entries if entry.action == "remove"]


def plan(directory: str | os.PathLike[str], retention: Retention) -> Plan:
    """Decide what is to be removed. Changes nothing.

    Raises:
        OSError: the directory cannot be read.
        ValueError: it is itself a checkpoint; or no checkpoint has the metric that the best are to
            be kept by.
    """
    root = Path(directory)
    if commit.metadata_name() in os.listdir(root):
        raise ValueError(f"{root} is itself a checkpoint, not a directory of them")
    catalog = Catalog(root)
    links = catalog.links()
    prepared = pending(root / FOLDER)
    entries = [catalog.examine(step) for step in reversed(catalog.steps())]
    valid = [
        entry.checkpoint
        for entry in entries
        if entry.checkpoint is not None
        and entry.path.name not in links
        and entry.path.name not in prepared
    ]
    if retention.keep_best is not None and valid:
        metric = retention.keep_best[0]
        known = sorted({name for checkpoint in valid for name in checkpoint.metrics})
        if metric not in known:
            raise ValueError(
                f"no checkpoint has the metric {metric!r}; they have {', '.join(known) or 'none'}"
            )
    newest = max((checkpoint.step for checkpoint in valid), default=-1)
    linked = {step: name for name, step in sorted(links.items()) if step is not None}
    going = set(surplus(valid, retention, protected=linked))
    planned = [
        _planned(entry, valid, retention, going, newest, links, linked, prepared)
        for entry in entries
    ]
    return Plan(root, planned, Fence(root).last_job())


def _planned(
    entry: DirectoryEntry,
    valid: list[CheckpointInfo],
    retention: Retention,
    going: set[int],
    newest: int,
    links: Mapping[str, int | None],
    linked: Mapping[int, str],
    prepared: Collection[str],
) -> Planned:
    step, checkpoint = entry.step, entry.checkpoint
    assert step is not None
    size = 0 if checkpoint is None else checkpoint.bytes
    keep = partial(Planned, entry.path, step, "keep", bytes=size)
    if entry.path.name in links:
        return keep(_LINK)
    if entry.path.name in prepared:
        return keep(_PREPARED)
    if checkpoint is not None and step not in going:
        return keep(_why_kept(checkpoint, valid, retention, newest, linked))
    if checkpoint is not None:
        why = "not among those to keep"
    elif entry.state == "removed":
        why = entry.reason
    elif entry.state == "unfinished":
        if step > newest:
            return keep("a save may go on with it: it is newer than all checkpoints")
        why = entry.reason
    else:
        return keep(f"{entry.state}: {entry.reason}")
    obstacle = _obstacle(entry.path, checkpoint)
    if obstacle:
        return keep(obstacle)
    return Planned(entry.path, step, "remove", why, size, is_remains=checkpoint is None)


def _obstacle(path: Path, checkpoint: CheckpointInfo | None) -> str:
    """Why a directory must not be removed; empty if it may be."""
    if path.is_symlink():
        return _LINK
    with os.scandir(path) as found:
        names = {entry.name: entry.is_file(follow_symlinks=False) for entry in found}
    ours = {commit.metadata_name(), commit.REMOVED}
    if checkpoint is not None:
        ours.update(checkpoint.files)
    foreign = sorted(name for name in names if name not in ours and not commit.is_part(name))
    if foreign:
        return f"it also holds {foreign[0]}, which no save has written"
    odd = sorted(name for name, is_file in names.items() if not is_file)
    if odd:
        return f"it also holds {odd[0]}, which is no regular file"
    if any(is_claimed(path / name) for name in names if name.endswith(".distcp")):
        return "a save is writing to it"
    return ""


def _why_kept(
    checkpoint: CheckpointInfo,
    valid: list[CheckpointInfo],
    retention: Retention,
    newest: int,
    linked: Mapping[int, str],
) -> str:
    step = checkpoint.step
    if checkpoint.final:
        return "final"
    if step == newest:
        return "the newest"
    if step in linked:
        return f"{linked[step]} is a link to it"
    later = sum(other.step > step and not other.final for other in valid)
    if retention.keep_last is None or later < retention.keep_last:
        return f"among the last {retention.keep_last}"
    if retention.keep_every is not None and step % retention.keep_every == 0:
        return f"a multiple of {retention.keep_every}"
    assert retention.keep_best is not None
    metric, count, mode = retention.keep_best
    return f"among the best {count} by {metric} ({mode})"


def prune(plan: Plan, *, job_ended: bool = False) -> Iterator[tuple[Planned, str]]:
    """Remove what a plan says.

    Args:
        job_ended: whether the job that was the last to save here is known to have ended, though
            it cannot be seen that it has.

    Yields each entry when it is done with, and why it was not removed, or not all of it; empty if
    it was. From where on a job has begun to save here, that is why.

    Raises:
        JobRuns: at the first step of the iteration, if the job that was the last to save here runs,
            or may run. Nothing was removed.
    """
    fence = Fence(plan.directory)
    _refuse_running(fence, plan, job_ended)
    for entry in plan.going:

        @contextmanager
        def beginning(entry: Planned = entry) -> Iterator[bool]:
            with fence.visited():
                # Once more: the plan may be old, and a job may have begun.
                _refuse_running(fence, plan, job_ended)
                changed = Catalog(plan.directory).examine(entry.step)
                same = (changed.checkpoint is None) == entry.is_remains
                same = same and entry.step not in Catalog(plan.directory).links().values()
                same = same and entry.path.name not in pending(plan.directory / FOLDER)
                yield same and not _obstacle(entry.path, changed.checkpoint)

        try:
            done = remove(entry.path, beginning=beginning, remains=entry.is_remains)
            yield entry, "" if done else "it is being read, or has changed or been linked meanwhile"
        except FileNotFoundError:
            yield entry, ""  # another process has removed it
        except (OSError, PyckptError) as error:
            yield entry, str(error)


def _refuse_running(fence: Fence, plan: Plan, job_ended: bool) -> None:
    """Raise if a job may still be saving: that of the plan, unless it is said to have ended, or one
    that has begun since."""
    job = fence.last_job()
    if job is None or (job_ended and job == plan.last_job):
        return
    runs = job.is_running()
    if runs is not False:
        what = "runs" if runs else "cannot be seen from here, and may run"
        raise JobRuns(
            f"{plan.directory}: process {job.pid} on {job.host}, the last that saved here, "
            f"{what}: it prunes by itself. If that job has ended, say so with --job-ended"
        )
