"""`pyckpt.record_timeline`: what is recorded of saves and loads, in Chrome's trace format."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import pyckpt

MIB = 1 << 20


def state() -> dict[str, Any]:
    return {f"w{i}": torch.full((MIB,), float(i)) for i in range(4)} | {"step": 7}


def read(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The spans, and the names of threads, of a trace whose form is checked."""
    trace = json.loads(path.read_text())
    spans, names = [], {}
    for event in trace["traceEvents"]:
        assert event["pid"] == os.getpid()
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
        else:
            assert event["ph"] == "X"
            assert event["ts"] > 0
            assert event["dur"] >= 0
            assert event["name"]
            spans.append(event)
    # The begin and end of spans of a thread are nested, or viewers draw nonsense.
    for thread in {span["tid"] for span in spans}:
        open_ends: list[float] = []
        own = [span for span in spans if span["tid"] == thread]
        for span in sorted(own, key=lambda span: (span["ts"], -span["dur"])):
            end = span["ts"] + span["dur"]
            while open_ends and open_ends[-1] <= span["ts"]:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.002, span  # of rounding
            open_ends.append(end)
    assert {span["tid"] for span in spans} <= set(names)
    return spans, names


def total(spans: list[dict[str, Any]], name: str) -> int:
    return sum(span["args"].get("bytes", 0) for span in spans if span["name"] == name)


def test_a_save_and_a_load(tmp_path: Path) -> None:
    with pyckpt.record_timeline(tmp_path / "trace.json"):
        pyckpt.save(state(), tmp_path / "checkpoint")
        pyckpt.load(state(), tmp_path / "checkpoint")
    spans, names = read(tmp_path / "trace.json")
    found = {(span["name"], span["cat"]) for span in spans}
    for name in ("plan", "write", "commit", "describe", "read", "read metadata"):
        assert (name, "python") in found
    for name in ("copy", "write", "sync", "read"):
        assert (name, "native") in found
    native = [span for span in spans if span["cat"] == "native"]
    size = 4 * 4 * MIB
    assert total(native, "write") >= size
    assert total(native, "read") >= size
    # The phases are the caller's, and the bytes are moved by the engine's threads.
    own = threading.get_native_id()
    assert {s["tid"] for s in spans if s["name"] == "plan"} == {own}
    assert names[own] == threading.current_thread().name
    movers = {names[s["tid"]] for s in native if s["name"] in ("copy", "write", "read")}
    assert all(name.startswith("pyckpt-io-") for name in movers)


def test_an_asynchronous_save(tmp_path: Path) -> None:
    stager = pyckpt.PinnedStager()
    with pyckpt.record_timeline(tmp_path / "trace.json"):
        writer = pyckpt.DirectWriter(tmp_path / "checkpoint", stager=stager)
        dcp.async_save(state(), storage_writer=writer, planner=pyckpt.SavePlanner()).result()
    spans, names = read(tmp_path / "trace.json")
    staged = [s for s in spans if (s["name"], s["cat"]) == ("stage", "native")]
    assert sum(s["args"]["bytes"] for s in staged) >= 4 * 4 * MIB
    stagers = {names[s["tid"]] for s in staged}
    assert stagers <= {threading.current_thread().name} | {
        name for name in names.values() if name.startswith("pyckpt-stage-")
    }
    (commit,) = [s for s in spans if s["name"] == "commit"]
    assert commit["tid"] != threading.get_native_id()


def test_only_one_at_a_time_and_each_its_own(tmp_path: Path) -> None:
    with pyckpt.record_timeline(tmp_path / "first.json"):
        pyckpt.save(state(), tmp_path / "a")
        with (
            pytest.raises(RuntimeError, match="recorded already"),
            pyckpt.record_timeline(tmp_path / "first.json"),
        ):
            raise AssertionError("this block must not run")
    first, _ = read(tmp_path / "first.json")
    pyckpt.save(state(), tmp_path / "b")  # which nobody records
    with pyckpt.record_timeline(tmp_path / "second.json"):
        pass
    assert first
    assert read(tmp_path / "second.json")[0] == []


def test_a_block_that_raises_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), pyckpt.record_timeline(tmp_path / "trace.json"):
        pyckpt.save(state(), tmp_path / "file" / "checkpoint")
    assert read(tmp_path / "trace.json")[0]
    with pyckpt.record_timeline(tmp_path / "again.json"):
        pass


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), pyckpt.record_timeline(tmp_path / "no" / "trace.json"):
        raise AssertionError("this block must not run")
    with pyckpt.record_timeline(tmp_path / "trace.json"):
        pass


def test_a_forked_child_records_for_itself(tmp_path: Path) -> None:
    with pyckpt.record_timeline(tmp_path / "parent.json"):
        pyckpt.save(state(), tmp_path / "a")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                from pyckpt.timeline import named

                with named("of the parent"):
                    pass
                with pyckpt.record_timeline(tmp_path / "child.json"), named("of the child"):
                    pass
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert read(tmp_path / "parent.json")[0]
    events = json.loads((tmp_path / "child.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["of the child"]
    assert {event["pid"] for event in events} == {child}
