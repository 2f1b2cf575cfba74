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
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def output(directory: Path, epochs: int) -> list[str]:
    """What the script itself prints. Lightning prints a table of the model before that."""
    found, _ = start(directory, epochs).communicate()
    return [line for line in found.splitlines() if line.startswith(("epoch ", "trained "))]


def test_the_document_shows_the_script() -> None:
    document = (ROOT / "docs/integrations/lightning.md").read_text()
    assert f"```python\n{SCRIPT.read_text()}```\n" in document


def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    run = start(tmp_path / "a", 4000)
    assert run.stdout is not None
    with pyckpt.Checkpointer(tmp_path / "a") as checkpointer:
        while checkpointer.latest() is None:
            assert run.stdout.readline()
        run.send_signal(signal.SIGKILL)
        run.communicate()
        latest = checkpointer.latest()
        assert latest is not None
        epochs = latest.step // 16 + 2
    again = output(tmp_path / "a", epochs)
    assert again[-1] == f"trained {16 * epochs} steps"
    assert len(again) > 1
    assert output(tmp_path / "whole", epochs)[-len(again) :] == again
