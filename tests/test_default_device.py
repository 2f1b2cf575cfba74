"""Programs that set a default device: pyckpt's own memory does not go there."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils._device import _device_constructors

import pyckpt
from pyckpt import Checkpointer
from pyckpt.convert import import_checkpoint, repair_optimizer
from pyckpt.tools.comparing import compare
from pyckpt.tools.contents import contents
from pyckpt.tools.objects import same
from pyckpt.tools.statistics import statistics
from pyckpt.tools.verifying import verify


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def tensors(start: int = 0) -> dict[str, Any]:
    with torch.device("cpu"):
        values = torch.arange(start, start + 600.0).view(20, 30)
        return {
            "plain": values.clone(),
            "columns": values.clone().t(),
            "half": values.to(torch.bfloat16),
            "scalar": torch.tensor(start + 0.5),
            "none": torch.empty(0, 3),
        }


def sparse() -> dict[str, Any]:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]], device="cpu")
    return {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}


def trained(start: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        for number, param in enumerate(model.parameters()):
            param.data.fill_(start + number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def plain_save_and_load(folder: Path) -> Any:
    pyckpt.save({"t": tensors(), "n": 3}, folder / "c", no_dist=True)
    state = {"t": tensors(7), "n": 0}
    pyckpt.load(state, folder / "c", no_dist=True)
    return state, pyckpt.load(folder / "c", no_dist=True)


def a_load_that_converts(folder: Path) -> Any:
    pyckpt.save(tensors(), folder / "c", no_dist=True)
    state = {name: one.double() for name, one in tensors(7).items()}
    pyckpt.load(state, folder / "c", no_dist=True)
    return state


def stock_save_and_our_load(folder: Path) -> Any:
    dcp.save({"t": tensors(), "n": 3}, checkpoint_id=folder / "c", no_dist=True)
    return pyckpt.load(folder / "c", no_dist=True)


def sparse_tensors(folder: Path) -> Any:
    pyckpt.save({"inside": (sparse(),), **sparse()}, folder / "c", no_dist=True)
    loaded = pyckpt.load(folder / "c", no_dist=True)
    return [one.to_dense() for one in (*loaded["inside"][0].values(), loaded["coo"])]


def loaded_from_a_store(folder: Path) -> Any:
    url = (folder / "store").as_uri()
    pyckpt.save(tensors(), url, no_dist=True)
    state = {name: one.double() for name, one in tensors(7).items()}
    pyckpt.load(state, url, no_dist=True)
    return state, pyckpt.load(url, no_dist=True)


def a_restored_training(folder: Path) -> Any:
    model, optimizer = trained()
    with Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            state = {"model": model, "optim": optimizer, "rng": pyckpt.RngState(), "t": tensors()}
            checkpointer.step(step, state)
            checkpointer.save(step, state, metrics={"loss": 0.5})
        checkpointer.wait()
        checked = [one.step for one in checkpointer.checkpoints(verify=True)]
        again, other = trained(50)
        t = tensors(7)
        state = {"model": again, "optim": other, "rng": pyckpt.RngState(), "t": t}
        step = checkpointer.restore(state)
    return checked, step, again.state_dict(), other.state_dict(), t


def an_optimizer_that_is_loaded(folder: Path) -> Any:
    _, optimizer = trained()
    _, other = trained(50)
    pyckpt.optim.load_state_dict(other, optimizer.state_dict())
    return other.state_dict()


def repaired(folder: Path) -> Any:
    _, optimizer = trained()
    state = optimizer.state_dict()
    entries = {n: {**one, "step": one["step"].bfloat16()} for n, one in state["state"].items()}
    pyckpt.save({"optimizer": {**state, "state": entries}}, folder / "c", no_dist=True)
    said = [str(one) for one in repair_optimizer(folder / "c")]
    return said, pyckpt.load(folder / "c", no_dist=True)


def exported(folder: Path) -> Any:
    pyckpt.save({"model": tensors()}, folder / "c", no_dist=True)
    files = pyckpt.export(folder / "c", folder / "e", format="torch", dtype=torch.bfloat16)
    pyckpt.to_torch(folder / "c", folder / "file.pt")
    return [path.read_bytes() for path in files], torch.load(folder / "file.pt")


def imported(folder: Path) -> Any:
    torch.save({"model": tensors(), "empty": tensors()["none"]}, folder / "file.pt")
    found = import_checkpoint(folder / "file.pt", folder / "run", step=3)
    return pyckpt.load(found.path, no_dist=True)["model"]


def weights_of_another_program(folder: Path) -> Any:
    header = {
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "none": {"dtype": "F32", "shape": [0, 2], "data_offsets": [8, 8]},
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(range(8))
    (folder / "model.safetensors").write_bytes(data)
    found = import_checkpoint(folder / "model.safetensors", folder / "run", step=3)
    return pyckpt.load(found.path, no_dist=True)["model"]


def a_model_that_is_loaded(folder: Path) -> Any:
    model, _ = trained()
    torch.save(model.state_dict(), folder / "file.pt")
    other, _ = trained(50)
    pyckpt.load_model(other, folder / "file.pt")
    return other.state_dict()


def tools(folder: Path) -> Any:
    pyckpt.save({"t": tensors()}, folder / "a", no_dist=True)
    pyckpt.save({"t": tensors(1)}, folder / "b", no_dist=True)
    compared = compare(folder / "a", folder / "b")
    differing = [repr(one) for one in compared.differences]
    saved = contents(folder / "a")
    numbers = [repr(one) for one in statistics(saved, ["t.plain", "t.columns", "t.scalar"])]
    return differing, numbers, verify(folder / "a").good


def _now(staged: Any) -> Any:
    return staged.result() if isinstance(staged, Future) else staged


def copies_for_another_process(folder: Path) -> Any:
    stager = pyckpt.PinnedStager(shared_memory=True)
    try:
        return pickle.loads(pickle.dumps(_now(stager.stage({"t": tensors()}))))
    finally:
        stager.close()


DONE: list[Callable[[Path], Any]] = [
    plain_save_and_load,
    a_load_that_converts,
    stock_save_and_our_load,
    sparse_tensors,
    loaded_from_a_store,
    a_restored_training,
    an_optimizer_that_is_loaded,
    repaired,
    exported,
    imported,
    weights_of_another_program,
    a_model_that_is_loaded,
    tools,
    copies_for_another_process,
]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("done", DONE, ids=lambda done: done.__name__)
def test_what_is_done_under_another_default_device(done: Any, tmp_path: Path) -> None:
    folders = tmp_path / "cpu", tmp_path / "meta"
    for folder in folders:
        folder.mkdir()
    expected = done(folders[0])
    with default_device("meta"):
        found = done(folders[1])
    assert same(found, expected)


@pytest.mark.slow
def test_nothing_is_made_without_its_device() -> None:
    """What torch makes without a device goes to the program's default device."""
    follow = {one.__name__ for one in _device_constructors()}
    assert {"empty", "zeros", "full", "tensor", "arange", "sparse_coo_tensor"} <= follow
    wrong, count = [], 0
    for path in sorted(Path(pyckpt.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                wrong += [f"{path}:{node.lineno}" for one in node.names if one.name in follow]
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = ast.unparse(node.func)
            if made.startswith("torch.") and made.removeprefix("torch.") in follow:
                count += 1
                if all(one.arg != "device" for one in node.keywords):
                    wrong.append(f"{path}:{node.lineno}: {made}")
    assert count > 20
    assert wrong == []
