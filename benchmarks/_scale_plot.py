"""Draws how what `scale.py` measured grows, and tells the exponents.

python benchmarks/_scale_plot.py
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_KEYS, _RANKS = 1000, 256
"""What stays as it is where the other grows."""
# Below this a figure is what calls cost, and says nothing of growth.
_LEAST_SECONDS = 0.02


class _Curve(NamedTuple):
    label: str
    stage: str
    variant: str
    metric: str


_CURVES = (
    _Curve("first save, coordinator", "first", "pyckpt", "coordinator_seconds"),
    _Curve("second save, coordinator", "second", "pyckpt", "coordinator_seconds"),
    _Curve("the same without metadata", "second", "pyckpt", "without_metadata_seconds"),
    _Curve("second save, another rank", "second", "pyckpt", "rank_seconds"),
    _Curve("load, metadata and plan of a rank", "load", "pyckpt", "rank_seconds"),
    _Curve("stock: save, coordinator", "first", "stock", "coordinator_seconds"),
    _Curve("stock: load, a rank", "load", "stock", "rank_seconds"),
)

_Points = list[tuple[int, float]]


def curves(results: Mapping[str, Any], *, of: str) -> Iterator[tuple[_Curve, _Points]]:
    """The figures that there are, by ranks or by keys."""
    for curve in _CURVES:
        points: _Points = []
        for group, variants in results.items():
            stage, ranks, keys = _parsed(group)
            figures = variants.get(curve.variant)
            if stage != curve.stage or figures is None:
                continue
            fixed, at = (keys == _KEYS, ranks) if of == "ranks" else (ranks == _RANKS, keys)
            if fixed:
                points.append((at, figures[curve.metric]["median"]))
        if len(points) > 1:
            yield curve, sorted(points)


def _parsed(group: str) -> tuple[str, int, int]:
    stage, size = group.split(" ", 1)
    ranks, keys = (int(number.replace(",", "")) for number in size.split(" x "))
    return stage, ranks, keys


def exponent(points: _Points) -> float | None:
    """Of the power that fits best; None where too little can be seen."""
    logs = [(math.log(x), math.log(y)) for x, y in points if y >= _LEAST_SECONDS]
    if len(logs) < 2:
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return float(sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread)


def draw(results: Path, path: Path) -> None:
    """Draw the results that are in a file; say so where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: nothing is drawn")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pyckpt"  # the same bytes for the same figures
    from matplotlib import pyplot

    content = json.loads(results.read_text())["results"]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for axes, of, what in (
        (both[0], "ranks", f"ranks, of {_KEYS:,} keys"),
        (both[1], "keys", f"keys, of {_RANKS} ranks"),
    ):
        for curve, points in curves(content, of=of):
            power = exponent(points)
            grows = "" if power is None else f" ({power:.2f})"
            style = "--" if curve.variant == "stock" else "-"
            axes.plot(*zip(*points, strict=True), "o" + style, ms=3, label=curve.label + grows)
        axes.set(xscale="log", yscale="log", xlabel=what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    both[0].set_ylabel("CPU seconds")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


if __name__ == "__main__":
    _root = Path(__file__).resolve().parent.parent
    draw(_root / "benchmarks" / "results" / "scale.json", _root / "docs" / "scale.svg")
    sys.exit(0)
