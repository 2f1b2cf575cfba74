"""Loading a checkpoint from the URL of a store: all that a load from a directory does."""

from pathlib import Path

import obstore
import pytest
import torch
import torch.distributed.checkpoint as dcp
from obstore.store import LocalStore
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import pyckpt
from pyckpt.errors import CorruptCheckpoint, LoadError, UnsafeCheckpoint
from pyckpt.remote import folder


def make_state(fill=None):
    generator = torch.manual_seed(3)

    def tensor(*shape, dtype=torch.float32):
        made = torch.randn(*shape, generator=generator)
        return (made if fill is None else torch.full_like(made, fill)).to(dtype)

    return {
        "model": {f"w{i}": tensor(50, 37) for i in range(40)},
        "half": tensor(13, dtype=torch.bfloat16),
        "across": tensor(8, 9).t(),
        "empty": torch.empty(0, 3),
        "scalar": tensor(()) if fill is None else torch.tensor(fill),
        "step": 7 if fill is None else 0,
        "name": "a run" if fill is None else "",
        "sizes": (1, "two") if fill is None else (),
    }


def assert_alike(state, other):
    for key, value in state.items():
        if isinstance(value, dict):
            assert_alike(value, other[key])
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


@pytest.fixture(params=["ours", "stock"])
def checkpoint(request, tmp_path):
    path = tmp_path / "checkpoint"
    if request.param == "ours":
        pyckpt.save(make_state(), path)
    else:
        dcp.save(make_state(), checkpoint_id=path, planner=DefaultSavePlanner(), no_dist=True)
    return path


@pytest.fixture(autouse=True)
def stores_are_folders(monkeypatch):
    """A real store of obstore at each URL, of the files in a directory."""
    monkeypatch.setattr(
        folder, "open_store", lambda url: LocalStore(url.removeprefix("s3://bucket"), mkdir=True)
    )


def url(path: Path) -> str:
    return f"s3://bucket{path}"


def test_a_state_is_loaded_in_few_requests(checkpoint, monkeypatch):
    made = []
    get = obstore.get
    monkeypatch.setattr(obstore, "get", lambda *a, **k: (made.append(a[1]), get(*a, **k))[1])
    state = make_state(fill=0.0)
    report = pyckpt.load(state, url(checkpoint))
    assert_alike(make_state(), state)
    assert len(report.loaded) == 47
    assert made.count(".metadata") == 1
    # Tensors, then objects, each in one request: there are 300 kB in one file.
    assert len(made) - 1 <= 2


def test_everything_is_loaded_without_a_state(checkpoint):
    assert_alike(make_state(), pyckpt.load(url(checkpoint)))


def test_a_flipped_bit_is_found(checkpoint):
    (data,) = checkpoint.glob("*.distcp")
    content = bytearray(data.read_bytes())
    first = make_state()["model"]["w0"].view(-1).view(torch.uint8).tolist()
    content[content.index(bytes(first)) + 1_000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="w0 in s3://bucket"):
        pyckpt.load(make_state(fill=0.0), url(checkpoint))


def test_a_file_of_another_size_is_damage(checkpoint):
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"s3://bucket.* has \d+ bytes, and \d+ were saved"):
        pyckpt.load(make_state(fill=0.0), url(checkpoint))


def test_dcp_takes_a_reader_of_a_url(checkpoint):
    state = make_state(fill=0.0)
    dcp.load(state, storage_reader=pyckpt.DirectReader(url(checkpoint)), no_dist=True)
    assert_alike(make_state(), state)


def test_another_dtype_and_a_view_are_filled(checkpoint):
    wide = torch.zeros(50, 74, dtype=torch.float64)
    pyckpt.load({"model": {"w3": wide[:, ::2]}}, url(checkpoint), unexpected="ignore")
    assert torch.equal(wide[:, ::2], make_state()["model"]["w3"].double())
    assert not wide[:, 1::2].any()


def test_nothing_there_is_told_with_the_address(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        pyckpt.load(make_state(), url(tmp_path / "none"))
    assert raised.value.filename == f"s3://bucket{tmp_path}/none/.metadata"


def test_an_address_of_no_store_is_told(monkeypatch):
    monkeypatch.undo()
    with pytest.raises((ValueError, LoadError), match="no address of an object store"):
        pyckpt.load(make_state(), "foo://bucket/checkpoint")


def test_code_in_the_metadata_is_not_run(tmp_path):
    import pickle

    (tmp_path / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(UnsafeCheckpoint):
        pyckpt.load(make_state(), url(tmp_path))


def test_a_url_of_a_file_is_a_path(checkpoint):
    state = make_state(fill=0.0)
    pyckpt.load(state, f"file://{checkpoint}")
    assert_alike(make_state(), state)
    assert pyckpt.DirectReader(f"file://{checkpoint}").path == checkpoint
