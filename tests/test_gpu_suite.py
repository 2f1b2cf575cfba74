"""The GPU suite where there is no GPU: its code runs, and it says that it measured nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_benchmark_walks_through_its_code_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    results = tmp_path / "results"
    done = run(
        sys.executable,
        ROOT / "benchmarks" / "gpu.py",
        "--cpu",
        *("--dir", tmp_path / "scratch", "--results", results),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert "left out for want of time" not in done.stdout
    for section in (
        "staging",
        "torn",
        "guard",
        "syncs",
        "training",
        "storage",
        "resume",
        "offload",
    ):
        assert f"section {section} took" in done.stdout
    assert done.stdout.count("NOTHING") == 2
    assert not results.exists()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails() -> None:
    benchmark = run(sys.executable, ROOT / "benchmarks" / "gpu.py")
    assert benchmark.returncode == 1
    assert benchmark.stdout.startswith("no GPU")
    suite = run("bash", ROOT / "scripts" / "gpu.sh", PYTHON=sys.executable)
    assert suite.returncode == 1
    assert "needs a GPU" in suite.stderr
    assert "finds no GPU" in suite.stderr


SKIPS = "import pytest\npytestmark = pytest.mark.cuda\n"


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (SKIPS + "def test_it(): pass\n", 0, "1 ran, 0 skipped"),
        (SKIPS + "def test_it(): pytest.skip('no')\n", 1, "0 ran, 1 skipped"),
        (SKIPS + "pytest.skip('no', allow_module_level=True)\n", 1, "0 ran, 1 skipped"),
        (SKIPS + "def test_it(): assert False\n", 1, "1 ran, 0 skipped"),
        ("def test_it(): pass\n", 1, "0 ran, 0 skipped"),
    ],
)
def test_a_skipped_test_is_no_pass(tmp_path: Path, content: str, code: int, says: str) -> None:
    test = tmp_path / "test_content.py"
    test.write_text(content)
    done = run(
        sys.executable,
        ROOT / "scripts" / "gpu_tests.py",
        # Without the repository's conftest, which is for its own tests.
        *(
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            ROOT / "pyproject.toml",
            "--rootdir",
            tmp_path,
            test,
        ),
    )
    assert says in done.stdout, done.stdout + done.stderr
    assert done.returncode == code
