"""What runs under faults. Each scenario has a directory with an earlier checkpoint, or an empty
one; an action, during which the faults happen; and what comes next, without faults.

`OLD` is what the directory holds, `NEW` what the action saves, `NEXT` what is saved after it. Each
element of a state tells which save, which tensor and which place in it it is of (`tree_of`), so
that nothing can be missing, or stand in another's place, and look right.
"""

from __future__ import annotations

import importlib
import math
import os
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
from torture import kernel
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
    "OVERLAPPED",
    "SCENARIOS",
    "Scenario",
    "Stage",
    "body_of",
    "prepare",
    "settle",
    "tensors_of",
    "tree_of",
    "value_of",
]

OLD, NEW, NEXT = 1, 2, 3
_LATER = (4, 5)  # what an action saves after NEW, if it saves more
TIMEOUT_S = 15.0
"""After this, ranks stop waiting for each other."""

# Smaller than the part of `shared` that one of four ranks has, and fewer than the tensors: so files
# take several writes and reads, items go through several slots, and slots are used again.
_ENGINE = {"max_pinned_bytes": 8 << 20, "slot_bytes": 8 << 10, "io_threads": 2}

_SHARDED = {"shared": (8, 3000), "fixed": (8, 700)}
"""Tensors of which each rank has some rows."""
_WHOLE = {"small": (3,), **{f"layer{i}": (600 + i,) for i in range(5)}}
"""Tensors that all ranks have."""
OVERLAPPED = {2: NEW, 3: _LATER[0], 4: _LATER[1]}
"""The steps and values of saves that overlap."""
_FIXED = "fixed"
"""The tensor that is the same in all saves."""
_PLACES = 1 << 15  # more than a tensor has elements
_TENSORS = 16  # more than there are


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

    small_slots = True

    def __init__(self, stage: Stage, rank: int, arm: Callable[[], None] = lambda: None) -> None:
        self.stage = stage
        self.rank = rank
        self.arm = arm
        self.root = stage.root
        self.first = NEW  # what actions begin with
        self.options: dict[str, Any] = {}  # of its Checkpointers
        self.home = stage.root  # where these have their directory
        self.mesh: DeviceMesh | None = None
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        if self.small_slots:
            # Of the default engine, which is made when it is first used, under faults.
            pyckpt.Engine.__init__.__kwdefaults__ = dict(_ENGINE)
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

    def tree(self, value: int) -> dict[str, Any]:
        """`tree_of` a value, as this rank has it."""
        tree = tree_of(value)
        if self.mesh is not None:
            model = tree["model"]
            for name in _SHARDED:
                model[name] = distribute_tensor(
                    model[name], self.mesh, [Shard(0)], src_data_rank=None
                )
        return tree

    def checkpointer(self, **options: Any) -> pyckpt.Checkpointer:
        options = {"keep_last": 2, "timeout": TIMEOUT_S, **options, **self.options}
        return pyckpt.Checkpointer(self.home / "run", **options)

    def writer(self) -> pyckpt.DirectWriter:
        return pyckpt.DirectWriter(self.root / "checkpoint")


def tensors_of(value: int) -> dict[str, torch.Tensor]:
    """The tensors of a save, whole: no element is equal to another one, or to one of another save,
    but for the tensor that stays as it is. Of value 0, which no save has, all are zeros."""
    found = {}
    for i, (name, shape) in enumerate({**_SHARDED, **_WHOLE}.items()):
        places = torch.arange(float(math.prod(shape))).reshape(shape)
        first = ((0 if name == _FIXED else value) * _TENSORS + i) * _PLACES
        found[name] = places + first if value else torch.zeros_like(places)
    return found


def tree_of(value: int) -> dict[str, Any]:
    """The state of a save, as one process has it."""
    return {"model": tensors_of(value), "object": {"value": value, "text": f"value {value}"}}


def value_of(tree: Any, like: Callable[[int], Any] = tree_of) -> int | str:
    """Which save a tree is of, whole; or text that says what is wrong with it. A tree of a rank's
    shards is compared with these."""
    wrong = {value: _differences(tree, like(value)) for value in (OLD, NEW, NEXT, *_LATER)}
    value = min(wrong, key=lambda one: len(wrong[one]))
    return f"not value {value}: {'; '.join(wrong[value][:4])}" if wrong[value] else value


