"""The parsers in Python, each with inputs that are sound, and with what must hold of any input.

An input of a parser that reads several files is a byte, which says which of them is another one,
and the content of that.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

import pyckpt
from pyckpt.convert import import_checkpoint
from pyckpt.convert.torch_files import read_torch
from pyckpt.convert.weight_files import read_weights
from pyckpt.dcp import objects
from pyckpt.errors import PyckptError
from pyckpt.format import metadata as metadata_format
from pyckpt.format import plain
from pyckpt.format.item import HEAD_BYTES, TAIL_BYTES, Locator
from pyckpt.profiling import nsys
from pyckpt.tools.trace import read_traces
from pyckpt.tools.values import values
from pyckpt.tools.verifying import verify
from pyckpt.train.store.catalog import NOTE_KEY, Catalog, note_of
from pyckpt.train.store.fence import FOLDER, Fence
from torture.fuzz import mutate
from torture.fuzz.mutate import Mutator

__all__ = ["PARSERS", "Parser", "Wrong"]

DATA, METADATA, SEALED = range(3)


class Wrong(Exception):
    """What a parser made of an input is not what it may make of it."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


class Parser:
    """What is tried with an input, and what may come of it.

    Args:
        folder: where its files are; empty.
    """

    mutators: Sequence[Mutator] = ()
    documented: tuple[type[BaseException], ...] = (PyckptError, OSError)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def seeds(self) -> list[bytes]:
        """Sound inputs, the same each time."""
        raise NotImplementedError

    def attempt(self, data: bytes) -> None:
        """Raises one of the documented errors, or returns; anything else is a defect."""
        raise NotImplementedError

    def run(self, data: bytes) -> None:
        """Raises what must not have happened."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.attempt(data)
        except self.documented:
            pass

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        return mutate.mutate(random, data, self.mutators, others)


class Several(Parser):
    """Of a folder of files, of which the input replaces one."""

    by_name: Mapping[str, Sequence[Mutator]] = {}
    """Suffixes of names, and what changes such files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.source = folder / "checkpoint_5"
        self.make(self.source)
        files = sorted(path for path in self.source.rglob("*") if path.is_file())
        self.files = {path.relative_to(self.source).as_posix(): path.read_bytes() for path in files}
        self.names = list(self.files)

    def make(self, source: Path) -> None:
        raise NotImplementedError

    def seeds(self) -> list[bytes]:
        return [bytes([i]) + self.files[name] for i, name in enumerate(self.names)]

    def change(self, random: Any, data: bytes, others: Sequence[bytes]) -> bytes:
        if not data or random.random() < 0.02:
            return mutate.raw(random, data, others)
        name = self.names[data[0] % len(self.names)]
        fitting = next((one for end, one in self.by_name.items() if name.endswith(end)), ())
        same = [other[1:] for other in others if other[:1] == data[:1]]
        return data[:1] + mutate.mutate(random, data[1:], fitting, same)

    def replaced(self, data: bytes) -> str:
        """Puts all files in their place, one of them as the input has it; returns its name."""
        which = self.names[data[0] % len(self.names)] if data else self.names[0]
        for name, content in self.files.items():
            (self.source / name).write_bytes(data[1:] if name == which else content)
        return which


# --- our own files --------------------------------------------------------------------------------


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(24.0).reshape(4, 6),
        "t": torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        "b": torch.arange(5).to(torch.bfloat16),
        "e": torch.empty(0),
        "nested": {"n": 3, "text": "é", "list": [1, 2.5, None, torch.ones(2)]},
        "object": OrderedDict(a=torch.ones(3), b={1, 2}),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bool(torch.equal(one, other))
        )
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def empty(value: Any) -> Any:
    """A state of the same form, with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, OrderedDict):
        return None
    if isinstance(value, dict):
        return {key: empty(sub) for key, sub in value.items()}
    return [empty(sub) for sub in value] if isinstance(value, list) else None


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


# --- other programs' ------------------------------------------------------------------------------


def _read_all(value: Any) -> None:
    """Reads what pages of files hold, as a program that uses it does."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu":
            value.detach().reshape(-1).view(torch.uint8).sum() if value.numel() else None
    elif isinstance(value, Mapping):
        for sub in value.values():
            _read_all(sub)
    elif isinstance(value, (list, tuple, set)):
        for sub in value:
            _read_all(sub)


