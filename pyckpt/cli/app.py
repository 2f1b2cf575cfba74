"""All commands in one program, and how it ends.

The exit status is 0 if the answer is good, 1 if it is bad (a checkpoint is damaged, two differ),
and 2 if the command could not be carried out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pyckpt.cli import bench, doctor, syncs, timeline, transfer
from pyckpt.cli.output import FAILED, complain
from pyckpt.errors import PyckptError

__all__ = ["app", "run"]

app = typer.Typer(
    name="pyckpt",
    help="See, check, compare and convert checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

transfer.register(app)

_show_traceback = False


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"pyckpt {version('pyckpt')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where in the program an error was raised.")
    ] = False,
) -> None:
    global _show_traceback
    _show_traceback = traceback


# A command's module imports what it works with in its functions, so that the others start quickly.
# One line for each module:
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
app.command("syncs")(syncs.syncs)
app.command("timeline")(timeline.timeline)


def run() -> None:
    """Runs the command that ``sys.argv`` names; errors that a user can act on become one line."""
    try:
        app()
    except (ImportError, OSError, PyckptError, ValueError) as error:
        if _show_traceback:
            raise
        complain(error)
        raise SystemExit(FAILED) from None
