"""Addresses, and the stores that they name."""

from __future__ import annotations

import subprocess
import sys

import pytest

_TWO_THREADS = '''
import sys
import threading
from importlib.machinery import PathFinder

from pyckpt.remote.address import open_store

assert "obstore" not in sys.modules
errors = []

def second():
    try:
        open_store("memory:///b")
    except BaseException as error:
        errors.append(error)

thread = threading.Thread(target=second)

def waits(thread):
    """Whether it waits for a module that another thread imports."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != "_lock_unlock_module":
        frame = frame.f_back
    return frame is not None

class Loader:  # of obstore's extension, which loads it when the second thread was there
    def __init__(self, loader):
        self.exec_module = loader.exec_module
        self._create = loader.create_module

    def create_module(self, spec):
        thread.start()
        while thread.is_alive() and not waits(thread):
            thread.join(0.01)
        return self._create(spec)

class Finder:
    def find_spec(self, name, path, target=None):
        if name != "obstore._obstore":
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = Loader(spec.loader)
        return spec

sys.meta_path.insert(0, Finder())
import obstore
assert thread.ident is not None
thread.join()
assert not errors, errors
'''


@pytest.mark.slow
def test_a_store_is_opened_while_another_thread_imports_obstore() -> None:
    pytest.importorskip("obstore")
    done = subprocess.run([sys.executable, "-c", _TWO_THREADS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
