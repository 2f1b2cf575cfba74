"""What `torture.peers` compares: ways to save and load one state, each as its authors mean it.

All have the same state, and name the directories of their checkpoints alike. Each says what a
program that resumes takes for a complete checkpoint, and loads it with its own loader.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import pyckpt
from torture.scenarios import TIMEOUT_S, Job

try:
    import torch_checkpointing as tc
except ImportError:
    tc = None  # its columns are left out
else:
    from torch_checkpointing.barriers import DefaultStoreBarrierConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

__all__ = ["SYSTEMS", "PeerJob", "System", "full_tree", "value_of"]


class PeerJob(Job):
    """A rank of the comparison: its state is `full_tree`, and pyckpt is as it is by default."""

    small_slots = False

    def tree(self, value: float) -> dict[str, Any]:
        tree = full_tree(float(value))
        if self.mesh is not None:
            model = tree["model"]
            model["shared"] = distribute_tensor(
                model["shared"], self.mesh, [Shard(0)], src_data_rank=None
            )
        return {**tree, "object": {"value": value}}


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


def full_tree(value: float = 0) -> dict[str, Any]:
    """The state of all ranks, as one process has it."""
    return {
        "model": {"shared": torch.full((8, 3000), float(value)), "small": torch.full((3,), value)},
        "object": {"value": value},
    }


def _described(path: Path) -> bool:
    """DCP's rule, by which programs find what to resume from: the metadata is written last."""
    return (path / ".metadata").exists()


@dataclass(frozen=True)
class System:
    """One way to save and load.

    Attributes:
        name: of its column.
        version: of which package its version is.
        save: prepares to save a value as a step, and returns what does it, which runs under faults.
        load: the same for loading; what it returns returns the value. None: as another system's.
        look: the value of the checkpoint at a path that so many ranks have saved, by the system's
            own loader. It may raise anything.
        complete: whether what is at a path looks like a complete checkpoint to a program that
            resumes.
        path: where the checkpoint of a step is, in the directory of a case.
        situations: in which it is tried.
        sizes: numbers of ranks.
    """

    name: str
    version: str
    save: Callable[[PeerJob, int, float], Callable[[], Any]]
    load: Callable[[PeerJob, int], Callable[[], Any]] | None
    look: Callable[[Path, int], float | str]
    complete: Callable[[Path], bool] = _described
    path: Callable[[Path, int], Path] = lambda root, step: root / f"step-{step}"
    situations: tuple[str, ...] = ("first", "next", "overwrite", "load", "flip")
    sizes: tuple[int, ...] = (1, 2)


# pyckpt


def _direct_save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    tree, path = job.tree(value), job.root / f"step-{step}"
    return lambda: state_dict_saver.save(
        tree, storage_writer=pyckpt.DirectWriter(path), no_dist=job.mesh is None
    )


def _direct_load(job: PeerJob, step: int) -> Callable[[], Any]:
    def load() -> Any:
        tree = job.tree(0)
        reader = pyckpt.DirectReader(job.root / f"step-{step}")
        state_dict_loader.load(tree, storage_reader=reader, no_dist=job.mesh is None)
        return value_of(tree)

    return load


def _save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    tree, path = job.tree(value), job.root / f"step-{step}"
    return lambda: pyckpt.save(tree, path, overwrite=True)


def _load(job: PeerJob, step: int) -> Callable[[], Any]:
    def load() -> Any:
        tree = job.tree(0)
        pyckpt.load(tree, job.root / f"step-{step}")
        return value_of(tree)

    return load


def _look(path: Path, _size: int) -> float | str:
    tree = full_tree()
    pyckpt.load(tree, path)
    return value_of(tree)


def _checkpointer_save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    tree, checkpointer = job.tree(value), job.checkpointer()

    def run() -> None:
        with checkpointer:
            checkpointer.save(step, tree).wait()

    return run


def _checkpointer_restore(job: PeerJob, step: int) -> Callable[[], Any]:
    checkpointer = job.checkpointer()

    def run() -> Any:
        tree = job.tree(0)
        found = checkpointer.restore(tree)
        return value_of(tree) if found == step else f"restored {found}"

    return run


# PyTorch


def _stock_save(job: PeerJob, step: int, value: float, **options: Any) -> Callable[[], Any]:
    tree, path = job.tree(value), job.root / f"step-{step}"
    return lambda: state_dict_saver.save(
        tree, storage_writer=FileSystemWriter(path, **options), no_dist=job.mesh is None
    )


def _stock_async_save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    tree, path = job.tree(value), job.root / f"step-{step}"

    def save() -> Any:
        future = state_dict_saver.async_save(
            tree, storage_writer=FileSystemWriter(path), no_dist=job.mesh is None
        )
        return future.result()  # type: ignore[union-attr]

    return save


