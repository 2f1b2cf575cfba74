"""Checkpoints that the commands are shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

import pyckpt


def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    model = {
        "a.weight": torch.randn(30, 7, generator=generator),
        "a.bias": torch.randn(7, generator=generator),
        "b.weight": torch.randn(
            300, 300, generator=generator
        ).t(),  # 360 kB, not in row-major order
        "count": torch.tensor(2**62 + 1),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
    }
    return {"model": model, "epoch": 3, "names": ["x", "y"]}


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    pyckpt.save(state(), root / "ours")
    dcp.save(state(), storage_writer=FileSystemWriter(root / "stock", sync_files=False))
    with pyckpt.Checkpointer(root / "run") as checkpointer:
        for step in (10, 20, 30):
            now = {"w": torch.full((4,), float(step))}
            checkpointer.save(step, now, metrics={"loss": 1 / step}, final=step == 20)
    # As if that job had ended.
    (token,) = (root / "run" / ".pyckpt").glob("generation-*")
    token.unlink()
    return root


@pytest.fixture
def made(_made: Path, tmp_path: Path) -> Path:
    """A folder with ``ours`` and ``stock``, of one state, and the directory ``run`` of a
    Checkpointer that saved steps 10, 20 (final) and 30."""
    shutil.copytree(_made, tmp_path / "made")
    return tmp_path / "made"
