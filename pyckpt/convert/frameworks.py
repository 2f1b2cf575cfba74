"""Checkpoints of frameworks, as what the integrations of `pyckpt.integrations` save.

What a framework keeps is in docs/migrate. A Lightning checkpoint becomes what its callback
restores, and so on; a torchtitan one becomes what a plain loop restores, since the integration
reads torchtitan's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from pyckpt.convert.adapters import is_adapter, named_as_in_the_model
from pyckpt.convert.contents import Contents, is_optimizer
from pyckpt.convert.stored import stored
from pyckpt.convert.torch_files import read_torch
from pyckpt.convert.weight_files import find_weights, read_weights
from pyckpt.errors import CorruptCheckpoint, LoadError

__all__ = ["accelerate", "flat_groups", "lightning", "titan", "trainer"]

_LOADERS = 8
_MODEL = "pytorch_model_fsdp"
_OF_ACCELERATE = re.compile(
    r"((optimizer|scheduler|sampler|dl_state_dict)(_\d+)?\.bin)"
    r"|((custom_checkpoint|random_states)_\d+\.pkl)"
)


# --- Lightning --------------------------------------------------------------------------------


def lightning(contents: Contents, saved: Mapping[str, Any]) -> None:
    """The content of a ``.ckpt`` file. ``saved`` may be one that lacks hyperparameters."""
    weights = saved["state_dict"]
    contents.step = saved.get("global_step")
    contents.add_model(weights)
    optimizers = saved.get("optimizer_states", [])
    for i, state in enumerate(optimizers):
        # Of several optimizers none has all parameters, and nothing says which it has.
        contents.add_optimizer(state, f"optimizer_{i}", weights if len(optimizers) == 1 else None)
    rest = {
        key: value
        for key, value in saved.items()
        if key not in ("state_dict", "optimizer_states", "hparams_name", "hparams_type")
    }
    loaders: list[Any] = []
    if isinstance(rest.get("loops"), Mapping):
        loops = rest["loops"] = dict(rest["loops"])
        fit = loops["fit_loop"] = dict(loops.get("fit_loop", {}))
        own = fit["state_dict"] = dict(fit.get("state_dict", {}))
        loaders = own.pop("combined_loader", [])
        _end_epoch(fit)
    contents.add("lightning", rest)
    contents.add_ranks("loaders", [loaders])
    contents.add_ranks("rng", [{}])
    contents.notes.append(
        "random number generators are not in a checkpoint of Lightning, and stay as they are"
    )
    contents.notes.append(
        "metrics that accumulate over an epoch are not in it either; a module that has some "
        "resumes with strict_loading=False"
    )


def _end_epoch(loop: dict[str, Any]) -> None:
    """Let an epoch whose last batch was trained count as trained. After a save at that batch,
    Lightning takes the epoch for one that goes on, and a stateful loader then has no batch left."""
    batches, epochs = loop.get("epoch_loop.batch_progress"), loop.get("epoch_progress")
    if not isinstance(batches, Mapping) or not isinstance(epochs, Mapping):
        return
    current = batches.get("current", {})
    if not batches.get("is_last_batch") or current.get("processed") != current.get("ready"):
        return
    loop["epoch_loop.batch_progress"] = _counted(batches, "completed")
    loop["epoch_progress"] = _counted(epochs, "processed")


def _counted(progress: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A progress of Lightning's loops in which all that is ready is counted under a name, too."""
    return {
        key: {**count, name: count["ready"]} if isinstance(count, Mapping) else count
        for key, count in progress.items()
    }


# --- Transformers and Accelerate ----------------------------------------------------------------


