"""Runs a framework's own tests of saving and resuming with pyckpt's classes in place of its own.

    python -m scripts.framework_tests SUITE SOURCES

SUITE is a name of those below, and SOURCES a folder with the framework's sources, of the release
that is installed. The tests run as they are: first with the framework's classes, to know what fails
anyway, then with ours. Prints what passed, and what was left out and why. Fails where a test fails
that passes with the framework's own classes.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from scripts.framework_tests._common import Suite, run

# Imported only when they are asked for: each imports nothing of its framework by itself.
SUITES = {
    "accelerate": "huggingface",
    "transformers": "huggingface",
    "lightning": "lightning",
    "torchtitan": "titan",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--all", action="store_true", help="run also what is left out")
    parser.add_argument("--keep", default="", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--logs", type=Path, help="a directory to leave pytest's output in")
    options = parser.parse_args()
    module = import_module(f"scripts.framework_tests.{SUITES[options.suite]}")
    suite: Suite = module.SUITES[options.suite]
    return run(
        suite,
        options.sources.absolute(),
        everything=options.all,
        keep=options.keep,
        logs=options.logs,
    )


if __name__ == "__main__":
    sys.exit(main())
