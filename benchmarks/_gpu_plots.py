"""Draws the results of `gpu.py`: they are drawn where they are looked at, not where measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _gpu_common import BARE, OURS


def draw(results: Path) -> Iterator[Path]:
    """Step times beside saves, and the speed of staging. Gives the files that it has written."""
    import matplotlib

    matplotlib.use("Agg")
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))}
    if steps := found.get("gpu-training", {}).get("step_milliseconds"):
        yield _draw_steps(steps, results / "gpu-steps.png")
    groups = {
        group: variants
        for content in found.values()
        for group, variants in content.get("results", {}).items()
        if group.startswith("staging") and BARE in variants
    }
    if groups:
        yield _draw_staging(groups, results / "gpu-staging.png")


def _draw_steps(traces: dict[str, dict[str, list[float]]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(traces), 1, figsize=(9, 2.4 * len(traces)), squeeze=False
    )
    for (saver, phases), axes in zip(traces.items(), all_axes[:, 0], strict=True):
        at = 0
        for phase, values in phases.items():
            axes.plot(range(at, at + len(values)), values, ".-", markersize=3, label=phase)
            at += len(values)
        axes.set(title=saver, xlabel="step", ylabel="ms")
        axes.set_yscale("log")
    all_axes[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _draw_staging(groups: dict[str, dict[str, Any]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(groups), figsize=(4.5 * len(groups), 3.2), squeeze=False
    )
    for (group, variants), axes in zip(groups.items(), all_axes[0], strict=True):
        bare = variants[BARE]["seconds"]["median"]
        speeds = [bare / metrics["seconds"]["median"] for metrics in variants.values()]
        colors = ["tab:orange" if name == OURS else "tab:blue" for name in variants]
        axes.barh(list(variants), speeds, color=colors)
        axes.set(title=group, xlabel="speed over the bare copy's")
        axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
