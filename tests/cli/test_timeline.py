"""``pyckpt timeline``: sums and pictures of traces, and what is no trace."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("typer")
from _command import run


def event(name: str, begin: float, end: float, thread: int = 1, **args: object) -> dict[str, Any]:
    """Times are microseconds."""
    return {
        "name": name,
        "ph": "X",
        "ts": begin,
        "dur": end - begin,
        "pid": 5,
        "tid": thread,
        "args": args,
    }


def named(thread: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 5, "tid": thread, "args": {"name": name}}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    events = [
        *(named(1, "MainThread"), named(2, "pyckpt-io-2"), named(3, "pyckpt-io-10")),
        event("write", 1e9, 1e9 + 4e6),
        event("sync", 1e9 + 3e6, 1e9 + 4e6, bytes=10**9),
        event("write", 1e9 + 1e6, 1e9 + 2e6, 2, bytes=10**9),
        event("write", 1e9 + 1e6, 1e9 + 3e6, 3, bytes=2 * 10**9),
        event("wait for \x1b[2J[red]", 1e9, 1e9 + 1e6, 3),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture
def timeline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> tuple[int, str, str]:
        status = run(monkeypatch, "timeline", *arguments)
        return status, *capsys.readouterr()

    return call


def test_sums_by_kind_of_thread(trace: Path, timeline: Any) -> None:
    status, out, _ = timeline(trace, "--json")
    assert status == 0
    content = json.loads(out)
    assert content["seconds"] == pytest.approx(4)
    assert content["threads"] == ["MainThread", "pyckpt-io-2", "pyckpt-io-10"]
    rows = {(row["threads"], row["name"]): row for row in content["rows"]}
    written = rows["pyckpt-io", "write"]
    assert (written["count"], written["bytes"]) == (2, 3 * 10**9)
    assert written["seconds"] == pytest.approx(3)
    assert rows["MainThread", "write"]["bytes"] == 0

    status, out, _ = timeline(trace)
    assert status == 0
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    assert ["pyckpt-io", "write", "2", "3.000", "3 GB", "1.00"] in lines
    assert ["pyckpt-io", "wait for \\x1b[2J[red]", "1", "1.000", "", ""] in lines


@pytest.mark.slow
def test_a_picture(trace: Path, tmp_path: Path, timeline: Any) -> None:
    pytest.importorskip("matplotlib")
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        status, _, err = timeline(trace, "--picture", picture, "--title", "a $save$")
        assert status == 0, err
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    root = ElementTree.parse(pictures[0]).getroot()
    texts = {
        "".join(element.itertext()).strip() for element in root.iter() if "text" in element.tag
    }
    assert {"MainThread", "pyckpt-io-2", "pyckpt-io-10", "write", "sync", "a $save$"} <= texts
    assert timeline(trace, "--picture", tmp_path / "out.png")[0] == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = timeline(trace, "--picture", tmp_path / "out.nothing")
    assert status == 2
    assert "nothing" in err


def test_without_matplotlib(
    trace: Path, tmp_path: Path, timeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = timeline(trace, "--picture", tmp_path / "out.svg")
    assert status == 2
    assert "pip install 'pyckpt[pictures]'" in err


def test_rows_do_not_overlap() -> None:
    from pyckpt.tools.picture import _by_depth, _merged
    from pyckpt.tools.trace import Span, Thread

    thread = Thread(1, 1)
    spans = [
        Span(thread, name, begin, seconds, 0)
        for name, begin, seconds in (("a", 0, 4), ("b", 1, 2), ("c", 1.5, 1), ("d", 3, 1))
    ]
    rows = [[span.name for span in row] for row in _by_depth(spans)]
    assert rows == [["a"], ["b", "d"], ["c"]]
    ticks = [Span(thread, "t", n / 1000, 0.0005, 0) for n in range(1000)]
    assert len(_merged(ticks, 0.01)) == 1
    assert len(_merged(ticks, 0.0001)) == 1000


def test_traces_of_several_ranks(trace: Path, tmp_path: Path, timeline: Any) -> None:
    other = tmp_path / "other.json"
    other.write_text(trace.read_text().replace('"pid": 5', '"pid": 6'))
    content = json.loads(timeline(trace, other, "--json")[1])
    assert content["threads"] == ["MainThread", "pyckpt-io-2", "pyckpt-io-10"] * 2
    assert content["spans"] == 10


@pytest.mark.parametrize(
    "content",
    [
        "",
        "7",
        '{"traceEvents": 7}',
        "[7]",
        "[" * 100_000,
        '[{"ph": "X", "name": "a", "ts": "soon", "dur": 1}]',
        '[{"ph": "X", "name": "a", "ts": NaN, "dur": 1}]',
        '[{"ph": "X", "name": "a", "ts": 1, "dur": -1}]',
        '[{"ph": "X", "ts": 1, "dur": 1}]',
        '[{"ph": "X", "name": "a", "ts": 1, "dur": 1, "args": 7}]',
        '[{"ph": "M", "name": "thread_name"}]',
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str, timeline: Any) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    status, out, err = timeline(path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "trace.json" in err


def test_nothing_recorded_is_bad(tmp_path: Path, timeline: Any) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": []}')
    status, _, err = timeline(path)
    assert status == 1
    assert "nothing was recorded" in err
