"""Loading from a server that speaks S3."""

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt.remote import address

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch):
    """A bucket; all of obstore's settings for it are in the environment, as a user has them."""
    server_module = pytest.importorskip("moto.server")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    address.open_store.cache_clear()
    bucket = boto3.resource("s3", endpoint_url=f"http://{host}:{port}").create_bucket(Bucket="runs")
    yield bucket
    server.stop()
    address.open_store.cache_clear()


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
