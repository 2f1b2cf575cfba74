"""Checkpoints that the commands are shown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _ranks import run_ranks
from _shards import save_shards
from torch.distributed.checkpoint import FileSystemWriter

import pyckpt
from pyckpt.tools.contents import contents
from pyckpt.tools.values import value
from pyckpt.train.store.part import Part, write_part


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


@pytest.fixture(scope="session")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nodes")
    # A child of this test's process finds no functions in conftest.py: there are several.
    run_ranks(2, save_shards, root / "all")
    whole = root / "all" / "step-00000007"
    save_id = contents(whole).saved.save_id
    assert save_id is not None
    for rank in range(2):
        step = root / f"node-{rank}" / whole.name
        step.mkdir(parents=True)
        (file,) = (path.name for path in whole.glob(f"__{rank}_*.distcp"))
        for name in (".metadata", file):
            shutil.copy(whole / name, step)
        write_part(step, save_id, Part({file}, final=True, metrics={"loss": 0.5}))
    return root


@pytest.fixture
def nodes(_nodes: Path, tmp_path: Path) -> tuple[Path, Path]:
    """What two nodes with directories of their own have of a checkpoint. Each has half of
    ``model.both``, and the first has ``model.one``."""
    shutil.copytree(_nodes, tmp_path / "nodes")
    first, second = (tmp_path / "nodes" / f"node-{rank}" / "step-00000007" for rank in range(2))
    found = contents(first)
    is_first = found.is_here(value(found.metadata, "model.one").parts)
    return (first, second) if is_first else (second, first)


@pytest.fixture
def made(_made: Path, tmp_path: Path) -> Path:
    """A folder with ``ours`` and ``stock``, of one state, and the directory ``run`` of a
    Checkpointer that saved steps 10, 20 (final) and 30."""
    shutil.copytree(_made, tmp_path / "made")
    return tmp_path / "made"
