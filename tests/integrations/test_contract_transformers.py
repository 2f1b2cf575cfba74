"""What `pyckpt.integrations.transformers` uses of Transformers besides its documentation. A test
that fails here names what a release has changed."""

from __future__ import annotations

import inspect

import pytest
import transformers
from transformers import trainer_callback, trainer_utils

# Methods that are overridden, with the arguments that they are called with.
OVERRIDDEN = {
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "_inner_training_loop": [
        "batch_size",
        "args",
        "resume_from_checkpoint",
        "trial",
        "ignore_keys_for_eval",
    ],
    "_save_checkpoint": ["model", "trial"],
    "_maybe_log_save_evaluate": None,
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_scaler": ["checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "_load_best_model": [],
}
CALLED = {"_get_output_dir": ["trial"], "get_total_train_batch_size": ["args"], "store_flos": []}
ATTRIBUTES = [
    "_tr_loss",
    "_globalstep_last_logged",
    "_total_loss_scalar",
    "callback_handler",
    "hp_search_backend",
    "is_deepspeed_enabled",
    "is_fsdp_xla_enabled",
]


@pytest.mark.parametrize("name", [*OVERRIDDEN, *CALLED])
def test_methods_of_the_trainer(name: str) -> None:
    method = getattr(transformers.Trainer, name, None)
    assert method is not None, f"Trainer has no {name} any more"
    expected = {**OVERRIDDEN, **CALLED}[name]
    if expected is not None:
        found = list(inspect.signature(method).parameters)[1:]
        assert found == expected, f"Trainer.{name} takes other arguments"


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_the_trainer(name: str) -> None:
    source = inspect.getsource(transformers.Trainer)
    assert f"self.{name} = " in source, f"Trainer sets no {name} any more"


def test_the_loop_restores_in_the_order_that_is_counted_on() -> None:
    prepare = inspect.getsource(transformers.Trainer._prepare_for_training)
    assert prepare.index("self.create_scheduler(") < prepare.index("_load_optimizer_and_scheduler(")
    epoch = inspect.getsource(transformers.Trainer._run_epoch)
    fetch = epoch.index("batch_samples, num_items_in_batch = self.get_batch_samples(")
    assert fetch < epoch.rindex("self._load_rng_state(resume_from_checkpoint)")


def test_states_of_callbacks() -> None:
    assert issubclass(trainer_callback.TrainerControl, trainer_callback.ExportableState)
    state = trainer_callback.TrainerState()
    for name in ("best_global_step", "best_model_checkpoint", "stateful_callbacks", "log_history"):
        assert hasattr(state, name), f"TrainerState has no {name} any more"
    assert callable(trainer_utils.get_last_checkpoint)
