"""Saves, kills, restores on file systems that are not like the one that developers have.

    python -m torture.filesystems               all of them, some minutes, as root
    python -m torture.filesystems --only overlay bindfs
    python -m torture.filesystems --resume      the rest of a run that was stopped

On each file system the runs of `torture.power_scenarios` are made: saves, overwrites, a
Checkpointer's steps, kills, exports, a mirror. Then `torture.power_checks` looks: all that was
promised is there, for pyckpt and for stock PyTorch, the next save succeeds, and leaves no strays.

Besides: file systems that are shut down in the middle of a save (the kernel's own way to have the
power fail: what was not written is lost, and the journal is replayed), one that turns read-only in
the middle of a save, a quota that is reached, an item and a file beyond 4 GiB, and 10,000
checkpoints in a directory. What this machine lacks is skipped, and the result says why.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from rich.console import Console

import pyckpt
from pyckpt import Checkpointer
from pyckpt.train.store.catalog import Catalog
from torture import results
from torture.mounts import PLACES, Missing, image, need, run
from torture.power_checker import quiet
from torture.power_checks import Promises, check
from torture.power_scenarios import SCENARIOS, Says, Scenario, run_part, state_of, value_of, where

dcp: Any = torch.distributed.checkpoint

_MIB = 1 << 20
_RUNS = (
    *("overwrite", "async-save", "failed-save", "ranks", "steps", "steps-killed", "steps-again"),
    *("overwrite-killed-writing", "overwrite-killed-renamed", "mirror", "export-growing"),
)
_SHUTDOWNS = 12
_CHECKPOINTS = 10_000
_LARGE = (4 << 30) + (64 << 20)

_console = Console(stderr=True)


# What is done there.


def _in_child(function: Callable[[], Any], meanwhile: Callable[[], None] = lambda: None) -> Any:
    """Run a function in a process of its own, which starts without threads, and another one here
    meanwhile; return what the first does, as JSON.

    Raises:
        AssertionError: it raised, or died.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with quiet():
            try:
                answer = {"result": function()}
            except BaseException as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(theirs, json.dumps(answer).encode()[:60000])
            os._exit(0)
    os.close(theirs)
    meanwhile()
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(said) if said else {"error": "the process died"}
    if "error" in answer:
        raise AssertionError(answer["error"])
    return answer["result"]


def _look(scenario: Scenario, base: Path, root: Path | None = None) -> None:
    """Check what a run has left, in a process of its own."""
    its = where(base, scenario.name)
    promises = _promises(its.marks)
    _in_child(lambda: check(scenario, promises, root or its.root))


def _promises(marks: Path) -> Promises:
    lines = marks.read_text().splitlines() if marks.exists() else []
    return Promises([json.loads(line) for line in lines])


def _runs(point: Path) -> dict[str, Any]:
    """Make the runs there, and look."""
    for name in _RUNS:
        scenario = SCENARIOS[name]
        its = where(point, name)
        its.root.mkdir()
        for part in scenario.parts:
            run_part(scenario, part, its)
        _look(scenario, point)
    return {"runs": len(_RUNS)}


def _shut_down(base: Path, kind: str) -> dict[str, Any]:
    """Have a file system fail in the middle of saves, as if its machine had lost its power."""
    generator = random.Random(kind)
    tried: dict[str, int] = {}
    with image(base, kind) as (point, device):
        for number in range(_SHUTDOWNS):
            name = ("overwrite", "steps", "export")[number % 3]
            scenario = SCENARIOS[name]
            folder = base / f"marks-{number}"
            folder.mkdir()
            its = where(folder, name)
            there = point / f"run-{number}"
            there.mkdir()
            os.sync()
            child = os.fork()
            if not child:
                with quiet(), suppress(BaseException):
                    # The marks are on another disk, which stays.
                    scenario.parts[0](there, Says(its.marks))
                os._exit(0)
            until = time.monotonic() + generator.uniform(0.0, 1.5)
            while time.monotonic() < until and not os.waitpid(child, os.WNOHANG)[0]:
                time.sleep(0.001)
            _going_down(point)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
            run("umount", str(point))
            run("mount", device, str(point))
            lines = its.marks.read_text().splitlines() if its.marks.exists() else []
            tried[f"after {len(lines)} marks"] = tried.get(f"after {len(lines)} marks", 0) + 1
            _look(scenario, folder, there)
    return {"shut_down": _SHUTDOWNS, "instants": tried}


def _going_down(point: Path) -> None:
    """The kernel's GOINGDOWN, without a flush of the log."""
    descriptor = os.open(point, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, 0x8004587D, bytes(ctypes.c_uint32(2)))
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise Missing("a kernel that can shut this file system down") from None
        raise
    finally:
        os.close(descriptor)


