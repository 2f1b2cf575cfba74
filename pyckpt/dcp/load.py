"""``pyckpt.load``: DCP's load with pyckpt's planner and reader, and errors that can be caught."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future

from pyckpt.activity import activity, inside
from pyckpt.collector import collector_paused
from pyckpt.dcp import sharing
from pyckpt.dcp.failures import Carried, error_of, portable, portable_errors
from pyckpt.dcp.handing_on import is_known_to_carry
from pyckpt.dcp.leaves import first_on_meta
from pyckpt.dcp.objects import Allowed
from pyckpt.dcp.planner import Create, LoadPlanner
from pyckpt.dcp.reader import DirectReader
from pyckpt.dcp.renaming import Rename, function_of, moved, renamed
from pyckpt.dcp.report import LoadReport
from pyckpt.dcp.together import together
from pyckpt.dcp.whole import decode_in_place
from pyckpt.engine import Engine
from pyckpt.errors import CheckpointReplaced, LoadError
from pyckpt.format import commit
from pyckpt.format.paths import paths
from pyckpt.private import load_state_dict

__all__ = ["load", "load_all"]

_logger = logging.getLogger("pyckpt")

_ATTEMPTS = 5  # to load a checkpoint that another process keeps saving over


@overload
def load(
    state_dict: str | os.PathLike[str],
    *,
    allow: Sequence[Allowed] = (),
    device: torch.device | str = "cpu",
    verify: Literal["items", "none"] = "items",
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
) -> dict[str, Any]: ...


@overload
def load(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["fill", "ignore", "error"] = "fill",
    mismatched: Literal["error", "keep"] = "error",
    rename: Rename | Mapping[str, str] | None = None,
    allow: Sequence[Allowed] = (),
    device: torch.device | str = "cpu",
    create: Create | None = None,
    verify: Literal["items", "none"] = "items",
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    reader: StorageReader | None = None,
    trust_metadata: bool = False,
    share_reads: bool | None = None,
) -> LoadReport: ...


def load(
    state_dict: dict[str, Any] | str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["fill", "ignore", "error"] = "fill",
    mismatched: Literal["error", "keep"] = "error",
    rename: Rename | Mapping[str, str] | None = None,
    allow: Sequence[Allowed] = (),
    device: torch.device | str = "cpu",
    create: Create | None = None,
    verify: Literal["items", "none"] = "items",
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    reader: StorageReader | None = None,
    trust_metadata: bool = False,
    share_reads: bool | None = None,
) -> LoadReport | dict[str, Any]:
    """Load a checkpoint into ``state_dict``, in place, and say what was done.

    As in `torch.distributed.checkpoint.load`, all ranks call this with the same keys, and tensors
    are loaded into the memory that they have. An entry with ``state_dict`` and ``load_state_dict``
    methods is asked for its state first, and handed the state back when it is loaded. Unlike there,
    keys that were saved and that the state lacks are created, and no code of the file is run: see
    `LoadPlanner`.

    A load that fails leaves the state with the keys and lists that it had. Its values may be a part
    of what was saved. Autograd sees that a load has changed a tensor, as it sees ``copy_``: what
    was computed before with such a tensor may have no backward pass any more.

    ``load(path)``, with the checkpoint's directory alone, returns all that the checkpoint holds, in
    dicts and lists as it was saved, with whole tensors on ``device``. Each process then loads for
    itself. This form takes ``allow``, ``device``, ``verify``, ``direct`` and ``engine``.

    Args:
        state_dict: what to load, or the directory. Top-level entries of the checkpoint that are not
            in it are not loaded.
        path: the checkpoint's directory, or its URL in an object store, such as
            ``s3://bucket/run/step-00000100``. It may be left out if ``reader`` knows it.
        missing, unexpected, mismatched, allow, device, create: see `LoadPlanner`.
        rename: called with each key of the checkpoint (``"model.head.weight"``), returns the key
            that it has in the state; the same where it is called the same. Or a mapping of the keys
            that change.
        verify: "items" checks the CRC-32 of every item that is read whole, "none" does not.
        direct: whether reading bypasses the page cache, as for `DirectReader`.
        engine: the memory and threads to use; by default those that everyone shares.
        process_group: the ranks that load together, default all.
        no_dist: load in this process alone, whether or not `torch.distributed` is initialised.
        reader: a StorageReader to use instead of `DirectReader`. How it verifies and reads is its
            own affair: ``verify``, ``direct`` and ``engine`` do not count then.
        trust_metadata: accept a ``reader`` that unpickles the checkpoint's metadata, which runs
            whatever code the file holds. PyTorch's ``FileSystemReader`` does so.
        share_reads: whether ranks that want the same bytes read them once. Each reads and verifies
            a part; the others of its host copy that from its memory, and those of other hosts get
            it through the process group. All ranks must agree. None (the default) shares among
            ranks of one host alone, large tensors on the CPU, where the kernel lets ranks copy
            from each other's memory. True also shares between hosts, which pays where the network
            is faster than the file system, and False has each rank read for itself. Of a
            checkpoint that does not name its save (``save_id``; PyTorch and pyckpt write one) each
            rank reads its own.

    Returns:
        A report of what this rank loaded, created, converted, kept and left out; for a directory
        alone, all that the checkpoint holds.

    Raises:
        TypeError: ``state_dict`` is neither a dict nor a path, or it is a path, and there are
            arguments that this form does not take.
        ValueError: neither path nor reader is given, or a reader that is not to be trusted.
        OSError: a file is missing or cannot be read.
        CorruptCheckpoint: bytes are not those that were saved.
        UnsafeCheckpoint: the checkpoint contains a class or function that is not allowed.
        LoadError: the state and the checkpoint do not fit, or ranks failed in different ways, or
            by an error that is none of these. The errors of the ranks are chained.
        CheckpointReplaced: the checkpoint was saved over while it was loaded, again and again.
    """
    if isinstance(state_dict, str | os.PathLike):
        if path is not None or reader is not None:
            raise TypeError("load takes a state, and then a path; or a path alone")
        ignored = {
            "missing": missing != "error",
            "unexpected": unexpected != "fill",
            "mismatched": mismatched != "error",
            "rename": rename is not None,
            "create": create is not None,
            "process_group": process_group is not None,
            "trust_metadata": trust_metadata,
            "share_reads": bool(share_reads),
        }
        if any(ignored.values()):
            names = ", ".join(name for name, is_given in ignored.items() if is_given)
            raise TypeError(f"load(path) loads all there is, into no state, and takes no {names}")
        return load_all(
            state_dict, allow=allow, device=device, verify=verify, direct=direct, engine=engine
        )
    if not isinstance(state_dict, MutableMapping):
        raise TypeError(
            "load takes a dict of objects by name, such as {'model': model}, not a value of type "
            f"{type(state_dict).__name__}; or a path alone"
        )
    if reader is None:
        if path is None:
            raise ValueError("load needs a path or a reader")
        reader = DirectReader(path, verify=verify, direct=direct, engine=engine)
    elif _unpickles(reader) and not trust_metadata:
        raise ValueError(
            f"{type(reader).__name__} unpickles the metadata, which runs whatever code "
            "it holds; leave the reader out, or pass trust_metadata=True for a file that you trust"
        )
    elif path is not None:
        reader.reset(path)
    alone = no_dist or not dist.is_available() or not dist.is_initialized()
    if alone and type(reader) is DirectReader:
        _refuse_absent(reader)
    start = time.perf_counter()
    where = getattr(reader, "path", type(reader).__name__)
    amount = getattr(reader, "_amount", None)  # foreign readers do not tell
    # Only our own readers say what the automatic way has to know, and leave foreign plans alone.
    is_known = _leaves_items(reader) and not isinstance(reader, FileSystemReader)
    shares = not alone and (share_reads or share_reads is None)
    if shares and share_reads is None:
        talks = dist.get_world_size(process_group) > 1 and is_known_to_carry(process_group)
        shares = is_known and talks
    for attempt in range(_ATTEMPTS):
        states: dict[str, Any] = {}
        refusal: Exception | None = None
        try:
            for key, value in sorted(state_dict.items(), key=lambda entry: str(entry[0])):
                states[key] = value.state_dict() if _is_stateful(value) else value
        except Exception as error:
            if alone:
                raise
            refusal = error  # the other ranks wait for what this one says
        change = partial(_renamed, state_dict, states, function_of(rename))
        if isinstance(state_dict, _Everything):
            change = partial(_filled, states)
        if shares:
            shown: _HonestReader = _SharingReader(
                reader, change, process_group, automatic=share_reads is None
            )
        else:
            shown = _HonestReader(reader, change)
        shown.refusal = refusal
        planner = LoadPlanner(
            missing=missing,
            unexpected=unexpected,
            mismatched=mismatched,
            allow=allow,
            device=device,
            create=create,
        )
        planner._items_stay = _leaves_items(reader)
        # Ranks that share what they read have to know each item.
        is_local = type(reader) is DirectReader and isinstance(reader.path, Path)
        may_share = shares and (share_reads or _replicated_bytes(states) >= sharing.WORTH_BYTES)
        planner._reads_plain = is_local and not may_share
        if isinstance(shown, _SharingReader):
            vars(planner)["finish_plan"] = shown.finishing(planner)
        failure: CheckpointException | None = None
        try:
            # Not dcp.load: it warns, at each call, that it does not use torch.distributed.
            doing = activity(f"loading {where}", speaks=not _rank(process_group), measure=amount)
            with doing, collector_paused():
                load_state_dict(
                    states,
                    storage_reader=shown,  # type: ignore[arg-type]
                    process_group=process_group,
                    no_dist=alone,
                    planner=planner,
                )
        except BaseException as error:
            planner._undo_changes()
            if not isinstance(error, CheckpointException):
                raise
            failure = error
        if failure is None:
            break
        # Out of the handler, so that DCP's rendering of the same errors is not shown with them.
        if attempt == _ATTEMPTS - 1 or not _is_replaced(failure):
            raise error_of(failure, alone=alone, kind=LoadError, doing="loading")
    if alone:
        _hand_back(states, state_dict)
    else:
        together(
            lambda: _hand_back(states, state_dict), process_group=process_group, doing="loading"
        )
    report = _finish(planner.report, reader, shown.of_others, time.perf_counter() - start)
    if not inside() and not _rank(process_group):
        _logger.info("%s: %s", where, report.summary)
    return report


def load_all(
    path: str | os.PathLike[str],
    *,
    allow: Sequence[Allowed] = (),
    device: torch.device | str = "cpu",
    verify: Literal["items", "none"] = "items",
    direct: Literal["auto", "require", "off"] = "auto",
    engine: Engine | None = None,
) -> dict[str, Any]:
    """What was saved, in dicts and lists as it was then; each process loads for itself."""
    reader = DirectReader(path, verify=verify, direct=direct, engine=engine)
    reader.read_metadata()  # raises where each rank has saved for itself: no file names all then
    state = _Everything()
    load(state, reader=reader, allow=allow, device=device, no_dist=True)
    return dict(state)


def _hand_back(states: dict[str, Any], state_dict: dict[str, Any]) -> None:
    """Put what was loaded where it was asked for."""
    decode_in_place(states)
    for key, value in states.items():
        entry: Any = state_dict.get(key)
        if _is_stateful(entry):
            entry.load_state_dict(value)
        else:
            state_dict[key] = value


def _refuse_absent(reader: DirectReader) -> None:
    """Raise if there is no checkpoint in a directory. DCP, which would look first for one of all
    ranks and then for one of each, logs the error of the first look with its traceback. Where there
    are several ranks they look together, so that none waits for one that sees nothing."""
    where = reader.path
    if isinstance(where, Path) and not any(
        (where / commit.metadata_name(rank)).exists() for rank in (None, 0)
    ):
        reader.read_metadata()


class _Everything(dict[str, Any]):
    """A state for all that a checkpoint holds. What that is says the metadata that is then loaded:
    the checkpoint may be saved over meanwhile, with other names."""


def _filled(states: dict[str, Any], metadata: Metadata) -> Metadata:
    """Gives a state all names of a checkpoint."""
    states.update(dict.fromkeys(str(path[0]) for path in paths(metadata).values()))
    return metadata


def _rank(process_group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(process_group) if dist.is_available() and dist.is_initialized() else 0


def _is_replaced(failure: CheckpointException) -> bool:
    """Whether a load may well succeed now. All ranks come to the same answer, since all have the
    errors of all."""
    return any(isinstance(error, CheckpointReplaced) for error, _ in failure.failures.values())


def _renamed(
    state_dict: dict[str, Any],
    states: dict[str, Any],
    rename: Rename | None,
    metadata: Metadata,
) -> Metadata:
    """The metadata by the names of the state. Here an error of one rank becomes one of all."""
    for key, value in state_dict.items():
        # What is loaded would be copied into no memory, which torch leaves out.
        name = first_on_meta({key: states[key]}) if _copies(value) else None
        if name is not None:
            raise LoadError(f"{name} is on the meta device; materialize it first")
    if rename is None:
        return metadata
    names = {str(key) for key in state_dict}
    return renamed(
        metadata, paths(metadata), lambda key, path: moved(key, path, rename(key), names)
    )


def _unpickles(reader: StorageReader) -> bool:
    """Whether a reader reads metadata as stock does; one made from it may have its own way."""
    return getattr(type(reader), "read_metadata", None) is FileSystemReader.read_metadata


def _leaves_items(reader: StorageReader) -> bool:
    """Whether a reader, on the rank that coordinates, looks at no items of the others' plans."""
    if type(reader) in (DirectReader, FileSystemReader):
        return True
    # Of our own readers around another. Those of a program may look, whatever they hand on.
    is_ours = type(reader).__module__.startswith("pyckpt.")
    return is_ours and bool(getattr(reader, "_leaves_items", False))


