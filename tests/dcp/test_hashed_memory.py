"""What the kernel says of written pages, and hashes that are not made again."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyckpt import _C
from pyckpt.dcp import hashed_memory
from pyckpt.dcp.hashed_memory import HashedMemory
from pyckpt.dcp.hashing import hash_tensors

pytest.importorskip("xxhash", reason='frozen parts need pip install "pyckpt[frozen]"')

PAGE = _C.page_bytes
PAGES = 128  # of the memory that is watched: more than HashedMemory asks for

libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = ctypes.c_void_p
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
]  # fmt: skip
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MREMAP_MAYMOVE_FIXED = 0x10, 3


class IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@pytest.fixture
def watch() -> Iterator[_C.PageWatch]:
    try:
        found = _C.PageWatch()
    except OSError as error:
        pytest.skip(f"this kernel says nothing of written pages: {error}")
    yield found
    found.close()


def mapped(pages: int = PAGES, flags: int = mmap.MAP_PRIVATE, fd: int = -1) -> torch.Tensor:
    """Memory of its own mapping, not the heap's. Every byte is 7, but that of files."""
    kind = flags if fd >= 0 else flags | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(fd, pages * PAGE, kind)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return tensor.fill_(7) if fd < 0 else tensor


def vector(address: int, length: int) -> Any:
    return ctypes.byref(IoVector(address, length))


# --- ways of writing ------------------------------------------------------------------------------


def by_torch(tensor: torch.Tensor, _: Path) -> None:
    tensor[5 * PAGE + 17] = 8


def by_torch_data(tensor: torch.Tensor, _: Path) -> None:
    tensor.data.view(torch.int32)[5].add_(1)


def by_numpy(tensor: torch.Tensor, _: Path) -> None:
    tensor.numpy()[-1] = 8


def by_memmove(tensor: torch.Tensor, _: Path) -> None:
    ctypes.memmove(tensor.data_ptr() + 3 * PAGE - 1, b"ab", 2)


def by_read(tensor: torch.Tensor, folder: Path) -> None:
    (folder / "file").write_bytes(b"1234")
    with open(folder / "file", "rb", buffering=0) as file:
        assert file.readinto(memoryview(tensor.numpy())[9:13]) == 4


def by_direct_read(tensor: torch.Tensor, folder: Path) -> None:
    (folder / "file").write_bytes(b"1" * PAGE)
    descriptor = os.open(folder / "file", os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(descriptor, [memoryview(tensor.numpy())[PAGE : 2 * PAGE]], 0) == PAGE
    finally:
        os.close(descriptor)


def by_engine(tensor: torch.Tensor, folder: Path) -> None:
    from pyckpt.engine import default_engine

    (folder / "file").write_bytes(b"1" * PAGE)
    job = _C.ReadJob(default_engine().native, direct="auto")
    job.add_tensor(job.add_file(os.fsencode(folder / "file")), 0, tensor[:PAGE])
    job.run()


def by_a_pipe(tensor: torch.Tensor, _: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"8")
    assert os.readv(reading, [memoryview(tensor.numpy())[77:78]]) == 1
    os.close(reading)
    os.close(writing)


def by_process_vm_writev(tensor: torch.Tensor, _: Path) -> None:
    new = ctypes.create_string_buffer(b"8")
    to = vector(tensor.data_ptr() + 4 * PAGE, 1)
    args = (os.getpid(), vector(ctypes.addressof(new), 1), 1, to, 1, 0)
    assert libc.process_vm_writev(*args) == 1


_WRITER = """
import os, sys
memory = os.open(f"/proc/{sys.argv[1]}/mem", os.O_RDWR)
os.pwrite(memory, b"8", int(sys.argv[2]))
"""


def by_a_debugger(tensor: torch.Tensor, _: Path) -> None:
    """Another process, through /proc."""
    libc.prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)  # any may, under Yama
    command = [sys.executable, "-S", "-c", _WRITER, str(os.getpid()), str(tensor.data_ptr() + 5)]
    subprocess.run(command, check=True)
    assert tensor[5] == ord("8")


def by_giving_back(tensor: torch.Tensor, _: Path) -> None:
    assert libc.madvise(ctypes.c_void_p(tensor.data_ptr() + 6 * PAGE), PAGE, 4) == 0


def by_giving_back_and_reading(tensor: torch.Tensor, folder: Path) -> None:
    by_giving_back(tensor, folder)
    assert tensor[6 * PAGE] == 0


def by_mapping_anew(tensor: torch.Tensor, _: Path) -> None:
    address = tensor.data_ptr() + 8 * PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    assert libc.mmap(address, PAGE, _READ_WRITE, flags, -1, 0) == address


def by_moving_there(tensor: torch.Tensor, _: Path) -> None:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    other = libc.mmap(None, PAGE, _READ_WRITE, flags, -1, 0)
    ctypes.memset(other, 9, PAGE)
    to = ctypes.c_void_p(tensor.data_ptr() + 2 * PAGE)
    moved = libc.mremap(ctypes.c_void_p(other), PAGE, PAGE, _MREMAP_MAYMOVE_FIXED, to)
    assert moved == tensor.data_ptr() + 2 * PAGE


