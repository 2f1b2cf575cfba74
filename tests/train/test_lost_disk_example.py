"""examples/lost_disk.py, which checks what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/lost_disk.py"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "file"])
def test_it_resumes_from_the_bucket_bit_for_bit(tmp_path, place):
    if place == "s3":
        pytest.importorskip("moto.server")
    arguments = [] if place == "s3" else [(tmp_path / "mirror").as_uri()]
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit for bit" in done.stdout
