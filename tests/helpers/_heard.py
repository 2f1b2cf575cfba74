"""What a test hears of pyckpt's log while something else goes on, and saves that it holds."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

import pyckpt
from pyckpt import activity


class Heard(logging.Handler):
    """Keeps the messages of the logger "pyckpt" at INFO and above, and waits for them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self._changed = threading.Condition()
        logger = logging.getLogger("pyckpt")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.records.append(record)
            self._changed.notify_all()

    @property
    def texts(self) -> list[str]:
        with self._changed:
            return [record.getMessage() for record in self.records]

    def wait_for(self, part: str) -> str:
        """The first message with this part."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [t for t in (r.getMessage() for r in self.records) if part in t]
            return bool(found)

        with self._changed:
            assert self._changed.wait_for(is_there, 60), part
        return found[0]

    def stop(self) -> None:
        logger = logging.getLogger("pyckpt")
        logger.removeHandler(self)
        logger.setLevel(logging.NOTSET)


class Gate:
    """Holds saves before their commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        finish = pyckpt.DirectWriter.finish

        def held(*arguments: Any, **options: Any) -> None:
            self.reached.set()
            assert self.open.wait(60)
            finish(*arguments, **options)

        monkeypatch.setattr(pyckpt.DirectWriter, "finish", held)


def beat_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the heartbeats of this process follow each other without a pause of half a minute."""
    monkeypatch.setattr(activity, "HEARTBEAT_SECONDS", 0.005)
    monkeypatch.setattr(activity, "_watch", activity._Watch())
