"""What a Checkpointer takes for frozen, and what one save does about it."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from pyckpt.dcp.frozen import Frozen, FrozenSave
from pyckpt.dcp.leaves import local_tensor
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import CorruptCheckpoint, PyckptError
from pyckpt.train.arguments import whole
from pyckpt.train.store.catalog import CheckpointInfo
from pyckpt.train.store.links import frozen_items, verify_items
from pyckpt.train.store.pieces import Direct

__all__ = ["FrozenParts", "Periods"]

_logger = logging.getLogger("pyckpt")


@dataclass(frozen=True)
class Periods:
    """How often what is linked is read, and written anew, counted in saves; see `Checkpointer`."""

    verify_linked_every: int
    fresh_copy_every: int

    def __post_init__(self) -> None:
        whole("verify_linked_every", self.verify_linked_every, least=1)
        whole("fresh_copy_every", self.fresh_copy_every, least=1)


class FrozenParts:
    """The frozen parts of a training state, from save to save, on one rank.

    Args:
        frozen: whether parameters that require no gradient are frozen; or patterns of the keys of
            what is frozen besides.
        unchanged: "detect" to look for unchanged tensors among all others, too.
        periods: of verifying, and of copies.
        rank: of this process.
        latest: finds the checkpoint to begin with, if there is one.
        direct: whether verifying bypasses the page cache.
        engine: the memory and threads to use; by default those that everyone shares.
        watches: whether the kernel is asked what was written, instead of hashing it.

    Raises:
        ImportError: xxhash is not installed.
        TypeError, ValueError: an argument is of the wrong type, or out of range.
    """

    def __init__(
        self,
        frozen: bool | str | Sequence[str],
        unchanged: Literal["write", "detect"],
        periods: Periods,
        rank: int,
        latest: Callable[[], CheckpointInfo | None],
        direct: Direct,
        engine: Engine | None,
        *,
        watches: bool = True,
    ) -> None:
        if unchanged not in ("write", "detect"):
            raise ValueError(f"{unchanged = } must be 'write' or 'detect'.")
        self._parameters, patterns = _patterns_of(frozen)
        self._matching = {one: re.compile(fnmatch.translate(one)).match for one in patterns}
        # Patterns that have matched no key so far, until the first save is over.
        self._idle = set(patterns)
        self._named: dict[str, bool] = {}
        self._detects = unchanged == "detect"
        self._rank = rank
        self._latest = latest
        self._has_begun = False
        self._state: Frozen | None = None
        if self._parameters or patterns or self._detects:
            check = partial(verify_items, direct=direct, engine=engine)
            self._state = Frozen(
                check,
                verify_every=periods.verify_linked_every,
                fresh_every=periods.fresh_copy_every,
                room=partial(_room, engine),
                watches=watches,
            )

    def begin(
        self, tree: Mapping[str, Any], parameters: Iterable[torch.Tensor]
    ) -> FrozenSave | None:
        """A save of a state begins; None if nothing may be frozen.

        Args:
            tree: the live tensors.
            parameters: of the modules in it.
        """
        if self._state is None:
            return None
        if not self._has_begun:
            self._has_begun = True
            self._adopt(self._state)
        frozen = set()
        if self._parameters:
            frozen = {_place_of(one) for one in parameters if not one.requires_grad} - {None}
        declared = {
            key
            for key, tensor in _tensors(tree)
            if self._matches(key) or (frozen and _place_of(tensor) in frozen)
        }
        if self._idle:
            _logger.warning(
                "frozen: %s match no key of a tensor in this rank's state; `pyckpt inspect` lists "
                "the keys of a checkpoint",
                ", ".join(map(repr, sorted(self._idle))),
            )
            self._idle = set()
        return self._state.begin(declared, detects=self._detects)

    def _matches(self, key: str) -> bool:
        known = self._named.get(key)
        if known is None:
            found = {one for one, match in self._matching.items() if match(key)}
            self._idle -= found
            known = self._named[key] = bool(found)
        return known

    def _adopt(self, state: Frozen) -> None:
        """Begin with what an earlier job has written."""
        try:
            latest = self._latest()
            if latest is not None:
                state.adopt(latest.path, frozen_items(latest.path, self._rank))
        except (OSError, PyckptError) as error:
            _logger.warning("the frozen parts of earlier checkpoints are written anew: %s", error)

    def committed(self, directory: Path, save: FrozenSave) -> None:
        """A save was committed."""
        if self._state is not None:
            self._state.committed(directory, save)

    def verify(self, after: FrozenSave) -> None:
        """Read what the next saves could otherwise link only after reading it. Called by the thread
        that saves, when a save is over."""
        for path, error in () if self._state is None else self._state.verify_next(after):
            if isinstance(error, CorruptCheckpoint):
                _logger.error(
                    "%s is damaged, and so is each checkpoint that has it. The next save writes "
                    "its frozen parts anew; `pyckpt verify` names the checkpoints: %s",
                    path,
                    error,
                )
            else:
                _logger.warning(
                    "%s could not be read; verified again before the next link: %s", path, error
                )

    def close(self) -> None:
        """Verify and watch nothing more."""
        if self._state is not None:
            self._state.close()


def _patterns_of(frozen: Any) -> tuple[bool, Sequence[str]]:
    """Whether there may be frozen parts, and the patterns of keys."""
    if isinstance(frozen, bool):
        return frozen, ()
    patterns = ((frozen,) if frozen else ()) if isinstance(frozen, str) else frozen
    if not isinstance(patterns, Iterable) or not all(isinstance(one, str) for one in patterns):
        raise TypeError(f"frozen must be True, or patterns of keys, not {frozen!r}.")
    patterns = tuple(patterns)
    return bool(patterns), patterns


def _room(engine: Engine | None) -> int:
    """How many bytes the memory of an engine has left."""
    native = (default_engine() if engine is None else engine).native
    return native.arena_max_bytes - native.arena_used_bytes


def _tensors(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state dict under the keys that DCP gives them."""
    if isinstance(tree, torch.Tensor):
        yield ".".join(path), tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, (*path, str(key)))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from _tensors(value, (*path, str(i)))


def _place_of(tensor: torch.Tensor) -> tuple[int, int, torch.dtype] | None:
    """Where a tensor's memory is. A state dict has the memory of the parameters."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if local.layout is not torch.strided or local.is_meta or not local.numel():
        return None
    try:
        return local.data_ptr(), local.numel(), local.dtype
    except RuntimeError:  # a tensor of a class of its own, which has no memory
        return None
