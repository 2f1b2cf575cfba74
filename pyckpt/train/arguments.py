"""Checks arguments when they are passed, since a wrong one would act, or fail, much later."""

from __future__ import annotations

import logging
import math
import operator
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import Any

from pyckpt.remote.address import text_of, with_home

__all__ = [
    "directory_of",
    "metrics_of",
    "mirror_limits_of",
    "state_of",
    "step_of",
    "tell_of_no_mirror",
    "timeout_of",
    "whole",
]

_logger = logging.getLogger("pyckpt")

# One letter and a colon is a file's name. `Path` makes one slash of two.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def whole(name: str, value: Any, *, least: int) -> int:
    """A whole number of at least ``least``.

    Raises:
        TypeError: it is no whole number, such as 2.5.
        ValueError: it is less.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {_kind(value)}.") from None
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not a bool.")
    if number < least:
        raise ValueError(f"{name} = {number} must be {least} or more.")
    return number


def step_of(step: Any) -> int:
    """The number of a step. Raises as ``whole``; ranks tell each other 64-bit numbers."""
    number = whole("step", step, least=0)
    if number >= 1 << 63:
        raise ValueError(f"{step = } must be less than 2^63.")
    return number


def state_of(state: Any) -> Mapping[str, Any]:
    """A training state.

    Raises:
        TypeError: it is no mapping, or its names are no strings.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be a dict of objects by name, such as {{'model': model}}, not "
            f"{_kind(state)}."
        )
    for name in state:
        if not isinstance(name, str):
            raise TypeError(f"names in the state must be strings, not {_kind(name)}: {name!r}.")
    return state


def metrics_of(metrics: Any) -> Mapping[str, Any]:
    """Metrics, by name; empty for None. Values are not read, since they may be on a GPU.

    Raises:
        TypeError: it is no mapping of strings to numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of numbers by name, not {_kind(metrics)}.")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"names of metrics must be strings, not {_kind(name)}: {name!r}.")
        if not (hasattr(value, "__float__") or hasattr(value, "__index__")):
            raise TypeError(f"the metric {name!r} must be a number, not {_kind(value)}.")
        shape = getattr(value, "shape", ())
        if isinstance(shape, tuple) and math.prod(shape) != 1:
            raise TypeError(
                f"the metric {name!r} must be one number, not {math.prod(shape)}; its shape is "
                f"{tuple(shape)}."
            )
    return metrics


def timeout_of(timeout: float | timedelta | None) -> timedelta | None:
    """A time to wait, given in seconds or as a timedelta.

    Raises:
        TypeError: it is neither.
        ValueError: it is not positive, or has no end.
    """
    if timeout is not None and not isinstance(timeout, timedelta):
        if not isinstance(timeout, Real) or isinstance(timeout, bool):
            raise TypeError(
                f"timeout must be a number of seconds or a timedelta, not {_kind(timeout)}."
            )
        try:
            timeout = timedelta(seconds=float(timeout))
        except (OverflowError, ValueError):
            raise ValueError(
                f"{timeout = } must be a time that ends; write 86400 for a day."
            ) from None
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(f"{timeout = !s} must be more than 0 seconds, or None.")
    return timeout


def mirror_limits_of(
    mirror_wait: float, mirror_max_mbps: float | None
) -> tuple[float | None, float | None]:
    """How many seconds to wait, and how many bytes may go there a second; None without a limit.

    Raises:
        ValueError: one is out of range.
    """
    if not mirror_wait >= 0:
        raise ValueError(f"{mirror_wait = } must be a number of seconds, 0 or more.")
    if mirror_max_mbps is not None and not 0 < mirror_max_mbps < math.inf:
        raise ValueError(f"{mirror_max_mbps = } must be positive.")
    return (
        None if mirror_wait == math.inf else mirror_wait,
        None if mirror_max_mbps is None else 1e6 * mirror_max_mbps,
    )


def tell_of_no_mirror(
    *, mirror_keep_last: int | None, mirror_every: int, mirror_max_mbps: float | None
) -> None:
    """Log which arguments for a mirror were passed, since there is none."""
    passed = {
        "mirror_keep_last": mirror_keep_last is not None,
        "mirror_every": mirror_every != 1,
        "mirror_max_mbps": mirror_max_mbps is not None,
    }
    names = ", ".join(name for name in passed if passed[name])
    if names:
        _logger.warning("without mirror=, nothing comes of %s", names)


def directory_of(path: str | os.PathLike[str], argument: str = "directory") -> Path:
    """The absolute path of a directory, which does not depend on later changes of the working
    directory. ``~`` is the home directory.

    Args:
        argument: its name, for errors.

    Raises:
        TypeError: it is no path, or one of bytes.
        ValueError: it is empty, or a URL, or there is no such home directory.
    """
    name = text_of(path, argument)
    if not name:
        raise ValueError(f"{argument} is empty.")
    if _URL.match(name):
        raise ValueError(
            f"{name!r} is a URL, and a Checkpointer saves to file systems; save to a local "
            "directory, and pass the URL as mirror=, a string"
        )
    return Path(os.path.abspath(with_home(name)))


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"


def seconds_of(name: str, seconds: float) -> float | None:
    """A time to wait at most; None without end.

    Raises:
        ValueError: it is negative, or no number.
    """
    if not seconds >= 0:
        raise ValueError(f"{name} = {seconds!r} must be a number of seconds, 0 or more.")
    return None if seconds == math.inf else seconds


def rate_of(name: str, megabytes: float | None) -> float | None:
    """Bytes a second, of a number of megabytes; None for no bound.

    Raises:
        ValueError: it is not positive, or not finite.
    """
    if megabytes is None:
        return None
    if not 0 < megabytes < math.inf:
        raise ValueError(f"{name} = {megabytes!r} must be positive.")
    return 1e6 * megabytes
