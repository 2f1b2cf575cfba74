"""The pictures in the documentation are of the results and pages that are there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLOTS = runpy.run_path(str(ROOT / "scripts" / "docs_plots.py"))
PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.parametrize("name", list(PLOTS["PLOTS"]))
def test_a_plot_was_drawn_from_the_results_that_are_here(name: str) -> None:
    """If not: make pictures."""
    _, sources = PLOTS["PLOTS"][name]
    assert PLOTS["digest"](*sources) in (PICTURES / name).read_text()


def test_each_picture_is_shown() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^]]*\]\(([^)]+\.svg)\)", page.read_text())
    }
    assert {*PICTURES.glob("*.svg")} <= shown
    assert all(path.exists() for path in shown)


def test_the_numbers_of_the_readme_are_those_of_the_results() -> None:
    results = PLOTS["Results"]
    save, load, stall = results("save"), results("load"), results("stall")
    readme = (ROOT / "README.md").read_text()

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:,.0f} ms"

    guarded = [
        stall.median("guarded", variant)
        for variant in ("pyckpt", "FileSystemWriter (stock)", "FileSystemWriter, DefaultStager")
    ]
    small = [stall.median("small", variant) for variant in ("pyckpt", "FileSystemWriter (stock)")]
    saved = [
        save.speed("large", variant)
        for variant in ("DirectWriter", "FileSystemWriter, thread_count=4", "fio")
    ]
    loaded = [
        load.speed("large", variant)
        for variant in ("DirectReader under dcp.load, our file", "FileSystemReader, our file")
    ]
    writers = ("DirectWriter, known plan", "FileSystemWriter, thread_count=1")
    readers = ("pyckpt.load, our file", "FileSystemReader, our file")
    rows = {
        "an asynchronous save of 2 GiB": map(ms, guarded),
        "of 5,000 tensors of 16 KiB": map(ms, small),
        "saving 2 GiB, durable": (f"{speed:.2f} GB/s" for speed in saved),
        "loading 2 GiB": (f"{speed:.2f} GB/s" for speed in loaded),
        "floats again, CPU time": (ms(save.median("mixed", v, "cpu_seconds")) for v in writers),
        "loading them, CPU time": (ms(load.median("mixed", v, "cpu_seconds")) for v in readers),
    }
    for title, numbers in rows.items():
        (row,) = [line for line in readme.splitlines() if line.startswith("|") and title in line]
        for number in numbers:
            assert number in row
