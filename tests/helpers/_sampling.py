"""Large products of parameters, of which the quick run takes a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The cases, all but one in ``every`` marked slow."""
    return [
        case if i % every == 0 else pytest.param(*case, marks=pytest.mark.slow)
        for i, case in enumerate(cases)
    ]


def slow(*values: Any) -> Any:
    """One set of parameters, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
