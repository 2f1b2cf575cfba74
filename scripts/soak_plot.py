"""Draws what a soak has sampled, from the committed result of ``make soak``.

python scripts/soak_plot.py [RESULT [PICTURE]]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "torture" / "results" / "soak.json"
PICTURE = RESULT.with_suffix(".svg")

_DRAWN = {
    "memory_bytes": ("resident memory", "MB", 1e6),
    "engine_bytes": ("held by the engine", "MB", 1e6),
    "disk_bytes": ("disk", "MB", 1e6),
    "descriptors": ("descriptors", "", 1),
    "threads": ("threads", "", 1),
    "mappings": ("mappings of memory", "", 1),
    "objects": ("Python objects made since the start", "", 1),
    "children": ("child processes", "", 1),
}


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "pyckpt"  # the same bytes each time
    figure, all_axes = pyplot.subplots(4, 2, figsize=(9, 8), sharex=True)
    saves = result["samples"]["saves"]
    for axes, (name, (title, unit, scale)) in zip(all_axes.flat, _DRAWN.items(), strict=True):
        values = [value / scale for value in result["samples"][name]]
        axes.plot(saves, values, color="#3949ab", linewidth=1)
        axes.set_title(f"{title}, {unit}" if unit else title, fontsize=9)
        axes.set_ylim(0, 1.25 * max(*values, 1))
        axes.axvline(saves[-1] / 2, color="#b0bec5", linewidth=0.8)  # judged from here on
    for axes in all_axes[-1]:
        axes.set_xlabel("saves")
    counts, faults = result["counts"], sum(result["faults"].values())
    figure.suptitle(
        f"{counts['saves']:,} saves, {counts['restores']:,} restores, {faults:,} faults "
        f"({result['date'][:10]}, torch {result['torch']})",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    result = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT
    draw(json.loads(result.read_text()), Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURE)


if __name__ == "__main__":
    main()