def by_the_same_value(tensor: torch.Tensor, _: Path) -> None:
    """Which is no change. But nobody could tell."""
    tensor[9 * PAGE] = 7


WAYS = [
    by_torch,
    by_torch_data,
    by_numpy,
    by_memmove,
    by_read,
    by_direct_read,
    by_engine,
    by_a_pipe,
    by_process_vm_writev,
    by_a_debugger,
    by_giving_back,
    by_giving_back_and_reading,
    by_mapping_anew,
    by_moving_there,
    by_the_same_value,
]


@pytest.mark.parametrize("write", WAYS)
def test_each_way_of_writing_is_noticed(
    watch: _C.PageWatch, tmp_path: Path, write: Callable[[torch.Tensor, Path], None]
) -> None:
    tensor = mapped()
    since = watch.watch(tensor)
    assert since
    assert tensor.sum() == 7 * tensor.numel()  # reading is no writing
    assert watch.is_unwritten(tensor, since)
    assert watch.is_unwritten(tensor, since)
    try:
        write(tensor, tmp_path)
    except OSError as error:
        pytest.skip(f"this machine cannot write so: {error}")
    assert not watch.is_unwritten(tensor, since)
    assert not watch.is_unwritten(tensor, since)


def test_what_was_moved_there_with_its_protection_is_noticed(watch: _C.PageWatch) -> None:
    tensor, other = mapped(), mapped().fill_(9)
    since = watch.watch(tensor)
    assert watch.watch(other)
    size, to = other.nbytes, tensor.data_ptr()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    args = (ctypes.c_void_p(other.data_ptr()), size, size, _MREMAP_MAYMOVE_FIXED)
    assert libc.mremap(*args, ctypes.c_void_p(to)) == to
    assert libc.mmap(other.data_ptr(), size, _READ_WRITE, flags, -1, 0)  # for who unmaps it
    assert tensor[0] == 9
    assert not watch.is_unwritten(tensor, since)