class TorchFile(Parser):
    """A file of ``torch.save``, in its form of today and in the one before."""

    mutators = (mutate.archived(), mutate.pickled)

    def seeds(self) -> list[bytes]:
        made = []
        for zipped in (True, False):
            for value in (state(), torch.arange(3.0), {"m": torch.nn.Linear(2, 2).state_dict()}):
                file = io.BytesIO()
                torch.save(value, file, _use_new_zipfile_serialization=zipped)
                made.append(file.getvalue())
        return made

    def attempt(self, data: bytes) -> None:
        path = self.folder / "file.pt"
        path.unlink(missing_ok=True)  # an earlier one may be mapped still
        path.write_bytes(data)
        _read_all(read_torch(path).value)


class Safetensors(Parser):
    mutators = (mutate.framed_json,)

    def seeds(self) -> list[bytes]:
        header = {
            "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "e": {"dtype": "I64", "shape": [0, 2], "data_offsets": [32, 32]},
            "__metadata__": {"format": "pt", "tied": "w"},
        }
        text = json.dumps(header).encode()
        return [
            struct.pack("<Q", len(text)) + text + bytes(range(32)),
            struct.pack("<Q", 2) + b"{}",
        ]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "model.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        for name, tensor in read_weights(path).items():
            require(type(name) is str, "a name that is none")
            require(tensor.numel() * tensor.element_size() <= len(data), "bytes that are not there")
            _read_all(tensor)


def _weights(folder: Path) -> None:
    content = Safetensors(folder).seeds()[0]
    (folder / "model.safetensors").write_bytes(content)


_ADAM = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3)}}, "param_groups": [
    {"lr": 0.1, "params": [0]}]}  # fmt: skip


class Import(Several):
    """A folder of another program, imported as a step."""

    by_name: Mapping[str, Sequence[Mutator]] = {
        ".json": (mutate.jsons,),
        ".safetensors": (mutate.framed_json,),
        ".pkl": (mutate.archived(), mutate.pickled),
        ".bin": (mutate.archived(), mutate.pickled),
        ".pt": (mutate.archived(), mutate.pickled),
        ".pth": (mutate.archived(), mutate.pickled),
        ".ckpt": (mutate.archived(), mutate.pickled),
        ".metadata": (mutate.pickled,),
    }

    def attempt(self, data: bytes) -> None:
        shutil.rmtree(self.source)
        self.source.mkdir()
        for name in self.names:
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
        self.replaced(data)
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        try:
            done = import_checkpoint(self.path(), target, leave_out=len(data) % 2 == 0)
        except ValueError as error:
            # What the source should have said; Unicode's errors say nothing of what to do.
            require(type(error) is ValueError, f"{type(error).__name__}: {error}")
            return
        str(done)
        require(verify(done.path).good, "what was imported is damaged")
        pyckpt.load(str(done.path))

    def path(self) -> Path:
        return self.source


