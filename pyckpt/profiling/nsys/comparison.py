"""Two reports side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from pyckpt.profiling.nsys.report import Report, Totals

_EMPTY = Totals(0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Difference:
    """One number of both reports."""

    name: str
    """A field of `Totals`, or an API call, or a direction and the kinds of memory of copies."""
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`. ``syncs`` and ``copies`` omit rows that are zero in both reports."""

    before: str
    after: str
    range: str | None
    totals: tuple[Difference, ...]
    syncs: tuple[Difference, ...]
    """Calls by which the host waited, by API."""
    copies: tuple[Difference, ...]
    """Copies, by direction and kinds of memory."""

    @property
    def more_syncs(self) -> bool:
        """Whether stream, device and event synchronisations together are more than before."""
        return sum(row.change for row in self.totals if row.name.endswith("_syncs")) > 0

    def as_dict(self) -> dict[str, Any]:
        """All of it, in a form for JSON."""
        return asdict(self)


def compare(before: Report, after: Report, *, range: str | None = None) -> Comparison:
    """Compare two reports, or one range of both.

    If one report lacks the range, its counts are zero.

    Raises:
        ValueError: neither report has the range.
    """
    if range is not None and range not in before.ranges:
        after.totals(range=range)  # raises if neither has it

    def there(report: Report) -> bool:
        return range is None or range in report.ranges

    totals = [asdict(r.totals(range=range) if there(r) else _EMPTY) for r in (before, after)]
    syncs = [Counter[str](), Counter[str]()]
    copies = [Counter[str](), Counter[str]()]
    for index, report in enumerate((before, after)):
        if not there(report):
            continue
        for sync in report.syncs(range=range):
            syncs[index][sync.api] += sync.count
        for copy in report.copies(range=range):
            name = f"{copy.direction} ({copy.source} -> {copy.destination})"
            copies[index][name] += copy.count
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        range=range,
        totals=tuple(Difference(name, totals[0][name], totals[1][name]) for name in totals[0]),
        syncs=_differences(*syncs),
        copies=_differences(*copies),
    )


def _differences(before: Counter[str], after: Counter[str]) -> tuple[Difference, ...]:
    names = sorted(before | after, key=lambda name: (-(before | after)[name], name))
    return tuple(Difference(name, before[name], after[name]) for name in names)
