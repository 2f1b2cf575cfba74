"""Named ranges of Python threads in the timelines of Nsight Systems and other tools.

The ranges are NVTX ranges of the domain "pyckpt", with bytes as their payload. Without the package
``nvtx`` (``pip install pyckpt[nvtx]``) they do nothing. The engine's native threads mark their own
ranges (csrc/nvtx.h), in builds with CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

try:
    import nvtx
except ImportError:
    nvtx = None

__all__ = ["named"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


def named(name: str, payload: int | None = None) -> AbstractContextManager[Any]:
    """A range of the calling thread. ``payload`` is in bytes."""
    if nvtx is None:
        return _NOTHING
    ranged: AbstractContextManager[Any] = nvtx.annotate(name, domain="pyckpt", payload=payload)
    return ranged
