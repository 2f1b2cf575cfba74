"""Runs the command line in this process, by its real entry point."""

from __future__ import annotations

import sys

import pytest

from pyckpt.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit status of ``pyckpt ARGUMENTS``; ``capsys`` has what it printed."""
    monkeypatch.setattr(sys, "argv", ["pyckpt", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else int(code is not None)
