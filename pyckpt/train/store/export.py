"""A checkpoint's model in one piece, for everybody else: safetensors, or ``torch.save``'s format.

Nothing is held in memory as a whole. Tensors are read in pieces (pieces.py), converted and written
one after another; those that were saved in parts that are no runs of rows, by other writers, or
with other strides, are put together box by box.

The files are written in a directory of their own, beside those of an earlier export, and take their
places when all are complete and durable. While they do, there is no index: a program that is killed
leaves the old model, the new one, or files that do not load as a model.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import queue
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pyckpt import _C
from pyckpt.dcp.reader import DirectReader
from pyckpt.engine import Engine
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.paths import recorded_path
from pyckpt.layouts import Layout
from pyckpt.train.store.archive import torch_layout
from pyckpt.train.store.catalog import reading
from pyckpt.train.store.pieces import PIECE_BYTES, Stored, read_pieces, stored, verify

__all__ = ["export"]

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SAFETENSORS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


Rename = Layout | Callable[[str], str | None] | Mapping[str, str]


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor of the checkpoint, under the name that it is exported as."""

    name: str
    key: str
    meta: TensorStorageMetadata
    dtype: torch.dtype
    """To write."""
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    """What its values go through as a whole, if anything."""

    @property
    def nbytes(self) -> int:
        return self.meta.size.numel() * self.dtype.itemsize


def export(
    checkpoint: Path,
    path: str | os.PathLike[str],
    *,
    format: Literal["safetensors", "torch"] = "safetensors",
    key: str | None = "model",
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tied: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    engine: Engine | None = None,
) -> list[Path]:
    """Write the tensors of one entry of a checkpoint as files that other programs read.

    See ``Checkpointer.export``, which this is, for a checkpoint given by its directory.
    """
    if format not in ("safetensors", "torch"):
        raise ValueError(f"{format = } must be 'safetensors' or 'torch'.")
    limit = _bytes(max_shard_size)
    content_of_config = None if config is None else _config(config)
    target = Path(path)
    stem, suffix = ("model", "safetensors") if format == "safetensors" else _TORCH_NAMES
    with reading(checkpoint):
        source = _Source(checkpoint, engine)
        tensors = source.tensors(key, dtype, rename)
        aliases = source.ties(tensors, tied or {})
        shards = _shards([t for t in tensors if t.name not in aliases], limit)
        commit.make_directory(target, sync=True)
        names = [
            f"{stem}.{suffix}"
            if len(shards) == 1
            else f"{stem}-{i:05d}-of-{len(shards):05d}.{suffix}"
            for i in range(1, len(shards) + 1)
        ]
        where = {tensor.name: i for i, shard in enumerate(shards) for tensor in shard}
        with _temporary_directory(target) as temporary:
            for i, shard in enumerate(shards):
                here = {a: b for a, b in aliases.items() if where[b] == i}
                layout = _safetensors_layout if format == "safetensors" else _torch_layout
                with _new_file(temporary / names[i]) as file:
                    finish, order = layout(file, shard, here)
                    finish(_copy(file, dict(order), source.read([tensor for tensor, _ in order])))
            if len(shards) > 1:
                weights = {name: names[i] for name, i in where.items()}
                if format == "torch":
                    weights |= {a: names[where[b]] for a, b in aliases.items()}
                content = {
                    "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
                    "weight_map": dict(sorted(weights.items())),
                }
                names.append(f"{stem}.{suffix}.index.json")
                with _new_file(temporary / names[-1]) as file:
                    file.write(json.dumps(content, indent=2).encode() + b"\n")
            if content_of_config is not None:
                names.insert(len(names) - 1, _CONFIG)
                with _new_file(temporary / _CONFIG) as file:
                    file.write(content_of_config)
            _put_in_place(temporary, target, names, (stem, suffix))
    return [target / name for name in names]


_TORCH_NAMES = ("pytorch_model", "bin")
_CONFIG = "config.json"


def _config(config: Any) -> bytes:
    """The content of ``config.json``, whatever it is given as."""
    if isinstance(config, str | os.PathLike):
        return Path(config).read_bytes()
    if callable(to_dict := getattr(config, "to_dict", None)):  # as transformers' configurations
        config = to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a mapping, an object with to_dict(), or the path of a file, not "
            f"{type(config).__name__}"
        )
    return json.dumps(dict(config), indent=2, sort_keys=True).encode() + b"\n"


def _renaming(rename: Rename | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Layout):
        return rename.name
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    return rename


def _bytes(size: int | str) -> int:
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?B)\s*", size.upper())
        if match is None:
            raise ValueError(f"max_shard_size={size!r} must be bytes, or like '5GB' or '512MiB'.")
        size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(f"max_shard_size={size!r} must be positive.")
    return size


