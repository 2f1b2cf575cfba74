"""The pytest plugin, in an inner pytest."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]

BEGIN = """
    import threading

    import pytest
    import torch
    from torch.cuda._gpu_trace import StreamSynchronizationCallbacks
    from pyckpt.profiling import fake_cuda

    def read(scalar):
        return scalar.item()  # the offender

    @pytest.fixture
    def scalar():
        with fake_cuda():
            yield torch.zeros((), device="cuda:0")
"""


TESTS = """
    def test_clean(scalar, no_syncs):
        with no_syncs() as counts:
            scalar.add_(1).to("cpu", non_blocking=True)
        assert counts.d2h_copies == 1

    def test_waits(scalar, no_syncs):
        with no_syncs():
            read(scalar)
            scalar.cpu()

    @pytest.mark.parametrize("times", range(5))
    def test_reads(scalar, max_syncs, times):
        with max_syncs(2) as counts:
            for _ in range(times):
                read(scalar)
        assert counts.total == times

    def elsewhere():
        thread = threading.Thread(target=StreamSynchronizationCallbacks.fire_callbacks, args=(1,))
        thread.start()
        thread.join()

    def test_my_thread_alone(no_syncs):
        with no_syncs(threads="current"):
            elsewhere()

    def test_all_threads(no_syncs):
        with no_syncs():
            elsewhere()

    def test_what_the_block_raises_comes_first(scalar, no_syncs):
        with pytest.raises(KeyError), no_syncs():
            read(scalar)
            raise KeyError

    def test_negative(max_syncs):
        with pytest.raises(ValueError, match="-1 times"):
            max_syncs(-1)
"""


@pytest.mark.slow
def test_fixtures(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process of its own: torch cannot be imported twice, as an inner run in this one does.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(test_inner=BEGIN + TESTS)
    result = pytester.runpytest_subprocess("-p", "pyckpt_pytest", "-q")
    result.assert_outcomes(passed=7, failed=4)
    sections = re.split(r"^_+ (\w.*) _+$", result.stdout.str(), flags=re.MULTILINE)
    failures = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert sorted(failures) == ["test_all_threads", "test_reads[3]", "test_reads[4]", "test_waits"]

    pytest.LineMatcher(failures["test_waits"].splitlines()).fnmatch_lines(
        [
            "at most 0 waits for the device were expected here",
            "the host waited 2 times for the device",
            "the first item, most recent call last:",
            '*File "*test_inner.py", line *, in test_waits',
            "*read(scalar)",
            '*File "*test_inner.py", line *, in read',
            "*return scalar.item()  # the offender",
            "the first blocking copy, most recent call last:",
            "*scalar.cpu()",
        ]
    )
    # From the block on: neither pytest's frames nor the plugin's.
    assert "_pytest" not in failures["test_waits"]
    assert "at most 2 waits" in failures["test_reads[3]"]
    assert "the host waited 3 times" in failures["test_reads[3]"]
    assert "# the offender" in failures["test_reads[3]"]
    assert "the first stream sync" in failures["test_all_threads"]


def test_loading_the_plugin_loads_no_torch() -> None:
    code = "import sys, pyckpt_pytest; sys.exit('torch' in sys.modules or 'pyckpt' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_plugin_is_an_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ((name, value),) = project["project"]["entry-points"]["pytest11"].items()
    assert value in project["tool"]["setuptools"]["py-modules"]
    plugin = importlib.metadata.EntryPoint(name=name, value=value, group="pytest11").load()
    # Under its module's name pytest takes it and `-p pyckpt_pytest` for the same plugin.
    assert plugin.__name__ == name
    assert {"no_syncs", "max_syncs"} <= set(plugin.__all__)
