"""RemoteJob does what the engine's job does, in few requests, and over errors of the store."""

import math

import obstore
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from obstore.exceptions import GenericError

from pyckpt import _C
from pyckpt.engine import default_engine
from pyckpt.errors import CorruptCheckpoint
from pyckpt.remote import job as job_module
from pyckpt.remote.address import open_store
from pyckpt.remote.job import RemoteJob
from pyckpt.train.store.transient import Failure, failure_of

SIZE = 300_007


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("objects")
    bytes_ = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.manual_seed(1))
    (folder / "data").write_bytes(bytes(bytes_.tolist()))
    return folder


def remote(folder) -> RemoteJob:
    url = f"file://{folder}"
    job = RemoteJob(open_store(url), url, checksum=True)
    assert job.add_object("data") == 0
    return job


def native(folder) -> _C.ReadJob:
    job = _C.ReadJob(default_engine().native, direct="off", checksum=True)
    job.add_file(str(folder / "data"))
    return job


@st.composite
def boxes(draw):
    """A box of elements in the file: its first byte, its shape, and the strides of a larger one."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float64]))
    shape = draw(st.lists(st.integers(1, 6), max_size=3))
    whole = [n + draw(st.integers(0, 3)) for n in shape]
    stride = [math.prod(whole[d + 1 :]) for d in range(len(whole))]
    offset = draw(st.integers(0, SIZE - 8 * math.prod(whole)))
    return dtype, shape, stride, offset


@given(boxes=st.lists(boxes(), min_size=1, max_size=8))
def test_it_reads_what_the_engines_job_reads(folder, boxes):
    found = []
    for job in (remote(folder), native(folder)):
        tensors = [torch.zeros(shape, dtype=dtype) for dtype, shape, _, _ in boxes]
        numbers = [
            job.add_tensor(0, offset, tensor, stride)
            for tensor, (_, _, stride, offset) in zip(tensors, boxes, strict=True)
        ]
        buffer = bytearray(1000)
        last = job.add_buffer(0, 77, buffer)
        checksums = job.run()
        found.append(
            (
                [bytes(tensor.view(-1).view(torch.uint8).tolist()) for tensor in tensors],
                [checksums[number] if number >= 0 else None for number in numbers],
                checksums[last],
                buffer,
            )
        )
    (ours, our_checksums, *rest), (theirs, their_checksums, *their_rest) = found
    assert ours == theirs
    assert rest == their_rest
    for mine, other in zip(our_checksums, their_checksums, strict=True):
        # Of a box with gaps, theirs may include the gaps; ours is then of no range.
        assert mine is None or mine == other


@pytest.fixture
def gets(monkeypatch):
    """The requests that are made: name and range."""
    made = []
    get = obstore.get

    def noting(store, path, *, options=None):
        made.append((path, (options or {}).get("range")))
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", noting)
    return made


def test_ranges_near_each_other_share_a_request(folder, gets, monkeypatch):
    monkeypatch.setattr(job_module, "GET_BYTES", 10_000)
    monkeypatch.setattr(job_module, "GAP_BYTES", 100)
    job = remote(folder)
    for begin in (0, 150, 5_000, 14_900, 15_200):
        job.add_buffer(0, begin, bytearray(100))
    long = bytearray(25_000)
    number = job.add_buffer(0, 100_000, long)
    checksums = job.run()
    assert sorted(range_ for _, range_ in gets) == [
        (0, 250),
        (5_000, 5_100),
        (14_900, 15_000),
        (15_200, 15_300),
        (100_000, 110_000),
        (110_000, 120_000),
        (120_000, 125_000),
    ]
    assert bytes(long) == (folder / "data").read_bytes()[100_000:125_000]
    assert checksums[number] == _C.crc32(long)


def test_ranges_may_overlap(folder, gets, monkeypatch):
    monkeypatch.setattr(job_module, "GET_BYTES", 1_000)
    job = remote(folder)
    buffers = [
        (begin, bytearray(n)) for begin, n in ((0, 5_000), (10, 20), (990, 20), (4_000, 2_000))
    ]
    for begin, buffer in buffers:
        job.add_buffer(0, begin, buffer)
    checksums = job.run()
    data = (folder / "data").read_bytes()
    for number, (begin, buffer) in enumerate(buffers):
        assert bytes(buffer) == data[begin : begin + len(buffer)]
        assert checksums[number] == _C.crc32(buffer)
    assert all(end - begin <= 1_000 for _, (begin, end) in gets)


def test_a_box_with_wide_gaps_is_read_in_parts(folder, monkeypatch):
    monkeypatch.setattr(job_module, "_BOX_BYTES", 4_000)
    job = remote(folder)
    column = torch.zeros(100, 2, dtype=torch.int16)
    assert job.add_tensor(0, 6, column, [1_000, 1]) == -1
    job.run()
    data = torch.frombuffer(bytearray((folder / "data").read_bytes()[:-1]), dtype=torch.int16)
    assert torch.equal(column, data[3:].as_strided((100, 2), (1_000, 1)))


def test_what_is_strided_in_memory_is_read_in_parts_with_one_checksum(folder, monkeypatch):
    monkeypatch.setattr(job_module, "_BOX_BYTES", 4_000)
    job = remote(folder)
    whole = torch.zeros(37, 200, dtype=torch.int16)
    number = job.add_tensor(0, 6, whole[:, ::2].t())
    checksums = job.run()
    data = (folder / "data").read_bytes()[6 : 6 + 37 * 100 * 2]
    assert checksums[number] == _C.crc32(data)
    expected = torch.frombuffer(bytearray(data), dtype=torch.int16).view(100, 37)
    assert torch.equal(whole[:, ::2].t(), expected)
    assert not whole[:, 1::2].any()


class Broken:
    """An answer that fails after some chunks."""

    def __init__(self, chunks):
        self._chunks = chunks

    def stream(self, min_chunk_size):
        yield from self._chunks
        raise GenericError("connection reset")


@pytest.fixture
def failing(monkeypatch):
    """The store fails so many times, each time after some bytes."""
    left = [0]
    asked = []
    get = obstore.get

    def fail(store, path, *, options=None):
        asked.append(options["range"])
        if left[0]:
            left[0] -= 1
            begin, _ = options["range"]
            some = get(store, path, options={"range": (begin, begin + 10)})
            return Broken([bytes(some.bytes())])
        return get(store, path, options=options)

    monkeypatch.setattr(obstore, "get", fail)
    monkeypatch.setattr(job_module, "_PATIENCE_SECONDS", 0.0)
    return left, asked


def test_after_an_error_it_asks_for_the_rest(folder, failing):
    left, asked = failing
    left[0] = 2
    job = remote(folder)
    buffer = bytearray(1_000)
    number = job.add_buffer(0, 50, buffer)
    checksums = job.run()
    assert asked == [(50, 1_050), (60, 1_050), (70, 1_050)]
    assert bytes(buffer) == (folder / "data").read_bytes()[50:1_050]
    assert checksums[number] == _C.crc32(buffer)


def test_a_store_that_keeps_failing_is_an_error_with_the_address(folder, failing):
    left, _ = failing
    left[0] = 100
    job = remote(folder)
    job.add_buffer(0, 50, bytearray(1_000))
    with pytest.raises(OSError, match="connection reset") as raised:
        job.run()
    assert raised.value.filename == f"file://{folder}/data"
    # It says nothing of the checkpoint: no older one may be restored in its place.
    assert failure_of(raised.value, last=True) is Failure.OTHER


def test_an_object_that_is_too_short_is_damage(folder):
    job = remote(folder)
    job.add_buffer(0, SIZE - 10, bytearray(20))
    with pytest.raises(CorruptCheckpoint, match="ends at"):
        job.run()


def test_what_is_no_plain_memory_is_refused(folder):
    job = remote(folder)
    assert job.add_tensor(0, 0, torch.zeros(2, dtype=torch.complex64).conj()) is None
    assert job.add_tensor(0, 0, torch.zeros(2).to_sparse()) is None
