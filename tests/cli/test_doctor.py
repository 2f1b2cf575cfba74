"""``pyckpt doctor``: what it finds on real directories, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from _command import run
from _filesystems import missing


def levels(diagnosis: dict[str, Any]) -> dict[str, str]:
    return {finding["about"]: finding["level"] for finding in diagnosis["findings"]}


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(path: Path) -> tuple[int, dict[str, Any]]:
        status = run(monkeypatch, "doctor", path, "--json")
        return status, json.loads(capsys.readouterr().out)

    return call


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path, doctor: Any) -> None:
    status, diagnosis = doctor(tmp_path / "not" / "there")
    assert diagnosis["path"] == str(tmp_path)
    found = levels(diagnosis)
    assert found["committing"] == found["locks"] == "good"
    assert {"pyckpt", "torch", "python", "kernel", "memory", "direct I/O"} <= set(found)
    assert status == 0
    assert list(tmp_path.iterdir()) == []


def test_each_warning_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert run(monkeypatch, "doctor", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "the host waits for each kernel" in shown
    assert "-> unset it" in shown


def test_a_file_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(monkeypatch, "doctor", tmp_path / "file") == 2
    assert "not a directory" in capsys.readouterr().err.lower()


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Any]:
    if lack := missing("tmpfs"):
        pytest.skip(f"needs {lack}")
    points: list[Path] = []

    def mount(kind: str, options: str) -> Path:
        point = tmp_path / f"mount{len(points)}"
        point.mkdir()
        subprocess.run(["mount", "-t", kind, "-o", options, kind, str(point)], check=True)
        points.append(point)
        return point

    yield mount
    for point in points:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.root
def test_mounts_that_are_traps(mounted: Any, tmp_path: Path, doctor: Any) -> None:
    status, diagnosis = doctor(mounted("tmpfs", "size=1m,sync"))
    assert status == 0
    assert levels(diagnosis)["file system"] == levels(diagnosis)["mount options"] == "warning"

    status, diagnosis = doctor(mounted("tmpfs", "size=1m,ro"))
    assert status == 1
    assert levels(diagnosis)["mount options"] == levels(diagnosis)["writing"] == "bad"

    full = mounted("tmpfs", "size=8k")
    (full / "all").write_bytes(bytes(8192))
    status, diagnosis = doctor(full)
    assert status == 1
    assert levels(diagnosis)["free space"] == "bad"

    for name in ("lower", "upper", "work"):
        (tmp_path / name).mkdir()
    try:
        layer = mounted(
            "overlay",
            f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work",
        )
    except subprocess.CalledProcessError:
        return  # a kernel without overlays
    assert levels(doctor(layer)[1])["file system"] == "warning"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("injected", "about", "level", "status"),
    [
        ("pwrite64:error=EINVAL", "direct I/O", "warning", 0),
        ("pwrite64:error=EIO", "direct I/O", "bad", 1),
        ("fsync:error=EIO", "committing", "bad", 1),
        ("fsync:error=EINVAL:when=2", "committing", "note", 0),
        ("flock:error=ENOLCK", "locks", "warning", 0),
    ],
)
def test_calls_that_fail(
    tmp_path: Path, injected: str, about: str, level: str, status: int
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    call = injected.split(":")[0]
    command = ["strace", "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={injected}"]
    command += [sys.executable, "-m", "pyckpt", "doctor", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert levels(json.loads(done.stdout))[about] == level
    assert list(tmp_path.iterdir()) == []
