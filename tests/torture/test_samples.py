"""The samples of CI: each is of a script that is there, and none can hang for ever."""

from __future__ import annotations

import importlib.util
import os
import shlex
from pathlib import Path

import pytest
from _ranks import Pipe, run_child

from torture.samples import SAMPLES, Sample, adopt_orphans, end_children, run

_HANGS = """
import os, signal, subprocess, sys
child = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
beside = subprocess.Popen(child, start_new_session=True, stdout=subprocess.PIPE)
beside.stdout.readline()
print(f"beside {beside.pid}", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_is_of_a_script(name: str) -> None:
    module, *_ = shlex.split(SAMPLES[name].command)
    assert importlib.util.find_spec(module) is not None


def hang(pipe: Pipe, folder: Path) -> list[str]:
    adopt_orphans()
    (folder / "hangs.py").write_text(_HANGS)
    os.environ["PYTHONPATH"] = str(folder)
    wrong = run(Sample("hangs", "hangs"), folder, seed=0, bound=15)
    end_children()
    said = (folder / "hangs.log").read_text()
    beside = int(said.split("beside ")[1].split()[0])
    return [wrong, "there" if Path(f"/proc/{beside}").exists() else "gone"]


@pytest.mark.slow
def test_a_sample_that_hangs_says_where_and_is_ended(tmp_path: Path) -> None:
    wrong, beside = run_child(hang, tmp_path)
    assert "hung for 15 s" in wrong
    assert "hangs.py" in wrong  # by faulthandler
    assert beside == "gone"


def test_a_sample_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('lost')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run(Sample("fails", "fails"), tmp_path, seed=0) == "exit status 1: lost\n"
