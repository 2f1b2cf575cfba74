"""RngState: the states of each rank's random number generators."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pyckpt.errors import CorruptCheckpoint
from pyckpt.train.state.per_rank import RankState
from pyckpt.train.state.saved import Policy, Rank

__all__ = ["RngState"]


class RngState(RankState):
    """The random number generators of each rank: Python's, NumPy's global one, torch's on the CPU
    and on every CUDA device that is in use.

    On another number of ranks, a rank that existed before keeps its generators. If all ranks saved
    the same state of a generator, a new rank takes that state. Otherwise the new rank's generator
    is seeded from rank 0's state and its own number: it is independent of the others, and the same
    in every run.

    The CUDA device that was current gives its state to the one that is current now. Other devices
    get the state of their number. If CUDA was not in use, its generators stay as they are.
    """

    def _own(self, rank: Rank) -> Any:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
            state["cuda_current"] = torch.cuda.current_device()
        return state

    def _sources(self, saved: int, rank: Rank) -> Sequence[int]:
        return [rank.index] if rank.index < saved else range(saved)

    def _take(self, states: dict[int, Any], saved: int, rank: Rank, policy: Policy) -> None:
        if rank.index < saved:
            state = states[rank.index]
        else:
            state = self._derive([states[i] for i in range(saved)], rank.index)
        for name, value in state.items():
            if name == "python":
                _set_or_seed(random.setstate, random.seed, value)
            elif name == "torch":
                _set_or_seed(torch.set_rng_state, torch.manual_seed, value)
            elif name == "numpy":
                numpy = sys.modules.get("numpy")
                if numpy is not None:
                    _set_or_seed(_set_numpy, _numpy_seed, value)
            elif name == "cuda" and torch.cuda.is_available():
                _set_or_seed(
                    lambda value: _set_cuda(value, state.get("cuda_current", 0)),
                    torch.cuda.manual_seed,
                    value,
                )

    def _derive(self, states: list[dict[str, Any]], index: int) -> dict[str, Any]:
        """For a new rank: the entries that all states have in common, and a `_Seed` for others."""
        derived: dict[str, Any] = {}
        for name, first in states[0].items():
            common = all(_bytes(state.get(name)) == _bytes(first) for state in states[1:])
            # No new rank may repeat the numbers of a rank that was alone.
            derived[name] = first if common and len(states) > 1 else _Seed.of(first, name, index)
        if isinstance(derived.get("cuda_current"), _Seed):
            derived["cuda_current"] = states[0]["cuda_current"]
        return derived


class _Seed(int):
    """Stands in the place of a generator's state."""

    @classmethod
    def of(cls, state: Any, name: str, index: int) -> _Seed:
        digest = hashlib.sha256(_bytes(state) + f"{name} of rank {index}".encode()).digest()
        return cls(int.from_bytes(digest[:8], "little"))


def _set_or_seed(set_state: Any, seed: Any, value: Any) -> None:
    if isinstance(value, _Seed):
        seed(int(value))
    else:
        set_state(value)


def _set_numpy(state: Any) -> None:
    # NumPy accepts any position in its block of numbers, and would read beyond the block. A mapping
    # is the state of a generator that the program has set as the global one.
    if isinstance(state, Mapping):
        inner = state.get("state")
        places = [(inner.get("pos", 0), 624)] if isinstance(inner, Mapping) else []
        places.append((state.get("buffer_pos", 0), 4))
    else:
        places = [(state[2], 624)]
    for at, end in places:
        if not 0 <= at <= end:
            raise CorruptCheckpoint(f"NumPy's generator would be at {at} of {end} numbers")
    sys.modules["numpy"].random.set_state(state)


def _numpy_seed(seed: int) -> None:
    sys.modules["numpy"].random.seed([seed & 0xFFFFFFFF, seed >> 32])


def _set_cuda(states: list[torch.Tensor], current: int) -> None:
    here = torch.cuda.current_device()
    for device, state in enumerate(states):
        if device == current:
            torch.cuda.set_rng_state(state, here)
        elif device != here and device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def _bytes(state: Any) -> bytes:
    if isinstance(state, torch.Tensor):
        return bytes(state.numpy().tobytes())
    if isinstance(state, tuple | list):
        return b"".join(map(_bytes, state))
    if hasattr(state, "tobytes"):
        return bytes(state.tobytes())
    return repr(state).encode()
