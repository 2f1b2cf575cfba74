"""The code in the documentation runs: python blocks, and ``pyckpt`` in console blocks.

The blocks of a page are run one after the other, in a child and in an empty directory, with the
names that `_stages.stage` makes. Two kinds of blocks are not run here. Those that are a whole file
of examples/ have tests of their own, which start, kill and resume them. Those that need a framework
are run where the frameworks are, by tests/integrations/test_pages.py.
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
QUICK = {"README.md", "docs/howto/drop-in.md"}
FRAMEWORKS = "pyckpt.integrations"


def run_python(example: Example) -> None:
    source = str(example.parsed)
    if source not in EXAMPLES and FRAMEWORKS not in source:
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
        pytest.param(page, marks=[] if page in QUICK else [pytest.mark.slow])
        for page in PAGES
        if has_blocks(page)
    ],
)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path) -> None:
    run_child(run_page, page, tmp_path)


@pytest.mark.slow
def test_a_block_that_fails_fails_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\nmodel.there_is_no_such_name\n```\n")
    with pytest.raises(Exception, match="there_is_no_such_name"):
        run_child(run_page, str(page), tmp_path)
