"""Writes and reads of a scratch directory: bare ones, stock's and ours."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import pyckpt
from pyckpt.tools.bench.series import WrongBytes

__all__ = ["BLOCK", "BareFile", "Checkpoints", "scratch"]

PREFIX = ".pyckpt-bench-"
BLOCK = 8 << 20
"""Bytes of a bare write or read."""
TENSORS = 16


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A directory of this run, which is removed at the end, as are those of runs that were
    killed."""
    for left in directory.glob(f"{PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=directory))
    with _locked(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises BlockingIOError if another process has it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        yield
    finally:
        os.close(descriptor)


class BareFile:
    """One file, written and read in blocks by threads of Python: what the disk gives a program."""

    def __init__(self, path: Path, size: int, threads: int) -> None:
        self._path = path
        self._size = max(BLOCK, size // BLOCK * BLOCK)
        self._threads = threads
        self._blocks = [mmap.mmap(-1, BLOCK) for _ in range(threads)]
        for number, block in enumerate(self._blocks):
            block[:] = os.urandom(1 << 20) * (BLOCK >> 20)
            block[:8] = number.to_bytes(8, "little")

    def write(self, flags: int) -> None:
        """Write it anew, until it is durable. ``flags`` may be ``os.O_DIRECT``."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        try:
            with suppress(OSError):  # as pyckpt does, where the file system can
                os.posix_fallocate(descriptor, 0, self._size)

            def put(thread: int, offset: int) -> None:
                if os.pwrite(descriptor, self._blocks[thread], offset) != BLOCK:
                    raise OSError(errno.EIO, "a short write", str(self._path))

            self._each(put)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, flags: int) -> None:
        """Read it, and see that it is what was written."""
        descriptor = os.open(self._path, os.O_RDONLY | flags)
        found = [mmap.mmap(-1, BLOCK) for _ in range(self._threads)]
        try:

            def get(thread: int, offset: int) -> None:
                if os.preadv(descriptor, [found[thread]], offset) != BLOCK:
                    raise OSError(errno.EIO, "a short read", str(self._path))
                # The whole of it would be measured along: its first page is compared.
                if found[thread][:4096] != self._blocks[thread][:4096]:
                    raise WrongBytes(f"{self._path}: other bytes than were written at {offset}")

            self._each(get)
        finally:
            os.close(descriptor)
            for block in found:
                block.close()

    def _each(self, call: Callable[[int, int], None]) -> None:
        def work(thread: int) -> None:
            for offset in range(thread * BLOCK, self._size, self._threads * BLOCK):
                call(thread, offset)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(work, range(self._threads)))


class Checkpoints:
    """A state, and its checkpoints by pyckpt and by stock PyTorch."""

    def __init__(self, directory: Path, size: int) -> None:
        self._directory = directory
        count = max(1, size // TENSORS // 8)
        self.state = {
            f"tensor{i}": torch.empty(count, dtype=torch.int64, device="cpu").random_()
            for i in range(TENSORS)
        }
        self.size = TENSORS * count * 8
        self._target = {key: torch.zeros_like(value) for key, value in self.state.items()}

    def save(self, name: str, **options: Any) -> None:
        """By pyckpt. ``options`` are those of `pyckpt.save`."""
        pyckpt.save(self.state, self._directory / name, overwrite=True, no_dist=True, **options)

    def load(self, name: str, **options: Any) -> None:
        pyckpt.load(dict(self._target), self._directory / name, no_dist=True, **options)

    def save_stock(self, name: str) -> None:
        path = self._directory / name
        with _quiet():
            save(self.state, storage_writer=FileSystemWriter(path), no_dist=True)

    def load_stock(self, name: str) -> None:
        path = self._directory / name
        with _quiet():
            load(self._target, storage_reader=FileSystemReader(path), no_dist=True)

    def check(self, name: str) -> None:
        """Load what was saved under the name, and compare all bytes.

        Raises:
            WrongBytes: they differ.
        """
        for value in self._target.values():
            value.zero_()
        self.load(name)
        for key, value in self.state.items():
            if not torch.equal(value, self._target[key]):
                raise WrongBytes(f"{self._directory / name}: {key} is not what was saved")

    def remove(self, name: str) -> None:
        shutil.rmtree(self._directory / name, ignore_errors=True)

    def forget(self) -> None:
        """Have the kernel drop what its page cache has of the files, so that reads are of the
        disk."""
        for path in self._directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP announces each save and load that runs without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
