"""The command line, ``pyckpt``. Nothing else imports it; it needs ``pip install "pyckpt[cli]"``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command that ``sys.argv`` names, and ends the process with its exit status."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f'pyckpt: the command line needs {error.name}: pip install "pyckpt[cli]"')
    from pyckpt.cli.app import run

    run()
