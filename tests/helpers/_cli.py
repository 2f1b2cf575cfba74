"""The command line, called in this process."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from typer.testing import CliRunner

from pyckpt.cli.app import app
from pyckpt.tools.contents import contents
from pyckpt.tools.values import Part, values


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def pyckpt(*arguments: object) -> Done:
    """Call a command with these arguments. What it raises, other than its exit, is raised here."""
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def in_terminal(*arguments: object) -> tuple[int, str]:
    """Run the program in a terminal. Returns its exit status, and all that it shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pyckpt", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    child = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    output = b""
    with suppress(OSError):  # EIO: the child has ended
        while data := os.read(ours, 4096):
            output += data
    os.close(ours)
    return child.wait(), output.decode()


def parts_of(checkpoint: Path) -> dict[str, Part]:
    found = {value.key: value.parts[0] for value in values(contents(checkpoint).metadata)}
    assert found
    return found


def flip(checkpoint: Path, part: Part, at: int) -> None:
    """Change one bit of an item, ``at`` bytes from its first."""
    with open(checkpoint / part.file, "r+b") as file:
        file.seek(part.offset + at)
        (byte,) = file.read(1)
        file.seek(part.offset + at)
        file.write(bytes([byte ^ 4]))
