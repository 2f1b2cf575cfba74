"""One case: a scenario under a plan of faults, and what there is to object to."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import struct
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torture import judge, kernel
from torture.scenarios import (
    NEW,
    NEXT,
    OLD,
    OVERLAPPED,
    SCENARIOS,
    Scenario,
    Stage,
    body_of,
    prepare,
    settle,
)
from torture.supervisor import STARVED_MAX_S, Group, Key, Planned, Seen, parse

__all__ = ["BOUND_S", "Case", "Desk", "Verdict", "case_of"]

BOUND_S = 60.0
"""Each phase of a case ends within this, or counts as a hang. The time in which its ranks waited
for a processor that others used is not counted: see `Group.phase`."""


_UNNAMED = ("clone", "mmap")
_SAVES = (
    *("first-save", "next-save", "overwrite"),
    *("save", "dcp-save", "dcp-first-save", "dcp-async-save"),
)
"""Scenarios of one save, and nothing after it whose error could be told."""


@dataclass
class Case:
    """A scenario on so many ranks, and what fails."""

    scenario: str
    size: int
    plan: list[Planned]

    def __str__(self) -> str:
        return f"{self.scenario}@{self.size}/" + ";".join(str(planned) for planned in self.plan)


def case_of(text: str) -> Case:
    """The case that ``str`` made into text."""
    where, _, plan = text.partition("/")
    scenario, _, size = where.partition("@")
    return Case(scenario, int(size), [parse(one) for one in plan.split(";") if one])


@dataclass
class Verdict:
    """How a case ended.

    Attributes:
        hit: whether all of its faults happened.
        objections: what was wrong; empty if nothing.
        outcome: what the callers were told: "ok", "error", "killed", for all ranks.
        seconds: how long the action took.
    """

    hit: bool
    objections: list[str] = field(default_factory=list)
    outcome: str = ""
    seconds: float = 0.0
    hits: list[str] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)


class Desk:
    """What runs cases, one at a time: a store where ranks meet, and a judge, in processes of their
    own, so that this one has no threads.

    Args:
        place: a directory for cases, on a file system of any kind.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._number = 0
        self._store_child, self._store = self._start(_serve_store)
        self._address = self._ask(self._store, None)
        self._judge_child, self._judge = self._start(_serve_judge)

    def _start(self, serve: Any) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                kernel.die_with_parent()
                ours.close()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(1, 2)
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(BOUND_S + STARVED_MAX_S)
        return pid, ours

    def _ask(self, sock: socket.socket, question: Any) -> Any:
        _send(sock, question)
        return _receive(sock)

    def close(self) -> None:
        self._store.close()
        self._judge.close()
        for pid in (self._store_child, self._judge_child):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        shutil.rmtree(self.place, ignore_errors=True)

    # Directories

    def _template(self, scenario: Scenario, size: int) -> Path:
        path = self.place / "templates" / f"{scenario.name}-{size}"
        if not path.exists():
            path.mkdir(parents=True)
            # Made where cases run, as checkpoints know their path.
            stage = self._stage(size)
            group = Group(size, prepare(scenario, stage), root=str(stage.root))
            seen = group.phase(0, time.monotonic() + BOUND_S)
            group.close()
            if any(one != Seen("said", ("ok", None)) for one in seen):
                raise RuntimeError(f"{scenario.name}: {seen}")
            shutil.rmtree(path)
            shutil.copytree(stage.root, path)
        return path

    def _stage(self, size: int, *, fresh: bool = True) -> Stage:
        root = self.place / "case"
        if fresh:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
        self._number += 1
        return Stage(root, size, self._address, f"case{self._number}")

    # Running

    def calls(self, scenario: Scenario, size: int) -> list[Key]:
        """The calls of a run that nothing disturbs."""
        template = self._template(scenario, size)
        stage = self._stage(size)
        shutil.copytree(template, stage.root, dirs_exist_ok=True)
        group = Group(size, body_of(scenario, stage), root=str(stage.root), record=True)
        try:
            seen = group.phase(0, time.monotonic() + BOUND_S)
        finally:
            group.close()
        if any(one.kind != "said" or one.value[0] != "ok" for one in seen):
            raise RuntimeError(f"{scenario.name}@{size}: {seen}")
        if lacks := lacking(scenario, group.calls):
            raise RuntimeError(f"{scenario.name}@{size}: {lacks}")
        return group.calls

    def run(self, case: Case) -> Verdict:
        """Run a case, and judge it."""
        scenario = SCENARIOS[case.scenario]
        template = self._template(scenario, case.size)
        stage = self._stage(case.size)
        shutil.copytree(template, stage.root, dirs_exist_ok=True)
        plan = [Planned(one.fault, one.key, one.after) for one in case.plan]
        group = Group(case.size, body_of(scenario, stage), root=str(stage.root), plan=plan)
        begun = time.monotonic()
        try:
            first = group.phase(0, begun + BOUND_S)
            verdict = Verdict(
                all(one.hit for one in plan),
                outcome=_outcome(first),
                seconds=time.monotonic() - begun,
                hits=[one.hit for one in plan],
                said=[one.value for one in first],
            )
            if not verdict.hit:
                return verdict
            found = self._ask(self._judge, (scenario.name, str(stage.root), False))
            verdict.objections = _object(scenario, plan, first, found)
            again: list[Seen] | None = None
            if _can_go_on(first) and not (_torch_may_fail(plan) and "error" in verdict.outcome):
                group.go_on()
                again = group.phase(1, time.monotonic() + BOUND_S)
        finally:
            group.close()
        who = "the next call"
        if again is None or _needs_a_new_job(plan, again):
            who = "the next job"
            stage = self._stage(case.size, fresh=False)
            group = Group(case.size, settle(scenario, stage), root=str(stage.root))
            try:
                again = group.phase(0, time.monotonic() + BOUND_S)
            finally:
                group.close()
            verdict.objections += _object_to_resume(scenario, again, found)
        verdict.objections += [
            f"{who}, rank {rank}: {one}"
            for rank, one in enumerate(again)
            if one.kind != "said" or one.value[0] != "ok"
        ]
        if not verdict.objections:
            end = self._ask(self._judge, (scenario.name, str(stage.root), True))
            verdict.objections += _object_to_end(scenario, again, end)
        return verdict


