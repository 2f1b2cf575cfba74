"""Draws how what `scale.py` measured grows, and puts its figures into docs/scale.md.

python benchmarks/_scale_plot.py
"""

from __future__ import annotations

import json
import math
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


# --- tables -----------------------------------------------------------------------------------

_BEGIN, _END = "<!-- measured: from here on by benchmarks/_scale_plot.py -->", "<!-- measured -->"
_MIB = 1 << 20
_SAVE_ROWS = (
    ("plans, gathered, MiB", "plans_bytes", _MIB),
    ("unpickled at the coordinator, s", "plans_unpickled_seconds", 1),
    ("`create_global_plan`, s", "global_plan_seconds", 1),
    ("answers, scattered, MiB", "answers_bytes", _MIB),
    ("pickled, s", "answers_pickled_seconds", 1),
    ("write results, gathered, MiB", "results_bytes", _MIB),
    ("unpickled, s", "results_unpickled_seconds", 1),
    ("`.metadata`, MiB", "metadata_bytes", _MIB),
    ("described, encoded, written, s", "metadata_seconds", 1),
    ("a bare write of as many bytes, with fsync, wall s", "bare_write_wall_seconds", 1),
    ("**the coordinator, all of that, s**", "coordinator_seconds", 1),
    ("its memory at the peak, MiB", "peak_growth_bytes", _MIB),
    ("another rank: plan, answer, write, s", "rank_seconds", 1),
    ("outcome, broadcast, MiB", "outcome_bytes", _MIB),
)
_LOAD_ROWS = (
    ("`.metadata`, MiB", "metadata_bytes", _MIB),
    ("decoded, s", "decode_seconds", 1),
    ("a rank's plan made, s", "rank_plan_seconds", 1),
    ("**both, s**", "rank_seconds", 1),
    ("the rank's memory at the peak, MiB", "peak_growth_bytes", _MIB),
    ("plans, gathered, MiB", "plans_bytes", _MIB),
    ("unpickled at the coordinator, s", "plans_unpickled_seconds", 1),
    ("pickled to scatter, s", "answers_pickled_seconds", 1),
)
_LINK_BYTES = 1.25e9  # a second: 10 Gb/s


def tables(content: Mapping[str, Any]) -> str:
    """The figures, in Markdown."""
    results = content["results"]
    groups: dict[str, list[tuple[str, str]]] = {"first": [], "second": [], "load": []}
    for group in sorted(results, key=lambda group: _parsed(group)[1:]):
        stage, ranks, keys = _parsed(group)
        if keys >= _KEYS and ranks not in (16, 128, 512):
            groups[stage] += [(group, variant) for variant in results[group]]
    machine = content["machine"]
    parts = [
        f"Measured on {machine['date'][:10]} on {machine['cores']} cores ({machine['cpu']}), "
        f"torch {machine['torch']}."
    ]
    for stage, heading, rows in (
        ("first", "The first save", _SAVE_ROWS),
        ("second", "A save whose plan is known", _SAVE_ROWS),
        ("load", "A load", _LOAD_ROWS),
    ):
        parts.append(f"### {heading}")
        parts.append(_table(results, groups[stage], rows))
    parts.append("### What the collectives carry")
    parts.append(_traffic(results, groups))
    parts.append("### How it grows")
    parts.append(_exponents(results))
    return "\n\n".join(parts)


def _table(
    results: Mapping[str, Any],
    columns: list[tuple[str, str]],
    rows: tuple[tuple[str, str, int], ...],
) -> str:
    heads = [f"{variant}, {group.split(' ', 1)[1]}" for group, variant in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for what, metric, unit in rows:
        cells = [
            _cell(results[group][variant][metric]["median"] / unit) for group, variant in columns
        ]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _traffic(results: Mapping[str, Any], groups: Mapping[str, list[tuple[str, str]]]) -> str:
    lines = [
        "| | longest, KiB | x ranks, MiB | at 10 Gb/s, s |",
        "|---|---|---|---|",
    ]
    for stage in ("first", "second", "load"):
        for group, variant in groups[stage]:
            _, ranks, _ = _parsed(group)
            figures = results[group][variant]
            for what, metric in (
                ("plans", "longest_plan_bytes"),
                ("answers", "longest_answer_bytes"),
            ):
                longest = figures[metric]["median"]
                lines.append(
                    f"| {variant}, {group}: {what} | {_cell(longest / 1024)} "
                    f"| {_cell(longest * ranks / _MIB)} | {_cell(longest * ranks / _LINK_BYTES)} |"
                )
    return "\n".join(lines)


def _exponents(results: Mapping[str, Any]) -> str:
    lines = ["| | with ranks | with keys |", "|---|---|---|"]
    found: dict[str, dict[str, float | None]] = {}
    for of in ("ranks", "keys"):
        for curve, points in curves(results, of=of):
            found.setdefault(curve.label, {})[of] = exponent(points)
    for label, powers in found.items():
        cells = ["" if powers.get(of) is None else f"{powers[of]:.2f}" for of in ("ranks", "keys")]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def fill(results: Path, page: Path) -> None:
    """Put the tables of the results into a page, between its two marks."""
    text = page.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    made = tables(json.loads(results.read_text()))
    page.write_text(f"{before}{_BEGIN}\n\n{made}\n\n{_END}{after}")


if __name__ == "__main__":
    _root = Path(__file__).resolve().parent.parent
    _results = _root / "benchmarks" / "results" / "scale.json"
    draw(_results, _root / "docs" / "scale.svg")
    fill(_results, _root / "docs" / "scale.md")
