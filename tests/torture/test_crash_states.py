"""The models of what a power failure leaves, on runs so small that all allowed states are known."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from torture.crash_states import MODELS, Instant, Model, instants, states
from torture.recording import ROOT, Binding, Change, Operation, Recording, Run, record

FILE, OTHER, FOLDER = 1, 2, 3
OLD, NEW = b"o" * 1024, b"n" * 1024


def run_of(*calls: Operation) -> Recording:
    """The calls one after the other."""
    operations = [
        Operation(
            **{**vars(call), "begun": float(number), "ended": number + 0.5},
        )
        for number, call in enumerate(calls)
    ]
    return Recording(operations, {ROOT, FOLDER}, {0: ".", 1: "file", 2: "other", 3: "folder"})


def call(name: str, node: int, *bindings: Binding, **what: object) -> Operation:
    return Operation(0, 0, name, node, bindings, **what)  # type: ignore[arg-type]


def create(name: str, node: int, directory: int = ROOT) -> Operation:
    return call("openat", node, Binding(directory, name, node))


def write(node: int, data: bytes, at: int = 0) -> Operation:
    return call("pwrite64", node, change=Change("write", at, data))


def sync(node: int) -> Operation:
    return call("fsync", node, syncs=node)


def rename(node: int, old: str, new: str, *, replaced: bool = True) -> Operation:
    bindings = Binding(ROOT, new, node), Binding(ROOT, old, None)
    return call("rename", node, *bindings, replaced=replaced)


def unlink(name: str, node: int, directory: int = ROOT) -> Operation:
    return call("unlink", node, Binding(directory, name, None))


def trees(recording: Recording, model: Model, samples: int = 200) -> list[dict[str, bytes | None]]:
    """What the model allows once all calls have returned."""
    instant = Instant(recording, instants(recording)[-1])
    return [one.tree for one in states(instant, model, random.Random(1), samples=samples)]


def names(recording: Recording, model: Model) -> set[frozenset[str]]:
    return {frozenset(tree) for tree in trees(recording, model)}


@pytest.mark.parametrize("model", MODELS)
def test_what_is_synced_is_there(model: Model) -> None:
    recording = run_of(create("file", FILE), write(FILE, NEW), sync(FILE), sync(ROOT))
    assert trees(recording, model)
    assert all(tree == {"file": NEW} for tree in trees(recording, model))


def test_a_synced_file_has_its_name_except_in_posix() -> None:
    recording = run_of(create("file", FILE), write(FILE, NEW), sync(FILE))
    there, gone = frozenset({"file"}), frozenset[str]()
    assert names(recording, "posix") == {there, gone}
    for model in ("ext4", "xfs", "btrfs"):
        assert names(recording, model) == {there}


def test_names_count_in_any_order_in_posix_and_in_theirs_in_a_journal() -> None:
    recording = run_of(create("file", FILE), create("other", OTHER))
    both, first, none = frozenset({"file", "other"}), frozenset({"file"}), frozenset[str]()
    assert names(recording, "posix") == {both, first, none, frozenset({"other"})}
    for model in ("ext4", "xfs", "btrfs"):
        assert names(recording, model) == {both, first, none}


def test_a_sync_takes_what_came_before_with_it_in_a_journal_but_not_in_btrfs() -> None:
    """There, what was unlinked may be back although a later file is synced."""
    begin = [create("file", FILE), write(FILE, OLD), sync(FILE), sync(ROOT)]
    recording = run_of(*begin, unlink("file", FILE), create("other", OTHER), sync(OTHER))
    assert names(recording, "ext4") == names(recording, "xfs") == {frozenset({"other"})}
    both = frozenset({"file", "other"})
    assert names(recording, "btrfs") == {both, frozenset({"other"})}
    assert both in names(recording, "posix")


def test_a_directory_is_there_with_what_is_synced_in_it() -> None:
    made = call("mkdir", FOLDER, Binding(ROOT, "folder", FOLDER))
    recording = run_of(made, create("file", FILE, FOLDER), write(FILE, NEW), sync(FILE))
    for model in ("ext4", "xfs", "btrfs"):
        assert names(recording, model) == {frozenset({"folder", "folder/file"})}
    # The folder's own names are not synced, nor is the root.
    assert names(run_of(*recording.operations, sync(FOLDER)), "posix") == {
        frozenset(),
        frozenset({"folder", "folder/file"}),
    }


def test_bytes_without_a_sync_are_torn_at_sectors() -> None:
    begin = [create("file", FILE), write(FILE, OLD), sync(FILE), sync(ROOT)]
    recording = run_of(*begin, write(FILE, NEW))
    found = {tree["file"] for tree in trees(recording, "posix")}
    halves = {OLD[:512] + NEW[512:], NEW[:512] + OLD[512:]}
    assert found == {OLD, NEW, *halves}
    assert {tree["file"] for tree in trees(recording, "ext4")} == found
    # Written elsewhere, and then there at once.
    assert {tree["file"] for tree in trees(recording, "btrfs")} == {OLD, NEW}


def test_a_new_size_may_come_without_its_bytes_in_posix_only() -> None:
    recording = run_of(create("file", FILE), sync(ROOT), write(FILE, NEW))
    found = {tree["file"] for tree in trees(recording, "posix")}
    assert {b"", NEW, bytes(1024)} <= found
    assert any(
        one not in (b"", NEW) and len(one or b"") == 1024 and any(one or b"") for one in found
    )
    for model in ("ext4", "xfs", "btrfs"):
        assert {tree["file"] for tree in trees(recording, model)} == {b"", NEW}


def test_room_that_was_made_is_zeros() -> None:
    room = call("fallocate", FILE, change=Change("room", 1024))
    recording = run_of(create("file", FILE), room, sync(ROOT), write(FILE, NEW))
    assert {tree["file"] for tree in trees(recording, "ext4")} == {b"", bytes(1024), NEW}


def test_a_file_renamed_over_another_is_written_before_in_ext4_only() -> None:
    begin = [create("file", FILE), write(FILE, OLD), sync(FILE), sync(ROOT)]
    changed = [create("other", OTHER), write(OTHER, NEW), rename(OTHER, "other", "file")]
    recording = run_of(*begin, *changed)
    assert {tree["file"] for tree in trees(recording, "ext4")} == {OLD, NEW}
    for model in ("xfs", "btrfs"):
        assert {tree["file"] for tree in trees(recording, model)} == {OLD, NEW, b""}


def test_a_rename_leaves_the_old_name_or_the_new_or_both_in_posix() -> None:
    begin = [create("file", FILE), write(FILE, NEW), sync(FILE), sync(ROOT)]
    recording = run_of(*begin, rename(FILE, "file", "other", replaced=False))
    old, new = frozenset({"file"}), frozenset({"other"})
    assert names(recording, "posix") == {old, new, old | new}
    for model in ("ext4", "xfs", "btrfs"):
        assert names(recording, model) == {old, new}


def test_a_sync_covers_what_had_ended_when_it_began() -> None:
    """The calls of two processes overlap."""
    created = Operation(0, 1, "openat", FILE, (Binding(ROOT, "file", FILE),))
    early = Operation(0.5, 2, "fsync", ROOT, syncs=ROOT)
    late = Operation(1.5, 2, "fsync", ROOT, syncs=ROOT)
    for synced, allowed in (
        (early, {frozenset[str](), frozenset({"file"})}),
        (late, {frozenset({"file"})}),
    ):
        recording = Recording([created, synced], {ROOT}, {0: ".", 1: "file"})
        for model in MODELS:
            assert names(recording, model) == allowed
    # A sync that has not returned promises nothing.
    under_way = Instant(Recording([created, late], {ROOT}, {0: ".", 1: "file"}), 1.9)
    found = {frozenset(one.tree) for one in states(under_way, "ext4", random.Random(1), samples=9)}
    assert found == {frozenset(), frozenset({"file"})}


@pytest.mark.parametrize("model", MODELS)
def test_without_its_sync_a_file_may_be_gone(model: Model) -> None:
    recording = run_of(create("file", FILE), write(FILE, NEW), sync(FILE), sync(ROOT))
    for index in reversed(recording.syncs):
        recording = recording.without(index)
    assert frozenset() in names(recording, model)


SCRIPT = """
import json, os, sys
root, marks = sys.argv[1:]
said = os.open(marks, os.O_WRONLY | os.O_CREAT)
os.write(said, json.dumps({"begun": "x"}).encode())
os.mkdir(f"{root}/folder")
with open(f"{root}/folder/a b", "wb", buffering=0) as file:
    os.posix_fallocate(file.fileno(), 0, 5000)
    file.write(b"first")
    os.pwrite(file.fileno(), b"\\0\\1\\2", 4000)
    file.seek(100)
    os.writev(file.fileno(), [b"and", b" more"])
    file.truncate(4500)
    os.fsync(file.fileno())