_SEVERAL = 3
"""A data file is written and read in at least so many pieces, or faults between these are not
tried."""
_IN_PIECES = {
    "run": ("pwrite64",),
    "plain": ("pwrite64",),
    "load": ("pread64",),
    "export": ("pread64", "pwrite64"),
    "prune": (),
}


def lacking(scenario: Scenario, calls: Sequence[Key]) -> str:
    """What a run that nothing disturbs should have done, and has not; empty if nothing."""
    for name in _IN_PIECES[scenario.kind]:
        most = max((key.n for key in calls if key.name == name), default=0)
        if most < _SEVERAL:
            return f"no file has {_SEVERAL} calls of {name}, but {most}"
    made = {key.name for key in calls}
    return "".join(f"no {name}" for name in scenario.makes if name not in made)


def _outcome(seen: Sequence[Seen]) -> str:
    kinds = {one.value[0] if one.kind == "said" else one.kind for one in seen}
    return "+".join(sorted(kinds))


def _can_go_on(seen: Sequence[Seen]) -> bool:
    """Whether all ranks are there, and still go together."""
    return all(
        one.kind == "said" and not (one.value[0] == "error" and one.value[1][0] == "RanksLost")
        for one in seen
    )


def _needs_a_new_job(plan: Sequence[Planned], again: Sequence[Seen]) -> bool:
    """Whether the ranks say so, or a fault killed one after it had said how the action ended."""
    if any(one.kind == "killed" for one in again):
        return any(one.fault.kind == "kill" for one in plan)
    return any(one.kind == "said" and one.value and one.value[0] == "restart" for one in again)


def _torch_may_fail(plan: Sequence[Planned]) -> bool:
    """Whether memory or threads were refused. Torch needs some, too, and where it gets none on one
    rank, the ranks' next calls do not fit together."""
    return any(one.hit.split(":")[1].startswith(_UNNAMED) for one in plan)


# What to object to


