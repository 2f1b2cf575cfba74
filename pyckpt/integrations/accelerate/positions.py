"""Where a prepared loader is in its data: its epoch, its generators, and its position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import pyckpt
from pyckpt.errors import LoadError

__all__ = ["Position", "on_other_ranks", "position_of"]


class Position:
    """The epoch of a prepared loader and its position in it, as far as these can be known.

    A loader draws random numbers when an epoch begins: the order of the examples, and seeds for its
    workers. A program that resumes in the middle of an epoch begins it again. So that it gets the
    same order, and goes on with the same numbers as if it had not been interrupted, this puts the
    generators back to where the epoch began, and, once the first batch is there, to where they were
    at the save. For this it takes the place of the ``__iter__`` of the loader's own loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch: int | None = None  # that began last
        self._start: dict[str, torch.Tensor] | None = None  # generators, while an epoch goes on
        self._replay: tuple[dict[str, torch.Tensor], dict[str, Any]] | None = None
        self._is_stateful = bool(getattr(loader, "use_stateful_dataloader", False))
        if self._is_stateful:
            loader.load_state_dict({})  # or its first epoch would have begun when it was prepared
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Watch the epochs of a loader: of the prepared one, or of one that skips batches of it."""
        base = loader.base_dataloader
        begin = base.__iter__

        def iterate() -> Iterator[Any]:
            if self._replay is not None:
                self._set(self._replay[0])
            self._epoch, self._start = getattr(loader, "iteration", 0), self._generators()
            try:
                batches = begin()
                for batch in batches:
                    if self._replay is not None:
                        replay, self._replay = self._replay, None
                        pyckpt.RngState().load_state_dict(replay[1])
                    yield batch
                if loader is not self._loader:
                    self._loader.set_epoch(self._epoch + 1)
            finally:
                self._start = None  # also if the program leaves the loop

        base.__iter__ = iterate

    def _generators(self) -> dict[str, torch.Tensor]:
        return {"torch": torch.get_rng_state()} | {
            name: generator.get_state() for name, generator in self._own().items()
        }

    def _own(self) -> dict[str, torch.Generator]:
        """The generators that belong to the loader, by the places where it has them."""
        loader = self._loader
        sampler = getattr(loader, "batch_sampler", None)
        while sampler is not None and not hasattr(sampler, "generator"):
            sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
        found = {
            "synchronized": getattr(loader, "synchronized_generator", None),
            "loader": getattr(loader.base_dataloader, "generator", None),
            "sampler": getattr(sampler, "generator", None),
        }
        return {name: one for name, one in found.items() if isinstance(one, torch.Generator)}

    def _set(self, states: Mapping[str, torch.Tensor]) -> None:
        for name, generator in self._own().items():
            if name in states:
                generator.set_state(states[name])
        if "torch" in states:
            torch.set_rng_state(states["torch"])

    def state_dict(self) -> dict[str, Any]:
        loader = self._loader
        epoch = getattr(loader, "iteration", 0)
        own = {name: one.get_state() for name, one in self._own().items()}
        if self._start is None:
            # In the body of the loop, at the last batch, the loader still counts the old epoch.
            return {"epoch": epoch + (epoch == self._epoch and self._ended()), "generators": own}
        state = {"epoch": self._epoch, "generators": own, "start": self._start}
        if self._is_stateful:
            state["position"] = loader.state_dict()
        return state

    def _ended(self) -> bool:
        return bool(self._loader.end_of_dataloader)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loader = self._loader
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(state["epoch"])
        self._set(state["generators"])
        self._epoch, self._replay = None, None
        if "start" in state:
            self._replay = (state["start"], {})
        if self._is_stateful:
            loader.load_state_dict(state.get("position", {}))

    def resume_with(self, rng: dict[str, Any]) -> None:
        """All else is restored; ``rng`` is the state of this rank's generators."""
        if self._replay is not None:
            self._replay = (self._replay[0], rng)


def position_of(loader: Any) -> Position | None:
    """The position of a loader that was prepared. It belongs to the loader, and ends with it."""
    found = vars(loader).get("pyckpt_position")
    return found if isinstance(found, Position) else None


def on_other_ranks(states: list[Any], rank: int, world_size: int) -> Any:
    if "position" in states[0]:
        raise LoadError(
            f"saved on {len(states)} ranks in the middle of an epoch, and the position of a "
            f"stateful loader cannot be brought to {world_size}: load it on {len(states)}, or save "
            "at the end of an epoch"
        )
    return states[0]
