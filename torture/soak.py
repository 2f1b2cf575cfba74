"""``python -m torture.soak --saves 20000 --seed 1``: weeks of saving, in an hour or two.

One process saves, restores, prunes, exports, and fails to, in periods of some saves. In each it
makes a Checkpointer, often with an engine of its own; faults are real: a full disk, a limit of file
sizes or descriptors, a file in the way, a flipped bit, a state that cannot be saved, an engine that
is closed. After each period nothing is under way, and what the process and the disk hold is
sampled. Nothing may grow; each restore gives, bit for bit, what was saved.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt.errors import PyckptError
from torture.growth import judge, sample, thinned
from torture.results import write

_SAVES_IN_A_PERIOD = 20
_DISK_BYTES = 96 << 20
_LARGE = 1 << 18
_SAMPLES_KEPT = 400
_FAULTS = ("full disk", "file size", "descriptors", "in the way", "state", "engine", "damage")
_PLACES = 2
"""Directories into which plain saves go, in turn: each is replaced."""


class Wrong(Exception):
    """Something was lost, or is not what was saved."""


class _Unsaveable:
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("a state that cannot be saved, as planned")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it was saved")


class Training:
    """A model and some values; all of its bits depend on the step that it was set to."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Linear(48, 16))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self._tensors = {
            "large": torch.zeros(_LARGE),
            "half": torch.zeros(1000, dtype=torch.bfloat16),
            "whole": torch.zeros(77, 3, dtype=torch.int64),
            "flags": torch.zeros(129, dtype=torch.bool),
            "turned": torch.zeros(40, 60).t(),
            "empty": torch.zeros(0, 5),
            "one": torch.zeros(()),
        }
        self._values: dict[str, Any] = {"step": -1, "text": "", "list": [0, None]}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "optimizer": self._optimizer,
            "tensors": self._tensors,
            "values": self._values,
        }

    @property
    def plain(self) -> dict[str, Any]:
        return {**self._tensors, **self._model.state_dict(prefix="model.")}

    def go_to(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 100 > 50)
            self._tensors["large"].uniform_(generator=generator)
            for parameter in self._model.parameters():
                parameter.grad = torch.rand(parameter.shape, generator=generator)
        self._optimizer.step()
        self._values.update(step=step, text=f"step {step}", list=[step, {"a": step / 7}])

    def digest(self, *, plain: bool = False) -> str:
        found = hashlib.blake2b()
        tensors = [*self.plain.values()]
        if not plain:
            moments = self._optimizer.state_dict()["state"]
            tensors += [value for one in moments.values() for value in one.values()]
            found.update(repr(self._values).encode())
        for tensor in tensors:
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


@contextmanager
def _limit(what: int, value: int) -> Iterator[None]:
    """The real error of the kernel, for whatever this process does in the block."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def _free_descriptor(number: int) -> int:
    """The number-th that is not in use: with this as the limit, so many files can be opened."""
    used = {int(one) for one in os.listdir("/proc/self/fd")}
    used.discard(max(used))  # that of the listing
    free = (one for one in range(len(used) + number + 1) if one not in used)
    return next(islice(free, number, None))


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """No block is free on the folder's own file system."""
    ballast = folder / "ballast"
    status = os.statvfs(folder)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bfree) * status.f_frsize)
    try:
        yield
    finally:
        ballast.unlink()


