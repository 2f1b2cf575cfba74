"""`CheckpointerMixin`: the Trainer's methods that save and resume, through a `Checkpointer`."""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import transformers

import pyckpt
from pyckpt.errors import LoadError
from pyckpt.integrations.first import on_first
from pyckpt.integrations.transformers.parts import RunningLoss, TrainerPart, mean, run_of
from pyckpt.integrations.transformers.source import (
    PART,
    Source,
    newest,
    source_at,
    source_of,
    step_of,
)
from pyckpt.train.state.app_state import AppState
from pyckpt.train.store.catalog import directory_name
from pyckpt.train.store.pruner import Protection

__all__ = ["CheckpointerMixin", "Trainer"]

_logger = logging.getLogger("pyckpt")

_BEST = "best"
"""The metric by which the best checkpoint is kept: its step if it was the best when it was saved,
else not a number. So ties are decided as the Trainer decides them."""


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
        self._source: Source | None = None
        self._rng: dict[str, Any] = {}
        self._stepped = 0  # the last step that the Checkpointer was told of
        self._saved: set[int] = set()
        self._best: tuple[int, Protection] | None = None  # became the best after it was saved
        self._resumed = False  # from a checkpoint in the directory of this run
        self._loss = RunningLoss(self)
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self._me.add_callback(self._loss)

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
            FileNotFoundError: there is no checkpoint at the path.
            ValueError: there is none in ``output_dir``.
            OSError, PyckptError: a save failed, or the checkpoint cannot be loaded.
        """
        directory = Path(self._me.args.output_dir)
        found: str | Source | None = None
        if resume_from_checkpoint is True:
            found = on_first(lambda: newest(directory))
        elif resume_from_checkpoint:
            path = resume_from_checkpoint
            found = on_first(lambda: source_at(Path(path).expanduser()) or str(path))
        with tempfile.TemporaryDirectory(prefix="pyckpt-resume-") as folder:
            self._folder = Path(folder)
            self._source = found if isinstance(found, Source) else None
            resume = found if self._source is None else self._prepare_folder()
            try:
                return super().train(resume, trial, ignore_keys_for_eval)  # type: ignore[misc]
            finally:
                self._source = None

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
        saved, now = json.loads(self._source.trainer["run"]), run_of(self._me)
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
                    self._source = source_of(path, other.step, any_older=True)
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
        self._best = None
        self._resumed = False
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
            PART: TrainerPart(self),
        }
        if self._me.args.save_only_model:
            return state
        state |= {
            "optimizer": self._me.optimizer,
            "scheduler": self._me.lr_scheduler,
            "loss": pyckpt.PerRank(self._loss, merge=mean),
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
        self._protect_best(checkpointer, best if best in self._saved and best != step else None)
        self._saved.add(step)
        checkpointer.save(step, self._state(), metrics=self._metrics())
        checkpointer.wait_staged()  # callbacks change parameters between steps, too

    def _protect_best(self, checkpointer: pyckpt.Checkpointer, best: int | None) -> None:
        """Keep the checkpoint of one step, which the retention does not know for the best."""
        before = self._best
        if best == (None if before is None else before[0]):
            return
        self._best = None if best is None else (best, checkpointer.protect(best))
        if before is not None:
            before[1].release()

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
        checkpointer, step = self._checkpointer, self._me.state.global_step
        if (
            checkpointer is not None
            and checkpointer.stop_requested
            and step in self._saved
            and self._me.state.epoch % 1
        ):
            # The Trainer takes the stop for the end of the epoch, at a step that was saved for it.
            # Evaluating draws random numbers that the resumed run is not to see.
            self._me.control.should_evaluate = self._me.control.should_save = False
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if checkpointer is None:
            return
        if step > self._stepped:  # the end of an epoch is the same step again
            self._stepped = step
            state = self._state()
            if checkpointer.step(step, state, metrics=self._metrics()) is not None:
                self._saved.add(step)
                checkpointer.wait_staged()
            if self._me.args.save_strategy != "no":
                if state["model"] is self._me.model:
                    # Which shows whether other ranks have the same.
                    state["model"] = self._me.model_wrapped
                checkpointer._step_ended(state)
        if checkpointer.stop_requested:
            self._me.control.should_training_stop = True

    # --- restoring --------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._source is None:
            with _telling_how_to_convert(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore everything at once, since from here on everything is there."""
        source = self._source
        if source is None:
            with _telling_how_to_convert(checkpoint):
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
            self._resumed = True
            # It may have become the best after it was saved, which the checkpoint does not say.
            best = self._me.state.best_global_step
            if best and on_first((source.path.parent / directory_name(best)).is_dir):
                self._saved.add(best)
        else:
            with pyckpt.Checkpointer(source.path.parent) as other:
                step = other.restore(state, step=exactly, required=True)
        if step != source.step:
            assert step is not None
            raise _OtherStep(step)
        self._stepped = step
        # Until the first batch is there, the Trainer draws numbers.
        self._rng = pyckpt.RngState().state_dict()

    def _begin(self) -> None:
        """Training begins at the step of the Trainer's state. Tell the Checkpointer, which may not
        have restored it: what the directory has of later steps is then of another run."""
        if self._checkpointer is not None and not self._resumed:
            self._checkpointer._begin_at(self._me.state.global_step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._source is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            pyckpt.RngState().load_state_dict(self._rng)

    def _load_best_model(self) -> None:
        path = Path(self._me.state.best_model_checkpoint)
        if step_of(path) is None:
            super()._load_best_model()  # type: ignore[misc]
            return
        assert self._checkpointer is not None
        self._checkpointer.wait()
        AppState({"model": self._state()["model"]}).load(pyckpt.DirectReader(path))


class Trainer(CheckpointerMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, with the checkpoints of `CheckpointerMixin`."""


@contextmanager
def _telling_how_to_convert(path: str | None) -> Iterator[None]:
    """The Trainer loads a checkpoint that is not ours."""
    try:
        yield
    except Exception as error:
        if path is None:
            raise
        raise LoadError(
            f"{path} is no checkpoint of pyckpt, and Transformers cannot load it here "
            f"({type(error).__name__}: {error}). If it is one of another framework, or of another "
            f"number of processes, convert it: pyckpt import {path} DIRECTORY"
        ) from error


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
