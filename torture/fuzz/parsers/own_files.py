"""The parsers of what pyckpt has written."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import pyckpt
from pyckpt.dcp import objects
from pyckpt.errors import PyckptError
from pyckpt.format import metadata as metadata_format
from pyckpt.format import plain
from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator
from pyckpt.tools.values import values
from pyckpt.tools.verifying import verify
from pyckpt.train.store.catalog import NOTE_KEY, Catalog, note_of
from pyckpt.train.store.fence import FOLDER, Fence
from torture.fuzz import mutate
from torture.fuzz.parsers.base import Parser, require
from torture.fuzz.parsers.states import empty, same, state

__all__ = ["Checkpoint", "CheckpointNote", "FenceFiles", "Metadata", "Object", "StockCheckpoint"]

DATA, METADATA, SEALED = range(3)


class Checkpoint(Parser):
    """A checkpoint that was saved by pyckpt, or by stock: load, verify, catalogue.

    The input's first byte: the data file is another one; or the metadata is, as it is or under a
    checksum that fits.
    """

    by_stock = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.root = folder / "root"
        self.source = self.root / "step-00000001"
        self.saved = self.make()
        self.data = next(self.source.glob("*.distcp"))
        self.name = self.source / ".metadata"
        self.contents = self.data.read_bytes(), self.name.read_bytes()
        metadata = metadata_format.read(self.name)
        self.items = [
            range(info.offset, info.offset + info.length)
            for info in (metadata.storage_data or {}).values()
        ]

    def make(self) -> dict[str, Any]:
        saved = state()
        if self.by_stock:
            self.source.mkdir(parents=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(saved, checkpoint_id=self.source, no_dist=True)  # type: ignore[attr-defined]
        else:
            with pyckpt.Checkpointer(self.root) as checkpointer:
                checkpointer.save(1, saved, metrics={"loss": 0.5})
        return saved

    def seeds(self) -> list[bytes]:
        data, metadata = self.contents
        kinds = [(DATA, data), (METADATA, metadata)]
        if not self.by_stock:
            kinds.append((SEALED, metadata[: metadata_format._check_trailer(metadata, "")]))
        return [bytes([kind]) + content for kind, content in kinds]

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        kind = data[0] % 3 if data else DATA
        fitting = () if kind == DATA else (mutate.pickled,)
        same_kind = [other[1:] for other in others if other[:1] == data[:1]]
        return bytes([kind]) + mutate.mutate(random, data[1:], fitting, same_kind)

    def attempt(self, data: bytes) -> None:
        kind = data[0] % 3 if data else DATA
        content, (sound, metadata) = data[1:], self.contents
        if kind == DATA:
            sound, metadata = content, metadata
        else:
            metadata = content if kind == METADATA else metadata_format.seal(content)
        self.data.write_bytes(sound)
        self.name.write_bytes(metadata)
        (entry,) = (one for one in Catalog(self.root).entries() if one.step == 1)
        str(entry)
        # Whoever seals metadata may say anything in it; stock's has no checksum.
        may_differ = kind == SEALED or (kind == METADATA and self.by_stock)
        damaged = kind == DATA and self._is_damaged(sound)
        failed = self._load(may_differ)
        # Stock's archives have checksums of the records. Nothing covers the padding, and most of
        # the headers before the records and in the directory: names, dates, versions, attributes.
        # Torch reads what it needs of them, and then loads the right values. So of these archives
        # the demand is that what is called sound can be loaded.
        self._verify(failed if self.by_stock else damaged)

    def _is_damaged(self, found: bytes) -> bool:
        sound = self.contents[0]
        return any(
            found[item.start : item.stop] != sound[item.start : item.stop] for item in self.items
        )

    def _verify(self, damaged: bool) -> None:
        try:
            found = verify(self.source)
        except self.documented:
            return
        require(not damaged or not found.good or bool(found.unchecked), "verify finds no damage")

    def _load(self, may_differ: bool) -> bool:
        """Whether it cannot be loaded."""
        failed = False
        for into in (empty(self.saved), None):
            try:
                if into is None:
                    loaded = pyckpt.load(str(self.source))
                    unverified: list[str] = []
                else:
                    report = pyckpt.load(into, self.source)
                    loaded, unverified = into, report.not_verified
                    str(report)
            except self.documented:
                failed = True
                continue
            saved = self.saved
            if into is None and self.by_stock:
                # Objects of stock's are not verified. A report tells of them, and here is none.
                saved = {k: value for k, value in saved.items() if isinstance(value, torch.Tensor)}
            loaded = {key: loaded[key] for key in saved if key in loaded}
            right = may_differ or bool(unverified) or same(saved, loaded)
            require(right, "other values were loaded without a word")
        return failed


class StockCheckpoint(Checkpoint):
    by_stock = True


class Metadata(Parser):
    """`.metadata` itself. What the native decoder takes, the unpickler takes, and as the same."""

    mutators = (mutate.pickled,)

    def seeds(self) -> list[bytes]:
        made = []
        for number, kind in enumerate((Checkpoint, StockCheckpoint)):
            folder = self.folder / str(number)
            folder.mkdir(exist_ok=True)
            content = kind(folder).contents[1]
            made.append(content[: metadata_format._check_trailer(content, "")])
            shutil.rmtree(folder)
        return made

    def attempt(self, data: bytes) -> None:
        native = metadata_format._decode_native(memoryview(data))
        try:
            found = metadata_format.decode(data, path="m")  # without a trailer: by the unpickler
        except PyckptError as error:
            # It stops at its STOP, and looks no further only where a trailer follows.
            require(native is None, f"the native decoder takes what is refused: {error}")
            return
        for one in (found, native):
            if one is not None:
                metadata_format.data_files(one)
                list(values(one))
                metadata_format.encode(one)
        if native is None:
            return
        require(native.state_dict_metadata == found.state_dict_metadata, "other keys")
        require((native.storage_data or {}) == (found.storage_data or {}), "other places")
        require(native.planner_data == found.planner_data, "other paths")


class Object(Parser):
    """An item: an archive of ``torch.save``."""

    mutators = (mutate.archived(),)

    def seeds(self) -> list[bytes]:
        made = [plain.encode(one) for one in (3, "é" * 9, [1, {"a": (2.5, None)}])]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is in beta state
            rows = torch.eye(3).to_sparse_csr()
        for value in (
            state(),
            {1, 2},
            torch.ones(2, 2).to_sparse(),
            rows,
            torch.nn.Parameter(torch.ones(2)),
            bytearray(b"abc"),
            torch.Size((2, 3)),
            torch.arange(3.0),
        ):
            file = io.BytesIO()
            torch.save(value, file)
            made.append(file.getvalue())
        return made

    def attempt(self, data: bytes) -> None:
        Locator().locate(data[:HEAD_BYTES], data[-TAIL_BYTES:], len(data))
        with suppress(plain.NotPlain):
            plain.decode(data)
        found = objects.load(io.BytesIO(data), "key", device=torch.device("cpu"))
        with suppress(ValueError):  # torch cannot show a torch.Size of more than 64 bits
            repr(found)


class CheckpointNote(Parser):
    """What a checkpoint says of itself: JSON, in an item."""

    mutators = (mutate.jsons,)

    def seeds(self) -> list[bytes]:
        return [b'{"step": 3, "final": true, "metrics": {"loss": 0.5, "n": 3}}', b'"x"']

    def attempt(self, data: bytes) -> None:
        item = plain.encode(data.decode("utf-8", "surrogateescape"))
        info = metadata_format.StorageInfo("f", 0, len(item))
        where: Any = {MetadataIndex(NOTE_KEY): info}
        found = note_of(self.folder, dcp.metadata.Metadata({}, None, where), lambda *_: item)
        if found is not None:
            require(type(found.final) is bool, "final is no bool")
            require(all(type(one) is float for one in found.metrics.values()), "no metrics")


class FenceFiles(Parser):
    """What other jobs left in a root: the first byte says in which file."""

    mutators = (mutate.jsons,)

    def seeds(self) -> list[bytes]:
        content = json.dumps({"token": "a" * 32, "host": "h", "pid": 12, "namespace": "n"}).encode()
        return [b"\0" + content, b"\1" + b"generation-00000009", b"\2step-00000007"]

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        fitting = self.mutators if data[:1] == b"\0" else ()
        return data[:1] + mutate.mutate(random, data[1:], fitting, [one[1:] for one in others])

    def attempt(self, data: bytes) -> None:
        root = self.folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        (root / FOLDER).mkdir(parents=True)
        kind, content = data[:1], data[1:]
        (root / FOLDER / "generation-00000007").write_bytes(content if kind == b"\0" else b"{}")
        name = content[:200].replace(b"/", b"_").replace(b"\0", b"_")
        if kind in (b"\1", b"\2") and name not in (b"", b".", b".."):
            folder = os.fsencode(root / FOLDER if kind == b"\1" else root)
            with open(os.path.join(folder, name), "wb"):
                pass
        with pyckpt.Checkpointer(root) as checkpointer:
            require(checkpointer.latest() is None, "a checkpoint where there is none")
        Fence(root).last_job()
        with Fence(root).held():
            pass
        Fence(root).last_job()
