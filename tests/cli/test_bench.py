"""``pyckpt bench``: it measures, recommends, refuses, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from _command import run

from pyckpt.tools.bench import Settings, WrongBytes, disk
from pyckpt.tools.bench.bench import recommend
from pyckpt.tools.bench.series import Series, interleave

MIB = 1 << 20


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: object) -> tuple[int, str, str]:
        status = run(monkeypatch, "bench", *arguments)
        return status, *capsys.readouterr()

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
def test_it_measures_and_leaves_nothing(tmp_path: Path, command: Any) -> None:
    status, out, err = command(tmp_path, "--size", "16MiB", "--quick", "--json")
    assert status == 0, err
    assert list(tmp_path.iterdir()) == []
    content = json.loads(out)
    names = [series["name"] for series in content["series"]]
    assert len(names) == len(set(names))
    assert {
        "memcpy, one thread",
        "CRC-32, one thread",
        "plain buffered writes",
        "save, 8 threads",
        "load, 8 threads",
        "pyckpt.save",
        "dcp.save, FileSystemWriter",
        "pyckpt.load",
        "dcp.load, FileSystemReader",
    } <= set(names)
    for series in content["series"]:
        rates = series["gigabytes_per_second"]
        assert 0 < rates["slowest"] <= rates["median"] <= rates["fastest"]
        assert len(series["seconds"]) == content["rounds"] == 3
    assert content["settings"]["io_threads"] in (2, 8)
    status, out, _ = command(tmp_path, "--size", "16MiB", "--quick")
    assert status == 0
    assert "pyckpt.configure(" in out or "nothing to configure" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_leaves_nothing_when_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    arguments = [sys.executable, "-m", "pyckpt", "bench", str(tmp_path), "--size", "64MiB"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("save, "):  # it has made files
                break
        assert list(tmp_path.iterdir()) != []
        process.send_signal(number)
        process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f"{disk.PREFIX}left"
    left.mkdir()
    (left / "file").write_bytes(bytes(100))
    with disk.scratch(tmp_path) as other:
        assert not left.exists()
        with disk.scratch(tmp_path):
            assert other.exists()  # another run has it
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("100TB", "are free"),
        ("1kB", "or more"),
        ("much", "not a size"),
        ("5 XB", "not a size"),
    ],
)
def test_it_refuses_before_it_writes(tmp_path: Path, size: str, message: str, command: Any) -> None:
    status, out, err = command(tmp_path, "--size", size)
    assert (status, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_bytes_are_a_bad_answer(
    tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.Checkpoints.save

    def save(self: disk.Checkpoints, name: str, **options: Any) -> None:
        real(self, name, **options)
        self.state["tensor3"][5] += 1

    monkeypatch.setattr(disk.Checkpoints, "save", save)
    status, _, err = command(tmp_path, "--size", "16MiB", "--quick")
    assert status == 1
    assert "tensor3 is not what was saved" in err
    assert list(tmp_path.iterdir()) == []


def test_bare_reads_see_other_bytes(tmp_path: Path) -> None:
    file = disk.BareFile(tmp_path / "file", 3 * disk.BLOCK, threads=2)
    file.write(0)
    file.read(0)
    assert (tmp_path / "file").stat().st_size == 3 * disk.BLOCK
    with open(tmp_path / "file", "r+b") as opened:
        opened.seek(2 * disk.BLOCK)
        opened.write(b"x")
    with pytest.raises(WrongBytes, match=str(2 * disk.BLOCK)):
        file.read(0)


def test_variants_take_turns() -> None:
    ran: list[str] = []
    variants = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    steps: list[str] = []
    series = interleave(variants, size=1, rounds=2, on_step=steps.append)
    assert ran == [*"abc", *"bca", *"cab"]
    assert steps[0] == "a, warming up"
    assert steps[-1] == "b, 2 of 2"
    assert [len(one.seconds) for one in series] == [2, 2, 2]
    one = Series("x", 10**9, (1.0, 4.0, 2.0))
    assert (one.slowest, one.rate, one.fastest) == (0.25, 0.5, 1.0)


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        ({(1, 2): 2.0, (8, 2): 1.02, (16, 2): 1.0}, ""),  # the default is as good
        ({(1, 2): 2.0, (8, 2): 1.2, (16, 2): 1.0}, "pyckpt.configure(io_threads=16)"),
        ({(2, 2): 1.04, (4, 2): 1.0, (8, 2): 1.2}, "pyckpt.configure(io_threads=2)"),
        ({(4, 1): 2, (4, 2): 1, (4, 8): 0.5}, "pyckpt.configure(io_threads=4, slot_bytes=8 << 20)"),
        ({(8, 1): 2, (8, 2): 1, (8, 4): 0.5}, "pyckpt.configure(slot_bytes=4 << 20)"),
    ],
)
def test_the_settings_to_use(seconds: Mapping[tuple[int, int], float], line: str) -> None:
    found = {Settings(n, slot * MIB): taken for (n, slot), taken in seconds.items()}
    assert recommend(found).line == line
