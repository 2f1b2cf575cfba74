"""Explains why the native extension cannot be loaded, before the linker reports missing symbols."""

from __future__ import annotations

import torch

__all__ = ["check_extension"]

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def _release(version: str) -> str:
    """``2.13`` of ``2.13.1+cu130``: torch keeps its C++ interface within a minor release."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check_extension() -> None:
    """Raise ImportError, with the command to run, if ``pyckpt._C`` does not fit this torch."""
    try:
        from pyckpt import _build
    except ImportError as error:
        raise ImportError(
            f"pyckpt's extension was not built. In pyckpt's source tree, run: {_REBUILD}"
        ) from error
    if _release(_build.torch_version) != _release(torch.__version__):
        raise ImportError(
            f"pyckpt was built against torch {_build.torch_version}, and this is torch "
            f"{torch.__version__}. In pyckpt's source tree, run: {_REBUILD}"
        )
    if _build.cuda_version is not None and _build.cuda_version != torch.version.cuda:
        raise ImportError(
            f"pyckpt was built with CUDA {_build.cuda_version}, and this torch "
            f"{torch.__version__} has {torch.version.cuda or 'none'}. In pyckpt's source tree, "
            f"run: {_REBUILD}"
        )
    try:
        from pyckpt import _C  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"pyckpt's extension, built against torch {_build.torch_version}, could not be loaded: "
            f"{error}. In pyckpt's source tree, run: {_REBUILD}"
        ) from error