class Trainer(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        torch.save(_ADAM, source / "optimizer.pt")
        torch.save({"last_epoch": 3}, source / "scheduler.pt")
        torch.save({"python": (3, (1,) * 5, None), "cpu": torch.zeros(16, dtype=torch.uint8)},
                   source / "rng_state.pth")  # fmt: skip
        said = {"global_step": 5, "epoch": 1.5, "best_model_checkpoint": "a/b", "log_history": [{}]}
        (source / "trainer_state.json").write_text(json.dumps(said))


class Accelerate(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        torch.save(_ADAM, source / "optimizer.bin")
        torch.save({"last_epoch": 3}, source / "scheduler.bin")
        torch.save({"a": 3}, source / "custom_checkpoint_0.pkl")
        torch.save({"step": 3, "random_state": (3, (1,) * 5, None)}, source / "random_states_0.pkl")


class Lightning(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        content = {
            "pytorch-lightning_version": "2.6.0",
            "epoch": 1,
            "global_step": 7,
            "state_dict": torch.nn.Linear(2, 2).state_dict(),
            "optimizer_states": [_ADAM],
            "lr_schedulers": [{"last_epoch": 3}],
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"EarlyStopping{'monitor': 'loss'}": {"best": torch.tensor(1.0)}},
            "hyper_parameters": {"lr": 0.1},
        }
        torch.save(content, source / "last.ckpt")

    def path(self) -> Path:
        return self.source / "last.ckpt"


class ShardedWeights(Import):
    """Weights with an index."""

    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        (source / "model.safetensors").rename(source / "model-1.safetensors")
        torch.save({"x": torch.ones(3)}, source / "pytorch_model-2.bin")
        index = {
            "metadata": {"total_size": 3},
            "weight_map": {"w": "model-1.safetensors", "x": "pytorch_model-2.bin"},
        }
        (source / "model.safetensors.index.json").write_text(json.dumps(index))

    def path(self) -> Path:
        return self.source / "model.safetensors.index.json"


class Distributed(Import):
    """A DCP checkpoint, in the form of torchtitan."""

    def make(self, source: Path) -> None:
        source.mkdir()
        saved = {
            "model": {"w": torch.ones(2, 3)},
            "train_state": {"step": 5},
            "lr_scheduler": {"a": 1},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(saved, checkpoint_id=source, no_dist=True)  # type: ignore[attr-defined]


# --- reports --------------------------------------------------------------------------------------


class Nsys(Parser):
    """An SQLite export of Nsight Systems."""

    mutators = (mutate.database,)
    documented = (ValueError, FileNotFoundError)

    def seeds(self) -> list[bytes]:
        import sqlite3

        tables = {
            "StringIds": (
                "id", "value", [(1, "cudaStreamSynchronize"), (2, "cudaMemcpyAsync"), (3, "range")]
            ),
            "ThreadNames": ("nameId", "priority", "globalTid", [(3, 0, 0x100012300000123)]),
            "META_DATA_EXPORT": ("name", "value", [("EXPORT_PRODUCT_VERSION", "2024.6")]),
            "CUPTI_ACTIVITY_KIND_RUNTIME": (
                "start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue",
                [(10, 20, 0, 0x100012300000123, 1, 1, 0), (30, 40, 0, 0x100012300000123, 2, 2, 0)],
            ),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
                "start", "end", "deviceId", "correlationId", "globalPid", "syncType",
                [(11, 19, 0, 1, 0x100012300000000, 3)],
            ),
            "CUPTI_ACTIVITY_KIND_MEMCPY": (
                "start", "end", "correlationId", "globalPid", "bytes", "copyKind", "srcKind",
                "dstKind",
                [(31, 39, 2, 0x100012300000000, 4096, 2, 2, 0)],
            ),
            "NVTX_EVENTS": (
                "start", "end", "eventType", "rangeId", "text", "globalTid", "endGlobalTid",
                "textId", "domainId", [(5, 50, 59, None, "step", 0x100012300000123, None, None, 0),
                             (6, 45, 60, 1, None, 0x100012300000123, 0x100012300000123, 3, 0)],
            ),
        }  # fmt: skip
        base = sqlite3.connect(":memory:")
        base.execute("PRAGMA page_size = 512")
        for table, (*columns, rows) in tables.items():
            base.execute(f"CREATE TABLE {table} ({', '.join(map(str, columns))})")
            marks = ", ".join("?" * len(columns))
            base.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        base.commit()
        return [bytes(base.serialize())]  # type: ignore[attr-defined]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "report.sqlite"
        for suffix in ("-wal", "-shm", "-journal"):  # SQLite's, of an input before this one
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(data)
        report = nsys.read(path)
        json.dumps(report.as_dict())
        for name in report.ranges:
            report.totals(range=name)


class Trace(Parser):
    """A Chrome trace."""

    mutators = (mutate.jsons,)
    documented = (ValueError,)

    def seeds(self) -> list[bytes]:
        events: list[Any] = [
            {
                "ph": "X",
                "pid": 1,
                "tid": 2,
                "ts": 5.5,
                "dur": 3,
                "name": "write",
                "args": {"bytes": 7},
            },
            {"ph": "X", "pid": 1, "tid": 3, "ts": 6, "dur": 1, "name": "read", "args": {}},
            {"ph": "M", "pid": 1, "tid": 2, "name": "thread_name", "args": {"name": "io-10"}},
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "python"}},
            {"ph": "i"},
        ]
        return [json.dumps({"traceEvents": events}).encode(), json.dumps(events).encode()]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "trace.json"
        path.write_bytes(data)
        trace = read_traces([path])
        try:
            json.dumps(trace.as_dict())
        except ValueError as error:  # was to be refused when it was read
            raise Wrong(f"a trace that cannot be summed up: {error}") from error


PARSERS: dict[str, Callable[[Path], Parser]] = {
    "metadata": Metadata,
    "checkpoint": Checkpoint,
    "stock": StockCheckpoint,
    "object": Object,
    "note": CheckpointNote,
    "fence": FenceFiles,
    "torch_file": TorchFile,
    "safetensors": Safetensors,
    "weights_index": ShardedWeights,
    "trainer": Trainer,
    "accelerate": Accelerate,
    "lightning": Lightning,
    "distributed": Distributed,
    "nsys": Nsys,
    "trace": Trace,
}
