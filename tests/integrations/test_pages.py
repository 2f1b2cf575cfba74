"""What the pages of the frameworks, and the README, import from pyckpt is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def imports() -> list[str]:
    """The statements in blocks of python that import from pyckpt. All blocks are valid python."""
    found = set()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in BLOCK.findall(page.read_text()):
            found |= {
                ast.unparse(node)
                for node in ast.walk(ast.parse(block, str(page)))
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pyckpt.")
            }
    return sorted(found)


@pytest.mark.parametrize("statement", imports())
def test_what_a_page_imports_is_there(statement: str) -> None:
    exec(compile(statement, "a page", "exec"), {})