def test_a_child_writes_into_memory_of_its_own(watch: _C.PageWatch) -> None:
    """And knows nothing of the memory of its parent."""
    tensor = mapped()
    since = watch.watch(tensor)
    child = os.fork()
    if child == 0:
        knows = watch.is_unwritten(tensor, since) or watch.watch(tensor)
        ctypes.memset(tensor.data_ptr(), 9, tensor.nbytes)  # torch's threads are the parent's
        watch.close()
        os._exit(1 if knows else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert watch.is_unwritten(tensor, since)
    tensor[0] = 8
    assert not watch.is_unwritten(tensor, since)


def test_bytes_around_the_pages_are_compared(watch: _C.PageWatch) -> None:
    memory = mapped()
    tensor = memory[100 : -PAGE // 2]
    since = watch.watch(tensor)
    memory[0] = memory[-1] = 8  # others in the same pages
    assert watch.is_unwritten(tensor, since)
    for i in (0, -1):
        tensor[i] = 8
        assert not watch.is_unwritten(tensor, since)
        tensor[i] = 7
        assert watch.is_unwritten(tensor, since)


@pytest.mark.parametrize("how", ["shared", "file", "shared file"])
def test_memory_that_others_may_change_is_refused(
    watch: _C.PageWatch, tmp_path: Path, how: str
) -> None:
    (tmp_path / "file").write_bytes(b"7" * PAGES * PAGE)
    flags = mmap.MAP_PRIVATE if how == "file" else mmap.MAP_SHARED
    with open(tmp_path / "file", "r+b") as file:
        tensor = mapped(flags=flags, fd=-1 if how == "shared" else file.fileno())
    assert tensor.sum() > 0
    assert watch.watch(tensor) == 0
    # Pages of its own, which are the file's again when they are given back.
    tensor.add_(1)
    assert watch.watch(tensor) == 0


def test_what_overlaps_is_forgotten(watch: _C.PageWatch) -> None:
    """Otherwise a page that was written would be unwritten since another began to be watched."""
    memory = mapped()
    first, second = memory[: 64 * PAGE], memory[32 * PAGE :]
    since = watch.watch(first)
    first[40 * PAGE] = 8
    assert watch.watch(second)
    assert not watch.is_unwritten(first, since)
    again = watch.watch(second)
    inside = second[PAGE : 2 * PAGE]
    assert watch.watch(inside)
    assert not watch.is_unwritten(second, again)


def test_a_watch_that_is_over_knows_nothing(watch: _C.PageWatch) -> None:
    tensor, other = mapped(), mapped()
    since, others = watch.watch(tensor), watch.watch(other)
    assert not watch.is_unwritten(tensor, since + 10)
    assert not watch.is_unwritten(tensor[:PAGE], since)
    watch.forget(tensor.data_ptr(), since)
    assert not watch.is_unwritten(tensor, since)
    watch.close()
    assert not watch.is_unwritten(other, others)
    assert watch.watch(other) == 0
    anew = _C.PageWatch()  # which may have what the first one had
    assert anew.watch(other)
    assert anew.watch(torch.zeros(PAGE // 2, dtype=torch.uint8)) == 0  # no whole page


def test_two_do_not_watch_the_same(watch: _C.PageWatch) -> None:
    tensor = mapped()
    since = watch.watch(tensor)
    assert _C.PageWatch().watch(tensor) == 0
    assert watch.is_unwritten(tensor, since)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(8, 8)[:, :4], torch.zeros(3).to_sparse(), torch.zeros(3, device="meta")]
)
def test_what_is_no_memory_is_refused(watch: _C.PageWatch, tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"memory"):
        watch.watch(tensor)


# --- hashes ---------------------------------------------------------------------------------------


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each call has hashed."""
    sizes: list[int] = []

    def counting(tensors: Any) -> list[str]:
        sizes.append(sum(one.nbytes for one in tensors))
        return hash_tensors(tensors)

    monkeypatch.setattr(hashed_memory, "hash_tensors", counting)
    return sizes


def test_what_was_not_written_is_not_hashed(watch: _C.PageWatch, hashed: list[int]) -> None:
    watch.close()
    tensors = [mapped(), mapped(), torch.arange(100)]
    size, small = tensors[0].nbytes, tensors[2].nbytes
    memory = HashedMemory(anew_every=100, watches=True)
    before = memory.hashes(tensors)
    assert before == hash_tensors(tensors)
    assert memory.hashes(tensors) == before
    assert memory.hashes(tensors[::-1]) == before[::-1]
    tensors[1][:3] = torch.from_numpy(np.array([1, 2, 3], dtype=np.uint8))
    after = memory.hashes(tensors)
    assert after == hash_tensors(tensors)
    assert after[1] != before[1]
    assert hashed == [2 * size + small, small, small, size + small]
    # Tied weights are hashed once, and what was left out is forgotten.
    assert memory.hashes([tensors[0], tensors[0]]) == [after[0]] * 2
    assert memory.hashes(tensors) == after
    assert hashed[4:] == [0, size + small]
    memory.close()
    assert memory.hashes(tensors) == after
    assert hashed[-1] == 2 * size + small


def test_bytes_are_hashed_now_and_then(watch: _C.PageWatch, hashed: list[int]) -> None:
    watch.close()
    tensor = mapped()
    memory = HashedMemory(anew_every=3, watches=True)
    for _ in range(7):
        memory.hashes([tensor])
    assert [size > 0 for size in hashed] == [True, False, False, True, False, False, True]


def test_a_kernel_that_does_not_notice_is_not_believed(
    watch: _C.PageWatch, monkeypatch: pytest.MonkeyPatch, hashed: list[int], caplog: Any
) -> None:
    """As where a device writes to memory that it was given before."""
    watch.close()

    class Believing:
        pinned = staticmethod(lambda: False)

        def __init__(self) -> None:
            self.is_closed = False

        def watch(self, tensor: torch.Tensor) -> int:
            return 1

        def is_unwritten(self, tensor: torch.Tensor, since: int) -> bool:
            return True

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(_C, "PageWatch", Believing)
    memory = HashedMemory(anew_every=3, watches=True)
    tensor = mapped()
    memory.hashes([tensor])
    tensor[0] = 8
    memory.hashes([tensor])
    memory.hashes([tensor])
    with caplog.at_level(logging.WARNING, "pyckpt"):
        for value in (8, 9):
            tensor[0] = value
            assert memory.hashes([tensor]) == hash_tensors([tensor])
    (told,) = [one.message for one in caplog.records]
    assert "a device" in told
    assert [size > 0 for size in hashed] == [True, False, False, True, True]


@pytest.mark.parametrize("why", ["devices", "no kernel", "not wanted"])
def test_where_nobody_says_what_was_written_all_is_hashed(
    watch: _C.PageWatch, monkeypatch: pytest.MonkeyPatch, hashed: list[int], why: str
) -> None:
    watch.close()

    class Lacking:
        pinned = staticmethod(lambda: False)

        def __init__(self) -> None:
            raise OSError(38, "Function not implemented")

    tensor = mapped()
    if why == "devices":
        monkeypatch.setattr(_C.PageWatch, "pinned", staticmethod(lambda: True))
    elif why == "no kernel":
        monkeypatch.setattr(_C, "PageWatch", Lacking)
    memory = HashedMemory(anew_every=100, watches=why != "not wanted")
    for _ in range(3):
        assert memory.hashes([tensor]) == hash_tensors([tensor])
    assert hashed == [tensor.nbytes] * 3


def test_bytes_that_come_back_after_they_were_hashed(
    watch: _C.PageWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes at the edges of a tensor are compared with those at the look, not at the hash."""
    memory = mapped()
    tensor = memory[64:]  # its first page is not whole

    def hash_changed(tensors: Any) -> list[str]:
        tensor[0] = 9
        return hash_tensors(tensors)

    hashed = HashedMemory(anew_every=100, watches=True)
    with monkeypatch.context() as patch:
        patch.setattr(hashed_memory, "hash_tensors", hash_changed)
        hashed.hashes([tensor])
    tensor[0] = 7
    for _ in range(2):
        assert hashed.hashes([tensor]) == hash_tensors([tensor])
    hashed.close()