def _turned_read_only(base: Path) -> dict[str, Any]:
    """ext4 finds an error in itself in the middle of saves, and lets nobody write any more. The
    saves fail, what was committed can still be read, and is there after a repair."""
    need("e2fsck")
    generator = random.Random(1)
    errors: dict[str, int] = {}
    scenario = SCENARIOS["overwrite"]
    with image(base, "ext4", options="errors=remount-ro") as (point, device):
        for number in range(_SHUTDOWNS):
            folder = base / f"marks-{number}"
            folder.mkdir()
            its = where(folder, scenario.name)
            there = point / f"run-{number}"
            there.mkdir()
            error = _in_child(
                partial(_save_until_error, there / "ckpt", its.marks),
                meanwhile=partial(_fail_ext4, device, its.marks, generator.uniform(0.0, 0.3)),
            )
            errors[error] = errors.get(error, 0) + 1
            allowed = _promises(its.marks).allowed("plain")
            value = _in_child(partial(_value, there / "ckpt"))
            if error not in ("EROFS", "EIO") or value not in allowed:
                raise AssertionError(f"{error}, then {value} is read, and {allowed} may be there")
            run("umount", str(point))
            # 1: it repaired something.
            if subprocess.run(["e2fsck", "-fy", device], capture_output=True).returncode > 1:
                raise AssertionError("e2fsck did not repair it")
            run("mount", "-o", "errors=remount-ro", device, str(point))
            _look(scenario, folder, there)
    return {"turned_read_only": _SHUTDOWNS, "errors": errors}


def _save_until_error(path: Path, marks: Path) -> str:
    said = Says(marks)
    for value in range(1, 1000):
        said("begun", "plain", value)
        try:
            pyckpt.save(state_of(value), path, overwrite=True)
        except OSError as failure:
            return errno.errorcode[failure.errno or 0]
        said("returned", "plain", value)
    return "no error"


def _value(path: Path) -> int:
    return value_of(pyckpt.load(path))


def _fail_ext4(device: str, marks: Path, after: float) -> None:
    """Have ext4 believe, so many seconds after the first save has returned, that it is damaged."""
    begun = time.monotonic()
    while not _promises(marks).returned("plain"):
        if time.monotonic() > begun + 60:
            raise AssertionError("no save has returned")
        time.sleep(0.001)
    time.sleep(after)
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("made up")


def _quota(base: Path) -> dict[str, Any]:
    """A quota is reached: EDQUOT, the old checkpoint stays, and with room it goes on. It is one of
    btrfs, which holds for root, too."""
    need("btrfs")
    with image(base, "btrfs") as (point, _):
        place = point / "its"
        run("btrfs", "quota", "enable", str(point))
        run("btrfs", "subvolume", "create", str(place))

        def limit(mib: int) -> None:
            run("btrfs", "qgroup", "limit", f"{mib}M", str(place))

        def save(value: int) -> str:
            large = torch.randint(256, (8 * _MIB,), dtype=torch.uint8)  # not to be compressed
            state = {"values": state_of(value), "large": large}
            try:
                pyckpt.save(state, place / "ckpt", overwrite=True)
            except OSError as error:
                return errno.errorcode[error.errno or 0]
            return "saved"

        def loaded() -> int:
            return value_of(pyckpt.load(place / "ckpt")["values"])

        limit(12)
        said = [_in_child(lambda: save(1)), _in_child(lambda: save(2)), _in_child(loaded)]
        left = len(os.listdir(place / "ckpt"))
        limit(40)
        said += [_in_child(lambda: save(3)), _in_child(loaded)]
        if said != ["saved", "EDQUOT", 1, "saved", 3] or left != 2:
            raise AssertionError(f"{said}, and {left} files were there after the save that failed")
    return {"errors": 1}


