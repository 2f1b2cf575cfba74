"""Results that add up: a run adds itself to those that are in the file.

Ten thousand cases, or an hour for each parser, are more than one run may have time for. The code
may change between two runs, so each says by which code it ran.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torture.results import ROOT

__all__ = ["added", "code", "next_seed", "runs_in", "summed"]


def code(*folders: str) -> str:
    """Names the contents of folders, as committed. It stays the same where a commit is made again
    on another one, as a rebase does."""
    command = ["git", "-C", str(ROOT), "rev-parse", *(f"HEAD:{folder}" for folder in folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "-".join(tree[:10] for tree in done.stdout.split()) if done.returncode == 0 else ""


def runs_in(path: Path) -> list[dict[str, Any]]:
    """The runs that a result is made of; none if there is no result."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text()).get("runs", [])
    return found


def next_seed(runs: Sequence[Mapping[str, Any]]) -> int:
    """One that no run had: it tries other inputs."""
    return 1 + max((int(run["seed"]) for run in runs), default=0)


def added(
    runs: Sequence[dict[str, Any]], run: dict[str, Any], same: Sequence[str] = ("seed", "code")
) -> list[dict[str, Any]]:
    """The runs, with one more. A run that agrees in what is named ``same`` tried the same inputs:
    the new one takes its place."""
    return [*(one for one in runs if any(one.get(key) != run.get(key) for key in same)), run]


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers added up, and mappings of numbers, key by key."""
    total: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping):
                total[key] = dict((Counter(total.get(key, {})) + Counter(value)).most_common())
            else:
                total[key] = total.get(key, 0) + value
    return total
