"""The scripts in the documentation are those in examples/, and run: begun, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {"transformers": "transformers_trainer", "accelerate": "accelerate_loop"}


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_the_document_has_the_script(name: str) -> None:
    document = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    script = (ROOT / "examples" / "integrations" / f"{SCRIPTS[name]}.py").read_text()
    assert f"```python\n{script}```" in document


@pytest.mark.parametrize(
    ("name", "said", "last"),
    [
        ("transformers", "'epoch': '0.625'", "step-00000064"),
        ("accelerate", "step 30:", "checkpoints/checkpoint_8"),
    ],
)
def test_killed_and_run_again(name: str, said: str, last: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / "integrations" / f"{SCRIPTS[name]}.py"
    command = [sys.executable, "-u", str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}

    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as first:
        assert first.stdout is not None
        heard = ""
        while said not in heard:
            character = first.stdout.read(1)
            assert character, heard
            heard += character
        first.kill()
    assert first.returncode == -signal.SIGKILL
    assert list(tmp_path.glob("**/.metadata"))
    assert not (tmp_path / last).exists()
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / last / ".metadata").exists()
    if name == "transformers":
        assert "'epoch': '0.3125'" not in again.stdout + again.stderr
    else:
        assert "resumed after step" in again.stdout
