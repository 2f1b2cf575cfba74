"""Fixtures that the tests share."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import _sampling
import pytest
from _filesystems import KINDS, Mounts, missing


def require(what: str, *, available: bool) -> None:
    """Skip the test where this machine lacks something, or fail it where none may be skipped."""
    if available:
        return
    if os.environ.get("PYCKPT_REQUIRE_ALL") == "1":
        pytest.fail(f"needs {what}, which PYCKPT_REQUIRE_ALL=1 says is here", pytrace=False)
    pytest.skip(f"needs {what}")


def pytest_configure(config: pytest.Config) -> None:
    _sampling.quick = "not slow" in config.option.markexpr


def pytest_collection_finish() -> None:
    """What was imported by now lives to the end: the collector need not visit it in each test."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "run_ranks" in item.function.__code__.co_names:
            item.add_marker(pytest.mark.ranks)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """`make test` has few packages: a test that needs others, and is not marked slow, would run
    nowhere. So it fails where none may be skipped."""
    report = yield
    if report.skipped and os.environ.get("PYCKPT_REQUIRE_ALL") == "1":
        said = str(report.longrepr)
        if "could not import" in said and item.get_closest_marker("slow") is None:
            report.outcome = "failed"
            report.longrepr = f"{said}: what needs more than `make test` has is marked slow"
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get("PYCKPT_REQUIRE_CUDA") == "1":
        pytest.fail("needs a GPU, which PYCKPT_REQUIRE_CUDA=1 says is here", pytrace=False)
    pytest.skip("needs a GPU (torch.cuda.is_available() is false)")


@pytest.fixture(scope="session")
def _mounts() -> Iterator[Mounts]:
    mounts = Mounts()
    yield mounts
    mounts.close()


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.root) for kind in KINDS])
def filesystem(request: pytest.FixtureRequest, _mounts: Mounts) -> Iterator[Path]:
    """The root of an empty file system; of one kind after the other, or of the one that the test
    asks for by indirect parametrisation."""
    what = missing(request.param)
    require(what, available=not what)
    root = _mounts.root(request.param)
    _empty(root)
    yield root
    _empty(root)


def _empty(root: Path) -> None:
    for path in root.iterdir():
        if path.name == "lost+found":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@pytest.fixture
def strace() -> None:
    """For tests that let the kernel fail."""
    require("strace", available=shutil.which("strace") is not None)
