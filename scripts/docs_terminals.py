"""Takes the pictures of a terminal that the documentation shows: commands, and what they print.

python scripts/docs_terminals.py [DIRECTORY]

Makes a small run, with a checkpoint that is damaged and one that is unfinished, runs the commands
on it in a terminal of its own (a pty), and draws what they print. A command that this pyckpt does
not have is left out, and named.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"

COLUMNS, LINES = 120, 26
SHOTS = {
    "ls": ["ls runs/a"],
    "inspect": ["inspect runs/a/step-00000020"],
    "verify": ["verify runs/a/step-00000020 runs/a/step-00000015"],
    "diff": ["diff runs/a/step-00000010 runs/a/step-00000020"],
}
"""The name of each picture, and its commands."""


def make_run(directory: Path) -> None:
    """``runs/a``: 4 checkpoints, of which one is damaged, and a save that was killed."""
    script = (
        (ROOT / "examples" / "loops" / "single.py")
        .read_text()
        .replace("keep_last=2", "keep_last=4")
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for run, steps in (("runs/a", 20), ("runs/b", 25)):
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, run, str(steps)],
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    runs = directory / "runs"
    killed = runs / "a" / "step-00000025"
    shutil.copytree(runs / "b" / killed.name, killed)
    (killed / ".metadata").unlink()
    (killed / ".saving").touch()
    (data,) = (runs / "a" / "step-00000015").glob("*.distcp")
    content = bytearray(data.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + 4096):  # more than lies between tensors
        content[at] ^= 1
    data.write_bytes(content)


def shoot(command: str, directory: Path) -> str:
    """What a command prints to a terminal."""
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TERM": "xterm-256color",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "pyckpt", *command.split()],
        cwd=directory,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    printed = b""
    while True:
        try:
            read = os.read(terminal, 65536)
        except OSError:  # so Linux says that nobody has the other end any more
            break
        if not read:
            break
        printed += read
    os.close(terminal)
    process.wait()
    return printed.decode(errors="replace").replace("\r\n", "\n")


def last_frames(printed: str) -> str:
    """What is left on the screen: a progress bar draws its lines again and again."""
    lines: list[str] = []
    for line in printed.split("\n"):
        up = line.count("\x1b[1A")
        if up:
            del lines[max(0, len(lines) - up) :]
        line = re.sub(r"\x1b\[\?25[lh]|\x1b\[[12]?[AK]", "", line)
        lines.append(line.rsplit("\r", 1)[-1] if "\r" in line else line)
    while lines and not lines[-1].strip():
        lines.pop()
    more = [f"... {len(lines) - LINES} more lines"] if len(lines) > LINES else []
    return "\n".join([*lines[:LINES], *more])


def known(name: str) -> bool:
    import typer.main

    from pyckpt.cli.app import app

    return name in getattr(typer.main.get_command(app), "commands", {})


def main() -> None:
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        make_run(Path(directory))
        for name, commands in SHOTS.items():
            missing = [command for command in commands if not known(command.split()[0])]
            if missing:
                print(f"left out, since there is no such command: {', '.join(missing)}")
                continue
            with open(os.devnull, "w") as nowhere:
                console = Console(record=True, width=COLUMNS, file=nowhere)
                for command in commands:
                    console.print(Text.from_ansi(f"$ pyckpt {command}"), style="bold")
                    console.print(Text.from_ansi(last_frames(shoot(command, Path(directory)))))
            target = pictures / f"terminal-{name}.svg"
            console.save_svg(str(target), title=f"pyckpt {name}", unique_id=f"terminal-{name}")
            print(target)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
