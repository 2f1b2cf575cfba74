"""torch's own reports of synchronisations: its GPU trace.

torch calls back before it waits for a stream, a device or an event, in any thread, from the places
where it calls ``cudaStreamSynchronize`` and similar functions. These names of torch are private,
and only this module uses them. Neither the trace nor a callback can be removed. So both are set up
once, at the first use, and a callback without listeners does nothing. From then on torch also calls
into Python when it creates events and streams and allocates memory, where nothing is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from pyckpt.locks import fork_safe_lock

SyncKind = Literal["stream_sync", "device_sync", "event_sync"]
Listener = Callable[[SyncKind], None]

_lock = fork_safe_lock()
_listeners: tuple[Listener, ...] = ()
_available: bool | None = None


def listen(listener: Listener) -> bool:
    """Call ``listener`` before each synchronisation of any thread, in that thread, until `ignore`.

    Returns whether this torch has such reports. Initialises no device.
    """
    global _listeners, _available
    with _lock:
        if _available is None:
            _available = _set_up()
        _listeners = (*_listeners, listener)
        return _available


def ignore(listener: Listener) -> None:
    """Undo `listen`."""
    global _listeners
    with _lock:
        remaining = list(_listeners)
        remaining.remove(listener)
        _listeners = tuple(remaining)


def _fire(kind: SyncKind) -> None:
    for listener in _listeners:
        listener(kind)


def _set_up() -> bool:
    try:
        from torch.cuda import _gpu_trace

        activate = torch._C._activate_gpu_trace
        on_stream = _gpu_trace.register_callback_for_stream_synchronization
        on_device = _gpu_trace.register_callback_for_device_synchronization
        on_event = _gpu_trace.register_callback_for_event_synchronization
    except (ImportError, AttributeError):
        return False
    on_stream(lambda stream: _fire("stream_sync"))
    on_device(lambda: _fire("device_sync"))
    on_event(lambda event: _fire("event_sync"))
    activate()
    return True
