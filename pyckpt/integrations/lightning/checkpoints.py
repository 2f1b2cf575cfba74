"""Checkpoints: a callback that saves and resumes a Trainer, in any strategy."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

import pyckpt
from pyckpt.integrations.lightning.contents import Contents, Later, Template, dump
from pyckpt.train.arguments import directory_of, whole
from pyckpt.train.finder import Finder
from pyckpt.train.handle import SaveHandle
from pyckpt.train.restorer import First, LoadOptions
from pyckpt.train.state.per_rank import Merge
from pyckpt.train.store.retention import Best

__all__ = ["Checkpoints"]


class Checkpoints(Checkpoint):
    """Saves all of a training run as it goes, removes old checkpoints, and resumes the run. ::

        trainer = Trainer(callbacks=[Checkpoints("runs/a", every_steps=100, keep_last=3)])
        trainer.fit(model)  # goes on from the newest valid checkpoint, if there is one

    It works in any strategy, and takes the place of ``ModelCheckpoint``. Saves are asynchronous,
    sharded where the strategy shards, and atomic. Besides what Lightning saves, they hold each
    rank's metrics and random number generators, and the positions of dataloaders that have a
    ``state_dict``. If a background save fails, the Trainer raises its error at the next step.

    With neither ``every_steps``, ``every_epochs`` nor ``every_minutes``, it saves after each epoch.
    It also saves at the end of training; and after each validation if ``keep_best`` is given.

    If ``ckpt_path`` is given to ``fit``, Lightning restores that, and this callback nothing.

    Args:
        directory: of the checkpoints, one on all ranks; see `Checkpointer`.
        every_steps: save whenever ``trainer.global_step`` has reached the next multiple of this.
        every_epochs: save after so many epochs.
        every_minutes: save if the last save began so many minutes ago, by the clock of rank 0.
        keep_last: how many of the newest checkpoints to keep; None keeps all.
        keep_every: also keep those whose step is a multiple of this.
        keep_best: ``(metric, n, mode)``: also keep the n with the smallest (mode "min") or largest
            ("max") value of a metric that the module logs.
        on_signals: signals, such as "SIGTERM", at which all ranks save and training stops. While
            training, Lightning does not see them.
        merge_data: ``merge_data(states, rank, world_size)`` brings the positions of the dataloaders
            to another number of ranks, as for `PerRank`. Without it, resuming on another number is
            refused if there are such positions.
        restore: whether ``fit`` begins with the newest checkpoint of the directory.
        options: other arguments of `Checkpointer`, such as ``when_busy``, ``timeout``, ``direct``.

    Raises:
        TypeError, ValueError: an argument is of the wrong type or out of range. Those that
            `Checkpointer` checks are checked when training begins.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: Best | None = None,
        on_signals: str | signal.Signals | Sequence[str | signal.Signals] = (),
        merge_data: Merge | None = None,
        restore: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_epochs", every_epochs)):
            if value is not None:
                whole(name, value, least=1)
        if every_steps is None and every_epochs is None and every_minutes is None:
            every_epochs = 1
        self.directory = directory_of(directory)
        self._every_steps = every_steps
        self._every_epochs = every_epochs
        self._keep_best = keep_best
        self._signals = on_signals
        self._merge_data = merge_data
        self._restore = restore
        self._options = dict(
            options,
            every_minutes=every_minutes,
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
        )
        self._checkpointer: pyckpt.Checkpointer | None = None
        self._left: set[int] = set()  # steps of an earlier run, which this one does not go on
        self._handlers: dict[int, Any] = {}
        self._later: Later | None = None
        self._step = 0  # the last one that the Checkpointer was told of
        self._saved: int | None = None  # the last one that was saved or restored
        self._validated = False
        # Of that validation, if it is saved with a later step.
        self._metrics: dict[str, float] | None = None
        self._is_over = False  # the state with which another run goes on is saved
        self._least: tuple[Any, Any] | None = None  # the Trainer's, while they are put aside
        self._min_steps: tuple[Any] | None = None  # the Trainer's, while gradients accumulate

    # --- what Lightning asks of a checkpoint callback ---------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The directory of the best checkpoint by ``keep_best``, or else of the newest one; empty
        if there is none. Lightning loads it, for ``ckpt_path="best"``, with a strategy of this
        package."""
        if self._keep_best is None:
            return self.last_model_path
        metric, _, mode = self._keep_best
        found = [
            one
            for one in self._finder().checkpoints()
            if metric in one.metrics and one.step not in self._left
        ]
        sign = 1 if mode == "min" else -1
        best = min(found, key=lambda one: sign * one.metrics[metric], default=None)
        return "" if best is None else str(best.path)

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        # Lightning sets it after a run in processes that it started. It is found on disk.
        pass

    @property
    def last_model_path(self) -> str:
        """The directory of the newest checkpoint; empty if there is none."""
        latest = self._finder().latest()
        return "" if latest is None else str(latest.path)

    def _finder(self) -> Finder:
        return Finder(self.directory, "auto", None)

    # --- the run ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # as ModelCheckpoint does: such a run leaves nothing behind
            return
        self._open(trainer)
        self._later, self._validated, self._saved = None, False, None
        self._is_over = False
        self._step = trainer.global_step
        if self._restore and trainer.ckpt_path is None:
            self._resume(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning has set its own handlers, of which that for SIGTERM ends training unsaved.
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        if trainer.ckpt_path is not None:  # some strategies restore it after on_fit_start
            self._step, self._saved, self._later = trainer.global_step, None, None
        is_elsewhere = trainer.ckpt_path is not None or not self._restore
        if is_elsewhere and self._checkpointer is not None:
            self._left = {*self._checkpointer._begin_at(trainer.global_step)}
        later, self._later = self._later, None
        if later is not None:
            later.restore(trainer)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._checkpointer is not None:
            self._hold(trainer)
        # Lightning would skip what follows the last batch, or a validation, when it resumes.
        if trainer.is_last_batch or _validation_follows(trainer):
            return
        if _is_accumulating(trainer):
            return
        self._step_ended(trainer)
        if _is_ending(trainer):
            self._save_unsaved(trainer)  # within the epoch, which may go on in a longer run
            # Lightning validates when it is stopped. The run that is resumed does not do so here.
            self._is_over = _is_stopped(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self._checkpointer is None:
            return
        self._validated = True
        self._metrics = None
        if _is_accumulating(trainer):  # it is saved after the next step, with this metric
            self._metrics = self._found(trainer)
        elif not trainer.is_last_batch:
            self._step_ended(trainer)
            if _is_ending(trainer):
                self._save_unsaved(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_last_batch:  # training was stopped within the epoch
            if _is_ending(trainer):  # by a hook that came after those of this callback
                with _as_within_epoch(trainer):
                    self._save_unsaved(trainer)
            return
        every, most = self._every_epochs, trainer.max_epochs
        done = trainer.current_epoch + 1
        # At the end callbacks may change the weights, to averaged ones.
        ends = trainer.should_stop or (most is not None and 0 <= most <= done)
        if ends or _made_all_steps(trainer) or (every is not None and done % every == 0):
            self._save_unsaved(trainer)
        self._step_ended(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_unsaved(trainer)
        # Before the strategy moves the module and the optimizers away.
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        self._put_back(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._put_back(trainer)
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(type(exception), exception, exception.__traceback__)

    # --- saving and resuming ----------------------------------------------------------------------

    def _open(self, trainer: Trainer) -> None:
        self._close()
        before = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._checkpointer = pyckpt.Checkpointer(
            self.directory,
            save_when=self._is_due if self._every_steps is not None else None,
            on_signals=self._signals,
            **self._options,
        )
        # Lightning remembers the handlers that it finds now, and puts them back at the end.
        for number, handler in before.items():
            now = signal.getsignal(number)
            if now != handler:
                self._handlers[number] = now
                signal.signal(number, handler)

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _is_due(self, step: int) -> bool:
        # Several optimizers make several steps of a batch, so steps may pass over a multiple.
        assert self._every_steps is not None
        return step // self._every_steps > self._step // self._every_steps

    def _resume(self, trainer: Trainer) -> None:
        assert self._checkpointer is not None
        template = Template(trainer, fitting=True, merge_data=self._merge_data)
        strict = trainer.lightning_module.strict_loading
        options = LoadOptions(
            missing="error" if strict else "keep",
            unexpected="error" if strict else "ignore",
        )
        first = First(objects, template.prepare) if (objects := template.first) else None
        restored = self._checkpointer._restore(template.objects, options, first=first)
        if restored is None:
            return
        self._later = template.apply()
        self._step = self._saved = restored

    def _contents(self, trainer: Trainer) -> Contents:
        return Contents(trainer.strategy, partial(dump, trainer))

    def _step_ended(self, trainer: Trainer) -> None:
        """Save if a save is due."""
        step = trainer.global_step
        if self._checkpointer is None:
            return
        if self._validated and self._keep_best is not None and not self._is_over:
            self._save(trainer)
        self._validated = False
        if step <= self._step:  # gradients are being accumulated, or it was saved already
            return
        handle = self._checkpointer.step(step, self._contents(trainer), metrics=None)
        self._note(step, handle)
        strategy = trainer.strategy
        optimizers = {f"optimizer_{i}": one for i, one in enumerate(strategy.optimizers)}
        self._checkpointer._step_ended({"model": strategy.model, **optimizers})
        if self._checkpointer.stop_requested:
            self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        """End training, also if ``min_epochs`` or ``min_steps`` are not reached: whoever sent the
        signal will not wait for these."""
        loop = trainer.fit_loop
        if self._least is None:
            self._least = (loop.min_epochs, loop.epoch_loop.min_steps)
        loop.min_epochs = loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def _hold(self, trainer: Trainer) -> None:
        """While gradients are being accumulated, keep training from being stopped: they are not
        saved. Whoever stops it does so by a flag, at which Lightning looks once the minimum of
        steps is made."""
        loop = trainer.fit_loop.epoch_loop
        held, self._min_steps = self._min_steps, None
        if held is not None:
            (loop.min_steps,) = held
        if _is_accumulating(trainer):
            self._min_steps = (loop.min_steps,)
            loop.min_steps = max(loop.min_steps or 0, trainer.global_step + 1)

    def _put_back(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        held, self._min_steps = self._min_steps, None
        if held is not None:
            (loop.epoch_loop.min_steps,) = held
        least, self._least = self._least, None
        if least is not None:
            loop.min_epochs, loop.epoch_loop.min_steps = least

    def _save_unsaved(self, trainer: Trainer) -> None:
        if self._checkpointer is not None and self._saved != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        assert self._checkpointer is not None
        step = trainer.global_step
        metrics = (self._metrics or self._found(trainer)) if self._validated else None
        self._validated = False
        self._note(step, self._checkpointer.save(step, self._contents(trainer), metrics=metrics))

    def _found(self, trainer: Trainer) -> dict[str, float] | None:
        """The present value of the metric by which the best are kept."""
        if self._keep_best is None:
            return None
        metric, found = self._keep_best[0], trainer.callback_metrics
        return {metric: float(found[metric])} if metric in found else None

    def _note(self, step: int, handle: SaveHandle | None) -> None:
        self._step = step
        if handle is not None:
            self._saved = step
            self._left.discard(step)
            # Callbacks change parameters between steps, too: averaged weights come and go.
            assert self._checkpointer is not None
            self._checkpointer.wait_staged()


def _is_accumulating(trainer: Trainer) -> bool:
    """Whether there are gradients that no optimizer step has used yet, and that are not saved."""
    return not trainer.is_last_batch and trainer.fit_loop.epoch_loop._should_accumulate()


def _made_all_steps(trainer: Trainer) -> bool:
    return trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps


def _is_ending(trainer: Trainer) -> bool:
    """Whether training ends here, also within an epoch."""
    return _made_all_steps(trainer) or _is_stopped(trainer)


def _is_stopped(trainer: Trainer) -> bool:
    """Whether Lightning ends training here, since something asked it to."""
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


@contextmanager
def _as_within_epoch(trainer: Trainer) -> Iterator[None]:
    """Have the loop count the epoch as one that goes on. Lightning counts one that was stopped as
    processed, and a run that is resumed from that would skip the rest of it."""
    progress = trainer.fit_loop.epoch_progress
    for count in (progress.current, progress.total):
        count.processed -= 1
    try:
        yield
    finally:
        for count in (progress.current, progress.total):
            count.processed += 1


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates after this batch, which is not the last one."""
    every, epochs = trainer.val_check_batch, trainer.check_val_every_n_epoch
    if not trainer.enable_validation or every is None or every == float("inf"):
        return False
    if epochs is None:
        return bool((trainer.fit_loop.total_batch_idx + 1) % every == 0)
    in_turn = (trainer.current_epoch + 1) % epochs == 0
    return bool(in_turn and (trainer.fit_loop.batch_idx + 1) % every == 0)
