"""The benchmarks run to their end, on states too small to measure anything."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("save", ["large", "checksum"]),
        ("load", ["large", "verify"]),
        ("stall", ["large", "overlap"]),
        ("checkpointer", []),  # all
        ("scale", []),
        ("tiers", ["commit", "upload"]),
        ("frozen", []),
    ],
)
def test_it_runs_to_its_end(tmp_path: Path, name: str, sections: list[str]) -> None:
    pytest.importorskip("rich")
    output = tmp_path / "results.json"
    script = BENCHMARKS / f"{name}.py"
    options = ["--quick", "--rounds", "1", "--size-mib", "16", "--output", output]
    options += [f"--only={section}" for section in sections]
    done = subprocess.run(
        [sys.executable, script, "--dir", tmp_path / "scratch", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # which says that bytes were compared
    content = json.loads(output.read_text())
    assert not any(note.startswith("cut off") for note in content["notes"])
    assert content["results"]
    if content["machine"]["fio"] is not None:
        assert all(target["value"] is not None for target in content["targets"])
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("width", [50, 200])
def test_tables_show_all_of_the_names(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Of variants and of metrics, on a terminal that is too narrow for them, too."""
    console = pytest.importorskip("rich.console")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _common import Report

    shown = io.StringIO()
    report = Report("name", {}, {}, console=console.Console(width=width, file=shown))
    metrics = {f"m{i}": (f"metric-{i}", float) for i in range(10)}
    report.add("group", {name: [dict.fromkeys(metrics, 1.5)] for name in ("stock", "pyckpt")})
    report.table("title", "group", metrics)
    words = shown.getvalue().split()
    assert {"stock", "pyckpt", *(heading for heading, _ in metrics.values())} <= set(words)
    assert sum("1.5" in word for word in words) == 20


def test_a_peer_that_raises_is_left_out_and_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    console = pytest.importorskip("rich.console")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _common import Sample, Variant, interleave

    runs: dict[str, int] = {}

    def variant(name: str, fails_at: int, *, peer: bool) -> Variant:
        def run() -> Sample:
            runs[name] = runs.get(name, 0) + 1
            if runs[name] == fails_at:
                raise OSError("Too many open files")
            return {"seconds": 1.0}

        return Variant(name, run=run, peer=peer)

    def measured(*variants: Variant) -> tuple[list[str], dict[str, list[Sample]]]:
        failed: list[str] = []
        seen: list[dict[str, list[Sample]]] = []
        interleave(
            variants,
            3,
            before=lambda: None,
            console=console.Console(file=io.StringIO()),
            title="",
            after_round=seen.append,
            peer_failed=lambda name, error: failed.append(name),
        )
        return failed, seen[-1]

    failed, samples = measured(
        variant("ours", 0, peer=False),
        variant("at once", 1, peer=True),
        variant("later", 3, peer=True),
    )
    assert failed == ["at once", "later"]
    assert {name: len(taken) for name, taken in samples.items()} == {"ours": 3, "later": 1}
    with pytest.raises(OSError, match="Too many"):
        measured(variant("ours, too", 1, peer=False))


@pytest.mark.parametrize("once", [True, False])
def test_a_stagers_copies_are_let_go_of_outside_of_its_call(
    monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    """Where it serves one save, the next call finds another that has no copy to free."""
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _savers

    made: list[str] = []

    class Stager:
        def __init__(self, options: object) -> None:
            made.append("made")

        def stage(self, state: object) -> object:
            made.append("staged")
            return state

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(_savers, "DefaultStager", Stager)
    monkeypatch.setattr(_savers, "stagers_serve_once", lambda: once)
    options = _savers.StagingOptions(False, False, False, False)
    stagers = _savers.DefaultStagers(options)
    for number in range(2):
        stagers.let_go()
        made.clear()
        stagers.stage({})
        assert made == (["made", "staged"] if not once and number == 0 else ["staged"])
    stagers.let_go()
    assert made == (["staged", "closed", "made"] if once else ["staged"])


LINES = BENCHMARKS / "lines"


def _weights_of(program: str, directory: Path, *, stop_at: int = 0) -> str:
    """The hash of the final weights that a program of `benchmarks/lines` prints, on two ranks."""
    pytest.importorskip("lightning")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, LINES / f"{program}.py", directory, "300"],
        capture_output=True,
        text=True,
        env={**os.environ, "STOP_AT": str(stop_at), "OMP_NUM_THREADS": "1"},
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith("weights ")] or [""]
    assert line, done.stdout + done.stderr
    return line


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _weights_of("plain_loop_after", tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    "program", sorted(path.stem for path in LINES.glob("[!_]*.py")), ids=lambda name: name
)
def test_programs_whose_lines_are_counted_stop_and_resume(
    tmp_path: Path, undisturbed: str, program: str
) -> None:
    assert _weights_of(program, tmp_path, stop_at=12) != undisturbed
    kept = len([entry for entry in tmp_path.iterdir() if entry.name.startswith("step-")])
    assert 1 <= kept <= 3
    assert _weights_of(program, tmp_path) == undisturbed