def _object(
    scenario: Scenario, plan: Sequence[Planned], seen: Sequence[Seen], found: Any
) -> list[str]:
    """After the action."""
    objections = []
    kills = {int(one.hit.split(":")[0]) for one in plan if one.fault.kind == "kill"}
    # Memory and threads that torch lacks give errors of its own, which name nobody.
    hurt = {
        int(one.hit.split(":")[0])
        for one in plan
        if one.fault.kind in ("error", "stays") and not one.hit.split(":")[1].startswith(_UNNAMED)
    }
    for rank, one in enumerate(seen):
        if one.kind == "harness":
            objections.append(f"rank {rank} raised what no caller expects: {one.value}")
        elif one.kind == "hung":
            objections.append(f"rank {rank} hung")
        elif one.kind in ("killed", "died") and rank not in kills:
            objections.append(f"rank {rank} crashed: {one}")
    told = {rank: one.value for rank, one in enumerate(seen) if one.kind == "said"}
    good = [rank for rank, (kind, _) in told.items() if kind == "ok"]
    bad = [rank for rank, (kind, _) in told.items() if kind == "error"]
    if good and bad and not kills:
        objections.append(f"ranks {good} were told of success, and {bad} of {told[bad[0]][1]}")
    if bad and not kills and len(seen) > 1 and hurt and not _torch_may_fail(plan):
        named = {name for rank in bad for name in told[rank][1][2]}
        if not named & hurt:
            objections.append(f"no error names rank {sorted(hurt)}: {told[bad[0]][1]}")
    if kills and bad and (scenario.kind == "run" or scenario.name == "restore"):
        objections += _object_to_names(plan, kills, {rank: told[rank][1] for rank in bad})
    if "wrong" in found:
        return [*objections, found["wrong"]]
    if scenario.name == "overlapped":
        return objections + _object_to_overlapped(told, found["content"])
    objections += _object_to_content(scenario, {rank: told[rank][1] for rank in good}, found)
    if len(bad) == len(seen):
        objections += _object_to_failure(scenario, [told[rank][1] for rank in bad], found)
    if scenario.name == "restore" and any(one.fault.kind == "stays" for one in plan):
        # What cannot be read in several attempts is passed over for the one before.
        older = f"loaded {(1, OLD)}"
        objections = [one for one in objections if one != older]
    return objections


def _object_to_names(
    plan: Sequence[Planned], kills: Collection[int], errors: Mapping[int, Any]
) -> list[str]:
    """After a kill, each survivor that is told an error by a Checkpointer is told who is missing:
    by an error that names a killed rank, and as missing nobody who lives. Another fault may have
    failed the action before, or on another rank; its error names the rank of that fault. Of stock
    DCP's collectives nothing is demanded: they say no more than that a connection was closed. Nor
    is a name demanded of a survivor that can start no thread any more: it asks who is missing in
    one, so that a store that does not answer keeps it for a bounded time."""
    others = {int(one.hit.split(":")[0]) for one in plan if one.fault.kind != "kill"}
    threadless = {
        int(one.hit.split(":")[0])
        for one in plan
        if one.fault.kind == "stays" and ":(thread):" in one.hit
    }
    objections = []
    for rank, error in errors.items():
        if rank in threadless and not error[2]:
            continue
        name, named = error[0], set(error[2])
        if not named & {*kills, *others}:
            objections.append(f"rank {rank}'s error names no rank that was killed: {error}")
        elif name == "RanksLost" and not others and named - set(kills):
            objections.append(f"rank {rank}'s error blames {sorted(named - set(kills))}: {error}")
    return objections


def _object_to_content(scenario: Scenario, results: Mapping[int, Any], found: Any) -> list[str]:
    if scenario.kind == "load":
        right: tuple[Any, ...] = ((2, NEW),) if scenario.name == "restore" else (OLD,)
        return [f"loaded {one}" for one in results.values() if one not in right]
    content = found["content"]
    if scenario.kind == "run":
        old = {1: OLD} if scenario.earlier else {}
        ((step, _),) = scenario.saves.items()
        allowed = [old, {**old, step: NEW}]
        new = content.get(step) == NEW
        if scenario.prunes:
            allowed.append({step: NEW})
        objections = [] if content in allowed else [f"the directory holds {content}"]
        if results and not new:
            objections.append(f"success was told, and the directory holds {content}")
        if scenario.mirror:
            there = found["mirror"]
            if there not in (old, {**old, step: NEW}, {step: NEW}):
                objections.append(f"the mirror holds {there}")
            if results.get(0) and there.get(step) != NEW:
                objections.append(f"the mirror was said to be filled, and holds {there}")
        return objections
    if scenario.kind == "plain":
        allowed_values = (OLD if scenario.earlier else None, NEW)
        if content not in allowed_values:
            return [f"the directory holds {content}"]
        return [f"success was told, and it holds {content}"] if results and content != NEW else []
    if scenario.kind == "export":
        if content not in (None, OLD, NEW):
            return [f"the export holds {content}"]
        return [f"success was told, and it holds {content}"] if results and content != NEW else []
    return [] if content in ({1: OLD, 2: NEW}, {2: NEW}) else [f"the directory holds {content}"]


def _object_to_failure(scenario: Scenario, told: Sequence[Any], found: Any) -> list[str]:
    """Where all ranks were told that a save failed: it committed nothing, unless they were told
    that it is not durable, or lost each other."""
    if scenario.name not in _SAVES:
        return []
    # DCP's own error has the class of ours in its text.
    if any(
        kind in ("NotDurable", "RanksLost") or "pyckpt.errors.NotDurable" in text
        for kind, _, _, text in told
    ):
        return []
    old: Any = OLD if scenario.earlier else None
    if scenario.kind == "run":
        old = {1: OLD} if scenario.earlier else {}
    if found["content"] == old:
        return []
    return [f"the save was said to have failed, and the directory holds {found['content']}"]


