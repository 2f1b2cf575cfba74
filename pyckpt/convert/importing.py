"""``import_checkpoint``: what another program saved, as a step of a Checkpointer's directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pyckpt.convert import frameworks
from pyckpt.convert.adapters import is_adapter, named_as_in_the_model
from pyckpt.convert.contents import Contents, is_optimizer, is_weights
from pyckpt.convert.copying import existing_above, write
from pyckpt.convert.stored import stored
from pyckpt.convert.torch_files import read_torch
from pyckpt.convert.weight_files import find_weights, is_extra_state, read_weights
from pyckpt.dcp.report import some
from pyckpt.engine import Engine
from pyckpt.errors import LoadError, UnsafeCheckpoint
from pyckpt.format import commit
from pyckpt.train.arguments import directory_of, step_of
from pyckpt.train.store.catalog import NOTE_KEY, OWN_KEYS, note
from pyckpt.train.store.names import DEFAULT, Naming
from pyckpt.train.store.pieces import Direct

__all__ = ["Imported", "import_checkpoint"]

_NAMES = {
    "state_dict": "model",
    "model_state_dict": "model",
    "model_state": "model",
    "net": "model",
    "optim": "optimizer",
    "optimizer_state_dict": "optimizer",
    "optimizer_state": "optimizer",
    "lr_scheduler": "scheduler",
    "scheduler_state_dict": "scheduler",
    "lr_scheduler_state_dict": "scheduler",
    "scaler_state_dict": "scaler",
}
"""What programs call the parts of their checkpoints, and what the examples of pyckpt call them."""
_STEPS = ("step", "global_step", "iteration", "iter_num")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    path: Path
    """The new checkpoint."""
    step: int
    kind: str
    """What the source is, for people."""
    names: list[str] = field(default_factory=list)
    """The names of the objects, as ``Checkpointer.restore`` takes them."""
    bytes: int = 0
    """Bytes written."""
    notes: list[str] = field(default_factory=list)
    """What was not carried over, or in another form, as sentences."""

    def __str__(self) -> str:
        lines = [f"{self.path}: step {self.step}, from {self.kind}, with {', '.join(self.names)}"]
        return "\n".join([*lines, *(f"  {one}" for one in self.notes)])


def import_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    names: Mapping[str, str] | None = None,
    named_by_order: bool = False,
    leave_out: bool = False,
    overwrite: bool = False,
    naming: str | None = None,
    direct: Direct = "auto",
    engine: Engine | None = None,
) -> Imported:
    """Make a step of a Checkpointer's directory of a checkpoint of another program.

    The source may be: a file of ``torch.save``; safetensors, a file or a folder with an index; a
    DCP checkpoint; a ``.ckpt`` of Lightning; a ``checkpoint-500`` of Transformers' Trainer; a
    folder of Accelerate's ``save_state``; a ``step-500`` of torchtitan. Nothing of it is changed.
    No code of it runs. Weights are in the pages of files, not in memory of the process; a DCP
    checkpoint needs room for its tensors in ``directory`` meanwhile. The checkpoint appears there
    when it is whole and durable.

    Args:
        source: the file or folder.
        directory: of the checkpoints; it is made if it is missing.
        step: the step to import it as; by default the one that the source tells, or 0 for weights
            alone.
        names: other names for top-level entries of a file of ``torch.save`` or of a DCP
            checkpoint, such as ``{"generator": "model"}``. Usual names (``model_state_dict``,
            ``optim``) become "model", "optimizer" and "scheduler" anyway.
        named_by_order: give the parameters of an optimizer, where the file has numbers, the names
            of the weights, by order and shape, if that is possible in one way only. It is wrong for
            an optimizer that was made of the parameters in another order than the module's.
            Without names the state loads into an optimizer with the same order of parameters.
        leave_out: leave out objects that only code of the file could make, rather than raise.
        overwrite: whether a checkpoint of that step is replaced, once the new one is whole.
        naming: the names of the checkpoints' directories, as for `Checkpointer`.
        direct: whether reading and writing bypass the page cache, as for `DirectWriter`.
        engine: the memory and threads to use; by default those that everyone shares.

    Returns:
        What was imported, and what could not be.

    Raises:
        FileNotFoundError: there is no source.
        FileExistsError: the step has a checkpoint already.
        ValueError: the source does not tell its step; or an argument is out of range.
        UnsafeCheckpoint: the source holds objects that only code of its own could make.
        CorruptCheckpoint: it is damaged, or claims to be larger than it is.
        LoadError: it has a form that is not known.
        OSError: a file cannot be read or written.
    """
    path, target = Path(source).expanduser(), directory_of(directory)
    pattern = DEFAULT if naming is None else Naming(naming)
    chosen = None if step is None else step_of(step)
    if not path.exists():
        raise FileNotFoundError(2, "there is nothing to import", str(path))
    with ExitStack() as stack:
        contents = Contents("", named_by_order=named_by_order)
        reader = _Reader(contents, path, target, names or {}, leave_out, stack, direct, engine)
        try:
            reader.read()
            if chosen is None and contents.step is not None:
                chosen = step_of(contents.step)
        except (AttributeError, LookupError, TypeError) as error:
            raise LoadError(
                f"{path} cannot be read as {contents.kind or 'a checkpoint'}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if chosen is None and any(name.startswith("optimizer") for name in contents.objects):
            raise ValueError(
                f"{path} does not tell its step; pass step= (on the command line --step)"
            )
        chosen = chosen or 0
        where = target / pattern.name(chosen)
        said = note(chosen, final=False, metrics={})
        statistics = write(
            {**contents.objects, NOTE_KEY: said},
            where,
            overwrite=overwrite,
            direct=direct,
            engine=engine,
        )
    return Imported(
        where, chosen, contents.kind, list(contents.objects), statistics.bytes, contents.notes
    )


class _Reader:
    """Finds out what a source is, and reads it. Its arguments are those of `import_checkpoint`."""

    def __init__(
        self,
        contents: Contents,
        path: Path,
        target: Path,
        names: Mapping[str, str],
        leave_out: bool,
        stack: ExitStack,
        direct: Direct,
        engine: Engine | None,
    ) -> None:
        self._contents = contents
        self._path = path
        self._scratch = existing_above(target)
        self._names = {**_NAMES, **names}
        self._leave_out = leave_out
        self._stack = stack
        self._direct: Direct = direct
        self._engine = engine

    def read(self) -> None:
        if self._path.is_dir():
            self._read_folder()
        elif self._path.suffix == ".safetensors" or self._path.name.endswith(".index.json"):
            self._read_weights(self._path)
        else:
            self._read_file()

    def _read_folder(self) -> None:
        folder, contents = self._path, self._contents
        if (folder / commit.metadata_name()).exists():
            self._read_dcp()
            return
        kinds: list[tuple[str, bool, Callable[..., None]]] = [
            (
                "a checkpoint of Transformers' Trainer",
                (folder / "trainer_state.json").is_file(),
                frameworks.trainer,
            ),
            (
                "a folder of Accelerate's save_state",
                any(folder.glob("random_states_*.pkl")) or (folder / "optimizer.bin").is_file(),
                frameworks.accelerate,
            ),
        ]
        for kind, matches, read in kinds:
            if matches:
                contents.kind = kind
                read(contents, folder, self._scratch, self._stack)
                return
        weights = find_weights(folder)
        if weights is not None:
            self._read_weights(weights)
            return
        below = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        several = [name for name in below if Naming.of(name) is not None]
        hint = f"; name one of those in it: {some(several, 5)}" if several else ""
        raise LoadError(f"{folder} is no checkpoint that is known{hint}")

    def _read_weights(self, path: Path) -> None:
        self._contents.kind = "weights"
        weights = read_weights(path)
        if is_adapter(path):
            weights = named_as_in_the_model(weights, path.parent)
        self._contents.add_model(weights)

    def _read_file(self) -> None:
        contents = self._contents
        value, left_out = read_torch(self._path)
        if not isinstance(value, Mapping):
            raise LoadError(
                f"{self._path} holds a {type(value).__name__}, and what is imported is a dict, "
                "such as {'model': model.state_dict(), 'step': 100}"
            )
        is_lightning = "pytorch-lightning_version" in value and "state_dict" in value
        # What a module was made of is not needed to resume it.
        needed = {
            key: kind
            for key, kind in left_out.items()
            if not (is_lightning and key.partition(".")[0].endswith("hyper_parameters"))
        }
        if needed and not self._leave_out:
            kinds = tuple(sorted(set(needed.values())))
            what = some([f"{key} ({kind})" for key, kind in needed.items()], 5)
            raise UnsafeCheckpoint(
                f"{self._path} holds objects that only running its code could make: {what}. "
                "leave_out=True (on the command line --leave-out) imports the rest; or load the "
                "file where you trust it, and save plain values and state_dicts in their place",
                path=str(self._path),
                refused=kinds,
            )
        contents.leave_out(left_out)
        if is_lightning:
            contents.kind = "a checkpoint of Lightning"
            frameworks.lightning(contents, value)
        elif is_weights(value) and not any(map(is_optimizer, value.values())):
            contents.kind = "weights"
            self._add_bare(value)
        else:
            contents.kind = "a file of torch.save"
            self._add_entries(value)

    def _read_dcp(self) -> None:
        contents = self._contents
        found = self._stack.enter_context(
            stored(self._path, scratch=self._scratch, direct=self._direct, engine=self._engine)
        )
        state = found.state
        own_note = state.pop(NOTE_KEY, None)
        if found.report.not_verified:
            contents.notes.append(
                f"{len(found.report.not_verified)} entries have no checksums that could be compared"
            )
        meta = self._path / "meta.pt"
        if meta.is_file():
            self._read_sharded_lightning(state, meta)
        elif "train_state" in state and not is_optimizer(state.get("optimizer")):
            contents.kind = "a checkpoint of torchtitan"
            frameworks.titan(contents, state)
        elif is_weights(state) and not any(map(is_optimizer, state.values())):
            contents.kind = "weights in a DCP checkpoint"
            self._add_bare(state)
        else:
            contents.kind = "a DCP checkpoint"
            self._add_entries(state)
        if contents.step is None:
            contents.step = _step_told(own_note) or _step_in_name(self._path.name)

    def _read_sharded_lightning(self, state: dict[str, Any], meta: Path) -> None:
        contents = self._contents
        rest, left_out = read_torch(meta)
        contents.leave_out(left_out)
        # FSDPStrategy and ModelParallelStrategy have a name each.
        weights = next((name for name in ("state_dict", "model") if name in state), None)
        if weights is None or "pytorch-lightning_version" not in rest:
            contents.kind = "a sharded checkpoint of Lightning Fabric"
            self._add_entries({**rest, **state})
            return
        contents.kind = "a sharded checkpoint of Lightning"
        names = [key for key in state if key.startswith("optimizer_")]
        # The tenth comes after the second.
        optimizers = [state[key] for key in sorted(names, key=lambda key: (len(key), key))]
        saved = {**rest, "state_dict": state[weights], "optimizer_states": optimizers}
        frameworks.lightning(contents, saved)

    def _add_bare(self, saved: Mapping[str, Any]) -> None:
        """Weights, with what lies beside them."""
        # A module's state has nothing else than tensors at its top, but for extra states.
        beside = {
            name: value
            for name, value in saved.items()
            if not isinstance(value, torch.Tensor) and "." not in name and not is_extra_state(name)
        }
        if beside:
            told = [name for name in _STEPS if _step_of(saved.get(name)) is not None]
            beside |= {name: saved[name] for name in told}
            self._contents.notes.append(
                f"beside the weights, and no part of the model: {some(beside, 5)}"
            )
        weights = {name: value for name, value in saved.items() if name not in beside}
        scalars = [name for name in _STEPS if _step_of(weights.get(name)) is not None]
        if scalars:  # it may be a buffer of the module, which has to get it
            self._contents.notes.append(
                f"{scalars[0]!r} is a tensor among the weights, and was imported as such; if "
                "it is the step, pass step= (on the command line --step)"
            )
        self._add_entries({"model": weights, **beside})

    def _add_entries(self, saved: Mapping[str, Any]) -> None:
        """Each entry under its usual name."""
        contents = self._contents
        weights = next(
            (one for one in saved.values() if is_weights(one) and not is_optimizer(one)), None
        )
        for key, value in saved.items():
            name = self._names.get(str(key), str(key))
            if name in contents.objects:
                raise LoadError(f"{self._path} has {name!r} twice; give one another name")
            if name in OWN_KEYS:
                continue
            if name in _STEPS and contents.step is None:
                contents.step = _step_of(value)
            if is_optimizer(value):
                contents.add_optimizer(value, name, weights)
            elif is_weights(value):
                contents.add_model(value, name)
            else:
                contents.add(name, value)


def _step_of(value: Any) -> int | None:
    """The step that a value is, if it can be one."""
    if isinstance(value, torch.Tensor) and not value.dim() and value.dtype in _INTEGERS:
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _step_told(text: Any) -> int | None:
    """The step in a checkpoint's own note."""
    import json

    try:
        found = json.loads(text)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return _step_of(found)


def _step_in_name(name: str) -> int | None:
    naming = Naming.of(name)
    return None if naming is None else naming.step_of(name)
