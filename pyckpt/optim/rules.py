"""Rules for optimizers that cannot be run on fake tensors, by name, so that none is imported.

docs/optim.md names the version of each package whose state a rule describes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyckpt.optim.places import Placement, register_placement
from pyckpt.optim.tensors import Path

# bitsandbytes 0.50 leaves smaller parameters in device memory.
_BNB_PAGED_NUMEL = 100_000


def _on_device(
    _optimizer: Any, _group: dict[str, Any], param: Tensor | None, _path: Path, _value: Any
) -> Placement | None:
    return None if param is None else Placement("device")


def _sparse_adam(
    _optimizer: Any, _group: dict[str, Any], param: Tensor | None, path: Path, _value: Any
) -> Placement | None:
    # Its moments are dense and like the parameter; it takes sparse gradients only.
    if param is None or path[0] not in ("exp_avg", "exp_avg_sq"):
        return None
    return Placement("device", param.dtype)


def _bitsandbytes(
    optimizer: Any, _group: dict[str, Any], param: Tensor | None, path: Path, _value: Any
) -> Placement | None:
    if param is None:
        return None
    paged = getattr(optimizer, "is_paged", False) and param.numel() >= _BNB_PAGED_NUMEL
    return Placement("paged" if paged and path[0] in ("state1", "state2") else "device")


def _on_host(
    _optimizer: Any, _group: dict[str, Any], param: Tensor | None, _path: Path, _value: Any
) -> Placement | None:
    return None if param is None else Placement("host")


def _apex(
    optimizer: Any, _group: dict[str, Any], param: Tensor | None, path: Path, _value: Any
) -> Placement | None:
    if param is None:
        if path in (("step",), ("lr",)) and getattr(optimizer, "capturable", False):
            return Placement("device", torch.int32 if path == ("step",) else torch.float32)
        return None
    # Moments are float32 whatever the parameter is.
    return Placement("device", torch.float32 if path[0] in ("exp_avg", "exp_avg_sq") else None)


def register_known() -> None:
    register_placement("torch.optim.lbfgs.LBFGS", _on_device)
    register_placement("torch.optim.sparse_adam.SparseAdam", _sparse_adam)
    register_placement("torch.optim._sparse_adam.SparseAdam", _sparse_adam)
    register_placement("bitsandbytes.optim.optimizer.Optimizer8bit", _bitsandbytes)
    register_placement("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", _on_host)
    register_placement("deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad", _on_host)
    register_placement("deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion", _on_host)
    register_placement("apex.optimizers.fused_adam.FusedAdam", _apex)
