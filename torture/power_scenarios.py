"""The runs that `torture.power` records: ``python -m torture.power_scenarios BASE``.

Each run has a directory ``BASE/NAME``, and tells what it begins and what was promised to it in
``BASE/NAME.marks``: ``{"begun": PLACE, "value": N}`` before a save, ``{"returned": PLACE,
"value": N}`` after it. The parts of a run are processes of their own, one after the other, so that
one can be killed and the next go on where it was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint

import pyckpt
from pyckpt import Checkpointer, DirectWriter
from pyckpt.dcp.writing import PlannedItems
from pyckpt.format import commit
from pyckpt.train.store.removal import remove
from torture.recording import Run

dcp: Any = torch.distributed.checkpoint
dist: Any = torch.distributed

__all__ = ["SCENARIOS", "Says", "Scenario", "Values", "run_part", "state_of", "value_of", "where"]

RANKS = 2
_LENGTH = 2500
_OFFSET = 16.0


def state_of(value: int, ranks: Sequence[int] = range(RANKS)) -> dict[str, Any]:
    """A state in which each byte that matters depends on ``value``."""
    state: dict[str, Any] = {"value": value, "text": f"value {value} " * 20}
    for rank in ranks:
        state[f"weights{rank}"] = torch.arange(_LENGTH) + _OFFSET * value + rank
        state[f"bias{rank}"] = torch.full((7,), value + rank)
    return state


def value_of(state: dict[str, Any]) -> int:
    """The value of a state.

    Raises:
        AssertionError: it is not the state of one value.
    """
    value = state["value"]
    expected = state_of(value)
    if state.keys() != expected.keys():
        raise AssertionError(f"it has {sorted(state)}")
    for key, what in expected.items():
        same = torch.equal(state[key], what) if torch.is_tensor(what) else state[key] == what
        if not same:
            raise AssertionError(f"{key} is not that of value {value}")
    return int(value)


class Values:
    """A state of one value, as a part of what a Checkpointer saves."""

    def __init__(self, value: int = 0, ranks: Sequence[int] = range(RANKS)) -> None:
        self.state = state_of(value, ranks)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Says:
    """Writes marks."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def __call__(self, what: str, place: str, value: int | None = None) -> None:
        line = json.dumps({what: place, "value": value}) + "\n"
        os.write(self._descriptor, line.encode())


Part = Callable[[Path, Says], None]


@dataclass(frozen=True)
class Scenario:
    """A run, and what it leaves in which place of its directory."""

    name: str
    parts: Sequence[Part]
    """Each runs in a process of its own, with the directory; on ``ranks`` ranks."""
    plain: str = ""
    """Where there is a checkpoint."""
    root: str = ""
    """Where there are the checkpoints of a Checkpointer."""
    mirror: str = ""
    """Where there is the mirror of these."""
    export: str = ""
    """Where there is an export."""
    may_break: bool = False
    """Whether an export may not load while another one replaces it: if it has several files."""
    config: Mapping[str, Any] | None = None
    """The configuration that there must be beside the model of an export."""
    keep_last: int = 2
    ranks: int = 1


SCENARIOS: dict[str, Scenario] = {}


def where(base: Path, name: str) -> Run:
    """Where a run has its files."""
    return Run(base / name, base / f"{name}.marks")


def _add(name: str, *parts: Part, **what: Any) -> None:
    SCENARIOS[name] = Scenario(name, parts, **what)


# Plain checkpoints.


def _saves(*values: int) -> Part:
    def part(root: Path, say: Says) -> None:
        for value in values:
            say("begun", "plain", value)
            pyckpt.save(state_of(value), root / "ckpt", overwrite=True)
            say("returned", "plain", value)

    return part


def _dcp_save(value: int, *, collectives: bool = True) -> Part:
    def part(root: Path, say: Says) -> None:
        say("begun", "plain", value)
        dcp.save(state_of(value), storage_writer=DirectWriter(root / "new" / "ckpt"), no_dist=True)
        say("returned", "plain", value)

    return part


def _async_saves(*values: int) -> Part:
    def part(root: Path, say: Says) -> None:
        _join(0, 1)
        for value in values:
            say("begun", "plain", value)
            writer = DirectWriter(root / "ckpt")
            future: Any = dcp.async_save(state_of(value), storage_writer=writer)
            future.result()
            say("returned", "plain", value)

    return part


