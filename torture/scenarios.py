"""What runs under faults. Each scenario has a directory with an earlier checkpoint, or an empty
one; an action, during which the faults happen; and what comes next, without faults.

Values tell which save they are of: every element of every tensor is the number of the save. `OLD`
is what the directory holds, `NEW` what the action saves, `NEXT` what is saved after it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pyckpt
from pyckpt.tools import pruning
from pyckpt.train import first_plan
from pyckpt.train.store.retention import Retention
from pyckpt.train.tiers import promotion
from torture.supervisor import Link

# Imported here, so that the children need not.
for _name in (
    "numpy.random",
    "pyckpt.train.checkpointer",
    "pyckpt.train.store.export",
    "pyckpt.train.tiers.mounted",
    "pyckpt.train.tiers.opening",
    "secrets",
    "shlex",
    "statistics",
    "torch._decomp.decompositions_for_rng",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
):
    importlib.import_module(_name)
for _package in ("pyckpt.dcp", "pyckpt.optim", "pyckpt.train"):
    _path = importlib.import_module(_package).__path__
    for _module in pkgutil.walk_packages(_path, f"{_package}."):
        with suppress(ImportError):  # bucket, without its library
            importlib.import_module(_module.name)

__all__ = [
    "NEW",
    "NEXT",
    "OLD",
    "SCENARIOS",
    "Scenario",
    "Stage",
    "body_of",
    "prepare",
    "settle",
    "value_of",
]

OLD, NEW, NEXT = 1, 2, 3
TIMEOUT_S = 15.0
"""After this, ranks stop waiting for each other."""
_SHAPE = (8, 3000)


@dataclass
class Stage:
    """Where a case runs."""

    root: Path
    size: int
    store: str
    """Address of the ranks' store."""
    prefix: str
    """Of this case's names in the store."""


class Job:
    """One rank of a case: what it needs to save and load."""

    def __init__(self, stage: Stage, rank: int, arm: Callable[[], None] = lambda: None) -> None:
        self.stage = stage
        self.rank = rank
        self.arm = arm
        self.root = stage.root
        self.first = NEW  # what actions begin with
        self.mesh: DeviceMesh | None = None
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        # Of the default engine, which is made when it is first used. Its small slots let a file
        # take several writes.
        pyckpt.Engine.__init__.__defaults__ = (8 << 20, 32 << 10, 2)
        first_plan._WORTH_BYTES = 0  # small states, too, are copied by the plan
        promotion._FIRST_DELAY_SECONDS = 0.02  # a mirror tries again after this and its multiples
        if stage.size > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            host, port = stage.store.split(":")
            timeout = timedelta(seconds=TIMEOUT_S)
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=timeout
            )
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(stage.prefix, store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=stage.size,
                timeout=timeout,
            )
            self.mesh = DeviceMesh("cpu", list(range(stage.size)))

    def tensors(self, value: float) -> dict[str, Any]:
        whole = torch.full(_SHAPE, float(value))
        if self.mesh is not None:
            whole = distribute_tensor(whole, self.mesh, [Shard(0)], src_data_rank=None)
        return {"shared": whole, "small": torch.full((3,), float(value))}

    def tree(self, value: float) -> dict[str, Any]:
        return {"model": self.tensors(value), "object": {"value": value}}

    def checkpointer(self, **options: Any) -> pyckpt.Checkpointer:
        options = {"keep_last": 2, "timeout": TIMEOUT_S, **options}
        return pyckpt.Checkpointer(self.root / "run", **options)

    def writer(self) -> pyckpt.DirectWriter:
        return pyckpt.DirectWriter(self.root / "checkpoint")


def value_of(tree: Any) -> float | str:
    """The one value that all of a tree has; or text that says what is wrong."""
    found = set()

    def look(node: Any) -> None:
        if isinstance(node, DTensor):
            node = node.to_local()
        if isinstance(node, torch.Tensor):
            found.update(torch.unique(node).tolist())  # type: ignore[no-untyped-call]
        elif isinstance(node, dict):
            for entry in node.values():
                look(entry)
        elif isinstance(node, int | float):
            found.add(float(node))

    look(tree)
    return found.pop() if len(found) == 1 else f"a mixture: {sorted(found)[:8]}"


