"""One rank of the job that `torture.ranks` strikes, and the ways in which it is struck.

A rank writes down what it does as it does it, a line at a time. So what a rank that was killed had
done is known.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import mmap
import os
import resource
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

import pyckpt
from pyckpt.dcp.reader import DirectReader
from pyckpt.dcp.save_planner import SavePlanner
from pyckpt.dcp.stager import PinnedStager
from pyckpt.dcp.writer import DirectWriter
from pyckpt.train import first_plan
from pyckpt.train.checkpointer import Checkpointer
from pyckpt.train.handle import ReportingWriter
from pyckpt.train.store import pruner
from pyckpt.train.tiers import promotion
from pyckpt.train.tiers.mounted import MountedTier

__all__ = ["Case", "Job", "Training", "run_rank"]

RANKS = 4
TIMEOUT_S = 12.0
"""Of the Checkpointer and of the process group."""
SLOW_S = 2.5
"""How long a slow rank keeps the others waiting: within the timeout."""
STRUCK_STEP, LAST_STEP = 3, 5
PURPOSE = "struck on purpose"
_MIRROR_WAIT_S = 5.0
_SHARDED = (256, 2048)  # 2 MiB
_MORE = (4096, 4096)  # 64 MiB, of which each rank has a quarter
_PROBE_BYTES = 1 << 20
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24
_NOBODY = 65534


class Case(NamedTuple):
    """Which rank is struck, where, and how."""

    number: int
    phase: str
    kind: str
    who: int
    mirrored: bool

    @property
    def restores(self) -> bool:
        return self.phase in ("metadata", "reading", "applying")


class Job(NamedTuple):
    """Where the ranks of a case live; they start again for each life."""

    folder: Path
    """Of what they write down."""
    disk: Path
    """Where they save, which may be full."""
    store: tuple[str, int]
    prefix: str
    """Of the names in the store that this life alone uses."""
    life: int
    case: Case


class Diary:
    """What one rank did in one life. Each line is one write, which a kill cannot take back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def __call__(self, *words: object) -> None:
        text = " ".join(str(word) for word in (*words, time.monotonic()))
        os.write(self._file, (text.replace("\n", " ") + "\n").encode())


