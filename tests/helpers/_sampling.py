"""Large products of parameters, of which the quick run takes a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

quick = False
"""Whether the run leaves out what is marked slow; tests/conftest.py sets it."""


def sampled(cases: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """The cases, all but one in ``every`` marked slow."""
    return [
        pytest.param(*case, marks=[] if i % every == 0 else [pytest.mark.slow])
        for i, case in enumerate(cases)
    ]


def slow(*values: Any) -> Any:
    """One set of parameters, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(full: int) -> int:
    """How many examples hypothesis is to try: a quarter of them in the quick run."""
    return -(-full // 4) if quick else full