def attempt(action: Callable[[], Any]) -> tuple[str, Any]:
    """What an action came to: ("ok", its result), or ("error", what the caller is told)."""
    try:
        return "ok", action()
    except (Exception, CheckpointException) as error:
        ranks = set(getattr(error, "ranks", ())) | set(getattr(error, "failures", {}))
        text = str(error)
        for named in re.findall(r"ranks? (\d+(?:(?:, | and |-)\d+)*)", text):
            ranks.update(int(number) for number in re.findall(r"\d+", named))
        # The class of pyckpt or Python, errno, who is named, and what is said.
        return "error", (type(error).__name__, getattr(error, "errno", None), sorted(ranks), text)


# Actions. Each is a generator: faults begin with `job.arm`, and end with the first yield. What it
# yields is said to the supervisor. What a torch group needs to be made, which pyckpt has no say in,
# comes before.

Steps = Iterator[Any]


def _following(action: Callable[[], Any], earlier: tuple[str, Any]) -> tuple[str, Any]:
    """What the action after one that may have failed came to. An error may be told a second time,
    by the first call that follows."""
    found = attempt(action)
    return attempt(action) if found[0] == earlier[0] == "error" else found


def _checkpointer_save(job: Job, *, step: int = 2) -> Steps:
    """A save, and another one by the same Checkpointer."""
    checkpointer = job.checkpointer()
    job.arm()
    told = attempt(lambda: checkpointer.save(step, job.tree(NEW)).wait() and None)
    yield told
    following = _following(lambda: checkpointer.save(3, job.tree(NEXT)).wait() and None, told)
    closed = attempt(checkpointer.close)
    yield following if following[0] == "error" else closed


def _whole_job(job: Job) -> Steps:
    """A job from its beginning to its end: what follows a commit is under faults, too."""

    checkpointer = job.checkpointer(keep_last=1, every_steps=1)
    job.arm()

    def run() -> None:
        with checkpointer:
            checkpointer.step(2, job.tree(NEW))

    yield attempt(run)
    yield "restart", None


def _mirrored(job: Job) -> Steps:
    checkpointer = job.checkpointer(
        mirror=job.root / "mirror", mirror_keep_last=1, mirror_wait=TIMEOUT_S
    )
    job.arm()

    def run() -> bool:
        with checkpointer:
            checkpointer.save(2, job.tree(NEW)).wait()
            return checkpointer.wait_mirrored(TIMEOUT_S)

    yield attempt(run)
    yield "restart", None


def _restore(job: Job) -> Steps:
    checkpointer = job.checkpointer()
    job.arm()

    def run() -> Any:
        tree = job.tree(0)
        step = checkpointer.restore(tree)
        return step, value_of(tree)

    yield attempt(run)
    yield attempt(run)


def _dcp_save(job: Job) -> Steps:
    def save(value: int) -> None:
        state_dict_saver.save(
            job.tree(value), storage_writer=job.writer(), no_dist=job.mesh is None
        )

    job.arm()
    told = attempt(lambda: save(job.first))
    yield told
    yield _following(lambda: save(NEXT), told)


def _dcp_async_save(job: Job) -> Steps:
    stager = pyckpt.PinnedStager()

    def save(value: int) -> None:
        writer = pyckpt.DirectWriter(job.root / "checkpoint", stager=stager)
        state_dict_saver.async_save(
            job.tree(value), storage_writer=writer, no_dist=job.mesh is None
        ).result()  # type: ignore[union-attr]

    job.arm()
    told = attempt(lambda: save(job.first))
    yield told
    yield _following(lambda: save(NEXT), told)


def _save(job: Job) -> Steps:
    def save(value: int) -> None:
        pyckpt.save(job.tree(value), job.root / "checkpoint", overwrite=True)

    job.arm()
    told = attempt(lambda: save(job.first))
    yield told
    yield _following(lambda: save(NEXT), told)


def _load(job: Job, **options: Any) -> Steps:
    def load() -> Any:
        tree = job.tree(0)
        pyckpt.load(tree, job.root / "checkpoint", **options)
        return value_of(tree)

    job.arm()
    yield attempt(load)
    yield attempt(load)


def _dcp_load(job: Job) -> Steps:
    def load() -> Any:
        tree = job.tree(0)
        reader = pyckpt.DirectReader(job.root / "checkpoint")
        state_dict_loader.load(tree, storage_reader=reader, no_dist=job.mesh is None)
        return value_of(tree)

    job.arm()
    yield attempt(load)
    yield attempt(load)


