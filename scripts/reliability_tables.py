"""Makes the tables of docs/reliability.md from the committed results of torture/.

python scripts/reliability_tables.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; tests/docs compares.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "torture" / "results"
PAGE = ROOT / "docs" / "reliability.md"

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]


def read(name: str) -> Result | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _many(count: float, thing: str) -> str:
    plural = "es" if thing.endswith("ss") else "s"
    return f"{_number(count)} {thing}{'' if count == 1 else plural}"


def _when(result: Result) -> str:
    changed = ", changed" if result.get("changed") else ""
    return f"{result['date'][:10]}, {(result.get('commit') or 'unknown')[:7]}{changed}"


# --- all runs -------------------------------------------------------------------------------------

Told = tuple[str, str]
"""What was counted, and what was lost or wrong of that."""


def _faults(kind: str) -> Callable[[Result], Told]:
    def told(result: Result) -> Told:
        one = result[kind]
        late = one["faults"].get("delay", 0)
        return (
            f"{_many(one['verified'], 'verified case')} at {len(one['calls'])} system calls, "
            f"{len(one['faults'])} kinds of faults; {_number(sum(one['faults'].values()) - late)} "
            f"failures, {_many(late, 'delay')}; {_number(result['by_this_harness'][kind])} of the "
            "cases by the harness as it is now, "
            f"{_number(result['by_this_code'][kind])} by the code of that commit",
            _number(one["deviations"]),
        )

    return told


def _power(result: Result) -> Told:
    return (
        f"{_many(result['states'], 'distinct state')} in {_many(len(result['scenarios']), 'run')}; "
        f"{result['syncs_noticed']} of {result['syncs_left_out']} syncs missed when left out",
        _number(result["violations"]),
    )


def _ranks(result: Result) -> Told:
    verified = result["counts"].get("verified", 0)
    return f"{_many(verified, 'verified case')} on {result['ranks']} ranks", str(
        len(result["wrong"])
    )


def _restarts(result: Result) -> Told:
    return (
        f"{_many(result['kills'], 'kill')}, {_many(result['restarts'], 'restart')} of "
        f"{result['ranks']} ranks, {_many(result['steps'], 'step')}",
        str(len(result["wrong"])),
    )


def _filesystems(result: Result) -> Told:
    outcomes = Counter(one["outcome"] for one in result["file_systems"].values())
    skipped = f", {outcomes['skipped']} lacking here" if outcomes["skipped"] else ""
    return f"{outcomes['held'] + outcomes['failed']} tried{skipped}", str(outcomes["failed"])


def _fuzz(result: Result) -> Told:
    return (
        f"{_many(result['executions'], 'input')} for {len(result['parsers'])} parsers, "
        f"{_number(result['cpu_seconds'])} CPU seconds, "
        f"{_number(sum(one['by_this_code'] for one in result['parsers'].values()))} of them by the "
        "code of that commit",
        _number(sum(one["findings"] for one in result["parsers"].values())),
    )


def _concurrency(result: Result) -> Told:
    return (
        f"{_many(result['processes'], 'process')}, {_many(result['told_committed'], 'checkpoint')}",
        str(len(result["wrong"])),
    )


def _soak(result: Result) -> Told:
    counts = result["counts"]
    return (
        f"{_many(counts['saves'], 'save')}, {_many(counts['restores'], 'restore')}, "
        f"{_many(sum(result['faults'].values()), 'fault')}",
        str(len(result["wrong"])),
    )


RUNS: tuple[tuple[str, str, str, Callable[[Result], Told]], ...] = (
    ("one fault at a system call", "faults", "make torture", _faults("singles")),
    ("two faults, one after the other", "faults", "make torture", _faults("pairs")),
    ("the power fails", "power", "make torture-power", _power),
    ("a rank dies, stops, is slow, lacks something", "ranks", "python -m torture.ranks", _ranks),
    ("a job under torchrun is killed", "restarts", "make restarts", _restarts),
    ("other file systems", "filesystems", "python -m torture.filesystems", _filesystems),
    ("damaged and hostile input", "fuzz", "make fuzz", _fuzz),
    (
        "everything at once, and any end of a process",
        "concurrency",
        "make torture-concurrency",
        _concurrency,
    ),
    ("weeks of saves, with faults", "soak", "make soak", _soak),
)


def runs() -> str:
    rows = []
    for title, name, command, told in RUNS:
        result = read(name)
        if result is None:
            rows.append([title, f"`{command}`", "not run yet", "", ""])
        else:
            rows.append([title, f"`{command}`", _when(result), *told(result)])
    head = ["what is tried", "command", "last run", "counted", "lost, wrong or hung"]
    return _table(head, rows)


# --- in detail ------------------------------------------------------------------------------------


def faults() -> str:
    result = read("faults")
    if result is None:
        return "Not run yet: `make torture`.\n"
    names = sorted({*result["singles"]["scenarios"], *result["pairs"]["scenarios"]})
    sizes: dict[str, list[Counter[str]]] = {}
    for name in names:
        scenario, _, size = name.partition("@")
        both = sizes.setdefault(scenario, [Counter(), Counter()])
        for counter, kind in zip(both, ("singles", "pairs"), strict=True):
            counter[size] += result[kind]["scenarios"].get(name, 0)
    rows = [
        [scenario, ", ".join(sorted({*one, *two})), _number(one.total()), _number(two.total())]
        for scenario, (one, two) in sizes.items()
    ]
    total = [
        "all",
        "",
        _number(result["singles"]["verified"]),
        _number(result["pairs"]["verified"]),
    ]
    return _table(["action", "ranks", "single faults", "pairs"], [*rows, total])


def power() -> str:
    result = read("power")
    if result is None:
        return "Not run yet: `make torture-power`.\n"
    counted: Counter[str] = Counter()
    for scenario in result["scenarios"].values():
        counted.update(scenario["states_by_model"])
    rows = [[name, _number(count)] for name, count in counted.items()]
    return _table(["model", "states"], rows)


def filesystems() -> str:
    result = read("filesystems")
    if result is None:
        return "Not run yet: `python -m torture.filesystems`.\n"
    rows = [
        [name, one["outcome"], str(one.get("why", ""))[:120].replace("|", "/")]
        for name, one in result["file_systems"].items()
    ]
    return _table(["place", "outcome", ""], rows)


# --- side by side ---------------------------------------------------------------------------------

_SITUATIONS = {
    "first save": ("first",),
    "next save": ("next",),
    "overwrite": ("overwrite",),
    "load": ("load",),
    "flipped bit": ("flip",),
}
_BAD = ("silent loss", "wrong values", "damage", "trap", "hang")


def peers() -> str:
    result = read("peers")
    if result is None:
        return "Not run yet: `python -m torture.peers`.\n"
    cells: dict[str, dict[str, Counter[str]]] = {}
    for cell in result["cells"]:
        situation = next(k for k, names in _SITUATIONS.items() if cell["situation"] in names)
        found = cells.setdefault(cell["system"], {}).setdefault(situation, Counter())
        found.update(cell["outcomes"])
    rows = [
        [f"`{system}`" if "." in system or system[0].isupper() else system]
        + [_cell(found.get(situation)) for situation in _SITUATIONS]
        for system, found in cells.items()
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        _table(["", *_SITUATIONS], rows)
        + f"\n{_many(result['verified'], 'verified fault')}, seed {result['seed']}, "
        f"{_when(result)}; {versions}. `python -m torture.peers`\n"
    )


def _cell(outcomes: Counter[str] | None) -> str:
    if not outcomes:
        return "not tried"
    total = outcomes.total()
    bad = [f"{outcomes[name]} {name}" for name in _BAD if outcomes[name]]
    count = sum(outcomes[name] for name in _BAD)
    return f"**{count}** of {total}: {', '.join(bad)}" if bad else f"0 of {total}"


def examples() -> str:
    """One case of each kind for each peer, by which it can be repeated."""
    result = read("peers")
    if result is None:
        return "Not run yet: `python -m torture.peers`.\n"
    rows = list(_examples(result))
    if not rows:
        return "None.\n"
    return _table(["", "what became of it", "the case"], rows)


def _examples(result: Result) -> Iterator[list[str]]:
    seen = set()
    for cell in result["cells"]:
        for outcome, found in cell["examples"].items():
            key = (cell["system"], cell["situation"], outcome)
            if key not in seen:
                seen.add(key)
                case = found[0]["case"].partition("|")[2].replace("|", r"\|")
                yield [cell["system"], outcome, f"`{case}`"]


TABLES: dict[str, Callable[[], str]] = {
    "runs": runs,
    "peers": peers,
    "examples": examples,
    "faults": faults,
    "power": power,
    "filesystems": filesystems,
}


def made(page: str) -> str:
    """The page, with its tables as the results are."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text()))
    print(PAGE)
