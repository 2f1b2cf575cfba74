"""What a run of these scripts leaves: counts, and the code and machine they hold for."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import pyckpt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "torture" / "results"


def head() -> dict[str, Any]:
    """Date, commit, machine and releases.

    ``commit`` is that at which this process began, and ``changed`` whether files differed from it
    then, but for results: what runs was imported then, and a long run may outlive its commit.
    """
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _COMMIT,
        "changed": _CHANGED,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "pyckpt": pyckpt.__version__,
    }


def write(name: str, content: Mapping[str, Any], output: Path | None = None) -> Path:
    """Writes ``content`` below :func:`head`, as JSON.

    Args:
        name: The script's, without ``.py``.
        output: Where to, if not ``torture/results/NAME.json``.
    """
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head(), **content}, indent=2) + "\n")
    return path


def earlier(path: Path, key: str, **settings: Any) -> dict[str, Any]:
    """What an earlier run of the same, unchanged code has left under ``key``, so that a run that
    was stopped can go on; nothing if its settings were others."""
    now = head()
    if now["changed"] or not path.exists():
        return {}
    there: dict[str, Any] = json.loads(path.read_text())
    same = {"commit": now["commit"], "changed": False, **settings}
    return dict(there[key]) if all(there.get(what) == value for what, value in same.items()) else {}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # unpacked sources, or no git
    return done.stdout.strip()


_COMMIT = _git("rev-parse", "HEAD")
_CHANGED = bool(
    _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!torture/results")
)