def _export(job: Job) -> Steps:
    def export(value: int) -> None:
        source = job.root / ("checkpoint" if value == NEW else "next")
        pyckpt.export(source, job.root / "export", max_shard_size="64KB")

    job.arm()
    yield attempt(lambda: export(job.first))
    yield attempt(lambda: export(NEXT))


def _prune(job: Job) -> Steps:
    def prune() -> None:
        plan = pruning.plan(job.root / "run", Retention(1))
        left = [why for _, why in pruning.prune(plan, job_ended=True) if why]
        if left:
            raise OSError("; ".join(left))

    job.arm()
    yield attempt(prune)
    yield attempt(prune)


@dataclass(frozen=True)
class Scenario:
    """Something that pyckpt does.

    Attributes:
        name: of the scenario.
        kind: "run": saves into a Checkpointer's directory; "plain": into one directory; "load";
            "export"; "prune".
        action: what each rank does.
        sizes: numbers of ranks.
        earlier: whether a checkpoint is there before it.
        mirror: whether checkpoints are brought to a mirror.
    """

    name: str
    kind: str
    action: Callable[[Job], Steps]
    sizes: tuple[int, ...] = (1, 2, 4)
    earlier: bool = True
    mirror: bool = False


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first-save", "run", _checkpointer_save, earlier=False),
        Scenario("next-save", "run", _checkpointer_save),
        Scenario("overwrite", "run", lambda job: _checkpointer_save(job, step=1)),
        Scenario("job", "run", _whole_job),
        Scenario("mirror", "run", _mirrored, mirror=True),
        Scenario("restore", "load", _restore),
        Scenario("save", "plain", _save, sizes=(1, 2)),
        Scenario("dcp-save", "plain", _dcp_save),
        Scenario("dcp-first-save", "plain", _dcp_save, earlier=False),
        Scenario("dcp-async-save", "plain", _dcp_async_save),
        Scenario("load", "load", _load),
        Scenario("load-shared", "load", lambda job: _load(job, share_reads=True), sizes=(2, 4)),
        Scenario("dcp-load", "load", _dcp_load),
        Scenario("export", "export", _export, sizes=(1,)),
        Scenario("prune", "prune", _prune, sizes=(1,)),
    )
}


def body_of(scenario: Scenario, stage: Stage) -> Callable[[Link, int], None]:
    """What a rank of a case runs."""

    def body(link: Link, rank: int) -> None:
        for said in scenario.action(Job(stage, rank, link.arm)):
            link.say("said", said)
            if not link.wait():
                return

    return body


def prepare(scenario: Scenario, stage: Stage) -> Callable[[Link, int], None]:
    """What ranks run, once, to make the directory that each case of a scenario begins with."""

    def body(link: Link, rank: int) -> None:
        job = Job(stage, rank)
        if scenario.earlier:
            plain = job.root / "checkpoint"
            if scenario.kind in ("plain", "load", "export"):
                pyckpt.save(job.tree(OLD), plain)
            if scenario.kind == "export":
                pyckpt.export(plain, job.root / "export", max_shard_size="64KB")
                pyckpt.save(job.tree(NEW), plain, overwrite=True)
                pyckpt.save(job.tree(NEXT), job.root / "next")
            if scenario.kind in ("run", "load", "prune"):
                mirror = {"mirror": job.root / "mirror"} if scenario.mirror else {}
                with job.checkpointer(**mirror) as checkpointer:
                    checkpointer.save(1, job.tree(OLD)).wait()
                    if scenario.kind in ("load", "prune"):
                        checkpointer.save(2, job.tree(NEW)).wait()
        link.say("said", ("ok", None))
        link.wait()

    return body


def settle(scenario: Scenario, stage: Stage) -> Callable[[Link, int], None]:
    """What a job that is started after a case does: it saves, exports, prunes or loads, once.
    Whatever the case has left must be gone by then."""

    def body(link: Link, rank: int) -> None:
        job = Job(stage, rank)

        def run() -> int | None:
            options: dict[str, Any] = {}
            if scenario.mirror:
                options = {"mirror": job.root / "mirror", "mirror_keep_last": 1}
            with job.checkpointer(**options) as checkpointer:
                step = checkpointer.restore(job.tree(0))
                checkpointer.save(3, job.tree(NEXT)).wait()
            return step

        if scenario.kind == "run":
            said = attempt(run)
        else:
            job.first = NEXT
            said = next(scenario.action(job))
        link.say("said", said)
        link.wait()

    return body
