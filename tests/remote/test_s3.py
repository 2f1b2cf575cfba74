"""Loading from a server that speaks S3."""

import _s3
import pytest
import torch
import torch.distributed.checkpoint as dcp

import pyckpt

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket():
    with _s3.bucket() as made:
        yield made


@pytest.mark.parametrize("save", [pyckpt.save, lambda s, p: dcp.save(s, checkpoint_id=p)])
def test_a_checkpoint_in_a_bucket_is_loaded(bucket, tmp_path, save):
    state = {f"w{i}": torch.randn(100, 101) for i in range(40)}
    save({**state, "step": 3}, tmp_path)
    for file in tmp_path.iterdir():
        bucket.upload_file(str(file), f"a/step-00000003/{file.name}")
    found = {**{key: torch.zeros_like(value) for key, value in state.items()}, "step": 0}
    pyckpt.load(found, "s3://runs/a/step-00000003")
    assert found.pop("step") == 3
    assert all(torch.equal(found[key], value) for key, value in state.items())


def test_what_is_not_there_is_told(bucket):
    with pytest.raises(FileNotFoundError, match="there is no such object") as raised:
        pyckpt.load({"w": torch.zeros(3)}, "s3://runs/none")
    assert raised.value.filename == "s3://runs/none/.metadata"


def test_a_bucket_that_is_not_there_is_told(bucket):
    with pytest.raises(OSError, match="s3://other/run"):
        pyckpt.load({"w": torch.zeros(3)}, "s3://other/run")
