"""Saving into a store, without a file in between."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt import _C
from pyckpt.errors import PyckptError
from pyckpt.remote.address import open_store
from pyckpt.remote.objects import Objects

PAGE = 4096
SLOT = 64 << 10


@pytest.fixture
def url() -> str:
    """An address in a store in memory."""
    return f"memory:///{uuid.uuid4().hex}/step-1"


@pytest.fixture
def engine() -> Iterator[pyckpt.Engine]:
    with pyckpt.Engine(slot_bytes=SLOT, max_pinned_bytes=16 * SLOT, io_threads=2) as made:
        yield made


def names(url: str) -> set[str]:
    return set(Objects(url).list())


def loaded(url: str, like: dict[str, Any]) -> dict[str, Any]:
    found = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in like.items()
    }
    pyckpt.load(found, url)
    return found


def must_equal(found: dict[str, Any], state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, SLOT - 1, SLOT, SLOT + 1, 7919, 3 * SLOT + 13]


def test_what_is_saved_is_what_is_loaded(url, engine, tmp_path):
    state: dict[str, Any] = {
        f"w{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(SIZES)
    }
    state |= {f"small{i}": torch.randn(i) for i in range(300)}
    state |= {"rows": torch.randn(64, 100).t(), "view": torch.randn(100, 100)[::3, 1:7], "n": 3}
    statistics = pyckpt.save(state, url, engine=engine)
    must_equal(loaded(url, state), state)
    (data,) = names(url) - {".metadata"}
    assert statistics.bytes_written == Objects(url).list()[data]

    # Stock reads what is downloaded.
    for name in names(url):
        (tmp_path / name).write_bytes(obstore.get(open_store(url), name).bytes())
    found = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0
        for key, value in state.items()
    }
    dcp.load(found, checkpoint_id=tmp_path)
    must_equal(found, state)


def test_nothing_is_a_checkpoint_too(url):
    pyckpt.save({}, url)
    assert names(url) == {".metadata"}


def test_saving_again_replaces_and_leaves_nothing_of_the_old(url):
    pyckpt.save({"w": torch.zeros(1000)}, url)
    before = names(url)
    with pytest.raises(FileExistsError, match="overwrite=False"):
        pyckpt.save({"w": torch.ones(1000)}, url)
    assert names(url) == before
    pyckpt.save({"w": torch.ones(1000)}, url, overwrite=True)
    assert names(url) & before == {".metadata"}
    assert len(names(url)) == 2
    assert loaded(url, {"w": torch.zeros(1000)})["w"].sum() == 1000


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_there_at_once_and_in_the_background(url):
    state = {"w": torch.randn(70_000), "n": 1}
    described = dcp.save(state, storage_writer=pyckpt.DirectWriter(f"{url}/"))
    assert len(described.storage_data) == 2
    must_equal(loaded(url, state), state)
    writer = pyckpt.DirectWriter(f"{url}-b")
    future = dcp.async_save(state, storage_writer=writer)
    expected = {"w": state["w"].clone(), "n": 1}
    writer.staged.result()
    state["w"].zero_()
    future.result()
    must_equal(loaded(f"{url}-b", state), expected)
    assert writer.written.done()


def test_a_file_url_is_a_directory(tmp_path):
    pyckpt.save({"w": torch.ones(3)}, (tmp_path / "a").as_uri())
    assert loaded(str(tmp_path / "a"), {"w": torch.zeros(3)})["w"].sum() == 3


@pytest.mark.parametrize("bad", ["foo://a/b", "s3://bucket/a?b", "s3://bucket/a#b"])
def test_what_is_no_address_is_refused_before_anything_is_saved(bad):
    with pytest.raises(ValueError, match=r"no address of an object store|has a '\?' or '#'"):
        pyckpt.DirectWriter(bad)


def test_a_copy_without_its_metadata_is_not_taken_for_remains(url):
    obstore.put(open_store(url), "__0_abc.distcp", b"data")
    with pytest.raises(FileExistsError, match=r"no \.metadata"):
        pyckpt.save({"w": torch.ones(3)}, url)
    assert names(url) == {"__0_abc.distcp"}


def test_what_a_killed_save_has_left_is_swept_and_nothing_else(url):
    store = open_store(url)
    for name in ("__0_abc.distcp", "__7_abc.distcp", ".saving", "notes.txt", "below/__0_a.distcp"):
        obstore.put(store, name, b"data")
    pyckpt.save({"w": torch.ones(3)}, url)
    assert {"notes.txt", "below/__0_a.distcp", ".metadata"} < names(url)
    assert len(names(url)) == 4
    assert not any("abc" in name or name == ".saving" for name in names(url))


class Failing:
    """Fails one request, by number, and counts all; requests of obstore's Python calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, *, after: bool) -> None:
        self.count = 0
        for call in ("put", "head", "get", "list", "delete"):
            monkeypatch.setattr(obstore, call, self._failing(getattr(obstore, call), number, after))

    def _failing(self, call: Any, number: int, after: bool) -> Any:
        def failing(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count != number:
                return call(*args, **options)
            if after:
                call(*args, **options)
            raise obstore.exceptions.GenericError("no answer")

        return failing


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("pyckpt.remote.objects._PATIENCE_SECONDS", 0.0)


@pytest.mark.parametrize("after", [False, True], ids=["unheard", "unanswered"])
def test_whichever_request_fails_there_is_the_old_checkpoint_or_the_new(url, after):
    old, new = {"w": torch.zeros(1000)}, {"w": torch.ones(1000)}
    outcomes = []
    for number in range(1, 50):
        here = f"{url}-{number}"
        pyckpt.save(old, here)
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing = Failing(monkeypatch, number, after=after)
            try:
                pyckpt.save(new, here, overwrite=True)
                outcomes.append("saved")
            except OSError as error:
                outcomes.append("failed" if f"{error.filename}".startswith(here) else str(error))
        expected = new if outcomes[-1] == "saved" else old
        must_equal(loaded(here, old), expected)
        pyckpt.save(new, here, overwrite=True)
        must_equal(loaded(here, old), new)
        assert len(names(here)) == 2
        if failing.count < number:
            break
    assert outcomes[-1] == "saved"
    assert set(outcomes) == {"saved", "failed"}
    assert outcomes.count("failed") >= 4


def test_of_two_saves_that_overlap_the_first_to_commit_counts(url, monkeypatch):
    pyckpt.save({"w": torch.zeros(10)}, url)
    replace = Objects.replace

    def replacing(self: Objects, name: str, data: bytes, seen: Any) -> None:
        monkeypatch.setattr(Objects, "replace", replace)
        pyckpt.save({"w": torch.full((10,), 2.0)}, url, overwrite=True)  # another job
        replace(self, name, data, seen)

    monkeypatch.setattr(Objects, "replace", replacing)
    with pytest.raises(FileExistsError, match="another save was committed there"):
        pyckpt.save({"w": torch.ones(10)}, url, overwrite=True)
    assert loaded(url, {"w": torch.zeros(10)})["w"].sum() == 20
    # The other's sweep took what it saw of this one.
    assert len(names(url)) == 2


def test_the_sweep_leaves_what_a_later_save_writes(url, monkeypatch):
    """A save that begins after the commit may commit itself: nothing of it goes."""
    pyckpt.save({"w": torch.zeros(10)}, url)
    delete = Objects.delete

    def deleting(self: Objects, going: Any) -> None:
        obstore.put(open_store(url), "__0_later.distcp", b"data")
        delete(self, going)

    monkeypatch.setattr(Objects, "delete", deleting)
    pyckpt.save({"w": torch.ones(10)}, url, overwrite=True)
    assert "__0_later.distcp" in names(url)
    assert len(names(url)) == 3


def test_a_store_without_conditions_still_sees_another_save(url, monkeypatch):
    put = obstore.put

    def unconditional(*args: Any, mode: Any = None, **options: Any) -> Any:
        if mode is not None:
            raise NotImplementedError
        return put(*args, **options)

    monkeypatch.setattr(obstore, "put", unconditional)
    pyckpt.save({"w": torch.zeros(10)}, url)
    pyckpt.save({"w": torch.ones(10)}, url, overwrite=True)
    assert loaded(url, {"w": torch.zeros(10)})["w"].sum() == 10
    objects = Objects(url)
    seen = objects.version(".metadata")
    objects.put(".metadata", b"of another")
    with pytest.raises(FileExistsError):
        objects.replace(".metadata", b"ours", seen)


def test_a_save_that_fails_in_the_middle_sends_nothing_that_counts(url, engine, monkeypatch):
    state = {f"w{i}": torch.randn(SLOT) for i in range(40)}
    pyckpt.save({"w0": torch.zeros(3)}, url)
    before = names(url)
    add = _C.StreamJob.add_tensor
    left = [20]

    def failing(job: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise PyckptError("no more")
        return add(job, *args)

    monkeypatch.setattr(_C.FillJob, "add_tensor", failing)
    with pytest.raises(PyckptError, match="no more"):
        pyckpt.save(state, url, engine=engine, overwrite=True)
    assert names(url) == before
    assert not [one for one in threading.enumerate() if one.name == "pyckpt-put"]


def test_a_store_that_fails_in_the_middle_ends_the_save_with_its_error(url, engine, monkeypatch):
    put = obstore.put

    def failing(store: Any, name: str, data: Any, **options: Any) -> Any:
        if name.endswith(".distcp"):
            if not isinstance(data, bytes):
                next(data)
            raise obstore.exceptions.GenericError("it is full")
        return put(store, name, data, **options)

    monkeypatch.setattr(obstore, "put", failing)
    state = {f"w{i}": torch.randn(SLOT) for i in range(100)}
    with pytest.raises(OSError, match="it is full") as raised:
        pyckpt.save(state, url, engine=engine)
    assert raised.value.filename.startswith(url)
    assert not [one for one in threading.enumerate() if one.name == "pyckpt-put"]
    monkeypatch.undo()
    pyckpt.save(state, url, engine=engine)
    must_equal(loaded(url, state), state)


def test_a_store_that_drops_the_bytes_before_it_raises_ends_the_save(url, engine, monkeypatch):
    """As obstore's multipart uploads do: what they took is gone when the error is told."""
    put = obstore.put

    def dropping(store: Any, name: str, data: Any, **options: Any) -> Any:
        if name.endswith(".distcp"):
            assert not isinstance(data, bytes)
            for _ in range(10):
                next(data)
            data.close()
            raise obstore.exceptions.GenericError("it refuses the part")
        return put(store, name, data, **options)

    monkeypatch.setattr(obstore, "put", dropping)
    monkeypatch.setattr("pyckpt.remote.objects.PIECE_BYTES", 2 * SLOT)
    state = {f"w{i}": torch.randn(SLOT) for i in range(100)}
    with pytest.raises(OSError, match="it refuses the part"):
        pyckpt.save(state, url, engine=engine)
    assert names(url) <= {".saving"}
    assert not [one for one in threading.enumerate() if one.name == "pyckpt-put"]


def test_memory_is_bounded_by_what_the_store_has_taken(url, engine, monkeypatch):
    """The bytes are made when they are asked for, and not before."""
    taken = []

    def put(self: Objects, name: str, pieces: Iterator[bytes], *, expected: int) -> None:
        for piece in pieces:
            taken.append(len(piece))
            copied = writers[0].statistics.bytes_written
            assert copied == sum(taken)
        raise RuntimeError("enough")

    monkeypatch.setattr(Objects, "put_pieces", put)
    writers = [pyckpt.DirectWriter(url, engine=engine)]
    state = {f"w{i}": torch.randn(SLOT) for i in range(20)}
    with pytest.raises(CheckpointException, match="enough"):
        dcp.save(state, storage_writer=writers[0], no_dist=True)
    assert max(taken) <= SLOT
    assert sum(taken) > 20 * 4 * SLOT


def test_each_rank_may_commit_for_itself(url):
    state = {"w": torch.randn(1000)}
    for number in (1, 2):
        dcp.save(
            state,
            storage_writer=pyckpt.DirectWriter(url),
            no_dist=True,
            use_collectives=False,
        )
        assert len(names(url)) == 2, number
    assert "__0.metadata" in names(url)
