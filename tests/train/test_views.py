"""The views of restores on nodes: those that were killed leave them, and others remove them."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from pyckpt.format.flock import trying
from pyckpt.train.nodes import reading


@pytest.mark.parametrize("has_locks", [True, False])
def test_only_a_view_that_nobody_holds_is_removed(tmp_path: Path, monkeypatch, has_locks) -> None:
    for name in ("view-live", "view-stale", "view-begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "view-stale.lock").touch()
    descriptor = os.open(tmp_path / "view-live.lock", os.O_RDWR | os.O_CREAT)

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", unsupported)
    with trying(descriptor) as mine:
        assert mine
        reading._remove_stale(tmp_path)
    os.close(descriptor)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"view-live", "view-begun", *(() if has_locks else ("view-stale",))}