class _App:
    """An object of the program, with code of its own."""

    def __init__(self) -> None:
        self.step = 0
        self.saving: Callable[[], object] = bool
        self.loading: Callable[[], object] = bool

    def state_dict(self) -> dict[str, Any]:
        self.saving()
        return {"step": self.step, "half": torch.full((7,), self.step / 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loading()
        self.step = state["step"]
        if not torch.equal(state["half"], torch.full((7,), self.step / 2)):
            raise ValueError(f"half of {self.step} was loaded as {state['half']}")


class Training:
    """What is saved: a tensor of which each rank has a part, one that all have, an object. Its bits
    follow from the step."""

    def __init__(self, rank: int) -> None:
        mesh = DeviceMesh("cpu", list(range(RANKS)))
        self._rank = rank
        self._mesh = mesh
        self._model = torch.nn.Linear(64, 64)
        self._sharded = distribute_tensor(
            torch.zeros(_SHARDED), mesh, [Shard(0)], src_data_rank=None
        )
        self.app = _App()
        self.state = {"model": self._model, "sharded": self._sharded, "app": self.app}

    def go_to(self, step: int) -> None:
        whole = tensors_at(step)
        with torch.no_grad():
            self._sharded.to_local().copy_(whole["sharded"].chunk(RANKS)[self._rank])
            self._model.weight.copy_(whole["model.weight"])
            self._model.bias.copy_(whole["model.bias"])
        self.app.step = step

    def grow(self) -> None:
        """There is more to save from now on."""
        more = distribute_tensor(torch.ones(_MORE), self._mesh, [Shard(0)], src_data_rank=None)
        self.state["more"] = more

    def shrink(self) -> None:
        self.state.pop("more", None)

    def digest(self) -> str:
        """Of every bit of this rank's part of the state."""
        model = self._model
        tensors = (self._sharded.to_local(), model.weight.detach(), model.bias.detach())
        return _digest(self.app.step, tensors)


def digest_at(step: int, rank: int) -> str:
    """The digest that a rank has at a step."""
    sharded, *others = tensors_at(step).values()
    return _digest(step, (sharded.chunk(RANKS)[rank], *others))


def _digest(step: int, tensors: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256(str(step).encode())
    for tensor in tensors:
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def tensors_at(step: int) -> dict[str, torch.Tensor]:
    """The whole tensors of a step, by their keys in a checkpoint."""
    generator = torch.Generator().manual_seed(step)
    return {
        "sharded": torch.rand(_SHARDED, generator=generator),
        "model.weight": torch.rand(64, 64, generator=generator),
        "model.bias": torch.rand(64, generator=generator),
    }


# --- the strike -----------------------------------------------------------------------------------


class Struck(Exception):
    """Raised by the code of the program."""


class Strike:
    """What happens to this rank, once, when it comes to the phase."""

    def __init__(self, kind: str, folder: Path, tell: Diary) -> None:
        self._kind = kind
        self._folder = folder
        self._tell = tell
        self._lock = threading.Lock()
        self.armed = False
        self._lifts: list[Callable[[], object]] = []
        if kind == "threads" and os.getuid() == 0:
            _become_limited()

    def __call__(self) -> None:
        with self._lock:
            if not self.armed:
                return
            self.armed = False
        self._tell("struck")
        match self._kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                time.sleep(SLOW_S)
            case "raise":
                raise Struck(PURPOSE)
            case "memory":
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                self._limit(resource.RLIMIT_AS, pages * resource.getpagesize())
                _must_fail(lambda: mmap.mmap(-1, _PROBE_BYTES))
            case "threads":
                self._limit(resource.RLIMIT_NPROC, 1)
                _must_fail(threading.Thread(target=bool).start)
            case "descriptors":
                self._limit(resource.RLIMIT_NOFILE, _free_descriptor())
                with suppress(OSError):  # what other threads have closed since
                    while True:
                        os.dup(1)
            case "file size":
                self._limit(resource.RLIMIT_FSIZE, 4096)
            case "disk":
                self._fill()
            case _:
                raise ValueError(self._kind)

    def lift(self) -> None:
        """There is room again."""
        self.armed = False
        while self._lifts:
            self._lifts.pop()()

    def _limit(self, what: int, value: int) -> None:
        before = resource.getrlimit(what)
        self._lifts.append(lambda: resource.setrlimit(what, before))
        resource.setrlimit(what, (value, before[1]))

    def _fill(self) -> None:
        """No block is free on the file system, which is the case's own."""
        ballast = self._folder / "ballast"
        self._lifts.append(lambda: ballast.unlink(missing_ok=True))
        status = os.statvfs(self._folder)
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bfree) * status.f_frsize)

    def at(self, case: Case, training: Training) -> None:
        """Have the phase strike."""
        match case.phase:
            case "before":
                pass  # the loop calls it
            case "planning" if self._kind == "raise":
                training.app.saving = self
            case "planning":
                _before(SavePlanner, "create_local_plan", self)
            case "staging":
                _before(PinnedStager, "begin", self)
            case "writing":
                _before(DirectWriter, "_write", self)
            case "written":
                _after(DirectWriter, "_write", self)
            case "committing":
                _before(ReportingWriter, "_before_commit", self)
            case "renamed":
                _after(ReportingWriter, "_commit", self)
            case "committed":
                _before(Checkpointer, "_commit", self)
            case "pruning":
                _before(pruner, "remove", self)
            case "mirroring":
                _before(MountedTier, "upload", self)
            case "metadata":
                _before(DirectReader, "read_metadata", self)
            case "reading":
                _before(DirectReader, "read_data", self)
            case "applying":
                training.app.loading = self
            case _:
                raise ValueError(case.phase)


def _before(owner: Any, name: str, strike: Callable[[], None]) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    def struck(*args: Any, **options: Any) -> Any:
        strike()
        return call(*args, **options)

    setattr(owner, name, struck)


def _after(owner: Any, name: str, strike: Callable[[], None]) -> None:
    call = getattr(owner, name)

    @functools.wraps(call)
    def struck(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        strike()
        return result

    setattr(owner, name, struck)


def _must_fail(call: Callable[[], object]) -> None:
    """The strike has happened only if this fails."""
    try:
        call()
    except (OSError, RuntimeError):
        return
    raise AssertionError("the limit does not hold")


def _free_descriptor() -> int:
    """The lowest that is not in use: with this as the limit, no file can be opened."""
    lowest = os.dup(1)
    os.close(lowest)
    return lowest


def _become_limited() -> None:
    """Give up what exempts root from the limit of threads, and nothing else."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for index in range(3):
        data[index] &= ~(1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE)
    if libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    os.setresuid(_NOBODY, 0, 0)


# --- the rank -------------------------------------------------------------------------------------


def run_rank(job: Job, rank: int) -> None:
    """Live one life of a rank. For a forked process, which ends here."""
    tell = Diary(job.folder / f"diary-{job.life}-{rank}")
    log = os.open(job.folder / f"log-{job.life}-{rank}", os.O_WRONLY | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        tell("begin", os.getpid())
        _live(job, rank, tell)
        with suppress(Exception):  # what the end of a Python does
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        tell("gone")
    except BaseException:
        tell("harness", traceback.format_exc())
    finally:
        os._exit(0)


def _live(job: Job, rank: int, tell: Diary) -> None:
    case = job.case
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    first_plan._WORTH_BYTES = 0  # small states, too, are copied by the plan
    promotion._FIRST_DELAY_SECONDS = 0.05
    timeout = timedelta(seconds=TIMEOUT_S)
    host, port = job.store
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=False, timeout=timedelta(seconds=60)
    )
    prefixed = dist.PrefixStore(job.prefix, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=RANKS, timeout=timeout)
    training = Training(rank)
    is_struck = job.life == 0 and rank == case.who
    strike = Strike(case.kind if is_struck else "", job.disk, tell)
    if is_struck:
        strike.at(case, training)
    try:
        _train(job, training, strike, is_struck, tell)
    except (Exception, CheckpointException) as error:
        strike.lift()
        ranks = ",".join(map(str, getattr(error, "ranks", ()))) or "-"
        known = isinstance(error, OSError | pyckpt.errors.PyckptError | Struck)
        tell("failed", type(error).__name__, ranks, "known" if known else "foreign", error)
        traceback.print_exc()
    else:
        strike.lift()
        tell("done")


def _train(job: Job, training: Training, strike: Strike, is_struck: bool, tell: Diary) -> None:
    case = job.case
    with pyckpt.Checkpointer(
        job.disk / "run",
        keep_last=2,
        timeout=TIMEOUT_S,
        mirror=job.disk / "mirror" if case.mirrored else None,
        mirror_wait=_MIRROR_WAIT_S,
    ) as checkpointer:
        training.go_to(10**6)  # what is not restored is noticed
        tell("restore")
        step = checkpointer.restore(training.state) or 0
        tell("restored", step, training.digest() if step else "-")
        end = step + 2 if job.life else LAST_STEP
        while step < end:
            step += 1
            training.go_to(step)
            if job.life == 0 and step == STRUCK_STEP:
                if case.kind == "memory" and not case.restores:
                    training.grow()
                dist.barrier()  # so that each rank waits in pyckpt, and not for the loop
                strike.armed = is_struck
                if case.restores:
                    tell("restore")
                    training.go_to(10**6)
                    back = checkpointer.restore(training.state)
                    tell("restored", back, training.digest())
                    training.go_to(step)
                elif case.phase == "before":
                    strike()
            tell("save", step)
            checkpointer.save(step, training.state).wait()
            tell("committed", step)
            training.shrink()
        if case.mirrored:
            tell("mirrored", checkpointer.wait_mirrored(_MIRROR_WAIT_S))
