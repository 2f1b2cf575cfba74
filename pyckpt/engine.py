"""The engine: the memory and the threads that writers and readers borrow."""

from __future__ import annotations

import atexit
import operator
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pyckpt import _C
from pyckpt.errors import EngineClosed
from pyckpt.locks import fork_safe_lock
from pyckpt.printable import size_text

__all__ = ["Engine", "abandoned", "configure", "default_engine", "engine_of", "held_bytes"]

_SLOT_GRAIN = _C.page_bytes


@dataclass(frozen=True, kw_only=True, repr=False)
class Engine:
    """Page-aligned memory, and the native threads that move bytes through it.

    The memory has two parts. Bytes stream through a small ring of slots on their way to and from
    the disk. An arena holds the copies that asynchronous saves make of the state. It grows as saves
    need it, within the budget, and is used again by each save.

    Any number of writers and readers may share an engine, from any threads. Saves that overlap
    share its memory and threads. A forked child cannot use its parent's engine. An engine that is
    pickled becomes another one of the same settings.

    Args:
        max_pinned_bytes: bytes of ring and arena together, at most. If an asynchronous save finds
            no room for a tensor, it writes the tensor in place, and the program waits for that. The
            default is a quarter of the memory that the process may use, divided by
            ``LOCAL_WORLD_SIZE`` if that is set. No memory is allocated before it is needed.
        slot_bytes: bytes of one slot, and of one read or write; a multiple of 4096.
        io_threads: the number of threads that copy, checksum, read and write. The disk has as many
            requests at a time.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is out of range.
    """

    max_pinned_bytes: int | None = None
    slot_bytes: int = 2 << 20
    io_threads: int = 8

    def __post_init__(self) -> None:
        for name, kind in _SETTINGS.items():
            value = getattr(self, name)
            if value is not None or name != "max_pinned_bytes":
                object.__setattr__(self, name, _int_of(value, name, kind))
        if self.slot_bytes <= 0 or self.slot_bytes % _SLOT_GRAIN:
            raise ValueError(
                f"slot_bytes = {self.slot_bytes!r} must be a positive multiple of {_SLOT_GRAIN}."
            )
        if self.io_threads <= 0:
            raise ValueError(f"io_threads = {self.io_threads!r} must be positive.")
        budget = self.max_pinned_bytes
        if budget is None:
            budget = max(_share_of_memory(), self.slot_bytes * self.io_threads)
        if budget < self.slot_bytes:
            raise ValueError(
                f"max_pinned_bytes = {self.max_pinned_bytes!r} must hold a slot, of "
                f"{self.slot_bytes} bytes."
            )
        # A thread works on one slot at a time. The spare slots are being copied to a GPU. Copying a
        # slot of 2 MiB takes less than a tenth of the time of reading it.
        spare = max(2, self.io_threads // 2)
        slots = min(self.io_threads + spare, budget // self.slot_bytes)
        native = _C.Engine(
            slot_bytes=self.slot_bytes,
            slots=slots,
            io_threads=self.io_threads,
            arena_bytes=budget - slots * self.slot_bytes,
        )
        object.__setattr__(self, "_native", native)

    def __repr__(self) -> str:
        held, most = self.native.arena_held_bytes, self.native.arena_max_bytes
        return (
            f"<Engine: {self.io_threads} threads, slots of {size_text(self.slot_bytes)}, "
            f"{size_text(held)} held for copies, of {size_text(most)} at most"
            f"{', closed' if self.closed else ''}>"
        )

    @property
    def native(self) -> _C.Engine:
        """The engine's C++ half, for the adapters of this package."""
        native: _C.Engine = self.__dict__["_native"]
        return native

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.native.closed

    def close(self) -> None:
        """End the threads. Saves and loads that are under way fail with ``EngineClosed``, and the
        memory is freed when the last of them has ended. Idempotent."""
        self.native.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot use this memory and these threads, and makes its own.
        return _engine_of, (self.max_pinned_bytes, self.slot_bytes, self.io_threads)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


_SETTINGS = {
    "max_pinned_bytes": "bytes as an int",
    "slot_bytes": "bytes as an int",
    "io_threads": "an int",
}


def _int_of(value: Any, name: str, kind: str) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be {kind}, not {value!r}.")


def engine_of(engine: Engine | None) -> Engine | None:
    """An engine that a program passed; None for the default one.

    Raises:
        TypeError: it is neither.
    """
    if engine is not None and not isinstance(engine, Engine):
        raise TypeError(
            f"engine must be a pyckpt.Engine, or None for the default one, not {engine!r}."
        )
    return engine


def _engine_of(max_pinned_bytes: int | None, slot_bytes: int, io_threads: int) -> Engine:
    return Engine(max_pinned_bytes=max_pinned_bytes, slot_bytes=slot_bytes, io_threads=io_threads)


def _share_of_memory() -> int:
    """A quarter of this process's share of the memory, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    # A container's limit: cgroups version 2, and 1.
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text()))
    with suppress(ValueError):
        return min(limits) // 4 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return min(limits) // 4


_lock = fork_safe_lock()
_default: Engine | None = None
# Engines of the parent that a forked child inherited, kept because the child cannot free them.
_inherited: list[Engine] = []


def default_engine() -> Engine:
    """The engine of all callers that were given none. Made on first use, closed at exit."""
    global _default
    with _lock:
        if _abandoned:
            raise EngineClosed("the program has ended, and was not to wait for its saves")
        if _default is None or _default.closed:
            _default = Engine()
        return _default


def held_bytes(engine: Engine | None) -> int:
    """Bytes that an engine, by default the default one, holds for copies of states. Makes no
    engine."""
    engine = _default if engine is None else engine
    return 0 if engine is None else engine.native.arena_held_bytes


def configure(
    *,
    max_pinned_bytes: int | None = None,
    slot_bytes: int | None = None,
    io_threads: int | None = None,
    at_exit: Literal["finish", "abandon"] = "finish",
) -> Engine:
    """Replace the default engine by one of these settings (see ``Engine``) and return it.

    A setting that is left out has its default. The previous default engine is closed, and saves
    that are under way on it fail, so call this before the first save.

    Args:
        at_exit: what happens to asynchronous saves that are under way when the program ends. With
            ``"finish"`` Python waits for them. With ``"abandon"`` they are given up, each with an
            error in the log, and the checkpoint before them stays.

    Raises:
        TypeError, ValueError: as `Engine`.
    """
    if at_exit not in ("finish", "abandon"):
        raise ValueError(f"{at_exit = } must be 'finish' or 'abandon'.")
    settings = {
        "max_pinned_bytes": max_pinned_bytes,
        "slot_bytes": slot_bytes,
        "io_threads": io_threads,
    }
    engine = Engine(**{name: value for name, value in settings.items() if value is not None})
    global _default, _at_exit
    with _lock:
        before, _default = _default, engine
        _at_exit = at_exit
    if before is not None:
        before.close()
    return engine


_at_exit: Literal["finish", "abandon"] = "finish"


_abandoned = False  # the interpreter is shutting down, so no more engines are made


def abandoned() -> bool:
    """Whether saves fail because the program has ended under ``at_exit="abandon"``."""
    return _abandoned


def _abandon() -> None:
    global _abandoned
    if _at_exit == "abandon":
        _abandoned = True
        if _default is not None:
            _default.close()


def _close_default() -> None:
    if _default is not None:
        _default.close()


def _forget_default() -> None:
    global _default
    if _default is not None:
        _inherited.append(_default)
        _default = None


# At exit the threads must end before the CUDA runtime and the interpreter do.
atexit.register(_close_default)
# Before that, Python waits for the threads of executors, DCP's among them, so saves must be
# abandoned earlier still. Python's hook for that is private. Hooks run in the reverse order of
# registration.
if register := getattr(threading, "_register_atexit", None):
    import_module("concurrent.futures.thread")  # registers its own
    register(_abandon)
os.register_at_fork(after_in_child=_forget_default)
