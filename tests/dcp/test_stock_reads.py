"""Stock reads our files, by each of its ways in, where pyckpt is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import pyckpt

STATE: dict[str, Any] = {
    "large": torch.arange(70_000, dtype=torch.float64),
    "nested": {"bf16": torch.arange(12).reshape(3, 4).bfloat16(), "list": [torch.tensor(7), 8]},
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
    "text": "words",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    dcp.save(STATE, storage_writer=pyckpt.DirectWriter(directory))
    return directory


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


_WITHOUT_PYCKPT = """
import sys, warnings
warnings.simplefilter("ignore")
sys.modules["pyckpt"] = None  # even where it is installed
try:
    import pyckpt
except ImportError:
    pass
else:
    raise SystemExit("pyckpt can be imported, so this shows nothing")
import torch, torch.distributed.checkpoint as dcp
target = {
    "large": torch.zeros(70_000, dtype=torch.float64),
    "nested": {"bf16": torch.zeros(3, 4, dtype=torch.bfloat16), "list": [torch.tensor(0), 0]},
    "transposed": torch.zeros(3, 2, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "text": "",
}
dcp.load(target, checkpoint_id=sys.argv[1])
assert not [name for name in sys.modules if name.startswith("pyckpt.")]
torch.save(target, sys.argv[2])
"""


@pytest.mark.slow
def test_where_pyckpt_cannot_be_imported(checkpoint: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = tmp_path / "result.pt"
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_PYCKPT, str(checkpoint), str(result)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert_equal(torch.load(result, weights_only=True), STATE)


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning")
def test_load_state_dict_from_keys(checkpoint: Path) -> None:
    everything = _load_state_dict_from_keys(checkpoint_id=checkpoint)
    assert_equal(everything, STATE)
    some = _load_state_dict_from_keys({"large", "nested"}, checkpoint_id=checkpoint)
    assert_equal(some, {"large": STATE["large"], "nested": STATE["nested"]})


def test_dcp_to_torch_save(checkpoint: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(checkpoint, tmp_path / "one.pt")
    assert_equal(torch.load(tmp_path / "one.pt", weights_only=True), STATE)


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_model_and_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizer = _model()
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    state = {"model": saved_model, "optimizer": saved_optimizer}
    dcp.save(state, storage_writer=pyckpt.DirectWriter(tmp_path))

    other_model, other_optimizer = _model()
    into_model, into_optimizer = get_state_dict(other_model, other_optimizer)
    target = {"model": into_model, "optimizer": into_optimizer}
    dcp.load(target, checkpoint_id=tmp_path)
    set_state_dict(
        other_model,
        other_optimizer,
        model_state_dict=target["model"],
        optim_state_dict=target["optimizer"],
    )
    assert_equal(dict(other_model.state_dict()), dict(model.state_dict()))
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())
