"""The pytest plugin that puts our classes in the place of a framework's, if it is told to."""

from __future__ import annotations

import os
from importlib import import_module


def pytest_configure() -> None:
    name = os.environ.get("PYCKPT_SWAP")
    if name:
        import_module(name).SUITES[os.environ["PYCKPT_SUITE"]].swap()
