"""Writes the states that a power failure may leave as real directories, and looks at each once."""

from __future__ import annotations

import collections
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torture.crash_states import Instant, Model, State
from torture.power_checks import Promises, check
from torture.power_scenarios import Scenario

__all__ = ["Checker", "Tally", "Violation", "new_checker", "quiet"]


@dataclass
class Violation:
    """A state of which something does not hold that must."""

    scenario: str
    model: str
    error: str
    how: str
    """How the state came to be."""
    after: str
    """The last call that had begun."""


@dataclass
class Tally:
    """What was tried."""

    states: int = 0
    """States that were looked at; each is another tree of files, or was promised other things."""
    modelled: int = 0
    """States that the models gave, with those that came more than once."""
    by_model: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, other: Tally) -> None:
        self.states += other.states
        self.modelled += other.modelled
        self.by_model += other.by_model


class Checker:
    """Looks at states, at each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.good: set[int] = set()
        self._count = 0
        self.tally = Tally()

    def look(
        self, scenario: Scenario, instant: Instant, model: Model, state: State
    ) -> Violation | None:
        """Check a state, unless it was found good before."""
        self.tally.modelled += 1
        promises = Promises(instant.marks)
        key = hash((scenario.name, promises.key(), frozenset(state.tree.items())))
        if key in self.good:
            return None
        self._count += 1
        base = self._folder / f"state-{self._count}"
        try:
            _materialize(state, base)
            check(scenario, promises, base)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace(f"{base}/", "")
            return Violation(scenario.name, model, said, state.how, _last_call(instant))
        finally:
            shutil.rmtree(base, ignore_errors=True)
            self.tally.states += 1
            self.tally.by_model[model] += 1
        self.good.add(key)
        return None


def _materialize(state: State, base: Path) -> None:
    base.mkdir()
    for path, content in sorted(state.tree.items()):
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)


def _last_call(instant: Instant) -> str:
    calls = [op for op in instant.operations if op.mark is None]
    if not calls:
        return "nothing"
    return f"{calls[-1].call} {instant.recording.names[calls[-1].node]}"


@contextmanager
def new_checker() -> Iterator[Checker]:
    """A checker whose states are in memory, where there is such a place."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="pyckpt-power-", dir=memory) as folder:
        yield Checker(Path(folder))


@contextmanager
def quiet() -> Iterator[None]:
    """What pyckpt and PyTorch say of damage is expected here."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(disabled)
