"""The tensors of a checkpoint, each as a stream of its elements in row-major order.

Only tensors that a layout converts are held in memory as a whole. Tensors are read in pieces
(pieces.py), one after another. Tensors that another writer saved, or that were saved with other
strides, or in parts that are not runs of rows, are put together box by box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from pyckpt.dcp.reader import DirectReader
from pyckpt.engine import Engine
from pyckpt.errors import CorruptCheckpoint
from pyckpt.format import commit
from pyckpt.format import metadata as metadata_format
from pyckpt.format.columns import elements_of
from pyckpt.format.paths import recorded_path
from pyckpt.layouts import Layout
from pyckpt.private import create_read_items_for_chunk_list
from pyckpt.train.store.pieces import PIECE_BYTES, Direct, Stored, read_pieces, stored, verify

__all__ = ["ModelTensor", "NoTensors", "RenameTensors", "TensorSource"]

RenameTensors = Layout | Callable[[str], str | None] | Mapping[str, str]
"""New names of tensors: a layout; a function, which returns None for a tensor to leave out; or a
mapping of the names that change."""


@dataclass(frozen=True, eq=False)
class ModelTensor:
    """A tensor of the checkpoint, and its name in the export."""

    name: str
    key: str
    meta: TensorStorageMetadata
    dtype: torch.dtype
    """The dtype to write."""
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Converts the values of the whole tensor, if not None."""

    @property
    def nbytes(self) -> int:
        return self.meta.size.numel() * self.dtype.itemsize


class NoTensors(ValueError):
    """There are no tensors under a key. The message ends with how a program exports all of them.

    Args:
        what: the message without that end, for callers whose users pass no arguments of Python.
        hint: that end.
    """

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}; {hint}" if hint else what)
        self.what = what
        self.hint = hint


class TensorSource:
    """The tensors of a checkpoint, each read as a stream of its elements in row-major order."""

    def __init__(
        self,
        checkpoint: Path | str,
        direct: Direct,
        engine: Engine | None,
        metadata: Metadata | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.direct: Direct = direct
        self.engine = engine
        if metadata is None:
            metadata = metadata_format.read(Path(checkpoint) / commit.metadata_name())
        self.metadata = metadata

    def tensors(
        self, key: str | None, dtype: torch.dtype | None, rename: RenameTensors | None = None
    ) -> list[ModelTensor]:
        """The tensors under a top-level key, or all of them, in the order of their new names."""
        new_name = _renaming(rename)
        found: dict[str, ModelTensor] = {}
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
            found[name] = ModelTensor(name, fqn, meta, to, convert)
        if not seen:
            where = "" if key is None else f" under {key!r}; its keys are {sorted(tops)}"
            hint = "" if key is None else "key=None exports all tensors"
            raise NoTensors(f"{self.checkpoint} holds no tensors{where}", hint)
        if not found:
            raise ValueError("rename leaves out every tensor")
        return [found[name] for name in sorted(found)]

    def ties(self, tensors: Sequence[ModelTensor], tied: Mapping[str, str]) -> dict[str, str]:
        """Check that names that are to be left out have the values of those that stay."""
        known = {tensor.name: tensor for tensor in tensors}
        for name, other in tied.items():
            if name not in known or other not in known or other in tied:
                raise ValueError(f"tied={{{name!r}: {other!r}}} must name two tensors of the model")
            if self._values(known[name]) != self._values(known[other]):
                raise ValueError(f"{name} and {other} are not tied: their values differ")
        return dict(tied)

    def _values(self, tensor: ModelTensor) -> Any:
        """A value that is equal for tensors of equal values."""
        chunks = []
        for chunk, payload in self._chunks(tensor):
            if payload is None:
                raise ValueError(f"{tensor.name}: only checkpoints of pyckpt know what is tied")
            chunks.append((tuple(chunk.offsets), tuple(chunk.sizes), payload.length, payload.crc32))
        return tensor.meta.properties.dtype, sorted(chunks)

    def _chunks(self, tensor: ModelTensor) -> list[tuple[ChunkStorageMetadata, Stored | None]]:
        assert self.metadata.storage_data is not None
        found = []
        for i, chunk in enumerate(tensor.meta.chunks):
            info = self.metadata.storage_data[MetadataIndex(tensor.key, chunk.offsets, i)]
            payload = None
            # Without an envelope the item is no raw tensor; with strides, it is not row-major.
            if info.__dict__.get("payload_offset") and "payload_stride" not in info.__dict__:
                payload = stored(tensor.key, self.checkpoint, info)
            found.append((chunk, payload))
        return found

    def read(self, tensors: Sequence[ModelTensor]) -> Iterator[tuple[ModelTensor, torch.Tensor]]:
        """The elements of tensors, each in row-major order, in pieces: one-dimensional tensors of
        the dtype that was saved. Of a tensor of which one rank saved a part for itself, the
        elements of that part, chunk by chunk."""
        runs: list[Stored] = []
        whose: dict[str, ModelTensor] = {}

        def pieces() -> Iterator[tuple[ModelTensor, torch.Tensor]]:
            for payload, piece in read_pieces(runs, direct=self.direct, engine=self.engine):
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
        self, tensor: ModelTensor, convert: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Read a whole tensor into memory, and convert it."""
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

    def _runs(self, tensor: ModelTensor) -> list[Stored] | None:
        """The payloads that, end to end, make the tensor; None if they do not."""
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

    def _boxes(self, tensor: ModelTensor) -> Iterator[torch.Tensor]:
        dtype = tensor.meta.properties.dtype
        limit = max(1, PIECE_BYTES // dtype.itemsize)
        if tensor.meta.size.numel() > limit:
            # A part of an item has no checksum of its own.
            verify(
                self.checkpoint,
                self.metadata,
                keys={tensor.key},
                direct=self.direct,
                engine=self.engine,
            )
        reader = DirectReader(self.checkpoint, direct=self.direct, engine=self.engine)
        reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        for offsets, sizes in self._split(tensor.meta, limit):
            box = torch.empty(sizes, dtype=dtype, device="cpu")
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            items = create_read_items_for_chunk_list(tensor.key, tensor.meta, [chunk])
            if sum(item.lengths.numel() for item in items) != box.numel():
                raise CorruptCheckpoint(f"{tensor.key}: parts of it were not saved", key=tensor.key)
            reader.read_data(LoadPlan(items), _Into(box)).wait()  # type: ignore[arg-type]
            yield box.view(-1)

    def _split(
        self, meta: TensorStorageMetadata, limit: int
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        if elements_of(meta) == meta.size.numel():
            yield from _split(meta.size, limit)
            return
        for chunk in meta.chunks:
            for offsets, sizes in _split(chunk.sizes, limit) if chunk.sizes.numel() else ():
                yield [a + b for a, b in zip(chunk.offsets, offsets, strict=True)], sizes


class _Into:
    """The methods of a planner that a reader needs to read into one tensor."""

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
    """Offsets and sizes of boxes of at most ``limit`` elements that, one after another, make a
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


def _renaming(rename: RenameTensors | None) -> Callable[[str], str | None]:
    if rename is None:
        return lambda name: name
    if isinstance(rename, Layout):
        return rename.name
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    return rename
