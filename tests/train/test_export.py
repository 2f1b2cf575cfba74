"""Exported models: what other programs read is what was saved."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import resource
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _filesystems import TMPFS_BYTES, free_bytes
from _ranks import Child, Pipe, run_child, run_ranks
from _sampling import slow
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import pyckpt
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format.claim import turn
from pyckpt.train.store import export as export_module
from pyckpt.train.store import pieces, swap, tensors
from pyckpt.train.store.swap import MARK, new_file, temporary_directory
from pyckpt.train.store.tensors import _split

FORMATS = ("safetensors", "torch")


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "embed.weight": torch.randn(1000, 64, generator=generator),
        "transposed": torch.randn(300, 200, generator=generator).t(),
        "half": torch.randn(77, generator=generator).to(torch.bfloat16),
        "double": torch.randn(3, 5, 7, generator=generator, dtype=torch.float64),
        "counts": torch.arange(10),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }


def save(path: Path, state: dict[str, Any], *, stock: bool = False) -> Path:
    if stock:
        dcp.save(state, checkpoint_id=path)
    else:
        dcp.save(state, storage_writer=pyckpt.DirectWriter(path, sync_files=False))
    return path


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """What a reader finds there: the one file, or all that the index names."""
    (index,) = directory.glob("*.index.json") if any(directory.glob("*.json")) else (None,)
    if index is None:
        (file,) = directory.iterdir()
        return load(file)
    weights = json.loads(index.read_text())["weight_map"]
    found = {}
    for name in sorted(set(weights.values())):
        inside = load(directory / name)
        assert inside.keys() == {key for key, where in weights.items() if where == name}
        found |= inside
    return found


def load(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        return load_file(file)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
    found: dict[str, torch.Tensor] = torch.load(file, weights_only=True)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize("piece", [256, 64 << 10, 16 << 20])
def test_all_kinds_of_tensors(
    format: Any, stock: bool, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    monkeypatch.setattr(tensors, "PIECE_BYTES", piece)
    small = {name: tensor[:9] if tensor.dim() else tensor for name, tensor in model().items()}
    state = small if piece == 256 else model()
    checkpoint = save(tmp_path / "c", {"model": state, "other": {"x": torch.ones(3)}}, stock=stock)
    pyckpt.export(checkpoint, tmp_path / "out", format=format)
    assert_same(exported(tmp_path / "out"), state)


@pytest.mark.parametrize("format", FORMATS)
def test_shards_and_their_index(format: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    files = pyckpt.export(checkpoint, tmp_path / "out", format=format, max_shard_size="100KB")
    stem = "model" if format == "safetensors" else "pytorch_model"
    suffix = "safetensors" if format == "safetensors" else "bin"
    count = len(files) - 1
    assert count > 1
    assert [file.name for file in files] == [
        *(f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)),
        f"{stem}.{suffix}.index.json",
    ]
    assert_same(exported(tmp_path / "out"), model())
    total = json.loads(files[-1].read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in model().values())
    for file in files[:-1]:
        inside = load(file)
        assert len(inside) == 1 or sum(t.nbytes for t in inside.values()) <= 100_000


def test_an_export_replaces_another(tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    pyckpt.export(checkpoint, tmp_path / "out", max_shard_size="100KB")
    pyckpt.export(checkpoint, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    pyckpt.export(checkpoint, tmp_path / "out", max_shard_size="100KB")
    assert "model.safetensors" not in os.listdir(tmp_path / "out")


def other_model() -> dict[str, torch.Tensor]:
    """The same names and shapes, and other values."""
    return {name: ~t if t.dtype == torch.bool else t + 1 for name, t in model().items()}


def _killed(_pipe: Pipe, checkpoint: Path, out: Path, call: str, after: int, size: str) -> None:
    """Die at the n-th call of a function of os."""
    commit._sync_name = lambda path: None  # it is not meant here
    owner = os if call == "fsync" else Path  # of Python 3.10, which does not call os by name
    real = getattr(owner, call)
    count = 0

    def deadly(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        if count == after:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return real(*arguments, **options)

    setattr(owner, call, deadly)
    pyckpt.export(checkpoint, out, max_shard_size=size)


def kill(*arguments: Any) -> None:
    child = Child(_killed, *arguments)
    with pytest.raises(EOFError):
        child.receive()
    assert child.join() == -signal.SIGKILL


@pytest.mark.parametrize("before", ["100KB", slow("1GB")])
def test_killed_while_it_replaces_another(before: str, tmp_path: Path) -> None:
    old = save(tmp_path / "old", {"model": model()})
    new = save(tmp_path / "new", {"model": other_model()})
    out = tmp_path / "out"
    shards = len(pyckpt.export(new, tmp_path / "alone", max_shard_size="100KB")) - 1
    assert shards > 2
    for after in range(shards + 1):
        pyckpt.export(old, out, max_shard_size=before)
        kill(new, out, "replace", after, "100KB")
        # Where the shards are not all new, nothing says that they are a model.
        assert not (out / "model.safetensors").exists()
        assert not (out / "model.safetensors.index.json").exists()
    pyckpt.export(new, out, max_shard_size="100KB")
    assert sorted(os.listdir(out)) == sorted(os.listdir(tmp_path / "alone"))
    assert_same(exported(out), other_model())


@pytest.mark.parametrize(("before", "size"), [("100KB", "100KB"), ("1GB", "100KB"), ("1GB", "1GB")])
def test_killed_while_it_writes(before: str, size: str, tmp_path: Path) -> None:
    old = save(tmp_path / "old", {"model": model()})
    new = save(tmp_path / "new", {"model": other_model()})
    out = tmp_path / "out"
    files = pyckpt.export(old, out, max_shard_size=before)
    kill(new, out, "fsync", 0, size)
    (left,) = set(os.listdir(out)) - {file.name for file in files}
    os.rename(out / left, tmp_path / left)
    assert_same(exported(out), model())
    os.rename(tmp_path / left, out / left)
    pyckpt.export(new, out, max_shard_size=size)
    assert_same(exported(out), other_model())
    assert left not in os.listdir(out)


def test_from_shards_to_one_file_there_always_is_a_model(tmp_path: Path) -> None:
    old = save(tmp_path / "old", {"model": model()})
    new = save(tmp_path / "new", {"model": other_model()})
    out = tmp_path / "out"
    for after in range(3):
        pyckpt.export(old, out, max_shard_size="100KB")
        kill(new, out, "unlink", after, "1GB")
        assert_same(load(out / "model.safetensors"), other_model())
        assert (out / "model.safetensors.index.json").exists() == (after == 0)
    pyckpt.export(new, out)
    assert os.listdir(out) == ["model.safetensors"]


def _all_at_once(directory: Path) -> None:
    """Each rank exports a model of its own, and all write at the same time."""
    rank = dist.get_rank()
    state = {name: torch.full_like(tensor, rank) for name, tensor in model().items()}
    checkpoint = directory / f"c{rank}"
    dcp.save({"model": state}, storage_writer=pyckpt.DirectWriter(checkpoint), no_dist=True)
    copy = export_module.copy

    def together(*arguments: Any) -> dict[str, int]:
        dist.barrier()
        return copy(*arguments)

    export_module.copy = together
    for size in ("100KB", "100KB", "1GB", "100KB"):
        pyckpt.export(checkpoint, directory / "out", max_shard_size=size)
        dist.barrier()
        # It is the model of one of them.
        found = exported(directory / "out")
        assert found.keys() == state.keys()
        (values,) = {tuple({*map(float, t.flatten())}) for n, t in found.items() if n in WHOLE}
        assert values in {(0.0,), (1.0,), (2.0,)}
        dist.barrier()


WHOLE = ("embed.weight", "transposed", "half", "double", "counts", "scalar")


@pytest.mark.slow
def test_exports_into_one_directory_at_once(tmp_path: Path) -> None:
    run_ranks(3, _all_at_once, tmp_path)


@pytest.mark.parametrize("format", FORMATS)
def test_dtype(format: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    pyckpt.export(checkpoint, tmp_path / "out", format=format, dtype=torch.float16)
    expected = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in model().items()
    }
    assert_same(exported(tmp_path / "out"), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_tied_weights(format: Any, tmp_path: Path) -> None:
    state = model()
    state["head.weight"] = state["embed.weight"]
    checkpoint = save(tmp_path / "c", {"model": state})
    pyckpt.export(checkpoint, tmp_path / "copies", format=format)
    assert_same(exported(tmp_path / "copies"), state)
    tied = {"head.weight": "embed.weight"}
    (file,) = pyckpt.export(checkpoint, tmp_path / "out", format=format, tied=tied)
    found = exported(tmp_path / "out")
    if format == "torch":
        assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
        assert_same(found, state)
    else:
        assert_same(found, model())
        header = file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")]
        assert json.loads(header)["__metadata__"] == {"format": "pt", **MARK, **tied}
    for wrong, match in (
        ({"half": "embed.weight"}, "not tied"),
        ({"absent": "half"}, "must name two tensors"),
    ):
        with pytest.raises(ValueError, match=match):
            pyckpt.export(checkpoint, tmp_path / "wrong", format=format, tied=wrong)


def test_one_model_of_several(tmp_path: Path) -> None:
    state = {"generator": {"w": torch.ones(2)}, "critic": {"w": torch.zeros(3)}, "step": 3}
    checkpoint = save(tmp_path / "c", state)
    pyckpt.export(checkpoint, tmp_path / "out", key="critic")
    assert_same(exported(tmp_path / "out"), {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"no tensors under 'model'.*'critic', 'generator'"):
        pyckpt.export(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "onnx"}, "format"),
        ({"max_shard_size": "5 bytes"}, "max_shard_size"),
        ({"max_shard_size": 0}, "positive"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    with pytest.raises(ValueError, match=match):
        pyckpt.export(checkpoint, tmp_path / "out", **options)


def test_what_safetensors_has_no_name_for(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2, dtype=torch.complex128)}}
    checkpoint = save(tmp_path / "c", state)
    with pytest.raises(ValueError, match="complex128"):
        pyckpt.export(checkpoint, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []
    pyckpt.export(checkpoint, tmp_path / "out", format="torch")
    assert_same(exported(tmp_path / "out"), state["model"])


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_not_exported(format: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    (data,) = checkpoint.glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpoint):
        pyckpt.export(checkpoint, tmp_path / "out", format=format)
    assert os.listdir(tmp_path / "out") == []


def test_a_dtype_is_one_of_torch(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"torch\.dtype, such as torch\.bfloat16, not 'bfloat16'"):
        pyckpt.export(tmp_path, tmp_path / "out", dtype="bfloat16")  # type: ignore[arg-type]


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pyckpt.export(tmp_path / "c", tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_an_export_replaces_files_and_nothing_else(name: str, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "c", {"model": model()})
    out = tmp_path / "out"
    out.mkdir()
    os.mkfifo(out / name)
    with pytest.raises(FileExistsError, match="no regular file") as caught:
        pyckpt.export(checkpoint, out)
    assert caught.value.filename == str(out / name)
    assert (out / name).is_fifo()
    (out / name).unlink()
    (out / name).mkdir()
    with pytest.raises(IsADirectoryError, match="no regular file"):
        pyckpt.export(checkpoint, out, max_shard_size="100KB")
    assert os.listdir(out) == [name]
    (out / name).rmdir()

    os.mkfifo(out / "config.json")
    with pytest.raises(FileExistsError, match="no regular file"):
        pyckpt.export(checkpoint, out, config={"layers": 1})
    assert os.listdir(out) == ["config.json"]
    pyckpt.export(checkpoint, out)  # which does not write it
    assert (out / "config.json").is_fifo()


def _sharded(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = model()
    placed = {
        "embed.weight": (Shard(0), Replicate()),
        "transposed": (Shard(1), Replicate()),
        "double": (Shard(0), Shard(2)),
        "counts": (Shard(0), Shard(0)),
        "half": (Replicate(), Replicate()),
    }
    state = {
        name: distribute_tensor(tensors[name], mesh, placements)
        for name, placements in placed.items()
    }
    save(directory, {"model": state})


@pytest.mark.parametrize("piece", [slow(1024), 16 << 20])
def test_sharded_along_all_dimensions(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    monkeypatch.setattr(tensors, "PIECE_BYTES", piece)
    run_ranks(4, _sharded, tmp_path / "c")
    pyckpt.export(tmp_path / "c", tmp_path / "out")
    found = exported(tmp_path / "out")
    assert_same(found, {name: tensor for name, tensor in model().items() if name in found})
    assert len(found) == 5


@pytest.mark.parametrize("shape", [(), (7,), (1, 100), (5, 3), (4, 3, 5), (2, 1, 50), (0, 3)])
@pytest.mark.parametrize("limit", [1, 4, 15, 1000])
def test_boxes_are_the_tensor_in_its_order(shape: tuple[int, ...], limit: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    boxes = []
    for offsets, sizes in _split(shape, limit):
        box = tensor
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            box = box.narrow(dim, start, length)
        assert box.numel() <= max(limit, 1)
        boxes.append(box.reshape(-1))
    assert torch.equal(torch.cat(boxes), tensor.reshape(-1))


def _memory(_pipe: Pipe, directory: Path, format: Any) -> int:
    pyckpt.export(directory / "small", directory / "warm", format=format)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pyckpt.export(directory / "large", directory / "out", format=format, dtype=torch.bfloat16)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize("format", [FORMATS[0], *map(slow, FORMATS[1:])])
def test_memory_is_bounded(format: Any, tmp_path: Path) -> None:
    save(tmp_path / "small", {"model": {"w": torch.ones(10)}})
    save(tmp_path / "large", {"model": {"w": torch.ones(100, 1 << 20)}})
    assert run_child(_memory, tmp_path, format) < 120 << 20  # of 400 MiB


def _limited(_pipe: Pipe, directory: Path, format: Any, limit: int) -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        pyckpt.export(directory / "checkpoint", directory / "out", format=format, max_shard_size=1)
    except OSError as error:
        return f"{error.errno}"
    return "exported"


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 3)])
def test_a_file_is_written_from_arrays_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    array = torch.arange(6.0)[: math.prod(shape)].reshape(shape).numpy()
    with new_file(tmp_path / "a") as file:
        assert file.write(array) == array.nbytes
    assert (tmp_path / "a").read_bytes() == array.tobytes()


def test_a_write_of_nothing_is_an_error() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    full = bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) + 1)
    try:
        with pytest.raises(OSError, match="nothing was written") as raised:  # noqa: PT012, SIM117
            with new_file(Path(f"/dev/fd/{writing}")) as file:
                os.set_blocking(file.fileno(), False)
                file.write(full)
        assert raised.value.errno == errno.EIO
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_takes_a_part_of_a_write_fails_the_export(format: Any, tmp_path: Path) -> None:
    """As a disk does that becomes full: the write is short, and the next one fails."""
    save(tmp_path / "checkpoint", {"model": {f"{'w' * 200}{i}": torch.ones(1) for i in range(30)}})
    pyckpt.export(tmp_path / "checkpoint", tmp_path / "whole", format=format, max_shard_size=1)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").iterdir()}
    index = next(name for name in sizes if name.endswith(".index.json"))
    # All other files are smaller.
    assert max(size for name, size in sizes.items() if name != index) < sizes[index] - 1
    assert run_child(_limited, tmp_path, format, sizes[index] - 1) == f"{errno.EFBIG}"
    assert not list((tmp_path / "out").iterdir())


def test_a_directory_whose_closing_fails_is_removed(tmp_path, monkeypatch):
    """Whatever `close` says, Linux has closed the descriptor."""
    close = os.close

    def fails(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def export() -> None:
        with temporary_directory(tmp_path) as temporary:
            (temporary / "weights").write_bytes(b"some")
            monkeypatch.setattr(os, "close", fails)
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        export()
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_an_interrupt_at_the_beginning_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint", {"model": {"w": torch.ones(3)}})
    flock = fcntl.flock
    interrupted = []

    def interrupts(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if ".pyckpt-export-" in path and not interrupted:
            interrupted.append(path)
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupts)
    with pytest.raises(KeyboardInterrupt):
        pyckpt.export(tmp_path / "checkpoint", tmp_path / "out")
    assert interrupted
    assert os.listdir(tmp_path / "out") == []
    pyckpt.export(tmp_path / "checkpoint", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]


def test_an_export_that_stands_still_is_named(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint", {"model": {"w": torch.ones(3)}})
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(swap, "_PATIENCE_SECONDS", 0.0)
    with turn(out), pytest.raises(TimeoutError, match="putting an export in place") as raised:
        pyckpt.export(tmp_path / "checkpoint", out)
    assert raised.value.filename == str(out)
    assert os.listdir(out) == []
    pyckpt.export(tmp_path / "checkpoint", out)
    assert os.listdir(out) == ["model.safetensors"]


@pytest.mark.root
@pytest.mark.parametrize("filesystem", ["tmpfs"], indirect=True)
@pytest.mark.parametrize("left", [0, 64 << 10, 8 << 20])
@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_named(format: Any, left: int, filesystem: Path, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint", {"model": {"w": torch.ones(TMPFS_BYTES // 4)}})
    out = filesystem / "out"
    out.mkdir()
    with (filesystem / "others").open("wb") as others:
        os.posix_fallocate(others.fileno(), 0, free_bytes(filesystem) - left)
    with pytest.raises(OSError, match="No space left") as raised:
        pyckpt.export(tmp_path / "checkpoint", out, format=format)
    assert raised.value.errno == errno.ENOSPC
    assert Path(raised.value.filename).is_relative_to(out)
    assert not list(out.iterdir())
