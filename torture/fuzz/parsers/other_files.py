"""The parsers of what other programs have written: single files, and folders to import."""

from __future__ import annotations

import io
import json
import shutil
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt.convert import import_checkpoint
from pyckpt.convert.torch_files import read_torch
from pyckpt.convert.weight_files import read_weights
from pyckpt.tools.verifying import verify
from torture.fuzz import mutate
from torture.fuzz.mutate import Mutator
from torture.fuzz.parsers.base import Parser, Several, require
from torture.fuzz.parsers.states import state

__all__ = [
    "Accelerate",
    "Distributed",
    "Lightning",
    "Safetensors",
    "ShardedWeights",
    "TorchFile",
    "Trainer",
]


def _read_all(value: Any) -> None:
    """Reads what pages of files hold, as a program that uses it does."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu":
            value.detach().reshape(-1).view(torch.uint8).sum() if value.numel() else None
    elif isinstance(value, Mapping):
        for sub in value.values():
            _read_all(sub)
    elif isinstance(value, (list, tuple, set)):
        for sub in value:
            _read_all(sub)


class TorchFile(Parser):
    """A file of ``torch.save``, in its form of today and in the one before."""

    mutators = (mutate.archived(), mutate.pickled)

    def seeds(self) -> list[bytes]:
        made = []
        for zipped in (True, False):
            for value in (state(), torch.arange(3.0), {"m": torch.nn.Linear(2, 2).state_dict()}):
                file = io.BytesIO()
                torch.save(value, file, _use_new_zipfile_serialization=zipped)
                made.append(file.getvalue())
        return made

    def attempt(self, data: bytes) -> None:
        path = self.folder / "file.pt"
        path.unlink(missing_ok=True)  # an earlier one may be mapped still
        path.write_bytes(data)
        _read_all(read_torch(path).value)


class Safetensors(Parser):
    mutators = (mutate.framed_json,)

    def seeds(self) -> list[bytes]:
        header = {
            "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "e": {"dtype": "I64", "shape": [0, 2], "data_offsets": [32, 32]},
            "__metadata__": {"format": "pt", "tied": "w"},
        }
        text = json.dumps(header).encode()
        return [
            struct.pack("<Q", len(text)) + text + bytes(range(32)),
            struct.pack("<Q", 2) + b"{}",
        ]

    def attempt(self, data: bytes) -> None:
        path = self.folder / "model.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        for name, tensor in read_weights(path).items():
            require(type(name) is str, "a name that is none")
            require(tensor.numel() * tensor.element_size() <= len(data), "bytes that are not there")
            _read_all(tensor)


def _weights(folder: Path) -> None:
    content = Safetensors(folder).seeds()[0]
    (folder / "model.safetensors").write_bytes(content)


_ADAM = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.zeros(2, 3)}}, "param_groups": [
    {"lr": 0.1, "params": [0]}]}  # fmt: skip


class Import(Several):
    """A folder of another program, imported as a step."""

    by_name: Mapping[str, Sequence[Mutator]] = {
        ".json": (mutate.jsons,),
        ".safetensors": (mutate.framed_json,),
        ".pkl": (mutate.archived(), mutate.pickled),
        ".bin": (mutate.archived(), mutate.pickled),
        ".pt": (mutate.archived(), mutate.pickled),
        ".pth": (mutate.archived(), mutate.pickled),
        ".ckpt": (mutate.archived(), mutate.pickled),
        ".metadata": (mutate.pickled,),
    }

    def attempt(self, data: bytes) -> None:
        shutil.rmtree(self.source)
        self.source.mkdir()
        for name in self.names:
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
        self.replaced(data)
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        try:
            done = import_checkpoint(self.path(), target, leave_out=len(data) % 2 == 0)
        except ValueError as error:
            # What the source should have said; Unicode's errors say nothing of what to do.
            require(type(error) is ValueError, f"{type(error).__name__}: {error}")
            return
        str(done)
        require(verify(done.path).good, "what was imported is damaged")
        pyckpt.load(str(done.path))

    def path(self) -> Path:
        return self.source


class Trainer(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        torch.save(_ADAM, source / "optimizer.pt")
        torch.save({"last_epoch": 3}, source / "scheduler.pt")
        torch.save({"python": (3, (1,) * 5, None), "cpu": torch.zeros(16, dtype=torch.uint8)},
                   source / "rng_state.pth")  # fmt: skip
        said = {"global_step": 5, "epoch": 1.5, "best_model_checkpoint": "a/b", "log_history": [{}]}
        (source / "trainer_state.json").write_text(json.dumps(said))


class Accelerate(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        torch.save(_ADAM, source / "optimizer.bin")
        torch.save({"last_epoch": 3}, source / "scheduler.bin")
        torch.save({"a": 3}, source / "custom_checkpoint_0.pkl")
        torch.save({"step": 3, "random_state": (3, (1,) * 5, None)}, source / "random_states_0.pkl")


class Lightning(Import):
    def make(self, source: Path) -> None:
        source.mkdir()
        content = {
            "pytorch-lightning_version": "2.6.0",
            "epoch": 1,
            "global_step": 7,
            "state_dict": torch.nn.Linear(2, 2).state_dict(),
            "optimizer_states": [_ADAM],
            "lr_schedulers": [{"last_epoch": 3}],
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"EarlyStopping{'monitor': 'loss'}": {"best": torch.tensor(1.0)}},
            "hyper_parameters": {"lr": 0.1},
        }
        torch.save(content, source / "last.ckpt")

    def path(self) -> Path:
        return self.source / "last.ckpt"


class ShardedWeights(Import):
    """Weights with an index."""

    def make(self, source: Path) -> None:
        source.mkdir()
        _weights(source)
        (source / "model.safetensors").rename(source / "model-1.safetensors")
        torch.save({"x": torch.ones(3)}, source / "pytorch_model-2.bin")
        index = {
            "metadata": {"total_size": 3},
            "weight_map": {"w": "model-1.safetensors", "x": "pytorch_model-2.bin"},
        }
        (source / "model.safetensors.index.json").write_text(json.dumps(index))

    def path(self) -> Path:
        return self.source / "model.safetensors.index.json"


class Distributed(Import):
    """A DCP checkpoint, in the form of torchtitan."""

    def make(self, source: Path) -> None:
        source.mkdir()
        saved = {
            "model": {"w": torch.ones(2, 3)},
            "train_state": {"step": 5},
            "lr_scheduler": {"a": 1},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(saved, checkpoint_id=source, no_dist=True)  # type: ignore[attr-defined]
