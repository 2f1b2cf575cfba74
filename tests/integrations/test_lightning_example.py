"""The documented script: it is the file, and it trains, is killed, and goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyckpt

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/integrations/lightning_trainer.py"


def start(directory: Path, epochs: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), str(epochs)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def output(directory: Path, epochs: int) -> list[str]:
    found, _ = start(directory, epochs).communicate()
    return found.splitlines()


def test_the_document_shows_the_script() -> None:
    document = (ROOT / "docs/integrations/lightning.md").read_text()
    assert f"```python\n{SCRIPT.read_text()}```\n" in document


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = output(tmp_path / "whole", 4)
    assert whole[-1] == "trained 64 steps"
    run = start(tmp_path / "a", 4000)
    assert run.stdout is not None
    lines = [run.stdout.readline().strip() for _ in range(2)]
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert lines == whole[:2]
    with pyckpt.Checkpointer(tmp_path / "a") as checkpointer:
        assert checkpointer.latest() is not None

    # Stopped by a signal in between, it saves where it is.
    run = start(tmp_path / "b", 4000)
    assert run.stdout is not None
    run.stdout.readline()
    run.send_signal(signal.SIGTERM)
    stopped = run.communicate()[0].splitlines()[-1]
    assert run.returncode == 0
    with pyckpt.Checkpointer(tmp_path / "b") as checkpointer:
        latest = checkpointer.latest()
        assert latest is not None
        assert stopped == f"trained {latest.step} steps"

    # Of the first run, all is as if it had not been killed.
    first = output(tmp_path / "c", 2)
    assert first == [*whole[:2], "trained 32 steps"]
    assert output(tmp_path / "c", 4) == whole[2:]
