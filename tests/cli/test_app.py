"""The program as a whole: it starts, says its version, and says what is wrong in one line."""

import subprocess
import sys

import pytest


def pyckpt(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pyckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_version_is_the_packages():
    from importlib.metadata import version

    done = pyckpt("--version")
    assert (done.returncode, done.stdout) == (0, f"pyckpt {version('pyckpt')}\n")


@pytest.mark.slow
def test_an_unknown_command_is_a_usage_error():
    done = pyckpt("no-such-command")
    assert done.returncode == 2
    assert "no-such-command" in done.stderr


@pytest.mark.slow
def test_without_typer_it_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from pyckpt.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert 'pip install "pyckpt[cli]"' in done.stderr
