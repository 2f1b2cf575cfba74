"""Runs one suite twice, with a framework's classes and with ours, and compares."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

__all__ = ["Suite", "run"]

ROOT = Path(__file__).parents[2]
_SECONDS = 1800  # for all tests of a file; they take minutes at most


@dataclass(frozen=True)
class Suite:
    """Tests of a framework, and how ours get into them."""

    package: str
    """The distribution whose installed version the sources should have."""
    module: str
    """The module that has the swap, in full."""
    swap: Callable[[], None]
    """Puts our classes in the place of the framework's. Called before any test is imported."""
    files: Sequence[str]
    """Paths of the tests, below the sources."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the tests that are not run with our classes, such as ``*::test_export*``, and the
    reason of each."""
    adapt: Callable[[ModuleType], None] = lambda module: None
    """Changes what a module of tests takes for granted of a checkpoint's files. Say in the module's
    docstring what."""
    select: str = ""
    """pytest's ``-k``: which tests of the files are about saving and resuming; empty for all."""

    def reason(self, test: str) -> str | None:
        """Why a test is left out; None if it is not."""
        for pattern, reason in self.left_out.items():
            if fnmatchcase(test, pattern):
                return reason
        return None


def run(suite: Suite, sources: Path, *, everything: bool, keep: str, logs: Path | None) -> int:
    """Run a suite and print what came out.

    Args:
        sources: of the framework.
        everything: run also the tests that are left out.
        keep: pytest's ``-k``, besides the suite's own.
        logs: a directory for pytest's output; by default it is thrown away.

    Returns:
        The exit status: 1 if a test passes with the framework's classes and not with ours.
    """
    installed = importlib.metadata.version(suite.package)
    print(f"{suite.package} {installed}, sources in {sources}")
    select = " and ".join(f"({one})" for one in (suite.select, keep) if one)
    stock, ours = Counter[str](), Counter[str]()
    left: dict[str, list[str]] = {}
    failed = []
    for name in suite.files:
        if not (sources / name).exists():
            print(f"not there: {name}")
            failed.append(name)
            continue
        theirs = _run(suite, sources, name, select, swapped=False, without=[], logs=logs)
        passing = sorted(test for test, outcome in theirs.items() if outcome == "PASSED")
        without = [] if everything else [test for test in passing if suite.reason(test)]
        for test in without:
            left.setdefault(suite.reason(test) or "", []).append(test)
        found = _run(suite, sources, name, select, swapped=True, without=without, logs=logs)
        stock.update(theirs.values())
        for test in passing:
            if test not in without:
                outcome = found.get(test, "did not end")
                ours[outcome] += 1
                if outcome != "PASSED":
                    failed.append(f"{outcome}: {test}")
    print(f"with {suite.package}'s own classes: {_said(stock)}")
    print(f"with ours, of those that passed: {_said(ours)}")
    print(f"left out: {sum(map(len, left.values()))}")
    for reason, tests in left.items():
        print(f"  {reason}")
        for test in tests:
            print(f"    {test}")
    for line in failed:
        print(line)
    return int(bool(failed) or not stock["PASSED"])


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none"


def _run(
    suite: Suite,
    sources: Path,
    name: str,
    select: str,
    *,
    swapped: bool,
    without: Sequence[str],
    logs: Path | None,
) -> dict[str, str]:
    """How each test of a file ended."""
    environment = dict(os.environ, PYTHONHASHSEED="0", HF_HUB_OFFLINE="1")
    environment["PYCKPT_SWAP"] = suite.module if swapped else ""
    environment["PYCKPT_SUITE"] = suite.package
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "scripts.framework_tests._plugin", "-c", os.devnull, "--rootdir", "."]
    command += ["-k", select] if select else []
    command += [f"--deselect={test}" for test in without]
    try:
        ended = subprocess.run(
            [*command, name],
            cwd=sources,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        output = ended.stdout
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        print(f"{name}: not over after {_SECONDS} s")
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        flat = name.replace("/", "_")
        (logs / f"{flat}.{'ours' if swapped else 'stock'}.log").write_text(output)
    found = re.findall(
        r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (\S+?\.py::.+?)(?: - .*)?$", output, re.MULTILINE
    )
    if not found:
        print(f"{name} with {'ours' if swapped else 'its own'}: {output.strip()[-500:]}")
    outcomes = {test: outcome for outcome, test in found}
    skipped = re.search(r"(\d+) skipped", output.rstrip().rpartition("\n")[2])
    for number in range(int(skipped[1]) if skipped else 0):
        outcomes[f"{name}: skipped {number}"] = "SKIPPED"
    return outcomes
