"""Real file systems to test on: images on loop devices, and tmpfs. Mounting them needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

MIB = 1 << 20

# Of the image. What mkfs accepts as a minimum differs widely; the files are sparse.
IMAGE_BYTES = {"ext4": 64 * MIB, "xfs": 320 * MIB, "btrfs": 128 * MIB}
TMPFS_BYTES = 16 * MIB
KINDS = (*IMAGE_BYTES, "tmpfs")


def missing(kind: str) -> str:
    """What this machine lacks to mount a file system of this kind; empty where it can."""
    if os.geteuid() != 0:
        return "root, to mount file systems"
    for tool in ("mount", "umount", *([f"mkfs.{kind}"] if kind in IMAGE_BYTES else [])):
        if shutil.which(tool) is None:
            return tool
    return ""


class Mounts:
    """File systems, each mounted when first asked for; ``close`` unmounts them all."""

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="pyckpt-mounts-"))
        self._mounted: dict[str, Path] = {}

    def root(self, kind: str) -> Path:
        """Where a file system of this kind is mounted."""
        if kind not in self._mounted:
            point = self._base / kind
            point.mkdir()
            if kind == "tmpfs":
                _run("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(point))
            else:
                image = self._base / f"{kind}.image"
                image.touch()
                os.truncate(image, IMAGE_BYTES[kind])
                _run(f"mkfs.{kind}", "-q", str(image))
                _run("mount", "-t", kind, "-o", "loop", str(image), str(point))
            self._mounted[kind] = point
        return self._mounted[kind]

    def close(self) -> None:
        for point in self._mounted.values():
            # What a failed test left behind may keep it busy: then it goes when that does.
            if subprocess.run(["umount", str(point)], capture_output=True).returncode != 0:
                _run("umount", "--lazy", str(point))
        self._mounted.clear()
        shutil.rmtree(self._base)


def remount(point: Path, *, read_only: bool) -> None:
    _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(point))


def free_bytes(path: Path) -> int:
    """What root can still write there."""
    status = os.statvfs(path)
    return status.f_bfree * status.f_frsize


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
