"""The Python stack of a wait, without the frames of this package."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent)
_PLUGIN = str(Path(__file__).parents[2] / "pyckpt_pytest.py")
_TORCH = str(Path(torch.__file__).parent)
# Frames between the user's code and this package: dispatching, and firing callbacks.
_BETWEEN = tuple(
    f"{_TORCH}/{name}"
    for name in ("_compile.py", "_dynamo/", "_library/", "_ops.py", "_subclasses/", "_utils.py")
)


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((_HERE, *_BETWEEN)) or name in (_PLUGIN, contextlib.__file__)


def _frames(skip: int) -> list[FrameType]:
    """The frames from the innermost of the user's, outwards."""
    try:
        frame: FrameType | None = sys._getframe(skip)
    except ValueError:
        return []
    frames: list[FrameType] = []
    while frame is not None:
        if frames or not _is_ours(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def depth() -> int:
    """How many of the user's frames are on the stack."""
    return len(_frames(2))


def capture(base: int) -> traceback.StackSummary:
    """The stack, outermost first, without the outermost ``base - 1`` frames."""
    frames = _frames(2)[::-1][max(base - 1, 0) :]

    def located() -> Iterator[tuple[FrameType, int]]:
        for frame in frames:
            yield frame, frame.f_lineno

    return traceback.StackSummary.extract(located(), lookup_lines=False)
