"""A Trainer of Transformers that saves and resumes through `pyckpt.Checkpointer`. ::

    from pyckpt.integrations.transformers import Trainer  # in place of transformers' own

`CheckpointerMixin` does the same for other classes that derive from ``transformers.Trainer``.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from pyckpt.integrations.versions import require

require("transformers", minimum="5.20", below="6", extra="transformers")

# ruff: noqa: E402
import torch
import transformers
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.first import on_first
from pyckpt.train.arguments import directory_of
from pyckpt.train.finder import Finder
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store.catalog import directory_name

__all__ = ["CheckpointerMixin", "Trainer"]

_logger = logging.getLogger("pyckpt")

_PART = "trainer"
"""The name in a checkpoint of what belongs to the Trainer itself."""
_BEST = "best"
"""The metric by which the best checkpoint is kept: its step if it was the best when it was saved,
else not a number. So ties are decided as the Trainer decides them."""


@dataclass(frozen=True)
class _Source:
    """A checkpoint of pyckpt to resume from; ``trainer`` is what it holds of the Trainer."""

    path: Path
    step: int
    any_older: bool
    """Whether an older one may be loaded in its place, if this one proves corrupt."""
    trainer: dict[str, Any]


class _OtherStep(Exception):
    """Another checkpoint was restored than the one that training was prepared for."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class CheckpointerMixin:
    """Saves and resumes a Trainer through `pyckpt.Checkpointer`. ::

        class MyTrainer(CheckpointerMixin, SFTTrainer): ...

    The arguments of ``TrainingArguments`` keep their meaning: ``save_strategy``, ``save_steps``,
    ``save_total_limit``, ``load_best_model_at_end``, ``save_only_model``. Checkpoints are
    directories ``step-00000100`` in ``output_dir``. They hold the model, the optimizer, the
    scheduler, the scaler, each rank's random generators, the Trainer's state with its callbacks,
    and the loss since the last log. A save goes on while training does. The next step raises the
    error of one that failed, on all ranks.

    ``train(resume_from_checkpoint=True)`` resumes from the newest checkpoint that is valid on all
    ranks. The argument may also be the path of one, or of a directory that holds some, or of a
    checkpoint in the Trainer's own format.

    Args:
        checkpointer: further arguments of `pyckpt.Checkpointer`, such as
            ``{"on_signals": ("SIGTERM",)}``. Other arguments are those of the Trainer.

    Raises:
        ValueError: the Trainer's arguments ask for something that cannot be saved; says what.
    """

    def __init__(
        self, *args: Any, checkpointer: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._options = dict(checkpointer or {})
        self._checkpointer: pyckpt.Checkpointer | None = None
        self._source: _Source | None = None
        self._rng: dict[str, Any] = {}
        self._stepped = 0  # the last step that the Checkpointer was told of
        self._saved: set[int] = set()
        self._loss = _RunningLoss(self)
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self._me.add_callback(_Callback(self))

    @property
    def _me(self) -> Any:
        """This object, as the Trainer that it is."""
        return self

    # --- from where to resume ---------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As of the Trainer; see the class for ``resume_from_checkpoint``.

        Raises:
            FileNotFoundError: there is nothing to resume from.
            OSError, PyckptError: a save failed, or the checkpoint cannot be loaded.
        """
        found: str | _Source | None = None
        if resume_from_checkpoint is True:
            found = on_first(self._newest)
        elif resume_from_checkpoint:
            path = resume_from_checkpoint
            found = on_first(lambda: _source_at(Path(path).expanduser()) or str(path))
        else:
            on_first(self._tell_earlier_runs)
        with tempfile.TemporaryDirectory(prefix="pyckpt-resume-") as folder:
            self._folder = Path(folder)
            self._source = found if isinstance(found, _Source) else None
            resume = found if self._source is None else self._prepare_folder()
            try:
                return super().train(resume, trial, ignore_keys_for_eval)  # type: ignore[misc]
            finally:
                self._source = None

    def _newest(self) -> str | _Source:
        """The newest checkpoint in the output directory, of either format."""
        directory = Path(self._me.args.output_dir)
        theirs: str | None = None
        if directory.is_dir():
            theirs = get_last_checkpoint(directory)  # type: ignore[no-untyped-call]
        step = -1 if theirs is None else int(theirs.rpartition("-")[2])
        ours = _newest_in(directory)
        if ours is not None and ours.step >= step:
            return ours
        if theirs is not None:
            return theirs
        entries = Finder(directory, "auto", None).inspect()
        what = "; ".join(str(entry) for entry in entries[:5])
        raise FileNotFoundError(
            2,
            "resume_from_checkpoint=True, and there is no valid checkpoint"
            + (f" ({what})" if what else ""),
            str(directory),
        )

    def _prepare_folder(self) -> str:
        """Write the file that the Trainer reads its state from; warn if the data is another."""
        assert self._source is not None
        state = json.loads(self._source.trainer["state"])
        best = state.get("best_global_step")
        if best and state.get("best_model_checkpoint"):
            # The directory may have been moved since.
            state["best_model_checkpoint"] = str(self._source.path.parent / directory_name(best))
        text = json.dumps(state)
        (self._folder / "trainer_state.json").write_text(text, encoding="utf-8")
        saved, now = json.loads(self._source.trainer["run"]), self._run()
        differing = [
            f"{key} was {saved[key]} and is {now[key]}"
            for key in now
            if key in saved and saved[key] != now[key]
        ]
        if differing and self._me.args.process_index == 0:
            _logger.warning(
                "%s: training goes on at the same step, and not with the same data: %s",
                self._source.path,
                "; ".join(differing),
            )
        return str(self._folder)

    def _run(self) -> dict[str, Any]:
        """What decides which examples a step has."""
        args = self._me.args
        data = self._me.train_dataset
        return {
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "examples of a step": self._me.get_total_train_batch_size(args),
            "examples": len(data) if hasattr(data, "__len__") else None,
        }

    def _tell_earlier_runs(self) -> None:
        directory = Path(self._me.args.output_dir)
        saves = self._me.args.save_strategy != "no"
        newest = Finder(directory, "auto", None).latest() if saves and directory.is_dir() else None
        if newest is not None:
            _logger.warning(
                "training begins, and %s is of an earlier run; resume_from_checkpoint=True will "
                "find it until this run saves a later step. Move it away to keep the two apart",
                newest.path,
            )

    # --- the run ----------------------------------------------------------------------------------

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        with self._open(trial):
            while True:
                try:
                    return super()._inner_training_loop(  # type: ignore[misc]
                        batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                    )
                except _OtherStep as other:
                    assert self._source is not None
                    path = self._source.path.parent / directory_name(other.step)
                    self._source = _source_of(path, other.step, any_older=True)
                    self._prepare_folder()

    @contextmanager
    def _open(self, trial: Any) -> Iterator[None]:
        limit = self._me.args.save_total_limit
        keep: dict[str, Any] = {}
        if limit is not None and limit > 0:
            keep = {"keep_last": limit, "keep_best": (_BEST, 1, "max")}
        elif "keep_last" in self._options:
            keep = {"keep_best": (_BEST, 1, "max")}
        directory = self._me._get_output_dir(trial)
        self._stepped = 0
        self._saved = set()
        with pyckpt.Checkpointer(directory, **{**keep, **self._options}) as checkpointer:
            self._checkpointer = checkpointer
            try:
                yield
            finally:
                self._checkpointer = None

    def _state(self) -> dict[str, Any]:
        """The objects of a checkpoint, by name."""
        model = self._me.model
        # Of an adapter, the base model is not saved.
        is_adapter = any(one.__module__.split(".")[0] == "peft" for one in type(model).__mro__)
        state: dict[str, Any] = {
            "model": pyckpt.Trainable(model) if is_adapter else model,
            _PART: _TrainerPart(self),
        }
        if self._me.args.save_only_model:
            return state
        state |= {
            "optimizer": self._me.optimizer,
            "scheduler": self._me.lr_scheduler,
            "loss": pyckpt.PerRank(self._loss, merge=_mean),
            "rng": pyckpt.RngState(),
        }
        scaler = getattr(self._me.accelerator, "scaler", None)
        return state if scaler is None else state | {"scaler": scaler}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        checkpointer = self._checkpointer
        if checkpointer is None:
            raise RuntimeError("a checkpoint can only be saved during train()")
        me, step = self._me, self._me.state.global_step
        if me.hp_search_backend is None and trial is None:
            me.store_flos()
        best = me.state.best_global_step
        if best and (best == step or best in self._saved):
            me.state.best_model_checkpoint = str(checkpointer.directory / directory_name(best))
        if best in self._saved and best != step:
            checkpointer.protect(best)  # it became the best after it was saved
        self._saved.add(step)
        checkpointer.save(step, self._state(), metrics=self._metrics())
        checkpointer.wait_staged()  # callbacks change parameters between steps, too

    def _metrics(self) -> dict[str, float]:
        """The metrics of the evaluation at this step, if there was one."""
        state = self._me.state
        of_this_step = takewhile(
            lambda entry: entry.get("step", -1) >= state.global_step, reversed(state.log_history)
        )
        found: dict[str, float] = {}
        for entry in of_this_step:  # the latest first
            for name, value in entry.items():
                if name.startswith("eval_") and isinstance(value, int | float):
                    found.setdefault(name, float(value))
        is_best = state.best_global_step == state.global_step
        return {**found, _BEST: float(state.global_step) if is_best else math.nan}

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        checkpointer, step = self._checkpointer, self._me.state.global_step
        if checkpointer is None:
            return
        if step > self._stepped:  # the end of an epoch is the same step again
            self._stepped = step
            if checkpointer.step(step, self._state(), metrics=self._metrics()) is not None:
                self._saved.add(step)
                checkpointer.wait_staged()
        if checkpointer.stop_requested:
            self._me.control.should_training_stop = True

    # --- restoring --------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._source is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore everything at once, since from here on everything is there."""
        source = self._source
        if source is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        assert self._checkpointer is not None
        state = self._state()
        if json.loads(source.trainer["run"]).get("save_only_model"):
            _logger.warning("%s holds the model alone; the rest begins anew", source.path)
            state = {"model": state["model"]}
        exactly = None if source.any_older else source.step
        if self._checkpointer.directory == source.path.parent:
            step = self._checkpointer.restore(state, step=exactly, required=True)
        else:
            with pyckpt.Checkpointer(source.path.parent) as other:
                step = other.restore(state, step=exactly, required=True)
        if step != source.step:
            assert step is not None
            raise _OtherStep(step)
        self._stepped = step
        # Until the first batch is there, the Trainer draws numbers.
        self._rng = pyckpt.RngState().state_dict()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            pyckpt.RngState().load_state_dict(self._rng)

    def _load_best_model(self) -> None:
        path = Path(self._me.state.best_model_checkpoint)
        if _step_of(path) is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        assert self._checkpointer is not None
        self._checkpointer.wait()
        AppState({"model": self._state()["model"]}).load(pyckpt.DirectReader(path))


class Trainer(CheckpointerMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, with the checkpoints of `CheckpointerMixin`."""


class _TrainerPart:
    """The Trainer's own state, as an object of a training state."""

    def __init__(self, trainer: CheckpointerMixin) -> None:
        self._mixin = trainer
        self._trainer = trainer._me

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = asdict(trainer.state)
        callbacks: dict[str, Any] = {}
        for one in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(one, ExportableState):
                name = type(one).__name__
                if name in callbacks:  # several of a class
                    before = callbacks[name]
                    callbacks[name] = [*(before if isinstance(before, list) else [before])]
                    callbacks[name].append(one.state())
                else:
                    callbacks[name] = one.state()
        state["stateful_callbacks"] = callbacks
        run = {**self._mixin._run(), "save_only_model": trainer.args.save_only_model}
        return {"state": json.dumps(state), "run": json.dumps(run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # the Trainer has read it by itself, from a file


class _RunningLoss:
    """The loss of a rank since the last log. Without it, the first loss that is logged after a
    resume is the mean of fewer steps."""

    def __init__(self, trainer: CheckpointerMixin) -> None:
        self._trainer = trainer._me
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        sum_of_losses = getattr(trainer, "_tr_loss", None)
        if sum_of_losses is None:
            return {"sum": torch.zeros(()), "since": 0}
        return {"sum": sum_of_losses, "since": trainer._globalstep_last_logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = {"sum": state["sum"].clone(), "since": state["since"]}

    def begin(self) -> None:
        """Training begins, and the Trainer has set its sums to zero."""
        if self._loaded is None:
            return
        trainer, loaded, self._loaded = self._trainer, self._loaded, None
        trainer._tr_loss += loaded["sum"].to(trainer._tr_loss)
        trainer._globalstep_last_logged = loaded["since"]
        # What train() returns is the mean of its own steps.
        trainer._total_loss_scalar -= trainer.accelerator.gather(trainer._tr_loss).mean().item()


class _Callback(TrainerCallback):  # type: ignore[misc]
    """What happens at the Trainer's own events."""

    def __init__(self, trainer: CheckpointerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._loss.begin()


def _refuse_unsupported(trainer: Any) -> None:
    args = trainer.args
    told = {
        "is_deepspeed_enabled": "DeepSpeed saves its engine by itself: use transformers.Trainer",
        "is_fsdp_xla_enabled": "FSDP of XLA is not supported: use transformers.Trainer",
    }
    for name, what in told.items():
        if getattr(trainer, name, False):
            raise ValueError(what)
    if args.save_on_each_node:
        raise ValueError(
            "save_on_each_node=True: a checkpoint is one directory, on a file system that all "
            "nodes share; take the argument away"
        )
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint=True: pass checkpointer={'on_signals': ('SIGTERM',)} to the "
            "Trainer in its place"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={args.hub_strategy!s} pushes files that a checkpoint does not have; use "
            "hub_strategy='end'"
        )


def _step_of(path: Path) -> int | None:
    """The step in the name of a checkpoint's directory; None for another name."""
    number = path.name.removeprefix("step-")
    if path.name == number or not number.isdecimal():
        return None
    return int(number) if path.name == directory_name(int(number)) else None


def _newest_in(directory: Path) -> _Source | None:
    """The newest valid checkpoint of pyckpt in a directory, if it has one."""
    if not directory.is_dir():
        return None
    newest = Finder(directory, "auto", None).latest()
    return None if newest is None else _source_of(newest.path, newest.step, any_older=True)


def _source_at(path: Path) -> _Source | None:
    """The checkpoint of pyckpt at a path, or the newest in it; None if there is none."""
    step = _step_of(path)
    if step is not None:
        path = directory_of(path)
        entries = {entry.path: entry for entry in Finder(path.parent, "auto", None).inspect()}
        entry = entries.get(path)
        if entry is None or entry.checkpoint is None:
            what = "there is no such directory" if entry is None else f"{entry.state}"
            why = "" if entry is None else f": {entry.reason}"
            raise FileNotFoundError(2, f"no valid checkpoint ({what}{why})", str(path))
        return _source_of(path, step, any_older=False)
    if (path / ".metadata").exists():
        raise LoadError(
            f"{path} is not named as a checkpoint of a Trainer is, such as {directory_name(100)}; "
            "if it is one that was renamed, give it its name again"
        )
    return _newest_in(path)


def _source_of(path: Path, step: int, *, any_older: bool) -> _Source:
    part: dict[str, Any] = {_PART: {"state": None, "run": None}}
    try:
        pyckpt.load(part, path, unexpected="ignore", no_dist=True)
    except LoadError as error:
        raise LoadError(
            f"{path} was not saved by a Trainer: it has no state of one. Its model alone can be "
            f"loaded, with pyckpt.load({{'model': model}}, path, unexpected='ignore')"
        ) from error
    return _Source(path, step, any_older, part[_PART])


def _mean(states: list[Any], rank: int, world_size: int) -> Any:
    """A `_RunningLoss` on another number of ranks: their mean, which is what is logged."""
    total = torch.stack([state["sum"].float() for state in states]).mean()
    return {"sum": total, "since": states[0]["since"]}
