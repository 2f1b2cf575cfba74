"""When to save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from pyckpt.train.arguments import whole

__all__ = ["Policy"]


@dataclass(frozen=True)
class Policy:
    """When a save is due: if any of the three conditions holds.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a number is not positive.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    save_when: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            whole("every_steps", self.every_steps, least=1)
        if self.every_minutes is not None:
            if not isinstance(self.every_minutes, Real) or isinstance(self.every_minutes, bool):
                raise TypeError(f"every_minutes = {self.every_minutes!r} must be a number.")
            if not self.every_minutes > 0:
                raise ValueError(f"every_minutes = {self.every_minutes!r} must be positive.")
        if self.save_when is not None and not callable(self.save_when):
            raise TypeError(f"save_when = {self.save_when!r} must be a function of a step.")

    @property
    def ever_due(self) -> bool:
        """Whether a save will be due, if training goes on long enough."""
        return (self.every_steps, self.every_minutes, self.save_when) != (None, None, None)

    def due_at(self, step: int) -> bool:
        """Whether a save is due by the step alone, which is the same on every rank."""
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.save_when is not None and bool(self.save_when(step))

    def due_after(self, seconds: float) -> bool:
        """Whether a save is due by the time since the last save. Clocks of ranks differ, so one
        rank decides for all."""
        return self.every_minutes is not None and seconds >= 60 * self.every_minutes