def _stock_load(job: PeerJob, step: int) -> Callable[[], Any]:
    def load() -> Any:
        tree = job.tree(0)
        reader = FileSystemReader(job.root / f"step-{step}")
        state_dict_loader.load(tree, storage_reader=reader, no_dist=job.mesh is None)
        return value_of(tree)

    return load


def _stock_look(path: Path, _size: int) -> float | str:
    tree = full_tree()
    state_dict_loader.load(tree, storage_reader=FileSystemReader(path), no_dist=True)
    return value_of(tree)


def _torch_save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    tree, path = job.tree(value), job.root / f"step-{step}.pt"

    def save() -> None:
        temporary = path.with_suffix(".tmp")
        torch.save(tree, temporary)
        os.replace(temporary, path)

    return save


def _torch_load(job: PeerJob, step: int) -> Callable[[], Any]:
    return lambda: _torch_look(job.root / f"step-{step}.pt", 1)


def _torch_look(path: Path, _size: int) -> float | str:
    return value_of(torch.load(path, weights_only=True))


# torch_checkpointing


def _local(node: Any) -> Any:
    """Each rank's own part: what its manager saves without a resharder."""
    if isinstance(node, dict):
        return {key: _local(entry) for key, entry in node.items()}
    return node.to_local() if isinstance(node, DTensor) else node


def _manager(job: PeerJob) -> Any:
    writer = tc.CheckpointWriterConfig(
        checkpoint_write_barrier_timeout_sec=int(TIMEOUT_S),
        # Its barrier takes names in the store of the process group, which cases share.
        barrier_config=DefaultStoreBarrierConfig(generation=job.stage.prefix),
    )
    return tc.CheckpointManager(
        tc.CheckpointManager.Config(
            save=tc.SyncCheckpointSaverConfig(writer_config=writer),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
    )


def _manager_save(job: PeerJob, step: int, value: float) -> Callable[[], Any]:
    manager, tree = _manager(job), _local(job.tree(value))
    return lambda: manager.save(str(job.root / f"step-{step}"), tree)


def _manager_load(job: PeerJob, step: int) -> Callable[[], Any]:
    manager = _manager(job)

    def load() -> Any:
        path = str(job.root / f"step-{step}")
        return value_of(manager.load(path, into=_local(job.tree(0)), strict=True))

    return load


class _Items(tc.CheckpointBase if tc is not None else object):  # type: ignore[misc]
    """What its loader fills."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self._items = {key: tc.CheckpointItem(value) for key, value in tree.items()}
        self.loaded: dict[str, Any] = {}

    def get_items(self) -> dict[str, Any]:
        return self._items

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = dict(state_dict)


def _manager_look(path: Path, size: int) -> float | str:
    loaded = {}
    for rank in range(size):
        tree = full_tree()
        tree["model"]["shared"] = tree["model"]["shared"].chunk(size)[rank].clone()
        info = tc.RankInfo(
            global_rank=rank, global_world_size=size, role_rank=rank, role_world_size=size
        )
        reader = tc.CheckpointReader(info, LocalFileSystemStorageConfig(use_direct_io=False))
        items = _Items(tree)
        tc.CheckpointLoader(reader).load(str(path), items, strict=True)
        loaded[rank] = items.loaded
    return value_of(loaded)


_TWO_THREADS = "dcp.save with FileSystemWriter(thread_count=2)"

SYSTEMS = {
    system.name: system
    for system in (
        System("dcp.save with DirectWriter", "pyckpt", _direct_save, _direct_load, _look),
        System("pyckpt.save", "pyckpt", _save, _load, _look),
        System(
            "Checkpointer",
            "pyckpt",
            _checkpointer_save,
            _checkpointer_restore,
            _look,
            path=lambda root, step: root / "run" / f"step-{step:08d}",
        ),
        System("dcp.save", "torch", _stock_save, _stock_load, _stock_look),
        System(
            _TWO_THREADS,
            "torch",
            lambda job, step, value: _stock_save(job, step, value, thread_count=2),
            None,
            _stock_look,
            situations=("first", "next", "overwrite"),
        ),
        System(
            "dcp.async_save",
            "torch",
            _stock_async_save,
            None,
            _stock_look,
            situations=("first", "next", "overwrite"),
        ),
        System(
            "torch.save and os.replace",
            "torch",
            _torch_save,
            _torch_load,
            _torch_look,
            Path.exists,
            path=lambda root, step: root / f"step-{step}.pt",
            sizes=(1,),
        ),
        System(
            "torch_checkpointing",
            "torch_checkpointing",
            _manager_save,
            _manager_load,
            _manager_look,
            Path.exists,
            situations=("first", "next", "load", "flip"),
        ),
    )
    if system.version != "torch_checkpointing" or tc is not None
}
