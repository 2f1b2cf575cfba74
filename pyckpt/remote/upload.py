"""`Upload`: an object that is sent while its bytes are made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress

from pyckpt import _C
from pyckpt.remote.objects import Objects

__all__ = ["Upload"]


class Upload:
    """An object on its way to a store, in a thread of its own. It takes its bytes from a job that
    another thread feeds, as fast as the store takes them.

    The object is not there before `finish`: the last request waits for that.

    Args:
        objects: those that it will be one of.
        name: of the object.
        job: its bytes. If the upload fails, so does the job.
        expected: about how many bytes there will be.
    """

    def __init__(self, objects: Objects, name: str, job: _C.StreamJob, expected: int) -> None:
        self._objects = objects
        self._name = name
        self._job = job
        self._expected = expected
        self._good: Future[bool] = Future()
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pyckpt-put", daemon=True)
        self._thread.start()

    @property
    def error(self) -> BaseException | None:
        """Why the store did not take it; None if it did, or if the job failed first."""
        return self._error

    def finish(self) -> None:
        """Say that the bytes are good, and wait until the store has the object.

        Raises:
            OSError: it has not.
        """
        self._good.set_result(True)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give the upload up, and wait until it is over; the job must have failed, or be finished.
        Idempotent, and nothing after `finish`."""
        if not self._good.done():
            self._good.set_result(False)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._objects.put_pieces(self._name, self._pieces(), expected=self._expected)
        except BaseException as error:
            if not self._is_stopped:
                self._error = error
            # Whoever feeds the job waits for this thread otherwise. A job's first error counts.
            with suppress(RuntimeError):
                self._job.fail("the upload failed")

    def _pieces(self) -> Iterator[bytes]:
        try:
            while piece := self._job.take():
                yield piece
            good = self._good.result()
        except Exception:  # and not GeneratorExit: a store that fails drops what it sends
            self._is_stopped = True
            raise
        if not good:
            self._is_stopped = True
            raise RuntimeError("the upload was given up")
