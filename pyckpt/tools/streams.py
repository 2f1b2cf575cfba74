"""Tensors of one checkpoint, or of several side by side, read in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pyckpt.engine import Engine
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.format.columns import elements_of
from pyckpt.tools.contents import Contents
from pyckpt.tools.values import Value, value
from pyckpt.train.store.pieces import Direct
from pyckpt.train.store.tensors import ModelTensor, TensorSource
from pyckpt.train.store.transient import is_shortage

__all__ = ["ELSEWHERE", "OPAQUE", "Event", "Streams", "why_opaque"]

Event = None | tuple[torch.Tensor, ...] | Exception
"""None: a tensor begins, or begins again. A tuple: its next elements, of each of the checkpoints,
equally many. An exception: it could not be read, and what came of it does not count."""

# What is planned at a time. An error plans the rest of it anew.
_GROUP = 512


_TRANSFORMED = "transformed by an extension of DCP"
_NOT_PLAIN = "no plain tensor"
OPAQUE = frozenset({_TRANSFORMED, _NOT_PLAIN})
"""The reasons that `why_opaque` gives."""
ELSEWHERE = "it is on another node, or a part of it is"
"""Why a value is not read in the directory of one node, which has no file of the others."""
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def why_opaque(saved: Value) -> str:
    """Why the elements of a saved value cannot be read in pieces; empty where they can."""
    if any(part.transformed for part in saved.parts):
        return _TRANSFORMED
    if saved.dtype is None or saved.dtype in _QUANTIZED:
        return _NOT_PLAIN
    return _NOT_PLAIN if any(part.payload_offset == 0 for part in saved.parts) else ""


class Streams:
    """Reads the same keys of checkpoints, in which they have the same shapes, and of which all is
    there unless there is one checkpoint alone.

    Args:
        checkpoints: them.
        direct, engine: as for `DirectReader`.
    """

    def __init__(
        self,
        checkpoints: Sequence[Contents],
        *,
        direct: Direct = "auto",
        engine: Engine | None = None,
    ) -> None:
        self._contents = list(checkpoints)
        self._sources = [
            TensorSource(one.path, direct, engine, one.metadata) for one in checkpoints
        ]

    def in_order(self, keys: Sequence[str]) -> list[str]:
        """Keys in the order in which the first of the checkpoints has them in its files."""
        metadata = self._contents[0].metadata

        def place(key: str) -> tuple[str, int]:
            parts = value(metadata, key).parts
            return (parts[0].file, parts[0].offset) if parts else ("", 0)

        return sorted(keys, key=place)

    def read(self, keys: Sequence[str]) -> Iterator[tuple[str, Event]]:
        """The elements of tensors, one tensor after another, each in row-major order.

        Raises:
            OSError: this process has no memory or descriptors left.
        """
        for start in range(0, len(keys), _GROUP):
            group = list(keys[start : start + _GROUP])
            streams = self._open(group)
            for number, key in enumerate(group):
                yield key, None
                try:
                    yield from self._elements(key, streams)
                    continue
                except Exception as error:
                    _refuse_shortage(error)
                # Alone: another tensor of the batch that it was read with may be the damaged one.
                yield key, None
                try:
                    yield from self._elements(key, self._open([key]))
                except Exception as error:
                    _refuse_shortage(error)
                    yield key, error
                streams = self._open(group[number + 1 :])

    def _open(self, keys: Sequence[str]) -> list[_Stream]:
        return [_Stream(source, [_tensor(source, key) for key in keys]) for source in self._sources]

    def _elements(
        self, key: str, streams: Sequence[_Stream]
    ) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
        count = elements_of(_tensor(self._sources[0], key).meta)
        while count:
            size = min(stream.ready(key) for stream in streams)
            yield key, tuple(stream.take(size) for stream in streams)
            count -= size


def _refuse_shortage(error: Exception) -> None:
    """Raise what is no damage of a tensor."""
    if isinstance(error, OSError):
        if is_shortage(error):
            raise error
    # Damaged bytes of a tensor that is read as an object can fail in any way.
    elif not isinstance(error, (PyckptError, ValueError, TypeError, RuntimeError)):
        raise error


def _tensor(source: TensorSource, key: str) -> ModelTensor:
    saved = source.metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)
    return ModelTensor(key, key, saved, saved.properties.dtype)


class _Stream:
    """The elements of tensors of one checkpoint, of which any number may be taken at a time."""

    def __init__(self, source: TensorSource, tensors: list[ModelTensor]) -> None:
        self._pieces = source.read(tensors)
        self._piece = torch.empty(0, device="cpu")

    def ready(self, key: str) -> int:
        """How many elements of a tensor can be taken; at least one."""
        while not self._piece.numel():
            tensor, self._piece = next(self._pieces)
            if self._piece.numel() and tensor.key != key:
                raise CorruptCheckpoint(f"{key}: parts of it were not saved", key=key)
        return self._piece.numel()

    def take(self, count: int) -> torch.Tensor:
        taken, self._piece = self._piece[:count], self._piece[count:]
        return taken
