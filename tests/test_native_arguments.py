"""The native module, called with anything: an exception, and the process lives on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pyckpt
from pyckpt import _C
from pyckpt.engine import default_engine
from pyckpt.errors import EngineClosed


@pytest.fixture
def job(tmp_path: Path) -> Any:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 16)
    native = pyckpt.Engine(slot_bytes=65536, max_pinned_bytes=65536, io_threads=1).native
    read = _C.ReadJob(native)
    assert read.add_file(os.fsencode(tmp_path / "file")) == 0
    return read


@pytest.mark.parametrize("file", [1, 5, 1 << 40])
def test_read_job_knows_its_files(job: Any, file: int) -> None:
    with pytest.raises(ValueError, match="no file of this number"):
        job.add_buffer(file, 0, bytearray(10))
    with pytest.raises(ValueError, match="no file of this number"):
        job.add_tensor(file, 0, torch.zeros(3))
    job.run()
    with pytest.raises(ValueError, match="no file of this number"):  # they went with the run
        job.add_buffer(0, 0, bytearray(10))


@pytest.mark.parametrize("offset", [(1 << 64) - 10, 1 << 63, (1 << 63) - 50])
def test_read_job_offsets_do_not_wrap(job: Any, offset: int) -> None:
    with pytest.raises(ValueError, match="beyond the end of any file"):
        job.add_buffer(0, offset, bytearray(100))
    with pytest.raises(ValueError, match="beyond the end of any file"):
        job.add_tensor(0, offset, torch.zeros(25))


def test_read_job_takes_tensors_in_bulk(job: Any) -> None:
    """As one by one: numbers of ranges, and None for what it cannot fill."""
    parts = [torch.zeros(3), torch.zeros(4, 2).t(), torch.zeros(2).to_sparse(), torch.zeros(0)]
    assert job.add_tensors([0] * 4, [0, 64, 0, 4096], parts) == [0, 1, None, 2]
    assert job.add_tensors([], [], []) == []
    job.run()
    whole = torch.frombuffer(bytearray(bytes(range(256)) * 16), dtype=torch.float32)
    assert torch.equal(parts[0], whole[:3])
    assert torch.equal(parts[1], whole[16:24].reshape(2, 4))


def test_read_job_checks_tensors_in_bulk(job: Any) -> None:
    tensors = [torch.zeros(3), torch.zeros(3)]
    with pytest.raises(ValueError, match="no file of this number"):
        job.add_tensors([0, 1], [0, 0], tensors)
    with pytest.raises(ValueError, match="beyond the end of any file"):
        job.add_tensors([0, 0], [0, (1 << 63) - 4], tensors)
    with pytest.raises(ValueError, match="a file and an offset"):
        job.add_tensors([0], [0, 0], tensors)
    with pytest.raises(TypeError, match="must be tensors"):
        job.add_tensors([0], [0], [None])
    for wrong in ([-1], ["0"], [1 << 64]):
        with pytest.raises((RuntimeError, TypeError)):
            job.add_tensors(wrong, [0], tensors[:1])
    tensors[0].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="larger than its storage"):
        job.add_tensors([0], [0], tensors[:1])


@pytest.mark.parametrize(
    "stride",
    [(0, 1), (-4, 1), (4, 0), (1, 4), (3, 1), (1 << 62, 1), (1 << 61, 1), ((1 << 63) - 1, 1), (4,)],
)
def test_read_job_strides(job: Any, stride: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="file_stride"):
        job.add_tensor(0, 0, torch.zeros(4, 4), list(stride))


def test_read_job_strides_of_one(job: Any) -> None:
    """Of a dimension with one element, they say nothing."""
    tensor = torch.zeros(1, 4, 1)
    job.add_tensor(0, 0, tensor, [0, 2, -7])
    job.run()
    whole = torch.frombuffer(bytearray(bytes(range(256)) * 16), dtype=torch.float32)
    assert torch.equal(tensor.flatten(), whole[:8:2])


def test_read_job_looks_for_the_memory(job: Any) -> None:
    for size in (0, 16):
        tensor = torch.zeros(1 << 20)
        job.add_tensor(0, 0, tensor[:1024])
        tensor.untyped_storage().resize_(size)
        with pytest.raises(ValueError, match=r"larger than its storage|freed or moved"):
            job.run()


def test_read_job_runs_once_at_a_time(tmp_path: Path) -> None:
    """From several threads: one runs it, and the others are told so, or find it empty."""
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    engine = pyckpt.Engine(slot_bytes=65536, max_pinned_bytes=65536, io_threads=1)
    for _ in range(20):
        read = _C.ReadJob(engine.native)
        file = read.add_file(os.fsencode(tmp_path / "file"))
        for i in range(50):
            read.add_buffer(file, i * 1000, bytearray(10_000))
        outcomes: list[Any] = []

        def run(read: Any = read, outcomes: list[Any] = outcomes) -> None:
            try:
                outcomes.append(len(read.run()))
            except RuntimeError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count(50) == 1
        assert set(outcomes) <= {50, 0, "the job runs, in another thread"}


def test_read_job_of_a_parent(job: Any) -> None:
    job.add_buffer(0, 0, bytearray(10))
    pid = os.fork()
    if pid == 0:
        try:
            job.run()
        except EngineClosed:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def too_deep(make: Callable[[Any], Any]) -> Any:
    value: Any = make(None)
    for _ in range(400_000):  # Python 3.14 counts bytes of the stack
        value = make(value)
    return value


@pytest.mark.parametrize(
    "make", [lambda v: {"a": v}, lambda v: [v], lambda v: (v,)], ids=["dict", "list", "tuple"]
)
def test_deep_containers(make: Callable[[Any], Any]) -> None:
    deep = too_deep(make)
    with pytest.raises(RecursionError):
        _C.StorageSet().add(deep)
    if not isinstance(deep, tuple):
        with pytest.raises(RecursionError):
            _C.StateTree({"a": deep})


def test_containers_that_hold_themselves() -> None:
    in_dict: dict[str, Any] = {}
    in_dict["a"] = in_dict
    in_list: list[Any] = []
    in_list.append(in_list)
    for cyclic in (in_dict, in_list):
        with pytest.raises(RecursionError):
            _C.StorageSet().add(cyclic)
        with pytest.raises(RecursionError):
            _C.StateTree({"a": cyclic})


def test_keys_that_change_what_they_are_in() -> None:
    armed: list[dict[Any, Any]] = []

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            for changing in armed:
                changing.clear()
            return str.__eq__(self, other)

    tree = _C.StateTree({Key("a"): torch.ones(1), Key("b"): [torch.ones(1)]})
    changing = {Key("a"): torch.ones(1), Key("b"): [torch.ones(1)]}
    assert tree.match(changing) is not None
    armed.append(changing)
    assert tree.match(changing) is None


@pytest.mark.parametrize("grows", [True, False])
def test_leaves_that_change_what_they_are_in(grows: bool) -> None:
    armed: list[Any] = []

    class Leaf:
        def __getattr__(self, name: str) -> Any:  # it is asked whether it plans itself
            for changing in armed:
                if isinstance(changing, dict):
                    changing.update({str(i): i for i in range(99)}) if grows else changing.clear()
                else:
                    changing.extend([0] * 99) if grows else changing.clear()
            raise AttributeError(name)

    def state() -> list[Any]:
        return [
            {"a": Leaf(), "b": Leaf(), "c": torch.ones(1)},
            [torch.ones(1), Leaf(), Leaf(), torch.ones(1)],
        ]

    for which in (0, 1):
        tree = _C.StateTree({"state": state()})
        changing = state()
        armed.append(changing[which])
        assert tree.match({"state": changing}) is None
        armed.clear()
        changing = state()
        armed.append(changing[which])
        tree = _C.StateTree({"state": changing})  # whichever of the two it saw
        armed.clear()
        assert len(tree.build([0] * len(tree))["state"]) == 2


def test_containers_that_other_threads_change() -> None:
    mapping: dict[str, Any] = {"a": torch.ones(1)}
    entries: list[Any] = [torch.ones(1)]
    state = {"mapping": mapping, "entries": entries}
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            for i in range(50):
                mapping[str(i)] = torch.ones(1)
                entries.append([torch.ones(1)])
            mapping.clear()
            entries.clear()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(300):
            tree = _C.StateTree(state)
            leaves = tree.match(state)
            assert leaves is None or len(leaves) == len(tree)
            _C.StorageSet().add(state)
    finally:
        over.set()
        changing.join()


def test_jobs_take_an_engine(tmp_path: Path) -> None:
    for make in (
        lambda: _C.ReadJob(None),  # type: ignore[arg-type]
        lambda: _C.WriteJob(None, str(tmp_path / "file")),  # type: ignore[arg-type]
        lambda: _C.Staging(None, []),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError):
            make()
    job = _C.WriteJob(default_engine().native, str(tmp_path / "file"))
    with pytest.raises(TypeError):
        job.add_tensor(torch.ones(1), None)  # type: ignore[arg-type]
    job.abandon()
