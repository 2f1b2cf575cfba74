"""The state that a checkpoint is loaded into, taken apart and grown to what was saved.

DCP names a value by its path joined with dots. A `Template` finds every value of a state under
that name, with the container and key that it stands in, so that a value can be put back into the
caller's own dict or list. `Growth` compares it with the paths that were saved, and plans what must
change for the state to have them all. Nothing of the caller's is touched before `Growth.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pyckpt.dcp.report import Replacement
from pyckpt.errors import CorruptCheckpoint, LoadError

__all__ = ["Growth", "Path", "Slot", "Template", "Undo", "is_empty", "place"]

Path = tuple[str | int, ...]
Slot = tuple[Any, Any]
"""A container and the key or index in it."""
Tree = dict[str | int, Any]
"""Saved paths: each part leads to a further `Tree`, or to the key of a value."""

_PLAIN = frozenset({int, float, str, bool, bytes, type(None), tuple})
_ABSENT = object()
# A list index beyond this is damage; without a bound it would be an allocation.
_MAX_INDEX = 1 << 24


class Template:
    """The values of a state by DCP key, with their slots and paths.

    As in DCP, mappings are taken apart always, and lists when they hold a tensor or a mapping;
    any other list is one value, and so is a tuple.
    """

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        self.values: dict[str, Any] = {}
        self.slots: dict[str, Slot] = {}
        self.paths: dict[str, Path] = {}
        self.edits: list[tuple[Any, Any, Any]] = []
        """(container, key, value) to be set when the load goes ahead."""
        self.numbered: list[tuple[int, str]] = []
        """For each list, and each dict whose first key is a number: how deep it is, and a value in
        it. Both give their values the same names."""
        self._copies: dict[tuple[int, Any], Any] = {}
        self._seen: set[int] = set()
        self._walk(state_dict, state_dict.items(), (), "")

    def _walk(self, container: Any, items: Iterable[Any], path: Path, prefix: str) -> str | None:
        """Find the values in a container. Returns the name of one."""
        values, slots, paths = self.values, self.slots, self.paths
        by_name = not isinstance(container, list)
        found: str | None = None
        for key, value in items:
            part = key if type(key) is str or not by_name else str(key)
            name = f"{prefix}{part}"
            if type(value) not in _PLAIN and not isinstance(value, torch.Tensor):
                if isinstance(value, Mapping):
                    value = self._own(container, key, value)
                    found = self._walk(value, value.items(), (*path, part), f"{name}.") or found
                    continue
                if isinstance(value, list):
                    value = self._own(container, key, value)
                    if _taken_apart(value):
                        inner = self._walk(value, enumerate(value), (*path, part), f"{name}.")
                        found = inner or found
                        continue
            if name in values:
                raise LoadError(f"two values of the state are both named {name!r}")
            values[name] = value
            slots[name] = (container, key)
            paths[name] = (*path, part)
            found = name
        if found is not None and path and (not by_name or _is_number(next(iter(container)))):
            self.numbered.append((len(path), found))
        return found

    def _own(self, container: Any, key: Any, value: Any) -> Any:
        """Return ``value``, or a copy where the same container stands in two places.

        ``dict.fromkeys(names, [])`` makes such states; filled in place, the last value would win.
        """
        if id(value) not in self._seen:
            self._seen.add(id(value))
            return value
        copy = dict(value) if isinstance(value, Mapping) else list(value)
        self.edits.append((container, key, copy))
        self._copies[id(container), key] = copy
        return copy

    def child(self, container: Any, key: Any) -> Any:
        """Look into a container of the state as it will be after ``edits``."""
        return self._copies.get((id(container), key), _get(container, key))


def _is_number(key: Any) -> bool:
    return str(key).isdecimal()


def _taken_apart(value: list[Any]) -> bool:
    for entry in value:
        if isinstance(entry, torch.Tensor | Mapping):
            return True
        if isinstance(entry, list) and _taken_apart(entry):
            return True
    return False


def place(name: str, slot: Slot, value: Any) -> Replacement | None:
    """Put ``value`` into its slot; a list or dict that is there already takes over its content.

    Returns what to report when the value that was there is of another kind.
    """
    container, key = slot
    current = _get(container, key)
    if isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif isinstance(current, dict) and isinstance(value, dict):
        current.clear()
        current.update(value)
    else:
        container[key] = value
        if current is not _ABSENT and not is_empty(current) and _kind(current) != _kind(value):
            return Replacement(name, _name_of(current), _name_of(value))
    return None


def is_empty(value: Any) -> bool:
    """Tell whether a value only holds a place: None, an empty container or an empty tensor."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 0
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Mapping):
        return "dict"
    return "list" if isinstance(value, list | tuple) else "value"


