"""Every optimizer of torch.optim, with the options that decide about its state."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _simulated_cuda import CUDA, real_world, simulated_cuda, values

from pyckpt.optim.tensors import leaves, mapped

FLAGS: dict[str, dict[str, bool]] = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
    "capturable_foreach": {"capturable": True, "foreach": True},
    "differentiable": {"differentiable": True},
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {}),
    "Adafactor": ("Adafactor", {}),
    "Adagrad": ("Adagrad", {}),
    "Adam": ("Adam", {}),
    "Adam-amsgrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {}),
    "AdamW-amsgrad": ("AdamW", {"amsgrad": True}),
    "Adamax": ("Adamax", {}),
    "ASGD": ("ASGD", {}),
    "Muon": ("Muon", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {}),
    "RMSprop": ("RMSprop", {}),
    "RMSprop-centered": ("RMSprop", {"momentum": 0.9, "centered": True}),
    "Rprop": ("Rprop", {}),
    "SGD": ("SGD", {}),
    "SGD-momentum": ("SGD", {"momentum": 0.9}),
}


@cache
def accepts(name: str, flags: str) -> bool:
    """Whether this torch has the optimizer with these flags, on a GPU, too."""
    options = inspect.signature(getattr(torch.optim, OPTIONS[name][0])).parameters
    if not set(FLAGS[flags]) <= set(options):
        return False
    with simulated_cuda():
        try:
            step(optimizer_for(parameters(CUDA, torch.float32), name, flags), 0)
        except RuntimeError:  # Adagrad before torch 2.12: fused on CPU alone
            return False
    return True


def parameters(device: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two matrices, which every optimizer takes. They require no gradient, since ``differentiable``
    would forbid to change leaves that do."""
    generator = torch.Generator().manual_seed(0)
    with real_world():
        memory = [torch.randn(shape, generator=generator) for shape in ((4, 3), (5, 5))]
    return [tensor.to(dtype).to(device) for tensor in memory]


def optimizer_for(params: list[torch.Tensor], name: str, flags: str) -> torch.optim.Optimizer:
    cls, options = OPTIONS[name]
    return getattr(torch.optim, cls)(params, lr=0.01, **options, **FLAGS[flags])


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step whose gradients depend on ``number`` alone."""
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for param in group["params"]:
            with real_world():
                gradient = torch.randn(tuple(param.shape), generator=generator)
            param.grad = gradient.to(param.dtype).to(param.device)
    optimizer.step()


CASES = [(name, flags) for name in OPTIONS for flags in FLAGS if accepts(name, flags)]


def places(optimizer: Any) -> list[dict[Any, tuple[str, torch.dtype]]]:
    """Where each tensor of the state is, by parameter."""
    return [
        {
            path: (tensor.device.type, tensor.dtype)
            for path, tensor in leaves(dict(optimizer.state.get(param, {})))
        }
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def results(optimizer: Any) -> list[torch.Tensor]:
    """Parameters and state, as CPU tensors."""
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    for param in list(tensors):
        tensors += [tensor for _, tensor in leaves(dict(optimizer.state.get(param, {})))]
    return [values(tensor).clone() for tensor in tensors]


def on_cpu(state_dict: Any) -> Any:
    """A copy with every tensor in CPU memory."""

    def change(_: Any, leaf: Any) -> Any:
        return values(leaf).clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return mapped(state_dict, change)


def on_device(state_dict: Any, device: Any) -> Any:
    def change(_: Any, leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

    return mapped(state_dict, change)


def through_torch_load(state_dict: Any, _path: Path, map_location: Any = "cpu") -> Any:
    """What ``torch.load(map_location=...)`` makes of a saved state dict: all on that device."""
    saved = on_cpu(state_dict)
    with real_world():
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    return on_device(loaded, map_location)


def through_dcp(state_dict: Any, path: Path) -> Any:
    saved = on_cpu(state_dict)
    with real_world():
        dcp.save({"optimizer": saved}, checkpoint_id=path)
        template = {"optimizer": mapped(saved, _zeroed)}
        dcp.load(template, checkpoint_id=path)
    return template["optimizer"]


def _zeroed(_: Any, leaf: Any) -> Any:
    return torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


SOURCES: dict[str, Callable[[Any, Path], Any]] = {
    "live": lambda state_dict, _: state_dict,
    "torch_load_cpu": through_torch_load,
    "torch_load_cuda": lambda state_dict, path: through_torch_load(state_dict, path, CUDA),
    "dcp": through_dcp,
}
