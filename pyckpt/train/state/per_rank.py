"""State that each rank has for itself. Each rank saves it under a key of its own, because DCP saves
one rank's copy of a key that all ranks have."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pyckpt.dcp.whole import Whole
from pyckpt.errors import CorruptCheckpoint, LoadError
from pyckpt.train.state import values
from pyckpt.train.state.claims import Claims
from pyckpt.train.state.entry import Entry, asked
from pyckpt.train.state.saved import Path, Policy, Rank, Tree

__all__ = ["PerRank", "RankEntry", "RankState", "Unfit", "check_complete", "state_of_ranks"]

_KEY = re.compile(r"rank-([0-9]{5,18})-of-([0-9]{5,18})")
_ALL = "all-ranks"
Merge = Callable[[list[Any], int, int], Any]


class Unfit(NamedTuple):
    """Parts of an object that were not saved, which stay as they are; and saved parts that the
    object does not have."""

    kept: list[str]
    ignored: list[str]


class RankState(ABC):
    """State that each rank has for itself.

    In a checkpoint, a rank's state is under a key such as ``rank-00003-of-00008``. The class is
    also a DCP ``Stateful``, which stock PyTorch saves, and loads on the same number of ranks.
    """

    @abstractmethod
    def _own(self, rank: Rank) -> Any:
        """Return the state of this rank."""

    def _told(self, rank: Rank, name: str) -> Any:
        """Return the state of this rank. Errors call it ``name``."""
        return self._own(rank)

    @abstractmethod
    def _sources(self, saved: int, rank: Rank) -> Sequence[int]:
        """Return the ranks, of the ``saved`` ones, whose states this rank needs.

        Raises:
            LoadError: the states cannot be brought to this number of ranks.
        """

    @abstractmethod
    def _take(self, states: dict[int, Any], saved: int, rank: Rank, policy: Policy) -> Unfit | None:
        """Take the saved states of the ranks named by ``_sources``. Returns the parts that did not
        fit and that the policy admits."""

    def _is_shared(self, rank: Rank) -> bool:
        """Whether the ranks have merged their states into one for this save."""
        return False

    def _take_shared(self, state: Any, rank: Rank, policy: Policy) -> Unfit | None:
        raise LoadError("it was saved as one state of all ranks, and is loaded as one of each")

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, under its key. The ranks are those of the default process group."""
        return self._state(Rank.of(), type(self).__name__)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a loaded state dict of the form that ``state_dict`` returns.

        Raises:
            LoadError: it lacks this rank's state. DCP alone cannot load it on another number of
                ranks than saved it; `Checkpointer` can.
        """
        rank = Rank.of()
        keys = [key for key in (_ALL, _key(rank.index, rank.world_size)) if key in state_dict]
        if not keys:
            raise LoadError(f"{type(self).__name__}: it has no state of rank {rank.index}")
        self._restore({keys[0]: state_dict[keys[0]]}, rank.world_size, rank, Policy())

    def _state(
        self, rank: Rank, name: str, whole: Callable[[Any], Any] = values.marked
    ) -> dict[str, Any]:
        key = _ALL if self._is_shared(rank) else _key(rank.index, rank.world_size)
        return {key: values.encode(self._told(rank, name), name, compact=True, whole=whole)}

    def _wanted(self, saved: Any, rank: Rank, name: str) -> tuple[int, list[str]]:
        """Return how many ranks saved it, and the keys that this rank loads.

        Raises:
            LoadError: see ``_sources``; or it was not saved per rank.
            CorruptCheckpoint: the states of some ranks are missing.
        """
        if isinstance(saved, Mapping) and set(saved) == {_ALL}:
            return 0, [_ALL]
        size = check_complete(saved, name) if isinstance(saved, Mapping) else 0
        if size == 0:
            raise LoadError(f"{name}: it was not saved as something that each rank has its own of")
        try:
            sources = self._sources(size, rank)
        except LoadError as error:
            raise LoadError(f"{name}: {error}") from error
        return size, [_key(source, size) for source in sources]

    def _restore(
        self, loaded: Mapping[str, Any], saved: int, rank: Rank, policy: Policy
    ) -> Unfit | None:
        if _ALL in loaded:
            return self._take_shared(values.decode(loaded[_ALL]), rank, policy)
        states = {}
        for key, value in loaded.items():
            match = _KEY.fullmatch(key)
            assert match is not None
            states[int(match[1])] = values.decode(value)
        return self._take(states, saved, rank, policy)


def check_complete(saved: Mapping[Any, Any], name: str) -> int:
    """The number of ranks that saved a per-rank state; 0 if ``saved`` is no such state.

    Raises:
        CorruptCheckpoint: the states of some ranks are missing.
    """
    found = [match for key in saved if (match := _KEY.fullmatch(str(key)))]
    if not found or len(found) < len(saved):
        return 0
    sizes = {int(match[2]) for match in found}
    indices = {int(match[1]) for match in found}
    size = max(sizes)
    if len(sizes) > 1 or len(indices) < size or max(indices) >= size:
        raise CorruptCheckpoint(
            f"{name}: the checkpoint does not have the state of each of {size} ranks", key=name
        )
    return size


def state_of_ranks(states: Sequence[Any], name: str) -> dict[str, Any]:
    """What as many ranks save together, each its own of these states. Errors call it ``name``.

    Raises:
        TypeError: a state could not be loaded again.
    """
    return {
        _key(index, len(states)): values.encode(state, name, compact=True)
        for index, state in enumerate(states)
    }


def _key(index: int, world_size: int) -> str:
    return f"rank-{index:05}-of-{world_size:05}"


class PerRank(RankState):
    """State that each rank has for itself: a dataloader, a buffer of samples, a counter. ::

        state = {"model": model, "replay": pyckpt.PerRank(buffer)}

    Without it, DCP takes values of the same name on all ranks for equal, and saves one rank's. On
    as many ranks as saved it, each rank gets its own value again. On another number of ranks,
    ``merge(states, rank, world_size)`` is called on every rank, with the states of all ranks that
    saved, in their order. It returns the state that rank ``rank`` of ``world_size`` loads.
    `pyckpt.merges` has two such functions, ``first`` and ``share``.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, or plain values and tensors.
        merge: a function, as above. The default is the object's own method of that name, if it has
            one.

    Attributes:
        value: as given; a dict or list is filled in place by loading, any other plain value is
            replaced.
    """

    def __init__(self, value: Any, *, merge: Merge | None = None) -> None:
        self.value = value
        self._claims: Claims | None = None  # of the restore that is under way
        self._merge: Merge | None = merge if merge is not None else getattr(value, "merge", None)

    def _own(self, rank: Rank) -> Any:
        return self._told(rank, type(self).__name__)

    def _told(self, rank: Rank, name: str) -> Any:
        return asked(self.value, name) if _is_stateful(self.value) else self.value

    def _sources(self, saved: int, rank: Rank) -> Sequence[int]:
        if saved == rank.world_size:
            return [rank.index]
        if self._merge is None:
            raise LoadError(
                f"saved on {saved} ranks, and {type(self.value).__name__} has no merge() to bring "
                f"it to {rank.world_size}; put pyckpt.PerRank(it, merge=...) into the state in "
                "its place, with a function of yours or one of pyckpt.merges"
            )
        return range(saved)

    def _take(self, states: dict[int, Any], saved: int, rank: Rank, policy: Policy) -> None:
        if saved == rank.world_size:
            state = states[rank.index]
        else:
            assert self._merge is not None
            state = self._merge([states[i] for i in range(saved)], rank.index, rank.world_size)
        if _is_stateful(self.value):
            self.value.load_state_dict(state)
        else:
            self.value = values.assign(self.value, state, self._claims)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


class RankEntry(Entry):
    """A `RankState`, in the state of an `AppState`."""

    def __init__(self, name: str, value: RankState, rank: Rank) -> None:
        super().__init__(name)
        self.value = value
        self._rank = rank
        self._saved = 0
        self._keys: frozenset[str] = frozenset()

    def state(self) -> Any:
        return self.value._state(self._rank, self.name, Whole)

    def check(self) -> None:
        # Not for objects: asking a dataloader for its state may start its workers.
        if isinstance(self.value, PerRank) and not _is_stateful(self.value.value):
            self.state()

    def template(self, saved: Tree) -> Any:
        self._saved, keys = self.value._wanted(saved, self._rank, self.name)
        self._keys = frozenset(keys)
        return dict.fromkeys(keys)

    def wants(self, path: Path) -> bool:
        return path[0] in self._keys

    def restore(self, loaded: Any) -> None:
        plain = self.value if isinstance(self.value, PerRank) else None
        if plain is not None:
            plain._claims = self.claims
        try:
            unfit = self.value._restore(loaded, self._saved, self._rank, self.policy)
        except LoadError as error:
            raise LoadError(f"{self.name}: {error}") from error
        finally:
            if plain is not None:
                plain._claims = None
        if unfit is not None:
            self.kept += [f"{self.name}.{name}" for name in unfit.kept]
            self.ignored += [f"{self.name}.{name}" for name in unfit.ignored]
