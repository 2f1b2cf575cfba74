"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Level"]

Level = Literal["good", "note", "warning", "bad"]
"""``"bad"``: saves or loads fail. ``"warning"``: they are slower, less safe or untested.
``"note"``: worth knowing."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    about: str
    level: Level
    found: str
    advice: str = ""
    """What to do; empty if there is nothing."""
