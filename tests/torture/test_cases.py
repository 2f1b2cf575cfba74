"""The harness objects to defects that are planted, and to nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from _ranks import Pipe, run_child

from torture import kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not kernel.supported(), reason="needs Linux on x86-64"),
]


def torn_commit(place: Path) -> None:
    """The metadata is written where it is to be, and not beside it."""
    from pyckpt.format import commit

    def write(directory: Path, name: str, data: bytes, **_: Any) -> None:
        path = directory / name
        with open(path, "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            file.write(data[len(data) // 2 :])

    commit.commit_metadata = write  # type: ignore[assignment]


def early_sweep(place: Path) -> None:
    """The old data is removed before the new metadata has its place."""
    from pyckpt.format import commit

    real = commit.commit_metadata

    def write(directory: Path, name: str, data: bytes, **options: Any) -> None:
        commit.remove_unnamed(directory, set(), committed=name)
        for path in directory.glob("*.distcp"):
            if path.stat().st_ctime < (directory / ".metadata").stat().st_ctime:
                path.unlink()
        real(directory, name, data, **options)

    commit.commit_metadata = write


def false_success(place: Path) -> None:
    """A commit that fails is said to have succeeded."""
    from pyckpt.format import commit

    real = commit.commit_metadata

    def write(*args: Any, **options: Any) -> None:
        with suppress(OSError):
            real(*args, **options)

    commit.commit_metadata = write


def false_failure(place: Path) -> None:
    """An error after the commit is reported as that of a save that committed nothing."""
    from pyckpt.format import commit

    commit.committed = lambda path: nullcontext()


def no_sweep(place: Path) -> None:
    """Nothing is removed after a save."""
    from pyckpt.format import commit

    commit.remove_unnamed = lambda *args, **options: None
    commit.begin_save = lambda *args, **options: None


def no_sweep_of_earlier_jobs(place: Path) -> None:
    """A job leaves what an earlier one left beside its checkpoints."""
    from pyckpt.train.store import pruner

    pruner.sweep = lambda *args, **options: None


def nobody_is_missing(place: Path) -> None:
    """Whoever finds that ranks are lost does not say which."""
    from pyckpt.train.sync.roll_call import RollCall

    RollCall.missing = lambda self: []  # type: ignore[method-assign]


def all_are_missing(place: Path) -> None:
    """Whoever finds that ranks are lost blames all of them."""
    from pyckpt.train.sync.roll_call import RollCall

    RollCall.missing = lambda self: [0, 1]  # type: ignore[method-assign]


def early_prune(place: Path) -> None:
    """Of the newest checkpoints, one less is kept than was asked for."""
    from pyckpt.train.store.retention import Retention

    init = Retention.__init__

    def made(self: Any, keep_last: int | None = None, *args: Any) -> None:
        init(self, None if keep_last is None else max(1, keep_last - 1), *args)

    Retention.__init__ = made  # type: ignore[method-assign]


def emptied_before_it_is_removed(place: Path) -> None:
    """What is removed is emptied first, which reaches those that have it by a link."""
    real = os.unlink

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if str(path).endswith(".distcp"):
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC, dir_fd=dir_fd))
        real(path, dir_fd=dir_fd)

    os.unlink = unlink
    Path.unlink = lambda self, missing_ok=False: unlink(self)  # type: ignore[method-assign]


def nothing_settled(place: Path) -> None:
    """A commit that some nodes have made, and others have not, stays so."""
    from pyckpt.train.nodes.committing import NodeCommit

    NodeCommit._settle = lambda *args, **options: None  # type: ignore[method-assign]


def lost_write(place: Path) -> None:
    """A state is saved without one of its tensors."""
    from torture import scenarios

    real = scenarios.Job.tree

    def tree(self: Any, value: int) -> Any:
        found = real(self, value)
        if value == scenarios.NEW:
            del found["model"]["layer3"]
        return found

    scenarios.Job.tree = tree  # type: ignore[method-assign]


def judge(pipe: Pipe, place: Path, defect: Callable[[Path], None] | None, text: str) -> Any:
    from torture.cases import Desk, case_of

    desk = Desk(place)
    try:
        desk.run(case_of(text.partition("/")[0] + "/"))  # makes what the case begins with
        if defect is not None:
            defect(place)
        verdict = desk.run(case_of(text))
    finally:
        desk.close()
    return verdict.hit, verdict.objections


RENAME = "0:rename:checkpoint/.metadata.ID.tmp:1"
OVERWRITE = "overwrite@1/0:rename:run/step-00000001/.metadata.ID.tmp:1=kill"
LOST = "next-save@2/1:fsync:run/step-00000002/__1_ID.distcp:1=kill"
OF_THIRD = "0:rename:run/step-00000003/.metadata.ID.tmp:1"
OF_NODE = "1:rename:disk/run/.pyckpt/pending-ID-step-00000002:1"


@pytest.mark.parametrize(
    ("defect", "case", "objection"),
    [
        (torn_commit, "dcp-save@1/0:write:checkpoint/.metadata:2=kill", "checkpoint"),
        (early_sweep, f"dcp-save@1/{RENAME}=kill", "checkpoint"),
        (false_success, f"dcp-save@1/{RENAME}=error=EIO", "missing"),
        (false_failure, "dcp-save@1/0:fsync:checkpoint:2=error=EIO", "said to have failed"),
        (false_failure, "next-save@2/0:fsync:run/step-00000002:3=error=EIO", "said to have failed"),
        (no_sweep, f"dcp-save@1/{RENAME}=kill", "stray"),
        (no_sweep_of_earlier_jobs, OVERWRITE, "stray"),
        (lost_write, f"dcp-save@1/{RENAME}=delay=0.01", "layer3 is missing"),
        (nobody_is_missing, LOST, "names no rank that was killed"),
        (all_are_missing, LOST, "blames [0]"),
        (early_prune, f"overlapped@1/{OF_THIRD}=delay=0.01", "there is {4: 5}"),
        (false_success, f"overlapped@1/{OF_THIRD}=error=EIO", "told of a commit of step 3"),
        (nothing_settled, f"node-local@2/{OF_NODE}=kill", "resumed from 1, and not from 2"),
        (
            emptied_before_it_is_removed,
            "frozen@1/0:link:run/step-00000001/__0_ID.frozen.distcp:1=delay=0.01",
            "damaged",
        ),
    ],
)
def test_a_planted_defect_is_seen(
    defect: Callable[[Path], None], case: str, objection: str, tmp_path: Path
) -> None:
    hit, objections = run_child(judge, tmp_path, defect, case)
    assert hit
    assert any(objection in one for one in objections), objections


@pytest.mark.parametrize(
    "case",
    [
        f"dcp-save@2/{RENAME}=kill",
        f"dcp-save@2/{RENAME}=error=EIO",
        OVERWRITE,
        "dcp-save@1/0:fsync:checkpoint:2=error=EIO",
        "next-save@2/0:fsync:run/step-00000002:3=error=EIO",
        LOST,
        f"overlapped@2/{OF_THIRD}=error=EIO",
        f"overlapped@1/{OF_THIRD}=kill",
        "frozen@2/1:link:run/step-00000001/__1_ID.frozen.distcp:1=error=EXDEV",
        f"node-local@2/{OF_NODE}=kill",
        # One node has removed its part of the earlier checkpoint, and the other has not.
        "node-local@2/0:renameat:disk/run/step-00000001/.metadata:1=kill",
        "dcp-save@2/1:pwrite64:checkpoint/__1_ID.distcp:1=short=0.5",
        "dcp-save@2/1:pwrite64:checkpoint/__1_ID.distcp:2=short=0",
        "dcp-save@2/1:pwrite64:checkpoint/__1_ID.distcp:1=error=ENOSPC;"
        "0:fsync:checkpoint/__0_ID.distcp:1=error=EIO",
        "load@2/1:pread64:checkpoint/__1_ID.distcp:1=error=EIO",
    ],
)
def test_what_is_sound_passes(case: str, tmp_path: Path) -> None:
    assert run_child(judge, tmp_path, None, case) == (True, [])


@pytest.mark.parametrize(
    "case",
    [
        # Of the lock of a data file, after the commit.
        "dcp-save@1/0:close:checkpoint/__0_ID.distcp:3=error=EIO",
        "dcp-save@1/0:close:checkpoint:3=error=EIO",
        # Of what an export that fails leaves.
        "export@1/0:openat:export/.pyckpt-export-ID:2=stays=EMFILE",
        "export@1/0:pwrite64:export/.pyckpt-export-ID/model-00002-of-00003.safetensors:1=stays=EIO;"
        "+0:1=stays=EDQUOT",
        "overwrite@2/0:flock:run/step-00000001/__1_ID.distcp:1=error=EAGAIN",
        "restore@1/0:read:run/step-00000002/.metadata:1=error=EAGAIN",
        "restore@1/0:flock:run/step-00000002/.metadata:1=error=EAGAIN",
        "restore@2/0:newfstatat:run/step-00000002/__0_ID.distcp:1=stays=EIO",
    ],
)
def test_what_was_mended_stays_so(case: str, tmp_path: Path) -> None:
    assert run_child(judge, tmp_path, None, case) == (True, [])


def test_what_does_not_happen_is_not_counted(tmp_path: Path) -> None:
    assert run_child(judge, tmp_path, None, "dcp-save@1/0:rename:nowhere:1=kill") == (False, [])
