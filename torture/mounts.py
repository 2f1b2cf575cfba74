"""File systems that are mounted for a while, as root, for `torture.filesystems`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["PLACES", "Missing", "image", "need", "run"]


class Missing(Exception):
    """This machine lacks something; the text says what."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            raise Missing(tool)


@contextmanager
def mounted(point: Path, *command: str) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    run(*command)
    try:
        yield point
    finally:
        if subprocess.run(["umount", str(point)], capture_output=True).returncode != 0:
            run("umount", "--lazy", str(point))


@contextmanager
def image(
    base: Path, kind: str, *, sector: int = 512, mib: int = 400, options: str = "", make: str = ""
) -> Iterator[tuple[Path, str]]:
    """A file system in a file, on a device of such sectors. Yields where, and the device."""
    need(f"mkfs.{kind}", "losetup", "mount")
    file = base / "image"
    file.touch()
    os.truncate(file, mib << 20)
    device = run("losetup", "--find", "--show", "--sector-size", str(sector), str(file))
    try:
        run(f"mkfs.{kind}", "-q", *make.split(), device)
        with mounted(
            base / "mounted", "mount", "-o", options or "rw", device, str(base / "mounted")
        ):
            yield base / "mounted", device
    finally:
        run("losetup", "--detach", device)


@contextmanager
def _on_image(base: Path, kind: str, sector: int) -> Iterator[Path]:
    with image(base, kind, sector=sector) as (point, _):
        yield point


def _layers(base: Path) -> tuple[str, Path]:
    for name in ("lower", "upper", "work"):
        (base / name).mkdir()
    # What is below is there, and is copied up when it is changed.
    layers = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
    return layers, base / "mounted"


@contextmanager
def _overlay(base: Path) -> Iterator[Path]:
    layers, point = _layers(base)
    with mounted(point, "mount", "-t", "overlay", "-o", layers, "overlay", str(point)):
        yield point


@contextmanager
def _fuse_overlay(base: Path) -> Iterator[Path]:
    need("fuse-overlayfs")
    layers, point = _layers(base)
    with mounted(point, "fuse-overlayfs", "-o", layers, str(point)):
        yield point


@contextmanager
def _bindfs(base: Path) -> Iterator[Path]:
    need("bindfs")
    (base / "below").mkdir()
    with mounted(base / "mounted", "bindfs", str(base / "below"), str(base / "mounted")) as point:
        yield point


@contextmanager
def _tmpfs(base: Path) -> Iterator[Path]:
    with mounted(base / "mounted", "mount", "-t", "tmpfs", "tmpfs", str(base / "mounted")) as point:
        yield point


@contextmanager
def _nfs(base: Path) -> Iterator[Path]:
    if "nfs4" not in Path("/proc/filesystems").read_text():
        raise Missing(
            "a kernel with a client of NFS (a server in user space, nfs-ganesha, is there)"
        )
    raise Missing("a test of NFS: none has been written, for want of a kernel to try it on")
    yield base


@contextmanager
def _device_mapper(base: Path) -> Iterator[Path]:
    if not Path("/dev/mapper/control").exists():
        raise Missing("a kernel with device-mapper; see `shut down`, which fails a whole disk")
    raise Missing("a test of dm-flakey: none has been written, for want of a kernel to try it on")
    yield base


PLACES: dict[str, Callable[[Path], Any]] = {
    "tmpfs": _tmpfs,
    **{
        f"{kind}, sectors of {sector}": partial(_on_image, kind=kind, sector=sector)
        for kind in ("ext4", "xfs", "btrfs")
        for sector in (512, 4096)
    },
    "overlay": _overlay,
    "bindfs": _bindfs,
    "fuse-overlayfs": _fuse_overlay,
    "nfs": _nfs,
    "device-mapper": _device_mapper,
}
