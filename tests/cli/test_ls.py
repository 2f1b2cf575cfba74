"""``pyckpt ls``."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from _cli import pyckpt


def test_it_tells_what_each_checkpoint_is(made: Path) -> None:
    then = time.time() - 7200
    os.utime(made / "run" / "step-00000010" / ".metadata", (then, then))
    done = pyckpt("ls", made / "run", "--json")
    assert done.status == 0
    assert [entry["step"] for entry in done.json] == [10, 20, 30]
    first, second, _ = done.json
    assert first["metrics"] == {"loss": 0.1}
    assert (first["state"], first["ranks"], first["final"]) == ("valid", 1, False)
    assert 7190 < first["age"] < 9000
    (file,) = (made / "run" / "step-00000010").glob("*.distcp")
    assert first["bytes"] == file.stat().st_size
    assert second["final"]
    shown = pyckpt("ls", made / "run").out
    assert "2 h" in shown
    assert "loss=0.1" in shown
    assert "final" in shown


def test_what_is_wrong_is_said_and_makes_the_answer_bad(made: Path) -> None:
    run = made / "run"
    (file,) = (run / "step-00000010").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    (run / "step-00000020" / ".metadata").unlink()
    done = pyckpt("ls", run, "--json")
    assert done.status == 1
    first, second, third = done.json
    assert (first["state"], third["state"]) == ("damaged", "valid")
    assert f"has {file.stat().st_size} bytes" in first["reason"]
    assert second["state"] == "damaged"
    assert "no .metadata" in second["reason"]
    assert "damaged" in pyckpt("ls", run).out


def test_remains_of_an_interrupted_save_are_not_bad(made: Path) -> None:
    folder = made / "run" / "step-00000040"
    folder.mkdir()
    (folder / ".saving").touch()
    done = pyckpt("ls", made / "run", "--json")
    assert done.status == 0
    assert done.json[-1]["state"] == "unfinished"


def test_other_entries_are_named_with_the_reason_why_they_are_none(made: Path) -> None:
    run = made / "run"
    (run / "notes.txt").touch()
    (run / "logs").mkdir()
    (run / "latest").symlink_to("gone")
    os.mkfifo(run / "step-00000099")
    shutil.copytree(made / "stock", run / "ckpt-0007")
    (made / "stock").rename(run / "checkpoint-7")
    done = pyckpt("ls", run, "--json")
    assert done.status == 0
    reasons = {entry["name"]: entry["reason"] for entry in done.json if entry["step"] is None}
    assert reasons == {
        "notes.txt": "a file",
        "logs": "a directory without .metadata",
        "latest": "a link to nothing",
        "step-00000099": "a file",
        "checkpoint-7": "a checkpoint of another name: --naming 'checkpoint-{}' lists it",
        "ckpt-0007": "a checkpoint of another name: --naming 'ckpt-{:04d}' lists it",
    }
    listed = pyckpt("ls", run, "--naming", "ckpt-{:04d}", "--json").json
    assert [entry["name"] for entry in listed if entry["step"] == 7] == ["ckpt-0007"]


def test_other_programs_names_are_listed_if_their_pattern_is_given(made: Path) -> None:
    (made / "stock").rename(made / "checkpoint-7")
    done = pyckpt("ls", made, "--naming", "checkpoint-{}", "--json")
    assert done.status == 0
    assert (done.json[0]["step"], done.json[0]["state"]) == (7, "valid")
    assert pyckpt("ls", made, "--naming", "checkpoint").status == 2


def test_names_cannot_write_to_the_terminal(made: Path) -> None:
    evil = "\x1b]0;owned\x07\nstep-00000050"
    (made / "run" / evil).mkdir()
    (made / "run" / os.fsdecode(b"\xff\xfe")).mkdir()
    done = pyckpt("ls", made / "run")
    assert done.status == 0
    assert "\x1b" not in done.out
    assert "\\x1b]0;owned\\x07\\nstep-00000050" in done.out
    assert "\\udcff" in done.out
    names = [entry["name"] for entry in pyckpt("ls", made / "run", "--json").json]
    assert evil in names


def test_where_there_is_nothing_to_list(made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert pyckpt("ls", tmp_path / "empty").status == 1
    gone = pyckpt("ls", tmp_path / "gone")
    assert gone.status == 2
    assert "No such file" in gone.err
    itself = pyckpt("ls", made / "ours")
    assert itself.status == 2
    assert "inspect it" in itself.err