def _shards(tensors: Sequence[_Tensor], limit: int) -> list[list[_Tensor]]:
    """Tensors in their order, in groups of at most ``limit`` bytes; larger ones are alone."""
    shards: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


# --- what is read ---------------------------------------------------------------------------------


class _Source:
    """The tensors of a checkpoint, each read as a stream of its elements in row-major order."""

    def __init__(self, checkpoint: Path, engine: Engine | None) -> None:
        self.checkpoint = checkpoint
        self.engine = engine
        self.metadata: Metadata = metadata_format.read(checkpoint / commit.metadata_name())

    def tensors(
        self, key: str | None, dtype: torch.dtype | None, rename: Rename | None = None
    ) -> list[_Tensor]:
        """The tensors under a top-level key, or all of them, in the order of their new names."""
        new_name = _renaming(rename)
        found: dict[str, _Tensor] = {}
        tops = set()
        seen = False
        for fqn, meta in self.metadata.state_dict_metadata.items():
            parts = [str(part) for part in recorded_path(self.metadata, fqn) or fqn.split(".")]
            tops.add(parts[0])
            if key not in (None, parts[0]) or not isinstance(meta, TensorStorageMetadata):
                continue
            seen = True
            old = ".".join(parts if key is None else parts[1:] or parts)
            name = new_name(old)
            if name is None:
                continue
            if name in found:
                raise ValueError(f"rename makes {name!r} of {found[name].key!r} and of {fqn!r}")
            saved = meta.properties.dtype
            to = dtype if dtype is not None and saved.is_floating_point else saved
            convert = None
            if isinstance(rename, Layout) and rename.converts(old):
                convert = partial(rename.convert, old)
            found[name] = _Tensor(name, fqn, meta, to, convert)
        if not seen:
            where = "" if key is None else f" under {key!r}; its keys are {sorted(tops)}"
            hint = "; key=None exports all tensors" if key is not None else ""
            raise ValueError(f"{self.checkpoint} holds no tensors{where}{hint}")
        if not found:
            raise ValueError("rename leaves out every tensor")
        return [found[name] for name in sorted(found)]

    def ties(self, tensors: Sequence[_Tensor], tied: Mapping[str, str]) -> dict[str, str]:
        """Check that names that are to be left out have the values of those that stay."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, other in tied.items():
            if name not in known or other not in known or other in tied:
                raise ValueError(f"tied={{{name!r}: {other!r}}} must name two tensors of the model")
            if self._values(known[name]) != self._values(known[other]):
                raise ValueError(f"{name} and {other} are not tied: their values differ")
        return dict(tied)

    def _values(self, tensor: _Tensor) -> Any:
        """What is equal for tensors of equal values."""
        chunks = []
        for chunk, payload in self._chunks(tensor):
            if payload is None:
                raise ValueError(f"{tensor.name}: only checkpoints of pyckpt know what is tied")
            chunks.append((tuple(chunk.offsets), tuple(chunk.sizes), payload.length, payload.crc32))
        return tensor.meta.properties.dtype, sorted(chunks)

    def _chunks(self, tensor: _Tensor) -> list[tuple[ChunkStorageMetadata, Stored | None]]:
        assert self.metadata.storage_data is not None
        found = []
        for i, chunk in enumerate(tensor.meta.chunks):
            info = self.metadata.storage_data[MetadataIndex(tensor.key, chunk.offsets, i)]
            payload = None
            # Without an envelope the item is no raw tensor; with strides, not in our order.
            if info.__dict__.get("payload_offset") and "payload_stride" not in info.__dict__:
                payload = stored(tensor.key, self.checkpoint, info)
            found.append((chunk, payload))
        return found

    def read(self, tensors: Sequence[_Tensor]) -> Iterator[tuple[_Tensor, torch.Tensor]]:
        """The elements of tensors, each in row-major order, in pieces: one-dimensional tensors of
        the dtype that was saved."""
        runs: list[Stored] = []
        whose: dict[str, _Tensor] = {}

        def pieces() -> Iterator[tuple[_Tensor, torch.Tensor]]:
            for payload, piece in read_pieces(runs, engine=self.engine):
                tensor = whose[payload.key]
                yield tensor, piece.view(tensor.meta.properties.dtype)

        for tensor in tensors:
            if tensor.convert is not None:
                yield from pieces()
                runs = []
                yield tensor, self._converted(tensor, tensor.convert)
                continue
            parts = self._runs(tensor)
            if parts is not None:
                runs += parts
                whose[tensor.key] = tensor
                continue
            yield from pieces()
            runs = []
            for box in self._boxes(tensor):
                yield tensor, box
        yield from pieces()

    def _converted(
        self, tensor: _Tensor, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """A tensor that is converted as a whole, and so is in memory as a whole."""
        plain = replace(tensor, convert=None)
        whole = torch.cat([piece for _, piece in self.read([plain])])
        shape = tensor.meta.size
        made = convert(whole.view(shape))
        if made.shape != shape or made.dtype != whole.dtype:
            raise ValueError(
                f"{tensor.name}: converting it made {made.dtype} of shape {tuple(made.shape)} of "
                f"{whole.dtype} of shape {tuple(shape)}; both must stay"
            )
        return made.contiguous().view(-1)

    def _runs(self, tensor: _Tensor) -> list[Stored] | None:
        """The payloads that, end to end, are the tensor; None where they are not."""
        size = tensor.meta.size
        runs = []
        row = 0
        for chunk, payload in sorted(self._chunks(tensor), key=lambda one: tuple(one[0].offsets)):
            if payload is None or chunk.sizes[1:] != size[1:]:
                return None
            if size:
                if chunk.offsets[0] != row:
                    return None
                row += chunk.sizes[0]
            length = chunk.sizes.numel() * tensor.meta.properties.dtype.itemsize
            if payload.length != length:
                raise CorruptCheckpoint(
                    f"{tensor.key}: its length and its shape do not agree", key=tensor.key
                )
            runs.append(payload)
        complete = len(runs) == 1 if not size else row == size[0]
        return runs if complete else None

    def _boxes(self, tensor: _Tensor) -> Iterator[torch.Tensor]:
        dtype = tensor.meta.properties.dtype
        limit = max(1, PIECE_BYTES // dtype.itemsize)
        if tensor.meta.size.numel() > limit:
            # What is read in part has no checksum of its own.
            verify(self.checkpoint, self.metadata, keys={tensor.key}, engine=self.engine)
        reader = DirectReader(self.checkpoint, engine=self.engine)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        for offsets, sizes in _split(tensor.meta.size, limit):
            box = torch.empty(sizes, dtype=dtype)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            items = create_read_items_for_chunk_list(tensor.key, tensor.meta, [chunk])
            if sum(item.lengths.numel() for item in items) != box.numel():
                raise CorruptCheckpoint(f"{tensor.key}: parts of it were not saved", key=tensor.key)
            reader.read_data(LoadPlan(items), _Into(box)).wait()  # type: ignore[arg-type]
            yield box.view(-1)


class _Into:
    """What a reader needs of a planner, to read into one tensor."""

    def __init__(self, box: torch.Tensor) -> None:
        self._box = box

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        part = self._box
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def _split(shape: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes of at most ``limit`` elements that, one after another, are a
    tensor in row-major order."""
    count = 1
    for extent in shape:
        count *= extent
    if count <= limit:
        yield (0,) * len(shape), tuple(shape)
        return
    row = count // shape[0]
    if row <= limit:
        step = limit // row
        for start in range(0, shape[0], step):
            extent = min(step, shape[0] - start)
            yield (start, *(0,) * (len(shape) - 1)), (extent, *shape[1:])
        return
    for start in range(shape[0]):
        for offsets, sizes in _split(shape[1:], limit):
            yield (start, *offsets), (1, *sizes)


