"""Which parameter of a checkpoint is which parameter of the optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["listed", "match_params"]


def match_params(optimizer: Any, state_dict: dict[str, Any]) -> dict[Any, tuple[int, Tensor]]:
    """For each id in the checkpoint, the index of the group, and the parameter.

    Raises:
        ValueError: groups or parameters are missing or left over.
    """
    live, saved = optimizer.param_groups, state_dict["param_groups"]
    if len(live) != len(saved):
        raise ValueError(
            f"The optimizer has {len(live)} parameter groups and the checkpoint {len(saved)}: "
            f"groups {_range(len(live), len(saved))} are "
            f"{'not in the checkpoint' if len(live) > len(saved) else 'not in the optimizer'}."
        )
    matched: dict[Any, tuple[int, Tensor]] = {}
    for index, (group, other) in enumerate(zip(live, saved, strict=True)):
        params, ids = group["params"], other["params"]
        names, saved_names = group.get("param_names"), other.get("param_names")
        common = set(names or ()) & set(saved_names or ())
        if len(params) != len(ids) or (common and set(names) != set(saved_names)):
            raise ValueError(_mismatch(index, len(params), len(ids), names, saved_names))
        if common:
            by_name = dict(zip(saved_names, ids, strict=True))
            ids = [by_name[name] for name in names]
        matched.update({i: (index, param) for i, param in zip(ids, params, strict=True)})
    strays = [
        key
        for key, entry in state_dict["state"].items()
        if isinstance(key, int)
        and isinstance(entry, dict)
        and key not in matched
        and key not in optimizer.state
    ]
    if strays:
        raise ValueError(
            f"The checkpoint has state of parameters {listed(strays)}, which are in none of its "
            f"groups."
        )
    return matched


def _mismatch(
    index: int, live: int, saved: int, names: list[str] | None, saved_names: list[str] | None
) -> str:
    text = f"Group {index} has {live} parameters and the checkpoint's {saved}: "
    if names and saved_names:
        absent = [name for name in names if name not in set(saved_names)]
        extra = [name for name in saved_names if name not in set(names)]
        parts = [f"{listed(absent)} not in the checkpoint"] * bool(absent)
        parts += [f"{listed(extra)} not in the optimizer"] * bool(extra)
        return text + ("; ".join(parts) or "some names occur twice") + "."
    where = "the checkpoint" if live > saved else "the optimizer"
    return text + f"parameters {_range(live, saved)} of the group are not in {where}."


def _range(a: int, b: int) -> str:
    return listed(list(range(min(a, b), max(a, b))))


def listed(names: list[Any], limit: int = 8) -> str:
    """Names for a message, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
