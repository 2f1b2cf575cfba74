"""The process that `torture.concurrency` runs: everything at once, until it ends in some way.

It writes down what it does as it does it, a line at a time, so that what was committed is known
however it ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

import pyckpt
from pyckpt import _C
from pyckpt.tools.verifying import verify
from pyckpt.train.store.catalog import Catalog
from torture.stepped import state_at, step_of
from torture.stores import StoreWork

BOUND_SECONDS = 240
"""Longer than any one step takes, however busy the machine. A process that says nothing for that
long hangs."""
_STEPS = 40
_MIRROR_WAIT_SECONDS = 3


class Job:
    """Trains in the main thread; other threads do all else meanwhile.

    Args:
        arguments: those of `main`.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        root: Path = arguments.root
        self._root = root
        self._random = Random(arguments.seed)
        self._ending: str = arguments.ending
        self._mirror: str | None = arguments.mirror
        self._stop = threading.Event()
        self._told = os.open(root.parent / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._stores = StoreWork(root.parent, self.tell, arguments.addresses, arguments.first)

    def tell(self, what: str) -> None:
        os.write(self._told, f"{what}\n".encode())

    def run(self) -> None:
        checkpointer = pyckpt.Checkpointer(
            self._root,
            keep_last=3,
            on_signals=["SIGUSR1"],
            when_busy=self._random.choice(("skip", "wait")),
            mirror=self._mirror,
            mirror_keep_last=3 if self._mirror else None,
            mirror_wait=_MIRROR_WAIT_SECONDS,
        )
        state = state_at(0)
        begin = checkpointer.restore(state) or 0
        if begin:
            assert step_of(state) == begin, "the restored state is of another step"
        self.tell(f"begin {begin}")
        # Before Python 3.14 a process is aborted that exits while a daemon thread is in a call of
        # torch, as `while True: torch.ones(100)` in such a thread shows; not so in one of ours.
        # What collects garbage may end tensors, and what verifies asks torch how it writes some.
        for work, daemon in (
            (self._load, False),
            (self._stores.save, False),
            (self._stores.save, False),
            (self._stores.load, False),
            (self._thread, False),
            (self._collect, False),
            (self._ask(checkpointer), True),
            (self._record, True),
            (self._verify, False),
            (self._checksum, True),
        ):
            seed = self._random.randrange(1 << 30)
            arguments = (work, Random(seed), daemon)
            threading.Thread(target=self._again, args=arguments, daemon=daemon).start()
        steps = self._random.randrange(3, _STEPS)
        for step in range(begin + 1, begin + 1 + steps):
            self._train(checkpointer, step)
            if checkpointer.stop_requested:
                break
        self.tell("end")
        self._end(checkpointer)

    def _train(self, checkpointer: pyckpt.Checkpointer, step: int) -> None:
        random = self._random
        handle = checkpointer.save(step, state_at(step))
        self.tell(f"saved {step}")
        if random.random() < 0.2:
            checkpointer.wait()
            if handle is not None:
                self.tell(f"committed {step}")
        if random.random() < 0.03:
            out = self._root.parent / "out"
            checkpointer.wait()
            if checkpointer.latest() is not None:
                shutil.rmtree(out, ignore_errors=True)
                checkpointer.export(out, key=None)
        if random.random() < 0.05:
            state = state_at(0)
            checkpointer.wait()
            restored = checkpointer.restore(state)
            assert restored is None or step_of(state) == restored, "restored another step"
        if random.random() < 0.05:
            self._fork(checkpointer)
        if random.random() < 0.1:
            self._stores.save(random)  # where signals come to

    def _fork(self, checkpointer: pyckpt.Checkpointer) -> None:
        if self._random.random() < 0.5:
            pid = os.fork()
            if pid == 0:
                repr(checkpointer)
                gc.collect()
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"a forked child ended with {status}"
            return
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join(BOUND_SECONDS / 2)
        assert process.exitcode == 0, f"a worker ended with {process.exitcode}"

    def _end(self, checkpointer: pyckpt.Checkpointer) -> None:
        if self._ending == "return":
            checkpointer.close()
        elif self._ending == "exit":
            sys.exit(3)
        elif self._ending == "_exit":
            os._exit(3)
        elif self._ending == "raise":
            raise KeyError("as planned")
        # Else nothing: the interpreter ends with saves under way.

    # --- beside it ---

    def _again(self, work: Callable[[Random], None], random: Random, daemon: bool) -> None:
        main = threading.main_thread()
        while (daemon or main.is_alive()) and not self._stop.wait(random.random() / 5):
            try:
                work(random)
            except Exception as error:
                if "interpreter shutdown" in str(error):
                    # Python starts no threads any more. It says so from the end of the program on,
                    # while the main thread may still count as alive.
                    return
                self.tell(f"wrong {type(error).__name__}: {error}")
                raise

    def _load(self, random: Random) -> None:
        newest = Catalog(self._root).newest()
        if newest is None:
            return
        try:
            loaded = pyckpt.load(str(newest.path))
        except (OSError, pyckpt.errors.CheckpointReplaced):
            return  # it was pruned meanwhile
        assert step_of(loaded) == newest.step, "a load gave another step"

    def _verify(self, random: Random) -> None:
        newest = Catalog(self._root).newest()
        if newest is None:
            return
        try:
            found = verify(newest.path)
        except (OSError, pyckpt.errors.PyckptError):
            return  # it was pruned meanwhile, or the engine is closed
        # Of what is pruned meanwhile, files are not there.
        assert found.good or not newest.path.exists(), f"damaged: {found}"

    def _checksum(self, random: Random) -> None:
        data = random.randbytes(1 << 16)
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            assert _C.crc32(data) == zlib.crc32(data), "another checksum"

    def _collect(self, random: Random) -> None:
        gc.collect()

    def _thread(self, random: Random) -> None:
        threads = [threading.Thread(target=torch.ones, args=(100,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self, checkpointer: pyckpt.Checkpointer) -> Callable[[Random], None]:
        def ask(random: Random) -> None:
            str(pyckpt.progress())
            repr(checkpointer)
            str(checkpointer.statistics)
            checkpointer.latest()

        return ask

    def _record(self, random: Random) -> None:
        with pyckpt.record_timeline(self._root.parent / "trace.json"):
            self._stop.wait(random.random() / 10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("ending")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mirror")
    parser.add_argument("--addresses", nargs="*", default=[], help="in stores, where to save")
    parser.add_argument("--first", type=int, default=1, help="number of the first save there")
    arguments = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    Job(arguments).run()


if __name__ == "__main__":
    main()
