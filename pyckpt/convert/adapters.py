"""Adapters of PEFT, whose files have other names than the model that they are part of."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.format.files import open_regular, read_regular

__all__ = ["is_adapter", "named_as_in_the_model"]

_CONFIG = "adapter_config.json"
_CONFIG_MAX = 1 << 24
_NAME = "default"  # of the adapter that lies in the folder itself; others have folders in it
_LORA = re.compile(r"(.*\.lora_[AB])(\.(?:weight|bias))")
_LORA_OF_EMBEDDING = re.compile(r".*\.lora_embedding_[AB]")


def is_adapter(path: Path) -> bool:
    """Whether a file of weights is that of an adapter of PEFT, and not of a whole model."""
    return path.name.startswith("adapter_model") and (path.parent / _CONFIG).is_file()


def named_as_in_the_model(weights: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The weights of an adapter by the names of the model's parameters, which have the adapter's
    name in them.

    Raises:
        LoadError: it is of a kind whose names are not known.
        CorruptCheckpoint: its configuration is damaged.
    """
    path = folder / _CONFIG
    with open_regular(path) as file:
        data = read_regular(file, path, most=_CONFIG_MAX)
    try:
        config = json.loads(data)
        kind = config["peft_type"]
        modules = [str(name) for name in config.get("modules_to_save") or ()]
        plain = not config.get("use_dora") and config.get("bias", "none") == "none"
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} is not readable: {error}", path=str(path)) from error
    named = {_named(name, modules): one for name, one in weights.items()}
    if kind != "LORA" or not plain or None in named:
        strange = next((name for name in weights if _named(name, modules) is None), kind)
        raise LoadError(
            f"{folder} holds an adapter of PEFT of which not all names in the model are known "
            f"({strange}); resume from it directly, with resume_from_checkpoint, and the next save "
            "is pyckpt's"
        )
    return {str(name): one for name, one in named.items()}


def _named(name: str, modules: list[str]) -> str | None:
    """The name in the model; None if it is not known.

    Args:
        modules: the ends of the names of modules that are trained as a whole.
    """
    match = _LORA.fullmatch(name)
    if match is not None:
        return f"{match[1]}.{_NAME}{match[2]}"
    if _LORA_OF_EMBEDDING.fullmatch(name):
        return f"{name}.{_NAME}"
    parts = name.split(".")
    for count in range(1, len(parts)):
        module = ".".join(parts[:count])
        if any(module.endswith(one) for one in modules):
            return ".".join([module, "modules_to_save", _NAME, *parts[count:]])
    return None
