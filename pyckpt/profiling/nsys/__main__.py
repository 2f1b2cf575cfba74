"""``python -m pyckpt.profiling.nsys``: a report, or two side by side, as tables or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from pyckpt.profiling.nsys.comparison import compare
from pyckpt.profiling.nsys.report import read


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pyckpt.profiling.nsys",
        description="Synchronisations and copies in a report of Nsight Systems, or in two.",
    )
    parser.add_argument("report", help="an .nsys-rep, or what nsys export --type sqlite made of it")
    parser.add_argument("other", nargs="?", help="another, to compare with: before, then after")
    parser.add_argument("--range", metavar="NAME", help="only what happens in this NVTX range")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chosen = parser.parse_args(arguments)
    try:
        report = read(chosen.report)
        comparison = None
        if chosen.other is not None:
            comparison = compare(report, read(chosen.other), range=chosen.range)
        if chosen.json:
            shown = comparison.as_dict() if comparison else report.as_dict(range=chosen.range)
            print(json.dumps(shown, indent=1))
            return 0
        from pyckpt.profiling.nsys import tables

        # A pipe has no width, so set one that cuts no column.
        console = tables.Console(width=None if sys.stdout.isatty() else 200, highlight=False)
        if comparison is None:
            tables.show_report(report, range=chosen.range, console=console)
        else:
            tables.show_comparison(comparison, console=console)
    except (ImportError, OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
