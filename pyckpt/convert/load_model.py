"""``pyckpt.load_model``: the weights of a module, from wherever they are."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from pyckpt.convert.unwrapping import unwrapping
from pyckpt.convert.weight_files import find_weights, is_extra_state, read_weights
from pyckpt.dcp.load import load
from pyckpt.dcp.reader import DirectReader
from pyckpt.dcp.renaming import Rename
from pyckpt.dcp.report import Conversion, LoadReport, some
from pyckpt.dcp.together import gather
from pyckpt.engine import Engine
from pyckpt.errors import LoadError
from pyckpt.format import commit
from pyckpt.format.paths import paths
from pyckpt.remote.address import place_of
from pyckpt.train.finder import Finder
from pyckpt.train.restorer import LoadOptions, Restorer
from pyckpt.train.state import values
from pyckpt.train.state.app_state import AppState
from pyckpt.train.state.modules import Names, Trainable
from pyckpt.train.state.saved import tree
from pyckpt.train.store.catalog import Catalog
from pyckpt.train.store.pieces import Direct
from pyckpt.train.sync.ranks import Ranks

__all__ = ["load_model"]

_KEYS_SHOWN = 20
_T = TypeVar("_T")


def load_model(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    key: str = "model",
    missing: Literal["error", "keep"] = "error",
    unexpected: Literal["error", "ignore"] = "error",
    rename: Rename | Mapping[str, str] | None = None,
    naming: str | None = None,
    direct: Direct = "auto",
    engine: Engine | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load the weights of a module, and nothing else, to evaluate it or to train it anew. ::

        report = pyckpt.load_model(model, "runs/a")  # of the newest valid checkpoint

    All names and shapes must fit, in both directions, before a value is changed. The module may be
    wrapped (DataParallel, DDP, FSDP, compiled) or not. If `torch.distributed` is initialised, all
    ranks of ``process_group`` call this together.

    Args:
        module: its tensors are filled in place, in their dtypes and on their devices.
        path: a checkpoint, of pyckpt or of stock PyTorch; or a Checkpointer's directory, of which
            the newest valid checkpoint is loaded, also if there is an export beside it; or an
            export: a folder of safetensors or ``pytorch_model.bin``, or such a file. Or the URL
            of a checkpoint in an object store.
        key: the name of the model in the checkpoint's state. A checkpoint whose state *is* a
            model's state dict needs none.
        missing: what to do about parameters that are not there: raise, or "keep" them.
        unexpected: what to do about those that the module lacks: raise, or "ignore" them.
        rename: called with each name (in checkpoints with its key, ``"model.head.weight"``),
            returns the name that the module has for it. Or a mapping of the names that change.
        naming: the names of a Checkpointer's checkpoints, as for `Checkpointer`.
        direct: whether reading bypasses the page cache, as for `DirectReader`.
        engine: the memory and threads to use; by default those that everyone shares.

    Returns:
        What was loaded. Files of weights have no checksums, so all of theirs is ``not_verified``.

    Raises:
        TypeError: ``module`` is no module.
        FileNotFoundError: there is nothing there, or no valid checkpoint.
        LoadError: names or shapes do not fit.
        CorruptCheckpoint: bytes are not those that were saved. The module may have been changed.
        UnsafeCheckpoint: a file holds objects that only its own code could make.
        OSError: a file cannot be read.
        RanksLost: a rank did not come.
    """
    if not isinstance(module, nn.Module | Trainable):
        raise TypeError(f"load_model takes a module, not a {type(module).__name__}.")
    options = LoadOptions(missing=missing, unexpected=unexpected, rename=rename)
    place = place_of(path)
    ranks = Ranks(process_group)
    try:
        with ranks.acting("loading weights"):
            seen = _look(place, key, direct, engine, naming, ranks)
        if seen.kind == "files":
            assert seen.weights is not None
            return _load_files(module, seen.weights, key, options)
        if seen.kind == "bare":
            reader = DirectReader(seen.place, direct=direct, engine=engine)
            return _load_bare(module, reader, key, options, ranks)
        restorer = Restorer(seen.catalog, ranks, direct=direct, engine=engine)
        if seen.kind == "run":
            restorer.restore({key: module}, None, options, required=True)
        else:
            restorer.load(seen.place, {key: module}, options)
        assert restorer.report is not None
        return restorer.report
    finally:
        ranks.close()


