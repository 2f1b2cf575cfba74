"""Runs the tests marked ``cuda``. Fails where one was skipped, or none was run.

python scripts/gpu_tests.py [arguments of pytest]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_MARK = "mark.cuda"


class Count:
    """How many ran, and which did not."""

    def __init__(self) -> None:
        self.ran = 0
        self.skipped: list[str] = []
        """What did not run, and why."""
        self._root = Path()

    def pytest_configure(self, config: pytest.Config) -> None:
        self._root = config.rootpath  # which nodes' names are relative to

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        # A module that is skipped as a whole never tells its marks.
        path = self._root / report.nodeid
        if report.skipped and path.suffix == ".py" and _MARK in path.read_text():
            self.skipped.append(_why(report.nodeid, report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(_why(report.nodeid, report.longrepr))
        elif report.when == "call":
            self.ran += 1


def _why(name: str, reason: object) -> str:
    return f"{name}: {reason[2] if isinstance(reason, tuple) else reason}"


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parent.parent
    os.chdir(root)
    # Built in place, not installed; for processes that tests start, too.
    sys.path.insert(0, str(root))
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYCKPT_REQUIRE_CUDA"] = "1"
    count = Count()
    # What torch warns of on this machine alone is printed, and does not take the tests away.
    options = ["-m", "cuda", "-p", "pyckpt_pytest", "-W", "default"]
    # Only modules that have such tests: others may need packages which that machine lacks, and a
    # module that cannot be imported stops all.
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        modules = sorted((root / "tests").rglob("test_*.py"))
        options += [str(module) for module in modules if _MARK in module.read_text()]
    code = pytest.main([*options, *arguments], plugins=[count])
    if "--collect-only" in arguments:
        return int(code)
    print(f"tests on the GPU: {count.ran} ran, {len(count.skipped)} skipped")
    if count.skipped:
        print("skipped, which counts as failed:", *count.skipped, sep="\n  ")
    return 1 if count.skipped or not count.ran else int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
