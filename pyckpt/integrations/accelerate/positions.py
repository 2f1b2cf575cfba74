"""Where a prepared loader is in its data: its epoch, its generators, and its position."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

import pyckpt
from pyckpt.errors import LoadError

__all__ = ["Position", "position_of"]


class Position:
    """The epoch of a prepared loader and its position in it, as far as these can be known.

    A loader draws random numbers when an epoch begins: the order of the examples, and seeds for its
    workers. A program that resumes in the middle of an epoch begins it again. So that it gets the
    same order, and goes on with the same numbers as if it had not been interrupted, this puts the
    generators back to where the epoch began, and, once the first batch is there, to where they were
    at the save. For this it takes the place of the ``__iter__`` of the loader's own loader.

    The loader has its position, and the position does not keep the loader: programs that drop a
    loader count on its memory and workers.
    """

    def __init__(self, loader: Any) -> None:
        self._weak = weakref.ref(loader)
        self._epoch: int | None = None  # that began last
        # The generators when the epoch began; None once it has come to its end.
        self._start: dict[str, torch.Tensor] | None = None
        self._is_left = False  # the program has left the epoch before its end
        self._before = 0  # examples of the epoch that were used before the last resume
        self._batches = 0  # that the loader's own loader has given since then
        # Of the loader's own loader, where a step takes several of its batches: after the last step
        # that it has read, and after the one before that.
        self._read: dict[str, Any] = {}
        self._read_before: dict[str, Any] = {}
        self._skip = 0  # batches of the next epoch to drop
        self._replay: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        self._pending: dict[str, Any] | None = None  # what was loaded, until an epoch begins
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        if self._is_stateful:
            loader.load_state_dict({})  # or its first epoch would have begun when it was prepared
        self.follow(loader)

    @property
    def _loader(self) -> Any:
        return self._weak()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_weak": self._loader}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "_weak": weakref.ref(state["_weak"])})

    def follow(self, loader: Any) -> None:
        """Watch the epochs of a loader: of the prepared one, or of one that skips batches of it."""
        loader.base_dataloader.__iter__ = _Epochs(self, loader)

    def epoch(self, loader: Any) -> Iterator[Any]:
        """An epoch of a loader that is followed: the batches of its own loader.

        It begins in this call: before the first batch, a loader that dispatches batches looks up
        the position of its own loader, which would begin the epoch where none has begun."""
        base = loader.base_dataloader
        if self._loader is None:  # the program has only one that skips batches of it
            return iter(type(base).__iter__(base))
        if _only_receives(loader):
            return self._unread(loader)
        replay, self._replay = self._replay, None
        skip, self._skip = self._skip, 0
        pending, self._pending = self._pending, None
        if pending and pending.get("is_left") and not self._is_stateful and self._loader is loader:
            replay = None  # the program begins another epoch in place of the one that it left
        with nullcontext() if replay is None else self._order(replay[0]):
            self._epoch = getattr(loader, "iteration", 0)
            self._start, self._is_left = self._generators(), False
            self._batches = 0
            if replay is None:
                self._before = 0
            batches = type(base).__iter__(base)
            first = list(itertools.islice(batches, 1))  # with it, the order is drawn
        rng = None if replay is None else replay[1]
        return self._given(loader, self._epoch, itertools.chain(first, batches), skip, rng)

    def _given(
        self,
        loader: Any,
        epoch: int,
        batches: Iterator[Any],
        skip: int,
        rng: dict[str, Any] | None,
    ) -> Iterator[Any]:
        """The batches of an epoch that has begun. With the first of them, this rank's generators
        get their states at the save, ``rng``, if it was resumed."""
        size = _batches_a_step(loader)
        for batch in batches:
            self._batches += 1
            if self._is_stateful and size > 1 and self._batches % size == 0:
                self._read_before, self._read = self._read, loader.base_dataloader.state_dict()
            if self._batches <= skip:
                continue
            if rng is not None:
                pyckpt.RngState().load_state_dict(rng)
                rng = None
            try:
                yield batch
            except GeneratorExit:
                # Until the next epoch begins, a save is one of the position in this one.
                self._is_left = True
                raise
        prepared = self._loader
        if prepared is not None and prepared is not loader:
            prepared.set_epoch(epoch + 1)
        self._start = None

    def _unread(self, loader: Any) -> Iterator[Any]:
        """The batches of a loader of which this rank reads none. No number is drawn for it, in this
        epoch or at its end, where Accelerate looks up the position on this rank, too."""
        self._epoch, self._pending = getattr(loader, "iteration", 0), None
        before = self._generators()
        batches = iter(type(loader.base_dataloader).__iter__(loader.base_dataloader))
        self._set(before)
        return batches

    def _generators(self) -> dict[str, torch.Tensor]:
        return {"torch": torch.get_rng_state()} | {
            name: generator.get_state() for name, generator in self._own().items()
        }

    def _sampler(self) -> Any:
        """The sampler that has a generator, or could have one; None if there is none."""
        sampler = getattr(self._loader, "batch_sampler", None)
        while sampler is not None and not hasattr(sampler, "generator"):
            sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        return sampler

    def _own(self) -> dict[str, torch.Generator]:
        """The generators that belong to the loader, by the places where it has them."""
        loader = self._loader
        found = {
            "synchronized": getattr(loader, "synchronized_generator", None),
            "loader": getattr(loader.base_dataloader, "generator", None),
            "sampler": getattr(self._sampler(), "generator", None),
        }
        return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}

    @contextmanager
    def _order(self, states: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """In this block an epoch that begins has the order of one that began with generators in
        these states. A shuffling sampler draws it with its generator, which it has on several
        ranks; on one, with a seed that it draws with torch's."""
        sampler = self._sampler()
        before = getattr(sampler, "generator", None)
        self._set(states)
        if before is not None and "sampler" not in states:
            sampler.generator = None
        try:
            yield
        finally:
            if before is not None:
                sampler.generator = before

    def _set(self, states: Mapping[str, torch.Tensor]) -> None:
        sampler = self._sampler()
        if sampler is not None and sampler.generator is None and "sampler" in states:
            sampler.generator = torch.Generator()
        for name, generator in self._own().items():
            if name in states:
                generator.set_state(states[name])
        if "torch" in states:
            torch.set_rng_state(states["torch"])

    def _examples_a_step(self) -> int | None:
        """How many examples the ranks take together; None where a number of examples does not say
        which ones they are."""
        loader = self._loader
        if not isinstance(loader, DataLoaderShard) or not hasattr(loader.dataset, "__getitem__"):
            return None
        try:
            return int(loader.total_batch_size)
        except (AttributeError, TypeError):  # a sampler that makes batches of its own
            return None

    def state_dict(self) -> dict[str, Any]:
        if self._pending is not None:  # the loader itself does not know it yet
            return self._pending
        loader = self._loader
        epoch = getattr(loader, "iteration", 0)
        own = {name: one.get_state() for name, one in self._own().items()}
        if self._start is None:
            # In the body of the loop, at the last batch, the loader still counts the old epoch.
            return {"epoch": epoch + (epoch == self._epoch and self._ended()), "generators": own}
        state = {"epoch": self._epoch, "generators": own, "start": self._start}
        state["is_left"] = self._is_left
        if self._is_stateful:
            # Accelerate takes off what was read ahead, but not where workers count it.
            several = _batches_a_step(loader) > 1
            state["position"] = self._read_before if several else loader.state_dict()
            size = self._examples_a_step()
            if size is not None:
                # The loader is a batch ahead, since it has to know which one is the last.
                state["examples"] = self._before + (self._batches - 1) * size
        return state

    def _ended(self) -> bool:
        return bool(self._loader.end_of_dataloader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loader = self._loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(state["epoch"])
        self._set(state["generators"])
        self._epoch, self._replay, self._start = None, None, None
        self._pending = None
        if "start" in state:
            self._replay = (state["start"], {})
            self._pending = dict(state)
        self._skip = state.get("skip", 0)
        self._before = 0 if self._skip else state.get("examples", 0)
        if self._is_stateful:
            loader.load_state_dict(state.get("position", {}))

    def resume_with(self, rng: dict[str, Any]) -> None:
        """All else is restored; ``rng`` is the state of this rank's generators."""
        if self._replay is not None:
            self._replay = (self._replay[0], rng)

    def on_other_ranks(self, states: list[Any], rank: int, world_size: int) -> Any:
        """The state for this loader of what other ranks have saved. It is the position after the
        same examples, if these are whole steps now.

        Raises:
            LoadError: they are not, or it is not known which examples were used.
        """
        state = dict(states[0])
        if state.pop("position", None) is None and state.pop("skip", None) is None:
            return state
        examples, size = state.get("examples"), self._examples_a_step()
        advice = f"load it on {len(states)}, or save at the end of an epoch"
        if examples is None or size is None:
            raise LoadError(
                f"saved on {len(states)} ranks in the middle of an epoch, and the position of a "
                f"loader that is no list of examples cannot be brought to {world_size}: {advice}"
            )
        if examples % size:
            raise LoadError(
                f"saved on {len(states)} ranks after {examples} examples of an epoch, which are no "
                f"whole number of steps of {size} on {world_size}: choose a batch size for which "
                f"they are, {advice}"
            )
        return {**state, "skip": examples // size}


class _Epochs:
    """What stands in the place of a loader's ``__iter__``. An object, so that loaders pickle."""

    def __init__(self, position: Position, loader: Any) -> None:
        self._position = position
        self._loader = weakref.ref(loader)

    def __call__(self) -> Iterator[Any]:
        return self._position.epoch(self._loader())

    def __reduce__(self) -> Any:
        return _Epochs.__new__, (_Epochs,), (self._position, self._loader())

    def __setstate__(self, state: tuple[Position, Any]) -> None:
        self._position, loader = state
        self._loader = weakref.ref(loader)


def _only_receives(loader: Any) -> bool:
    """Whether another rank reads the batches of a loader, and gives this one its part."""
    return isinstance(loader, DataLoaderDispatcher) and loader.state.process_index != 0


def _batches_a_step(loader: Any) -> int:
    """How many batches of its own loader a prepared one takes for a step of all ranks."""
    if not isinstance(loader, DataLoaderDispatcher) or loader.split_batches or loader.submesh_tp:
        return 1
    return int(loader.state.num_processes)


def position_of(loader: Any) -> Position | None:
    """The position of a loader that was prepared. It belongs to the loader, and ends with it."""
    found = vars(loader).get("pyckpt_position")
    return found if isinstance(found, Position) else None
