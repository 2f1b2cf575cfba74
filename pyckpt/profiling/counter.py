"""`count_syncs`: combines torch's GPU trace with the operators of a thread."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Literal

from pyckpt.profiling import stack, trace
from pyckpt.profiling.counts import Direction, HostMemory, Kind, SyncCounts, ThreadCounts
from pyckpt.profiling.operators import OperatorMode

__all__ = ["SyncCounter", "count_syncs"]

Threads = Literal["all", "current"]


def count_syncs(
    *, stacks: bool = False, threads: Threads = "all", operators: bool = True
) -> SyncCounter:
    """Count how often, and why, the host waits for the device in a ``with`` block::

        with count_syncs(stacks=True) as counts:
            optimizer.step()
        print(counts.total, counts.items, counts.stacks)

    Two sources are combined. Torch's GPU trace reports each stream, device and event
    synchronisation of torch exactly, of every thread, on a real device. The operators that this
    thread dispatches show ``.item()`` and copies between host and device, with their bytes. Fake
    tensors dispatch them as well, so a test of how often code *would* wait needs no GPU.

    Neither source sees synchronisations of libraries that call CUDA themselves (such as NCCL,
    pyckpt's own engine and torch's allocators), nor waits inside the driver (``cudaMalloc``,
    non-blocking copies of pageable memory). The operators do not show those of other threads, of
    compiled code, and copies inside an operator or before the dispatcher
    (``torch.tensor(..., device="cuda")``). The trace does report the synchronisations of these.
    `pyckpt.profiling.nsys` sees them all.

    Counters nest, and any number may be open. Counting does not initialise CUDA.

    Args:
        stacks: keep the Python stack of the first wait of each kind.
        threads: ``"all"``, or ``"current"`` for the thread that enters the block alone. A backward
            pass on a GPU runs in a thread of autograd.
        operators: ``False`` counts synchronisations alone. Watching operators costs some
            microseconds for each.

    Raises:
        ValueError: ``threads`` is neither.
    """
    return SyncCounter(stacks=stacks, threads=threads, operators=operators)


class SyncCounter:
    """The context manager that `count_syncs` returns. It can be used once."""

    def __init__(self, *, stacks: bool, threads: Threads, operators: bool) -> None:
        if threads not in ("all", "current"):
            raise ValueError(f"threads must be 'all' or 'current', not {threads!r}")
        self._stacks = stacks
        self._only: int | None = None
        self._threads = threads
        self._mode = OperatorMode(self) if operators else None
        self._counts: SyncCounts | None = None
        self._owner = 0
        self._depth = 0

    def __enter__(self) -> SyncCounts:
        if self._counts is not None:
            raise RuntimeError("this counter was used before; call count_syncs() again")
        self._owner = threading.get_ident()
        self._depth = stack.depth() if self._stacks else 0
        self._only = self._owner if self._threads == "current" else None
        self._counts = SyncCounts(reported=False)
        self._counts.reported = trace.listen(self._synchronised)
        if self._mode is not None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self._counts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, where)  # type: ignore[no-untyped-call]
        trace.ignore(self._synchronised)

    # --- called by the sources ----------------------------------------------------------------

    def _synchronised(self, kind: trace.SyncKind) -> None:
        if self._only is None or self._only == threading.get_ident():
            self._record(kind)

    def item(self, size: int, *, real: bool) -> None:
        counts = self._record("item", unreported=not (real and self._reported))
        counts._add_copy("d2h", "unknown", True, size)

    def copy(
        self, direction: Direction, memory: HostMemory, size: int, *, blocking: bool, real: bool
    ) -> None:
        counts = self._record(
            "blocking_copy" if blocking else "nonblocking_copy",
            unreported=blocking and not (real and self._reported),
        )
        counts._add_copy(direction, memory, blocking, size)

    def data_dependent(self, *, real: bool) -> None:
        self._record("data_dependent", unreported=not (real and self._reported))

    @property
    def _reported(self) -> bool:
        assert self._counts is not None
        return self._counts.reported

    def _record(self, kind: Kind, *, unreported: bool = False) -> ThreadCounts:
        """``unreported``: it is a wait, and the trace does not report it."""
        assert self._counts is not None
        counts = self._counts._of_this_thread()
        counts._events[kind] += 1
        counts._unreported += unreported
        if self._stacks and kind not in self._counts._stacks:
            base = self._depth if threading.get_ident() == self._owner else 0
            self._counts._stacks[kind] = stack.capture(base)
        return counts
