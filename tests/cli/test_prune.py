"""``pyckpt prune``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from _cli import pyckpt

from pyckpt.format.claim import Claim
from pyckpt.tools import pruning
from pyckpt.train.store import fence
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.retention import Retention


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("step-*"))


def test_without_yes_nothing_is_removed(made: Path) -> None:
    before = sorted(made.rglob("*"))
    done = pyckpt("prune", made / "run", "--keep-last", 1)
    assert done.status == 0
    assert "would remove 1 of 3" in done.out
    assert sorted(made.rglob("*")) == before


def test_with_yes_what_is_not_kept_goes(made: Path) -> None:
    done = pyckpt("prune", made / "run", "--keep-last", 1, "--yes", "--json")
    assert done.status == 0
    entries = {entry["step"]: entry for entry in done.json["entries"]}
    assert [entries[step]["removed"] for step in (10, 20, 30)] == [True, False, False]
    assert [entries[step]["why"] for step in (20, 30)] == ["final", "the newest"]
    assert steps(made / "run") == [20, 30]
    assert pyckpt("verify", made / "run").status == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--keep-every", 10], "a multiple of 10"),
        (["--keep-best", "loss", "--max"], "among the best 1 by loss (max)"),
    ],
)
def test_what_is_kept_says_why(made: Path, options: list[object], why: str) -> None:
    done = pyckpt("prune", made / "run", "--keep-last", 0, *options, "--json")
    assert (done.json["entries"][0]["action"], done.json["entries"][0]["why"]) == ("keep", why)


def test_a_metric_that_no_checkpoint_has_is_a_mistake(made: Path) -> None:
    done = pyckpt("prune", made / "run", "--keep-last", 0, "--keep-best", "los", "--yes")
    assert done.status == 2
    assert "they have loss" in done.err
    assert steps(made / "run") == [10, 20, 30]


def test_what_is_not_ours_stays(made: Path) -> None:
    run = made / "run"
    (run / "step-00000010" / "notes.txt").touch()
    (made / "stock").rename(run / "checkpoint-1")
    (run / "step-00000005").symlink_to(made / "ours")
    (run / "step-00000006").mkdir()
    (run / "step-00000006" / "precious").touch()
    before = sorted(made.rglob("*"))
    done = pyckpt("prune", run, "--keep-last", 1, "--yes", "--json")
    assert done.status == 0
    why = {entry["step"]: entry["why"] for entry in done.json["entries"]}
    assert why[5] == "a link to another directory"
    assert "precious" in why[6]
    assert why[10] == "it also holds notes.txt, which no save has written"
    assert sorted(made.rglob("*")) == before


def test_what_a_link_leads_to_stays(made: Path) -> None:
    run = made / "run"
    (run / "step-00000040").symlink_to("step-00000010")
    done = pyckpt("prune", run, "--keep-last", 1, "--yes", "--json")
    assert done.status == 0
    why = {entry["step"]: entry["why"] for entry in done.json["entries"]}
    assert why[10] == "step-00000040 is a link to it"
    assert why[30] == "the newest"
    assert why[40] == "a link to another directory"
    assert pyckpt("verify", run / "step-00000040").status == 0


def test_what_a_node_has_prepared_stays(made: Path) -> None:
    """Another node may have committed it."""
    run = made / "run"
    folder = run / "step-00000015"
    folder.mkdir()
    (folder / "__0_0.distcp").touch()
    (folder / ".saving").touch()
    mark = run / ".pyckpt" / f"pending-{'a' * 32}-{folder.name}"
    planned = pruning.plan(run, Retention(keep_last=1))
    mark.touch()
    done = [(entry.step, why) for entry, why in pruning.prune(planned)]
    assert [step for step, why in done if why] == [15]
    why = {
        entry["step"]: (entry["action"], entry["why"])
        for entry in pyckpt("prune", run, "--keep-last", 1, "--yes", "--json").json["entries"]
    }
    assert why[15][0] == "keep"
    assert "prepared" in why[15][1]
    assert 15 in steps(run)


def test_a_folder_named_as_a_save_names_its_files_stays(made: Path) -> None:
    folder = made / "run" / "step-00000010" / "__0_mine.distcp"
    folder.mkdir()
    (folder / "precious").touch()
    done = pyckpt("prune", made / "run", "--keep-last", 1, "--yes", "--json")
    assert done.status == 0
    why = {entry["step"]: entry["why"] for entry in done.json["entries"]}
    assert why[10] == "it also holds __0_mine.distcp, which is no regular file"
    assert (folder / "precious").exists()


def test_damaged_checkpoints_stay_and_remains_of_older_saves_go(made: Path) -> None:
    run = made / "run"
    (file,) = (run / "step-00000010").glob("*.distcp")
    os.truncate(file, 1)
    for step in (15, 99):
        folder = run / f"step-{step:08d}"
        folder.mkdir()
        (folder / ".saving").touch()
        (folder / "__0_0.distcp").touch()
    assert pyckpt("prune", run, "--keep-last", 1, "--yes").status == 0
    assert steps(run) == [10, 20, 30, 99]


def test_what_is_being_read_or_written_stays(made: Path) -> None:
    run = made / "run"
    with reading(run / "step-00000010"):
        done = pyckpt("prune", run, "--keep-last", 1, "--yes")
    assert done.status == 2
    assert "being read" in done.err
    folder = run / "step-00000015"
    folder.mkdir()
    (folder / ".saving").touch()
    (folder / "__0_0.distcp").touch()
    claim = Claim(folder / "__0_0.distcp")
    done = pyckpt("prune", run, "--keep-last", 1, "--yes", "--json")
    claim.release()
    assert done.status == 0
    assert {entry["step"]: entry["why"] for entry in done.json["entries"]}[15] == (
        "a save is writing to it"
    )
    assert steps(run) == [15, 20, 30]


def _job(run: Path, host: str, pid: int) -> None:
    content = {"token": "t", "host": host, "pid": pid, "namespace": fence._namespace()}
    (run / ".pyckpt" / "generation-00000007").write_text(json.dumps(content))


def test_while_the_job_runs_nothing_is_removed(made: Path) -> None:
    run = made / "run"
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    for host, pid, what in [
        (socket.gethostname(), os.getpid(), "runs"),
        ("elsewhere", 1, "cannot be seen"),
    ]:
        _job(run, host, pid)
        done = pyckpt("prune", run, "--keep-last", 1, "--yes")
        assert done.status == 2
        assert what in done.err
        assert pyckpt("prune", run, "--keep-last", 1).status == 0
        assert steps(run) == [10, 20, 30]
    # A job that began on a full disk has not said which it is.
    (run / ".pyckpt" / "generation-00000007").write_text("")
    assert "cannot be seen" in pyckpt("prune", run, "--keep-last", 1, "--yes").err
    assert steps(run) == [10, 20, 30]
    _job(run, socket.gethostname(), int(ended.stdout))
    assert pyckpt("prune", run, "--keep-last", 1, "--yes").status == 0
    assert steps(run) == [20, 30]


@pytest.mark.parametrize("job_ended", [False, True])
def test_a_job_that_begins_after_the_plan_is_noticed(made: Path, job_ended: bool) -> None:
    run = made / "run"
    _job(run, "elsewhere", 1)
    made_before = pruning.plan(run, Retention(keep_last=0))
    assert made_before.going
    _job(run, socket.gethostname(), os.getpid())
    with pytest.raises(pruning.JobRuns, match="runs"):
        list(pruning.prune(made_before, job_ended=job_ended))
    assert steps(run) == [10, 20, 30]


def test_a_job_that_begins_during_the_removal_is_noticed(made: Path) -> None:
    run = made / "run"
    (run / "step-00000005").mkdir()
    planned = pruning.plan(run, Retention(keep_last=1))
    assert [entry.step for entry in planned.going] == [5, 10]
    removal = pruning.prune(planned)
    assert next(removal)[1] == ""
    _job(run, socket.gethostname(), os.getpid())
    ((entry, why),) = removal
    assert entry.step == 10
    assert "runs: it prunes by itself" in why
    assert steps(run) == [10, 20, 30]


def test_that_a_job_has_ended_can_be_said(made: Path) -> None:
    _job(made / "run", "elsewhere", 1)
    assert pyckpt("prune", made / "run", "--keep-last", 1, "--yes", "--job-ended").status == 0
    assert steps(made / "run") == [20, 30]
    assert (made / "run" / ".pyckpt" / "generation-00000007").exists()


def test_a_checkpoint_is_no_directory_of_them(made: Path) -> None:
    assert pyckpt("prune", made / "ours", "--keep-last", 0, "--yes").status == 2
