"""The names of checkpoints' directories, and the steps that names stand for."""

from __future__ import annotations

import re

__all__ = ["DEFAULT", "Naming"]

_PLACE = re.compile(r"\{(?::0([1-9][0-9]?)d)?\}")
_NUMBERED = re.compile(r"(.*?)(0*)([0-9]+)")
_STEP_END = 1 << 63  # ranks tell each other steps as 64-bit integers
_NAME_BYTES = 255


class Naming:
    """How the directory of a step's checkpoint is called.

    Args:
        pattern: a name with ``{}`` in the place of the step, as in ``"checkpoint-{}"``; or with
            ``{:08d}``, which fills the number up with zeros.

    Raises:
        TypeError: ``pattern`` is no string.
        ValueError: it has no such place, or several; or it is no name of a directory.
    """

    def __init__(self, pattern: str) -> None:
        if not isinstance(pattern, str):
            raise TypeError(f"naming must be a string such as 'checkpoint-{{}}', not {pattern!r}.")
        places = list(_PLACE.finditer(pattern))
        rest = _PLACE.sub("", pattern)
        if len(places) != 1 or "{" in rest or "}" in rest:
            raise ValueError(
                f"naming={pattern!r} must have the step's place once, as in 'checkpoint-{{}}' or "
                "'step-{:08d}'."
            )
        if "/" in rest or "\0" in rest or pattern.startswith("."):
            raise ValueError(f"naming={pattern!r} must be the name of a directory, and not hidden.")
        self.pattern = pattern
        if len(self.name(_STEP_END - 1).encode(errors="surrogateescape")) > _NAME_BYTES:
            raise ValueError(f"naming={pattern!r} is too long for the name of a directory.")
        before, after = pattern[: places[0].start()], pattern[places[0].end() :]
        self._form = re.compile(f"{re.escape(before)}([0-9]+){re.escape(after)}", re.DOTALL)

    @classmethod
    def of(cls, name: str) -> Naming | None:
        """The naming by which a name ends in its step; None if it does not end in a number."""
        match = _NUMBERED.fullmatch(name)
        if match is None:
            return None
        width = len(match[2] + match[3])
        try:
            return cls(match[1] + (f"{{:0{width}d}}" if match[2] else "{}"))
        except ValueError:
            return None

    def name(self, step: int) -> str:
        """The name of a step's checkpoint."""
        return self.pattern.format(step)

    def step_of(self, name: str) -> int | None:
        """The step that a name stands for; None for any other name."""
        match = self._form.fullmatch(name)
        if match is None:
            return None
        step = int(match[1])
        # Not step-000000100 for step 100: two names of one step would be two checkpoints.
        return step if step < _STEP_END and self.name(step) == name else None

    def __repr__(self) -> str:
        return f"Naming({self.pattern!r})"


DEFAULT = Naming("step-{:08d}")
"""Names that sort as steps do, below 10^8 of them."""
