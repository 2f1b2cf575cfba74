"""What the tests of staging share: states, what became of them, and bits to compare."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import pyckpt
from pyckpt import guard

PAGE = 4096
SLOT = 4 * PAGE


# What an engine as below has for its ring: two slots more than threads.
RING = 5 * SLOT


def engine(**options: Any) -> pyckpt.Engine:
    """One whose slots are so small that everything spans several."""
    options = {"slot_bytes": SLOT, "max_pinned_bytes": 64 << 20, "io_threads": 3, **options}
    return pyckpt.Engine(**options)


def writer_to(path: Path, **options: Any) -> pyckpt.DirectWriter:
    """One that leaves it to the system when bytes reach the disk."""
    return pyckpt.DirectWriter(path, **{"sync_files": False, "direct": "off", **options})


@contextmanager
def slowed(own: pyckpt.Engine) -> Iterator[None]:
    """Keep an engine of one thread from copying what it is given now, but for what somebody waits
    for: it gathers a large tensor first, so that what does not wait for its own copies comes too
    early."""
    base = torch.zeros(8 << 20, 2)
    parameter = torch.nn.Parameter(base[:, 1])
    stager = pyckpt.PinnedStager(engine=own, optimizers=[torch.optim.SGD([parameter])])
    staging, _ = stager.begin({"slow": parameter}, direct=True)
    guard.discard(staging)  # or else steps would wait for this one
    try:
        yield
    finally:
        staging.release()


def bits(tensor: torch.Tensor) -> bytes:
    """Of the values, in row-major order."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where two states are not bit for bit the same; empty where they are."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
        return "" if equal else f"{at}: {a} and {b}"
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return f"{at}: keys {list(a)} and {list(b)}"
        return next(filter(None, (difference(a[key], b[key], f"{at}.{key}") for key in a)), "")
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} entries"
        entries = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(*both, f"{at}[{i}]") for i, both in entries)), "")
    return "" if type(a) is type(b) and a == b else f"{at}: {a!r} and {b!r}"


def same(a: Any, b: Any) -> bool:
    """Whether two states are bit for bit the same."""
    return not difference(a, b)


def tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_in(value)


def frozen(state: Any) -> Any:
    """The state as it is now."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: frozen(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(frozen(value) for value in state)
    return copy.deepcopy(state)


def overwrite(state: Any) -> None:
    """Every bit of every tensor."""
    done = set()
    for tensor in tensors_in(state):
        storage = tensor.detach().untyped_storage()
        if storage.data_ptr() not in done and storage.nbytes():
            done.add(storage.data_ptr())
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            # A bool of another byte than 0 and 1 is none.
            memory.bitwise_xor_(1 if tensor.dtype is torch.bool else 255)


def blank(state: Any) -> Any:
    """A state to load the same into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):  # taken apart where there is something in it, or loaded as it is
        return [blank(value) for value in state]
    return None


def check_saved(expected: dict[str, Any], path: Path) -> None:
    """Both stock's loader and ours read the state back, with all checksums right."""
    for reader in (FileSystemReader(path), pyckpt.DirectReader(path)):
        state = blank(expected)
        dcp.load(state, storage_reader=reader)
        found = difference(state, expected)
        assert not found, f"{type(reader).__name__}: {found}"


def metadata_of(path: Path) -> Metadata:
    with open(path / ".metadata", "rb") as file:
        metadata: Metadata = pickle.load(file)
    return metadata


def item(path: Path, key: str) -> Any:
    """An item as it stands in the file, read as ``torch.load`` does."""
    for index, info in metadata_of(path).storage_data.items():
        if index.fqn == key:
            with open(path / info.relative_path, "rb") as file:
                file.seek(info.offset)
                return torch.load(io.BytesIO(file.read(info.length)), weights_only=False)
    raise KeyError(key)


def wait_given_back(writer: pyckpt.DirectWriter) -> None:
    """Wait until a save that DCP is through with has given its memory back: where it did not come
    to write, that is when DCP's thread ends, a little after its future is done."""
    with suppress(Exception, CancelledError):
        writer.written.result(60)


def outcome(wait: Callable[[], Any]) -> BaseException:
    """What a save failed with, without DCP's wrapping."""
    try:
        wait()
    except CheckpointException as error:
        return next(iter(error.failures.values()))[0]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")
