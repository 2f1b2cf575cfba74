"""What the pages' blocks take for granted: a model, an optimizer, a directory with checkpoints.

`stage` makes the names that any page may use. A page that needs more has a function in ``OF_PAGE``,
by its path. These run in a child, in an empty directory.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def stage() -> dict[str, Any]:
    """A small run, as it is in the middle of a program."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn

    import pyckpt

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    train_step()  # which makes the optimizer's state
    return {
        "torch": torch,
        "dcp": dcp,
        "nn": nn,
        "pyckpt": pyckpt,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "state": {"model": model, "optimizer": optimizer},
        "train_step": train_step,
        "steps": 12,
        "path": "checkpoints/step-100",
    }


def _state(names: dict[str, Any]) -> None:
    import torch
    import torchmetrics

    names["averaged_model"] = torch.optim.swa_utils.AveragedModel(names["model"])
    names["metrics"] = torchmetrics.MeanMetric()
    names["buffer"] = [1, 2, 3]
    names["loader"] = torch.utils.data.DataLoader([1, 2, 3])


def _checkpointer(names: dict[str, Any]) -> None:
    """A model with a name of Meta's Llama, and what takes the place of transformers."""
    torch, nn, pyckpt = names["torch"], names["nn"], names["pyckpt"]
    model = nn.Module()
    model.tok_embeddings = nn.Embedding(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with pyckpt.Checkpointer("runs/a") as checkpointer:
        checkpointer.save(1, state)
    names.update(state, train_step=lambda: None)
    names["LlamaConfig"] = lambda *_: {}

    class AutoModelForCausalLM:
        @staticmethod
        def from_pretrained(directory: str) -> Any:
            from safetensors.torch import load_file

            assert [*load_file(Path(directory) / "model.safetensors")] == [
                "model.embed_tokens.weight"
            ]

    names["AutoModelForCausalLM"] = AutoModelForCausalLM


def _optim(names: dict[str, Any]) -> None:
    """``fused`` and the loader of another library are the page's; the values are its, too."""
    torch, optimizer = names["torch"], names["optimizer"]
    names["path"] = "optimizer.pt"
    torch.save(optimizer.state_dict(), names["path"])
    load = torch.load
    names["torch"] = _Also(torch, load=lambda path, map_location: load(path))

    class Trainer:
        def restore(self, path: str) -> None:
            torch.load(path)

    names["trainer"] = Trainer()
    names["loop"] = range(2)
    names["generate"] = lambda batch: batch
    names["train"] = lambda rollouts: names["train_step"]()


class _Also:
    """A module, but for some of its names."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _profiling(names: dict[str, Any]) -> None:
    names["loss"] = names["torch"].zeros(())


def _tiers(names: dict[str, Any]) -> None:
    """Directories stand for the bucket and the local disk, or a store in memory for what is written
    directly."""
    names["pyckpt"] = _Also(names["pyckpt"], **_elsewhere(names["pyckpt"]))


def _elsewhere(pyckpt: Any) -> dict[str, Any]:
    """What a page calls with the addresses of stores and local disks."""
    real = pyckpt.Checkpointer, pyckpt.save, pyckpt.DirectWriter

    def checkpointer(directory: str, *, mirror: str = "", **options: Any) -> Any:
        if mirror:
            options["mirror"] = mirror.removeprefix("s3://")
        return real[0](directory.removeprefix("/"), **options)

    def there(path: str) -> str:
        return path.replace("s3://bucket", "memory://")

    def save(state: Any, path: str) -> Any:
        return real[1](state, there(path))

    def direct_writer(path: str) -> Any:
        return real[2](there(path))

    return {"Checkpointer": checkpointer, "save": save, "DirectWriter": direct_writer}


def _tutorial(names: dict[str, Any]) -> None:
    """The run of the tutorial, which its page starts from a shell."""
    del names
    arguments = sys.argv
    sys.argv = ["single.py", "runs/a", "20"]
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runpy.run_path(str(ROOT / "examples/loops/single.py"))
    finally:
        sys.argv = arguments


def _readme(names: dict[str, Any]) -> None:
    """Long enough that the checkpoint is saved which the page then loads."""
    names["steps"] = 100
    # The page imports the module itself. It runs in a process of its own.
    for name, function in _elsewhere(names["pyckpt"]).items():
        setattr(names["pyckpt"], name, function)


OF_PAGE = {
    "README.md": _readme,
    "docs/checkpointer.md": _checkpointer,
    "docs/optim.md": _optim,
    "docs/profiling.md": _profiling,
    "docs/state.md": _state,
    "docs/tiers.md": _tiers,
    "docs/tutorial.md": _tutorial,
}