def trainer(contents: Contents, folder: Path, scratch: Path, stack: ExitStack) -> None:
    """A ``checkpoint-500`` of a Trainer."""
    content = (folder / "trainer_state.json").read_bytes()
    try:
        state = json.loads(content)
        contents.step = int(state["global_step"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"{folder}/trainer_state.json is not readable: {error}", path=str(folder)
        ) from error
    weights = _weights(contents, folder, scratch, stack)
    only_model = not _add_optimizer(contents, folder, "optimizer.pt", weights, scratch, stack)
    for name in ("scheduler", "scaler"):
        if (folder / f"{name}.pt").is_file():
            contents.add(name, _read(contents, folder / f"{name}.pt"))
    if not only_model:
        contents.add_ranks("loss", [{"sum": torch.zeros((), device="cpu"), "since": contents.step}])
        generators = [_generators(contents, path) for path in _by_rank(folder, "rng_state", ".pth")]
        contents.add_ranks("rng", generators or [{}])
    if state.get("best_model_checkpoint") and state.get("best_global_step") != contents.step:
        contents.notes.append(
            f"the best checkpoint ({state['best_model_checkpoint']}) is another one, and was not "
            "imported: load_best_model_at_end loads the best of those that are saved from now on"
        )
        state["best_model_checkpoint"] = None
    run = json.dumps({"save_only_model": only_model})
    contents.add("trainer", {"state": json.dumps(state), "run": run})
    if (folder / "training_args.bin").exists():
        contents.notes.append("training_args.bin holds a class, and is not read")


def accelerate(contents: Contents, folder: Path, scratch: Path, stack: ExitStack) -> None:
    """A folder of Accelerate's ``save_state``."""
    number = re.search(r"[_-](\d{1,18})$", folder.name)
    contents.step = int(number[1]) if number is not None else None
    weights = _weights(contents, folder, scratch, stack)
    _add_optimizer(contents, folder, "optimizer.bin", weights, scratch, stack)
    for i in count(1):
        path = find_weights(folder, f"model_{i}")
        if path is None:
            break
        contents.add_model(read_weights(path), f"model_{i}")
    # Accelerate numbers custom objects from 0, and gives others' first no number.
    further = _numbered(folder, "optimizer", ".bin", first=1)
    schedulers = [folder / "scheduler.bin", *_numbered(folder, "scheduler", ".bin", first=1)]
    custom = _numbered(folder, "custom_checkpoint", ".pkl")
    for i, path in enumerate(further, start=1):
        contents.add_optimizer(_read(contents, path), f"optimizer_{i}")
    for kind, paths in (("scheduler", schedulers), ("custom", custom)):
        for i, path in enumerate(paths):
            if path.is_file():
                contents.add(kind if i == 0 else f"{kind}_{i}", _read(contents, path))
    if (folder / "scaler.pt").is_file():
        contents.add("scaler", _read(contents, folder / "scaler.pt"))
    generators = _by_rank(folder, "random_states", ".pkl")
    states = [_read(contents, path) for path in generators]
    contents.add_ranks("rng", [_renamed_generators(contents, state) for state in states] or [{}])
    step = states[0].get("step", 0) if states else 0
    iteration = contents.step if folder.name.startswith("checkpoint_") else 0
    contents.add("accelerator", {"step": int(step), "iteration": int(iteration or 0)})
    for i in range(_LOADERS):  # the folder does not say how many the program has
        position = {"epoch": 0, "generators": {}}
        contents.add_ranks("loader" if i == 0 else f"loader_{i}", [position])
    contents.notes.append(
        "epochs and positions of dataloaders are not carried over; the program skips to its place "
        "in the data, as with Accelerate's own load_state"
    )
    read = {path.name for path in (*further, *schedulers, *custom, *generators)}
    read |= set() if (folder / "optimizer_0").is_dir() else {"optimizer.bin"}
    contents.notes += [
        f"{path.name} is not read"
        for path in sorted(folder.iterdir())
        if _OF_ACCELERATE.fullmatch(path.name) and path.name not in read
    ]


def _weights(contents: Contents, folder: Path, scratch: Path, stack: ExitStack) -> dict[str, Any]:
    sharded = folder / f"{_MODEL}_0"
    if sharded.is_dir():
        weights = stack.enter_context(stored(sharded, scratch=scratch)).state.get("model", {})
        path = sharded
    else:
        full = folder / f"{_MODEL}.bin"
        found = full if full.is_file() else find_weights(folder)
        if found is None:
            raise LoadError(
                f"{folder} holds no weights that can be read (model.safetensors, pytorch_model.bin "
                f"or {_MODEL}_0); DeepSpeed's are first made one file by its zero_to_fp32.py"
            )
        weights, path = read_weights(found), found
        if is_adapter(path):
            weights = named_as_in_the_model(weights, folder)
    contents.add_model(weights)
    # Files of safetensors have their names in another order than the module.
    return {} if path.suffix != ".bin" else dict(weights)


def _add_optimizer(
    contents: Contents,
    folder: Path,
    name: str,
    weights: Mapping[str, Any],
    scratch: Path,
    stack: ExitStack,
) -> bool:
    sharded = folder / "optimizer_0"
    if sharded.is_dir():
        state = stack.enter_context(stored(sharded, scratch=scratch)).state.get("optimizer")
    elif (folder / name).is_file():
        state = _read(contents, folder / name)
    else:
        contents.notes.append(f"there is no {name}: training would resume with a new optimizer")
        return False
    if state is None or not is_optimizer(state):
        raise LoadError(f"{folder}: its optimizer has a form that is not known")
    contents.add_optimizer(state, "optimizer", weights)
    return True


def _read(contents: Contents, path: Path) -> Any:
    value, left_out = read_torch(path)
    contents.leave_out({f"{path.name}: {key}": kind for key, kind in left_out.items()})
    return value


def _by_rank(folder: Path, stem: str, suffix: str) -> list[Path]:
    """The files of all ranks, in their order; or the one of a process that was alone."""
    alone = folder / f"{stem}{suffix}"
    if alone.is_file():
        return [alone]

    return _numbered(folder, stem, suffix)


def _numbered(folder: Path, stem: str, suffix: str, *, first: int = 0) -> list[Path]:
    """Files with numbers, as long as there is a next one."""
    paths = (folder / f"{stem}_{number}{suffix}" for number in count(first))
    return list(takewhile(Path.is_file, paths))


def _generators(contents: Contents, path: Path) -> dict[str, Any]:
    return _renamed_generators(contents, _read(contents, path))


_GENERATORS = {
    "python": "python",
    "random_state": "python",
    "numpy": "numpy",
    "numpy_random_seed": "numpy",
    "cpu": "torch",
    "torch_manual_seed": "torch",
    "cuda": "cuda",
    "torch_cuda_manual_seed": "cuda",
}


def _renamed_generators(contents: Contents, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators as an `RngState` has them."""
    found: dict[str, Any] = {}
    for name, value in saved.items():
        ours = _GENERATORS.get(name)
        if ours == "cuda":
            found["cuda"] = value if isinstance(value, list) else [value]
        elif ours is not None:
            found[ours] = value
        elif name != "step":
            contents.notes.append(f"the random number generator {name!r} is not carried over")
    return found


# --- torchtitan -------------------------------------------------------------------------------


def titan(contents: Contents, saved: dict[str, Any]) -> None:
    """The content of a ``step-500`` of torchtitan, whose model has no name of its own."""
    saved = dict(saved)
    progress = saved.pop("train_state", None)
    optimizer = saved.pop("optimizer", None)
    scheduler = saved.pop("lr_scheduler", None)
    data = saved.pop("dataloader", None)
    contents.add_model(saved)
    if optimizer is not None:
        contents.add_optimizer(flat_groups(optimizer))
    if scheduler is not None:
        contents.add("scheduler", scheduler)
        if isinstance(scheduler, Mapping) and set(scheduler) == {"last_epoch"}:
            contents.notes.append(
                "scheduler: torchtitan saves its last_epoch alone; schedulers of torch.optim need "
                "more, so pass keep=('scheduler',) to restore, and set last_epoch"
            )
    if isinstance(progress, Mapping):
        contents.add("train_state", dict(progress))
        if "step" in progress:
            contents.step = int(progress["step"])
    if data is not None:
        contents.add("dataloader", data)
        contents.notes.append(
            "dataloader: positions are carried over as torchtitan pickled them; only its own "
            "loaders read them"
        )


def flat_groups(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer of which each value has a name of its own
    (``flatten_optimizer_state_dict``). Parameters whose options are equal form a group.

    Raises:
        LoadError: it has another form.
    """
    if is_optimizer(flat):
        return dict(flat)
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name, _, entry = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise LoadError(f"optimizer: {key!r} is no part of an optimizer's state")
        (state if kind == "state" else options).setdefault(name, {})[entry] = value
    groups: dict[str, dict[str, Any]] = {}
    for name, chosen in options.items():
        alike = repr(sorted(chosen.items()))
        groups.setdefault(alike, {"params": [], **chosen})["params"].append(name)
    return {"state": state, "param_groups": list(groups.values())}