def _copies(value: Any) -> bool:
    """Whether an object copies what it loads into its own tensors, and keeps these."""
    return isinstance(value, nn.Module) and (
        type(value).load_state_dict is nn.Module.load_state_dict
    )


def _is_stateful(value: Any) -> bool:
    # The protocol's own check is slow, and tensors are what there are many of.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)


def _replicated_bytes(value: Any) -> int:
    """Bytes of the tensors in a state, on the CPU, that other ranks may well want all the same."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return 0
        if isinstance(value, DTensor):
            is_alike = any(placement.is_replicate() for placement in value.placements)
            return value.to_local().nbytes if is_alike else 0
        return value.nbytes if type(value) in (torch.Tensor, torch.nn.Parameter) else 0
    if isinstance(value, Mapping):
        return sum(_replicated_bytes(part) for part in value.values())
    if isinstance(value, list):
        return sum(_replicated_bytes(part) for part in value)
    return 0


def _finish(report: LoadReport, reader: Any, of_others: set[str], seconds: float) -> LoadReport:
    statistics = getattr(reader, "statistics", None)
    # A reader that does not say what it has verified has verified nothing.
    unverified = getattr(reader, "unverified", [*report.loaded, *report.filled])
    return replace(
        report,
        not_verified=sorted({*unverified, *of_others}) if of_others else list(unverified),
        bytes=report.bytes if statistics is None else int(statistics.bytes),
        seconds=seconds,
    )


# --- errors -----------------------------------------------------------------------------------


class _HonestReader:
    """A reader whose errors in reading the metadata arrive as what they are."""

    def __init__(self, reader: StorageReader, change: Callable[[Metadata], Metadata]) -> None:
        self._reader = reader
        self.of_others: set[str] = set()
        """Keys of what other ranks read for this one, and could not check."""
        self.refusal: Exception | None = None
        """Why this rank cannot load. It says so where the ranks first tell each other of errors."""
        # Where ranks saved without collectives each has a metadata file; DCP tries that next, if
        # the reader can take the rank, which it tells from the signature.
        has_rank_files = "kwargs" in inspect.signature(reader.read_metadata).parameters
        absent: FileNotFoundError | None = None

        @functools.wraps(reader.read_metadata)
        def read_metadata(*args: Any, **kwargs: Any) -> Metadata:
            nonlocal absent
            if self.refusal is not None:
                raise Carried(portable(self.refusal)) from self.refusal
            try:
                return change(reader.read_metadata(*args, **kwargs))
            except FileNotFoundError as error:
                if absent is None and has_rank_files and "rank" not in kwargs:
                    absent = error
                    raise
                raise Carried(absent or error) from error
            except Exception as error:
                raise Carried(portable(error)) from error

        self.read_metadata = read_metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        with portable_errors():
            return self._reader.read_data(plan, planner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class _SharingReader(_HonestReader):
    """One whose ranks share what they read.

    Args:
        reader: what each of them reads with.
        change: what to make of the metadata.
        group: the ranks; None for all.
        automatic: see `read_shared`.
    """

    def __init__(
        self,
        reader: StorageReader,
        change: Callable[[Metadata], Metadata],
        group: dist.ProcessGroup | None,
        *,
        automatic: bool,
    ) -> None:
        super().__init__(reader, change)
        self._group = group
        self._automatic = automatic
        self._failure: Exception | None = None

    def finishing(self, planner: LoadPlanner) -> Callable[[LoadPlan], LoadPlan]:
        """The planner's ``finish_plan``, once. `read_data` follows it, where other ranks wait for
        this one. So what it raises is raised there."""

        def finish_plan(plan: LoadPlan) -> LoadPlan:
            del vars(planner)["finish_plan"]
            try:
                return planner.finish_plan(plan)
            except Exception as error:
                self._failure = error
                return plan

        return finish_plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        with portable_errors():
            self.of_others = sharing.read_shared(
                self._reader,
                plan,
                planner,
                self._group,
                automatic=self._automatic,
                failure=self._failure,
                marks=True,
            )
        future: Future[None] = Future()
        future.set_result(None)
        return future