def _name_of(value: Any) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__name__


class Undo:
    """What was in the containers of a state, for a load that fails: another attempt, or a load of
    another checkpoint, must not find what this one had begun to make of them."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Any, Any]] = []
        """(container, key, value); of a list, and of a dict as a whole, without a key."""
        self._lists: set[int] = set()

    def note(self, container: Any, key: Any) -> None:
        """Note what is in a place, which is about to change; and what is in that, if it is a
        container, which may stay and take over another content."""
        current = _get(container, key)
        if isinstance(container, list):
            self.note_list(container)
        else:
            self._entries.append((container, key, current))
        if isinstance(current, list):
            self.note_list(current)
        elif isinstance(current, dict):
            self._entries.append((current, _ABSENT, dict(current)))

    def note_list(self, items: list[Any]) -> None:
        """Note what is in a list, which is about to change."""
        if id(items) not in self._lists:
            self._lists.add(id(items))
            self._entries.append((items, _ABSENT, list(items)))

    def run(self) -> None:
        """Make all containers what they were."""
        while self._entries:
            container, key, before = self._entries.pop()
            if isinstance(container, list):
                container[:] = before
            elif key is _ABSENT:
                container.clear()
                container.update(before)
            elif before is _ABSENT:
                container.pop(key, None)
            else:
                container[key] = before
        self._lists.clear()


class Growth:
    """What a state must become to hold every saved value under the entries that it has.

    Attributes:
        slots: for each saved key that the state lacks, or has in a container that gives way to one
            of another kind, where it goes.
        taken: keys of the state that are not missing, because a dict or list was saved in their
            place: None that stood for it, for one.
        dropped: keys that are not missing either, but go: beyond the end of a list that was shorter
            when saved, or within a dict or list that was saved as one value.
        replaced: the values that give way to others of another kind.
    """

    def __init__(
        self,
        template: Template,
        root: Mapping[Any, Any],
        saved: Mapping[str, Path],
        missing: list[str],
        *,
        cut_lists: bool,
    ) -> None:
        """Plan the growth.

        Args:
            template: the state's values.
            root: the state itself.
            saved: the path of every key in the checkpoint.
            missing: keys of the state that are not in the checkpoint.
            cut_lists: drop what a list has beyond its saved length.
        """
        self.slots: dict[str, Slot] = {}
        self.replaced: list[Replacement] = []
        self._template = template
        self._cut_lists = cut_lists
        self._edits: list[tuple[Any, Any, Any]] = []
        self._overridden: set[Path] = set()
        self._lengths: dict[Path, int] = {}
        self._cuts: list[tuple[list[Any], int]] = []
        tree = _tree(saved)
        passed = {str(key) for key in root}
        top: Tree = {part: sub for part, sub in tree.items() if part in passed}
        self._grow(root, top, (), tree)
        self.taken = [name for name in missing if template.paths[name] in self._overridden]
        self.dropped = [name for name in missing if self._is_dropped(template.paths[name])]

    def apply(self, undo: Undo) -> None:
        """Change the caller's containers: shorten lists, make containers, hold places.

        Args:
            undo: takes what was there.
        """
        for items, length in self._cuts:
            undo.note_list(items)
            del items[length:]
        for container, key, value in self._edits:
            undo.note(container, key)
            if isinstance(container, list):
                while len(container) <= key:
                    # DCP records nothing for an empty dict, so that is what a gap was.
                    container.append({})
            container[key] = value

    # --- planning -----------------------------------------------------------------------------

    def _grow(
        self, container: Any, node: Tree, path: Path, siblings: Tree, *, is_new: bool = False
    ) -> None:
        """Plan what a container has to hold.

        Args:
            container: the state's, or a new one.
            node: what was saved of it.
            path: where it is.
            siblings: what was saved beside it.
            is_new: whether it takes the place of what the state has, or of nothing.
        """
        if isinstance(container, list):
            self._measure(container, node, path)
            keys: Mapping[str | int, Any] = {index: index for index in range(len(container))}
        else:
            keys = {str(key): key for key in container}
        as_int = not isinstance(container, list) and _int_keys(container, path, siblings)
        for part, sub in node.items():
            name = sub if isinstance(sub, str) else None
            if name is not None and name in self._template.values:
                if is_new:
                    self._move(name, (container, _new_key(part, as_int)))
                continue
            key = keys[part] if part in keys else _new_key(part, as_int)
            current = self._template.child(container, key)
            if name is not None:
                self._add_value(name, (container, key), current, (*path, part))
            else:
                self._add_container((container, key), current, sub, (*path, part), node)

    def _move(self, name: str, slot: Slot) -> None:
        """Have a new container take a value out of the one that it replaces."""
        self.slots[name] = slot
        self._edits.append((*slot, self._template.child(*self._template.slots[name])))

    def _add_value(self, name: str, slot: Slot, current: Any, path: Path) -> None:
        self.slots[name] = slot
        if current is _ABSENT:
            self._edits.append((*slot, None))
        elif isinstance(current, Mapping | list):
            self._overridden.add(path)

    def _add_container(
        self, slot: Slot, current: Any, sub: Tree, path: Path, siblings: Tree
    ) -> None:
        is_list = _is_list(sub, path)
        wanted: type[Any] = list if is_list else Mapping
        is_new = not isinstance(current, wanted)
        if is_new:
            if current is not _ABSENT:
                self._overridden.add(path)
                if not is_empty(current):
                    now = "list" if is_list else "dict"
                    self.replaced.append(Replacement(_name(path), _name_of(current), now))
            current = [] if is_list else {}
            self._edits.append((*slot, current))
        elif is_list and not _taken_apart(current):
            # One value to the state, several to the checkpoint; the list itself stays.
            self._overridden.add(path)
        self._grow(current, sub, path, siblings, is_new=is_new)

    def _measure(self, items: list[Any], node: Tree, path: Path) -> None:
        length = 1 + max(index for index in node if isinstance(index, int))
        if len(items) > length and (self._cut_lists or not _taken_apart(items)):
            self._lengths[path] = length
            self._cuts.append((items, length))

    def _is_dropped(self, path: Path) -> bool:
        for end in range(1, len(path)):
            index = path[end]
            if path[:end] in self._overridden:
                return True
            if isinstance(index, int) and index >= self._lengths.get(path[:end], index + 1):
                return True
        return False


def _tree(saved: Mapping[str, Path]) -> Tree:
    tree: Tree = {}
    for name, path in saved.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if isinstance(node, str):
                raise CorruptCheckpoint(f"the checkpoint has both {node} and {name}", key=name)
        if path[-1] in node:
            raise CorruptCheckpoint(f"the checkpoint has two values at {path}", key=name)
        node[path[-1]] = name
    return tree


def _is_list(node: Tree, path: Path) -> bool:
    indices = [part for part in node if isinstance(part, int)]
    if indices and (len(indices) < len(node) or not 0 <= min(indices) <= max(indices) < _MAX_INDEX):
        raise CorruptCheckpoint(
            f"the checkpoint's list {_name(path)} has impossible indices", key=_name(path)
        )
    return bool(indices)


def _int_keys(container: Mapping[Any, Any], path: Path, siblings: Tree) -> bool:
    """Tell whether numbers that become keys of this dict are ints; DCP saves all keys as strings.

    They are where the keys that are there are, and in the ``state`` of an optimizer, whose
    parameters `torch.optim.Optimizer.state_dict` numbers.
    """
    if container:
        return all(type(key) is int for key in container)
    return path[-1:] == ("state",) and "param_groups" in siblings


def _new_key(part: str | int, as_int: bool) -> str | int:
    if as_int and isinstance(part, str) and part.isdecimal() and str(int(part)) == part:
        return int(part)
    return part


def _get(container: Any, key: Any) -> Any:
    if isinstance(container, list):
        return container[key] if key < len(container) else _ABSENT
    return container.get(key, _ABSENT)  # not container[key]: a defaultdict would make one


def _name(path: Path) -> str:
    return ".".join(map(str, path))
