"""moto's S3 server in a process of its own, which counts requests, and can be slow and fail.

    python benchmarks/_s3_server.py LATENCY_SECONDS SHARE_OF_ERRORS

prints its port. ``GET /-/requests`` answers how many requests it has had.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Server:
    """A server that runs. Meanwhile the environment has obstore's settings for it."""

    address: str

    def requests(self) -> dict[str, int]:
        """How many requests there were so far, by method."""
        with urllib.request.urlopen(f"{self.address}/-/requests") as answer:
            found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def serving(bucket: str, *, latency: float = 0.0, errors: float = 0.0) -> Iterator[Server]:
    """Run a server with an empty bucket."""
    from pyckpt.remote.address import open_store

    process = subprocess.Popen(
        [sys.executable, __file__, str(latency), str(errors)],
        stdin=subprocess.PIPE,  # at its end, which comes with that of this process, the server ends
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline()
        if not port:
            raise SystemExit('the S3 server did not start; it needs: pip install "moto[server]"')
        address = f"http://127.0.0.1:{int(port)}"
        settings = {
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": address,
        }
        with mock.patch.dict(os.environ, settings):
            open_store.cache_clear()
            request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
            urllib.request.urlopen(request).close()
            yield Server(address)
    finally:
        open_store.cache_clear()
        process.kill()
        process.wait()


class Middleware:
    """Counts, delays, and fails."""

    def __init__(self, application: Any, latency: float, errors: float) -> None:
        self._application = application
        self._latency = latency
        self._errors = errors
        self._random = random.Random(1)
        self._counts: Counter[str] = Counter()

    def __call__(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environment["REQUEST_METHOD"], environment["PATH_INFO"]
        if path == "/-/requests":
            start("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(self._counts).encode()]
        self._counts[method] += 1
        time.sleep(self._latency)
        if path.count("/") > 1 and self._random.random() < self._errors:
            start("503 Slow Down", [("Content-Type", "text/plain")])
            return [b"try again"]
        answer: Iterable[bytes] = self._application(environment, start)
        return answer


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    wrapped = Middleware(application, float(sys.argv[1]), float(sys.argv[2]))
    server = make_server("127.0.0.1", 0, wrapped, threaded=True)
    print(server.server_port, flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
