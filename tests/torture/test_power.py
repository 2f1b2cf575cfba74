"""The whole of it, on one small run: recorded, replayed, looked at; and without its syncs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from torture import results
from torture.power import all_of, report
from torture.power_scenarios import where
from torture.power_syncs import unexplained
from torture.recording import Recording, record


def recorded(name: str, folder: Path) -> Recording:
    runs = {name: where(folder, name)}
    command = [sys.executable, "-m", "torture.power_scenarios", str(folder), name]
    return record(command, runs, folder / "log")[name]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_first_save_needs_each_of_its_syncs(tmp_path: Path) -> None:
    found = all_of("first-save", recorded("first-save", tmp_path), seed=1)
    assert found.violations == []
    assert found.tally.states > 20
    assert [sync.of for sync in found.syncs if not sync.noticed] == []
    assert len(found.syncs) == 6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_directory_that_another_rank_made_again_is_durable(tmp_path: Path) -> None:
    """Its inode is that of the directory before it, of whose name rank 0 knew that it is synced."""
    found = report("ranks-remade", recorded("ranks-remade", tmp_path), seed=1)
    assert found["first_violations"] == []
    assert found["states"] > 100
    assert unexplained({"ranks-remade": found}) == []


def test_a_sync_that_is_not_noticed_and_has_no_reason_is_told() -> None:
    unknown = {"call": "fsync", "of": "ckpt/", "unnoticed_after": ["rename ckpt/.metadata.ID.tmp"]}
    assert unexplained({"a": {"syncs": [unknown]}}) == [
        "a: fsync ckpt/ after rename ckpt/.metadata.ID.tmp"
    ]


def test_only_a_run_of_the_same_code_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"commit": "abc", "changed": False}
    monkeypatch.setattr(results, "head", lambda: now)
    path = tmp_path / "power.json"
    assert results.earlier(path, "scenarios", seed=1) == {}
    results.write("power", {"seed": 1, "scenarios": {"a": 1}}, path)
    assert results.earlier(path, "scenarios", seed=1) == {"a": 1}
    assert results.earlier(path, "scenarios", seed=2) == {}
    now["changed"] = True
    assert results.earlier(path, "scenarios", seed=1) == {}
    now.update(changed=False, commit="def")
    assert results.earlier(path, "scenarios", seed=1) == {}
