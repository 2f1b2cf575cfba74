"""Checkpoints of every torch since 2.0, as tests/data/make_checkpoints.py made them with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _staging import blank, difference

import pyckpt

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
VERSIONS = sorted(path.name for path in CHECKPOINTS.iterdir())


def test_the_checkpoints_are_here() -> None:
    assert {"2.0.1", "2.1.2", "2.2.2", "2.15.0"} <= set(VERSIONS)


def expected(version: str) -> dict[str, Any]:
    state = {
        "plain": torch.arange(6.0).reshape(2, 3),
        "parameter": torch.full((3,), 0.5),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
        "integers": torch.arange(4),
        "columns": torch.arange(12.0).reshape(3, 4)[:, ::2],
        "nested": {"list": [torch.ones(2), 7], "number": 3, "text": "seven"},
        "sharded": torch.arange(8.0).reshape(4, 2),
        "two_shards": torch.arange(8.0).reshape(4, 2),
    }
    if not version.startswith("2.0."):
        state["dtensor"] = torch.arange(10.0).reshape(5, 2)
    return state


@pytest.mark.parametrize("version", VERSIONS)
def test_load(version: str) -> None:
    wanted = expected(version)
    state = blank(wanted)
    pyckpt.load(state, CHECKPOINTS / version)
    assert not difference(state, wanted)


@pytest.mark.parametrize("version", VERSIONS)
def test_load_into_nothing(version: str) -> None:
    wanted = expected(version)
    state: dict[str, Any] = dict.fromkeys(wanted)
    pyckpt.load(state, CHECKPOINTS / version)
    assert not difference(state, wanted)


@pytest.mark.parametrize("version", VERSIONS)
def test_stock_load_with_our_reader(version: str) -> None:
    wanted = expected(version)
    state = blank(wanted)
    dcp.load(state, storage_reader=pyckpt.DirectReader(CHECKPOINTS / version))
    assert not difference(state, wanted)
