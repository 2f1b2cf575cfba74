"""The order in which the rooms of the package stand on each other, as CONTRIBUTING.md has it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pyckpt

PACKAGE = Path(pyckpt.__file__).parent

FLOOR = {"_C", "activity", "collector", "errors", "locks", "printable", "speaking", "timeline"}
"""What every room may use."""
MAY_USE = {
    "": {"_extension", "bars", "convert", "dcp", "engine", "errors", "exporters", "layouts"}
    | {"optim", "recording", "statistics", "train", "train.state", "train.store"},
    "_extension": {"_C", "_build"},
    "_build": set(),
    "_C": set(),
    "errors": {"printable"},
    "printable": set(),
    "locks": set(),
    "speaking": set(),
    "activity": {"locks", "printable"},
    "bars": {"activity", "printable"},
    "exporters": {"format", "locks", "train"},
    "timeline": set(),
    "recording": {"_C", "timeline"},
    "collector": {"locks"},
    "guard": {"locks", "speaking"},
    "layouts": set(),
    "statistics": {"_C"},
    "engine": FLOOR,
    "private": set(),
    "format": FLOOR | {"private"},
    "remote": FLOOR,
    "optim": FLOOR | {"guard"},
    # Of optim it asks one thing: which optimizers change parameters without a step.
    "dcp": FLOOR | {"engine", "format", "guard", "optim", "private", "remote", "statistics"},
    "train": FLOOR
    | {"dcp", "engine", "format", "layouts", "optim", "statistics"}
    | {"remote", "train.arguments", "train.nodes", "train.state", "train.store", "train.sync"}
    | {"train.tiers"},
    "train.arguments": {"remote"},
    # These three do not know each other.
    "train.state": FLOOR | {"dcp", "format", "optim"},
    "train.store": FLOOR
    | {"dcp", "engine", "format", "layouts", "private", "remote", "train.arguments"},
    "train.tiers": FLOOR | {"format", "remote", "train.arguments", "train.store"},
    "train.sync": FLOOR | {"dcp", "train.arguments"},
    # Where each node has a directory of its own.
    "train.nodes": FLOOR
    | {"dcp", "engine", "format", "private", "remote", "train.store", "train.sync", "train.tiers"},
    # What comes from other programs, and goes to them; it stands on all that saves and loads.
    "convert": FLOOR
    | {"dcp", "engine", "format", "optim", "statistics", "train"}
    | {"remote", "train.arguments", "train.state", "train.store", "train.sync"},
    "profiling": {"locks"},
    "tools": FLOOR | {"", "dcp", "engine", "format", "remote", "statistics", "train.store"},
    "__main__": {"cli"},
    "cli": FLOOR
    | {"", "convert", "dcp", "engine", "format", "optim", "profiling", "remote", "statistics"}
    | {"tools", "train"}
    | {"train.state", "train.store"},
    # What a program could import; nothing else imports an integration.
    "integrations": FLOOR
    | {"", "dcp", "engine", "format", "optim", "train", "train.arguments"}
    | {"train.state", "train.store", "train.sync"},
}


@cache
def modules() -> dict[str, Path]:
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names | {"_C": PACKAGE / "_C.pyi"}


def room_of(module: str) -> str:
    parts = module.split(".")
    return max((".".join(parts[:n]) for n in (0, 1, 2) if ".".join(parts[:n]) in MAY_USE), key=len)


def imports(module: str, path: Path) -> Iterator[str]:
    """The modules of the package that a module imports, wherever in it."""
    names = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports by a relative name"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.split(".")[0] != "pyckpt":
                continue
            inside = name.removeprefix("pyckpt").removeprefix(".")
            # What is imported may be a module, or a name of one.
            inside = inside if inside in names else inside.rpartition(".")[0]
            if inside:
                yield inside


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module: str) -> None:
    room = room_of(module)
    wrong = {
        name
        for name in imports(module, modules()[module])
        if room_of(name) not in {room, *MAY_USE[room]}
    }
    assert not wrong, f"{module}, in {room or 'the root'}, must not import {wrong}"


def test_rooms_form_no_circle() -> None:
    tuple(TopologicalSorter(MAY_USE).static_order())


def test_modules_form_no_circle() -> None:
    """Also those of one room."""
    graph = {
        module: {name for name in imports(module, path) if name != module}
        for module, path in modules().items()
    }
    tuple(TopologicalSorter(graph).static_order())
