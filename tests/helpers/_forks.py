"""Run a function in a forked child of the test itself."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable

import torch


def status_of_child(body: Callable[[], object]) -> int:
    """Fork, run, and return how the child ended, as ``os.waitpid`` says it; 0 where all went well.
    A child that waits for ever is ended."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.register(signal.SIGALRM, chain=True)  # says where it waits
            signal.alarm(300)
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]
