"""Draws the results of `gpu.py`: they are drawn where they are looked at, not where measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from _gpu_common import BARE, BESIDE, OURS


def draw(results: Path) -> Iterator[Path]:
    """Step times beside saves, and the speed of staging. Gives the files that it has written."""
    import matplotlib

    matplotlib.use("Agg")
    found = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("gpu-*.json"))}
    steps: dict[str, dict[str, list[float]]] = {}
    for name in ("gpu-training", "gpu-training-beside"):
        steps |= found.get(name, {}).get("step_milliseconds", {})
    if steps:
        yield _draw_steps(steps, results / "gpu-steps.png")
    speeds: dict[str, dict[str, float]] = {}
    for content in found.values():
        for group, variants in content.get("results", {}).items():
            if group.startswith("staging") and BARE in variants:
                bare = variants[BARE]["seconds"]["median"]
                of_group = speeds.setdefault(group.partition(BESIDE)[0], {})
                # Each over the bare copy that was measured in turn with it.
                of_group |= {v: bare / m["seconds"]["median"] for v, m in variants.items()}
    if speeds:
        yield _draw_staging(speeds, results / "gpu-staging.png")


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


def _draw_staging(groups: dict[str, dict[str, float]], path: Path) -> Path:
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        1, len(groups), figsize=(4.5 * len(groups), 3.2), squeeze=False
    )
    for (group, speeds), axes in zip(groups.items(), all_axes[0], strict=True):
        colors = ["tab:orange" if name == OURS else "tab:blue" for name in speeds]
        axes.barh(list(speeds), list(speeds.values()), color=colors)
        axes.set(title=group, xlabel="speed over the bare copy's")
        axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
