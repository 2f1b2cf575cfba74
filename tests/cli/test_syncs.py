"""``pyckpt syncs``: reports of Nsight Systems as tables and JSON, and when it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from _command import run
from _nsys_export import Export, steps


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return steps(20).write(tmp_path / "before.sqlite"), steps(0).write(tmp_path / "after.sqlite")


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = run(monkeypatch, "syncs", *arguments)
        return status, *capsys.readouterr()

    return call


def test_json(pair: tuple[Path, Path], syncs: Any) -> None:
    before, after = pair
    status, out, _ = syncs(before, "--json")
    assert status == 0
    content = json.loads(out)
    assert content["totals"]["stream_syncs"] == 210
    assert content["ranges"]["optimizer"]["totals"]["d2h_bytes"] == 800
    assert content["syncs"][0]["api"] == "cudaStreamSynchronize"
    status, out, _ = syncs(after, "--against", before, "--range", "optimizer", "--json")
    assert status == 0
    content = json.loads(out)
    assert content["range"] == "optimizer"
    assert {"name": "d2h_copies", "before": 200, "after": 0} in content["totals"]


def test_tables(pair: tuple[Path, Path], syncs: Any) -> None:
    before, after = pair

    def rows(*arguments: object) -> list[list[str]]:
        lines = syncs(*arguments)[1].splitlines()
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]

    shown = rows(before)
    waited = f"{200 * 100e-6:,.3f}"
    assert ["optimizer", "10", "200", "0", "0", "0", waited, "200", "800", "0", "0"] in shown
    assert [f"python3 {0x123}", "cudaStreamSynchronize", "stream", "210", "0.021"] in shown
    assert not any(row[0] == "it step" for row in rows(before, "--range", "optimizer"))
    assert ["stream_syncs", "210", "10", "-200"] in rows(after, "--against", before)


def test_more_synchronisations_than_before_are_bad(pair: tuple[Path, Path], syncs: Any) -> None:
    before, after = pair
    assert syncs(after, "--against", before)[0] == 0
    assert syncs(before, "--against", after)[0] == 1
    assert syncs(before, "--against", before)[0] == 0


def test_errors_are_one_line(pair: tuple[Path, Path], tmp_path: Path, syncs: Any) -> None:
    status, out, err = syncs(tmp_path / "absent.sqlite")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "absent.sqlite" in err
    status, _, err = syncs(pair[0], "--range", "nothing")
    assert status == 2
    assert "no NVTX range is called 'nothing'" in err


def test_names_are_shown_as_they_are(tmp_path: Path, syncs: Any) -> None:
    export = Export()
    export.range("[bold]step[/] \x1b[2J1", 0, 10)
    status, out, _ = syncs(export.write(tmp_path / "report.sqlite"))
    assert status == 0
    assert "[bold]step[/] \\x1b[2J1" in out


@pytest.mark.slow
def test_the_program_itself(pair: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "pyckpt", "syncs", str(pair[0]), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["stream_syncs"] == 210
