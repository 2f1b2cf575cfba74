"""The recipe: killed, resumed, and loaded by transformers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/integrations/recipe.py"


def command(run: Path, steps: int) -> list[str]:
    return [sys.executable, "-W", "ignore", str(SCRIPT), str(run), str(steps)]


def test_the_recipe_resumes_and_leaves_a_model_that_transformers_loads(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "whole", 12), check=True, capture_output=True, text=True
    )
    expected = done.stdout.splitlines()
    process = subprocess.Popen(command(tmp_path / "run", 12), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("step 11 "):
        assert line, "it ended before that"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    done = subprocess.run(command(tmp_path / "run", 12), check=True, capture_output=True, text=True)
    resumed = done.stdout.splitlines()
    # It saved at steps 5 and 10; the save of a step may have been under way, or left out for one.
    assert resumed[0].split()[1] in ("1", "6", "11")
    assert resumed[:-1] == expected[-len(resumed) : -1]

    models = []
    for run in ("whole", "run"):
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / run / "model", output_loading_info=True
        )
        assert not any(said.values()), said
        models.append(model.state_dict())
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_the_document_shows_this_script() -> None:
    assert SCRIPT.read_text() in (ROOT / "docs/integrations/recipe.md").read_text()