# --- what is there ------------------------------------------------------------------------------

_Kind = Literal["files", "run", "bare", "checkpoint"]


@dataclass(frozen=True)
class _Seen:
    """What there is to load from."""

    kind: _Kind
    place: Path | str
    catalog: Catalog
    weights: Path | None = None
    """The files of weights; None where there are none, or something else is loaded."""


def _look(
    place: Path | str,
    key: str,
    direct: Direct,
    engine: Engine | None,
    naming: str | None,
    ranks: Ranks,
) -> _Seen:
    """What all ranks load from. Collective: what follows differs by the kind, and is collective,
    too, so no rank may go on where another cannot look, or sees another kind.

    Raises:
        LoadError: ranks see different things there.
        Exception: a rank could not look; raised on all.
    """
    found: list[_Seen] = []

    def look() -> _Kind:
        if isinstance(place, str):
            found.append(_look_there(place, key, direct, engine))
        else:
            found.append(_look_here(place, key, direct, engine, naming))
        return found[0].kind

    doing = "looking for weights"
    kinds = set(gather(look, process_group=ranks.work, doing=doing))
    if len(kinds) == 1:
        return found[0]
    if kinds == {"files", "run"}:
        return replace(found[0], kind="run")  # an export, to ranks that see no checkpoint beside it
    what = " and ".join(sorted(kinds))
    raise LoadError(f"ranks see different things at {place}: {what}; is it the same for all?")


def _look_there(url: str, key: str, direct: Direct, engine: Engine | None) -> _Seen:
    try:
        is_bare = _is_bare(url, key, direct, engine)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT,
            "no checkpoint is at this address; if it is a run's, name one of its checkpoints "
            "(pyckpt ls URL lists them)",
            url,
        ) from error
    return _Seen("bare" if is_bare else "checkpoint", url, Catalog(Path(url)))


def _look_here(
    where: Path, key: str, direct: Direct, engine: Engine | None, naming: str | None
) -> _Seen:
    if not where.exists():
        raise FileNotFoundError(2, "there are no weights to load", str(where))
    finder = Finder(where, direct, engine, naming=naming)
    if (where / commit.metadata_name()).exists():
        is_bare = _is_bare(where, key, direct, engine)
        return _Seen("bare" if is_bare else "checkpoint", where, finder._catalog)
    weights = _weights_at(where)
    # An export among a run's checkpoints is older than the newest of them, or as old.
    if weights is not None and (not where.is_dir() or finder.latest() is None):
        return _Seen("files", where, finder._catalog, weights)
    return _Seen("run", where, finder._catalog)


def _weights_at(path: Path) -> Path | None:
    return path if path.is_file() else find_weights(path)


# --- checkpoints --------------------------------------------------------------------------------


def _is_bare(path: Path | str, key: str, direct: Direct, engine: Engine | None) -> bool:
    """Whether a checkpoint has tensors at its top, and nothing of that name."""
    metadata = DirectReader(path, direct=direct, engine=engine).read_metadata()
    places = paths(metadata)
    return all(str(place[0]) != key for place in places.values()) and any(
        len(places[name]) == 1 and isinstance(item, TensorStorageMetadata)
        for name, item in metadata.state_dict_metadata.items()
    )


