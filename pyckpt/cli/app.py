"""All commands in one program, and how it ends.

The exit status is 0 if the answer is good, 1 if it is bad (a checkpoint is damaged, two differ),
and 2 if the command could not be carried out.
"""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from typing import Annotated, Any

import typer

from pyckpt.cli import bench, diff, doctor, inspect, ls, prune, syncs, timeline, transfer, verify
from pyckpt.cli.output import FAILED, complain, logging_to_stderr
from pyckpt.errors import PyckptError

__all__ = ["app", "run"]


class _Commands(typer.core.TyperGroup):
    """The commands. An error that a user can act on becomes one line on standard error, and every
    error the exit status of a command that was not carried out."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except BrokenPipeError:
            # Who read the output, "head" say, has seen enough. Python must not flush it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except (ImportError, OSError, PyckptError, ValueError) as error:
            if ctx.params.get("traceback"):
                tracebacks.print_exc()
            complain(error)
            raise typer.Exit(FAILED) from None
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
        ):  # an error of this program
            tracebacks.print_exc()
            raise typer.Exit(FAILED) from None


app = typer.Typer(
    name="pyckpt",
    cls=_Commands,
    help="See, check, compare and convert checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    del traceback  # `_Commands` looks at it


# A command's module imports what it works with in its functions, so that the others start quickly.
# One line for each module, in the order in which the help shows them:
app.command("ls")(ls.ls)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("prune")(prune.prune)
transfer.register(app)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("timeline")(timeline.timeline)
app.command("syncs")(syncs.syncs)


def run() -> None:
    """Runs the command that ``sys.argv`` names, and ends the process with its exit status."""
    with logging_to_stderr():
        app()
