"""Saving into a server that speaks S3: by ranks, killed at any request, and when requests fail."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import _s3
import obstore
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _ranks import Child, Pipe, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pyckpt
from pyckpt.remote import address

pytestmark = pytest.mark.slow

URL = "s3://runs/a/step-00000001"
LARGE = 11 << 20  # bytes: two parts of an upload


def _names(bucket: Any) -> list[str]:
    return sorted(one.key.rpartition("/")[2] for one in bucket.objects.filter(Prefix="a/"))


def _state(value: float, size: int = LARGE) -> dict[str, Any]:
    return {"w": torch.full((size // 4,), value), "value": value}


def _loaded() -> float:
    found = _state(-1.0)
    pyckpt.load(found, URL)
    assert (found["w"] == found["value"]).all()
    return float(found["value"])


def _sharded(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(1_000_003, dtype=torch.float32) + value
    return {"w": distribute_tensor(whole, mesh, [Shard(0)])}


def _save(settings: dict[str, str], value: float) -> None:
    os.environ.update(settings)
    pyckpt.save(_sharded(value), URL, overwrite=True)


def _restored(settings: dict[str, str]) -> float:
    os.environ.update(settings)
    found = _sharded(0.0)
    pyckpt.load(found, URL)
    tensor = found["w"]
    assert isinstance(tensor, DTensor)
    whole = tensor.full_tensor()
    assert torch.equal(whole - whole[0], torch.arange(1_000_003, dtype=torch.float32))
    return float(whole[0])


def test_ranks_save_each_its_part_and_other_numbers_of_ranks_load():
    with _s3.bucket() as bucket:
        for value in (1.0, 2.0):
            run_ranks(2, _save, _s3.settings(), value)
            names = _names(bucket)
            assert len(names) == 3, names
            assert [name[:4] for name in names] == [".met", "__0_", "__1_"]
        assert run_ranks(2, _restored, _s3.settings()) == [2.0, 2.0]
        assert run_ranks(1, _restored, _s3.settings()) == [2.0]


def test_stock_reads_what_is_downloaded_and_over_fsspec(tmp_path):
    with _s3.bucket() as bucket:
        pyckpt.save(_state(3.0), URL)
        for one in bucket.objects.all():
            bucket.download_file(one.key, str(tmp_path / one.key.rpartition("/")[2]))
        found = _state(0.0)
        dcp.load(found, checkpoint_id=tmp_path)
        assert (found["w"] == 3).all()

        fsspec = pytest.importorskip("obstore.fsspec")
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        fsspec.register("s3")
        found = _state(0.0, 64 << 10)
        pyckpt.save(_state(4.0, 64 << 10), URL, overwrite=True)
        dcp.load(found, storage_reader=FsspecReader(URL))
        assert (found["w"] == 4).all()


class Killing:
    """Kills a process at a request, before or after the server has done it."""

    def __init__(self) -> None:
        self.process = 0
        self.at = 0
        self.after = False
        self.count = 0
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str, answer: Callable[[], list[bytes]]) -> Any:
        if not self.process:
            return answer()
        with self._lock:
            self.count += 1
            if self.count != self.at:
                return answer()
            if self.after:
                answer()
            os.kill(self.process, signal.SIGKILL)
            self.process = 0
            return 503


def _save_new(pipe: Pipe, settings: dict[str, str], value: float) -> None:
    os.environ.update(settings)
    pipe.send(os.getpid())
    pipe.wait()
    pyckpt.save(_state(value), URL, overwrite=True)
    pipe.send("saved")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_request_the_store_has_the_old_checkpoint_or_the_new(after):
    killing = Killing()
    with _s3.bucket(hook=killing) as bucket:
        pyckpt.save(_state(0.0), URL)
        there = 0.0
        for at in range(1, 50):
            child = Child(_save_new, _s3.settings(), float(at))
            killing.process, pid = 0, child.receive()
            killing.count, killing.at, killing.after, killing.process = 0, at, after, pid
            child.connection.send("go")
            try:
                outcome = child.receive()
            except EOFError:
                outcome = "killed"
            killing.process = 0
            child.join()
            found = _loaded()
            assert found in (there, float(at)), f"request {at}"
            assert outcome == "killed" or found == float(at)
            there = found
            if outcome == "saved":
                break
        assert outcome == "saved"
        assert at > 6
        # The last save has swept what all that were killed have left.
        assert len(_names(bucket)) == 2


def test_requests_that_fail_are_sent_again():
    sent: list[str] = []

    def failing(method: str, path: str, answer: Callable[[], list[bytes]]) -> Any:
        sent.append(method)
        # Each third request; and for one in six of them the answer is lost after it was done.
        if len(sent) % 3 == 0:
            if len(sent) % 6 == 0:
                answer()
            return 503
        return answer()

    with _s3.bucket(hook=failing) as bucket:
        for value in (1.0, 2.0, 3.0):
            pyckpt.save(_state(value), URL, overwrite=True)
            assert _loaded() == value
        assert len(_names(bucket)) == 2


def test_a_store_that_is_down_is_told(monkeypatch):
    def impatient(url: str) -> Any:
        from obstore.store import from_url

        return from_url(url, retry_config={"max_retries": 1})

    with _s3.bucket():
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setattr("pyckpt.remote.objects.open_store", impatient)
        with pytest.raises(OSError, match=r"the store failed.*AWS_ENDPOINT_URL") as raised:
            pyckpt.save(_state(1.0), URL)
    assert str(raised.value.filename).startswith(URL)


def test_credentials_that_are_refused_are_told():
    def refusing(method: str, path: str, answer: Callable[[], list[bytes]]) -> Any:
        return 403

    with _s3.bucket(hook=refusing), pytest.raises(PermissionError, match="credentials"):
        pyckpt.save(_state(1.0), URL)


def test_a_part_that_is_refused_fails_the_save_and_is_told():
    """In the middle of an upload, while more bytes of it are made."""

    def refusing(method: str, path: str, answer: Callable[[], list[bytes]]) -> Any:
        if method == "PUT" and "partNumber=" in path:
            number = int(path.partition("partNumber=")[2].partition("&")[0])
            if number >= 3:
                return 403
        return answer()

    state = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(24)}  # 12 parts
    with _s3.bucket(hook=refusing) as bucket:
        with pytest.raises(PermissionError, match="credentials") as raised:
            pyckpt.save(state, URL)
        assert str(raised.value.filename).startswith(f"{URL}/__0_")
        assert _names(bucket) == [".saving"]
        assert not [one for one in threading.enumerate() if one.name == "pyckpt-put"]


def test_no_more_than_some_parts_are_in_memory():
    """While a part is on its way, few bytes beyond it are made."""
    size = 200 << 20
    sent = [0]
    most = [0]
    writer = pyckpt.DirectWriter(URL)

    def counting(method: str, path: str, answer: Callable[[], list[bytes]]) -> Any:
        found = answer()
        if method == "PUT" and "partNumber" in path:
            sent[0] += 8 << 20
            statistics = writer.statistics
            assert statistics is not None
            most[0] = max(most[0], statistics.bytes_written - sent[0])
        return found

    with _s3.bucket(hook=counting):
        dcp.save({"w": torch.zeros(size // 4)}, storage_writer=writer, no_dist=True)
        assert sent[0] >= size
        assert most[0] <= 8 * (8 << 20)
        # The parts are where they belong.
        store = address.open_store(URL)
        (name,) = {one["path"] for page in obstore.list(store) for one in page} - {".metadata"}
        assert obstore.head(store, name)["size"] >= size