# --- what is written ------------------------------------------------------------------------------

_Finish = Callable[[Mapping[str, int]], None]


def _safetensors_layout(
    file: Any, tensors: Sequence[_Tensor], aliases: Mapping[str, str]
) -> tuple[_Finish, list[tuple[_Tensor, int]]]:
    """Write the header; say where each tensor goes. https://github.com/huggingface/safetensors"""
    # As safetensors' save_model does: who ties them again finds here what was left out.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    # Wide elements first keeps all of them aligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    places = []
    at = 0
    for tensor in ordered:
        name = _SAFETENSORS.get(tensor.dtype)
        if name is None:
            raise ValueError(f"{tensor.name}: safetensors has no {tensor.dtype}")
        header[tensor.name] = {
            "dtype": name,
            "shape": list(tensor.meta.size),
            "data_offsets": [at, at + tensor.nbytes],
        }
        places.append(at)
        at += tensor.nbytes
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    file.write(len(data).to_bytes(8, "little") + data)
    start = 8 + len(data)
    os.truncate(file.fileno(), start + at)
    return lambda _: None, [(t, start + place) for t, place in zip(ordered, places, strict=True)]


def _torch_layout(
    file: Any, tensors: Sequence[_Tensor], aliases: Mapping[str, str]
) -> tuple[_Finish, list[tuple[_Tensor, int]]]:
    shapes = {tensor.name: (tensor.meta.size, tensor.dtype) for tensor in tensors}
    layout = torch_layout(file, shapes, aliases)
    return layout.finish, [(tensor, layout.offsets[tensor.name]) for tensor in tensors]