class Soak:
    """The run, in ``folder``. ``mounted``: it is a file system of its own, which may be filled."""

    def __init__(self, folder: Path, random: Random, *, mounted: bool) -> None:
        self._folder = folder
        self._root = folder / "run"
        self._random = random
        self._mounted = mounted
        self._training = Training()
        self._digests: dict[int, str] = {}
        self._plain: dict[int, str] = {}
        self._step = 0
        self._keep = 1
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        """Those that happened: the call failed, and had to."""
        self.spared: Counter[str] = Counter()
        """Faults that were there, and changed nothing."""

    def period(self) -> None:
        """Some saves and restores by one Checkpointer. Afterwards nothing is under way."""
        random = self._random
        engine: pyckpt.Engine | None = None
        if random.random() < 0.4:
            engine = pyckpt.Engine(max_pinned_bytes=8 << 20, slot_bytes=256 << 10, io_threads=3)
            self.counts["engines"] += 1
        self._keep = random.randint(1, 3)
        checkpointer = pyckpt.Checkpointer(
            self._root,
            keep_last=self._keep,
            engine=engine,
            when_busy=random.choice(("skip", "wait")),
            direct=random.choice(("auto", "auto", "off")),
        )
        self.counts["checkpointers"] += 1
        try:
            self._restore(checkpointer)
            for _ in range(_SAVES_IN_A_PERIOD):
                self._act(checkpointer, engine)
                if engine is not None and engine.closed:
                    break
        finally:
            with suppress(OSError, PyckptError):  # of a fault
                checkpointer.close()
            if engine is not None:
                engine.close()

    def _act(self, checkpointer: pyckpt.Checkpointer, engine: pyckpt.Engine | None) -> None:
        chance = self._random.random()
        if chance < 0.12:
            self._fail(checkpointer, engine)
        elif chance < 0.27:
            self._save_plainly()
        else:
            self._save(checkpointer)
        if engine is not None and engine.closed:
            return
        chance = self._random.random()
        if chance < 0.09:
            self._restore(checkpointer)
        elif chance < 0.12:
            self._load_plainly()
        elif chance < 0.14:
            self._export(checkpointer)

    def _next(self) -> int:
        self._step += 1
        self._training.go_to(self._step)
        return self._step

    def _save(self, checkpointer: pyckpt.Checkpointer) -> None:
        step = self._next()
        handle = checkpointer.save(step, self._training.state)
        self._digests[step] = self._training.digest()
        self._digests = {one: self._digests[one] for one in sorted(self._digests)[-8:]}
        self.counts["saves"] += 1
        if self._random.random() < 0.5:
            handle.wait()
            self.counts["saves waited for"] += 1

    def _fail(self, checkpointer: pyckpt.Checkpointer, engine: pyckpt.Engine | None) -> None:
        with suppress(OSError, PyckptError):
            checkpointer.wait()
        kind = self._random.choice(_FAULTS)
        if (kind == "full disk" and not self._mounted) or (kind == "engine" and engine is None):
            kind = "file size"
        if kind == "damage":
            self._damage(checkpointer)
            return
        step = self._next()
        state = self._training.state
        way = self._root / f"step-{step:08d}"
        failed = False
        try:
            if kind == "full disk":
                with _full(self._folder):
                    checkpointer.save(step, state).wait()
            elif kind == "file size":
                with _limit(resource.RLIMIT_FSIZE, self._random.randrange(1 << 20)):
                    checkpointer.save(step, state).wait()
            elif kind == "descriptors":
                with _limit(resource.RLIMIT_NOFILE, _free_descriptor(self._random.randrange(3))):
                    checkpointer.save(step, state).wait()
            elif kind == "in the way":
                way.write_text("not a directory")
                checkpointer.save(step, state).wait()
            elif kind == "state":
                checkpointer.save(step, {**state, "more": _Unsaveable()}).wait()
            else:
                assert engine is not None
                handle = checkpointer.save(step, state)
                engine.close()
                handle.wait()
        except (OSError, PyckptError, ValueError):
            failed = True
        finally:
            if way.is_file():
                way.unlink()
            with suppress(OSError, PyckptError, ValueError):
                checkpointer.wait()  # tells it again, to who has not asked the handle
        self.counts["saves"] += 1
        if failed:
            self.faults[kind] += 1
            if any(one.step == step for one in checkpointer.checkpoints()):
                raise Wrong(f"step {step} failed ({kind}), and is there")
        else:
            self.spared[kind] += 1
            self._digests[step] = self._training.digest()
        self._expect(checkpointer)

    def _expect(self, checkpointer: pyckpt.Checkpointer) -> None:
        latest = checkpointer.latest()
        found = None if latest is None else latest.step
        if found != max(self._digests, default=None):
            raise Wrong(f"the newest is step {found} and not {max(self._digests, default=None)}")

    def _damage(self, checkpointer: pyckpt.Checkpointer) -> None:
        """A bit of the newest flips: the next older one is restored. Then the newest is removed."""
        entries = checkpointer.checkpoints()
        if len(entries) < 2 or self._keep == 1:  # which the pruner may not have removed yet
            return
        path = Path(entries[-1].path)
        file = max(path.glob("*.distcp"), key=lambda one: one.stat().st_size)
        with file.open("r+b") as opened:
            # In the middle of the largest tensor, and not in what lies between two.
            opened.seek(file.stat().st_size // 2)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
        del self._digests[entries[-1].step]
        self._restore(checkpointer)
        shutil.rmtree(path)
        self.faults["damage"] += 1

    def _restore(self, checkpointer: pyckpt.Checkpointer) -> None:
        with suppress(OSError, PyckptError):
            checkpointer.wait()
        self._training.go_to(10**9 + self._step)  # other values
        restored = checkpointer.restore(self._training.state)
        if restored != max(self._digests, default=None):
            raise Wrong(f"restored step {restored} of {sorted(self._digests)}")
        if restored is not None and self._training.digest() != self._digests[restored]:
            raise Wrong(f"step {restored} was restored with other bits")
        self.counts["restores"] += 1

    def _save_plainly(self) -> None:
        step = self._next()
        place = step % _PLACES
        path = self._folder / f"plain-{place}"
        how = self._random.choice(("save", "dcp.save", "dcp.async_save"))
        if how == "save":
            pyckpt.save(self._training.plain, path, overwrite=True)
        elif how == "dcp.save":
            dcp.save(self._training.plain, storage_writer=pyckpt.DirectWriter(path))
        else:
            stager: Any = pyckpt.PinnedStager()  # torch's protocol names a private attribute
            writer = pyckpt.DirectWriter(path)
            response: Any = dcp.async_save(
                self._training.plain, storage_writer=writer, async_stager=stager
            )
            getattr(response, "upload_completion", response).result()
            stager.close()
        self._plain[place] = self._training.digest(plain=True)
        self.counts["saves"] += 1
        self.counts[f"plain saves by {how}"] += 1

    def _load_plainly(self) -> None:
        if not self._plain:
            return
        place = self._random.choice(sorted(self._plain))
        path = self._folder / f"plain-{place}"
        self._training.go_to(10**9 + self._step)
        plain = self._training.plain
        reader = self._random.choice((pyckpt.DirectReader, dcp.FileSystemReader))(path)
        dcp.load(plain, storage_reader=reader)
        if self._training.digest(plain=True) != self._plain[place]:
            raise Wrong(f"plain-{place} was loaded with other bits")
        self.counts["restores"] += 1
        self.counts["plain loads"] += 1

    def _export(self, checkpointer: pyckpt.Checkpointer) -> None:
        with suppress(OSError, PyckptError):
            checkpointer.wait()
        if checkpointer.latest() is not None:
            checkpointer.export(self._folder / "out")
            self.counts["exports"] += 1


@contextmanager
def _file_system() -> Iterator[tuple[Path, bool]]:
    """A folder; if this process may mount, a file system in memory with little room."""
    folder = Path(tempfile.mkdtemp(prefix="pyckpt-soak-"))
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)


