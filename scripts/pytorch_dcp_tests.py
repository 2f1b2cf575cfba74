"""Runs PyTorch's own tests of torch.distributed.checkpoint with our writer and reader.

    python scripts/pytorch_dcp_tests.py CHECKOUT [FILE ...]

CHECKOUT is one of PyTorch, of the release that is installed; FILE one below its
``test/distributed/checkpoint``, by default those that save and load with stock's storage. The tests
run as they are, but ``FileSystemWriter`` and ``FileSystemReader`` are ours: the writer, the reader,
and both; and once neither, to know what fails anyway. Prints what passed of each, and fails where
something fails that passes with stock's. Needs expecttest, which PyTorch's own tests import.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = [
    "e2e/test_e2e_save_and_load.py",
    "e2e/test_fine_tuning.py",
    "e2e/test_fsdp_ep.py",
    "fsdp/test_fsdp_dsd.py",
    "test_2d_fsdp_dt_checkpoint.py",
    "test_async_process_executor.py",
    "test_checkpoint.py",
    "test_compatibility.py",
    "test_dtensor_checkpoint.py",
    "test_dtensor_resharding.py",
    "test_file_system_checkpoint.py",
    "test_file_system_checkpoint_cpu.py",
    "test_format_utils.py",
    "test_fsdp_model_state.py",
    "test_fsdp_optim_state.py",
    "test_fsdp_tp_checkpoint_conversion.py",
    "test_hsdp_checkpoint.py",
    "test_planner.py",
    "test_save_load_api.py",
    "test_tp_checkpoint.py",
]

# Goes in front of each test, since most of them run in processes that import the test anew.
SWAP = '''
import os
import sys
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
import pyckpt


class OurWriter(pyckpt.DirectWriter):
    """Takes what stock's writer takes; where that asks for what ours has not, it is stock's."""

    def __new__(cls, *args, **options):
        if options.get("_extensions") or options.get("serialization_format"):
            return StockWriter(*args, **options)
        return super().__new__(cls)

    def __init__(self, path=None, *args, overwrite=True, sync_files=True, **options):
        super().__init__(path, overwrite=overwrite, sync_files=False)


class OurReader(pyckpt.DirectReader):
    pass


StockWriter = filesystem.FileSystemWriter
ours = os.environ["PYCKPT_SWAP"].split(",")
for module in (dcp, filesystem, _storage_utils):
    if "writer" in ours:
        module.FileSystemWriter = OurWriter
    if "reader" in ours:
        module.FileSystemReader = OurReader
'''
COMBINATIONS = ("", "writer", "reader", "writer,reader")


def _copy(checkout: Path, files: list[str], to: Path) -> list[str]:
    (to / "pyckpt_swap.py").write_text(SWAP)
    copied = []
    for name in files:
        source = checkout / "test" / "distributed" / "checkpoint" / name
        if not source.exists():
            print(f"not there: {name}")
            continue
        flat = name.replace("/", "_")
        text = source.read_text()
        future = re.search(r"^from __future__ import .*$", text, re.MULTILINE)
        at = future.end() if future else 0
        (to / flat).write_text(f"{text[:at]}\nimport pyckpt_swap\n{text[at:]}")
        copied.append(flat)
    return copied


def _run(directory: Path, files: list[str], ours: str, expression: str) -> dict[str, str]:
    """How each test ended."""
    environment = dict(os.environ, PYCKPT_SWAP=ours)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(directory), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-rA"]
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(directory)]
    outcomes: dict[str, str] = {}
    for name in files:
        run = subprocess.run(
            [*command, "-k", expression, name],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        found = re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        outcomes.update({test: outcome for outcome, test in found})
        if not found:
            print(f"{name} with {ours or 'stock'}: {run.stdout.strip()[-300:]}")
        Path(directory, f"{name}.{ours or 'stock'}.log").write_text(run.stdout + run.stderr)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--keep", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--logs", type=Path, help="an empty directory to leave the output in")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(options.logs or temporary).absolute()
        directory.mkdir(exist_ok=True)
        files = _copy(options.checkout, options.files, directory)
        results: dict[str, dict[str, str]] = {}
        for ours in COMBINATIONS:
            results[ours] = _run(directory, files, ours, options.keep)
            # Where stock passes nothing (most need several GPUs), there is nothing to compare.
            passed = {test for test, outcome in results[""].items() if outcome == "PASSED"}
            files = [name for name in files if any(test.startswith(name) for test in passed)]
    stock = {test for test, outcome in results[""].items() if outcome == "PASSED"}
    failed = not stock
    for ours, outcomes in results.items():
        passed = {test for test, outcome in outcomes.items() if outcome == "PASSED"}
        print(f"{ours or 'stock alone':14} {len(passed)} of {len(outcomes)} passed")
        for test in sorted(stock - passed):
            failed = True
            print(f"    {outcomes.get(test, 'did not run')}: {test}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