def _copy(
    file: Any, places: Mapping[_Tensor, int], pieces: Iterator[tuple[_Tensor, torch.Tensor]]
) -> dict[str, int]:
    """Write each tensor at its offset of a file; return the CRC-32 of its bytes, by its name."""
    ends = dict(places)
    checksums = dict.fromkeys((tensor.name for tensor in places), 0)
    room = torch.empty(0, dtype=torch.uint8)  # kept, since malloc keeps what it is given back
    for tensor, piece in _ahead(pieces):
        written = piece
        if piece.dtype != tensor.dtype:
            needed = piece.numel() * tensor.dtype.itemsize
            if room.numel() < needed:
                room = torch.empty(needed, dtype=torch.uint8)
            written = room[:needed].view(tensor.dtype).copy_(piece)
        # The tensor's memory; numpy, which torch would go through, need not be there.
        array = (ctypes.c_ubyte * written.nbytes).from_address(written.data_ptr())
        data = memoryview(array).cast("B")
        checksums[tensor.name] = _C.crc32(data, checksums[tensor.name])
        while data:
            count = os.pwrite(file.fileno(), data, ends[tensor])
            data = data[count:]
            ends[tensor] += count
    for tensor, place in places.items():
        assert ends[tensor] == place + tensor.nbytes, tensor.name
    return checksums


_Item = TypeVar("_Item")


def _ahead(pieces: Iterator[_Item]) -> Iterator[_Item]:
    """The same, with the next piece being read while one is used."""
    ready: queue.Queue[_Item | BaseException | None] = queue.Queue(maxsize=1)
    unwanted = threading.Event()

    def read() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                ready.put(piece)
                if unwanted.is_set():
                    return
        except BaseException as error:
            last = error
        ready.put(last)

    thread = threading.Thread(target=read, name="pyckpt-export", daemon=True)
    thread.start()
    try:
        while True:
            piece = ready.get()
            if piece is None:
                return
            if isinstance(piece, BaseException):
                raise piece
            yield piece
    finally:
        unwanted.set()
        while thread.is_alive():
            try:
                ready.get(timeout=0.01)
            except queue.Empty:
                thread.join(0.01)


@contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    """A file that is durable at the end."""
    with path.open("w+b", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


_TEMPORARY = re.compile(r"\.pyckpt-export-[0-9a-f]{32}")


@contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    """A directory in ``target`` for the files of one export, gone at the end. Those of exports that
    were killed go, too: whoever uses one holds its lock."""
    with _one_at_a_time(target):
        for name in os.listdir(target):
            if _TEMPORARY.fullmatch(name):
                _remove_unused(target / name)
        path = target / f".pyckpt-export-{uuid.uuid4().hex}"
        path.mkdir()
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # without locks others leave it alone
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # the next export tries again
        os.close(descriptor)


def _remove_unused(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
        finally:
            os.close(descriptor)


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Exports into one directory take turns in here, where the file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has it, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _is_same_config(temporary: Path, target: Path, names: Sequence[str]) -> bool:
    """Whether all that an export puts beside a single file is the ``config.json`` that is there."""
    if list(names[:-1]) != [_CONFIG]:
        return False
    try:
        return (target / _CONFIG).read_bytes() == (temporary / _CONFIG).read_bytes()
    except FileNotFoundError:
        return False


def _put_in_place(
    temporary: Path, target: Path, names: Sequence[str], kind: tuple[str, str]
) -> None:
    """Replace an earlier export by the files in ``temporary``, of which the last makes them count:
    the only file, or the index, which is what loaders look for."""
    stem, suffix = kind
    single = f"{stem}.{suffix}"
    ours = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{suffix}(\.index\.json)?")
    index = target / f"{single}.index.json"
    with _one_at_a_time(target):
        if len(names) > 1 and not _is_same_config(temporary, target, names):
            # Shards may have the names of other shards: none must load by the old index. Nor must
            # old weights with a new configuration.
            index.unlink(missing_ok=True)
            (target / single).unlink(missing_ok=True)
            commit.sync_directory(target)
        for name in names[:-1]:
            (temporary / name).replace(target / name)
        commit.sync_directory(target)
        (temporary / names[-1]).replace(target / names[-1])
        commit.sync_directory(target)
        # What an index names goes after it.
        old = [name for name in os.listdir(target) if ours.fullmatch(name) and name not in names]
        for name in sorted(old, key=lambda name: name != index.name):
            (target / name).unlink()
            if name == index.name:
                commit.sync_directory(target)