def _differences(found: Any, right: Any, name: str = "") -> list[str]:
    if isinstance(right, dict):
        if not isinstance(found, dict):
            return [f"{name or 'the state'} is {found!r}"]
        lost, more = right.keys() - found.keys(), found.keys() - right.keys()
        differences = [f"{name}{key} is missing" for key in sorted(lost)]
        differences += [f"{name}{key} is there" for key in sorted(more)]
        for key in sorted(right.keys() & found.keys()):
            differences += _differences(found[key], right[key], f"{name}{key}.")
        return differences
    name = name.removesuffix(".")
    if not isinstance(right, torch.Tensor):
        return [] if type(found) is type(right) and found == right else [f"{name} is {found!r}"]
    if not isinstance(found, torch.Tensor):
        return [f"{name} is {found!r}"]
    if found.shape != right.shape or found.dtype != right.dtype:
        return [f"{name} is {tuple(found.shape)} of {found.dtype}"]
    if isinstance(found, DTensor):
        rows = right.chunk(found.device_mesh.size())[found.device_mesh.get_rank()]
        found, right = found.to_local(), rows
        if found.shape != right.shape:
            return [f"{name}'s shard is {tuple(found.shape)}"]
    if torch.equal(found, right):
        return []
    bad = (found != right).flatten()
    at = int(bad.nonzero()[0])
    return [
        f"{name} has {int(bad.sum())} wrong elements, first {found.flatten()[at].item():g} at {at}"
    ]


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


def _overlapped(job: Job) -> Steps:
    """Saves that nobody waits for before the next: each is under way while the program goes on to
    the next one, which is copied, and earlier checkpoints are removed meanwhile."""
    checkpointer = job.checkpointer()
    handles: list[pyckpt.SaveHandle] = []
    job.arm()

    def run() -> None:
        with checkpointer:
            for step, value in OVERLAPPED.items():
                handles.append(checkpointer.save(step, job.tree(value)))
            checkpointer.wait()

    kind, told = attempt(run)
    done = [one for one in handles if one.committed.done() and one.committed.exception() is None]
    committed = [one.step for one in done]
    yield kind, (*told, committed) if kind == "error" else committed
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
        options: of its Checkpointers.
        nodes: whether each rank is a node with a disk of its own, at the same path. Needs root.
        saves: for "run", the steps that the action saves, and their values.
        makes: calls that the scenario is there for: a run that nothing disturbs makes each.
    """

    name: str
    kind: str
    action: Callable[[Job], Steps]
    sizes: tuple[int, ...] = (1, 2, 4)
    earlier: bool = True
    mirror: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    nodes: bool = False
    saves: Mapping[int, int] = field(default_factory=lambda: {2: NEW})
    makes: tuple[str, ...] = ()

    @property
    def prunes(self) -> bool:
        """Whether what was there before the action is removed when it has succeeded."""
        return self.action is _whole_job

    @property
    def next_step(self) -> int:
        """What the next job saves."""
        return max(2, *self.saves) + 1


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first-save", "run", _checkpointer_save, earlier=False),
        Scenario("next-save", "run", _checkpointer_save),
        Scenario("overwrite", "run", lambda job: _checkpointer_save(job, step=1), saves={1: NEW}),
        Scenario("job", "run", _whole_job, makes=("renameat", "unlinkat")),
        Scenario("overlapped", "run", _overlapped, saves=OVERLAPPED, makes=("renameat",)),
        # The save links a file of the checkpoint that is removed after it.
        Scenario(
            "frozen",
            "run",
            _whole_job,
            options={"frozen": f"model.{_FIXED}"},
            makes=("link", "renameat"),
        ),
        Scenario(
            "node-local",
            "run",
            _whole_job,
            sizes=(2, 4),
            options={"node_local": True},
            nodes=True,
            makes=("renameat",),
        ),
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


def _job_of(
    scenario: Scenario, stage: Stage, rank: int, arm: Callable[[], None] = lambda: None
) -> Job:
    job = Job(stage, rank, arm)
    job.options = dict(scenario.options)
    if scenario.nodes:
        job.home = job.root / "disk"
        kernel.see_instead(job.home, job.root / f"disk-{rank}")
    return job


def body_of(scenario: Scenario, stage: Stage) -> Callable[[Link, int], None]:
    """What a rank of a case runs."""

    def body(link: Link, rank: int) -> None:
        for said in scenario.action(_job_of(scenario, stage, rank, link.arm)):
            link.say("said", said)
            if not link.wait():
                return

    return body


def prepare(scenario: Scenario, stage: Stage) -> Callable[[Link, int], None]:
    """What ranks run, once, to make the directory that each case of a scenario begins with."""

    def body(link: Link, rank: int) -> None:
        job = _job_of(scenario, stage, rank)
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
        job = _job_of(scenario, stage, rank)

        def run() -> int | None:
            options: dict[str, Any] = {}
            if scenario.mirror:
                options = {"mirror": job.root / "mirror", "mirror_keep_last": 1}
            with job.checkpointer(**options) as checkpointer:
                step = checkpointer.restore(job.tree(0))
                checkpointer.save(scenario.next_step, job.tree(NEXT)).wait()
            return step

        if scenario.kind == "run":
            said = attempt(run)
        else:
            job.first = NEXT
            said = next(scenario.action(job))
        link.say("said", said)
        link.wait()

    return body
