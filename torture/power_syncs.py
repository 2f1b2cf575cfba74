"""Whether the check of power failures notices a sync that is missing: each is left out in turn.

A sync that is not noticed is one that nothing relies on, or the check is too weak. `reason_for`
says why nothing does. Where it says nothing, the run fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torture.crash_states import MODELS, Instant, instants, states
from torture.power_checker import Checker, Violation
from torture.power_scenarios import SCENARIOS
from torture.recording import Recording

__all__ = ["Sync", "reason_for", "summed", "unexplained", "without_each_sync"]


@dataclass
class Sync:
    """A sync of a recording, and whether anything relies on it."""

    scenario: str
    call: str
    of: str
    """What was synced, with the parts of its name that differ from run to run left out."""
    after: str
    """The change before it, in the same way."""
    noticed: bool
    by: str = ""
    """What the checker said without it."""


def without_each_sync(name: str, recording: Recording, checker: Checker, seed: int) -> list[Sync]:
    """Leave out each sync of a run, and have the checker look until it objects."""
    found: list[Sync] = []
    for index in recording.syncs:
        sync = recording.operations[index]
        objection = _objection(name, recording, index, checker, seed)
        found.append(
            Sync(
                name,
                sync.call,
                _kind(recording, sync.node),
                _change_before(recording, index),
                objection is not None,
                "" if objection is None else f"{objection.model}: {objection.error[:200]}",
            )
        )
    return found


def _objection(
    name: str, recording: Recording, index: int, checker: Checker, seed: int
) -> Violation | None:
    sync = recording.operations[index]
    # Before it had returned, and after the next one has, nothing is different.
    later = (op for op in recording.operations[index + 1 :] if op.syncs == sync.syncs)
    until = next((op.ended for op in later if op.begun > sync.ended), float("inf"))
    changed = recording.without(index)
    for when in _promising(recording, sync.ended, until):
        instant = Instant(changed, when)
        for model in MODELS:
            generator = random.Random(f"{seed} {name} {when} {model}")
            for state in states(instant, model, generator, samples=0):
                violation = checker.look(SCENARIOS[name], instant, model, state)
                if violation is not None:
                    return violation
    return None


def _promising(recording: Recording, begin: float, end: float) -> list[float]:
    """The instants between two, those first at which an objection is likely: something was just
    promised."""
    told = {op.ended + 0.1 for op in recording.operations if op.mark is not None}
    between = [when for when in instants(recording) if begin < when < end]
    return sorted(between, key=lambda when: (when not in told, when))


def _kind(recording: Recording, node: int) -> str:
    """What a file or directory is, whatever it is called in this run."""
    name = re.sub(r"[0-9a-f]{32}", "ID", recording.names[node])
    name = re.sub(r"step-\d+", "step-N", name)
    name = re.sub(r"__\d+_", "__N_", name)
    name = re.sub(r"generation-\d+", "generation-N", name)
    name = re.sub(r"-\d+-of-\d+", "-N-of-N", name)
    return f"{name}/" if node in recording.directories else name


def _change_before(recording: Recording, index: int) -> str:
    changes = [op for op in recording.operations[:index] if op.bindings or op.change is not None]
    return f"{changes[-1].call} {_kind(recording, changes[-1].node)}" if changes else ""


def summed(syncs: Sequence[Sync]) -> list[dict[str, Any]]:
    """The syncs of a run by what they are of, and the change before each that was not noticed."""
    groups: dict[tuple[str, str], list[Sync]] = {}
    for sync in syncs:
        groups.setdefault((sync.call, sync.of), []).append(sync)
    found = []
    for (call, of), group in sorted(groups.items()):
        unnoticed = [sync for sync in group if not sync.noticed]
        one: dict[str, Any] = {"call": call, "of": of, "left_out": len(group)}
        one["noticed"] = len(group) - len(unnoticed)
        if one["noticed"]:
            one["for_example"] = next(sync.by for sync in group if sync.noticed)
        if unnoticed:
            one["unnoticed_after"] = sorted({sync.after for sync in unnoticed})
        found.append(one)
    return found


_ENDED_EARLY = r"(overwrite-)?killed-(written|described)|failed-save|steps-failed"
_FENCE = (
    "generations tell jobs apart that run at the same time; none runs on after the power failed, "
    "and the next one begins anew"
)
_REASONS = {
    (r"(overwrite-)?(killed|failed)-.*|steps-(killed|killed-early|failed|again)", r"\./", r".*"): (
        "each process syncs the name of the directory, which stays; that of another one covers it"
    ),
    (_ENDED_EARLY, r"(.*/)?__N_ID\.distcp", r"ftruncate .*/__N_ID\.distcp"): (
        "the data of a save that was ended before its commit: no metadata ever names it; of the "
        "saves that commit, the sync is noticed"
    ),
    (_ENDED_EARLY, r"(.*/)?(ckpt|step-N)/", r"ftruncate .*/__N_ID\.distcp"): (
        "the name of such data; or, where the next save syncs before it sweeps that out, the "
        "metadata beside it, which the save that wrote it has synced"
    ),
    (_ENDED_EARLY, r"(.*/)?\.metadata\.ID\.tmp", r"write .*/\.metadata\.ID\.tmp"): (
        "the metadata of a save that was ended before its commit: it is never renamed"
    ),
    (r"overwrite-killed-described|failed-save", "ckpt/", r"unlink ckpt/\.metadata\.ID\.tmp"): (
        "before the remains are swept out, of a commit that another process may not have synced; "
        "here it has, and where it has not (overwrite-killed-renamed) the sync is noticed"
    ),
    ("overwrite-killed-writing", "ckpt/", r"fallocate ckpt/__N_ID\.distcp"): (
        "the same; the save that was killed had made no other change than its data file"
    ),
    (
        r"killed-.*|failed-save|steps-killed-early",
        r"(.*/)?(ckpt|step-N)/",
        r"unlink .*/__N_ID\.distcp|openat ckpt/\.saving",
    ): (
        "the mark of a first save that was ended early: it has synced the mark, and the next save, "
        "which finds it, does so again before it writes; either covers it. That the data between "
        "is removed need not last"
    ),
    (r"(overwrite-)?killed-committed", "ckpt/", r"rename ckpt/\.metadata\.ID\.tmp"): (
        "the commit of a save that was killed, which nobody was promised; before old data is "
        "removed, the next save syncs it again"
    ),
    (r"steps.*|mirror|ranks-steps", r"(run|mirror)/", r"mkdir (run|mirror)/\.pyckpt/"): _FENCE,
    (
        r"steps.*|mirror|ranks-steps",
        r"(run|mirror)/\.pyckpt/",
        r"(write|unlink) (run|mirror)/\.pyckpt/generation-N",
    ): _FENCE,
    (r"steps-(killed|killed-early|failed)", "run/", "mkdir run/step-N/"): (
        "the name of a step whose save was ended before anybody was promised it; a later save of "
        "the same step syncs the name again"
    ),
    (r"steps-(killed-early|again)", "run/", r"unlink run/\.pyckpt/generation-N"): (
        "the name of a step whose directory an earlier process made, and synced"
    ),
    ("ranks-steps", "run/", r"(openat|write|unlink) run/\.pyckpt/generation-N"): (
        "one rank makes the directory of the first step while the other makes that of the "
        "generations; each syncs the directory of both"
    ),
    (
        r"ranks.*",
        r"(.*/)?(ckpt|step-N)/",
        r"(openat|fallocate|ftruncate|pwrite64) .*/__N_ID\.distcp",
    ): (
        "each rank syncs the directory after its own file, so that its name is durable before the "
        "commit; where both files are there by then, the sync of one rank covers both names. What "
        "the other rank has just done to its file is chance"
    ),
    ("export-growing", "export/", r"unlink .*/model\.safetensors"): (
        "the old weights were one file, so no new shard has the name of an old one; that the file "
        "is gone is durable by the next sync, before the index counts"
    ),
    (r"export-(growing|sharded)", "export/", r"rename .*/model-N-of-N\.safetensors"): (
        "no shard of that name was there before, so an index without its shards loads nothing; "
        "that is allowed until the export has returned, which the last sync precedes"
    ),
    (
        r"export-(sharded|config)",
        "export/",
        r"write export/\.pyckpt-export-ID/(model\.safetensors\.index|config)\.json",
    ): (
        "after the removal of an old model, in a first export: there was none; where there is one, "
        "the sync is noticed (export-sharded)"
    ),
    ("export-config", "export/", r"rename export/\.pyckpt-export-ID/config\.json"): (
        "the second export replaces the configuration by the same one; of the first the sync is "
        "noticed"
    ),
    ("export-growing", "export/", r"rename .*/model\.safetensors"): (
        "the sync that follows the removal of the old index covers it; that nothing loads in "
        "between is allowed where an export has several files"
    ),
    ("export-growing", "export/", r"unlink .*/model\.safetensors\.index\.json"): (
        "the new file is there durably, and loaders look for it before they look for an index"
    ),
}
"""Why syncs are not needed: by the scenario, what they are of, and the change before; patterns."""


def reason_for(scenario: str, of: str, after: str) -> str | None:
    """Why nothing relies on a sync that was not noticed; None: not known."""
    for patterns, why in _REASONS.items():
        if all(map(re.fullmatch, patterns, (scenario, of, after))):
            return why
    return None


def unexplained(scenarios: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The syncs that were not noticed, and for which there is no reason.

    Args:
        scenarios: what a run of `torture.power` has written of each.
    """
    return [
        f"{name}: {one['call']} {one['of']} after {after}"
        for name, found in scenarios.items()
        for one in found["syncs"]
        for after in one.get("unnoticed_after", ())
        if reason_for(name, one["of"], after) is None
    ]