def _object_to_overlapped(told: Mapping[int, Any], content: Mapping[int, int]) -> list[str]:
    """After saves that overlap, of which the newest two are kept. Whoever was told an error was
    told, too, which saves were committed before."""
    right = {1: OLD, **OVERLAPPED}
    objections = []
    if any(right.get(step) != value for step, value in content.items()) or not (
        len(content) >= 2 or content == {1: OLD}
    ):
        objections.append(f"the directory holds {content}")
    for rank, (kind, value) in told.items():
        if kind == "ok" and value != list(OVERLAPPED):
            objections.append(f"rank {rank} was told of success, and of commits of {value}")
        objections += [
            f"rank {rank} was told of a commit of step {step}; there is {content}"
            for step in (value if kind == "ok" else value[4])
            # It may have been removed for two that are newer.
            if step not in content and sum(one > step for one in content) < 2
        ]
    return objections


def _object_to_resume(scenario: Scenario, seen: Sequence[Seen], found: Any) -> list[str]:
    """After the next job has resumed from what the action left."""
    if scenario.kind != "run" or "wrong" in found:
        return []
    newest = max({**found["content"], **found.get("mirror", {})}, default=None)
    return [
        f"rank {rank} resumed from {one.value[1]}, and not from {newest}"
        for rank, one in enumerate(seen)
        if one.kind == "said" and one.value[0] == "ok" and one.value[1] != newest
    ]


def _object_to_end(scenario: Scenario, seen: Sequence[Seen], found: Any) -> list[str]:
    """After all."""
    if "wrong" in found:
        return [f"in the end: {found['wrong']}"]
    objections = [f"in the end there is a stray {name}" for name in found["strays"]]
    content = found["content"]
    if scenario.kind == "load":
        results = {rank: one.value[1] for rank, one in enumerate(seen)}
        return objections + _object_to_content(scenario, results, found)
    if scenario.kind == "run":
        right = content.get(scenario.next_step) == NEXT and len(content) <= 2
        if scenario.mirror and found["mirror"] != {3: NEXT}:
            objections.append(f"in the end the mirror holds {found['mirror']}")
    elif scenario.kind == "prune":
        right = content == {2: NEW}
    else:
        right = content == NEXT
    return objections if right else [*objections, f"in the end there is {content}"]


# Processes beside


def _serve_store(sock: socket.socket) -> None:
    _receive(sock)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    _send(sock, f"127.0.0.1:{store.port}")
    while True:
        _receive(sock)


def _serve_judge(sock: socket.socket) -> None:
    while True:
        name, root, is_over = _receive(sock)
        try:
            found = _find(SCENARIOS[name], Path(root), is_over)
        except judge.Wrong as error:
            found = {"wrong": str(error)}
        except BaseException:
            found = {"wrong": traceback.format_exc()[-2000:]}
        _send(sock, found)


def _find(scenario: Scenario, root: Path, is_over: bool) -> dict[str, Any]:
    run, plain, export = root / "run", root / "checkpoint", root / "export"
    found: dict[str, Any] = {"strays": []}
    if scenario.nodes:
        disks = sorted(root.glob("disk-*"))
        found["content"] = judge.whole_node_local_run(disks, root.parent / "whole", is_over=is_over)
        if is_over:
            strays = [judge.strays(disk / "run", run=True, node=True) for disk in disks]
            found["strays"] = [
                f"{disk.name}/{name}"
                for disk, names in zip(disks, strays, strict=True)
                for name in names
            ]
    elif scenario.kind == "export":
        found["content"] = judge.exported(export)
        if is_over:
            found["strays"] = judge.strays_of_export(export)
    elif scenario.kind == "plain" or (scenario.kind == "load" and scenario.name != "restore"):
        found["content"] = judge.checkpoint(plain)
        if is_over:
            found["strays"] = judge.strays(plain, run=False)
    else:
        found["content"] = judge.whole_run(run)
        if is_over:
            found["strays"] = judge.strays(run, run=True)
        if scenario.mirror:
            found["mirror"] = judge.whole_run(root / "mirror")
            if is_over:
                found["strays"] += judge.strays(root / "mirror", run=True)
    return found


def _send(sock: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    sock.sendall(struct.pack("=I", len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = sock.recv(count - len(data))
            if not piece:
                with suppress(OSError):
                    sock.close()
                raise EOFError
            data += piece
        return data

    (length,) = struct.unpack("=I", exactly(4))
    return pickle.loads(exactly(length))