def _load_bare(
    module: nn.Module,
    reader: DirectReader,
    key: str,
    options: LoadOptions,
    ranks: Ranks,
) -> LoadReport:
    live, extras = _live(module, ranks.work)
    metadata = reader.read_metadata()
    places = paths(metadata)
    tops = {str(place[0]): metadata.state_dict_metadata[name] for name, place in places.items()}
    by_user = options.renames or str
    renamed = _renamed(tops, by_user)
    unwrapped = unwrapping(renamed, {*live, *extras})
    saved = _renamed(renamed, unwrapped)
    before = {unwrapped(by_user(name)): node for name, node in tree(metadata).items()}
    templates = {
        name: _template(extras[name].now, before[name]) for name in _given(extras, saved, options)
    }
    shapes = {
        name: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for name, item in saved.items()
        if name not in templates
    }
    kept, left = _compare(live, shapes, options)
    state = {name: live[name] for name in live if name not in kept} | templates
    rename = None if [*saved] == [*tops] else lambda key: unwrapped(by_user(key))
    # A rank that finds another one lost leaves this group, so that those that wait in it see it.
    with ranks.acting("loading weights"):
        report = load(state, reader=reader, rename=rename, process_group=ranks.work)
    for name in templates:
        extras[name].put(values.decode(state[name]))
    return LoadReport(
        loaded=report.loaded,
        filled=report.filled,
        converted=report.converted,
        kept=sorted([*kept, *(extras.keys() - templates)]),
        unexpected=sorted(left),
        not_verified=report.not_verified,
        bytes=report.bytes,
        seconds=report.seconds,
    )


# --- files of weights ---------------------------------------------------------------------------


def _load_files(module: nn.Module, path: Path, key: str, options: LoadOptions) -> LoadReport:
    start = time.perf_counter()
    saved = read_weights(path)
    if options.renames is not None:
        saved = _renamed(saved, options.renames)
    live, extras = _live(module, None)
    saved = _renamed(saved, unwrapping(saved, {*live, *extras}))
    given = {name: saved.pop(name) for name in _given(extras, saved, options)}
    _add_tied(saved, live)
    kept, left = _compare(live, {name: _shape(one) for name, one in saved.items()}, options)
    complex_ones = [
        name
        for name, one in live.items()
        if name not in kept and saved[name].is_complex() and not one.is_complex()
    ]
    if complex_ones:
        raise LoadError(
            f"complex values would lose their imaginary parts in {some(complex_ones, _KEYS_SHOWN)}"
        )
    loaded, converted = [], []
    total = 0
    with torch.no_grad():
        for name, one in live.items():
            if name in kept:
                continue
            source = saved[name]
            if isinstance(one, DTensor):
                _copy_shard(one, source)
            else:
                one.copy_(source)
            loaded.append(f"{key}.{name}")
            total += source.numel() * source.element_size()
            if source.dtype != one.dtype:
                converted.append(Conversion(f"{key}.{name}", source.dtype, one.dtype))
    for name, value in given.items():
        extras[name].put(value)
        loaded.append(f"{key}.{name}")
    kept |= extras.keys() - given
    return LoadReport(
        loaded=loaded,
        converted=converted,
        kept=sorted(f"{key}.{name}" for name in kept),
        unexpected=sorted(f"{key}.{name}" for name in left),
        not_verified=list(loaded),
        bytes=total,
        seconds=time.perf_counter() - start,
    )


def _renamed(saved: Mapping[str, _T], rename: Rename) -> dict[str, _T]:
    """What is saved, by the names that the module has for it.

    Raises:
        LoadError: two names become one.
    """
    before: dict[str, str] = {}
    for name in saved:
        other = before.setdefault(rename(name), name)
        if other != name:
            raise LoadError(f"rename makes one name of {other!r} and {name!r}: {rename(name)!r}")
    return {name: saved[old] for name, old in before.items()}