folder = os.open(f"{root}/folder", os.O_RDONLY)
os.rename("a b", "c", src_dir_fd=folder, dst_dir_fd=folder)
os.fsync(folder)
os.link(f"{root}/folder/c", f"{root}/linked")
with open(f"{root}/copied", "wb", buffering=0) as to, open(f"{root}/linked", "rb") as source:
    os.sendfile(to.fileno(), source.fileno(), 90, 30)
child = os.fork()
if not child:
    open(f"{root}/childs", "w").write("its bytes")
    sys.exit(0)
os.wait()
open(f"{root}/gone", "w").close()
os.unlink(f"{root}/gone")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_recording_gives_the_files_that_the_run_has_left(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    run = Run(root, tmp_path / "marks")
    command = [sys.executable, "-c", SCRIPT, str(root), str(run.marks)]
    recording = record(command, {"it": run}, tmp_path / "log")["it"]  # compares them
    assert set(recording.tree()) == {"folder", "folder/c", "linked", "copied", "childs"}
    assert recording.tree()["copied"] == bytes(10) + b"and more" + bytes(12)
    assert [op.mark for op in recording.operations if op.mark is not None] == [{"begun": "x"}]
    assert [recording.names[recording.operations[i].node] for i in recording.syncs] == [
        "folder/a b",
        "folder",
    ]
    (root / "copied").write_bytes(b"changed")
    with pytest.raises(AssertionError, match="wrong about copied"):
        recording.check(root)