@contextmanager
def _killed_at(when: str) -> Any:
    """Kill this process in its next save."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def after(call: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            die()

        return both

    patches = {
        "marked": mock.patch.object(commit, "begin_save", after(commit.begin_save)),
        "writing": mock.patch.object(PlannedItems, "add_to", after(PlannedItems.add_to)),
        "written": mock.patch.object(DirectWriter, "finish", die),
        "described": mock.patch.object(DirectWriter, "_before_commit", die),
        # After the rename, before the directory is synced.
        "renamed": mock.patch.object(
            commit, "commit_metadata", after(_without_sync(commit.commit_metadata))
        ),
        "committed": mock.patch.object(commit, "remove_unnamed", die),
    }
    with patches[when]:
        yield


def _without_sync(call: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(commit, "sync_directory"):
            call(*args, **kwargs)

    return changed


KILLS = ("marked", "writing", "written", "described", "renamed", "committed")


def _killed_save(value: int, when: str) -> Part:
    def part(root: Path, say: Says) -> None:
        say("begun", "plain", value)
        with _killed_at(when):
            pyckpt.save(state_of(value), root / "ckpt", overwrite=True)

    return part


def _failed_save(value: int) -> Part:
    """A save that fails right before it would count."""

    def part(root: Path, say: Says) -> None:
        say("begun", "plain", value)
        failing = mock.patch.object(DirectWriter, "_before_commit", _fail)
        with failing, suppress(OSError):
            pyckpt.save(state_of(value), root / "ckpt", overwrite=True)

    return part


def _fail(*_: Any) -> None:
    raise OSError(5, "made up")


_add("first-save", _saves(1), plain="ckpt")
_add("first-save-dcp", _dcp_save(1), plain="new/ckpt")
_add("overwrite", _saves(1, 2, 3), plain="ckpt")
_add("async-save", _async_saves(1, 2), plain="ckpt")
_add("failed-save", _failed_save(1), _saves(2), _failed_save(3), _saves(4), plain="ckpt")
for _kill in KILLS:
    _add(f"killed-{_kill}", _killed_save(1, _kill), _saves(2), plain="ckpt")
    _add(f"overwrite-killed-{_kill}", _saves(1), _killed_save(2, _kill), _saves(3), plain="ckpt")


# Checkpointers.


def _steps(*steps: int, waits: bool = True, back_to: int | None = None, **settings: Any) -> Part:
    """Save steps, after restoring one."""

    def part(root: Path, say: Says) -> None:
        if "mirror" in settings:
            settings["mirror"] = root / "mirror"
        with Checkpointer(root / "run", keep_last=2, **settings) as checkpointer:
            mine = [dist.get_rank()] if dist.is_initialized() else range(RANKS)
            checkpointer.restore({"values": Values(0)}, step=back_to)
            for step in steps:
                say("begun", "root", step)
                handle = checkpointer.save(step, {"values": Values(step, mine)})
                if waits:
                    handle.wait()
                    say("returned", "root", step)
                else:
                    handle.committed.add_done_callback(partial(_say_returned, say, step))
                if "mirror" in settings and checkpointer.wait_mirrored():
                    say("returned", "mirror", step)

    return part


def _say_returned(say: Says, step: int, _: object) -> None:
    say("returned", "root", step)


def _killed_steps(*steps: int, when: str) -> Part:
    """Save steps, and be killed in the last one."""

    def part(root: Path, say: Says) -> None:
        checkpointer = Checkpointer(root / "run", keep_last=2)
        checkpointer.restore({"values": Values(0)})
        for step in steps:
            say("begun", "root", step)
            if step != steps[-1]:
                checkpointer.save(step, {"values": Values(step)}).wait()
                say("returned", "root", step)
                continue
            with _killed_at(when):
                checkpointer.save(step, {"values": Values(step)}).wait()

    return part


def _failed_steps(*steps: int) -> Part:
    """Save steps, the last of which fails."""

    def part(root: Path, say: Says) -> None:
        # Its end raises the error again.
        with suppress(OSError), Checkpointer(root / "run", keep_last=2) as checkpointer:
            checkpointer.restore({"values": Values(0)})
            for step in steps:
                say("begun", "root", step)
                if step != steps[-1]:
                    checkpointer.save(step, {"values": Values(step)}).wait()
                    say("returned", "root", step)
                    continue
                with mock.patch("pyckpt.train.handle.ReportingWriter._before_commit", _fail):
                    checkpointer.save(step, {"values": Values(step)}).wait()

    return part


_add("steps", _steps(1, 2, 3, 4, 5), root="run")
_add("steps-async", _steps(1, 2, 3, 4, waits=False), root="run")
_add("steps-killed", _killed_steps(1, 2, 3, when="renamed"), _steps(4, 5), root="run")
_add("steps-killed-early", _killed_steps(1, 2, 3, when="writing"), _steps(3, 4), root="run")
_add("steps-failed", _failed_steps(1), _failed_steps(1, 2), _steps(2, 3), root="run")
_add("steps-again", _steps(1, 2, 3, 4), _steps(4, 5, back_to=3), root="run")
_add("mirror", _steps(1, 2, 3, mirror=True, mirror_keep_last=2), root="run", mirror="mirror")


# Several ranks.


def _join(rank: int, size: int, rendezvous: Path | None = None) -> None:
    if rendezvous is None:
        rendezvous = Path(tempfile.mkdtemp(prefix="pyckpt-power-"))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous / 'store'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )


def _saves_of_ranks(*values: int) -> Part:
    def part(root: Path, say: Says) -> None:
        for value in values:
            say("begun", "plain", value)
            state = state_of(value, [dist.get_rank()])
            dcp.save(state, storage_writer=DirectWriter(root / "ckpt"))
            say("returned", "plain", value)

    return part


def _remade(root: Path, say: Says) -> None:
    """Save, and again after rank 1 has removed the directory and made it anew. Its inode is that of
    the one before, on most file systems."""
    _saves_of_ranks(1)(root, say)
    dist.barrier()
    if dist.get_rank() == 1:
        say("begun", "plain", None)
        remove(root / "ckpt")
        (root / "ckpt").mkdir()
    dist.barrier()
    _saves_of_ranks(2)(root, say)


_add("ranks", _saves_of_ranks(1, 2), plain="ckpt", ranks=RANKS)
_add("ranks-remade", _remade, plain="ckpt", ranks=RANKS)
_add("ranks-steps", _steps(1, 2, 3, 4), root="run", ranks=RANKS)


# Exports.


def _source(root: Path, value: int) -> Path:
    """A checkpoint to export, beside what is recorded: its disk has no power failure."""
    path = Path(tempfile.mkdtemp(prefix=f"{root.name}-source-", dir=root.parent)) / "ckpt"
    pyckpt.save({"model": state_of(value)}, path)
    return path


def _exports(**settings: Any) -> Part:
    def part(root: Path, say: Says) -> None:
        for value in (1, 2):
            source = _source(root, value)
            say("begun", "export", value)
            pyckpt.export(source, root / "export", key="model", **settings)
            say("returned", "export", value)

    return part


def _growing_exports(root: Path, say: Says) -> None:
    """One file, then several, then one again."""
    for value, shard in ((1, "1GB"), (2, "15KB"), (3, "1GB")):
        source = _source(root, value)
        say("begun", "export", value)
        pyckpt.export(source, root / "export", key="model", max_shard_size=shard)
        say("returned", "export", value)


_add("export", _exports(), export="export")
_add("export-torch", _exports(format="torch"), export="export")
_add("export-sharded", _exports(max_shard_size="15KB"), export="export", may_break=True)
_CONFIG = {"a": 1}
_add("export-config", _exports(config=_CONFIG), export="export", may_break=True, config=_CONFIG)
_add("export-growing", _growing_exports, export="export", may_break=True)


# Running them.


def run_part(scenario: Scenario, part: Part, run: Run) -> None:
    """Run a part in processes of its own. Raises unless they succeed, or kill themselves."""
    rendezvous = Path(tempfile.mkdtemp(prefix="pyckpt-power-"))
    children = []
    for rank in range(scenario.ranks):
        child = os.fork()
        if not child:
            status = 1
            try:
                if scenario.ranks > 1:
                    _join(rank, scenario.ranks, rendezvous)
                part(run.root, Says(run.marks))
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    for child in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{scenario.name} ended with {status}")


def main(base: Path, names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for scenario in [SCENARIOS[name] for name in names] or SCENARIOS.values():
        run = where(base, scenario.name)
        run.root.mkdir()
        for part in scenario.parts:
            run_part(scenario, part, run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
