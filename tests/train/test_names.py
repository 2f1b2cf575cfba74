"""The names of checkpoints' directories."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyckpt import Checkpointer
from pyckpt.train.store.names import DEFAULT, Naming


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("step-{:08d}", "step-00000100"),
        ("checkpoint-{}", "checkpoint-100"),
        ("step-{}", "step-100"),
        ("{}", "100"),
        ("epoch{:03d}.ckpt", "epoch100.ckpt"),
    ],
)
def test_names_and_steps(pattern: str, name: str) -> None:
    naming = Naming(pattern)
    assert naming.name(100) == name
    assert naming.step_of(name) == 100


@pytest.mark.parametrize(
    "name",
    [
        "step-000000100",  # another name of 100
        "step-0100",
        "step-\u0660\u0660\u0660\u0660\u0660\u0661\u0660\u0660",
        "step--0000100",
        "step-00000100\n",
        " step-00000100",
        "step-" + "9" * 200,
        "step-1_000_000_000",
        "",
    ],
)
def test_other_names_are_no_steps(name: str) -> None:
    assert DEFAULT.step_of(name) is None


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "step", "{}-{}", "a/{}", ".hidden-{}", "{", "a\0{}"),
        *("{0}", "{:d}", "{:8d}", "{!r}", "{:08x}", "{step}"),
        *("x" * 250 + "{}", "{:099d}" + "x" * 200),
    ],
)
def test_patterns_that_are_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="naming="):
        Checkpointer(tmp_path, naming=pattern)


def test_a_pattern_that_is_no_string(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="naming"):
        Checkpointer(tmp_path, naming=3)  # type: ignore[arg-type]


@given(st.text(max_size=30))
def test_each_step_has_one_name(text: str) -> None:
    for naming in (DEFAULT, Naming("checkpoint-{}"), Naming.of(text)):
        for name in (text, f"checkpoint-{text}", f"step-{text}"):
            step = None if naming is None else naming.step_of(name)
            if naming is not None and step is not None:
                assert naming.name(step) == name


def save(directory: Path, *steps: int, naming: str | None) -> None:
    with Checkpointer(directory, naming=naming) as checkpointer:
        for step in steps:
            checkpointer.save(step, {"w": torch.full((3,), step)})


def test_other_programs_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 5, 20, naming="checkpoint-{}")
    (tmp_path / "checkpoint-100").mkdir()
    (tmp_path / "checkpoint-100" / "model.safetensors").touch()  # a Trainer's own
    assert sorted(os.listdir(tmp_path)) == [
        ".pyckpt",
        "checkpoint-100",
        "checkpoint-20",
        "checkpoint-5",
    ]
    state = {"w": torch.zeros(3)}
    with Checkpointer(tmp_path, naming="checkpoint-{}", keep_last=1) as checkpointer:
        assert checkpointer.restore(state) == 20
        checkpointer.save(30, {"w": torch.ones(3)})
    assert state["w"][0] == 20
    assert sorted(os.listdir(tmp_path)) == [".pyckpt", "checkpoint-100", "checkpoint-30"]
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(state) is None
        states = {entry.path.name: entry.state for entry in checkpointer.inspect()}
    assert states == {"checkpoint-100": "foreign", "checkpoint-30": "foreign"}
    assert "naming='checkpoint-{}' finds checkpoint-30" in caplog.text
