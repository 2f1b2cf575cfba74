"""When to save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """When a save is due. The three may be combined; any of them will do.

    Raises:
        ValueError: a number is not positive.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    save_when: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"{self.every_steps = } must be 1 or more.")
        if self.every_minutes is not None and not self.every_minutes > 0:
            raise ValueError(f"{self.every_minutes = } must be positive.")

    def due_at(self, step: int) -> bool:
        """Whether the step alone says so: every rank answers this for itself, and alike."""
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.save_when is not None and bool(self.save_when(step))

    def due_after(self, seconds: float) -> bool:
        """Whether the time since the last save says so. Clocks of ranks differ, so one rank
        answers for all."""
        return self.every_minutes is not None and seconds >= 60 * self.every_minutes
