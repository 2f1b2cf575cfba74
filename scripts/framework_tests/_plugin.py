"""The pytest plugin that puts our classes in the place of a framework's, if it is told to."""

from __future__ import annotations

import os
from importlib import import_module

import pytest

from scripts.framework_tests._common import Suite


def _suite() -> Suite | None:
    name = os.environ.get("PYCKPT_SWAP")
    return import_module(name).SUITES[os.environ["PYCKPT_SUITE"]] if name else None


def pytest_configure() -> None:
    suite = _suite()
    if suite is not None:
        suite.swap()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    suite = _suite()
    if suite is not None:
        for module in {id(one): one for one in (item.module for item in items)}.values():
            suite.adapt(module)
