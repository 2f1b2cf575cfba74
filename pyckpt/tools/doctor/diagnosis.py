"""All findings together."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyckpt.tools.doctor import machine, software, storage
from pyckpt.tools.doctor.finding import Finding

__all__ = ["Diagnosis", "examine"]


@dataclass(frozen=True)
class Diagnosis:
    """The result of `examine`."""

    path: str
    """The directory that was tried."""
    findings: tuple[Finding, ...]

    @property
    def bad(self) -> bool:
        """Whether something is wrong by which saves or loads fail."""
        return any(finding.level == "bad" for finding in self.findings)

    @property
    def warnings(self) -> int:
        """How many findings are warnings."""
        return sum(finding.level == "warning" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """All of it, in a form for JSON."""
        return {
            "path": self.path,
            "bad": self.bad,
            "warnings": self.warnings,
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(path: str | os.PathLike[str] = ".") -> Diagnosis:
    """Look at the software, the machine, and the file system of a directory.

    It writes a few pages to a temporary file in the directory, and removes it. If the directory
    does not exist, the nearest one above it that does is tried.

    Raises:
        NotADirectoryError: ``path``, or what is above it, is a file.
    """
    directory = Path(path).absolute()
    while not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise NotADirectoryError(20, "not a directory", str(directory))
    findings = [
        *software.look(os.environ),
        *machine.look(),
        *storage.look(directory),
    ]
    return Diagnosis(str(directory), tuple(findings))