def _run(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("pyckpt").setLevel(logging.CRITICAL)  # each fault is one line
    begun = time.monotonic()
    samples: dict[str, list[float]] = {}
    wrong: list[str] = []
    with _file_system() as (folder, mounted):
        soak = Soak(folder, Random(arguments.seed), mounted=mounted)
        soak.period()  # whatever is made once
        gc.collect()
        gc.freeze()
        told = 0
        while soak.counts["saves"] < arguments.saves:
            if time.monotonic() - begun > 60 * arguments.minutes:
                break
            try:
                soak.period()
            except Exception as error:
                wrong.append(f"after {soak.counts['saves']} saves: {error!r}")
                break
            now = {"saves": soak.counts["saves"], **sample(folder)}
            for name, value in now.items():
                samples.setdefault(name, []).append(value)
            if soak.counts["saves"] >= told + 1000:
                told = soak.counts["saves"]
                print(f"{told} saves, {now['memory_bytes'] / 1e6:.0f} MB", flush=True)
    growth, grown = judge(samples) if samples else ({}, ["nothing was sampled"])
    wrong += grown
    for one in wrong:
        print(one)
    counts = dict(soak.counts)
    print(f"{counts}, faults {dict(soak.faults)}, {len(wrong)} wrong")
    path = write(
        "soak",
        {
            "seed": arguments.seed,
            "asked": arguments.saves,
            "seconds": round(time.monotonic() - begun, 1),
            "file_system": f"tmpfs of {_DISK_BYTES >> 20} MiB" if mounted else "that of /tmp",
            "counts": counts,
            "faults": dict(sorted(soak.faults.items())),
            "faults_without_effect": dict(sorted(soak.spared.items())),
            "growth": growth,
            "wrong": wrong,
            "samples": {
                name: list(thinned(values, _SAMPLES_KEPT)) for name, values in samples.items()
            },
        },
        arguments.output,
    )
    print(path)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torture.soak", description=__doc__)
    parser.add_argument("--saves", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=240, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return _run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
