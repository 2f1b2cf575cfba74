"""The code in the documentation runs: python blocks, and ``pyckpt`` in console blocks.

The blocks of a page are run one after the other, in a child and in an empty directory, with the
names that `_stages.stage` makes. A block that is a whole file of examples/ is not run here: tests of
its own start it, kill it and resume it. Neither are the pages of frameworks, whose blocks run with
the frameworks in tests/integrations.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import _stages
import pytest
from _ranks import run_child
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
EXAMPLES = [path.read_text() for path in sorted((ROOT / "examples").rglob("*.py"))]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "integrations" not in path.relative_to(ROOT).parts
)
# They take longer than half a second.
SLOW = {"docs/howto/ranks.md", "docs/tutorial.md"}


def run_python(example: Example) -> None:
    source = str(example.parsed)
    if source not in EXAMPLES:
        # With the lines of the page, so that a traceback leads there.
        padded = "\n" * (example.line + example.parsed.line_offset) + source
        exec(compile(padded, example.path, "exec", dont_inherit=True), example.namespace)


def run_console(example: Example) -> None:
    """``$ pyckpt ...``; a comment ``# 1`` at its end is the exit status that is expected."""
    from typer.testing import CliRunner

    from pyckpt.cli.app import app

    for line in str(example.parsed).splitlines():
        if not line.startswith("$ pyckpt "):
            continue
        command, _, status = line.removeprefix("$ pyckpt ").partition("  # ")
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == int(status or 0), (line, done.output, done.exception)


PARSERS = [
    CodeBlockParser("python", run_python),
    CodeBlockParser("console", run_console),
    SkipParser(),
]


def has_blocks(page: str) -> bool:
    return any(fence in (ROOT / page).read_text() for fence in ("```python", "```console"))


def run_page(_pipe: Any, page: str, directory: Path) -> None:
    os.chdir(directory)
    document = Document.parse(str(ROOT / page), *PARSERS)
    document.namespace.update(_stages.stage())
    if page in _stages.OF_PAGE:
        _stages.OF_PAGE[page](document.namespace)
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else [])
        for page in PAGES
        if has_blocks(page)
    ],
)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    run_child(run_page, page, tmp_path)


def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nmodel.there_is_no_such_name\n```\n")
    with pytest.raises(Exception, match="there_is_no_such_name"):
        run_child(run_page, str(page), tmp_path)
