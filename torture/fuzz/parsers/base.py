"""What each parser under test has: sound inputs, changes to them, what must hold of any input."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyckpt.errors import PyckptError
from torture.fuzz import mutate
from torture.fuzz.mutate import Mutator

__all__ = ["Parser", "Several", "Wrong", "require"]


class Wrong(Exception):
    """What a parser made of an input is not what it may make of it."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Parser:
    """What is tried with an input, and what may come of it.

    Args:
        folder: where its files are; empty.
    """

    mutators: Sequence[Mutator] = ()
    documented: tuple[type[BaseException], ...] = (PyckptError, OSError)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def seeds(self) -> list[bytes]:
        """Sound inputs, the same each time."""
        raise NotImplementedError

    def attempt(self, data: bytes) -> None:
        """Raises one of the documented errors, or returns; anything else is a defect."""
        raise NotImplementedError

    def run(self, data: bytes) -> None:
        """Raises what must not have happened."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.attempt(data)
        except self.documented:
            pass

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        return mutate.mutate(random, data, self.mutators, others)


class Several(Parser):
    """Of a folder of files, of which the input replaces one."""

    by_name: Mapping[str, Sequence[Mutator]] = {}
    """Suffixes of names, and what changes such files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = folder / "checkpoint_5"
        self.make(self.source)
        files = sorted(path for path in self.source.rglob("*") if path.is_file())
        self.files = {path.relative_to(self.source).as_posix(): path.read_bytes() for path in files}
        self.names = list(self.files)

    def make(self, source: Path) -> None:
        raise NotImplementedError

    def seeds(self) -> list[bytes]:
        return [bytes([i]) + self.files[name] for i, name in enumerate(self.names)]

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        if not data or random.random() < 0.02:
            return mutate.raw(random, data, others)
        name = self.names[data[0] % len(self.names)]
        fitting = next((one for end, one in self.by_name.items() if name.endswith(end)), ())
        same = [other[1:] for other in others if other[:1] == data[:1]]
        return data[:1] + mutate.mutate(random, data[1:], fitting, same)

    def replaced(self, data: bytes) -> str:
        """Puts all files in their place, one of them as the input has it; returns its name."""
        which = self.names[data[0] % len(self.names)] if data else self.names[0]
        for name, content in self.files.items():
            (self.source / name).write_bytes(data[1:] if name == which else content)
        return which
