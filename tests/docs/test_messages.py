"""The messages that docs/troubleshooting.md explains are those of the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.*)`$", PAGE.read_text(), re.MULTILINE)
GAP = "\0"
"""Stands for what a message is filled with."""


def messages() -> str:
    """All text in the source that a message may be made of, a line each, with gaps where it is
    filled in. Docstrings are left out."""
    found = []
    for path in sorted((ROOT / "pyckpt").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else GAP
                    for part in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                found.append(re.sub("%[sd]", GAP, str(node.value)))
    return "\n".join(found)


MESSAGES = messages()


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_source_has_the_message(heading: str) -> None:
    assert heading.replace("...", GAP) in MESSAGES


def test_there_are_messages() -> None:
    assert len(HEADINGS) > 30
    assert len(HEADINGS) == len(set(HEADINGS))
