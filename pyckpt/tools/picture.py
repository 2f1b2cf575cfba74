"""Draws a trace: a row for each thread, a colour for each thing that threads do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from pyckpt.printable import printable
from pyckpt.tools.trace import Span, Thread, Trace

__all__ = ["draw"]

COLOURS = {
    "stage": "#4c78a8",
    "copy": "#72b7b2",
    "checksum": "#54a24b",
    "write": "#f58518",
    "read": "#b279a2",
    "sync": "#e45756",
    "commit": "#9d755d",
    "plan": "#bab0ac",
}
OTHERS = ("#eeca3b", "#ff9da6", "#79706e", "#d67195", "#83bcb6", "#88d27a")
WAITING = "#e8e8e8"
"""Of all that begins with "wait"."""
RESOLUTION = 4000
"""Of the picture's width. Spans of one name that are closer are drawn as one."""


def draw(trace: Trace, path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw a trace into a file, in the format that its name ends with: ``.svg``, ``.png``, ...

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
        ValueError: the trace is empty, or matplotlib does not know the format.
    """
    if not trace.spans:
        raise ValueError("the trace has no spans, so there is nothing to draw")
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install 'pyckpt[pictures]'", name="matplotlib"
        ) from error
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # The same trace makes the same file.
    settings: dict[Any, Any] = {"svg.hashsalt": "pyckpt", "svg.fonttype": "none", "font.size": 9}
    settings["text.parse_math"] = False  # names are shown as they are
    with matplotlib.rc_context(settings):
        lanes = _lanes(trace)
        figure = Figure(figsize=(11, 1.2 + 0.28 * len(lanes)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        scale, unit = (1, "s") if trace.seconds >= 1 else (1000, "ms")
        colours = _colours(trace)
        for at, (_, spans) in enumerate(lanes):
            for name in colours:
                bars = _merged([s for s in spans if s.name == name], trace.seconds / RESOLUTION)
                if bars:
                    axes.broken_barh(
                        [(begin * scale, max(lasts, 0) * scale) for begin, lasts in bars],
                        (at - 0.42, 0.84),
                        facecolor=colours[name],
                        linewidth=0,
                    )
        axes.set_yticks(range(len(lanes)), [printable(label) for label, _ in lanes])
        axes.set_ylim(len(lanes) - 0.4, -0.6)
        axes.set_xlim(0, trace.seconds * scale)
        axes.set_xlabel(unit)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(left=False)
        if title:
            axes.set_title(printable(title), loc="left")
        figure.legend(
            handles=[
                Patch(facecolor=colour, label=printable(name)) for name, colour in colours.items()
            ],
            loc="outside lower center",
            ncols=min(len(colours), 9),
            frameon=False,
        )
        metadata: dict[str, Any] = {"Date": None} if os.fspath(path).endswith(".svg") else {}
        figure.savefig(path, metadata=metadata or None, dpi=150)


def _lanes(trace: Trace) -> list[tuple[str, list[Span]]]:
    """Rows of spans that do not overlap: one for each thread, or several where spans contain
    others."""
    several = len({span.thread.process for span in trace.spans}) > 1
    by_thread: dict[Thread, list[Span]] = {thread: [] for thread in trace.threads()}
    for span in trace.spans:
        by_thread[span.thread].append(span)
    lanes = []
    for thread, spans in by_thread.items():
        label = trace.name_of(thread)
        if several:
            label = f"{trace.process_name(thread.process)}: {label}"
        for depth, row in enumerate(_by_depth(spans)):
            lanes.append((label if depth == 0 else "", row))
    return lanes


def _by_depth(spans: Sequence[Span]) -> list[list[Span]]:
    rows: list[list[Span]] = []
    open_ends: list[float] = []
    for span in spans:  # in the order in which they begin, the longer first
        while open_ends and open_ends[-1] <= span.begin:
            open_ends.pop()
        if len(open_ends) == len(rows):
            rows.append([])
        rows[len(open_ends)].append(span)
        open_ends.append(span.end)
    return rows


def _merged(spans: Sequence[Span], gap: float) -> list[tuple[float, float]]:
    """Begin and length of bars. A picture of a million spans is no larger than it can show."""
    bars: list[list[float]] = []
    for span in spans:
        if bars and span.begin - bars[-1][1] < gap:
            bars[-1][1] = max(bars[-1][1], span.end)
        else:
            bars.append([span.begin, span.end])
    return [(begin, max(end - begin, gap)) for begin, end in bars]


def _colours(trace: Trace) -> dict[str, str]:
    """Of all names in the trace: those that are always the same first, and waits last."""
    names = {span.name for span in trace.spans}
    waits = sorted(name for name in names if name.startswith("wait"))
    others = sorted(names - set(COLOURS) - set(waits))
    colours = {name: colour for name, colour in COLOURS.items() if name in names}
    colours |= {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}
    return colours | dict.fromkeys(waits, WAITING)
