"""The package as users meet it: names, the stub, and import errors that say what to do."""

from __future__ import annotations

import ast
import importlib
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import pyckpt
from pyckpt import _C, _build, _extension, errors

ROOT = Path(pyckpt.__file__).parent


PUBLIC = ("pyckpt", "pyckpt.errors", "pyckpt.layouts", "pyckpt.merges", "pyckpt.optim")
PUBLIC += ("pyckpt.convert", "pyckpt.events", "pyckpt.exporters", "pyckpt.profiling")
_ELSEWHERE = ("pyckpt.events", "pyckpt.merges")


def module_of(name: str) -> ModuleType:
    # Some are names of the package for modules that lie elsewhere.
    if name in _ELSEWHERE:
        module: ModuleType = getattr(pyckpt, name.removeprefix("pyckpt."))
        return module
    return importlib.import_module(name)


def others(name: str) -> Iterator[ModuleType]:
    """What a public module may import: what is public in another one."""
    return (module_of(other) for other in PUBLIC if other not in (name, "pyckpt"))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    """What can be had from a public module, and is neither private nor a module, is in its
    ``__all__``, and documented."""
    module = module_of(name)
    elsewhere = [getattr(other, key) for other in others(name) for key in other.__all__]
    assert {*dir(module)} >= {*module.__all__}
    for key in module.__all__:
        getattr(module, key)  # is imported now, if it was not
    assert sorted(module.__all__) == sorted(set(module.__all__))
    found = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("pyckpt")
        and value not in elsewhere
    }
    modules = {key for key in module.__all__ if isinstance(getattr(module, key), ModuleType)}
    assert found == set(module.__all__) - modules
    assert all(f"{name}.{key}" in PUBLIC for key in modules)
    for key in module.__all__:
        assert getattr(module, key).__doc__, key


def returned(function: Any) -> Iterator[type]:
    """The classes that a function returns, alone or within others."""
    waiting = [typing.get_type_hints(function).get("return")]
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        if isinstance(hint, type):
            yield hint


def test_what_users_are_given_is_public() -> None:
    public = {
        value
        for name in PUBLIC
        for value in (getattr(module_of(name), key) for key in module_of(name).__all__)
        if isinstance(value, type)
    }
    missing = set()
    for thing in {
        getattr(module_of(name), key) for name in PUBLIC for key in module_of(name).__all__
    }:
        functions = [(thing.__name__, thing)]
        if isinstance(thing, type):
            functions = [
                (f"{thing.__name__}.{key}", getattr(value, "fget", value))
                for cls in thing.__mro__
                if cls.__module__.startswith("pyckpt")
                for key, value in vars(cls).items()
                if not key.startswith("_") and isinstance(value, FunctionType | property)
            ]
        for name, function in functions:
            if isinstance(function, FunctionType):
                missing |= {
                    name
                    for cls in returned(function)
                    if cls.__module__.startswith("pyckpt") and cls not in public
                }
    assert missing == FOR_ADAPTERS


FOR_ADAPTERS = {"Engine.native", "PinnedStager.begin"}
"""What the rooms of the package call on public objects, and nobody else should."""


def test_names_are_imported_when_they_are_asked_for() -> None:
    """What they need takes ten times as long to import as all of pyckpt. Types are known before."""
    homes = {**pyckpt._HOMES, **pyckpt._MODULES}
    assert {*homes, "errors", "layouts"} == {*pyckpt.__all__}
    module = ast.parse((ROOT / "__init__.py").read_text())
    (typed,) = (
        node
        for node in module.body
        if isinstance(node, ast.If) and "import" in ast.unparse(node)[:40]
    )
    known = {
        alias.name: f"{node.module}.{alias.name}" if alias.name in pyckpt._MODULES else node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert known == homes
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        pyckpt.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_asked_for() -> None:
    script = (
        "import sys, torch; before = {*sys.modules}; import pyckpt;"
        "print(*({*sys.modules} - before), sep='\\n')"
    )
    imported = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "pyckpt._C" in imported
    assert not [
        name for name in imported if name.startswith(("torch.distributed", "torch._dynamo"))
    ]


def test_changelog_has_the_version() -> None:
    setup = (ROOT.parent / "setup.py").read_text()
    (version,) = re.findall(r'^VERSION = "(.+)"', setup, re.MULTILINE)
    changelog = (ROOT.parent / "CHANGELOG.md").read_text()
    heading = "Unreleased" if ".dev" in version else version
    assert re.search(rf"^## \[?{re.escape(heading)}", changelog, re.MULTILINE)


def parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return [name for name in names + [a.arg for a in arguments.kwonlyargs] if name != "self"]


def documented_parameters(function: object) -> list[str]:
    """Of a native function, from the signature that pybind11 puts first into its documentation."""
    signature = (function.__doc__ or "").strip().splitlines()[0]
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    # Commas inside brackets and defaults do not count.
    inside = re.sub(r"\[[^\]]*\]", "", re.sub(r"\[[^\[\]]*\]", "", inside))
    names = [part.split(":")[0].split("=")[0].strip() for part in inside.split(",")]
    return [name for name in names if name not in ("self", "*", "")]


def test_stub_matches_the_module() -> None:
    stub = ast.parse((ROOT / "_C.pyi").read_text())
    names = set()
    for node in stub.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
            assert parameters(node) == documented_parameters(getattr(_C, node.name)), node.name
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            check_class(node, getattr(_C, node.name))
    assert names == {name for name in vars(_C) if not name.startswith("__")}


def check_class(node: ast.ClassDef, cls: type) -> None:
    members = set()
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            members.add(member.target.id)
        elif isinstance(member, ast.FunctionDef):
            members.add(member.name)
            if not member.decorator_list:
                found = documented_parameters(getattr(cls, member.name))
                assert parameters(member) == found, f"{node.name}.{member.name}"
    members -= {"__init__", "__len__"}
    assert members == {name for name in vars(cls) if not name.startswith("_")}, node.name


def test_errors_are_one_family_and_cross_processes() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, OSError if cls is errors.NotDurable else errors.PyckptError)
        assert name in (errors.__doc__ or "")
        copy = pickle.loads(pickle.dumps(cls("what happened")))
        assert type(copy) is cls
        assert str(copy) == "what happened"


def test_built_against_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "torch_version", "1.0.1+cpu")
    with pytest.raises(ImportError) as info:
        _extension.check_extension()
    message = str(info.value)
    assert "1.0.1+cpu" in message
    assert torch.__version__ in message
    assert "pip install" in message


def test_built_with_cuda_that_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "cuda_version", "11.1")
    with pytest.raises(ImportError, match=r"CUDA 11\.1.*pip install"):
        _extension.check_extension()


def test_a_patch_release_of_torch_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    monkeypatch.setattr(_build, "torch_version", f"{release}.99+cu999")
    _extension.check_extension()
