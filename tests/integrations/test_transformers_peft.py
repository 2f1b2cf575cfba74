"""A Trainer of a model with an adapter of PEFT: the adapter is saved, and the base model is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from _huggingface import STEPS, At, Data, Interrupt, interrupt, losses, make_model
from _huggingface import make_trainer as make

import pyckpt
from pyckpt.convert import import_checkpoint

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")


def adapted(*, base: int = 0, second: bool = False) -> Any:
    """A model whose attention has an adapter, and whose output is trained as a whole.

    Args:
        base: a number that the weights of the base model depend on.
        second: whether there is another adapter, which is not trained.
    """
    model = make_model()
    with torch.no_grad():
        model.transformer.wpe.weight.add_(base)
    config = peft.LoraConfig(
        r=2,
        lora_dropout=0.1,
        target_modules=["c_attn"],
        modules_to_save=["ln_f"],
        task_type="CAUSAL_LM",
        fan_in_fan_out=True,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    if second:
        model.add_adapter("second", config)
    return model


def start(directory: Path, stop: int, **arguments: Any) -> None:
    arguments.setdefault("model", adapted())
    trainer = make(directory, callbacks=[At(stop, interrupt)], **arguments)
    with pytest.raises(Interrupt):
        trainer.train()


def resume(directory: Path, **arguments: Any) -> Any:
    trainer = make(directory, model=adapted(), **arguments)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    return trainer


@pytest.mark.parametrize("kind", [None, transformers.Trainer], ids=["ours", "stock"])
def test_resumed(kind: Any, tmp_path: Path) -> None:
    """From a checkpoint of ours, and from one that Transformers' own Trainer saved."""
    whole = make(tmp_path / "whole", model=adapted(), save_strategy="no")
    whole.train()
    start(tmp_path / "run", 17, **({} if kind is None else {"kind": kind}))
    found = resume(tmp_path / "run")
    assert losses(found) == losses(whole)
    for (name, one), two in zip(
        found.model.named_parameters(), whole.model.parameters(), strict=True
    ):
        assert torch.equal(one, two), name


def test_imported(tmp_path: Path) -> None:
    start(tmp_path / "own", 17, kind=transformers.Trainer)
    report = import_checkpoint(tmp_path / "own" / "checkpoint-15", tmp_path / "run")
    assert report.step == 15
    whole = make(tmp_path / "whole", model=adapted(), save_strategy="no")
    whole.train()
    assert losses(resume(tmp_path / "run")) == losses(whole)


def test_the_base_model_is_not_saved(tmp_path: Path) -> None:
    model = adapted(second=True)
    start(tmp_path, 7, model=model)
    saved = pyckpt.load(tmp_path / "step-00000005")["model"]
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {*saved} == trained
    assert all("default" in name for name in trained)
    # Nor is it changed by a load.
    other = adapted(base=1, second=True)
    begun: dict[str, torch.Tensor] = {}

    class Look(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.update({name: one.clone() for name, one in other.state_dict().items()})

    make(tmp_path, model=other, max_steps=6, callbacks=[Look()]).train(resume_from_checkpoint=True)
    for name, value in saved.items():
        assert torch.equal(begun[name], value), name
    base = "base_model.model.transformer.wpe.weight"
    assert torch.equal(begun[base], adapted(base=1).state_dict()[base])


def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        model=adapted(),
        eval_data=Data(8),
        eval_strategy="steps",
        eval_steps=5,
        load_best_model_at_end=True,
        learning_rate=0.5,
    )
    trainer.train()
    evaluations = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    assert trainer.evaluate()["eval_loss"] == min(evaluations)


def test_the_adapter_is_exported(tmp_path: Path) -> None:
    """By Transformers' own save_model, as ever."""
    trainer = make(tmp_path / "run", model=adapted(), max_steps=5)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    found = peft.PeftModel.from_pretrained(make_model(), tmp_path / "adapter")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