def _copy_shard(one: DTensor, source: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    local = one.to_local()
    if not local.numel():
        return
    (chunk,) = one.__create_chunk_list__()  # type: ignore[no-untyped-call]
    for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        source = source.narrow(dim, offset, size)
    local.copy_(source)


@dataclass(frozen=True)
class _Extra:
    """What ``get_extra_state`` of a submodule returns now, and who takes another."""

    name: str
    now: Any
    takers: list[Callable[[Any], None]]

    def put(self, value: Any) -> None:
        """Hand over what was loaded, which the module may keep.

        Raises:
            LoadError: the module does not take it.
        """
        if isinstance(value, torch.Tensor):
            value = value.to(
                self.now.device if isinstance(self.now, torch.Tensor) else "cpu", copy=True
            )
        try:
            for take in self.takers:
                take(value)
        except Exception as error:
            what = f"{self.name} was not taken: {type(error).__name__}: {error}"
            raise LoadError(what) from error


def _live(
    module: nn.Module | Trainable, group: dist.ProcessGroup | None
) -> tuple[dict[str, Any], dict[str, _Extra]]:
    """The module's own tensors, and its extra states, by the names without wrappers."""
    try:
        state: Any = AppState({"model": module}, process_group=group).state_dict()["model"]
    except TypeError as error:  # such as one on the meta device
        raise LoadError(str(error)) from error
    inner = module.module if isinstance(module, Trainable) else module
    names = Names(inner)
    takers: dict[str, list[Callable[[Any], None]]] = {}
    for prefix, one in inner.named_modules(remove_duplicate=False):
        if type(one).set_extra_state is not nn.Module.set_extra_state:
            name = names(f"{prefix}._extra_state" if prefix else "_extra_state")
            takers.setdefault(name, []).append(one.set_extra_state)
    extras = {
        name: _Extra(name, one, takers.get(name, []))
        for name, one in state.items()
        if is_extra_state(name)
    }
    tensors = {
        name: one
        for name, one in state.items()
        if isinstance(one, torch.Tensor) and name not in extras
    }
    return tensors, extras


def _given(
    extras: Mapping[str, _Extra], saved: Mapping[str, Any], options: LoadOptions
) -> list[str]:
    """The extra states that are loaded. Files of safetensors hold none that is no tensor: one that
    is not there stays as it is.

    Raises:
        LoadError: one that is a tensor is not there; or it is, and its module does not take it.
    """
    absent = [
        name
        for name, one in extras.items()
        if name not in saved and isinstance(one.now, torch.Tensor)
    ]
    if absent and options.missing == "error":
        raise LoadError(
            f"the weights do not fit the module; not there ({len(absent)}): "
            f"{some(sorted(absent), _KEYS_SHOWN)}",
            missing=tuple(sorted(absent)),
        )
    given = [name for name in extras if name in saved]
    deaf = [name for name in given if not extras[name].takers]
    if deaf:
        raise LoadError(
            f"modules that have get_extra_state, and no set_extra_state to load with: "
            f"{some(deaf, _KEYS_SHOWN)}"
        )
    return given


def _template(now: Any, saved: Any) -> Any:
    """What an extra state is loaded into, given its tree in the checkpoint. It may have another
    shape than the present one."""
    if isinstance(saved, TensorStorageMetadata):
        device = now.device if isinstance(now, torch.Tensor) else "cpu"
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
    return values.template(None, saved)


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _add_tied(saved: dict[str, torch.Tensor], live: Mapping[str, Any]) -> None:
    """Exports leave out names of tensors that have another name, too."""
    # Views of one memory may begin alike and step otherwise.
    places = {
        name: (one.data_ptr(), one.shape, one.stride(), one.dtype)
        for name, one in live.items()
        if not isinstance(one, DTensor) and one.layout is torch.strided and one.numel()
    }
    by_place = {place: name for name, place in places.items() if name in saved}
    for name, place in places.items():
        if name not in saved and place in by_place:
            saved[name] = saved[by_place[place]]


def _compare(
    live: Mapping[str, Any], saved: Mapping[str, tuple[int, ...] | None], options: LoadOptions
) -> tuple[set[str], set[str]]:
    """Names that are not there, and those that the module lacks.

    Raises:
        LoadError: names or shapes do not fit.
    """
    absent = {name for name in live if name not in saved}
    strange = {name for name in saved if name not in live}
    other = [
        f"{name} {tuple(live[name].shape)}, saved {saved[name]}"
        for name in live
        if name in saved and saved[name] != tuple(live[name].shape)
    ]
    problems = []
    if absent and options.missing == "error":
        problems.append(f"not there ({len(absent)}): {some(sorted(absent), _KEYS_SHOWN)}")
    if strange and options.unexpected == "error":
        problems.append(f"not in the module ({len(strange)}): {some(sorted(strange), _KEYS_SHOWN)}")
    if other:
        problems.append(f"of another shape ({len(other)}): {some(other, _KEYS_SHOWN)}")
    if problems:
        raise LoadError(
            "the weights do not fit the module; " + "; ".join(problems),
            missing=tuple(sorted(absent)),
            unexpected=tuple(sorted(strange)),
            mismatched=tuple(one.partition(" ")[0] for one in other),
        )
    return absent, strange
