"""Saves and loads with the pyckpt that is installed, and checks what it says of itself.

python use_package.py [labelled]     labelled: its version must say what it was built for
"""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp

import pyckpt
from pyckpt import _build


def main() -> None:
    assert pyckpt.__file__.startswith(sys.prefix), pyckpt.__file__
    minor = ".".join(torch.__version__.split(".")[:2])
    requires = importlib.metadata.requires("pyckpt") or []
    assert f"torch=={minor}.*" in requires, requires

    version = importlib.metadata.version("pyckpt")
    kind = f"cu{_build.cuda_version.replace('.', '')}" if _build.cuda_version else "cpu"
    assert pyckpt._C.cuda == (kind != "cpu")
    if "+" in version or sys.argv[1:] == ["labelled"]:
        assert version.partition("+")[2] == f"torch{minor}.{kind}", version

    state = {"weight": torch.arange(1000.0)}
    with tempfile.TemporaryDirectory() as path:
        dcp.save(state, storage_writer=pyckpt.DirectWriter(path), no_dist=True)
        found = {"weight": torch.zeros(1000)}
        pyckpt.load(found, path)
    assert torch.equal(found["weight"], state["weight"])
    print(f"pyckpt {version} works, with torch {torch.__version__}")


main()