def _large(base: Path) -> dict[str, Any]:
    """An item beyond 4 GiB, overwritten by items that are smaller, in a file beyond 4 GiB."""
    path = base / "ckpt"

    def both() -> None:
        tensor = torch.zeros(_LARGE, dtype=torch.uint8)
        tensor[:: _LARGE // 64] = 7
        tensor[-1] = 9
        _save_large({"large": tensor, "after": torch.arange(10)}, path)
        tensor += 1  # in place: a copy may not find room
        parts = {f"large{i}": part for i, part in enumerate(tensor.chunk(5))}
        _save_large({**parts, "after": torch.arange(20)}, path)

    needed = 2 * _LARGE + (1 << 30)
    if shutil.disk_usage(base).free < needed:
        raise Missing(f"{needed >> 30} GiB of disk")
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    if available < needed:
        raise Missing(f"{needed >> 30} GiB of free memory")
    _in_child(both)
    return {"bytes": _LARGE, "saves": 2}


def _save_large(state: dict[str, torch.Tensor], path: Path) -> None:
    """Save, and load by pyckpt and by stock PyTorch."""
    pyckpt.save(state, path, overwrite=True)
    (data,) = path.glob("*.distcp")
    assert data.stat().st_size > 4 << 30
    for name, load in (("pyckpt", pyckpt.load), ("stock", _load_stock)):
        found = {key: torch.ones_like(tensor) for key, tensor in state.items()}
        load(found, path)
        for key, tensor in state.items():
            assert torch.equal(found[key], tensor), f"{name} loads another {key}"


def _load_stock(state: dict[str, torch.Tensor], path: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def _many(base: Path) -> dict[str, Any]:
    """10,000 checkpoints in a directory: what finding, saving and pruning cost."""
    root = base / "run"

    def first() -> None:
        with Checkpointer(root) as checkpointer:
            checkpointer.save(1, {"x": torch.zeros(4)}).wait()

    _in_child(first)
    one = root / "step-00000001"
    content = {path.name: path.read_bytes() for path in one.iterdir()}
    for step in range(2, _CHECKPOINTS + 1):
        path = root / f"step-{step:08d}"
        path.mkdir()
        for name, data in content.items():
            (path / name).write_bytes(data)

    def timed(function: Callable[[], Any]) -> tuple[float, Any]:
        before = time.process_time()
        found = function()
        return round(time.process_time() - before, 3), found

    def costs() -> dict[str, float]:
        catalog = Catalog(root)
        cost: dict[str, float] = {}
        cost["newest"], newest = timed(catalog.newest)
        assert newest.step == _CHECKPOINTS
        cost["all"], entries = timed(lambda: Catalog(root).entries())
        assert [entry.state for entry in entries] == ["valid"] * _CHECKPOINTS

        def resumed() -> None:
            with Checkpointer(root) as checkpointer:
                assert checkpointer.restore({"x": torch.ones(4)}) == _CHECKPOINTS
                checkpointer.save(_CHECKPOINTS + 1, {"x": torch.zeros(4)}).wait()

        cost["restore, save, close"], _ = timed(resumed)

        def pruned() -> None:
            with Checkpointer(root, keep_last=3) as checkpointer:
                checkpointer.save(_CHECKPOINTS + 2, {"x": torch.zeros(4)}).wait()

        cost["save and prune all but 3"], _ = timed(pruned)
        assert len(os.listdir(root)) == 4, os.listdir(root)[:9]
        return cost

    return {"checkpoints": _CHECKPOINTS, "processor_seconds": _in_child(costs)}


WORK: dict[str, Callable[[Path], dict[str, Any]]] = {
    "shut down, ext4": lambda base: _shut_down(base, "ext4"),
    "shut down, xfs": lambda base: _shut_down(base, "xfs"),
    "turned read-only, ext4": _turned_read_only,
    "quota": _quota,
    "beyond 4 GiB": _large,
    "10,000 checkpoints": _many,
}


def _try(name: str, folder: Path) -> dict[str, Any]:
    begun = time.monotonic()
    base = Path(tempfile.mkdtemp(dir=folder))
    try:
        if name in PLACES:
            with PLACES[name](base) as point:
                found = _runs(point)
        else:
            found = WORK[name](base)
        outcome = {"outcome": "held", **found}
    except Missing as error:
        outcome = {"outcome": "skipped", "why": f"this machine lacks {error}"}
    except Exception as error:
        outcome = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return {**outcome, "seconds": round(time.monotonic() - begun)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [*PLACES, *WORK]
    parser.add_argument("--only", nargs="*", default=every, choices=every)
    parser.add_argument("--folder", type=Path, help="where the images and large files go")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what the output has, of the same commit"
    )
    parser.add_argument("--output", type=Path, default=results.RESULTS / "filesystems.json")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("mounting file systems needs root")
    found: dict[str, dict[str, Any]] = {}
    if arguments.resume:
        found = results.earlier(arguments.output, "file_systems")
    with tempfile.TemporaryDirectory(prefix="pyckpt-fs-", dir=arguments.folder) as folder:
        for name in arguments.only:
            if name in found:
                continue
            found[name] = _try(name, Path(folder))
            _console.print(f"{name}: {found[name]}")
            _write(found, arguments.output)
    print(arguments.output)
    return 1 if _failed(found) or not found else 0


def _failed(found: dict[str, dict[str, Any]]) -> list[str]:
    # With PYCKPT_REQUIRE_ALL=1, nothing may be skipped.
    bad = ("failed", "skipped") if os.environ.get("PYCKPT_REQUIRE_ALL") == "1" else ("failed",)
    return [name for name, one in found.items() if one["outcome"] in bad]


def _write(found: dict[str, dict[str, Any]], output: Path) -> None:
    every = [*PLACES, *WORK]
    content = {
        "is_complete": found.keys() >= {*every},
        "failed": _failed(found),
        "file_systems": {name: found[name] for name in every if name in found},
    }
    results.write("filesystems", content, output)


if __name__ == "__main__":
    sys.exit(main())
