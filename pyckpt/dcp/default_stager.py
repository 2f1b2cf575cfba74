"""The stagers of writers that were given none: one for each engine."""

from __future__ import annotations

import weakref

from pyckpt import _C
from pyckpt.dcp.stager import PinnedStager
from pyckpt.engine import Engine, default_engine
from pyckpt.errors import EngineClosed
from pyckpt.locks import fork_safe_lock

__all__ = ["default_stager"]


class _SharedStager(PinnedStager):
    """The stager that writers share if they were given none. It knows of no optimizers and does not
    keep its engine alive. It keeps no failures, since the next save may be another writer's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._shared_engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        engine = self._shared_engine()
        if engine is None:
            raise EngineClosed("the engine that this stager copied with is gone")
        return engine

    def keep_failure(self, error: BaseException) -> None:
        pass


_shared_lock = fork_safe_lock()
# Keyed by the native half, since engines of equal settings are equal, but not the same.
_shared: weakref.WeakKeyDictionary[_C.Engine, PinnedStager] = weakref.WeakKeyDictionary()


def default_stager(engine: Engine | None) -> PinnedStager:
    """The stager of writers that were not given one; one for each engine."""
    engine = default_engine() if engine is None else engine
    with _shared_lock:
        stager = _shared.get(engine.native)
        if stager is None:
            stager = _shared[engine.native] = _SharedStager(engine)
        return stager
