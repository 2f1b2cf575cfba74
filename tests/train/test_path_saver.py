"""When a checkpoint that a framework no longer wants may go."""

from pathlib import Path

import pytest
import torch

from pyckpt.errors import PyckptError
from pyckpt.train.path_saver import PathSaver, is_checkpoint

STATE = {"weight": torch.ones(10)}


@pytest.fixture
def saver():
    saver = PathSaver()
    yield saver
    saver.abandon()


def fail(saver: PathSaver, path: Path) -> None:
    """A save that fails: its directory is a file."""
    path.write_text("in the way")
    saver.save(path, STATE)


def test_a_removal_waits_for_a_save_that_is_committed(saver, tmp_path):
    saver.save(tmp_path / "a", STATE)
    fail(saver, tmp_path / "b")
    saver.remove(tmp_path / "a")
    with pytest.raises((OSError, PyckptError)):
        saver.wait()
    assert is_checkpoint(tmp_path / "a"), "no other one is valid"

    saver.save(tmp_path / "c", STATE)
    saver.wait()
    assert not (tmp_path / "a").exists()
    assert is_checkpoint(tmp_path / "c")


def test_a_failure_that_was_told_does_not_let_the_last_checkpoint_go(saver, tmp_path, caplog):
    saver.save(tmp_path / "a", STATE)
    fail(saver, tmp_path / "b")
    saver.remove(tmp_path / "a")
    with pytest.raises((OSError, PyckptError)):
        saver.wait()
    saver.close()
    assert is_checkpoint(tmp_path / "a")
    assert "not removed" in caplog.text


def test_a_path_that_is_saved_again_is_not_removed(saver, tmp_path):
    saver.save(tmp_path / "last", STATE)
    fail(saver, tmp_path / "b")
    saver.remove(tmp_path / "last")
    with pytest.raises((OSError, PyckptError)):
        saver.wait()
    saver.save(tmp_path / "last", STATE)
    saver.wait()
    assert is_checkpoint(tmp_path / "last")


def test_without_a_save_a_checkpoint_is_removed_at_once(saver, tmp_path):
    saver.save(tmp_path / "a", STATE)
    saver.wait()
    saver.remove(tmp_path / "a")
    assert not (tmp_path / "a").exists()
