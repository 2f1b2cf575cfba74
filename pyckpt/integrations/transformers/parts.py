"""What a checkpoint holds of the Trainer itself: its state, and the loss since the last log."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

__all__ = ["RunningLoss", "TrainerPart", "mean", "run_of"]


def run_of(trainer: Any) -> dict[str, Any]:
    """What decides which examples a step has."""
    args = trainer.args
    data = trainer.train_dataset
    return {
        "seed": args.seed if args.data_seed is None else args.data_seed,
        "examples of a step": trainer.get_total_train_batch_size(args),
        "examples": len(data) if hasattr(data, "__len__") else None,
    }


class TrainerPart:
    """The Trainer's own state, as an object of a training state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
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
        # As the Trainer does when it saves, so that a resumed run ends with the same state.
        trainer.state.stateful_callbacks = callbacks
        state = asdict(trainer.state)
        run = {**run_of(trainer), "save_only_model": trainer.args.save_only_model}
        return {"state": json.dumps(state), "run": json.dumps(run)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # the Trainer has read it by itself, from a file


class RunningLoss(TrainerCallback):  # type: ignore[misc]
    """The loss of a rank since the last log. Without it, the first loss that is logged after a
    resume is the mean of fewer steps."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        sum_of_losses = getattr(trainer, "_tr_loss", None)
        if sum_of_losses is None:
            return {"sum": torch.zeros((), device="cpu"), "since": 0}
        return {"sum": sum_of_losses, "since": trainer._globalstep_last_logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = {"sum": state["sum"].clone(), "since": state["since"]}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._begin()
        if self._loaded is None:
            return
        # The Trainer has set its sums to zero.
        trainer, loaded, self._loaded = self._trainer, self._loaded, None
        trainer._tr_loss += loaded["sum"].to(trainer._tr_loss)
        trainer._globalstep_last_logged = loaded["since"]
        # What train() returns is the mean of its own steps.
        trainer._total_loss_scalar -= trainer.accelerator.gather(trainer._tr_loss).mean().item()


def mean(states: list[Any], rank: int, world_size: int) -> Any:
    """A `RunningLoss` on another number of ranks: their mean, which is what is logged."""
    total = torch.stack([state["sum"].float() for state in states]).mean()
    return {"sum": total, "since": states[0]["since"]}
