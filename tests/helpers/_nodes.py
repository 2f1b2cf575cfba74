"""Nodes with a disk of their own each, on one machine: processes that see different directories at
the same path."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["enter_node", "lay_over"]

_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18


def enter_node(at: Path, disk: Path) -> None:
    """Have this process, and the threads that it starts, see ``disk`` at the path ``at``. Other
    processes do not. Needs root."""
    disk.mkdir(parents=True, exist_ok=True)
    at.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    _check(libc.mount(os.fsencode(disk), os.fsencode(at), None, ctypes.c_ulong(_MS_BIND), None))


def lay_over(at: Path, below: Path, scratch: Path) -> None:
    """Show at a path what is in a directory, with files of its own beside it: a node that sees the
    files of another, which does not see those of the first. After `enter_node`."""
    own, work = scratch / "own", scratch / "work"
    for each in (own, work, at):
        each.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    options = os.fsencode(f"lowerdir={below},upperdir={own},workdir={work}")
    _check(libc.mount(b"overlay", os.fsencode(at), b"overlay", ctypes.c_ulong(0), options))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
