"""A server that speaks S3, for tests: moto's, in this process."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from pyckpt.remote import address


def settings() -> dict[str, str]:
    """What the environment says of AWS."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


Hook = Callable[[str, str, Callable[[], list[bytes]]], "list[bytes] | int"]
"""Called for each request with its method, its path with the query, and what has the server answer
it. It returns the answer, or the status of an error instead."""


class _Hooked:
    """The server's application, with a hook around it."""

    def __init__(self, application: Any, hook: Hook) -> None:
        self._application = application
        self._hook = hook

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
        path = f"{environment['PATH_INFO']}?{environment['QUERY_STRING']}"
        said: list[Any] = []

        def answer() -> list[bytes]:
            return list(self._application(environment, lambda *args: said.append(args)))

        found = self._hook(environment["REQUEST_METHOD"], path, answer)
        if isinstance(found, int):
            start(f"{found} Error", [("Content-Type", "text/plain")])
            return [b"the test says so"]
        start(*said[-1])
        return found


@contextmanager
def bucket(name: str = "runs", *, hook: Hook | None = None) -> Iterator[Any]:
    """A bucket, as boto3 has it. Meanwhile the environment has all of obstore's settings for it;
    `settings` is what to give to child processes, which have another environment.

    Args:
        hook: sees the requests to what is in the bucket; it may fail them.
    """
    server_module = pytest.importorskip("moto.server")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    found = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with mock.patch.dict(os.environ, found):
        address.open_store.cache_clear()
        try:
            # What earlier servers of this process have held is there still.
            reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
            urllib.request.urlopen(reset).close()
            store = boto3.resource("s3", endpoint_url=found["AWS_ENDPOINT_URL"])
            made = store.create_bucket(Bucket=name)
            if hook is not None:
                server._server.app = _Hooked(server._server.app, hook)
            yield made
        finally:
            server.stop()
            address.open_store.cache_clear()
