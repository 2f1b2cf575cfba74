"""What mkdocs does besides, when it builds the documentation (mkdocs.yml names this file).

- An entry of the navigation with a ``*`` stands for all pages of that name.
- Files outside of docs/ that pages link to (examples, CONTRIBUTING.md) become pages of the site.
- The page reference/command-line.md is made of the commands themselves.
- ``<!-- all other names of pyckpt -->`` on a page of the reference stands for the public names of
  that package that the page does not have yet, so that none is left out.
"""

from __future__ import annotations

import ast
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".toml": "toml"}


def on_config(config: Any) -> Any:
    pages = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
    listed = {entry for entry in _entries(config.nav) if "*" not in entry}
    config.nav = _expand(config.nav, [page for page in pages if page not in listed])
    return config


def _entries(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for value in entry.values():
                found += [value] if isinstance(value, str) else _entries(value)
    return found


def _expand(nav: list[Any], pages: list[str]) -> list[Any]:
    """The navigation, with the pages that its patterns match, and without empty sections."""
    expanded: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            if "*" in entry:
                expanded += [
                    page
                    for page in pages
                    if page.count("/") == entry.count("/") and fnmatchcase(page, entry)
                ]
            else:
                expanded.append(entry)
            continue
        for title, value in entry.items():
            inside = value if isinstance(value, str) else _expand(value, pages)
            if inside:
                expanded.append({title: inside})
    return expanded


# --- files outside of docs/ -----------------------------------------------------------------------

_homes: dict[Path, str] = {}
"""For each file outside of docs/ that the site has: its page."""


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "reference/command-line.md", content=command_line()))
    _homes.clear()
    waiting = [page for page in files.documentation_pages() if page.abs_src_path]
    texts = {Path(page.abs_src_path): page.content_string for page in waiting}
    while texts:
        path, text = texts.popitem()
        for target in _outside(path, text):
            if target in _homes:
                continue
            name = target.relative_to(ROOT).as_posix()
            _homes[target] = f"source/{name.removesuffix('.md')}.md"
            content = _page_of(target)
            generated = File.generated(config, _homes[target], content=content)
            generated.inclusion = generated.inclusion.NOT_IN_NAV
            files.append(generated)
            if target.suffix == ".md":
                texts[target] = content
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    origins = {home: path for path, home in _homes.items()}
    path = origins.get(uri, DOCS / uri)
    here = Path(uri).parent

    def moved(match: re.Match[str]) -> str:
        target = _resolved(path, match[2])
        if target in _homes:
            home = _homes[target]
        elif uri in origins and target.is_relative_to(DOCS):
            home = target.relative_to(DOCS).as_posix()
        elif target.is_dir() and target.is_relative_to(DOCS):
            home = min(target.glob("*.md")).relative_to(DOCS).as_posix()
        else:
            return match[0]
        return f"{match[1]}{os.path.relpath(home, here)}{match[3]}"

    markdown = _OTHERS.sub(lambda match: _other_names(match[1], markdown), markdown)
    return _LINK.sub(moved, markdown)


_OTHERS = re.compile(r"^<!-- all other names of (pyckpt[.\w]*) -->$", re.MULTILINE)
_MODULES = {"errors", "layouts", "merges", "optim"}  # pages of their own


def _other_names(package: str, page: str) -> str:
    source = ROOT / package.replace(".", "/")
    source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
    names: list[str] = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    described = {line.rpartition(".")[2] for line in page.splitlines() if line.startswith("::: ")}
    others = [name for name in names if name not in described and name not in _MODULES]
    entries = "\n\n".join(
        f"::: {package}.{name}\n    options: {{heading_level: 3}}" for name in others
    )
    return f"## Besides\n\n{entries}" if others else ""


def _resolved(path: Path, link: str) -> Path:
    return Path(os.path.normpath(path.parent / link))


def _outside(path: Path, text: str) -> list[Path]:
    """The files of the repository, outside of docs/, that a page links to."""
    targets = [_resolved(path, match[2]) for match in _LINK.finditer(text)]
    return [
        target
        for target in targets
        if target.is_relative_to(ROOT) and not target.is_relative_to(DOCS) and target.exists()
    ]


def _page_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    files = sorted(path.glob("*.*")) if path.is_dir() else [path]
    parts = [f"# {path.relative_to(ROOT).as_posix()}"]
    for file in files:
        if path.is_dir():
            parts.append(f"## {file.name}")
        parts.append(f"````{_LANGUAGES.get(file.suffix, '')}\n{file.read_text()}````")
    return "\n\n".join(parts) + "\n"


# --- the command line -----------------------------------------------------------------------------


def command_line() -> str:
    """The page of all commands, as ``pyckpt COMMAND --help`` describes them."""
    import typer.main

    from pyckpt.cli.app import app

    program: Any = typer.main.get_command(app)
    parts = [
        "# Commands",
        "Made from the commands themselves: `pyckpt COMMAND --help` says the same. "
        "`python -m pyckpt` is another way to start them. "
        'They need `pip install "pyckpt[cli]"`.',
        _options(program),
    ]
    for name, command in getattr(program, "commands", {}).items():
        if command.hidden:
            continue
        arguments = " ".join(
            f"[{part}]" if not parameter.required else part
            for parameter in command.params
            if parameter.param_type_name == "argument"
            for part in [(parameter.metavar or parameter.name or "").strip("[]").upper()]
        )
        parts += [
            f"## pyckpt {name}",
            f"```text\npyckpt {name} {'[OPTIONS] ' if command.params else ''}{arguments}\n```",
            _prose(command.help or ""),
            _options(command),
        ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _options(command: Any) -> str:
    """A table of what a command takes."""
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            names = (parameter.metavar or parameter.name or "").strip("[]").upper()
        else:
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        shown = "" if default in (None, False, (), []) or callable(default) else f"`{default}`"
        help_text = " ".join((getattr(parameter, "help", None) or "").split())
        rows.append(f"| `{names}` | {_cell(help_text)} | {shown} |")
    if not rows:
        return ""
    return "\n".join(["| takes | meaning | default |", "|---|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


def _prose(text: str) -> str:
    """A docstring as Markdown; typer's mark for "do not wrap" is taken away."""
    return text.replace("\b", "").strip()
