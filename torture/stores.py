"""Stores for `torture.concurrency`: what a child does with them, and a server that fails.

Several threads of a child save to the same addresses at once, and load from them. Some saves are
given up: by an object that cannot be saved, by an engine or a stager that is closed. The server
speaks S3 (moto's). It refuses requests, fails them, answers late, and fails those that it has done.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import pyckpt
from pyckpt.errors import CheckpointReplaced, EngineClosed, PyckptError
from torture.results import ROOT
from torture.stepped import state_at, step_of

__all__ = ["ADDRESSES", "BUCKET", "Server", "StoreWork", "judge_address", "missing"]

BUCKET = "runs"
ADDRESSES = (f"s3://{BUCKET}/plain/a", f"s3://{BUCKET}/plain/b")
"""Where several threads save at once."""
_HOW = ("save", "save", "dcp.save", "async_save", "unsaveable", "engine", "stager")
_FAILED = (OSError, PyckptError, CheckpointException)


def missing() -> str:
    """What this machine lacks, if it does."""
    lacks = [name for name in ("obstore", "moto", "boto3") if not importlib.util.find_spec(name)]
    return ", ".join(lacks)


# --- in the child ---------------------------------------------------------------------------------


class _Unsaveable:
    def __reduce__(self) -> Any:
        raise RuntimeError("an object that cannot be saved, as planned")


class StoreWork:
    """What threads of a child do with stores, each thing once a call. Any thread may call.

    Args:
        folder: for ``file://``.
        tell: writes down a line that outlives the process.
        shared: the addresses at which all save; may be empty.
        first: the number of the first save: no earlier child had it.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], None], shared: Sequence[str], first: int
    ) -> None:
        self._tell = tell
        self._file = f"file://{folder}/plain-file"
        self._shared = [*shared, self._file]
        self._steps = itertools.count(first)
        self._mine = threading.local()

    def save(self, random: Random) -> None:
        """Saves somewhere, in one of many ways; some must fail, and all may."""
        url = random.choice([*self._shared, self._own()])
        step = next(self._steps)
        how = random.choice(_HOW)
        state = state_at(step, large=random.random() < 0.3)
        self._tell(f"store-begin {url} {step} {how}")
        try:
            self._save(random, url, state, how)
        except _FAILED as error:
            self._tell(f"store-failed {url} {step} {type(error).__name__}")
            return
        self._tell(f"store-saved {url} {step}")
        assert how != "unsaveable", "what cannot be saved was saved"
        if url == self._own():
            assert step_of(pyckpt.load(url)) == step, f"{url} holds another step"

    def load(self, random: Random) -> None:
        """Loads what other threads, or earlier children, have saved."""
        url = random.choice(self._shared)
        try:
            loaded = pyckpt.load(url)
        except (OSError, CheckpointReplaced):
            return  # there is none; or it was replaced, or the server failed
        step_of(loaded)

    def _own(self) -> str:
        """An address in memory, which no other thread has."""
        if not hasattr(self._mine, "url"):
            self._mine.url = f"memory:///{uuid.uuid4().hex}/step-1"
        url: str = self._mine.url
        return url

    def _save(self, random: Random, url: str, state: dict[str, Any], how: str) -> None:
        if how == "save":
            pyckpt.save(state, url, overwrite=True)
        elif how == "dcp.save":
            dcp.save(state, storage_writer=pyckpt.DirectWriter(url, overwrite=True))
        elif how == "unsaveable":
            state["nested"]["object"] = _Unsaveable()
            dcp.save(state, storage_writer=pyckpt.DirectWriter(url, overwrite=True))
        elif how == "engine":
            self._with_engine_that_closes(random, url, state)
        else:
            self._in_background(random, url, state, closes=how == "stager")

    def _with_engine_that_closes(self, random: Random, url: str, state: dict[str, Any]) -> None:
        engine = pyckpt.Engine(max_pinned_bytes=8 << 20, slot_bytes=256 << 10, io_threads=2)
        closing = threading.Timer(random.random() / 5, engine.close)
        closing.start()
        try:
            pyckpt.save(state, url, overwrite=True, engine=engine)
        finally:
            closing.join()

    def _in_background(
        self, random: Random, url: str, state: dict[str, Any], *, closes: bool
    ) -> None:
        stager: Any = pyckpt.PinnedStager()  # torch's protocol names a private attribute
        try:
            response: Any = dcp.async_save(
                state,
                storage_writer=pyckpt.DirectWriter(url, overwrite=True),
                async_stager=stager,
            )
            state.clear()  # the copy is the stager's
            if closes:
                time.sleep(random.random() / 10)
                with suppress(EngineClosed):
                    stager.close()
            getattr(response, "upload_completion", response).result()
        finally:
            stager.close()


# --- in the parent --------------------------------------------------------------------------------


class Server:
    """What the server answers. Its errors are those of real stores, each now and then."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._lock = threading.Lock()
        self._serving = threading.Lock()  # moto reads what another thread of it closes
        self.calm = False
        """Whether it fails nothing now."""
        self.troubles: Counter[str] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """An empty bucket. Meanwhile the environment has what obstore needs to find it."""
        sys.path.insert(0, str(ROOT / "tests" / "helpers"))
        try:
            helper = importlib.import_module("_s3")
        finally:
            sys.path.pop(0)
        with helper.bucket(BUCKET, hook=self._answer):
            yield

    def _answer(
        self, method: str, path: str, answer: Callable[[], list[bytes]]
    ) -> list[bytes] | int:
        # A mirror that cannot be read may hold something newer, and then nothing may be restored.
        troubled = not self.calm and ("plain" in path or method not in ("GET", "HEAD"))
        with self._lock:
            draw = self._random.random() if troubled else 1.0
            late = self._random.random()
        if draw < 0.02:
            return self._count("refused", 403)
        if draw < 0.04:
            return self._count("failed", 500)
        if draw < 0.05:
            return self._count("asked for fewer", 503)
        if draw < 0.06:
            with self._serving:
                answer()
            return self._count("done, and failed", 500)
        if draw < 0.10:
            time.sleep(late / 2)
            self._count("late", 0)
        with self._serving:
            return answer()

    def _count(self, what: str, status: int) -> int:
        with self._lock:
            self.troubles[what] += 1
        return status


def judge_address(url: str, told: Sequence[str]) -> list[str]:
    """What is wrong with what an address holds, after what children have told of it.

    Saves overlap, and the first that commits counts. So it must not hold what was committed before
    another save began that was told to have succeeded.
    """
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    saved: set[int] = set()
    for at, line in enumerate(told):
        words = line.split()
        if len(words) < 3 or not words[0].startswith("store-") or words[1] != url:
            continue
        step = int(words[2])
        if words[0] == "store-begin":
            begun[step] = at
        elif words[0] == "store-saved":
            ended[step] = at
            saved.add(step)
    if not saved:
        return []  # what is there, if anything, is of a save that was not told to have ended
    try:
        found = step_of(pyckpt.load(url))
    except (AssertionError, OSError, PyckptError) as error:
        return [f"{url}: {type(error).__name__}: {error}"]
    if found not in begun:
        return [f"{url} holds step {found}, which nobody saved there"]
    end = ended.get(found, len(told))
    later = [step for step in saved if begun[step] > end]
    return [f"{url} holds step {found}, and {later} were saved after it"] if later else []
