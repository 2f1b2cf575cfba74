"""What must hold of the files that a power failure has left, whatever it was.

- What a save that had returned promised is there, whole: by pyckpt, which compares checksums, and
  by stock PyTorch. What was under way is there whole, or not at all.
- ``Checkpointer.restore`` finds the newest; nothing counts as damaged.
- The next save succeeds, is there, and leaves nothing but checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint
from safetensors.torch import load_file

import pyckpt
from pyckpt import Checkpointer
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.fence import FOLDER
from torture.power_scenarios import Scenario, Values, state_of, value_of

dcp: Any = torch.distributed.checkpoint

__all__ = ["Promises", "check"]

_NEXT = 50
"""The value of the save that is made in what was found: larger than those that are there."""
_METADATA = commit.metadata_name()
_Loaded = TypeVar("_Loaded")


class Promises:
    """What a run had begun, and what it was promised, when the power failed."""

    def __init__(self, marks: Sequence[Mapping[str, Any]]) -> None:
        self._marks = marks

    def key(self) -> str:
        return json.dumps(self._marks)

    def begun(self, place: str) -> list[int]:
        return [mark["value"] for mark in self._marks if mark.get("begun") == place]

    def returned(self, place: str) -> list[int]:
        return [mark["value"] for mark in self._marks if mark.get("returned") == place]

    def allowed(self, place: str) -> set[int | None]:
        """The values that may be found in a place where each save replaces the one before: the last
        that was promised, and those that were begun since. None: nothing was there yet, or what was
        there is being removed."""
        allowed: set[int | None] = {None}
        for mark in self._marks:
            if mark.get("begun") == place:
                allowed.add(mark["value"])
            elif mark.get("returned") == place:
                allowed = {mark["value"]}
        return allowed


def check(scenario: Scenario, promises: Promises, base: Path) -> None:
    """Raise unless all holds of the files below ``base``, which are changed.

    Raises:
        Exception: something does not; of any class, since pyckpt or PyTorch raised it.
    """
    if scenario.plain:
        _check_plain(base / scenario.plain, promises.allowed("plain"))
    if scenario.mirror:
        _check_mirror(scenario, promises, base)
    if scenario.root:
        _check_root(scenario, promises, base)
    if scenario.export:
        _check_export(scenario, promises, base)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


# A checkpoint.


def _check_plain(path: Path, allowed: set[int | None]) -> None:
    value = _loaded(path)
    _require(value in allowed, f"it holds {value}, and {sorted(map(str, allowed))} may be there")
    pyckpt.save(state_of(_NEXT), path, overwrite=True)
    _require(_loaded(path) == _NEXT, "the next save is not there")
    _check_no_strays(path)


def _once(load: Callable[[Path], _Loaded]) -> Callable[[Path], _Loaded]:
    """Have a directory with the same files be loaded once; what raises, each time."""
    known: dict[tuple[tuple[str, bytes], ...], _Loaded] = {}

    def loaded(path: Path) -> _Loaded:
        if not path.is_dir():
            return load(path)
        files = tuple(sorted((one.name, _digest(one)) for one in path.iterdir()))
        if files not in known:
            known[files] = load(path)
        return known[files]

    return loaded


def _digest(path: Path) -> bytes:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).digest()


@_once
def _loaded(path: Path) -> int | None:
    """The value of the checkpoint, if there is one; for pyckpt and PyTorch it is the same."""
    if not (path / _METADATA).exists():
        for load in (_load, _load_stock):
            try:
                found = load(path)
            except (FileNotFoundError, dcp.CheckpointException):
                continue
            raise AssertionError(f"{load.__name__} found {found} without metadata")
        return None
    ours, stock = _load(path), _load_stock(path)
    _require(ours == stock, f"pyckpt loads {ours}, and stock PyTorch {stock}")
    return ours


def _load(path: Path) -> int:
    return value_of(pyckpt.load(path))


def _load_stock(path: Path) -> int:
    state = state_of(0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return value_of(state)


def _check_no_strays(path: Path) -> None:
    """Raise if the directory of a checkpoint holds anything else."""
    named = metadata_format.data_files(metadata_format.read(path / _METADATA))
    found = {one.name for one in path.iterdir()}
    _require(found == {_METADATA, *named}, f"{path.name} holds {sorted(found)}")


# A Checkpointer.


def _check_root(scenario: Scenario, promises: Promises, base: Path) -> None:
    root = base / scenario.root
    mirror = base / scenario.mirror if scenario.mirror else None
    begun, returned = promises.begun("root"), promises.returned("root")
    _check_steps(scenario, root, begun, returned)
    keep_last = scenario.keep_last
    settings: dict[str, Any] = {}
    if mirror is not None:
        settings = {"mirror": mirror, "mirror_keep_last": keep_last}
    with Checkpointer(root, keep_last=keep_last, **settings) as checkpointer:
        _check_restored(checkpointer, begun, returned)
        checkpointer.save(_NEXT, {"values": Values(_NEXT)}).wait()
        _require(checkpointer.wait_mirrored(60), "the next save does not get to the mirror")
    for place in (root, mirror):
        if place is not None:
            _check_kept(scenario, place)


def _check_steps(
    scenario: Scenario, root: Path, begun: Sequence[int], returned: Sequence[int]
) -> None:
    """Raise unless each checkpoint of a directory is whole, and those promised are there."""
    valid = []
    entries = Catalog(root).entries()
    for entry in entries:
        _require(entry.state in ("valid", "unfinished", "removed"), f"{entry}")
        if entry.state == "valid":
            assert entry.step is not None
            valid.append(entry.step)
            _require(_loaded_step(entry.path) == entry.step, f"{entry.path.name} has another state")
    _require({*valid} <= {*begun}, f"{valid} are there, and only {begun} were begun")
    # A step that is there may have been committed, and older ones pruned, before the run was told.
    kept = {*sorted({*returned, *valid})[-scenario.keep_last :]}
    _require(kept <= {*valid}, f"{returned} were committed, and {valid} are there")


@_once
def _loaded_step(path: Path) -> int:
    """The value of a step, which is the same for pyckpt and PyTorch."""
    tree = pyckpt.load(path)
    ours = value_of(tree["values"])
    state = {"values": state_of(0)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    _require(value_of(state["values"]) == ours, "stock PyTorch loads another state")
    return ours


def _check_restored(
    checkpointer: Checkpointer, begun: Sequence[int], returned: Sequence[int]
) -> None:
    values = Values(0)
    step = checkpointer.restore({"values": values})
    if step is None:
        _require(not returned, f"nothing was restored, and {returned} were committed")
        return
    _require(value_of(values.state) == step, f"step {step} was restored with another state")
    _require(step >= max(returned, default=0), f"{step} was restored, and {returned} committed")


def _check_kept(scenario: Scenario, root: Path) -> None:
    """Raise unless a directory holds the next save, what is kept beside it, and nothing else."""
    entries = Catalog(root).entries()
    states = [str(entry) for entry in entries if entry.state != "valid"]
    _require(not states, f"after the next save: {states}")
    steps = [entry.step for entry in entries]
    _require(_NEXT in steps and len(steps) <= scenario.keep_last, f"{steps} are kept")
    for entry in entries:
        _loaded_step(entry.path)
        _check_no_strays(entry.path)
    found = sorted(one.name for one in (root / FOLDER).iterdir())
    _require(len(found) == 2 and found[1] == "lock", f"{FOLDER} holds {found}")


def _check_mirror(scenario: Scenario, promises: Promises, base: Path) -> None:
    """Raise unless a run could go on from the mirror alone, had the directory been lost."""
    mirror = base / "lost" / "mirror"
    if (base / scenario.mirror).exists():
        shutil.copytree(base / scenario.mirror, mirror)
    mirror.mkdir(parents=True, exist_ok=True)
    begun, returned = promises.begun("root"), promises.returned("mirror")
    _check_steps(scenario, mirror, begun, returned)
    with Checkpointer(base / "lost" / "run", mirror=mirror) as checkpointer:
        _check_restored(checkpointer, begun, returned)
    shutil.rmtree(base / "lost")


# An export.


def _check_export(scenario: Scenario, promises: Promises, base: Path) -> None:
    path = base / scenario.export
    allowed = promises.allowed("export")
    value = _exported(path)
    if value is not None and scenario.config is not None:
        config = json.loads((path / "config.json").read_bytes())
        _require(config == scenario.config, f"beside the model is the configuration {config}")
    was_there = None in allowed or (scenario.may_break and len(allowed) > 1)
    _require(
        value in allowed or (value is None and was_there),
        f"the export is {value}, and {sorted(map(str, allowed))} may be there",
    )
    source = base / "next"
    pyckpt.save({"model": state_of(_NEXT)}, source)
    format: Any = "torch" if scenario.name == "export-torch" else "safetensors"
    files = pyckpt.export(source, path, key="model", format=format)
    _require(_exported(path) == _NEXT, "the next export is not there")
    found = {one.name for one in path.iterdir()} - {"config.json"}
    _require(found == {file.name for file in files}, f"the next export left {sorted(found)}")


def _exported(path: Path) -> int | None:
    """The value of the model that loaders find; None if they find none that loads."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    torch_file = path / "pytorch_model.bin"
    if single.exists():
        tensors = load_file(single)
    elif torch_file.exists():
        tensors = torch.load(torch_file)
    elif index.exists():
        where = json.loads(index.read_text())["weight_map"]
        if not all((path / name).exists() for name in where.values()):
            return None
        shards = {name: load_file(path / name) for name in where.values()}
        tensors = {name: shards[file][name] for name, file in where.items()}
    else:
        return None
    value = int(tensors["bias0"][0])
    for name, expected in state_of(value).items():
        if torch.is_tensor(expected):
            _require(torch.equal(tensors[name], expected), f"{name} is not that of {value}")
    return value
